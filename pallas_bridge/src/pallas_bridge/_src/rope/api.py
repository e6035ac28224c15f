"""Rotary position embedding: what users call."""

from typing import Any, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .. import meshes
from ..checks import as_array, check_flag
from ..implementations import choose
from ..keywords import hinted
from ..operation import Implementation
from . import custom_call
from .declaration import OPERATION
from .options import (
    Options,
    check_arrays,
    check_base,
    check_leading,
    check_offset,
    check_positions,
    check_rotary_dim,
    check_scaling,
)
from .scaling import Scaling, frequencies
from .tables import tables as make_tables

BASE = 10000.0


@overload
def rope(
    q: ArrayLike,
    k: None = ...,
    *,
    positions: ArrayLike | None = ...,
    offset: ArrayLike = ...,
    base: float = ...,
    rotary_dim: int | None = ...,
    interleaved: bool = ...,
    scaling: Scaling | None = ...,
    tables: tuple[ArrayLike, ArrayLike] | None = ...,
    implementation: Implementation | None = ...,
) -> jax.Array: ...


@overload
def rope(
    q: ArrayLike,
    k: ArrayLike,
    *,
    positions: ArrayLike | None = ...,
    offset: ArrayLike = ...,
    base: float = ...,
    rotary_dim: int | None = ...,
    interleaved: bool = ...,
    scaling: Scaling | None = ...,
    tables: tuple[ArrayLike, ArrayLike] | None = ...,
    implementation: Implementation | None = ...,
) -> tuple[jax.Array, jax.Array]: ...


@hinted
def rope(
    q: ArrayLike,
    k: ArrayLike | None = None,
    *,
    positions: ArrayLike | None = None,
    offset: ArrayLike = 0,
    base: float = BASE,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    scaling: Scaling | None = None,
    tables: tuple[ArrayLike, ArrayLike] | None = None,
    implementation: Implementation | None = None,
) -> Any:
    """Rotary position embedding of queries and keys (Su et al., "RoFormer", 2021).

    The first R = `rotary_dim` columns of every head are R / 2 pairs (a, b), of which the pair i
    turns by the angle of the token's position p times a frequency:

        (a cos(t) - b sin(t), b cos(t) + a sin(t)),  t = p * base^(-2 i / R)

    Pairs are columns i and i + R / 2 (GPT-NeoX, Llama), or, interleaved, columns 2 i and 2 i + 1
    (GPT-J). The other columns are copied. Frequencies are made in float64 as the program is traced,
    and `scaling` changes them as published models do. Cosine and sine are right to a few f32
    roundings for positions up to 2^24. Rows are computed in f32 and rounded once.

    It is differentiable in both modes, to any order, with respect to q and k: the gradient is
    rotated back by the same kernel, and nothing of q and k is kept for it. Positions and tables
    have no gradient.

    Args:
      q: [B, S, H, D] or [S, H, D], with any number of axes before S, in bfloat16, float16 or
        float32.
      k: None, or keys with the axes of q but for the number of heads.
      positions: integers [S] or [.., S], which broadcast to the axes before heads; None for
        `offset` and the numbers after it.
      offset: the position of the first token, an integer that may be traced.
      base: finite and above 0.
      rotary_dim: even and at most D; None for D.
      interleaved: whether pairs are columns side by side.
      scaling: `LinearScaling`, `NtkScaling`, `YarnScaling`, `Llama3Scaling`, or None.
      tables: cosines and sines [.., S, R / 2], in the place of positions, base and scaling.
      implementation: "custom_call" (kernels of the library), "reference" (the program of XLA, which
        takes wider dtypes too), or None for what `pallas_bridge.info()` says of the platform.

    Returns:
      What q becomes, of its shape and dtype; with k a pair.

    Raises:
      TypeError: a dtype that is not taken, positions that are no integers, or an option that is no
        number, of another kind, or traced.
      ValueError: shapes that disagree, an option outside its range, or options that exclude one
        another.

    >>> print(rope(jnp.array([[[1.0, 0.0]]]), positions=jnp.array([1])).round(4))
    [[[0.5403 0.8415]]]
    """
    choose(OPERATION, implementation)
    q = as_array("q", q, "[.., S, H, D]")
    k = None if k is None else as_array("k", k, "[.., S, H, D]")
    options, cos, sin = prepared(
        q,
        k,
        positions=positions,
        offset=offset,
        base=base,
        rotary_dim=rotary_dim,
        interleaved=interleaved,
        scaling=scaling,
        tables=tables,
        implementation=implementation,
    )
    rotated = [custom_call.rope(options, x, cos, sin) for x in (q, *([] if k is None else [k]))]
    return rotated[0] if k is None else tuple(rotated)


def prepared(
    q: jax.Array,
    k: jax.Array | None,
    *,
    positions: ArrayLike | None,
    offset: ArrayLike,
    base: float,
    rotary_dim: int | None,
    interleaved: bool,
    scaling: Scaling | None,
    tables: tuple[ArrayLike, ArrayLike] | None,
    implementation: Implementation | None,
) -> tuple[Options, jax.Array, jax.Array]:
    """Returns options, and tables [S, R / 2] or [.., S, R / 2] with all of q's axes.

    Raises:
        TypeError: what `rope` raises.
        ValueError: the same.
    """
    options = Options(check_flag("interleaved", interleaved), implementation=implementation)
    base, scaling = check_base(base), check_scaling(scaling)
    check_arrays(q, k)
    leading = q.shape[:-2]
    if tables is None:
        columns = check_rotary_dim(rotary_dim, q.shape[-1])
        where = _positions(positions, offset, q)
        cos, sin = make_tables(where, *frequencies(base, columns, scaling))
    else:
        is_set = positions is not None or _is_set(offset) or scaling is not None or base != BASE
        if is_set:
            raise ValueError(
                "tables are given, and positions, offset, base or scaling too; they are what "
                "tables are made of"
            )
        cos, sin = _given(tables, rotary_dim, q.shape)
    if cos.ndim > 2:
        # Of tables with batches calls know, if they have all of them.
        cos, sin = (jnp.broadcast_to(one, (*leading, one.shape[-1])) for one in (cos, sin))
    return options, cos, sin


def _is_set(offset: ArrayLike) -> bool:
    """Whether an offset is not the one that nobody gave."""
    return not (isinstance(offset, int) and offset == 0)


def _positions(positions: ArrayLike | None, offset: ArrayLike, q: jax.Array) -> jax.Array:
    """Returns positions [S], or [.., S] where batches differ, for q [.., S, H, D].

    Devices that share a sequence have all of its positions: tables of these are whole, and larger.

    Raises:
        TypeError: they are no integers.
        ValueError: another shape, or both are given.
    """
    leading = q.shape[:-2]
    if positions is None:
        start = as_array("offset", offset, "of no axes, an integer")
        check_offset(start)
        return start.astype(jnp.int32) + jnp.arange(leading[-1], dtype=jnp.int32)
    if _is_set(offset):
        raise ValueError(
            "positions and offset are both given; it must be one of them: positions, a number a "
            "token, or offset, that of the first token"
        )
    found = as_array("positions", positions, "of integers, [S] or [.., S]")
    check_positions(found, leading)
    found = _alone(found, 1)
    if found.ndim == 1 or meshes.sharded_over(found)[-1]:
        found = meshes.with_whole_axis(found, -1, q)
    return found


def _alone(array: jax.Array, own: int) -> jax.Array:
    """Returns an array without axes of a batch that are all 1."""
    is_one = all(extent == 1 for extent in array.shape[: array.ndim - own])
    return array.reshape(array.shape[array.ndim - own :]) if is_one else array


def _given(
    tables: tuple[ArrayLike, ArrayLike], rotary_dim: int | None, shape: tuple[Any, ...]
) -> list[jax.Array]:
    """Returns tables that a user made, without a gradient.

    Raises:
        TypeError: they are no pair, or no floats.
        ValueError: shapes that disagree.
    """
    if not isinstance(tables, tuple | list) or len(tables) != 2:
        raise TypeError(
            f"tables is of type {type(tables).__name__}; it must be a pair, cos and sin"
        )
    pairs = zip(("cos", "sin"), tables, strict=True)
    cos, sin = (as_array(name, one, "[.., S, R / 2]") for name, one in pairs)
    for name, one in (("cos", cos), ("sin", sin)):
        if not jnp.issubdtype(one.dtype, jnp.floating):
            raise TypeError(f"{name} has dtype {one.dtype}; it must be floats")
    if cos.shape != sin.shape or cos.ndim == 0:
        raise ValueError(
            f"cos has shape {cos.shape} and sin {sin.shape}; both must be [.., S, R / 2]"
        )
    columns = 2 * cos.shape[-1]
    if check_rotary_dim(columns if rotary_dim is None else rotary_dim, shape[-1]) != columns:
        raise ValueError(
            f"rotary_dim is {rotary_dim} and tables are of {columns // 2} pairs; they must be of "
            "half as many"
        )
    check_leading("cos", cos.shape[:-1], shape[:-2], " before its pairs")
    stopped = (jax.lax.stop_gradient(one).astype(jnp.float32) for one in (cos, sin))
    return [_alone(one, 2) for one in stopped]
