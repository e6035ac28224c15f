"""What RMSNorm in FP8 is to the rest of the package."""

from ..operation import Operation

# The kernels of what it is made of are in the same libraries; a fused one is in some.
OPERATION = Operation("rms_norm_fp8", target="xentile_fp8_quantize", falls_back=True)
