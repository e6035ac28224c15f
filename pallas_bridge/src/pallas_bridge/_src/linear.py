"""Derivatives as linear maps with explicit transposes.

A `jax.custom_jvp` rule defines forward mode, and JAX transposes the rule's map of tangents for
reverse mode. A rule that uses `bind` gives the transpose explicitly: a kernel, or the gradient that
the forward pass has computed. So both modes work, and reverse mode runs the same code as a
`jax.custom_vjp`.
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
from jax.sharding import PartitionSpec

from . import refusal
from .arrays import Dims, spec_of, wide_dtype, with_mapped_axis
from .bound import Bound
from .compat import tell_devices
from .meshes import may_be_left_to_xla
from .operation import Operation

# Maps residuals and cotangents to a cotangent for each tangent; None stands for zeros. A sum may
# have a wider dtype than its tangent, to be rounded once.
Transpose = Callable[[Any, Sequence[Any]], Sequence[Any]]


def given(tangent: Any) -> Any:
    """Returns a tangent that a `jax.custom_jvp` rule receives, or None for symbolic zeros."""
    return None if isinstance(tangent, SymbolicZero) else tangent


def opaque(operation: Operation, function: Callable[..., Any], *arrays: Any) -> Any:
    """Returns function(*arrays), which JAX does not partially evaluate for reverse mode.

    Partial evaluation would hoist loop-invariant values, such as all pieces of a weight that a loop
    handles one at a time, and keep them all in memory. Uses of a derivative are refused.
    """

    def forward(*arrays: Any) -> tuple[Any, None]:
        return function(*arrays), None

    def backward(*_: Any) -> NoReturn:
        operation.refuse_derivative()

    in_one = jax.custom_vjp(function)
    in_one.defvjp(forward, backward)

    # `jax.custom_vjp` alone refuses forward mode even where nothing uses the tangents.
    @jax.custom_jvp
    def with_tangents(*arrays: Any) -> Any:
        return in_one(*arrays)

    @with_tangents.defjvp
    def _(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        results = in_one(*primals)
        flat, tree = jax.tree.flatten(results)
        moving = [one for one in jax.tree.leaves(tangents) if one.dtype != jax.dtypes.float0]
        of_flat = refusal.tangents_of(operation, flat, moving)
        return results, jax.tree.unflatten(tree, [*map(ad.instantiate_zeros, of_flat)])

    return with_tangents(*arrays)


def along(gradients: Sequence[Any], tangents: Sequence[Any]) -> jax.Array:
    """Returns the float32 tangent of a scalar with these gradients; a tangent of None is 0."""
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

    def call_with_moving(*moving: Any) -> Any:
        every = [*primals]
        for index, primal in zip(places, moving, strict=True):
            every[index] = primal
        return function(*every)

    moving = [primals[index] for index in places]
    return jax.jvp(call_with_moving, moving, [tangents[index] for index in places])[1]


def bind(
    apply: Callable[[Any, Sequence[Any]], Sequence[Any]],
    transpose: Transpose,
    residuals: Any,
    tangents: Sequence[Any],
    primals: Sequence[jax.Array],
    dims: tuple[Sequence[str], Sequence[str]] | None = None,
) -> list[jax.Array]:
    """Returns the tangents of `primals`: apply(residuals, tangents), linear in tangents.

    `apply` and `transpose` must be hashable and hold no array (`Bound`, or functions of a module),
    because JAX's caches compare them and keep them alive. Zero tangents are None, also for `apply`;
    at least one is not. `dims` declares residuals and tangents if both functions take any number of
    axes of tokens and every result has these axes. `vmap` then adds an axis of tokens, unless it
    maps an operand that tokens share.
    """
    flat, tree = jax.tree.flatten(residuals)
    moving = tuple(index for index, tangent in enumerate(tangents) if tangent is not None)
    declared = None
    if dims is not None:
        declared = tuple(map(Dims.of, [*dims[0], *(dims[1][index] for index in moving)]))
    operands = [*flat, *(tangents[index] for index in moving)]
    linear = _Map(apply, transpose, tree, moving, len(tangents), declared)
    # Reverse mode never traces `apply`.
    return _bind_flat(*operands, linear=linear, avals=tuple(map(jax.typeof, primals)))


@dataclass(frozen=True)
class _Map:
    """A linear map of flat arrays, residuals first; maps with equal fields are equal."""

    apply: Callable[[Any, Sequence[Any]], Sequence[Any]]
    transpose: Transpose
    # The tree structure of residuals.
    tree: Any
    # Indices of the nonzero ones of `tangents` tangents.
    moving: tuple[int, ...]
    tangents: int
    dims: tuple[Dims, ...] | None = None

    @property
    def count(self) -> int:
        """How many operands are residuals."""
        return int(self.tree.num_leaves)

    def tangents_for(self, *operands: Any) -> list[Any]:
        """Returns the tangents that the map makes of its operands."""
        every: list[Any] = [None] * self.tangents
        for index, array in zip(self.moving, operands[self.count :], strict=True):
            every[index] = array
        return list(self.apply(jax.tree.unflatten(self.tree, operands[: self.count]), every))

    def cotangents_for(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        """Returns a cotangent for each tangent that is an operand."""
        found = self.transpose(jax.tree.unflatten(self.tree, residuals), cotangents)
        return [found[index] for index in self.moving]


def _bind(linear: _Map, operands: Sequence[Any]) -> list[jax.Array]:
    avals = tuple(jax.make_jaxpr(linear.tangents_for)(*operands).out_avals)
    return _bind_flat(*operands, linear=linear, avals=avals)


_linear = Primitive("xentile_linear")
# The same where XLA may choose how arrays are sharded: its lowering may need the devices.
_linear_that_asks = Primitive("xentile_linear_that_asks")
tell_devices(_linear_that_asks)
PRIMITIVES = (_linear, _linear_that_asks)


def _bind_flat(*operands: Any, **params: Any) -> list[jax.Array]:
    """Binds a map with the primitive that its lowering needs."""
    primitive = _linear_that_asks if may_be_left_to_xla(*operands) else _linear
    results: list[jax.Array] = primitive.bind(*operands, **params)
    return results


def _apply(*operands: Any, linear: _Map, **_: Any) -> list[Any]:
    return linear.tangents_for(*operands)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    count = params["linear"].count
    if all(isinstance(one, ad.Zero) for one in tangents[:count]):
        # Only operands in which the map is linear have tangents.
        moving = [ad.instantiate_zeros(one) for one in tangents[count:]]
        values = _bind_flat(*primals, **params)
        return values, _bind_flat(*primals[:count], *moving, **params)
    every = [ad.instantiate_zeros(one) for one in tangents]
    return jax.jvp(partial(_apply, **params), [*primals], every)


def _transpose(cotangents: Sequence[Any], *operands: Any, linear: _Map, **_: Any) -> list[Any]:
    count = linear.count
    given = [None if isinstance(one, ad.Zero) else one for one in cotangents]
    found = linear.cotangents_for(operands[:count], given)
    results: list[Any] = [None] * count
    for operand, one in zip(operands[count:], found, strict=True):
        if not ad.is_undefined_primal(operand):
            results.append(None)
        elif one is None:
            results.append(ad.Zero(operand.aval))
        else:
            results.append(_placed_as(operand.aval, one.astype(operand.aval.dtype)))
    return results


def _placed_as(aval: Any, x: jax.Array) -> jax.Array:
    """Returns a cotangent with the explicit sharding of its primal's type `aval`."""
    right = spec_of(aval)
    if spec_of(jax.typeof(x)) == right:
        return x
    placed: jax.Array = jax.sharding.reshard(x, PartitionSpec(*right))
    return placed


@dataclass(frozen=True)
class _Mapped:
    """A linear map under `vmap`, with the mapped axes of its arrays."""

    linear: _Map
    residuals: tuple[int | None, ...]
    tangents: tuple[int | None, ...]
    results: tuple[int, ...]

    def apply(self, residuals: Sequence[Any], tangents: Sequence[Any]) -> Sequence[Any]:
        """Returns the map of residuals and tangents."""
        mapped = jax.vmap(
            self.linear.tangents_for,
            in_axes=(*self.residuals, *self.tangents),
            out_axes=[*self.results],
        )
        found: Sequence[Any] = mapped(*residuals, *tangents)
        return found

    def transpose(self, residuals: Any, cotangents: Sequence[Any]) -> list[Any]:
        """Returns cotangents of tangents."""
        axes = [
            None if one is None else axis
            for one, axis in zip(cotangents, self.results, strict=True)
        ]
        found = jax.vmap(
            self.linear.cotangents_for,
            in_axes=([*self.residuals], axes),
            out_axes=[axis or 0 for axis in self.tangents],
        )([*residuals], [*cotangents])
        # The cotangent of an unmapped tangent is a sum, in float32 or wider.
        return [
            one if one is None or axis is not None else one.sum(0, dtype=_wide(one.dtype))
            for one, axis in zip(found, self.tangents, strict=True)
        ]

    def map(self) -> _Map:
        """Returns the mapped map as a `_Map`."""
        tree = jax.tree.structure([0] * len(self.residuals))
        count = len(self.tangents)
        apply, transpose = Bound(_Mapped.apply, self), Bound(_Mapped.transpose, self)
        return _Map(apply, transpose, tree, tuple(range(count)), count)


def _wide(dtype: Any) -> Any:
    return wide_dtype(dtype)


def _batch(
    operands: Sequence[Any], axes: Sequence[int | None], *, linear: _Map, avals: Sequence[Any]
) -> tuple[Sequence[Any], Sequence[int]]:
    if linear.dims is not None:
        pairs = zip(linear.dims, axes, strict=True)
        if all(axis is None for dims, axis in pairs if not dims.has_tokens):
            given, place = with_mapped_axis(linear.dims, operands, axes)
            results = _bind(linear, given)
            return results, [place] * len(results)
    # Results have the mapped axis where the first operand has it, as those of custom calls do, so
    # that nothing is transposed.
    places = tuple(min(axes[0] or 0, aval.ndim) for aval in avals)
    mapped = _Mapped(linear, tuple(axes[: linear.count]), tuple(axes[linear.count :]), places)
    return _bind(mapped.map(), operands), places


for _primitive in PRIMITIVES:
    _primitive.multiple_results = True
    _primitive.def_impl(_apply)
    _primitive.def_abstract_eval(lambda *_, avals, **__: avals)
    mlir.register_lowering(_primitive, mlir.lower_fun(_apply, multiple_results=True))
    ad.primitive_jvps[_primitive] = _jvp
    ad.primitive_transposes[_primitive] = _transpose
    batching.primitive_batchers[_primitive] = _batch
