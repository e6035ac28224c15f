"""A decoder's cache of keys and values."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ..keywords import hinted
from .config import DecoderConfig

Array = jax.Array


class Cache(NamedTuple):
    """Keys and values of all layers, each [L, B, S, K, head_dim], in the parameters' dtype."""

    keys: Array
    values: Array


@hinted
def init_cache(
    config: DecoderConfig, batch: int, length: int, *, dtype: DTypeLike = jnp.bfloat16
) -> Cache:
    """Returns a cache of zeros.

    Args:
      config: the decoder's.
      batch: sequences, B.
      length: the most tokens of a sequence, S: prompt and generated ones.
      dtype: that of the parameters.
    """
    shape = (config.layers, batch, length, config.kv_heads, config.head_dim)
    return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
