"""What JAX spells differently from one supported version to another."""

import dataclasses
from typing import Any

from jax.sharding import AbstractDevice, AbstractMesh


def varying_axes(aval: Any) -> frozenset[str]:
    """Returns the manual mesh axes, of `shard_map`, that an array of type `aval` varies over."""
    # From 0.12 on they are part of a larger type.
    axes = aval.manual_axis_type.varying if hasattr(aval, "manual_axis_type") else aval.vma
    return frozenset(axes)


def abstract_tpu(kind: str | None) -> AbstractMesh:
    """Returns a mesh of one TPU core, of a `kind` as JAX names it, that need not be there."""
    if kind is None:
        return AbstractMesh((), ())
    fields = {field.name for field in dataclasses.fields(AbstractDevice)}
    # From 0.10 on a device has a platform too.
    more: Any = {"platform": "tpu"} if "platform" in fields else {}
    device = AbstractDevice(device_kind=kind, num_cores=1, **more)
    return AbstractMesh((1,), ("core",), abstract_device=device)
