"""Derivatives that no kernel has, refused where one is used.

A program may differentiate a gradient and drop the result, as `jax.lax.stop_gradient` around an
inner gradient does. So a rule for forward mode gives tangents that exist only while a program is
traced: they are refused when they are computed or transposed, and dead code costs nothing.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .operation import Operation


def tangents_of(operation: Operation, results: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    """Returns tangents of results for tangents of operands, which nothing may use."""
    moving = [one for one in tangents if not isinstance(one, ad.Zero)]
    avals = [jax.typeof(one).to_tangent_aval() for one in results]
    places = [index for index, aval in enumerate(avals) if aval.dtype != jax.dtypes.float0]
    found: list[Any] = [ad.Zero(aval) for aval in avals]
    refused = _refused.bind(
        *moving, operation=operation, avals=tuple(avals[place] for place in places)
    )
    for place, one in zip(places, refused, strict=True):
        found[place] = one
    return found


_refused = Primitive("xentile_refused_derivative")
_refused.multiple_results = True


def _refuse(*_: Any, operation: Operation, **__: Any) -> NoReturn:
    operation.refuse_derivative()


def _lower(*_: Any, operation: Operation, **__: Any) -> NoReturn:
    operation.refuse_derivative()


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    results = _refused.bind(*primals, **params)
    return results, tangents_of(params["operation"], results, tangents)


def _batch(operands: Sequence[Any], axes: Sequence[int | None], **params: Any) -> Any:
    size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
    avals = tuple(
        aval.update(shape=(size, *aval.shape), **_with_axis(aval)) for aval in params["avals"]
    )
    return _refused.bind(*operands, **{**params, "avals": avals}), [0] * len(avals)


def _with_axis(aval: Any) -> dict[str, Any]:
    """Returns how a mapped array is sharded, its new axis not at all."""
    sharding = getattr(aval, "sharding", None)
    if sharding is None:
        return {}
    return {"sharding": sharding.update(spec=jax.sharding.PartitionSpec(None, *sharding.spec))}


_refused.def_impl(_refuse)
_refused.def_abstract_eval(lambda *_, avals, **__: [*avals])
ad.primitive_jvps[_refused] = _jvp
ad.primitive_transposes[_refused] = _refuse
batching.primitive_batchers[_refused] = _batch
mlir.register_lowering(_refused, _lower)
