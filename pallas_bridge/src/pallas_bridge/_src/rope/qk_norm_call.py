"""RMSNorm of heads and their rotation as one call, which has kernels on NVIDIA GPUs.

Elsewhere, and where it may not be, the calls of `rms_norm` and of `rope` take its place one after
the other, and each has what runs on a platform.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import linear
from ..arrays import spec_of
from ..bound import Bound
from ..checks import DTYPES
from ..custom_call import bind, declared_call, vary_alike
from ..norm import custom_call as norm_call
from ..norm.options import Options as NormOptions
from ..targets import declared
from . import custom_call as rope_call
from .declaration import OPERATION
from .options import Options

FORWARD, BACKWARD = "xentile_qk_norm_rope_forward", "xentile_qk_norm_rope_backward"
GIVEN = declared(FORWARD).dims("q", "k", "q_weight", "k_weight")
RSTD = declared(FORWARD).dims("q_rstd", "k_rstd")
INDICES, *TABLE = declared(FORWARD).dims("indices", "cos", "sin")
# Indices and the rows of one table, and where each token has its own.
TABLES = {True: (INDICES, *TABLE), False: (INDICES, "*batch R", "*batch R")}
# Lanes of a warp, which a head's vectors are shared out to: one each, or one of either half.
LANES, VECTOR_BYTES = 32, 16


@dataclass(frozen=True)
class Both:
    """The options of the norm and of the rotation."""

    norm: NormOptions
    rope: Options
    # Whether a token's row of the tables is its place in the sequence; else each has its own.
    has_one_table: bool = True


def fits(
    options: Options, q: jax.Array, k: jax.Array, weights: Sequence[jax.Array], R: Any
) -> bool:
    """Whether kernels take heads [.., H, D] of which R columns turn."""
    columns = q.shape[-1]
    arrays = (q, k, *weights)
    if not (isinstance(columns, int) and isinstance(R, int) and R > 0):
        return False
    if q.dtype != k.dtype or any(one.dtype not in DTYPES for one in arrays):
        return False
    if any(axis is not None for one in arrays for axis in spec_of(jax.typeof(one))):
        return False
    per = VECTOR_BYTES // q.dtype.itemsize
    turning, held = (R, columns) if options.interleaved else (R // 2, columns - R // 2)
    return columns % per == 0 and turning % per == 0 and held // per <= LANES


def qk_norm_rope(
    options: Both,
    q: jax.Array,
    k: jax.Array,
    q_weight: jax.Array,
    k_weight: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns what q [.., S, H, D] and k [.., S, K, D], which fit, become.

    Tables are [S, R / 2], or [.., S, R / 2] with all of q's axes.
    """
    leading = q.shape[:-2]
    if cos.ndim > 2:
        options = replace(options, has_one_table=False)
    indices = jax.lax.broadcasted_iota(np.int32, leading, len(leading) - 1)
    given = vary_alike([q, k, q_weight, k_weight, indices, cos, sin])
    of_q, of_k = _qk_norm_rope(options, *given)
    return of_q, of_k


def _bind(
    options: Both, target: str, first: int, dense: Any, *arrays: jax.Array
) -> tuple[jax.Array, ...]:
    """Returns the results of a target, whose indices and tables are arrays from `first` on."""
    call = declared_call(
        OPERATION,
        target,
        {
            "eps": options.norm.eps,
            "zero_centred": options.norm.zero_centred,
            "interleaved": options.rope.interleaved,
        },
        implementation=options.norm.implementation,
        dense=Bound(dense, options),
        is_composed=True,
    )
    if not options.has_one_table:
        before, behind = call.operands[:first], call.operands[first + 3 :]
        operands = (*before, *TABLES[False], *behind)
        call = replace(call, operands=operands, prepared=Bound(_in_one_table, first))
    return bind(call, *arrays)


def _in_one_table(first: int, *arrays: jax.Array) -> list[jax.Array]:
    """Returns a call's arrays, of which three from `first` on are indices and tables by token.

    Handlers have one table, of which each token has a row.
    """
    indices, *tables = arrays[first : first + 3]
    rows = jax.lax.iota(np.int32, indices.size).reshape(indices.shape)
    flat = [one.reshape(-1, one.shape[-1]) for one in tables]
    return [*arrays[:first], rows, *flat, *arrays[first + 3 :]]


def _forward(options: Both, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Returns what q and k become, and the rstd of their heads."""
    return _bind(options, FORWARD, len(GIVEN), _composed, *arrays)


def _composed(
    options: Both,
    q: jax.Array,
    k: jax.Array,
    q_weight: jax.Array,
    k_weight: jax.Array,
    _: jax.Array,
    *tables: jax.Array,
) -> tuple[jax.Array, ...]:
    rotated, found = [], []
    for x, weight in ((q, q_weight), (k, k_weight)):
        y, _, rstd = norm_call.norm(options.norm, x, weight)
        rotated.append(rope_call.rope(options.rope, y, *tables))
        found.append(rstd)
    return *rotated, *found


def _backward(options: Both, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Returns gradients of q and k, and in f32 of the weights."""
    return _bind(options, BACKWARD, len(GIVEN) + len(RSTD), _composed_backward, *arrays)


def _composed_backward(
    options: Both,
    q: jax.Array,
    k: jax.Array,
    q_weight: jax.Array,
    k_weight: jax.Array,
    q_rstd: jax.Array,
    k_rstd: jax.Array,
    _: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *cotangents: jax.Array,
) -> tuple[jax.Array, ...]:
    parts = ((q, q_weight, q_rstd), (k, k_weight, k_rstd))
    found = [
        _grad_one(options, *part, cos, sin, dy) for part, dy in zip(parts, cotangents, strict=True)
    ]
    (dq, dq_weight), (dk, dk_weight) = found
    return dq, dk, dq_weight, dk_weight


def _grad_one(
    options: Both,
    x: jax.Array,
    weight: jax.Array,
    rstd: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    dy: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of q alone, or of k, and of its weight."""
    back = replace(options.rope, inverse=not options.rope.inverse)
    rotated = rope_call.rope(back, dy, cos, sin)
    dx, dweight = norm_call.backward(options.norm, x, weight, (rstd,), rotated)
    return dx, dweight


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _qk_norm_rope(options: Both, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    return _forward(options, *arrays)[:2]


@partial(_qk_norm_rope.defjvp, symbolic_zeros=True)
def _jvp(options: Both, primals: Any, tangents: Any) -> tuple[Any, Any]:
    *rotated, q_rstd, k_rstd = map(OPERATION.named, _forward(options, *primals))
    moving = [linear.given(one) for one in tangents[:4]]
    if all(one is None for one in moving):
        return (*rotated,), tuple(map(jnp.zeros_like, rotated))
    residuals = (*primals[:4], q_rstd, k_rstd, *primals[4:])
    apply, transpose = Bound(_apply, options), Bound(_transpose, options)
    dims = ((*GIVEN, *RSTD, *TABLES[options.has_one_table]), GIVEN)
    found = linear.bind(apply, transpose, residuals, moving, rotated, dims)
    return (*rotated,), tuple(found)


def _apply(options: Both, residuals: Any, tangents: Any) -> Sequence[jax.Array]:
    given, of_tables = residuals[:4], residuals[6:]

    def both(*given: jax.Array) -> Sequence[jax.Array]:
        return _composed(options, *given, *of_tables)[:2]

    found: Sequence[jax.Array] = linear.tangents_of(both, given, tangents)
    return found


def _transpose(options: Both, residuals: Any, cotangents: Any) -> Sequence[Any]:
    if all(one is not None for one in cotangents):
        dq, dk, *of_weights = _backward(options, *residuals, *cotangents)
        return dq, dk, *of_weights
    # Nothing depends on one of the two.
    found: list[Any] = [None] * 4
    for which, dy in enumerate(cotangents):
        if dy is not None:
            x, weight, rstd = residuals[which:6:2]
            _, cos, sin = residuals[6:]
            one = _grad_one(options, x, weight, rstd, cos, sin, dy)
            found[which], found[which + 2] = one
    return found
