"""What RMSNorm is to the rest of the package."""

from ..operation import Operation

OPERATION = Operation("rms_norm", target="xentile_rms_norm_forward", falls_back=True)
