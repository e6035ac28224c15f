"""A decoder's cache of keys and values."""

from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
from jax.typing import DTypeLike

from ..checks import check_dtype_named, check_integer
from ..keywords import hinted
from .config import DecoderConfig, check_config

Array = jax.Array


class Cache(NamedTuple):
    """Keys and values of all layers, each [L, B, S, K, head_dim], in the parameters' dtype."""

    keys: Array
    values: Array


# Exported programs take it and give it back.
jax.export.register_namedtuple_serialization(Cache, serialized_name="pallas_bridge.Cache")


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

    Raises:
      TypeError: another config, a size that is no integer, or a dtype that is not taken.
      ValueError: a size below 1.
    """
    check_config(config)
    batch, length = check_integer("batch", batch, 1), check_integer("length", length, 1)
    return make_cache(config, batch, length, check_dtype_named("dtype", dtype))


def make_cache(config: DecoderConfig, batch: Any, length: int, dtype: Any) -> Cache:
    """Returns a cache of zeros, of arguments that are checked; `batch` may be a symbol."""
    shape = (config.layers, batch, length, config.kv_heads, config.head_dim)
    return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
