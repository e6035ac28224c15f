"""What one device of a mesh holds for a program of arrays that are sharded over the mesh."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .arrays import spec_of
from .checks import as_array, check_word
from .meshes import explicit_axes, sharded_over, shown


class DeviceMemory(NamedTuple):
    """Bytes that each device holds for a program, by XLA's memory analysis."""

    arguments: int
    results: int
    temporaries: int

    def __str__(self) -> str:
        """What a plan's text ends with."""
        pairs = self._asdict().items()
        parts = ", ".join(f"{count / 2**20:.1f} of {name}" for name, count in pairs)
        return f"; MiB on each device: {parts}"


def as_shape(name: str, value: Any) -> Any:
    """Returns an argument that is an array, or its shape and dtype."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return value
    return as_array(name, value, "an array, or its shape and dtype")


def is_explicit(mesh: Mesh | None) -> bool:
    """Whether a mesh has several devices and an explicit axis."""
    return mesh is not None and mesh.size > 1 and bool(explicit_axes(mesh))


def find_mesh(**arrays: Any) -> Mesh | None:
    """Returns the mesh that arrays, or their shapes and dtypes, are placed on; None if on none.

    Traced arrays are on none.

    Raises:
        ValueError: only some are placed on a mesh, it has no devices, or the devices do not divide
            an axis.
    """
    if any(isinstance(array, jax.core.Tracer) for array in arrays.values()):
        return None
    shardings = {name: getattr(array, "sharding", None) for name, array in arrays.items()}
    named = {name: one for name, one in shardings.items() if isinstance(one, NamedSharding)}
    if not named:
        return None
    first, mesh = next((name, one.mesh) for name, one in named.items())
    if not isinstance(mesh, Mesh):
        raise ValueError(
            f"{first} is placed on {mesh}, which has no devices to compile a program for; it must "
            "be placed on a jax.sharding.Mesh, or have no sharding"
        )
    for name, sharding in shardings.items():
        if name not in named or named[name].mesh != mesh:
            raise ValueError(
                f"{name} has the sharding {sharding}, and {first} is placed on {mesh}; both must "
                "have a NamedSharding on one mesh, with jax.P() where each device holds all"
            )
    for name, array in arrays.items():
        for axis, names in enumerate(sharded_over(array)):
            count = math.prod(mesh.shape[one] for one in names)
            if array.shape[axis] % count:
                raise ValueError(
                    f"{name} has shape {array.shape}, whose axis {axis} is sharded over "
                    f"{shown(names)}; the {count} devices must divide it: pad it to "
                    f"{-(-array.shape[axis] // count) * count}"
                )
    return mesh


def find_platform(mesh: Mesh | None, platform: str | None, words: Iterable[str]) -> str:
    """Returns "cpu", "cuda" or the kind of a TPU: `platform`, or that of a mesh or of JAX if None.

    Raises:
        ValueError: it is none of `words`, or the mesh has devices of another platform.
    """
    check_word("platform", platform, words, or_none=True)
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    names = {"gpu": "cuda", "tpu": device.device_kind}
    found = names.get(device.platform, "cpu")
    if mesh is not None and platform not in (None, found, device.platform):
        raise ValueError(
            f"platform is {platform!r}, and the arrays are placed on a mesh of {found!r} devices; "
            "leave platform out, or give shapes without a sharding"
        )
    return platform or found


def measure_loss(mesh: Mesh, loss: Callable[..., Any], operands: Sequence[Any]) -> DeviceMemory:
    """Returns the memory of loss(*operands, labels) and its gradients, compiled for a mesh.

    The first operand has a row for each label. Gradients are sharded as operands are. A loss of
    each label has a cotangent of each, an argument.
    """
    first, *_ = operands
    tokens = NamedSharding(mesh, PartitionSpec(*spec_of(first)[:-1]))

    def run(operands: Any, labels: Any, cotangents: Any) -> Any:
        losses, vjp = jax.vjp(lambda *given: loss(*given, labels), *operands)
        return losses, vjp(cotangents if losses.ndim else jnp.ones_like(losses))

    per_token = (
        jax.ShapeDtypeStruct(first.shape[:-1], dtype, sharding=tokens)
        for dtype in (jnp.int32, jnp.float32)
    )
    step = jax.jit(run, out_shardings=(None, jax.tree.map(lambda one: one.sharding, operands)))
    with jax.set_mesh(mesh):
        found: Any = step.lower(operands, *per_token).compile().memory_analysis()
    return DeviceMemory(
        arguments=found.argument_size_in_bytes,
        results=found.output_size_in_bytes,
        temporaries=found.temp_size_in_bytes,
    )
