"""The options of activations, and the checks of what a user passes."""

from dataclasses import dataclass
from typing import Any, Literal

import jax

from ..checks import check_float

Kind = Literal["silu", "gelu_tanh", "gelu_erf", "relu", "squared_relu"]
# "apart" is of gate and up in arrays of their own, of which no kernel knows.
Layout = Literal["single", "halves", "interleaved", "apart"]

# The slope of GELU's quick form.
QUICK = 1.702


@dataclass(frozen=True)
class Options:
    """What docs/internals/custom-calls.md calls attributes, checked."""

    kind: Kind
    layout: Layout
    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0
    # What the user asked for by name.
    implementation: str | None = None


def gelu_kind(approximate: Any) -> tuple[Kind, float]:
    """Returns the kind and the slope of a form of GELU.

    Raises:
        ValueError: there is no such form.
    """
    if isinstance(approximate, str) and approximate == "quick":
        return "silu", QUICK
    if isinstance(approximate, bool):
        return ("gelu_tanh" if approximate else "gelu_erf"), 1.0
    raise ValueError(
        f"approximate is {approximate!r}; it must be True (by tanh), False (by erf) or 'quick'"
    )


def check_arrays(x: jax.Array, up: jax.Array | None, *, is_packed: bool) -> None:
    """Checks shapes, and that dtypes are floats.

    Raises:
        TypeError: a dtype that is no float, or an up of another dtype than its gate.
        ValueError: shapes that disagree, or an odd number of columns of two arrays.
    """
    for name, array in (("x", x), ("up", up)):
        if array is not None:
            check_float(name, array)
    if up is not None:
        if up.shape != x.shape:
            raise ValueError(f"up has shape {up.shape}; it must be that of the gate, {x.shape}")
        if up.dtype != x.dtype:
            raise TypeError(f"up has dtype {up.dtype}; it must be that of the gate, {x.dtype}")
    if is_packed:
        if x.ndim == 0:
            raise ValueError("x has shape (); it must be [.., 2F], gate and up, or up be given")
        width = x.shape[-1]
        if isinstance(width, int) and width % 2:
            raise ValueError(
                f"x has shape {x.shape}; its last axis packs gate and up, so that it must be even "
                f"and is {width}"
            )
