"""Segments as ranges of keys, for GPUs, whose kernels skip tiles that are out of range."""

from functools import partial
from typing import Any

import jax
from jax.sharding import PartitionSpec

from .. import meshes
from ..custom_call import bind, declared_call
from .declaration import OPERATION

RANGES = "xentile_flash_attention_ranges"


@jax.jit
def narrow_ranges(
    ranges: jax.Array, q_segments: jax.Array, kv_segments: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns ranges and segments that say the same, for kernels of GPUs; others get them back.

    Ranges [.., S, 2] end at the first and the last key of a query's segment [.., S]. Where all keys
    between these are of the segment, for every query of a batch entry, its segments are all 0:
    the ranges say what queries see.
    """
    arrays = ranges, q_segments, kv_segments
    narrowed: Any = partial(bind, declared_call(OPERATION, RANGES, {}, dense=_as_they_are))
    batch = meshes.sharded_over(q_segments)[:-1]
    names = frozenset(name for names in batch for name in names)
    if names or any(map(any, map(meshes.sharded_over, arrays))):
        # Tokens are needed whole.
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
