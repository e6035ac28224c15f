"""Rotary position embedding written plainly, for XLA to make the program of."""

import jax
import jax.numpy as jnp

from ..arrays import match_rank, wide
from .options import Options


def rotate(options: Options, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Returns rotated x [.., S, H, D] by tables [.., S, R / 2], without heads.

    The formulas are those of crates/xentile/src/rope.rs. Numbers are f32, or the dtype of x where
    that is wider, and y is rounded once.
    """
    pairs = cos.shape[-1]
    cos, sin = cos[..., None, :], sin[..., None, :]
    if options.inverse:
        sin = -sin
    rotary, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    if options.interleaved:
        both = rotary.reshape(*x.shape[:-1], pairs, 2)
        first, second = both[..., 0], both[..., 1]
    else:
        first, second = rotary[..., :pairs], rotary[..., pairs:]
    first, second = wide(first), wide(second)
    cos, sin = (match_rank(one, first).astype(first.dtype) for one in (cos, sin))
    results = [
        (first * cos - second * sin).astype(x.dtype),
        (second * cos + first * sin).astype(x.dtype),
    ]
    if options.interleaved:
        results = [jnp.stack(results, axis=-1).reshape(rotary.shape)]
    y: jax.Array = jnp.concatenate([*results, rest], axis=-1)
    return y
