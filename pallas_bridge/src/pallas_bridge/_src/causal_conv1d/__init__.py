"""Causal depthwise convolution."""

from ..operation import Operation

OPERATION = Operation("causal_conv1d", target="xentile_causal_conv1d_forward", falls_back=True)
