"""A derivative as a linear map that comes with its transpose.

`jax.custom_jvp` takes rules for forward mode, and JAX makes reverse mode of these by transposing
what they do to tangents. A rule that does so by `bind` says itself what the transpose is: a kernel,
or the gradient that the forward pass has made already. So both modes work, and reverse mode runs
what a rule of its own (`jax.custom_vjp`) would.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .arrays import Dims, with_axis
from .operation import Operation

# Of residuals and cotangents to a cotangent for each tangent. None is a cotangent of zeros. A sum
# may be wider than its tangent, to be rounded once.
Transpose = Callable[[Any, Sequence[Any]], Sequence[Any]]


def given(tangent: Any) -> Any:
    """Returns a tangent that `jax.custom_jvp` hands to a rule, or None for one of zeros."""
    return None if isinstance(tangent, SymbolicZero) else tangent


def whole(operation: Operation, function: Callable[..., Any], *arrays: Any) -> Any:
    """Returns function(*arrays), of which JAX takes nothing apart as it makes reverse mode.

    It would move out of a loop what is the same in every iteration, and keep all of that at once:
    the pieces of a weight, say, of which the loop is there to have one at a time.
    """

    def refuse(*_: Any) -> NoReturn:
        operation.refuse_derivative()

    in_one = jax.custom_vjp(function)
    in_one.defvjp(refuse, refuse)
    return in_one(*arrays)


def along(gradients: Sequence[Any], tangents: Sequence[Any]) -> jax.Array:
    """Returns the tangent, in f32, of a scalar with these gradients; a tangent of None is 0."""
    parts = [
        (gradient.astype(jnp.float32) * tangent.astype(jnp.float32)).sum()
        for gradient, tangent in zip(gradients, tangents, strict=True)
        if tangent is not None
    ]
    total: jax.Array = sum(parts[1:], parts[0])
    return total


def tangents_of(
    function: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any]
) -> Any:
    """Returns the tangents of function(*primals); a tangent that is None is 0."""
    places = [index for index, tangent in enumerate(tangents) if tangent is not None]

    def of_moving(*moving: Any) -> Any:
        every = [*primals]
        for index, primal in zip(places, moving, strict=True):
            every[index] = primal
        return function(*every)

    moving = [primals[index] for index in places]
    return jax.jvp(of_moving, moving, [tangents[index] for index in places])[1]


def bind(
    apply: Callable[[Any, Sequence[Any]], Sequence[Any]],
    transpose: Transpose,
    residuals: Any,
    tangents: Sequence[Any],
    primals: Sequence[jax.Array],
    dims: tuple[Sequence[str], Sequence[str]] | None = None,
) -> list[jax.Array]:
    """Returns apply(residuals, tangents), which is linear in tangents: the tangents of `primals`.

    Tangents of zeros are None, for `apply` too, and not all are. `dims` declares residuals and
    tangents where both functions take any axes of tokens, and every result has these: then `vmap`
    adds one, where it does not map what tokens share.
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

    declared = None
    if dims is not None:
        declared = tuple(map(Dims.of, [*dims[0], *(dims[1][index] for index in places)]))
    operands = [*flat, *(tangents[index] for index in places)]
    linear = _Map(of_flat, of_cotangents, len(flat), declared)
    # Reverse mode never traces `apply`.
    results: list[jax.Array] = _linear.bind(
        *operands, linear=linear, avals=tuple(map(jax.typeof, primals))
    )
    return results


@dataclass(frozen=True)
class _Map:
    """A linear map of flat arrays."""

    apply: Callable[..., Sequence[Any]]
    transpose: Transpose
    # How many operands are residuals.
    count: int
    dims: tuple[Dims, ...] | None = None


def _bind(linear: _Map, operands: Sequence[Any]) -> list[jax.Array]:
    avals = tuple(jax.make_jaxpr(linear.apply)(*operands).out_avals)
    results: list[jax.Array] = _linear.bind(*operands, linear=linear, avals=avals)
    return results


_linear = Primitive("xentile_linear")
_linear.multiple_results = True


def _apply(*operands: Any, linear: _Map, **_: Any) -> list[Any]:
    return list(linear.apply(*operands))


_linear.def_impl(_apply)
_linear.def_abstract_eval(lambda *_, avals, **__: avals)
mlir.register_lowering(_linear, mlir.lower_fun(_apply, multiple_results=True))


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    count = params["linear"].count
    if all(isinstance(one, ad.Zero) for one in tangents[:count]):
        # Linear in all that moves.
        moving = [ad.instantiate_zeros(one) for one in tangents[count:]]
        values = _linear.bind(*primals, **params)
        return values, _linear.bind(*primals[:count], *moving, **params)
    every = [ad.instantiate_zeros(one) for one in tangents]
    return jax.jvp(partial(_apply, **params), [*primals], every)


ad.primitive_jvps[_linear] = _jvp


def _transpose(cotangents: Sequence[Any], *operands: Any, linear: _Map, **_: Any) -> list[Any]:
    count = linear.count
    given = [None if isinstance(one, ad.Zero) else one for one in cotangents]
    found = linear.transpose(operands[:count], given)
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
    """The transpose of a mapped linear map: which axes of arrays are mapped."""

    transpose: Transpose
    residuals: tuple[int | None, ...]
    tangents: tuple[int | None, ...]
    results: tuple[int, ...]

    def __call__(self, residuals: Any, cotangents: Sequence[Any]) -> list[Any]:
        axes = [
            None if one is None else axis
            for one, axis in zip(cotangents, self.results, strict=True)
        ]
        found = jax.vmap(
            self.transpose,
            in_axes=([*self.residuals], axes),
            out_axes=[axis or 0 for axis in self.tangents],
        )([*residuals], [*cotangents])
        # A tangent that all have gets the sum, which is rounded last.
        return [
            one if one is None or axis is not None else one.sum(0, dtype=_wide(one.dtype))
            for one, axis in zip(found, self.tangents, strict=True)
        ]


def _wide(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


def _batch(
    operands: Sequence[Any], axes: Sequence[int | None], *, linear: _Map, avals: Sequence[Any]
) -> tuple[Sequence[Any], Sequence[int]]:
    # A result is mapped where the first operand is, as the results of custom calls are, so that
    # nothing is transposed.
    place = axes[0] or 0
    if linear.dims is not None:
        pairs = zip(linear.dims, axes, strict=True)
        if all(axis is None for dims, axis in pairs if not dims.has_tokens):
            return _batch_tokens(operands, axes, place, linear)
    places = tuple(min(place, aval.ndim) for aval in avals)
    function = jax.vmap(partial(_apply, linear=linear), in_axes=tuple(axes), out_axes=[*places])
    of_residuals, of_tangents = tuple(axes[: linear.count]), tuple(axes[linear.count :])
    pull = _Mapped(linear.transpose, of_residuals, of_tangents, places)
    return _bind(_Map(function, pull, linear.count), operands), places


def _batch_tokens(
    operands: Sequence[Any], axes: Sequence[int | None], place: int, linear: _Map
) -> tuple[Sequence[Any], Sequence[int]]:
    """Makes the mapped axis one of those of tokens."""
    assert linear.dims is not None
    size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
    if axes[0] is None or place >= linear.dims[0].leading(operands[0]):
        place = 0
    given = [
        x if axis is None and not dims.has_tokens else with_axis(x, axis, place, size)
        for dims, x, axis in zip(linear.dims, operands, axes, strict=True)
    ]
    results = _bind(linear, given)
    return results, [place] * len(results)


batching.primitive_batchers[_linear] = _batch
