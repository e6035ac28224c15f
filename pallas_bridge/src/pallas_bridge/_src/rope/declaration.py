"""What rotary position embedding is to the rest of the package."""

from ..operation import Operation

OPERATION = Operation(
    "rope",
    target="xentile_rope",
    falls_back=True,
    variants=("halves", "interleaved"),
)
