"""What JAX spells differently from one supported version to another."""

from typing import Any


def varying_axes(aval: Any) -> frozenset[str]:
    """Returns the manual mesh axes, of `shard_map`, that an array of type `aval` varies over."""
    # From 0.12 on they are part of a larger type.
    axes = aval.manual_axis_type.varying if hasattr(aval, "manual_axis_type") else aval.vma
    return frozenset(axes)
