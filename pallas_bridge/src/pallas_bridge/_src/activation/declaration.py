"""What activations are to the rest of the package."""

from ..operation import Operation

# Of docs/internals/activation.md, which has the figures.
OPERATION = Operation(
    "activation",
    target="xentile_activation_forward",
    falls_back=True,
    notes=(
        ("cpu", "of gate and up in two arrays XLA's own program"),
        (
            "cuda",
            "for GELU alone; for other functions, and of two arrays, XLA's own program",
        ),
    ),
)
