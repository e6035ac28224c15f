"""The options of RMSNorm, and the checks of what a user passes."""

import math
from dataclasses import dataclass
from typing import Any

import jax

from ..checks import check_flag, check_float, check_number


@dataclass(frozen=True)
class Options:
    """What docs/internals/custom-calls.md calls attributes, checked."""

    eps: float
    # Whether the weight is what scales, less 1.
    zero_centred: bool
    # What the user asked for by name.
    implementation: str | None = None


def check_options(eps: Any, zero_centred: Any, implementation: str | None) -> Options:
    """Returns the options.

    Raises:
        TypeError: an option that is no number, or no bool, or traced.
        ValueError: eps that is negative or not finite.
    """
    return Options(check_eps(eps), check_flag("zero_centred", zero_centred), implementation)


def check_eps(eps: Any) -> float:
    """Returns what is added to a mean of squares.

    Raises:
        TypeError: what is no number, or traced.
        ValueError: a number that is negative or not finite.
    """
    number = check_number("eps", eps)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"eps is {number}; it must be finite and at least 0")
    return number


def check_arrays(x: jax.Array, weight: jax.Array, residual: jax.Array | None) -> None:
    """Checks shapes, and that dtypes are floats.

    Raises:
        TypeError: a dtype that is no float, or a residual of another dtype than x.
        ValueError: shapes that disagree, or rows of no columns.
    """
    check_columns(x, "weight", weight)
    if residual is None:
        return
    check_float("residual", residual)
    if residual.shape != x.shape:
        raise ValueError(f"residual has shape {residual.shape}; it must be that of x, {x.shape}")
    if residual.dtype != x.dtype:
        raise TypeError(f"residual has dtype {residual.dtype}; it must be that of x, {x.dtype}")


def check_columns(x: jax.Array, name: str, columns: jax.Array, of: str = "x") -> None:
    """Checks rows, whose name is `of`, and that an array has a number for each of their columns.

    Raises:
        TypeError: a dtype that is no float.
        ValueError: shapes that disagree, or rows of no columns.
    """
    check_float(of, x)
    check_float(name, columns)
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"{of} has shape {x.shape}; it must be [.., D] with D at least 1")
    if columns.shape != x.shape[-1:]:
        raise ValueError(
            f"{name} has shape {columns.shape} and {of} {x.shape}; {name} must have shape "
            f"{x.shape[-1:]}, a number a column"
        )
