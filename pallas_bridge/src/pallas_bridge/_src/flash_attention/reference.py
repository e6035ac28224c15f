"""Attention written plainly, for XLA to make the dense program of, with all logits in memory.

It is what kernels are held against, and what runs where there is none. Arrays are those of calls:
q [.., G, S, D], k [.., K, D], v [.., K, E].
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ..arrays import match_rank
from .options import Options


@dataclass(frozen=True)
class Operands:
    """The arrays of a call, by their names."""

    q: Any
    k: Any
    v: Any
    ranges: Any
    segments: Any
    sinks: Any

    @staticmethod
    def of(options: Options, arrays: Sequence[Any]) -> "Operands":
        """Returns the arrays of a call by their names."""
        q, k, v, ranges, *more = arrays
        segments = (more.pop(0), more.pop(0)) if options.has_segments else None
        return Operands(q, k, v, ranges, segments, more.pop(0) if options.has_sinks else None)


def forward(options: Options, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns o [.., G, S, E], and lse [.., G, S] in float32.

    The formulas are those of crates/xentile/src/flash_attention.rs. Logits and sums are f32;
    probabilities are rounded to the dtype of v as operands of a product. A key or a value that a
    query does not see changes nothing of it, NaN and infinity neither.
    """
    of = Operands.of(options, arrays)
    first, end = of.ranges[..., 0], of.ranges[..., 1]
    sees_any = first < end
    every = jnp.arange(of.k.shape[-2], dtype=jnp.int32)
    # What nobody sees may be NaN.
    least = jnp.where(sees_any, first, of.k.shape[-2]).min(-1, initial=of.k.shape[-2])
    most = jnp.where(sees_any, end, 0).max(-1, initial=0)
    keys = match_rank(every, first)
    is_read = ((least[..., None] <= keys) & (keys < most[..., None]))[..., None]
    k, v = jnp.where(is_read, of.k, 0), jnp.where(is_read, of.v, 0)
    q = jnp.where(sees_any[..., None, :, None], of.q, 0)
    seen = _seen(of)
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    logits = product("...gsd,...kd->...gsk", q, k) * options.scale
    if options.softcap is not None:
        logits = options.softcap * jnp.tanh(logits / options.softcap)
    logits = jnp.where(seen, logits, -jnp.inf)
    largest = jax.lax.stop_gradient(logits.max(-1, initial=-jnp.inf))
    sink = None if of.sinks is None else of.sinks.astype(jnp.float32)[..., None]
    if sink is not None:
        largest = jnp.maximum(largest, jax.lax.stop_gradient(sink))
    largest = jnp.where(largest == -jnp.inf, 0, largest)
    # Exponentials of what is not seen have no derivative, not even that of infinity. NaN is seen.
    differences = jnp.where(seen & (logits != -jnp.inf), logits - largest[..., None], -jnp.inf)
    is_seen = differences != -jnp.inf
    weights = jnp.where(is_seen, jnp.exp(jnp.where(is_seen, differences, 0)), 0)
    total = weights.sum(-1)
    if sink is not None:
        total = total + jnp.exp(sink - largest)
    is_empty = total == 0
    safe = jnp.where(is_empty, 1, total)
    lse = jnp.where(is_empty, -jnp.inf, largest + jnp.log(safe))
    p = jnp.where(seen, weights / safe[..., None], 0).astype(v.dtype)
    # A probability of 0 times NaN is NaN.
    is_unfit = _is_unfit(v)
    o = product("...gsk,...ke->...gse", p, jnp.where(is_unfit[..., None], 0, v))
    sees_unfit = (seen & is_unfit[..., None, None, :]).any(-1)[..., None]
    o = o * jnp.where(sees_unfit, jnp.nan, 1).astype(o.dtype)
    return jnp.where(sees_any[..., None, :, None], o, 0).astype(q.dtype), lse


def _seen(of: Operands) -> jax.Array:
    """Returns which keys each query sees, [.., 1, S, K]."""
    first, end = of.ranges[..., 0], of.ranges[..., 1]
    keys = match_rank(jnp.arange(of.k.shape[-2], dtype=jnp.int32), of.ranges)
    seen = (first[..., None] <= keys) & (keys < end[..., None])
    if of.segments is not None:
        seen &= of.segments[0][..., None] == of.segments[1][..., None, :]
    of_group: jax.Array = seen[..., None, :, :]
    return of_group


def _is_unfit(rows: jax.Array) -> jax.Array:
    """Returns which rows have an entry that is not finite."""
    return ~jnp.isfinite(rows).all(-1)


def gradients(
    options: Options, arrays: Sequence[jax.Array], do: jax.Array, dlse: jax.Array | None
) -> tuple[jax.Array, ...]:
    """Returns the gradients of q, k, v and, with sinks, these, made anew from arrays.

    They are NaN for queries that see what is not finite or are so themselves, and for keys that
    such queries see, and of no other.
    """
    of = Operands.of(options, arrays)
    seen = _seen(of)
    unfit_keys, unfit_rows = _is_unfit(of.k) | _is_unfit(of.v), _is_unfit(of.q) | _is_unfit(do)
    if dlse is not None:
        unfit_rows |= ~jnp.isfinite(dlse)
    sees_unfit = (seen & unfit_keys[..., None, None, :]).any(-1)
    lost_rows = (unfit_rows | sees_unfit) & seen.any(-1)
    lost_keys = (seen & lost_rows[..., None]).any((-3, -2))
    q, do = (jnp.where(unfit_rows[..., None], 0, one) for one in (of.q, do))
    k, v = (jnp.where(unfit_keys[..., None], 0, one) for one in (of.k, of.v))
    dlse = None if dlse is None else jnp.where(unfit_rows, 0, dlse)
    found = _gradients(options, (q, k, v, *arrays[3:]), do, dlse)
    lost = (lost_rows[..., None], lost_keys[..., None], lost_keys[..., None], lost_rows.any(-1))
    pairs = zip(lost, found, strict=False)  # there may be no sinks
    return tuple(jnp.where(is_lost, jnp.nan, one) for is_lost, one in pairs)


def key_block_cotangents(
    options: Options,
    arrays: Sequence[jax.Array],
    o: jax.Array,
    lse: jax.Array,
    do: jax.Array,
    dlse: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the cotangents of a key block's own results, of those of all blocks' o and lse.

    With n for a block: o = sum(exp(lse_n - lse) o_n), so that do_n = exp(lse_n - lse) do, and
    dlse_n = exp(lse_n - lse) (do . (o_n - o) + dlse).
    """
    own_o, own_lse = forward(options, *arrays)
    share = jnp.exp(own_lse - jnp.where(lse == -jnp.inf, 0, lse))
    wide = do.astype(jnp.float32)
    change = (wide * (own_o.astype(jnp.float32) - o)).sum(-1)
    change = change if dlse is None else change + dlse
    return (share[..., None] * wide).astype(do.dtype), share * change


def _gradients(
    options: Options, arrays: Sequence[jax.Array], do: jax.Array, dlse: jax.Array | None
) -> tuple[jax.Array, ...]:
    moving = [0, 1, 2, *([len(arrays) - 1] if options.has_sinks else [])]

    def run_forward(*given: jax.Array) -> Any:
        every = [*arrays]
        for index, array in zip(moving, given, strict=True):
            every[index] = array
        found = forward(options, *every)
        return found if dlse is not None else found[0]

    _, vjp = jax.vjp(run_forward, *(arrays[index] for index in moving))
    found: tuple[jax.Array, ...] = vjp(do if dlse is None else (do, dlse))
    return found
