"""Segments as ranges of keys, for GPUs, whose kernels skip tiles that are out of range."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .. import meshes
from ..bound import Bound


@partial(jax.jit, static_argnames="is_own")
def narrow_ranges(
    ranges: jax.Array, q_segments: jax.Array, kv_segments: jax.Array, *, is_own: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns ranges and segments that say the same, for kernels of GPUs; others get them back.

    Ranges [.., S, 2] end at the first and the last key of a query's segment [.., S]. Where all keys
    between these are of the segment, for every query of a batch entry, its segments are all 0:
    the ranges say what queries see. With `is_own` both segments are the same.
    """
    arrays = ranges, q_segments, kv_segments
    keys = kv_segments.shape[-1]
    if not isinstance(keys, int) or keys == 0:
        return arrays
    narrowed: Any = Bound(on_cuda, is_own)
    batch = meshes.sharded_over(q_segments)[:-1]
    names = frozenset(name for names in batch for name in names)
    if names or any(map(any, map(meshes.sharded_over, arrays))):
        # What gathers and scatters make of explicit axes would have to be named for each.
        mesh = meshes.mesh_of(*arrays)
        by_batch = PartitionSpec(*map(meshes.entry, batch))
        ranges, q_segments, kv_segments = (meshes.place(mesh, by_batch, one) for one in arrays)
        arrays = ranges, q_segments, kv_segments
        if names:
            narrowed = meshes.on_devices(mesh, names, narrowed, (by_batch,) * 3, (by_batch,) * 3)
    found: tuple[jax.Array, jax.Array, jax.Array] = jax.lax.platform_dependent(
        *arrays, cuda=narrowed, default=_as_they_are
    )
    return found


def _as_they_are(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    return arrays


def on_cuda(
    is_own: bool, ranges: jax.Array, q_segments: jax.Array, kv_segments: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns what `narrow_ranges` does on NVIDIA GPUs.

    Ids share buckets by their lowest bits, so that hulls may be too wide; the ids decide then.
    Batch entries are indexed by iotas, which XLA partitions, and checkify has a check for.
    """
    *batch, keys = kv_segments.shape
    buckets = 1 << keys.bit_length()
    key = jax.lax.broadcasted_iota(jnp.int32, kv_segments.shape, len(batch))
    shape = (*batch, 1)
    entry = tuple(jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(len(batch)))
    key_buckets, query_buckets = (one & (buckets - 1) for one in (kv_segments, q_segments))
    # The larger, the earlier the first key of a bucket, and the later its last.
    ends = jnp.stack([keys - key, key + 1], -1)
    table = jnp.zeros((*batch, buckets, 2), jnp.int32)
    table = table.at[(*entry, key_buckets)].max(ends, mode="promise_in_bounds")
    hull = table.at[(*entry, query_buckets)].get(mode="promise_in_bounds")
    first = keys - hull[..., 0]
    low = jnp.maximum(ranges[..., 0], first)
    high = jnp.maximum(jnp.minimum(ranges[..., 1], hull[..., 1]), low)
    # Each id has one run of keys, and no other id its bucket: there are as many of these as runs.
    runs = (kv_segments[..., 1:] != kv_segments[..., :-1]).sum(-1, keepdims=True) + 1
    is_single = runs == (table[..., 0] > 0).sum(-1, keepdims=True)
    if not is_own:
        first_key = (*entry, jnp.minimum(first, keys - 1))
        of_first = kv_segments.at[first_key].get(mode="promise_in_bounds")
        is_single &= ((low >= high) | (of_first == q_segments)).all(-1, keepdims=True)
    of_queries, of_keys = (jnp.where(is_single, 0, one) for one in (q_segments, kv_segments))
    return jnp.stack([low, high], -1), of_queries, of_keys
