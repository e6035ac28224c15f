"""What cross-entropy is to the rest of the package."""

from ..operation import Operation

OPERATION = Operation(
    "cross_entropy",
    target="xentile_cross_entropy_fused",
    implementations=("reference", "custom_call", "pallas"),
)
