"""Warnings about arrays that XLA gathers, although they could stay sharded.

Neither tracing nor lowering knows which arrays XLA shards: a sharding may spread to logits from a
weight, over any number of operations. XLA's partitioner knows, and calls back through
`jax.debug.inspect_array_sharding`, which leaves no trace in the compiled program. Exported programs
are not inspected, nor programs that JAX may cache on disk, since an address of this process would
become part of their key.
"""

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding

from . import auto_partitioning
from .compat import tell_devices
from .meshes import may_be_left_to_xla, tuple_of
from .operation import Operation

# Callbacks, kept for programs that may be compiled later.
_callbacks: list[Any] = []


def watched(
    operation: Operation,
    name: str,
    x: jax.Array,
    axis: int,
    *,
    axis_of: str = "V",
    calls_ask: bool = False,
) -> jax.Array:
    """Returns `x`; warns when the program is compiled if XLA shards its `axis`.

    `axis_of` names the axis, by default the vocabulary. `calls_ask` says that calls of `x` compute
    on its shards wherever XLA calls back about them (`auto_partitioning`).
    """
    if not isinstance(x, jax.core.Tracer) or not may_be_left_to_xla(x):
        return x
    params: dict[str, Any] = {"operation": operation, "name": name, "axis_of": axis_of}
    params["calls_ask"] = calls_ask
    same: jax.Array = _watched.bind(x, axis=axis % x.ndim, **params)
    return same


_watched = Primitive("xentile_watched")
_watched.def_impl(lambda x, **_: x)
_watched.def_abstract_eval(lambda x, **_: x)
tell_devices(_watched)


def _jvp(primals: Any, tangents: Any, **params: Any) -> tuple[Any, Any]:
    # The gradient is sharded as XLA chooses.
    return _watched.bind(*primals, **params), tangents[0]


ad.primitive_jvps[_watched] = _jvp


def _batch(operands: Sequence[Any], axes: Sequence[int], *, axis: int, **params: Any) -> Any:
    (mapped,) = axes
    return _watched.bind(*operands, axis=axis + (mapped <= axis), **params), mapped


batching.primitive_batchers[_watched] = _batch


def _lower(
    ctx: Any,
    value: Any,
    *,
    operation: Operation,
    name: str,
    axis: int,
    axis_of: str,
    calls_ask: bool,
) -> Sequence[Any]:
    if axis_of != "V":
        ask(ctx, operation, name, {axis: axis_of}, value, ctx.avals_in[0])
    elif not (calls_ask and auto_partitioning.is_asked_for(ctx.module_context)):
        _inspect(ctx, value, partial(_warn, operation=operation, name=name, axis=axis))
    return [value]


def ask(
    ctx: Any, operation: Operation, what: str, axes: Mapping[int, str], value: Any, aval: Any
) -> None:
    """Warns when the program is compiled if XLA shards axes of an operand that a call needs whole.

    `what` describes the operand; `axes` maps indices of its axes to their names.
    """
    size = math.prod(aval.shape) * aval.dtype.itemsize if 0 not in aval.shape else 0
    if not all(isinstance(extent, int) for extent in aval.shape) or size == 0:
        return
    given = f"{what}, {aval.str_short(short_dtypes=True)}"
    callback = partial(
        _warn_of_gather,
        operation=operation,
        what=given,
        axes={**axes},
        size=size,
        rank=len(aval.shape),
    )
    _inspect(ctx.replace(avals_in=[aval]), value, callback, names_axes=False)


def _inspect(
    ctx: Any, value: Any, callback: Callable[[Any], None], *, names_axes: bool = True
) -> None:
    """Calls back with the sharding of a value, in programs for several devices.

    `names_axes` asks for a sharding that names axes of the mesh. Programs fail to compile where JAX
    finds no names, as for some shardings over several axes.
    """
    module = ctx.module_context
    if not auto_partitioning.is_sharded_by_xla(module) or _is_kept(module):
        return
    if not names_axes:
        without = dataclasses.replace(module.axis_context, abstract_mesh=None)
        module = module.replace(axis_context=without)
    # A compiled program may be pickled, with everything that its module keeps alive.
    own = ctx.replace(module_context=module.replace(keepalives=_callbacks), avals_out=[])

    def inspected(x: jax.Array) -> list[Any]:
        jax.debug.inspect_array_sharding(x, callback=callback)
        return []

    mlir.lower_fun(inspected, multiple_results=True)(own, value)


# Texts of past warnings, which are not repeated.
_told: set[str] = set()


def _warn_of_gather(
    sharding: Any, *, operation: Operation, what: str, axes: Mapping[int, str], size: int, rank: int
) -> None:
    # Every number of shards divides an axis of the extent `devices`.
    devices = len(sharding.device_set)
    shares = sharding.shard_shape((devices,) * rank)
    for axis, name in axes.items():
        count = devices // shares[axis]
        if count == 1:
            continue
        text = (
            f"{operation}: axis {axis} ({name}) of {what}, is sharded over {count} devices, and "
            f"XLA gathers it on each, {size} bytes: shard another axis, or reshard it where it is "
            "small"
        )
        if text not in _told:
            _told.add(text)
            warnings.warn(text, stacklevel=1)  # called by the compiler, not by the user's code


mlir.register_lowering(_watched, _lower, cacheable=False)


def _is_kept(module: Any) -> bool:
    """Whether a program may outlive this process, so that it must hold no address of it."""
    has_cache = jax.config.values.get("jax_compilation_cache_dir") is not None
    return has_cache or auto_partitioning.is_exported(module)


def _warn(sharding: Any, *, operation: Operation, name: str, axis: int) -> None:
    if not isinstance(sharding, NamedSharding):
        return
    spec = [*map(tuple_of, sharding.spec)]
    names = spec[axis] if axis < len(spec) else ()
    count = math.prod(sharding.mesh.shape[one] for one in names)
    if count > 1:
        said = repr(names[0] if len(names) == 1 else names)
        warnings.warn(
            f"{operation}: the vocabulary of {name} is sharded over {count} devices, and XLA "
            f"gathers it on each: call {operation} with axis_name={said}, or with {name} on a mesh "
            "of explicit axes, and every device keeps its part",
            stacklevel=1,  # called by the compiler, not by the user's code
        )


def tell_uneven(operation: Operation, axis: str, extent: int, count: int) -> None:
    """Warns that XLA gathers an axis whose `extent` the `count` devices do not divide.

    `axis` is its name in the declaration of calls.
    """
    what, remedy = _AXES[axis]
    padded = -(-extent // count) * count
    warnings.warn(
        f"{operation}: {what} is sharded over {count} devices, which do not divide its {extent} "
        f"columns, and XLA gathers it on each: {remedy.format(padded=padded)}",
        stacklevel=1,  # as above
    )


# A sharded axis in users' words, and how every device can keep its shard.
_AXES = {
    "V": (
        "the vocabulary",
        "pad it to {padded} columns, whose logits are -inf, and every device keeps its part",
    ),
    "D": ("the hidden size", "shard it over devices that divide it"),
    "F": ("the axis of features", "shard it over devices that divide it"),
}
