"""The options of norms, and the checks of what a user passes."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax

from ..checks import check_flag, check_float, check_number
from ..operation import Operation
from .declaration import LAYER_NORM, RMS_NORM


@dataclass(frozen=True)
class Options:
    """What docs/internals/custom-calls.md calls attributes, checked."""

    kind: Literal["rms", "layer"]
    eps: float
    # Whether columns are scaled by 1 + weight; LayerNorm has no such option.
    zero_centred: bool = False
    # What the user asked for by name.
    implementation: str | None = None

    @property
    def operation(self) -> Operation:
        """Which of the two operations it is."""
        return RMS_NORM if self.kind == "rms" else LAYER_NORM

    @property
    def statistics(self) -> tuple[str, ...]:
        """The statistics of a row, by name."""
        return ("rstd",) if self.kind == "rms" else ("mean", "rstd")


def check_rms_options(eps: Any, zero_centred: Any, implementation: str | None) -> Options:
    """Returns the options of RMSNorm.

    Raises:
        TypeError: an option that is no number, or no bool, or traced.
        ValueError: eps that is negative or not finite.
    """
    number = check_eps(eps)
    return Options("rms", number, check_flag("zero_centred", zero_centred), implementation)


def check_layer_options(eps: Any, implementation: str | None) -> Options:
    """Returns the options of LayerNorm.

    Raises:
        TypeError: eps that is no number, or traced.
        ValueError: eps that is negative or not finite.
    """
    return Options("layer", check_eps(eps), implementation=implementation)


def check_eps(eps: Any) -> float:
    """Returns eps, which is added to the mean of squares.

    Raises:
        TypeError: eps that is no number, or traced.
        ValueError: eps that is negative or not finite.
    """
    number = check_number("eps", eps)
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"eps is {number}; it must be finite and at least 0")
    return number


def check_columns(x: jax.Array, name: str, columns: jax.Array, x_name: str = "x") -> None:
    """Checks rows x [.., D], and that the array called `name` is [D].

    Raises:
        TypeError: a dtype that is no float.
        ValueError: shapes that disagree, or rows of no columns.
    """
    check_float(x_name, x)
    check_float(name, columns)
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"{x_name} has shape {x.shape}; it must be [.., D] with D at least 1")
    if columns.shape != x.shape[-1:]:
        raise ValueError(
            f"{name} has shape {columns.shape} and {x_name} {x.shape}; {name} must have shape "
            f"{x.shape[-1:]}, a number a column"
        )


def check_like(name: str, array: jax.Array | None, like_name: str, like: jax.Array) -> None:
    """Checks that an array, if there is one, has the shape and dtype of `like`.

    Raises:
        TypeError: another dtype, or one that is no float.
        ValueError: another shape.
    """
    if array is None:
        return
    check_float(name, array)
    if array.shape != like.shape:
        raise ValueError(
            f"{name} has shape {array.shape}; it must be that of {like_name}, {like.shape}"
        )
    if array.dtype != like.dtype:
        raise TypeError(
            f"{name} has dtype {array.dtype}; it must be that of {like_name}, {like.dtype}"
        )
