"""Meshes and shardings that are known while a program is traced, and axis names of users."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from .arrays import spec_of
from .compat import varying_axes, without_varying

# The mesh axes that shard an axis of an array, the slowest first.
Names = tuple[str, ...]


def names_of(axis_name: Any) -> Names:
    """Returns the names in a user's `axis_name`: none, one, or several.

    Raises:
        TypeError: a name is not a string.
        ValueError: a name appears twice.
    """
    names = () if axis_name is None else axis_name
    names = (names,) if isinstance(names, str) else names
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"axis_name is {axis_name!r}; it must be a name, several, or None")
    if len({*names}) < len(names):
        raise ValueError(f"axis_name is {axis_name!r}; it must have each name once")
    return tuple(names)


def are_of_devices(names: Names) -> bool:
    """Whether the named axes are manual, as within `jax.shard_map`, so that arrays are shards.

    Raises:
        ValueError: an axis is one that `jax.vmap` maps.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    for name in names:
        if name not in manual and _is_bound(name):
            raise ValueError(
                f"axis_name is {shown(names)}, and {name!r} an axis of jax.vmap; it must be of a "
                "mesh: call within jax.shard_map"
            )
    return bool(names) and {*names} <= {*manual}


def names_of_devices(axis_name: Any) -> Names:
    """Returns the names in a user's `axis_name`, of a function that takes manual axes alone.

    Raises:
        TypeError: a name is not a string.
        ValueError: an axis is not a manual one.
    """
    names = names_of(axis_name)
    if names and not are_of_devices(names):
        raise ValueError(
            f"axis_name is {shown(names)}; it must be of a mesh: call within jax.shard_map over it"
        )
    return names


def _is_bound(name: str) -> bool:
    try:
        jax.lax.axis_size(name)
    except NameError:
        return False
    return True


def mesh_of(*arrays: Any) -> Any:
    """Returns the mesh that is set, otherwise the mesh of an array, or None."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        return mesh
    for array in arrays:
        of = array if not isinstance(array, jax.core.Tracer) else jax.typeof(array)
        sharding = getattr(of, "sharding", None)
        if isinstance(sharding, NamedSharding) and not sharding.mesh.empty:
            return sharding.mesh
    return None


def mark_replicated(names: Names, x: jax.Array) -> jax.Array:
    """Returns `x` with a type that does not vary over axes of one device.

    `jax.lax.psum` does this too, but XLA keeps its all-reduce even for one device.
    """
    axes = varying_axes(jax.typeof(x)) & {*names}
    same: jax.Array = _mark_replicated.bind(x, axes=tuple(sorted(axes))) if axes else x
    return same


_mark_replicated = Primitive("xentile_mark_replicated")
_mark_replicated.def_impl(lambda x, **_: x)
_mark_replicated.def_abstract_eval(lambda x, *, axes: without_varying(x, frozenset(axes)))
mlir.register_lowering(_mark_replicated, lambda _, x, **__: [x])
ad.deflinear2(
    _mark_replicated, lambda cotangent, _, *, axes: [jax.lax.pcast(cotangent, axes, to="varying")]
)
batching.primitive_batchers[_mark_replicated] = lambda operands, axes, **params: (
    _mark_replicated.bind(*operands, **params),
    axes[0],
)


def sum_wide(over: Names, x: jax.Array) -> jax.Array:
    """Returns the sum over devices along mesh axes `over`, in float32, rounded last."""
    return jax.lax.psum(x.astype(jnp.float32), over).astype(x.dtype) if over else x


def mean(x: jax.Array, over: Names) -> jax.Array:
    """Returns the mean along the last axis, kept; mesh axes `over` shard the axis evenly."""
    of_own: jax.Array = x.mean(-1, keepdims=True)
    return jax.lax.pmean(of_own, over) if over else of_own


def check_whole(operation: object, name: str, array: Any, **axes: int) -> None:
    """Checks that explicit mesh axes shard no axis that every device needs whole.

    `axes` maps descriptions of such axes to their indices.

    Raises:
        ValueError: one of them is sharded.
    """
    found = sharded_over(array)
    for what, axis in axes.items():
        if found[axis]:
            whole = [*found]
            for one in axes.values():
                whole[one] = ()
            raise ValueError(
                f"{operation}: axis {axis % len(found)} of {name}, its {what}, is sharded over "
                f"{shown(found[axis])}; it must be whole: call jax.sharding.reshard({name}, "
                f"jax.{spec_of_names(whole)}) first"
            )


def explicit_axes(mesh: Any) -> frozenset[str]:
    """Returns the explicit axes of a mesh."""
    return _axes(mesh, AxisType.Explicit)


def _axes(mesh: Any, kind: AxisType) -> frozenset[str]:
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, one in pairs if one == kind)


def are_left_to_xla(*arrays: Any) -> bool:
    """Whether arrays are traced and lie on a mesh of several devices and automatic axes only."""
    mesh = mesh_of(*arrays)
    is_traced = any(isinstance(array, jax.core.Tracer) for array in arrays)
    is_several = mesh is not None and mesh.size > 1 and _has_devices(mesh)
    return is_traced and is_several and all(one == AxisType.Auto for one in mesh.axis_types)


def is_without_devices(*arrays: Any) -> bool:
    """Whether arrays are on a mesh without devices."""
    mesh = mesh_of(*arrays)
    return mesh is not None and not _has_devices(mesh)


def _has_devices(mesh: Any) -> bool:
    """Whether a mesh has devices, unlike an `AbstractMesh` that a user makes.

    JAX refuses programs on a mesh without devices if their lowering asks for devices.
    """
    return isinstance(mesh, Mesh) or mesh.abstract_device is not None


def may_be_left_to_xla(*arrays: Any) -> bool:
    """Whether XLA may choose the sharding of arrays: also if no mesh is known."""
    mesh = mesh_of(*arrays)
    return mesh is None or (_has_devices(mesh) and bool(_axes(mesh, AxisType.Auto)))


def with_whole_axis(x: jax.Array, axis: int, *others: Any) -> jax.Array:
    """Returns `x` with an unsharded `axis`, so that XLA gathers it once, before all uses.

    `others` are arrays to take the mesh from if none is set and `x` has none.
    """
    mesh = mesh_of(x, *others)
    of_explicit = sharded_over(x)
    if of_explicit[axis]:
        of_explicit[axis] = ()
        placed: jax.Array = jax.sharding.reshard(x, PartitionSpec(*map(entry, of_explicit)))
        return placed
    if mesh is None or not _axes(mesh, AxisType.Auto) or not isinstance(x, jax.core.Tracer):
        return x
    spec: list[Any] = [PartitionSpec.UNCONSTRAINED] * x.ndim
    spec[axis] = None
    whole: jax.Array = _constrained(NamedSharding(mesh, PartitionSpec(*spec)), x)
    return whole


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _constrained(sharding: NamedSharding, x: jax.Array) -> jax.Array:
    """Returns x with a sharding constraint, which its gradient does not have."""
    if not isinstance(x, jax.core.Tracer):
        return x  # only its gradient is traced
    constrained: jax.Array = jax.lax.with_sharding_constraint(x, sharding)
    return constrained


@_constrained.defjvp
def _constrained_jvp(sharding: NamedSharding, primals: Any, tangents: Any) -> tuple[Any, Any]:
    return _constrained(sharding, *primals), *tangents


def place(mesh: Any, spec: PartitionSpec, x: jax.Array) -> jax.Array:
    """Returns an array sharded as `spec` says, where its axes are explicit ones."""
    if not explicit_axes(mesh) or [*map(entry, sharded_over(x))] == [*spec]:
        return x
    placed: jax.Array = jax.sharding.reshard(x, NamedSharding(mesh, spec))
    return placed


def on_devices(
    mesh: Any,
    axes: frozenset[str],
    function: Callable[..., Any],
    given: Any,
    found: Any,
    *,
    is_checked: bool = True,
) -> Callable[..., Any]:
    """Returns a function of arrays that each device along axes of a mesh runs on what it has.

    Over others XLA shards what it did. `is_checked` is whether JAX keeps track of what varies from
    device to device.
    """
    mapped: Callable[..., Any] = jax.shard_map(
        function,
        mesh=None if mesh == jax.sharding.get_abstract_mesh() else mesh,
        in_specs=given,
        out_specs=found,
        axis_names=axes,
        check_vma=is_checked,
    )
    return mapped


def sharded_over(array: Any) -> list[Names]:
    """Returns the explicit mesh axes that shard each axis of an array, all of them of no tracer.

    What XLA is to choose is not known.
    """
    # The type of what is no tracer has explicit axes alone.
    of = array if not isinstance(array, jax.core.Tracer) else jax.typeof(array)
    return [*map(tuple_of, spec_of(of))]


def spec_of_names(shardings: Sequence[Names]) -> PartitionSpec:
    """Returns the sharding of an array by the mesh axes that shard each of its axes."""
    return PartitionSpec(*map(entry, shardings))


def entry(names: Names) -> Any:
    """Returns what stands for these axes in a `PartitionSpec`."""
    return None if not names else names[0] if len(names) == 1 else names


def in_order(mesh: Any, names: Names) -> Names:
    """Returns axes of a mesh in the order that it has them in."""
    return tuple(name for name in mesh.axis_names if name in names)


def tuple_of(entry: Any) -> Names:
    """Returns the axes of an entry of a `PartitionSpec`."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def with_axes(names: Names, *arrays: Any) -> Any:
    """Returns the mesh that has these axes.

    Raises:
        ValueError: there is none.
    """
    mesh = mesh_of(*arrays)
    if mesh is None:
        raise ValueError(
            f"axis_name is {shown(names)}, which is no axis here, and there is no mesh: call "
            "within jax.shard_map over a mesh that has it, or set one by jax.set_mesh"
        )
    missing = [name for name in names if name not in mesh.axis_names]
    if missing:
        raise ValueError(
            f"axis_name is {shown(names)}; it must be of the mesh's axes, which are "
            f"{', '.join(map(repr, mesh.axis_names))}"
        )
    return mesh


def check_divides(mesh: Any, names: Names, what: str, vocab: int) -> int:
    """Returns how many parts of one size a vocabulary is split into.

    Raises:
        ValueError: it can't be.
    """
    count: int = math.prod(mesh.shape[name] for name in names)
    if vocab % count:
        raise ValueError(
            f"{what} has a vocabulary of {vocab} columns, which the {count} devices of axis_name "
            f"{shown(names)} do not divide: pad it to {-(-vocab // count) * count} columns, whose "
            "logits are -inf"
        )
    return count


def shown(names: Names) -> str:
    return repr(names[0] if len(names) == 1 else names)
