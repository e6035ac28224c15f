"""RMSNorm and LayerNorm by the library's kernels, and their derivatives."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from .. import linear
from ..arrays import wide
from ..bound import Bound
from ..checks import REFERENCE_TAKES_OTHERS, check_dtype
from ..custom_call import bind, declared_call, dense_over, vary_alike
from ..meshes import Names
from ..targets import declared
from . import reference
from .options import Options

# What policies of `jax.checkpoint` call sums with the residual stream, and rstd.
SUM_NAME = "rms_norm_sum"
# A row per token, a scalar per token, and an array that all tokens share.
ROWS, TOKENS, COLUMNS = declared("xentile_rms_norm_forward").dims("x", "rstd", "weight")


def _bind(
    options: Options,
    name: str,
    dense: Callable[..., Any],
    *arrays: jax.Array,
) -> tuple[jax.Array, ...]:
    program = Bound(dense, options)
    call = declared_call(
        options.operation,
        f"xentile_{options.operation.name}_{name}",
        {
            "eps": options.eps,
            "zero_centred": options.zero_centred if options.kind == "rms" else None,
        },
        implementation=options.implementation,
        dense=program,
        on_shards=Bound(dense_over, program),
    )
    return bind(call, *arrays)


def forward(
    options: Options,
    x: jax.Array,
    weight: jax.Array,
    residual: jax.Array | None,
    bias: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns what `reference.norm` does."""
    if options.kind == "layer":
        bias = jnp.zeros_like(weight) if bias is None else bias
        y, mean, rstd = _bind(options, "forward", _layer, x, weight, bias)
        return y, mean, rstd
    if residual is None:
        y, rstd = _bind(options, "forward", _rms, x, weight)
        return y, x, rstd
    y, total, rstd = _bind(options, "add_forward", _rms_add, x, residual, weight)
    return y, total, rstd


def _rms(
    options: Options, x: jax.Array, weight: jax.Array, over: Names = ()
) -> tuple[jax.Array, jax.Array]:
    y, _, rstd = reference.norm(options, x, weight, over=over)
    return y, rstd


def _rms_add(
    options: Options, x: jax.Array, residual: jax.Array, weight: jax.Array, over: Names = ()
) -> tuple[jax.Array, ...]:
    return reference.norm(options, x, weight, residual, over=over)


def _layer(
    options: Options, x: jax.Array, weight: jax.Array, bias: jax.Array, over: Names = ()
) -> tuple[jax.Array, ...]:
    return reference.norm(options, x, weight, bias=bias, over=over)


def backward(
    options: Options,
    x: jax.Array,
    weight: jax.Array,
    statistics: tuple[jax.Array, ...],
    dy: jax.Array,
    dsum: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """Returns gradients of x, the normalised array, and in float32 of weight and LayerNorm's bias.

    `dsum` is the cotangent of x itself, if x is a sum that was returned too.
    """
    name, cotangents = ("backward", (dy,)) if dsum is None else ("add_backward", (dy, dsum))
    arrays = (x, weight, *statistics, *cotangents)
    return _bind(options, name, reference.gradients, *arrays)


def norm(
    options: Options,
    x: jax.Array,
    weight: jax.Array,
    residual: jax.Array | None = None,
    bias: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns what `reference.norm` does, by a call of a kernel.

    Raises:
        TypeError: a dtype that no kernel reads.
    """
    names = ("x", "weight", "residual", "bias")
    arrays = {
        name: array
        for name, array in zip(names, (x, weight, residual, bias), strict=True)
        if array is not None
    }
    for name, array in arrays.items():
        check_dtype(name, array, REFERENCE_TAKES_OTHERS)
    # Within `shard_map`, the transpose of this is the sum over devices for shared arrays.
    varying = dict(zip(arrays, vary_alike([*arrays.values()]), strict=True))
    y, second, rstd = _norm(options, *map(varying.get, names))
    return y, second, rstd


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _norm(options: Options, *arrays: Any) -> tuple[jax.Array, ...]:
    return forward(options, *arrays)


@partial(_norm.defjvp, symbolic_zeros=True)
def _norm_jvp(options: Options, primals: Any, tangents: Any) -> tuple[Any, Any]:
    x, weight, _, _ = primals
    found, named = forward(options, *primals), options.operation.named
    # x itself is among them where there is no residual: with a name it would be kept twice.
    results = tuple(one if one is x else named(one) for one in found)
    if options.kind == "rms":
        y, total, rstd = results
        results = (y, total if total is x else named_sum(total), named_sum(rstd))
    _, normalised, rstd = results
    statistics: tuple[jax.Array, ...] = (rstd,)
    if options.kind == "layer":
        normalised, statistics = x, results[1:]
    dx, dweight, dresidual, dbias = map(linear.given, tangents)
    terms = [term for term in (dx, dresidual) if term is not None]
    moving = (sum(terms[1:], terms[0]) if terms else None, dweight, dbias)
    residuals = (normalised, weight, statistics)
    dims = ((ROWS, COLUMNS, *[TOKENS] * len(statistics)), (ROWS, COLUMNS, COLUMNS))
    apply, transpose = Bound(_apply, options), Bound(_transpose, options)
    return results, tuple(linear.bind(apply, transpose, residuals, moving, results, dims))


def named_sum(result: jax.Array) -> jax.Array:
    """Returns a sum of RMSNorm, or rstd, under a name of its own for `jax.checkpoint`."""
    found: jax.Array = checkpoint_name(result, SUM_NAME)
    return found


def _apply(options: Options, residuals: Any, tangents: Any) -> tuple[jax.Array, ...]:
    found = reference.tangents(options, *residuals, *tangents)
    if options.kind == "layer":
        return found
    (y, rstd), total = found, tangents[0]
    return y, jnp.zeros_like(y) if total is None else total, rstd


def _transpose(options: Options, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    (x, weight, statistics), (dy, dsum, drstd) = residuals, cotangents
    dmean = None
    if options.kind == "layer":
        dsum, dmean = None, dsum
    extra = _statistics_transpose(x, statistics, dmean, drstd)
    if options.kind == "rms" and extra is not None:
        dsum, extra = (extra if dsum is None else wide(dsum) + extra).astype(x.dtype), None
    if dy is None:
        return dsum if extra is None else extra.astype(x.dtype), None, None
    dx, *sums = backward(options, x, weight, statistics, dy, dsum)
    if extra is not None:
        dx = (wide(dx) + extra).astype(x.dtype)
    dweight, *dbias = sums
    return dx, dweight, dbias[0] if dbias else None


def _statistics_transpose(
    x: jax.Array,
    statistics: tuple[jax.Array, ...],
    dmean: jax.Array | None,
    drstd: jax.Array | None,
) -> jax.Array | None:
    """Returns the gradient of x for cotangents of statistics, which are rare and left to XLA."""
    *means, rstd = statistics
    parts = []
    if dmean is not None:
        parts.append(jnp.broadcast_to((dmean / x.shape[-1])[..., None], x.shape))
    if drstd is not None:
        z = reference.centred(x, means) if means else x
        parts.append(-(drstd * rstd**3 / x.shape[-1])[..., None] * wide(z))
    return sum(parts[1:], parts[0]) if parts else None
