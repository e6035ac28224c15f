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
    probabilities are rounded to the dtype of v as operands of a product.
    """
    of = Operands.of(options, arrays)
    first, end = of.ranges[..., 0], of.ranges[..., 1]
    sees_any = first < end
    keys = jnp.arange(of.k.shape[-2], dtype=jnp.int32)
    seen = (first[..., None] <= keys) & (keys < end[..., None])
    # What nobody sees may be NaN.
    least = jnp.where(sees_any, first, of.k.shape[-2]).min(-1, initial=of.k.shape[-2])
    most = jnp.where(sees_any, end, 0).max(-1, initial=0)
    is_read = ((least[..., None] <= keys) & (keys < most[..., None]))[..., None]
    k, v = jnp.where(is_read, of.k, 0), jnp.where(is_read, of.v, 0)
    q = jnp.where(sees_any[..., None, :, None], of.q, 0)
    if of.segments is not None:
        seen &= of.segments[0][..., None] == of.segments[1][..., None, :]
    seen = seen[..., None, :, :]
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
    # Exponentials of what is not seen have no derivative, not even that of infinity.
    differences = jnp.where(seen & (logits > -jnp.inf), logits - largest[..., None], -jnp.inf)
    is_seen = differences != -jnp.inf
    weights = jnp.where(is_seen, jnp.exp(jnp.where(is_seen, differences, 0)), 0)
    total = weights.sum(-1)
    if sink is not None:
        total = total + jnp.exp(sink - largest)
    is_empty = total == 0
    safe = jnp.where(is_empty, 1, total)
    lse = jnp.where(is_empty, -jnp.inf, largest + jnp.log(safe))
    p = (weights / safe[..., None]).astype(v.dtype)
    o = product("...gsk,...ke->...gse", p, v)
    return jnp.where(sees_any[..., None, :, None], o, 0).astype(q.dtype), lse


def gradients(
    options: Options, arrays: Sequence[jax.Array], do: jax.Array, dlse: jax.Array | None
) -> tuple[jax.Array, ...]:
    """Returns the gradients of q, k, v and, with sinks, these, made anew from arrays."""
    moving = [0, 1, 2, *([len(arrays) - 1] if options.has_sinks else [])]

    def of_moving(*given: jax.Array) -> Any:
        every = [*arrays]
        for index, array in zip(moving, given, strict=True):
            every[index] = array
        found = forward(options, *every)
        return found if dlse is not None else found[0]

    _, pull = jax.vjp(of_moving, *(arrays[index] for index in moving))
    found: tuple[jax.Array, ...] = pull(do if dlse is None else (do, dlse))
    return found
