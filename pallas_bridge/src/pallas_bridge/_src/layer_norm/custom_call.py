"""LayerNorm by the library's kernels, and its derivative."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import linear
from ..arrays import Result, wide
from ..bound import Bound
from ..checks import REFERENCE_TAKES_OTHERS, check_dtype
from ..custom_call import Call, bind, dense_over, vary_alike
from . import reference
from .declaration import OPERATION
from .options import Options

# A row a token, a number a token, and what all tokens share.
ROWS, TOKENS, COLUMNS = "*batch D", "*batch", "D"


# Of what is normalised, and what is given and taken.
ROW, NUMBER, SUMS = Result(ROWS, like=0), Result(TOKENS), Result(COLUMNS)


def _bind(
    options: Options,
    name: str,
    operands: tuple[str, ...],
    results: tuple[Result, ...],
    dense: Any,
    *arrays: jax.Array,
) -> tuple[jax.Array, ...]:
    call = Call(
        operation=OPERATION,
        target=f"xentile_layer_norm_{name}",
        operands=operands,
        results=results,
        attributes=(("eps", np.float64(options.eps)),),
        implementation=options.implementation,
        dense=dense,
        in_parts=Bound(dense_over, dense),
    )
    return bind(call, *arrays)


def forward(
    options: Options, x: jax.Array, weight: jax.Array, bias: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns y, mean and rstd, as `reference.norm` does."""
    arrays = (x, weight, jnp.zeros_like(weight) if bias is None else bias)
    operands, results = (ROWS, COLUMNS, COLUMNS), (ROW, NUMBER, NUMBER)
    y, mean, rstd = _bind(
        options, "forward", operands, results, Bound(reference.norm, options), *arrays
    )
    return y, mean, rstd


def backward(
    options: Options,
    x: jax.Array,
    weight: jax.Array,
    mean: jax.Array,
    rstd: jax.Array,
    dy: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns gradients of x, and in f32 of weight and bias."""
    operands, results = (ROWS, COLUMNS, TOKENS, TOKENS, ROWS), (ROW, SUMS, SUMS)
    arrays = (x, weight, mean, rstd, dy)
    dx, dweight, dbias = _bind(options, "backward", operands, results, reference.gradients, *arrays)
    return dx, dweight, dbias


def norm(
    options: Options, x: jax.Array, weight: jax.Array, bias: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns y [.., D], and mean and rstd [..] in f32.

    Raises:
        TypeError: a dtype that no kernel reads.
    """
    arrays = [x, weight, *([] if bias is None else [bias])]
    for name, array in zip(("x", "weight", "bias"), arrays, strict=False):
        check_dtype(name, array, REFERENCE_TAKES_OTHERS)
    # Within `shard_map`, what transposes this for what tokens share is the sum over devices.
    x, weight, *of_bias = vary_alike(arrays)
    results: tuple[jax.Array, jax.Array, jax.Array] = _norm(
        options, x, weight, of_bias[0] if of_bias else None
    )
    return results


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _norm(
    options: Options, x: jax.Array, weight: jax.Array, bias: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    return forward(options, x, weight, bias)


@partial(_norm.defjvp, symbolic_zeros=True)
def _norm_jvp(options: Options, primals: Any, tangents: Any) -> tuple[Any, Any]:
    x, weight, _ = primals
    results = forward(options, *primals)
    _, mean, rstd = results
    apply, transpose = _apply, Bound(_transpose, options)
    moving = tuple(map(linear.given, tangents))
    residuals, dims = (
        (x, weight, mean, rstd),
        ((ROWS, COLUMNS, TOKENS, TOKENS), (ROWS, COLUMNS, COLUMNS)),
    )
    found = linear.bind(apply, transpose, residuals, moving, results, dims)
    return results, tuple(found)


def _apply(residuals: Any, tangents: Any) -> tuple[jax.Array, ...]:
    return reference.tangents(*residuals, *tangents)


def _transpose(options: Options, residuals: Any, cotangents: Any) -> tuple[Any, Any, Any]:
    (x, weight, mean, rstd), (dy, dmean, drstd) = residuals, cotangents
    more = None
    if dmean is not None:
        # Those of statistics are rare, and XLA's.
        more = jnp.broadcast_to((dmean / x.shape[-1])[..., None], x.shape)
    if drstd is not None:
        left = wide(x) - mean[..., None]
        of_rstd = -(drstd * rstd**3 / x.shape[-1])[..., None] * left
        more = of_rstd if more is None else more + of_rstd
    if dy is None:
        return None if more is None else more.astype(x.dtype), None, None
    dx, dweight, dbias = backward(options, x, weight, mean, rstd, dy)
    if more is not None:
        dx = (wide(dx) + more).astype(x.dtype)
    return dx, dweight, dbias
