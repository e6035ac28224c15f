"""RMSNorm and LayerNorm in plain JAX, the XLA reference.

Kernels are compared with it, and it runs on platforms without kernels.
"""

from collections.abc import Sequence
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
    residual: jax.Array | None = None,
    bias: jax.Array | None = None,
    over: Names = (),
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns y [.., D]; the normalised array [.., D], or LayerNorm's mean [..]; and rstd [..].

    The formulas are those of crates/xentile/src/norm.rs. They are computed in float32, or in the
    dtype of x or weight if that is wider, and results are rounded to the dtype of x. Where mesh
    axes `over` are passed, D is sharded over them.
    """
    z = wide(x)  # once, so that gradients are rounded once
    if residual is not None:
        z = rounded(z + wide(residual), x.dtype)
        x = z.astype(x.dtype)
    row_mean = None
    if options.kind == "layer":
        # A mean of float32 values is off by roundings of the largest partial sums, so the mean of
        # the remainder is added.
        first = mean(z, over)
        row_mean = first + mean(z - first, over)
        z = z - row_mean
    rstd = jax.lax.rsqrt(mean(jnp.square(z), over)[..., 0] + options.eps)
    y = multiplied(z * rstd[..., None], scale(options, weight))
    if bias is not None:
        y = added(y, wide(bias))
    return y.astype(x.dtype), x if row_mean is None else row_mean[..., 0], rstd


def tangents(
    options: Options,
    x: jax.Array,
    weight: jax.Array,
    statistics: tuple[jax.Array, ...],
    dx: jax.Array | None,
    dweight: jax.Array | None,
    dbias: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """Returns the tangents of y and statistics for those of x, weight and bias.

    x is the normalised array. A tangent that is None is 0.
    """
    *means, rstd = statistics
    z, r = centred(x, means), rstd[..., None]
    dmeans, drstd, parts = [*map(jnp.zeros_like, means)], jnp.zeros_like(rstd), []
    if dx is not None:
        if means:
            dmeans = [wide(dx).mean(-1)]
            dx = centred(dx, dmeans)
        drstd = -(rstd**3) * (z * wide(dx)).mean(-1)
        parts.append(multiplied(wide(dx) * r + z * drstd[..., None], scale(options, weight)))
    if dweight is not None:
        parts.append(multiplied(z * r, wide(dweight)))
    if dbias is not None:
        parts.append(jnp.broadcast_to(wide(dbias), x.shape))
    return reduce(added, parts).astype(x.dtype), *dmeans, drstd


def gradients(
    options: Options,
    x: jax.Array,
    weight: jax.Array,
    *statistics_and_cotangents: jax.Array,
    over: Names = (),
) -> tuple[jax.Array, ...]:
    """Returns gradients of x in its dtype, of weight and, for LayerNorm, of bias [D] in float32.

    x is the normalised array. Its statistics follow weight, then the cotangent of y and, if x is a
    sum that was returned too, the cotangent of that. `over` is that of `norm`.
    """
    count = len(options.statistics)
    *means, rstd = statistics_and_cotangents[:count]
    dy, *dsum = statistics_and_cotangents[count:]
    xhat, g = centred(x, means) * rstd[..., None], multiplied(wide(dy), scale(options, weight))
    dx = rstd[..., None] * ((g - mean(g, over) if means else g) - xhat * mean(xhat * g, over))
    if dsum:
        dx += wide(dsum[0])
    terms = [wide(dy) * xhat, *([wide(dy)] if means else [])]
    sums = [term.reshape(-1, x.shape[-1]).sum(0) for term in terms]
    return dx.astype(x.dtype), *sums


def centred(x: jax.Array, means: Sequence[jax.Array]) -> jax.Array:
    """Returns x [.., D] in float32, less its mean [..] if there is one."""
    return wide(x) - means[0][..., None] if means else wide(x)


def scale(options: Options, weight: jax.Array) -> jax.Array:
    """Returns the factors of columns."""
    return wide(weight) + 1 if options.zero_centred else wide(weight)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def rounded(array: jax.Array, dtype: Any) -> jax.Array:
    """Returns an array rounded to `dtype`, in its own dtype; tangents are not rounded.

    XLA may leave out a conversion to 16 bits and back (`xla_allow_excess_precision`, as on GPUs);
    statistics would then be those of another sum than the returned one. XLA keeps this.
    """
    to = jnp.finfo(dtype)
    if to.bits != 16:
        return array
    reduced = jax.lax.reduce_precision(array, to.nexp, to.nmant)
    if dtype == jnp.float16:
        # reduce_precision flushes subnormals to 0; after adding 0.75 their spacing is that of f32.
        reduced = jnp.where(jnp.abs(array) < float(to.tiny), (array + 0.75) - 0.75, reduced)
    return reduced


@rounded.defjvp
def _rounded_jvp(dtype: Any, primals: Any, tangents: Any) -> tuple[jax.Array, Any]:
    return rounded(*primals, dtype), tangents[0]
