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
    number = check_number("eps", eps)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"eps is {number}; it must be finite and at least 0")
    return Options(number, check_flag("zero_centred", zero_centred), implementation)


def check_arrays(x: jax.Array, weight: jax.Array, residual: jax.Array | None) -> None:
    """Checks shapes, and that dtypes are floats.

    Raises:
        TypeError: a dtype that is no float, or a residual of another dtype than x.
        ValueError: shapes that disagree, or rows of no columns.
    """
    for name, array in (("x", x), ("weight", weight), ("residual", residual)):
        if array is not None:
            check_float(name, array)
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"x has shape {x.shape}; it must be [.., D] with D at least 1")
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"weight has shape {weight.shape} and x {x.shape}; weight must have shape "
            f"{x.shape[-1:]}, a number a column"
        )
    if residual is None:
        return
    if residual.shape != x.shape:
        raise ValueError(f"residual has shape {residual.shape}; it must be that of x, {x.shape}")
    if residual.dtype != x.dtype:
        raise TypeError(f"residual has dtype {residual.dtype}; it must be that of x, {x.dtype}")
