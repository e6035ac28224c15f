"""The kernels under the signatures of `jax.nn`, `jax.lax` and Flax.

    from pallas_bridge import nn
    o = nn.dot_product_attention(q, k, v, is_causal=True)

`explain_attention` says who runs a call and why.
"""

from ._src.fp8_linear import fp8_dot_general
from ._src.nn.attention import dot_product_attention, explain_attention
from ._src.nn.flax import flax_attention_fn
from ._src.nn.functions import gelu, layer_norm, rms_norm, silu, swiglu
from ._src.nn.masks import AttentionMask, CausalMask, SegmentMask, WindowMask

__all__ = [
    "AttentionMask",
    "CausalMask",
    "SegmentMask",
    "WindowMask",
    "dot_product_attention",
    "explain_attention",
    "flax_attention_fn",
    "fp8_dot_general",
    "gelu",
    "layer_norm",
    "rms_norm",
    "silu",
    "swiglu",
]
