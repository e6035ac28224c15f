"""The kernel that draws tokens on Hopper: what it takes, and its call.

`crates/xentile-cuda/kernels/sample.cuh` documents the kernel.
"""

from collections.abc import Iterable

import jax
import jax.numpy as jnp

from ..targets import declared
from . import kernel

Array = jax.Array
TARGET = "xentile_sample"


def is_usable(arrays: Iterable[Array], vocab_size: int) -> bool:
    """Returns whether the kernel draws where a program of `arrays` is compiled for CUDA."""
    is_covered = 0 < vocab_size <= declared(TARGET).largest("V")
    return is_covered and kernel.is_there(TARGET, arrays, kernel.is_hopper)


def draw(logits: Array, keys: Array, steps: Array, options: Array) -> tuple[Array, Array]:
    """Returns tokens [B] and their log-probabilities [B] of logits [B, V] in float32.

    Args:
        logits: What to draw from.
        keys: Bits of keys of threefry2x32, [B, 2] in uint32.
        steps: Integers [B].
        options: temperature, top_k, top_p and min_p in float32; inf, 1 and 0 where the last three
            are not set.
    """
    operands = (
        logits,
        jax.lax.bitcast_convert_type(keys, jnp.int32),
        steps.astype(jnp.int32),
        options,
    )
    results = [jax.ShapeDtypeStruct(steps.shape, dtype) for dtype in (jnp.int32, jnp.float32)]
    token, logp = jax.ffi.ffi_call(TARGET, results, vmap_method="sequential")(*operands)
    return token, logp
