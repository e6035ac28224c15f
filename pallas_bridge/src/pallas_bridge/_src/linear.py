"""A derivative as a linear map that comes with its transpose.

`jax.custom_jvp` takes rules for forward mode, and JAX makes reverse mode of these by transposing
what they do to tangents. A rule that does so by `bind` says itself what the transpose is: a kernel,
or the gradient that the forward pass has made already. So both modes work, and reverse mode runs
what a rule of its own (`jax.custom_vjp`) would.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

# Of residuals and cotangents to a cotangent for each tangent. None is a cotangent of zeros. A sum
# may be wider than its tangent, to be rounded once.
Transpose = Callable[[Any, Sequence[Any]], Sequence[Any]]


def given(tangent: Any) -> Any:
    """Returns a tangent that `jax.custom_jvp` hands to a rule, or None for one of zeros."""
    return None if isinstance(tangent, SymbolicZero) else tangent


def bind(
    apply: Callable[[Any, Sequence[Any]], Sequence[Any]],
    transpose: Transpose,
    residuals: Any,
    tangents: Sequence[Any],
) -> list[jax.Array]:
    """Returns apply(residuals, tangents), which is linear in tangents.

    Tangents of zeros are None, for `apply` too, and not all are.
    """
    flat, tree = jax.tree.flatten(residuals)
    places = [index for index, tangent in enumerate(tangents) if tangent is not None]

    def of_flat(*arrays: Any) -> Sequence[Any]:
        every = [None] * len(tangents)
        for index, array in zip(places, arrays[len(flat) :], strict=True):
            every[index] = array
        return apply(jax.tree.unflatten(tree, arrays[: len(flat)]), every)

    def of_cotangents(residuals: Any, cotangents: Sequence[Any]) -> Sequence[Any]:
        found = transpose(jax.tree.unflatten(tree, residuals), cotangents)
        return [found[index] for index in places]

    operands = [*flat, *(tangents[index] for index in places)]
    return _bind(of_flat, of_cotangents, len(flat), operands)


def _bind(
    apply: Callable[..., Any], transpose: Transpose, count: int, operands: Sequence[Any]
) -> list[jax.Array]:
    closed = jax.make_jaxpr(apply)(*operands)
    results: list[jax.Array] = _linear.bind(
        *operands, closed=closed, transpose=transpose, count=count
    )
    return results


_linear = Primitive("xentile_linear")
_linear.multiple_results = True


def _apply(*operands: Any, closed: Any, **_: Any) -> list[Any]:
    results: list[Any] = jaxpr_as_fun(closed)(*operands)
    return results


_linear.def_impl(_apply)
_linear.def_abstract_eval(lambda *_, closed, **__: closed.out_avals)
mlir.register_lowering(_linear, mlir.lower_fun(_apply, multiple_results=True))


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    count = params["count"]
    if all(isinstance(one, ad.Zero) for one in tangents[:count]):
        # Linear in all that moves.
        moving = [ad.instantiate_zeros(one) for one in tangents[count:]]
        values = _linear.bind(*primals, **params)
        return values, _linear.bind(*primals[:count], *moving, **params)
    every = [ad.instantiate_zeros(one) for one in tangents]
    return jax.jvp(jaxpr_as_fun(params["closed"]), [*primals], every)


ad.primitive_jvps[_linear] = _jvp


def _transpose(
    cotangents: Sequence[Any], *operands: Any, closed: Any, transpose: Transpose, count: int
) -> list[Any]:
    given = [None if isinstance(one, ad.Zero) else one for one in cotangents]
    found = transpose(operands[:count], given)
    results: list[Any] = [None] * count
    for operand, one in zip(operands[count:], found, strict=True):
        if not ad.is_undefined_primal(operand):
            results.append(None)
        elif one is None:
            results.append(ad.Zero(operand.aval))
        else:
            results.append(one.astype(operand.aval.dtype))
    return results


ad.primitive_transposes[_linear] = _transpose


@dataclass(frozen=True)
class _Mapped:
    """The transpose of a mapped linear map."""

    transpose: Transpose
    residuals: tuple[int | None, ...]
    tangents: tuple[int | None, ...]

    def __call__(self, residuals: Any, cotangents: Sequence[Any]) -> list[Any]:
        axes = [None if one is None else 0 for one in cotangents]
        found = jax.vmap(self.transpose, in_axes=([*self.residuals], axes))(
            [*residuals], [*cotangents]
        )
        # A tangent that all have gets the sum, which is rounded last.
        return [
            one if one is None or axis is not None else one.sum(0, dtype=_wide(one.dtype))
            for one, axis in zip(found, self.tangents, strict=True)
        ]


def _wide(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


def _batch(operands: Sequence[Any], axes: Sequence[int | None], **params: Any) -> Any:
    closed, transpose, count = params["closed"], params["transpose"], params["count"]
    moved = [
        x if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(operands, axes, strict=True)
    ]
    places = tuple(None if axis is None else 0 for axis in axes)
    mapped = _Mapped(transpose, places[:count], places[count:])
    results = _bind(jax.vmap(jaxpr_as_fun(closed), in_axes=places), mapped, count, moved)
    return results, [0] * len(results)


batching.primitive_batchers[_linear] = _batch
