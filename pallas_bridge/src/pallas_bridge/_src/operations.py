"""The operations there are; each is declared in its folder, and named here alone."""

from .cross_entropy.declaration import OPERATION as CROSS_ENTROPY
from .linear_cross_entropy.declaration import OPERATION as LINEAR_CROSS_ENTROPY
from .operation import Operation
from .rms_norm.declaration import OPERATION as RMS_NORM

OPERATIONS: tuple[Operation, ...] = (CROSS_ENTROPY, LINEAR_CROSS_ENTROPY, RMS_NORM)
