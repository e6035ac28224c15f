"""A warning where XLA, left to cut arrays, gathers one that its caller could have left in parts.

What XLA cuts is known neither as a program is traced nor as it is lowered: sharding may spread to
logits from a weight, over any number of operations. The partitioner knows, and `jax.debug` has it
tell. It is asked in passing: the array itself is untouched, what asks is gone from the compiled
program, and programs that are exported, or that JAX may cache on disk under a key of all they hold
(an address of this process would be part of that), are not asked.
"""

import math
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding

from . import auto_partitioning
from .compat import tell_devices
from .meshes import tuple_of
from .operation import Operation

# What JAX calls back, alive for as long as any program may yet be compiled.
_callbacks: list[Any] = []


def watched(
    operation: Operation, name: str, x: jax.Array, axis: int, *, calls_ask: bool = False
) -> jax.Array:
    """Returns `x`, of which a warning tells should XLA have cut its `axis`, the vocabulary.

    With `calls_ask`, calls that take it compute in parts wherever they get to know
    (`auto_partitioning`).
    """
    if not isinstance(x, jax.core.Tracer):
        return x
    params = {"operation": operation, "name": name, "calls_ask": calls_ask}
    same: jax.Array = _watched.bind(x, axis=axis % x.ndim, **params)
    return same


_watched = Primitive("xentile_watched")
_watched.def_impl(lambda x, **_: x)
_watched.def_abstract_eval(lambda x, **_: x)
tell_devices(_watched)


def _jvp(primals: Any, tangents: Any, **params: Any) -> tuple[Any, Any]:
    # The gradient lies as it may.
    return _watched.bind(*primals, **params), tangents[0]


ad.primitive_jvps[_watched] = _jvp


def _batch(operands: Sequence[Any], axes: Sequence[int], *, axis: int, **params: Any) -> Any:
    (mapped,) = axes
    return _watched.bind(*operands, axis=axis + (mapped <= axis), **params), mapped


batching.primitive_batchers[_watched] = _batch


def _lower(ctx: Any, value: Any, *, calls_ask: bool, **params: Any) -> Sequence[Any]:
    module = ctx.module_context
    is_told = calls_ask and auto_partitioning.is_asked_for(module)
    if (
        auto_partitioning.is_cut_by_xla(module)
        and not auto_partitioning.is_kept(module)
        and not is_told
    ):
        # A program that is compiled may be pickled, and what its module keeps alive with it.
        own = ctx.replace(module_context=module.replace(keepalives=_callbacks), avals_out=[])
        callback = partial(_warn, **params)

        def ask(x: jax.Array) -> list[Any]:
            jax.debug.inspect_array_sharding(x, callback=callback)
            return []

        mlir.lower_fun(ask, multiple_results=True)(own, value)
    return [value]


mlir.register_lowering(_watched, _lower, cacheable=False)


def _warn(sharding: Any, *, operation: Operation, name: str, axis: int) -> None:
    if not isinstance(sharding, NamedSharding):
        return
    spec = [*map(tuple_of, sharding.spec)]
    names = spec[axis] if axis < len(spec) else ()
    count = math.prod(sharding.mesh.shape[one] for one in names)
    if count > 1:
        said = repr(names[0] if len(names) == 1 else names)
        warnings.warn(
            f"{operation}: the vocabulary of {name} is cut over {count} devices, and XLA gathers "
            f"it on each: call {operation} with axis_name={said}, or with {name} on a mesh of "
            "explicit axes, and every device keeps its part",
            stacklevel=1,  # the compiler calls, and no line of the user's
        )


def tell_uneven(operation: Operation, name: str, columns: int, count: int) -> None:
    """Warns of a vocabulary of so many columns that devices do not divide, so that XLA gathers."""
    padded = -(-columns // count) * count
    warnings.warn(
        f"{operation}: the vocabulary of {name} is cut over {count} devices, which do not divide "
        f"its {columns} columns, and XLA gathers it on each: pad it to {padded} columns, whose "
        "logits are -inf, and every device keeps its part",
        stacklevel=1,  # as above
    )
