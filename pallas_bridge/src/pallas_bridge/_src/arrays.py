"""Declarations of a call's arrays by their dimensions, and the shapes that follow.

A declaration is a text such as "*batch V". `*batch` stands for any number of axes of tokens, also
none. An operand without `*batch` is shared by all tokens, and a result without it is a sum over
them. Where `vmap` maps a shared operand or a sum, the mapped axes come first, as they do among the
axes of tokens.

A dimension "D/128" of a result is the number of blocks of 128 in D, the last perhaps smaller. An
axis "2.F" or "F.2" packs two axes: one in programs, two in handlers.
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
    """The dimensions of an operand or a result: its named axes, and whether tokens come before."""

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
        """The names that give the extents of the named axes: F for "2.F", "F.2" and "F"."""
        return tuple(factor_of(name)[0] for name in self.names)


def factor_of(name: str) -> tuple[str, int]:
    """Returns the name and the multiple that give the extent of an axis: F and 2 for "2.F"."""
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
    # Index of the operand whose dtype it has; if None, `dtype` is its dtype.
    like: int | None = None
    dtype: Any = np.float32


@dataclass(frozen=True)
class Signature:
    """The declared operands and results of a call."""

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    # Named axes that a mesh may shard like those of tokens, which they directly follow in every
    # array that has them. `vmap` adds no axis after them.
    sharded: tuple[str, ...] = ()

    @staticmethod
    def of(
        operands: Sequence[str], results: Sequence[Result], sharded: tuple[str, ...] = ()
    ) -> "Signature":
        """Returns the signature of declarations."""
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
        """Returns the extents of operands' named axes, packed axes as two."""
        pairs = zip(self.operands, avals, strict=True)
        return {name: extent for dims, aval in pairs for name, extent in dims.unpacked(aval)}

    def whole(self, dims: Dims, aval: Any) -> list[tuple[str, Any]]:
        """Returns names and extents of the axes that handlers need whole of an array."""
        may_be_sharded = self.sharded if dims.has_tokens else ()
        return [axis for axis in dims.unpacked(aval) if axis[0] not in may_be_sharded]

    def mapped_axes(self, avals: Sequence[Any]) -> int:
        """Returns the most mapped axes that any shared operand has."""
        shared = zip(self.operands, avals, strict=True)
        return max((dims.leading(aval) for dims, aval in shared if not dims.has_tokens), default=0)

    def _tokens(self, avals: Sequence[Any]) -> tuple[Dims, Any]:
        """Returns the operand with tokens that has the fewest named axes, and its type."""
        pairs = zip(self.operands, avals, strict=True)
        return min(
            (pair for pair in pairs if pair[0].has_tokens), key=lambda pair: len(pair[0].names)
        )

    def result_avals(
        self, results: Sequence[Result], avals: Sequence[Any], mapped: int
    ) -> list[Any]:
        """Returns the types of results; sums keep the first `mapped` axes of tokens."""
        dims, tokens = self._tokens(avals)
        leading = tokens.shape[: dims.leading(tokens)]
        extents, mesh_axes = self.extents(avals), self.sharded_over(avals)
        # The type of a constant that was made outside of a mesh has no mesh.
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
        """Returns the explicit mesh axes that shard each named axis, without unsharded axes.

        The sharding of an operand with tokens takes precedence over that of a shared operand.
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
        """Refuses shardings by explicit axes for which XLA would gather operands.

        Types show only the sharding by explicit axes. `columns` is a named axis that may be
        sharded, in the same way in all operands with tokens.

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
    """Returns `count` times the extent of a dimension, or its number of blocks for "D/128"."""
    of, _, block = name.partition("/")
    if of.isdigit():
        return int(of)
    # Extents may be symbolic.
    return -(-extents[of] // int(block)) if block else extents[of] * count


def with_mapped_axis(
    dims: Sequence[Dims],
    operands: Sequence[Any],
    axes: Sequence[int | None],
    most: int | None = None,
) -> tuple[list[jax.Array], int]:
    """Returns operands whose mapped axis is an axis of tokens, and its index among these.

    Mapped axes of shared operands are the first axes of tokens. So the new axis is the first if it
    maps a shared operand, and otherwise comes after all mapped axes of shared operands. Its index
    is at most `most`, if given.
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
    """Returns the sharding of an array's axis by explicit mesh axes, or None."""
    sharding = getattr(jax.typeof(x), "sharding", None)
    names = spec_of(jax.typeof(x))[axis]
    if not isinstance(sharding, NamedSharding) or names is None:
        return None
    found: NamedSharding = sharding.update(spec=PartitionSpec(names))
    return found


def _with_axis(
    x: jax.Array, axis: int | None, place: int, size: int, sharding: NamedSharding | None
) -> jax.Array:
    """Returns an array with its mapped axis at `place`; repeats an unmapped array `size` times.

    `sharding` is that of the mapped axis.
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
    """Returns the type of an array in another shape, without a sharding."""
    if aval.shape == shape:
        return aval
    more: dict[str, Any] = {}
    if isinstance(getattr(aval, "sharding", None), NamedSharding):
        more["sharding"] = aval.sharding.update(spec=PartitionSpec(*[None] * len(shape)))
    return aval.update(shape=shape, **more)


def spec_of(aval: Any) -> list[Any]:
    """Returns the mesh axes that shard each axis of an array, None for unsharded axes."""
    sharding = getattr(aval, "sharding", None)
    spec = sharding.spec if isinstance(sharding, NamedSharding) else ()
    return [*spec, *[None] * (aval.ndim - len(spec))]


def wide(array: jax.Array) -> jax.Array:
    """Returns an array in float32, or unchanged if its dtype is wider."""
    return array.astype(wide_dtype(array.dtype))


def wide_dtype(dtype: Any) -> Any:
    """Returns float32, or `dtype` if it is a wider float.

    Unlike `jnp.promote_types`, it ignores `jax_numpy_dtype_promotion`.
    """
    is_wider = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > FLOAT32.itemsize
    return dtype if is_wider else FLOAT32


def added(array: jax.Array, other: jax.Array) -> jax.Array:
    """Returns array + other in the wider of two float dtypes; `array` has at least as many axes."""
    first, second = _alike(array, other)
    return first + second


def multiplied(array: jax.Array, other: jax.Array) -> jax.Array:
    """Returns array * other in the wider of two float dtypes; `array` has at least as many axes."""
    first, second = _alike(array, other)
    return first * second


def _alike(array: jax.Array, other: jax.Array) -> tuple[jax.Array, jax.Array]:
    dtype = max(array.dtype, other.dtype, key=lambda dtype: int(dtype.itemsize))
    return array.astype(dtype), match_rank(other, array).astype(dtype)


def match_rank(array: jax.Array, like: jax.Array) -> jax.Array:
    """Returns an array with leading axes of 1, so that it has as many axes as `like`.

    It then broadcasts to `like` even if `jax_numpy_rank_promotion` is "raise".
    """
    return jax.lax.expand_dims(array, range(like.ndim - array.ndim))
