"""Functions of a device's shards, for arrays that XLA shards over automatic mesh axes.

XLA chooses shardings when it compiles a program. It then calls Python back, through
`jax.experimental.custom_partitioning`: a Shardy rule names the axes that may be sharded, and for
the chosen shardings a function of the device's shards, with collectives over mesh axes, replaces
the function of whole arrays. Programs for one device have no such callback. Exported programs
cannot have one, since Python may be missing when they are compiled.

JAX's cache on disk finds a program by its text. JAX names a callback by an address of this process;
here a digest of everything that determines the devices' computation names it, so that other
processes find the program, and only that program (`_name_callback`).
"""

import functools
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    CompoundFactor,
    SdyShardingRule,
    custom_partitioning,
)
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from . import library, refusal, versions
from .arrays import factor_of
from .compat import callbacks_by_name, shards_by_shardy, tell_devices
from .meshes import Names, entry, in_order, tuple_of
from .operation import Operation

# The names of an array's axes. Axes of one name have the same extent and sharding.
Axes = tuple[str, ...]

# The attribute of an operation that names the call that it replaces.
_NAME = "xentile_call"


@dataclass(frozen=True)
class Arrays:
    """The axes of operands and results, and which of them may be sharded."""

    operands: tuple[Axes, ...]
    results: tuple[Axes, ...]
    # Axes that may be sharded, the first with priority where two compete for a mesh axis; and those
    # of them that devices must divide, since XLA pads the last device's shard.
    sharded: Axes
    even: Axes = ()
    # Indices of operands, and of results after them, that follow the sharding of other arrays:
    # those that tokens share, which are small.
    followers: tuple[int, ...] = ()

    def rule(self) -> SdyShardingRule:
        """Returns the sharding rule for Shardy."""
        axes = dict.fromkeys(axis for one in (*self.operands, *self.results) for axis in one)
        sides = (
            tuple(ArrayMapping(*map(_mapping, one)) for one in side)
            for side in (self.operands, self.results)
        )
        whole = tuple(axis for axis in axes if factor_of(axis)[0] not in self.sharded)
        packed: dict[str, Any] = {
            f"x{count}": count for _, count in map(factor_of, axes) if count > 1
        }
        return SdyShardingRule(*sides, need_replication_factors=whole, **packed)


def _mapping(axis: str) -> Any:
    """Returns the factors of an axis in a rule; a packed axis is sharded by its first factor."""
    factor, count = factor_of(axis)
    return factor if count == 1 else CompoundFactor(factor, f"x{count}")


# Returns the function of a device's shards. Arguments: the mesh axes that shard each axis; for axes
# that are gathered because the devices do not divide them, the number of devices.
Local = Callable[[Mapping[str, Names], Mapping[str, int]], Callable[..., Sequence[jax.Array]]]


def spec_of_axes(axes: Axes, mesh_axes: Mapping[str, Names]) -> PartitionSpec:
    """Returns the sharding of an array whose axes `mesh_axes` shards."""
    return PartitionSpec(*(entry(mesh_axes.get(factor_of(axis)[0], ())) for axis in axes))


def is_sharded_by_xla(module: Any) -> bool:
    """Whether XLA shards a module's arrays over several known devices, outside of `shard_map`."""
    devices = getattr(module.axis_context, "device_assignment", None)
    return devices is not None and len(devices) > 1


def is_asked_for(module: Any) -> bool:
    """Whether XLA shards a module's arrays and calls Python back when it compiles the module."""
    mesh = getattr(module.axis_context, "abstract_mesh", None)
    if not is_sharded_by_xla(module) or mesh is None or mesh.empty:
        return False
    if any(one != AxisType.Auto for one in mesh.axis_types) or is_exported(module):
        return False
    # Untested with Pallas programs for TPUs.
    return shards_by_shardy() and "tpu" not in module.platforms


def asks(ctx: Any) -> bool:
    """Whether XLA calls back about a call when it compiles it; never about empty arrays."""
    is_empty = any(0 in aval.shape for aval in (*ctx.avals_in, *ctx.avals_out))
    return not is_empty and is_asked_for(ctx.module_context)


def is_exported(module: Any) -> bool:
    """Whether a program is exported, so that no Python may run when it is compiled."""
    found: bool = getattr(module.lowering_parameters, "for_export", False)
    return found


class _Alive:
    """Keeps objects alive as long as a compiled program; pickles as an empty one."""

    def __init__(self) -> None:
        self.objects: list[Any] = []

    def __reduce__(self) -> Any:
        return _Alive, ()


# Callbacks by name, kept for programs that may be compiled later.
_named: dict[bytes, Any] = {}


def _name_callback(operation: Any, text: str) -> None:
    """Names an operation's callback by a digest of `text`, instead of an address.

    Where JAX has no table of callbacks, the address stays: programs are right, but no other process
    finds them in JAX's cache on disk.
    """
    callbacks = callbacks_by_name()
    if callbacks is None or "backend_config" not in operation.attributes:
        return
    address = str(ir.StringAttr(operation.attributes["backend_config"]).value).encode()
    if address not in callbacks:
        return
    info = callbacks[address]
    # The callback needs only these of the module's context, which would keep the module alive.
    module = info.module_context
    info.module_context = SimpleNamespace(platforms=module.platforms, backend=module.backend)
    rule = str(operation.attributes["sdy.sharding_rule"])
    devices = [str(device) for device in info.mesh.devices.flat]
    settled = f"{versions.PACKAGE} {text} {rule} {info.mesh} {devices} {module.platforms}"
    has_library = not isinstance(library.attempt(), library.LibraryError)
    settled += f" {_precision()} {jax.dtypes.canonicalize_dtype(float)} {has_library}"
    name = f"xentile {hashlib.sha256(settled.encode()).hexdigest()}"
    _named[name.encode()] = info
    callbacks[name.encode()] = info
    operation.attributes["backend_config"] = ir.StringAttr.get(name)


def _precision() -> Any:
    """Returns the current default precision of matrix products (`jax.config` has no types)."""
    config: Any = jax.config
    return config.jax_default_matmul_precision


def lower(
    ctx: Any,
    operands: Sequence[Any],
    name: str,
    arrays: Arrays,
    whole: Callable[..., Sequence[jax.Array]],
    local: Local,
) -> Sequence[Any]:
    """Lowers whole(*operands) to a function of each device's shards.

    `name` contains everything that determines the devices' computation; `named` reads it back.
    """
    of_axes = {
        factor_of(axis)[0]: extent // factor_of(axis)[1]
        for axes, aval in zip(arrays.operands, ctx.avals_in, strict=True)
        for axis, extent in zip(axes, aval.shape, strict=True)
    }

    precision = _precision()

    def partition(mesh: Any, given: Any, found: Any) -> Any:
        shardings = [one.sharding for one in (*given, *found)]
        mesh_axes, uneven = _find_shardings(mesh, arrays, shardings, of_axes)

        def placed(side: Sequence[Axes]) -> list[NamedSharding]:
            return [NamedSharding(mesh, spec_of_axes(axes, mesh_axes)) for axes in side]

        def run_shard(*own: jax.Array) -> Sequence[jax.Array]:
            # This runs when the program is compiled, maybe under another default precision.
            with jax.default_matmul_precision(precision):
                return local(mesh_axes, uneven)(*own)

        return mesh, run_shard, placed(arrays.results), tuple(placed(arrays.operands))

    def run_whole(*operands: jax.Array) -> list[jax.Array]:
        return [*whole(*operands)]

    alive = _Alive()
    module = ctx.module_context
    module.add_keepalive(alive)
    own = ctx.replace(module_context=module.replace(keepalives=alive.objects))
    asked = custom_partitioning(run_whole)
    asked.def_partition(partition, sharding_rule=arrays.rule())
    values: Sequence[Any] = mlir.lower_fun(asked, multiple_results=True)(own, *operands)
    operation = values[0].owner.operation
    attributes = ir.DictAttr.get({_NAME: ir.StringAttr.get(name)})
    operation.attributes["mhlo.frontend_attributes"] = attributes
    _name_callback(operation, f"{name} {ctx.avals_in} {ctx.avals_out}")
    # JAX 0.9 puts it at the end of the block.
    before = ir.InsertionPoint.current.ref_operation
    if before is not None:
        operation.move_before(before)
    return values


def without_padding(x: jax.Array, mesh_axes: Sequence[Names], extents: Sequence[int]) -> jax.Array:
    """Returns a device's shard with 0 in the padding of axes that devices do not divide.

    `mesh_axes` and `extents` are those of the array's first axes.
    """
    for axis, (names, extent) in enumerate(zip(mesh_axes, extents, strict=True)):
        own = x.shape[axis]
        if own * math.prod(map(jax.lax.axis_size, names)) == extent or not names:
            continue
        index = jax.lax.axis_index(names) * own + jax.lax.iota(np.int32, own)
        is_there = jax.lax.broadcast_in_dim(index < extent, x.shape, (axis,))
        x = jnp.where(is_there, x, jnp.zeros_like(x))
    return x


def named(operation: Any) -> str:
    """Returns the `name` that `lower` gave an operation; "" for other operations."""
    attributes = operation.attributes
    if "mhlo.frontend_attributes" not in attributes:
        return ""
    given = attributes["mhlo.frontend_attributes"]
    return str(ir.StringAttr(given[_NAME]).value) if _NAME in given else ""


def _find_shardings(
    mesh: Any, arrays: Arrays, shardings: Sequence[Any], extents: Mapping[str, int]
) -> tuple[dict[str, Names], dict[str, int]]:
    """Returns the mesh axes that shard each axis, and the number of devices of uneven axes."""
    found: dict[str, Names] = dict.fromkeys(arrays.sharded, ())
    sides = zip((*arrays.operands, *arrays.results), shardings, strict=True)
    for index, (axes, sharding) in enumerate(sides):
        if isinstance(sharding, NamedSharding) and index not in arrays.followers:
            for axis, one in zip(
                (factor_of(axis)[0] for axis in axes), sharding.spec, strict=False
            ):
                if axis in found and not found[axis]:
                    found[axis] = tuple(name for name in tuple_of(one) if mesh.shape[name] > 1)
    mesh_axes: dict[str, Names] = {}
    uneven: dict[str, int] = {}
    taken: set[str] = set()
    for axis, names in found.items():
        free = tuple(name for name in names if name not in taken)
        count = math.prod(mesh.shape[name] for name in free)
        if axis in arrays.even and extents[axis] % count:
            uneven[axis], free = count, ()
        # Devices along columns exchange blocks in the mesh's order, as `jax.lax.ppermute` has it.
        mesh_axes[axis] = in_order(mesh, free) if axis in arrays.even else free
        taken |= {*free}
    return mesh_axes, uneven


@dataclass(frozen=True)
class Work:
    """A function of arrays, with the version for a device's shards (the arguments of `lower`)."""

    operation: Operation
    name: str
    arrays: Arrays
    whole: Callable[..., Sequence[jax.Array]]
    local: Local
    # How many axes `vmap` has added, in front of all results.
    mapped: int = 0

    def batched(self, axes: Sequence[int | None]) -> "Work":
        """Returns the work of operands whose mapped axis, if they have one, is in front."""
        new = f"m{self.mapped}"
        given = tuple(
            one if axis is None else (new, *one)
            for one, axis in zip(self.arrays.operands, axes, strict=True)
        )
        found = tuple((new, *one) for one in self.arrays.results)
        sharded = (*self.arrays.sharded, new)
        places = tuple(None if axis is None else 0 for axis in axes)

        def local(*placement: Any) -> Callable[..., Sequence[jax.Array]]:
            return jax.vmap(self.local(*placement), in_axes=places)

        return replace(
            self,
            name=f"{self.name} {places}",
            arrays=replace(self.arrays, operands=given, results=found, sharded=sharded),
            whole=jax.vmap(self.whole, in_axes=places),
            local=local,
            mapped=self.mapped + 1,
        )


def bind(work: Work, *operands: jax.Array) -> list[jax.Array]:
    """Binds `work` in the program being traced."""
    avals = tuple(jax.make_jaxpr(work.whole)(*operands).out_avals)
    results: list[jax.Array] = _auto.bind(*operands, work=work, avals=avals)
    return results


_auto = Primitive("xentile_auto_parts")
_auto.multiple_results = True
tell_devices(_auto)


def _apply(*operands: Any, work: Work, **_: Any) -> list[Any]:
    return [*work.whole(*operands)]


_auto.def_impl(_apply)
_auto.def_abstract_eval(lambda *_, avals, **__: avals)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, work: Work, **params: Any) -> Any:
    results = _auto.bind(*primals, work=work, **params)
    return results, refusal.tangents_of(work.operation, results, tangents)


ad.primitive_jvps[_auto] = _jvp


def _batch(operands: Sequence[Any], axes: Sequence[int | None], *, work: Work, **_: Any) -> Any:
    given = [
        x if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(operands, axes, strict=True)
    ]
    results = bind(work.batched(axes), *given)
    return results, [0] * len(results)


batching.primitive_batchers[_auto] = _batch


def _lower_work(ctx: Any, *operands: Any, work: Work, **_: Any) -> Sequence[Any]:
    if asks(ctx):
        return lower(ctx, operands, work.name, work.arrays, work.whole, work.local)
    rule = mlir.lower_fun(functools.partial(_apply, work=work), multiple_results=True)
    values: Sequence[Any] = rule(ctx, *operands)
    return values


mlir.register_lowering(_auto, _lower_work, cacheable=False)
