"""How a call's arrays are declared, and what follows for their shapes.

An array is declared by its dimensions, such as "*batch V". `*batch` stands for the axes of tokens,
any number of them, none included. An operand without it is shared by all tokens, and a result
without it is a sum over them. Where `vmap` maps a shared operand, or a sum, its mapped axes stand
before its own; they are the first of the tokens' axes too.

A result may have a dimension such as "D/128": the blocks of 128 that D is split into, the last
perhaps a smaller one. An axis such as "2.F" or "F.2" packs two, row by row: a program has it as
one, and handlers as both.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

BATCH = "*batch"
FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True)
class Dims:
    """The dimensions of an operand or a result: tokens' axes or not, and the axes behind them."""

    names: tuple[str, ...]
    has_tokens: bool

    @staticmethod
    def of(text: str) -> "Dims":
        """Returns what a text such as "*batch V" declares."""
        first, *rest = [*text.split(), ""]
        has_tokens = first == BATCH
        names = rest if has_tokens else [first, *rest]
        return Dims(tuple(name for name in names if name), has_tokens)

    def leading(self, aval: Any) -> int:
        """Returns how many axes an array has before those that are named."""
        return int(aval.ndim) - len(self.names)

    def unpacked(self, aval: Any) -> list[tuple[str, Any]]:
        """Returns the named axes of an array as handlers have them, with their extents."""
        pairs = zip(self.names, aval.shape[self.leading(aval) :], strict=True)
        return [axis for pair in pairs for axis in _unpacked(*pair)]

    @property
    def factors(self) -> tuple[str, ...]:
        """What tells the extents of the named axes, one each: F of "2.F", "F.2" and "F"."""
        return tuple(factor_of(name)[0] for name in self.names)


def factor_of(name: str) -> tuple[str, int]:
    """Returns what tells the extent of an axis, and how many entries it has for each: F, 2."""
    first, _, second = name.partition(".")
    if not second:
        return name, 1
    return (second, int(first)) if first.isdigit() else (first, int(second))


def _unpacked(name: str, extent: Any) -> list[tuple[str, Any]]:
    _, count = factor_of(name)
    if count == 1:
        return [(name, extent)]
    return [(one, count if one.isdigit() else extent // count) for one in name.split(".")]


@dataclass(frozen=True)
class Result:
    """A result's dimensions and dtype."""

    dims: str
    # The operand that it has its dtype from; `dtype` if from none.
    like: int | None = None
    dtype: Any = np.float32


@dataclass(frozen=True)
class Signature:
    """What a call takes and gives."""

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    # Named axes, right behind those of tokens in every array that has these, that may be sharded
    # over a mesh as they may. `vmap` adds none after them.
    sharded: tuple[str, ...] = ()

    @staticmethod
    def of(
        operands: Sequence[str], results: Sequence[Result], sharded: tuple[str, ...] = ()
    ) -> "Signature":
        """Returns what texts declare."""
        return Signature(
            tuple(map(Dims.of, operands)),
            tuple(Dims.of(result.dims) for result in results),
            sharded,
        )

    @property
    def shares(self) -> bool:
        """Whether tokens share an operand."""
        return not all(dims.has_tokens for dims in self.operands)

    @property
    def sums(self) -> bool:
        """Whether a result is a sum over tokens."""
        return not all(dims.has_tokens for dims in self.results)

    def leading(self, avals: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the extents of the axes of tokens, and of others that may be sharded."""
        dims, aval = self._tokens(avals)
        extents = self.extents(avals)
        return (*aval.shape[: dims.leading(aval)], *(extents[name] for name in self.sharded))

    def extents(self, avals: Sequence[Any]) -> dict[str, Any]:
        """Returns the extents of operands' named axes, as handlers have these."""
        pairs = zip(self.operands, avals, strict=True)
        return {name: extent for dims, aval in pairs for name, extent in dims.unpacked(aval)}

    def whole(self, dims: Dims, aval: Any) -> list[tuple[str, Any]]:
        """Returns names and extents of the axes that handlers need whole of an array."""
        may_be_sharded = self.sharded if dims.has_tokens else ()
        return [axis for axis in dims.unpacked(aval) if axis[0] not in may_be_sharded]

    def mapped_axes(self, avals: Sequence[Any]) -> int:
        """Returns how many of these a shared operand has, the one with the most."""
        shared = zip(self.operands, avals, strict=True)
        return max((dims.leading(aval) for dims, aval in shared if not dims.has_tokens), default=0)

    def _tokens(self, avals: Sequence[Any]) -> tuple[Dims, Any]:
        """Returns the operand that tells the axes of tokens: the one with the fewest others."""
        pairs = zip(self.operands, avals, strict=True)
        return min(
            (pair for pair in pairs if pair[0].has_tokens), key=lambda pair: len(pair[0].names)
        )

    def result_avals(
        self, results: Sequence[Result], avals: Sequence[Any], mapped: int
    ) -> list[Any]:
        """Returns the results of operands; `mapped` of the tokens' axes are kept apart in sums."""
        dims, tokens = self._tokens(avals)
        leading = tokens.shape[: dims.leading(tokens)]
        extents, mesh_axes = self.extents(avals), self.sharded_over(avals)
        # Of a constant that was made outside of a mesh the type has none.
        shardings = (getattr(aval, "sharding", None) for aval in (tokens, *avals))
        named = [one for one in shardings if isinstance(one, NamedSharding)]
        sharding = next((one for one in named if not one.mesh.empty), next(iter(named), None))
        found = []
        for one, result in zip(self.results, results, strict=True):
            if result.like is not None and self.operands[result.like] == one:
                found.append(avals[result.like])
                continue
            kept = leading if one.has_tokens else leading[:mapped]
            dtype = np.dtype(result.dtype) if result.like is None else avals[result.like].dtype
            own = (_extent(*factor_of(name), extents) for name in one.names)
            shape = (*kept, *own)
            more: dict[str, Any] = {}
            if sharding is not None:
                spec = [*spec_of(tokens)[: len(kept)], *map(mesh_axes.get, one.factors)]
                more["sharding"] = sharding.update(spec=PartitionSpec(*spec))
            found.append(tokens.update(shape=shape, dtype=dtype, weak_type=False, **more))
        return found

    def sharded_over(self, avals: Sequence[Any]) -> dict[str, Any]:
        """Returns what a mesh of explicit axes shards named axes over, of those that it shards.

        Operands that tokens do not share decide, wherever one has the axis.
        """
        of_tokens: dict[str, Any] = {}
        of_shared: dict[str, Any] = {}
        for dims, aval in zip(self.operands, avals, strict=True):
            found = of_tokens if dims.has_tokens else of_shared
            spec = spec_of(aval)[dims.leading(aval) :]
            for name, axes in zip(dims.factors, spec, strict=True):
                found[name] = found.get(name) or axes
        return {name: axes for name, axes in {**of_shared, **of_tokens}.items() if axes}

    def check_sharding(
        self, operation: object, target: str, avals: Sequence[Any], columns: str | None = None
    ) -> None:
        """Refuses what XLA's partitioner may do in silence, gathering an axis that is sharded.

        Only meshes of explicit axes tell, whose users want to know. `columns` is a named
        axis that may be sharded, alike in all operands that tokens do not share.

        Raises:
            ValueError: an axis behind those of tokens is sharded, or operands differ in it.
        """
        dims, tokens = self._tokens(avals)
        own = spec_of(tokens)[: dims.leading(tokens)]
        mesh_axes = self.sharded_over(avals)
        for index, (one, aval) in enumerate(zip(self.operands, avals, strict=True)):
            sharding = getattr(aval, "sharding", None)
            if not isinstance(sharding, NamedSharding) or not sharding.spec:
                continue
            spec, leading = spec_of(aval), one.leading(aval)
            right = [*own[:leading]]
            for name, axes in zip(one.factors, spec[leading:], strict=True):
                may_be_sharded = name == columns or (name in self.sharded and one.has_tokens)
                may_be_whole = name == columns and not one.has_tokens and axes is None
                right.append(mesh_axes.get(name) if may_be_sharded and not may_be_whole else None)
            if spec != right:
                raise ValueError(
                    f"{operation}: operand {index} of {target}, [{' '.join(one.names)}] behind "
                    f"tokens, is sharded as {PartitionSpec(*spec)}; it must be sharded as "
                    f"{PartitionSpec(*right)}: call jax.sharding.reshard(x, ..) with that first"
                )


def _extent(name: str, count: int, extents: Mapping[str, Any]) -> Any:
    """Returns the extent of a dimension, so many times, or how many blocks of it there are."""
    of, _, block = name.partition("/")
    if of.isdigit():
        return int(of)
    # Of symbolic extents, too.
    return -(-extents[of] // int(block)) if block else extents[of] * count


def with_mapped_axis(
    dims: Sequence[Dims],
    operands: Sequence[Any],
    axes: Sequence[int | None],
    most: int | None = None,
) -> tuple[list[jax.Array], int]:
    """Returns operands of which the mapped axis is one of those of tokens, and its index there.

    The first axes of tokens are those that shared operands have, so that the new one comes behind
    what any of these has already, and first of all where it maps one of these. It goes no further
    back than index `most`, if that is given.
    """
    mapped = [(x, axis) for x, axis in zip(operands, axes, strict=True) if axis is not None]
    size = mapped[0][0].shape[mapped[0][1]]
    sharding = next((one for one in (_mapped_sharding(*pair) for pair in mapped) if one), None)
    leading = [
        one.leading(x) - (axis is not None)
        for one, x, axis in zip(dims, operands, axes, strict=True)
    ]
    # Shared operands of the same dims, such as two tables, are one array to a kernel.
    of_mapped = {
        one for one, axis in zip(dims, axes, strict=True) if axis is not None and not one.has_tokens
    }
    if of_mapped:
        place = 0
    else:
        shared = (count for one, count in zip(dims, leading, strict=True) if not one.has_tokens)
        tokens = (count for one, count in zip(dims, leading, strict=True) if one.has_tokens)
        first = max(shared, default=0)
        last = next(tokens) if most is None else most
        place = axes[0] if axes[0] is not None and first <= axes[0] <= last else first
    given = []
    for one, x, axis, count in zip(dims, operands, axes, leading, strict=True):
        has_none = axis is None and not one.has_tokens and one not in of_mapped and count <= place
        given.append(x if has_none else _with_axis(x, axis, place, size, sharding))
    return given, place


def _mapped_sharding(x: Any, axis: int) -> NamedSharding | None:
    """Returns how an array is sharded if a mesh of explicit axes shards one of its axes."""
    sharding = getattr(jax.typeof(x), "sharding", None)
    names = spec_of(jax.typeof(x))[axis]
    if not isinstance(sharding, NamedSharding) or names is None:
        return None
    found: NamedSharding = sharding.update(spec=PartitionSpec(names))
    return found


def _with_axis(
    x: jax.Array, axis: int | None, place: int, size: int, sharding: NamedSharding | None
) -> jax.Array:
    """Returns an array with its mapped axis at `place`; one that has none, `size` times.

    `sharding` says how an array of the mapped axis alone is sharded.
    """
    if axis is not None:
        return jnp.moveaxis(x, axis, place)
    shape = (*x.shape[:place], size, *x.shape[place:])
    others = tuple(index for index in range(len(shape)) if index != place)
    if sharding is None:
        return jax.lax.broadcast_in_dim(x, shape, others)
    (names,) = sharding.spec
    spec = spec_of(jax.typeof(x))
    spec.insert(place, names)
    made: jax.Array = jax.lax.broadcast_in_dim(
        x, shape, others, out_sharding=sharding.update(spec=PartitionSpec(*spec))
    )
    return made


def reshaped(aval: Any, shape: tuple[Any, ...]) -> Any:
    """Returns the type of an array in another shape; how that is sharded is not told."""
    if aval.shape == shape:
        return aval
    more: dict[str, Any] = {}
    if isinstance(getattr(aval, "sharding", None), NamedSharding):
        more["sharding"] = aval.sharding.update(spec=PartitionSpec(*[None] * len(shape)))
    return aval.update(shape=shape, **more)


def spec_of(aval: Any) -> list[Any]:
    """Returns how every axis of an array is sharded."""
    sharding = getattr(aval, "sharding", None)
    spec = sharding.spec if isinstance(sharding, NamedSharding) else ()
    return [*spec, *[None] * (aval.ndim - len(spec))]


def wide(array: jax.Array) -> jax.Array:
    """Returns an array in f32, or as it is where that is wider."""
    return array.astype(wide_dtype(array.dtype))


def wide_dtype(dtype: Any) -> Any:
    """Returns float32, or a dtype of floats that is wider.

    Unlike `jnp.promote_types`, it takes no side in `jax_numpy_dtype_promotion`.
    """
    is_wider = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > FLOAT32.itemsize
    return dtype if is_wider else FLOAT32


def added(array: jax.Array, other: jax.Array) -> jax.Array:
    """Returns the sum of arrays of floats in the wider dtype, of which `array` has all axes."""
    first, second = _alike(array, other)
    return first + second


def multiplied(array: jax.Array, other: jax.Array) -> jax.Array:
    """Returns the product of arrays of floats in the wider dtype, of which `array` has all axes."""
    first, second = _alike(array, other)
    return first * second


def _alike(array: jax.Array, other: jax.Array) -> tuple[jax.Array, jax.Array]:
    dtype = max(array.dtype, other.dtype, key=lambda dtype: int(dtype.itemsize))
    return array.astype(dtype), of_rank(other, array).astype(dtype)


def of_rank(array: jax.Array, like: jax.Array) -> jax.Array:
    """Returns an array with as many axes as `like` has, the first of them of 1.

    So it broadcasts to `like` where `jax_numpy_rank_promotion` forbids that of fewer axes, too.
    """
    return jax.lax.expand_dims(array, range(like.ndim - array.ndim))
