"""What RMSNorm and LayerNorm are to the rest of the package."""

from ..operation import Operation

RMS_NORM = Operation("rms_norm", target="xentile_rms_norm_forward", falls_back=True)
LAYER_NORM = Operation("layer_norm", target="xentile_layer_norm_forward", falls_back=True)
