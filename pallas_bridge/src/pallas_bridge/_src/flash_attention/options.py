"""The options of attention, the checks of what a user passes, and which keys queries see."""

import math
import operator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..arrays import match_rank
from ..checks import as_array, check_dtype, check_flag, check_float32, refuse_traced

MOST_COLUMNS = 256
COLUMNS_STEP = 8
# What takes these, which are none of ours.
ELSEWHERE = "jax.nn.dot_product_attention"

SHAPES = {
    "q": "[B, S, H, D] or [S, H, D]",
    "k": "[B, Skv, Hkv, D] or [Skv, Hkv, D]",
    "v": "[B, Skv, Hkv, Dv] or [Skv, Hkv, Dv]",
}

# Keys before a query's own place, and behind it; None for all.
Window = tuple[int | None, int | None]


@dataclass(frozen=True)
class Options:
    """What docs/internals/custom-calls.md calls attributes, and masks as far as they are static."""

    scale: float
    softcap: float | None = None
    causal: bool = False
    window: Window = (None, None)
    # Whether lengths say more of what queries see than `causal` and `window` do.
    has_lengths: bool = False
    has_segments: bool = False
    # Whether queries and keys have the same segments, so that each sees its own place.
    is_own_segment: bool = False
    has_sinks: bool = False
    # Whether a user asks for lse.
    gives_lse: bool = False
    # Whether arrays come from memory in which a token has all of its heads, and go there.
    tokens_first: bool = False
    # Whether sums have one order where another is faster.
    deterministic: bool = True
    # What the user asked for by name.
    implementation: str | None = None
    # Whether the o and lse that a backward pass takes are of more keys than the pass has.
    is_key_block: bool = False


def check_window(window: Any, name: str = "window") -> Window:
    """Returns how many keys a query sees before its place and behind; an integer is of both sides.

    Raises:
        TypeError: it is neither an integer nor a pair of integers or None, or it is traced.
        ValueError: one is negative.
    """
    if window is None:
        return None, None
    refuse_traced(name, window)
    wrong = (
        f"{name} is {window!r}; it must be (left, right), each an integer or None, or an integer"
    )
    if isinstance(window, tuple | list):
        if len(window) != 2:
            raise TypeError(wrong)
        given = window
    else:
        given = (window, window)
    sides: list[int | None] = []
    for side in given:
        if side is None:
            sides.append(None)
            continue
        try:
            number = operator.index(side)
        except TypeError:
            raise TypeError(wrong) from None
        if isinstance(side, bool):
            raise TypeError(wrong)
        if number < 0:
            raise ValueError(
                f"{name} is {window!r}; each side must be at least 0, or None for all of it, which "
                "FlashAttention writes -1"
            )
        sides.append(number)
    return sides[0], sides[1]


def check_options(*, scale: Any, softcap: Any, causal: Any, window: Any, width: int) -> Options:
    """Returns options, each within its range.

    Raises:
        TypeError: one of the wrong type, or traced.
        ValueError: one outside its range.
    """
    if scale is None:
        scale = 1 / math.sqrt(max(width, 1))
    return Options(
        scale=check_float32("scale", scale, is_positive=False),
        softcap=None if softcap is None else check_float32("softcap", softcap, is_positive=True),
        causal=check_flag("causal", causal),
        window=check_window(window),
    )


def check_arrays(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    """Checks shapes and dtypes.

    Raises:
        TypeError: a dtype that is not taken.
        ValueError: shapes that disagree, heads that no one can share, or columns not taken.
    """
    for name, array in (("q", q), ("k", k), ("v", v)):
        check_dtype(name, array)
    if q.ndim not in (3, 4):
        raise ValueError(f"q has shape {q.shape}; it must be [B, S, H, D] or [S, H, D]")
    *batch, _, heads, width = q.shape
    if k.ndim != q.ndim or [*k.shape[:-3]] != batch or k.shape[-1] != width:
        right = ", ".join(map(str, [*batch, "Skv", "Hkv", width]))
        raise ValueError(f"k has shape {k.shape}; it must be [{right}], as q has {q.shape}")
    if v.shape[:-1] != k.shape[:-1]:
        right = ", ".join(map(str, [*k.shape[:-1], "Dv"]))
        raise ValueError(f"v has shape {v.shape}; it must be [{right}], as k has {k.shape}")
    if k.shape[-2] == 0 or heads % k.shape[-2]:
        raise ValueError(
            f"q has {heads} heads and k {k.shape[-2]}; those of q must be a multiple of those of k"
            + _transposed_hint(q, k)
        )
    for name, array in (("q", q), ("v", v)):
        columns = array.shape[-1]
        if columns == 0 or columns % COLUMNS_STEP or columns > MOST_COLUMNS:
            raise ValueError(
                f"{name} has heads of {columns} columns; it must be a multiple of {COLUMNS_STEP} "
                f"up to {MOST_COLUMNS} ({ELSEWHERE} takes others)"
            )


def _transposed_hint(q: jax.Array, k: jax.Array) -> str:
    """Returns what to do of arrays whose heads seem to come before their tokens, or nothing."""
    of_queries, of_keys = q.shape[-3], k.shape[-3]
    fits = all(isinstance(one, int) and one > 0 for one in (of_queries, of_keys))
    if not fits or of_queries % of_keys:
        return ""
    batch = "B, " if q.ndim == 4 else ""
    return (
        f". q, k and v are [{batch}S, H, D] here, of shapes {q.shape} and {k.shape}: if they are "
        f"[{batch}H, S, D], of {of_queries} and {of_keys} heads, swap these axes first "
        "(jnp.swapaxes(x, -3, -2))"
    )


def integers(name: str, value: Any, shape: tuple[int, ...]) -> jax.Array:
    """Returns an array of integers of a shape, in int32.

    Raises:
        TypeError: it is none of integers.
        ValueError: it has another shape.
    """
    array = as_array(name, value, f"of integers, of shape {shape}")
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} has dtype {array.dtype}; it must be of integers")
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}; it must be {shape}")
    return array.astype(jnp.int32)


def segments(value: Any, q_shape: tuple[int, ...], kv_shape: tuple[int, ...]) -> Any:
    """Returns the segments of queries and keys, and whether they are the same.

    Raises:
        TypeError: they are none of integers.
        ValueError: they have other shapes, or there is one for both and these differ.
    """
    if isinstance(value, tuple) and len(value) == 2:
        of_queries, of_keys = value
        found = integers("segment_ids[0]", of_queries, q_shape)
        return found, integers("segment_ids[1]", of_keys, kv_shape), of_queries is of_keys
    if q_shape != kv_shape:
        raise ValueError(
            f"segment_ids is one array, and q has {q_shape} rows and k {kv_shape}; it must be a "
            "pair, (q_segments, kv_segments)"
        )
    found = integers("segment_ids", value, q_shape)
    return found, found, True


def check_sinks(sinks: Any, heads: int) -> jax.Array:
    """Returns sinks [H] in float32.

    Raises:
        TypeError: they are no floats.
        ValueError: they have another shape.
    """
    array = as_array("sinks", sinks, "[H]")
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"sinks has dtype {array.dtype}; it must be of floats")
    if array.shape != (heads,):
        raise ValueError(f"sinks has shape {array.shape}; it must be ({heads},), one a head of q")
    return array.astype(jnp.float32)


def ranges(options: Options, queries: int, keys: int, lengths: Any, cumulative: Any) -> Any:
    """Returns the first key that each query sees and the one behind its last: [.., S, 2] in int32.

    `lengths` is a pair of integers [..] or None, of queries and of keys; `cumulative` a pair of
    [N + 1], or None. Queries and keys of a sequence end together. Without either it is an array of
    numpy's, unless extents are symbols.
    """
    is_static = isinstance(queries, int) and isinstance(keys, int)
    numpy: Any = np if is_static and lengths is None and cumulative is None else jnp
    place = numpy.arange(queries, dtype=numpy.int32)
    first: Any = 0
    length: Any = keys
    of_queries: Any = queries
    is_own = None
    if lengths is not None:
        given, of_keys = (None if one is None else one[..., None] for one in lengths)
        like: Any = of_keys if given is None else given
        place = match_rank(place, like)
        of_queries = queries if given is None else jnp.clip(given, 0, queries)
        length = keys if of_keys is None else jnp.clip(of_keys, 0, keys)
        is_own = place < of_queries
    if cumulative is not None:
        q_ends, kv_ends = cumulative
        index = jnp.searchsorted(q_ends, place, side="right").astype(jnp.int32) - 1
        is_own = (index >= 0) & (index < q_ends.shape[0] - 1)
        index = jnp.clip(index, 0, q_ends.shape[0] - 2)
        of_queries = q_ends[index + 1] - q_ends[index]
        first, length = kv_ends[index], kv_ends[index + 1] - kv_ends[index]
        place = place - q_ends[index]
    place = place + (length - of_queries)
    before, after = options.window
    if options.causal:
        after = 0
    # No window is wider than that.
    most = 2**30
    low = numpy.zeros_like(place) if before is None else place - min(before, most)
    high = numpy.zeros_like(place) + length if after is None else place + (min(after, most) + 1)
    low, high = numpy.clip(low, 0, length), numpy.clip(high, 0, length)
    low, high = first + low, first + numpy.maximum(high, low)
    if is_own is not None:
        low, high = numpy.where(is_own, low, 0), numpy.where(is_own, high, 0)
    return numpy.stack([low, high], -1).astype(numpy.int32)
