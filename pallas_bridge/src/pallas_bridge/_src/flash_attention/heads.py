"""Arrays as users have them, [.., S, H, D], and as calls have them, by heads of keys."""

from typing import Any

import jax
import jax.numpy as jnp

from ..arrays import match_rank


def by_kv_heads(q: jax.Array, k: jax.Array, v: jax.Array) -> list[jax.Array]:
    """Returns q [.., Hkv, G, S, D], k [.., Hkv, Skv, D] and v [.., Hkv, Skv, E].

    Each head of keys has the G queries that share it. XLA leaves the arrays of calls on GPUs as
    they lie.
    """
    *batch, queries, heads, width = q.shape
    kv_heads = k.shape[-2]
    rows = q.reshape(*batch, queries, kv_heads, heads // kv_heads, width)
    return [jnp.moveaxis(rows, -4, -2), jnp.moveaxis(k, -3, -2), jnp.moveaxis(v, -3, -2)]


def by_tokens(q: jax.Array) -> jax.Array:
    """Returns [.., S, H, D] of an array [.., Hkv, G, S, D], such as q or o."""
    *batch, kv_heads, group, queries, width = q.shape
    return jnp.moveaxis(q, -2, -4).reshape(*batch, queries, kv_heads * group, width)


def lse_by_tokens(lse: jax.Array) -> jax.Array:
    """Returns [.., S, H] of lse [.., Hkv, G, S]."""
    *batch, kv_heads, group, queries = lse.shape
    return jnp.moveaxis(lse, -1, -3).reshape(*batch, queries, kv_heads * group)


def for_kv_heads(array: Any, count: int, k: jax.Array) -> jax.Array:
    """Returns an array [.., *axes], of `count` axes, as [.., Hkv, *axes], for each head of k.

    Heads of k are [.., Hkv, Skv, D]; where a mesh shards these, the result is sharded likewise.
    """
    zero = jnp.zeros_like(k[..., 0, 0] if k.shape[-2] else k.sum((-1, -2)), jnp.int32)
    given = jnp.expand_dims(jnp.asarray(array), -count - 1)
    zeros = jnp.expand_dims(zero, tuple(range(-count, 0))).astype(given.dtype)
    return match_rank(given, zeros) + zeros


def sinks_by_kv_heads(sinks: jax.Array, k: jax.Array) -> jax.Array:
    """Returns [.., Hkv, G] of sinks [H], for heads of k [.., Hkv, Skv, D]."""
    zeros = for_kv_heads(jnp.zeros((1,), sinks.dtype), 1, k)
    by_group: jax.Array = match_rank(sinks.reshape(k.shape[-3], -1), zeros) + zeros
    return by_group
