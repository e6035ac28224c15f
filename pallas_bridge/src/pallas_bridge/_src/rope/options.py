"""The options of rotary position embedding, and the checks of what a user passes."""

import math
from dataclasses import dataclass
from typing import Any, get_args

import jax
import jax.numpy as jnp

from ..checks import check_float, check_number, refuse_traced
from .scaling import Scaling


@dataclass(frozen=True)
class Options:
    """What docs/internals/custom-calls.md calls attributes, checked."""

    # Whether pairs are columns side by side.
    interleaved: bool
    # Whether pairs turn the other way: the gradient.
    inverse: bool = False
    # What the user asked for by name.
    implementation: str | None = None


def check_base(base: Any) -> float:
    """Returns the base.

    Raises:
      TypeError: it is no number, or traced.
      ValueError: it is not finite, or not above 0.
    """
    value = check_number("base", base)
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"base is {value:g}; it must be finite and above 0")
    return value


def check_scaling(scaling: Any) -> Scaling | None:
    """Returns the scaling.

    Raises:
      TypeError: it is none of those that there are.
    """
    if scaling is not None and not isinstance(scaling, get_args(Scaling)):
        names = ", ".join(one.__name__ for one in get_args(Scaling))
        raise TypeError(f"scaling is {scaling!r}; it must be None or one of {names}")
    found: Scaling | None = scaling
    return found


def check_arrays(q: jax.Array, k: jax.Array | None) -> None:
    """Checks shapes, and that dtypes are floats.

    Raises:
      TypeError: a dtype that is no float.
      ValueError: shapes that disagree, or have too few axes.
    """
    for name, array in (("q", q), ("k", k)):
        if array is None:
            continue
        check_float(name, array)
        if array.ndim < 3:
            raise ValueError(f"{name} has shape {array.shape}; it must be [.., S, H, D]")
    if k is not None and (k.shape[:-2] != q.shape[:-2] or k.shape[-1] != q.shape[-1]):
        raise ValueError(
            f"k has shape {k.shape} and q {q.shape}; they may differ in heads, the last axis but "
            "one, alone"
        )


def check_rotary_dim(rotary_dim: Any, head: int) -> int:
    """Returns how many columns are rotated.

    Raises:
      TypeError: it is no integer, or traced.
      ValueError: it is odd, below 0, or more than there are.
    """
    refuse_traced("rotary_dim", rotary_dim)
    if rotary_dim is None:
        if head % 2:
            raise ValueError(
                f"q has heads of {head} columns, an odd number; rotary_dim must say how many of "
                "them to rotate"
            )
        return head
    try:
        value = rotary_dim.__index__()
    except (AttributeError, TypeError):
        raise TypeError(f"rotary_dim is {rotary_dim!r}; it must be an integer") from None
    if isinstance(rotary_dim, bool) or value % 2 or not 0 <= value <= head:
        raise ValueError(
            f"rotary_dim is {rotary_dim}; it must be even and at most the columns of a head, {head}"
        )
    return int(value)


def check_positions(positions: jax.Array, leading: tuple[Any, ...]) -> None:
    """Checks that positions are integers, [S] or [.., S] for what comes before heads.

    Raises:
      TypeError: a dtype that is no integer.
      ValueError: another shape.
    """
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise TypeError(f"positions has dtype {positions.dtype}; it must be integers")
    check_leading("positions", positions.shape, leading, "")


def check_offset(offset: jax.Array) -> None:
    """Checks that an offset is an integer.

    Raises:
      TypeError: it is none.
      ValueError: it is more than one.
    """
    if not jnp.issubdtype(offset.dtype, jnp.integer):
        raise TypeError(f"offset has dtype {offset.dtype}; it must be an integer")
    if offset.ndim:
        raise ValueError(
            f"offset has shape {offset.shape}; it must be a scalar: positions has one a token"
        )


def check_leading(name: str, shape: tuple[Any, ...], leading: tuple[Any, ...], more: str) -> None:
    """Checks that a shape is S, after axes that broadcast to those of a batch.

    Raises:
      ValueError: it is not.
    """
    pairs = [*zip(reversed(shape[:-1]), reversed(leading[:-1]), strict=False)]
    fits = 0 < len(shape) <= len(leading) and shape[-1] == leading[-1]
    if not fits or any(one not in (1, extent) for one, extent in pairs):
        raise ValueError(
            f"{name} has shape {shape}{more}; it must be {leading[-1:]}, a number a token of a "
            f"sequence, or broadcast to {leading}, as q begins"
        )
