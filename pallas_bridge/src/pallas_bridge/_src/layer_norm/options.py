"""The options of LayerNorm, and the checks of what a user passes."""

from dataclasses import dataclass
from typing import Any

import jax

from ..checks import check_float
from ..rms_norm.options import check_columns, check_eps


@dataclass(frozen=True)
class Options:
    """What docs/internals/custom-calls.md calls attributes, checked."""

    eps: float
    # What the user asked for by name.
    implementation: str | None = None


def check_options(eps: Any, implementation: str | None) -> Options:
    """Returns the options.

    Raises:
        TypeError: eps that is no number, or traced.
        ValueError: eps that is negative or not finite.
    """
    return Options(check_eps(eps), implementation)


def check_arrays(x: jax.Array, weight: jax.Array, bias: jax.Array | None) -> None:
    """Checks shapes, and that dtypes are floats.

    Raises:
        TypeError: a dtype that is no float, or a bias of another dtype than the weight.
        ValueError: shapes that disagree, or rows of no columns.
    """
    check_columns(x, "weight", weight)
    if bias is None:
        return
    check_float("bias", bias)
    if bias.shape != weight.shape:
        raise ValueError(f"bias has shape {bias.shape}; it must be that of weight, {weight.shape}")
    if bias.dtype != weight.dtype:
        raise TypeError(f"bias has dtype {bias.dtype}; it must be that of weight, {weight.dtype}")
