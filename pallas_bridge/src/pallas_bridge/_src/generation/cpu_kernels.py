"""Kernels of a step for CPUs, which read weights and cache once, where they are.

XLA's own program for CPUs converts matrices of 16 bits to float32 in every step, and the whole
cache in every layer.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import library
from .cache import Cache
from .config import DecoderConfig
from .parameters import are_on_one_device

Array = jax.Array
LINEAR, APPEND, ATTENTION = (
    "xentile_linear",
    "xentile_kv_cache_append",
    "xentile_kv_cache_attention",
)
# The most tokens of a product: XLA's takes as long for more.
MOST_TOKENS = 8


def are_there() -> bool:
    """Returns whether the library has the kernels."""
    return all(library.has("cpu", target) for target in (LINEAR, APPEND, ATTENTION))


def are_usable(params: Any) -> bool:
    """Returns whether the kernels run on parameters where a program is for CPUs."""
    arrays = jax.tree.leaves(params)
    return are_there() and are_on_one_device(arrays, len(jax.devices("cpu")))


def linear(
    x: Array, weights: Array, layer: Array | int, dtype: Any = None, *, by_kernel: bool
) -> Array:
    """Returns x [.., I] times the transpose of weights[layer], of weights [L, O, I].

    Args:
        x: Tokens.
        weights: Those of all layers.
        layer: The layer's index.
        dtype: That of the result; None for that of x.
        by_kernel: Whether CPUs take the kernel, for few tokens of the dtype of the weights.
    """
    dtype = x.dtype if dtype is None else dtype
    operands = x, weights, jnp.asarray(layer, jnp.int32)
    by_xla = partial(_dot, dtype=dtype)
    count = math.prod(x.shape[:-1])
    # Symbolic extents of exported programs are taken for large ones.
    is_small = isinstance(count, int) and count <= MOST_TOKENS
    if not (by_kernel and is_small and x.dtype == weights.dtype):
        return by_xla(*operands)
    result = jax.ShapeDtypeStruct((*x.shape[:-1], weights.shape[1]), dtype)
    call = jax.ffi.ffi_call(LINEAR, result, vmap_method="sequential")
    found: Array = jax.lax.platform_dependent(*operands, cpu=call, default=by_xla)
    return found


def _dot(x: Array, weights: Array, layer: Array, dtype: Any) -> Array:
    weight = jax.lax.dynamic_index_in_dim(weights, layer, keepdims=False)
    axes = (((x.ndim - 1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, weight.astype(x.dtype), axes, preferred_element_type=dtype)


def append(cache: Cache, keys: Array, values: Array, layer: Array, positions: Array) -> Cache:
    """Returns the cache with `keys` and `values` [B, T, K, head_dim] of a layer, in its place.

    Rows go to positions [B] and those that follow; those that are not in the cache are dropped.
    """
    results = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in cache]
    call = jax.ffi.ffi_call(
        APPEND, results, vmap_method="sequential", input_output_aliases={0: 0, 1: 1}
    )
    return Cache(*call(*cache, keys, values, layer, positions))


def attend(config: DecoderConfig, q: Array, cache: Cache, layer: Array, lengths: Array) -> Array:
    """Returns attention of q [B, 1, H, head_dim] over the first `lengths` [B] keys of a layer."""
    heads = q.reshape(q.shape[0], config.kv_heads, -1, config.head_dim)
    result = jax.ShapeDtypeStruct(heads.shape, heads.dtype)
    call = jax.ffi.ffi_call(ATTENTION, result, vmap_method="sequential")
    attributes = {
        "window": np.int64(config.window or cache.keys.shape[2]),
        "scale": np.float64(config.head_dim**-0.5),
    }
    o: Array = call(heads, *cache, layer, lengths, **attributes)
    return o.reshape(q.shape)
