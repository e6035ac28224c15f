"""What LayerNorm is to the rest of the package."""

from ..operation import Operation

OPERATION = Operation("layer_norm", target="xentile_layer_norm_forward", falls_back=True)
