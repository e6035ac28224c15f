"""LayerNorm written plainly, for XLA to make the dense program of.

It is what kernels are compared with, and what runs where there is none.
"""

from functools import reduce

import jax
import jax.numpy as jnp

from ..arrays import added, multiplied, wide
from ..meshes import Names, mean
from .options import Options


def norm(
    options: Options,
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    over: Names = (),
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns y [.., D], and mean and rstd [..], of x, weight [D] and bias [D].

    The formulas are those of crates/xentile/src/layer_norm.rs. Numbers are f32, or x's or weight's
    dtype where that is wider, and rounded to x's dtype where they are given. Where mesh axes `over`
    are given, arrays have a device's share of D.
    """
    z = wide(x)
    # A mean of f32 numbers is off by roundings of the largest sums; that of what it leaves is not.
    about = mean(z, over)
    middle = about + mean(z - about, over)
    left = z - middle
    rstd = jax.lax.rsqrt(mean(jnp.square(left), over)[..., 0] + options.eps)
    y = multiplied(left * rstd[..., None], wide(weight))
    if bias is not None:
        y = added(y, wide(bias))
    return y.astype(x.dtype), middle[..., 0], rstd


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
    dmean, drstd, parts = jnp.zeros_like(mean), jnp.zeros_like(rstd), []
    if dx is not None:
        dmean = wide(dx).mean(-1)
        dleft = wide(dx) - dmean[..., None]
        drstd = -(rstd**3) * (left * dleft).mean(-1)
        parts.append(multiplied(dleft * r + left * drstd[..., None], wide(weight)))
    if dweight is not None:
        parts.append(multiplied(left * r, wide(dweight)))
    if dbias is not None:
        parts.append(jnp.broadcast_to(wide(dbias), x.shape))
    return reduce(added, parts).astype(x.dtype), dmean, drstd


def gradients(
    x: jax.Array,
    weight: jax.Array,
    middle: jax.Array,
    rstd: jax.Array,
    dy: jax.Array,
    over: Names = (),
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns gradients of x in its dtype, and of weight and bias [D] in f32.

    `middle` is the mean, and `over` as of `norm`.
    """
    xhat, g = (wide(x) - middle[..., None]) * rstd[..., None], multiplied(wide(dy), wide(weight))
    dx = rstd[..., None] * (g - mean(g, over) - xhat * mean(xhat * g, over))
    dweight, dbias = (
        terms.reshape(-1, x.shape[-1]).sum(0) for terms in (wide(dy) * xhat, wide(dy))
    )
    return dx.astype(x.dtype), dweight, dbias
