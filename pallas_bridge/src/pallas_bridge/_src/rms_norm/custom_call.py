"""RMSNorm by the library's kernels, and its derivative."""

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
from ..meshes import Names
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
        target=f"xentile_rms_norm_{name}",
        operands=operands,
        results=results,
        attributes=(
            ("eps", np.float64(options.eps)),
            ("zero_centred", np.bool_(options.zero_centred)),
        ),
        implementation=options.implementation,
        dense=dense,
        in_parts=Bound(dense_over, dense),
    )
    return bind(call, *arrays)


def forward(
    options: Options, x: jax.Array, weight: jax.Array, residual: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns y, what was normalised, and rstd, as `reference.norm` does."""
    if residual is None:
        dense = Bound(_dense, options)
        y, rstd = _bind(options, "forward", (ROWS, COLUMNS), (ROW, NUMBER), dense, x, weight)
        return y, x, rstd
    operands, results, dense = (ROWS, ROWS, COLUMNS), (ROW, ROW, NUMBER), Bound(_dense_add, options)
    y, total, rstd = _bind(options, "add_forward", operands, results, dense, x, residual, weight)
    return y, total, rstd


def _dense(
    options: Options, x: jax.Array, weight: jax.Array, over: Names = ()
) -> tuple[jax.Array, jax.Array]:
    y, _, rstd = reference.norm(options, x, weight, None, over)
    return y, rstd


def _dense_add(
    options: Options, x: jax.Array, residual: jax.Array, weight: jax.Array, over: Names = ()
) -> tuple[jax.Array, jax.Array, jax.Array]:
    return reference.norm(options, x, weight, residual, over)


def backward(
    options: Options,
    x: jax.Array,
    weight: jax.Array,
    rstd: jax.Array,
    dy: jax.Array,
    dsum: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Returns gradients of x, as it was normalised, and in f32 of weight.

    `dsum` is the cotangent of x itself, where it was given too.
    """
    name, more = ("backward", ()) if dsum is None else ("add_backward", (dsum,))
    operands = (ROWS, COLUMNS, TOKENS, ROWS, *[ROWS] * len(more))
    dense = Bound(reference.gradients, options)
    dx, dweight = _bind(options, name, operands, (ROW, SUMS), dense, x, weight, rstd, dy, *more)
    return dx, dweight


def norm(
    options: Options, x: jax.Array, weight: jax.Array, residual: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns y [.., D], what was normalised [.., D], and rstd [..] in f32.

    Raises:
        TypeError: a dtype that no kernel reads.
    """
    arrays = [x, weight, *([] if residual is None else [residual])]
    for name, array in zip(("x", "weight", "residual"), arrays, strict=False):
        check_dtype(name, array, REFERENCE_TAKES_OTHERS)
    # Within `shard_map`, what transposes this for the weight is the sum over devices.
    x, weight, *of_residual = vary_alike(arrays)
    results: tuple[jax.Array, jax.Array, jax.Array] = _norm(
        options, x, weight, of_residual[0] if of_residual else None
    )
    return results


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _norm(
    options: Options, x: jax.Array, weight: jax.Array, residual: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    return forward(options, x, weight, residual)


@partial(_norm.defjvp, symbolic_zeros=True)
def _norm_jvp(options: Options, primals: Any, tangents: Any) -> tuple[Any, Any]:
    results = forward(options, *primals)
    _, total, rstd = results
    of_x, of_weight, *of_residual = map(linear.given, tangents)
    added = [one for one in (of_x, *of_residual) if one is not None]
    of_total = sum(added[1:], added[0]) if added else None
    apply, transpose = Bound(_apply, options), Bound(_transpose, options)
    residuals, dims = (total, primals[1], rstd), ((ROWS, COLUMNS, TOKENS), (ROWS, COLUMNS))
    moving = (of_total, of_weight)
    found = linear.bind(apply, transpose, residuals, moving, results, dims)
    return results, tuple(found)


def _apply(options: Options, residuals: Any, tangents: Any) -> tuple[jax.Array, ...]:
    (x, weight, rstd), (of_total, of_weight) = residuals, tangents
    of_y, of_rstd = reference.tangents(options, x, weight, rstd, of_total, of_weight)
    return of_y, jnp.zeros_like(of_y) if of_total is None else of_total, of_rstd


def _transpose(options: Options, residuals: Any, cotangents: Any) -> tuple[Any, Any]:
    (x, weight, rstd), (dy, dsum, drstd) = residuals, cotangents
    if drstd is not None:
        # It is rare, and XLA's.
        more = -(drstd * rstd**3 / x.shape[-1])[..., None] * wide(x)
        dsum = (more if dsum is None else wide(dsum) + more).astype(x.dtype)
    if dy is None:
        return dsum, None
    return backward(options, x, weight, rstd, dy, dsum)
