"""What attention is to the rest of the package."""

from ..operation import Operation

# Of docs/internals/flash-attention.md, which has the figures.
OPERATION = Operation(
    "flash_attention",
    target="xentile_flash_attention_forward",
    implementations=("reference", "custom_call", "pallas"),
    falls_back=True,
    notes=(
        (
            "cuda",
            "cuDNN's, by jax.nn.dot_product_attention, of bfloat16 and float16 where it has the "
            "options",
        ),
        ("tpu", "JAX's splash attention; for options that it lacks XLA's own program"),
    ),
    without=(
        (
            "cuda",
            "cuDNN's, by jax.nn.dot_product_attention, of bfloat16 and float16 where it has the "
            "options; for others XLA's own program",
        ),
    ),
)
