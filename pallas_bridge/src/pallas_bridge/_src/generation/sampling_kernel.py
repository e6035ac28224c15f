"""The kernel that draws tokens on Hopper: what it takes, and its call.

`crates/xentile-cuda/kernels/sample.cuh` documents the kernel.
"""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from ..targets import declared
from . import kernel

Array = jax.Array
TARGET = "xentile_sample"
# The most rows whose noise a kernel of many CTAs draws: clusters of more rows fill a GPU.
LARGEST_NOISE_BATCH = 2


def covers(vocab_size: int) -> bool:
    """Returns whether the kernel is for so many columns; for no symbol."""
    return isinstance(vocab_size, int) and 0 < vocab_size <= declared(TARGET).largest("V")


def is_usable(arrays: Iterable[Array], vocab_size: int) -> bool:
    """Returns whether the kernel draws where a program of `arrays` is compiled for CUDA."""
    return covers(vocab_size) and kernel.is_there(TARGET, arrays, kernel.is_hopper)


def draw(
    logits: Array, keys: Array, steps: Array, starts: Array, options: Array, is_few: bool
) -> tuple[Array, Array]:
    """Returns tokens [B] and their log-probabilities [B] of logits [B, V] in float32.

    Args:
        logits: What to draw from.
        keys: Bits of keys of threefry2x32, [B, 2] in uint32.
        steps: Integers [B].
        starts: What is added to them, [B].
        options: temperature, top_k, top_p and min_p in float32; inf, 1 and 0 where the last three
            are not set.
        is_few: Whether few columns get noise, as with top_k.
    """
    operands = (
        logits,
        jax.lax.bitcast_convert_type(keys, jnp.int32),
        steps.astype(jnp.int32),
        starts.astype(jnp.int32),
        options,
    )
    has_bounds = not is_few and logits.shape[0] <= LARGEST_NOISE_BATCH
    results = [jax.ShapeDtypeStruct(steps.shape, dtype) for dtype in (jnp.int32, jnp.float32)]
    results += [jax.ShapeDtypeStruct(logits.shape, jnp.float32)] * has_bounds
    call = jax.ffi.ffi_call(TARGET, results, vmap_method="sequential")
    token, logp, *_ = call(*operands, has_bounds=np.bool_(has_bounds))
    return token, logp
