"""What linear cross-entropy is to the rest of the package."""

from ..operation import Operation

OPERATION = Operation(
    "linear_cross_entropy",
    # Where the library has no linear calls, chunks of logits go through those of cross-entropy.
    target="xentile_cross_entropy_fused",
    implementations=("reference", "custom_call", "pallas"),
)
