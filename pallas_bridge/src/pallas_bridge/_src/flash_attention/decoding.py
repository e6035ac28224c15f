"""Attention of few queries over many keys on NVIDIA GPUs: the forward pass of decoding."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..bound import Bound
from ..custom_call import bind, declared_call
from ..targets import declared
from . import reference
from .declaration import OPERATION
from .options import COLUMNS_STEP, Options

DECODE = "xentile_flash_attention_decode"
Q, K, V, OUT = declared(DECODE).dims("q", "k", "v", "o")
# Arrays of tokens with all of their heads after another, as users have them.
TOKENS_FIRST = ((Q, "S"), (K, "K"), (V, "K"), (OUT, "S"))

# The most queries of a head: more of them have enough to compute.
MOST_QUERIES = 16
# Keys of a chunk, powers of two. The longer, the less there is to merge.
LEAST_CHUNK, MOST_CHUNK = 64, 4096
# Chunks that keep a GPU busy: an H200 reads 264 at a time.
ENOUGH_CHUNKS = 256
# Rows of a head of keys that share what is read of a chunk.
BLOCK = 64


def chunk_keys(heads: Any, rows: int, keys: int) -> int:
    """Returns how many keys a chunk has, for `heads` heads of keys with so many rows each.

    Symbolic heads count as one.
    """
    blocks = -(-rows // BLOCK) * (max(heads, 1) if isinstance(heads, int) else 1)
    wanted = max(blocks * keys // ENOUGH_CHUNKS, LEAST_CHUNK)
    return min(1 << (wanted - 1).bit_length(), MOST_CHUNK)


def has_kernel(options: Options, q: Any, k: Any, v: Any) -> bool:
    """Returns whether `forward` takes q [.., G, S, D], k [.., K, D] and v [.., K, E]."""
    extents = (*q.shape[-3:], *v.shape[-2:])
    if not all(isinstance(one, int) for one in extents):
        return False
    return (
        options.implementation in (None, "custom_call")
        and not options.has_segments
        and q.dtype in (jnp.bfloat16, jnp.float16)
        and 0 < q.shape[-2] <= MOST_QUERIES
        and k.shape[-2] > 0
        and not any(one % COLUMNS_STEP for one in (q.shape[-1], v.shape[-1]))
    )


def forward(
    options: Options, others: Callable[..., tuple[jax.Array, ...]], *arrays: jax.Array
) -> tuple[jax.Array, ...]:
    """Returns o and lse, on platforms other than CUDA by `others`."""
    *leading, group, queries, _ = arrays[0].shape
    attributes = {
        "scale": options.scale,
        "softcap": options.softcap,
        "sinks": options.has_sinks,
        "chunk_keys": chunk_keys(math.prod(leading), group * queries, arrays[1].shape[-2]),
    }
    call = declared_call(
        OPERATION,
        DECODE,
        attributes,
        outward=TOKENS_FIRST if options.tokens_first else (),
        implementation=options.implementation,
        dense=Bound(reference.forward, options),
    )
    found: tuple[jax.Array, ...] = jax.lax.platform_dependent(
        *arrays, cuda=lambda *arrays: bind(call, *arrays, keep=(0, 1)), default=others
    )
    return found
