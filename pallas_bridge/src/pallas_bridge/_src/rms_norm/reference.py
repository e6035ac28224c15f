"""RMSNorm written plainly, for XLA to make the dense program of.

It is what kernels are compared with, and what runs where there is none.
"""

from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp

from ..arrays import added, multiplied, wide
from ..meshes import Names, mean
from .options import Options


def norm(
    options: Options,
    x: jax.Array,
    weight: jax.Array,
    residual: jax.Array | None,
    over: Names = (),
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns y [.., D], what was normalised [.., D], and rstd [..], of x and weight [D].

    The formulas are those of crates/xentile/src/rms_norm.rs. Numbers are f32, or x's or weight's
    dtype where that is wider, and rounded to x's dtype where they are given. Where mesh axes `over`
    are given, arrays have a device's share of D.
    """
    z = wide(x)  # once, so that what comes back is rounded once
    if residual is not None:
        z = rounded(z + wide(residual), x.dtype)
        x = z.astype(x.dtype)
    rstd = jax.lax.rsqrt(mean(jnp.square(z), over)[..., 0] + options.eps)
    y = multiplied(z * rstd[..., None], scale(options, weight))
    return y.astype(x.dtype), x, rstd


def tangents(
    options: Options,
    x: jax.Array,
    weight: jax.Array,
    rstd: jax.Array,
    dx: jax.Array | None,
    dweight: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the tangents of y and rstd for those of x, as it was normalised, and of weight.

    One that is None is 0.
    """
    z, r = wide(x), rstd[..., None]
    drstd = jnp.zeros_like(rstd)
    parts = []
    if dx is not None:
        drstd = -(rstd**3) * (z * wide(dx)).mean(-1)
        parts.append(multiplied(wide(dx) * r + z * drstd[..., None], scale(options, weight)))
    if dweight is not None:
        parts.append(multiplied(z * r, wide(dweight)))
    return reduce(added, parts).astype(x.dtype), drstd


def gradients(
    options: Options,
    x: jax.Array,
    weight: jax.Array,
    rstd: jax.Array,
    dy: jax.Array,
    dsum: jax.Array | None = None,
    over: Names = (),
) -> tuple[jax.Array, jax.Array]:
    """Returns gradients of x, as it was normalised, in its dtype, and of weight [D] in f32.

    `dsum` is the cotangent of x itself, where it was given too, and `over` as of `norm`.
    """
    normalised, g = wide(x) * rstd[..., None], multiplied(wide(dy), scale(options, weight))
    dx = rstd[..., None] * (g - normalised * mean(normalised * g, over))
    if dsum is not None:
        dx += wide(dsum)
    dweight = (wide(dy) * normalised).reshape(-1, x.shape[-1]).sum(0)
    return dx.astype(x.dtype), dweight


def scale(options: Options, weight: jax.Array) -> jax.Array:
    """Returns what multiplies the columns."""
    return wide(weight) + 1 if options.zero_centred else wide(weight)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def rounded(array: jax.Array, dtype: Any) -> jax.Array:
    """Returns an array with the values that it has in `dtype`; tangents pass as they are.

    XLA may leave out a conversion to 16 bits and back (`xla_allow_excess_precision`, as on GPUs),
    and then statistics would be of another sum than the one that is returned; it keeps this.
    """
    to = jnp.finfo(dtype)
    if to.bits != 16:
        return array
    kept = jax.lax.reduce_precision(array, to.nexp, to.nmant)
    if dtype == jnp.float16:
        # That flushes subnormal numbers to 0; this adds and takes off what leaves their steps.
        kept = jnp.where(jnp.abs(array) < float(to.tiny), (array + 0.75) - 0.75, kept)
    return kept


@rounded.defjvp
def _rounded_jvp(dtype: Any, primals: Any, tangents: Any) -> tuple[jax.Array, Any]:
    return rounded(*primals, dtype), tangents[0]
