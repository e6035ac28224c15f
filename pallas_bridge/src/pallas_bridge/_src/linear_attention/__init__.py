"""Linear attention and the gated delta rule."""

from dataclasses import replace

from ..operation import Operation

OPERATION = Operation(
    "linear_attention",
    target="xentile_linear_attention_forward",
    falls_back=True,
    notes=(("cuda", "XLA's own program but for bfloat16 and 64 or 128 columns"),),
)
# One implementation, whose results have the name of the other for `jax.checkpoint`.
GATED_DELTA_RULE = replace(OPERATION, name="gated_delta_rule")
