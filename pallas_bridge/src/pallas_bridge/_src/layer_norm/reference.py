"""LayerNorm written plainly, for XLA to make the dense program of.

It is what kernels are compared with, and what runs where there is none.
"""

import jax
import jax.numpy as jnp

from ..arrays import wide
from .options import Options


def norm(
    options: Options, x: jax.Array, weight: jax.Array, bias: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns y [.., D], and mean and rstd [..], of x, weight [D] and bias [D].

    The formulas are those of crates/xentile/src/layer_norm.rs. Numbers are f32, or x's or weight's
    dtype where that is wider, and rounded to x's dtype where they are given.
    """
    z = wide(x)
    # A mean of f32 numbers is off by roundings of the largest sums; that of what it leaves is not.
    about = z.mean(-1, keepdims=True)
    mean = about[..., 0] + (z - about).mean(-1)
    left = z - mean[..., None]
    rstd = jax.lax.rsqrt(jnp.square(left).mean(-1) + options.eps)
    y = left * rstd[..., None] * wide(weight)
    if bias is not None:
        y += wide(bias)
    return y.astype(x.dtype), mean, rstd


def tangents(
    x: jax.Array,
    weight: jax.Array,
    mean: jax.Array,
    rstd: jax.Array,
    dx: jax.Array | None,
    dweight: jax.Array | None,
    dbias: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the tangents of y, mean and rstd for those of x, weight and bias.

    One that is None is 0.
    """
    left, r = wide(x) - mean[..., None], rstd[..., None]
    dmean, drstd, dy = jnp.zeros_like(mean), jnp.zeros_like(rstd), jnp.zeros_like(left)
    if dx is not None:
        dmean = wide(dx).mean(-1)
        dleft = wide(dx) - dmean[..., None]
        drstd = -(rstd**3) * (left * dleft).mean(-1)
        dy += (dleft * r + left * drstd[..., None]) * wide(weight)
    if dweight is not None:
        dy += left * r * wide(dweight)
    if dbias is not None:
        dy += wide(dbias)
    return dy.astype(x.dtype), dmean, drstd


def gradients(
    x: jax.Array, weight: jax.Array, mean: jax.Array, rstd: jax.Array, dy: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns gradients of x in its dtype, and of weight and bias [D] in f32."""
    xhat, g = (wide(x) - mean[..., None]) * rstd[..., None], wide(dy) * wide(weight)
    along = (xhat * g).mean(-1, keepdims=True)
    dx = rstd[..., None] * (g - g.mean(-1, keepdims=True) - xhat * along)
    dweight, dbias = (
        terms.reshape(-1, x.shape[-1]).sum(0) for terms in (wide(dy) * xhat, wide(dy))
    )
    return dx.astype(x.dtype), dweight, dbias
