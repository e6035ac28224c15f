"""Loops over chunks of rows: tokens, or columns of a vocabulary."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .compat import varying_axes
from .custom_call import vary_alike


def make_alike(*arrays: Any) -> list[Any]:
    """Returns arrays that vary over the same axes within `shard_map`; None stays None.

    The weight that every device has then varies too, and so does its gradient. The transpose is a
    sum over devices.
    """
    varying = iter(vary_alike([x for x in arrays if x is not None]))
    return [None if x is None else next(varying) for x in arrays]


def zeros(
    like: jax.Array, shape: tuple[int, ...] | None = None, dtype: Any = jnp.float32
) -> jax.Array:
    """Returns zeros of `shape`, or of the shape of `like`, for a loop to fill.

    Within `shard_map` they vary over the axes that `like` varies over, as what fills them does.
    """
    return _vary_as(like, jnp.zeros(like.shape if shape is None else shape, dtype))


def empty(like: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Returns an array of any values for a loop to fill, which varies as that of `zeros` does."""
    return _vary_as(like, jax.lax.empty(shape, dtype))


def _vary_as(like: jax.Array, made: jax.Array) -> jax.Array:
    axes = tuple(sorted(varying_axes(jax.typeof(like) if isinstance(like, jax.Array) else like)))
    return jax.lax.pcast(made, axes, to="varying") if axes else made


def is_one_chunk(chunk: int, total: Any) -> bool:
    """Whether one chunk has all of `total`; False for a symbolic total."""
    return isinstance(total, int) and chunk >= total


def held_extent(total: int, chunk: int) -> int:
    """Returns rows or columns that have memory: a chunk, and a shorter last one beside it."""
    return chunk + total % chunk if 0 < chunk < total else chunk


def even_chunk(total: int, most: int, step: int) -> int:
    """Returns a chunk, a multiple of `step`, for the fewest chunks of at most `most` at once."""
    if total <= most:
        return total
    count = -(-total // most)
    while True:
        chunk = -(-total // count)
        chunk = -(-chunk // step) * step
        if held_extent(total, chunk) <= most or chunk <= step:
            return chunk
        count += 1


def for_each_chunk(
    total: Any,
    chunk: int,
    body: Callable[[Any, int, Any], Any],
    carry: Any,
    *,
    is_reversed: bool = False,
) -> Any:
    """Applies body(first, count, carry) to every chunk, the last of which may be shorter.

    A symbolic total is a multiple of the chunk.
    """
    whole, rest = divmod(total, chunk)
    if rest and is_reversed:
        carry = body(whole * chunk, rest, carry)
    if whole == 1:
        carry = body(0, chunk, carry)
    elif whole:

        def run(n: Any, carry: Any) -> Any:
            return body((whole - 1 - n if is_reversed else n) * chunk, chunk, carry)

        carry = jax.lax.fori_loop(0, whole, run, carry)
    return body(whole * chunk, rest, carry) if rest and not is_reversed else carry


def map_chunks(function: Callable[..., Any], arrays: Sequence[Any], chunk: int) -> Any:
    """Returns a tree of arrays [N, ..]: function(*rows) of each chunk of trees of arrays [N, ..].

    The last chunk may be shorter; a symbolic N is a multiple of the chunk.
    """
    total = jax.tree.leaves(arrays)[0].shape[0]
    if total == 0 or is_one_chunk(chunk, total):
        return function(*arrays)
    whole, rest = divmod(total, chunk)

    def split(x: jax.Array) -> jax.Array:
        return x[: whole * chunk].reshape(whole, chunk, *x.shape[1:])

    found = jax.lax.map(lambda rows: function(*rows), jax.tree.map(split, tuple(arrays)))
    found = jax.tree.map(lambda x: x.reshape(whole * chunk, *x.shape[2:]), found)
    if not rest:
        return found
    last = function(*jax.tree.map(lambda x: x[whole * chunk :], tuple(arrays)))
    return jax.tree.map(lambda *both: jnp.concatenate(both), found, last)


def slice_rows(first: Any, count: int, *arrays: Any) -> tuple[Any, ...]:
    """Returns `count` rows of each array, of trees of arrays, too."""

    def slice_one(x: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, first, count)

    rows: tuple[Any, ...] = jax.tree.map(slice_one, arrays)
    return rows


def put_rows(arrays: Any, rows: Any, first: Any) -> Any:
    """Returns arrays with rows from `first` on replaced, in the arrays' dtypes."""
    return tuple(
        jax.lax.dynamic_update_slice_in_dim(array, some.astype(array.dtype), first, 0)
        for array, some in zip(arrays, rows, strict=True)
    )


def pad_tokens(chunk: int, *arrays: Any) -> list[Any]:
    """Returns arrays [N, ..], and None, with zeros for tokens that fill the last chunk."""

    def fill(x: jax.Array) -> jax.Array:
        count = x.shape[0]
        # As JAX knows a symbolic one for a multiple of the chunk.
        whole = chunk * ((count + chunk - 1) // chunk)
        return jnp.pad(x, [(0, whole - count), *[(0, 0)] * (x.ndim - 1)])

    filled: list[Any] = jax.tree.map(fill, list(arrays))
    return filled
