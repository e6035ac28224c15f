"""What FP8 quantisation is to the rest of the package."""

from ..operation import Operation

OPERATION = Operation("fp8_quantize", target="xentile_fp8_quantize", falls_back=True)
