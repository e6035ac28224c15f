"""The operations there are; each is declared in its folder, and named here alone."""

from .activation.declaration import OPERATION as ACTIVATION
from .causal_conv1d import OPERATION as CAUSAL_CONV1D
from .cross_entropy.declaration import OPERATION as CROSS_ENTROPY
from .flash_attention.declaration import OPERATION as FLASH_ATTENTION
from .fp8_quantize.declaration import OPERATION as FP8_QUANTIZE
from .linear_attention import GATED_DELTA_RULE
from .linear_attention import OPERATION as LINEAR_ATTENTION
from .linear_cross_entropy.declaration import OPERATION as LINEAR_CROSS_ENTROPY
from .norm.declaration import LAYER_NORM, RMS_NORM
from .operation import Operation
from .optimizers.declaration import ADAMW, ADAMW_8BIT, LION_8BIT, MUON
from .rms_norm_fp8.declaration import OPERATION as RMS_NORM_FP8
from .rope.declaration import OPERATION as ROPE
from .swiglu_fp8.declaration import OPERATION as SWIGLU_FP8

OPERATIONS: tuple[Operation, ...] = (
    CROSS_ENTROPY,
    LINEAR_CROSS_ENTROPY,
    ACTIVATION,
    RMS_NORM,
    LAYER_NORM,
    ROPE,
    FLASH_ATTENTION,
    CAUSAL_CONV1D,
    LINEAR_ATTENTION,
    GATED_DELTA_RULE,
    FP8_QUANTIZE,
    SWIGLU_FP8,
    RMS_NORM_FP8,
    ADAMW,
    ADAMW_8BIT,
    LION_8BIT,
    MUON,
)
