"""The options of FP8 quantisation, and the checks of what a user passes."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from ..checks import (
    as_array,
    check_dtype,
    check_dtype_named,
    check_flag,
    check_integer,
    check_word,
)

Granularity = Literal["tensor", "row", "block_1d", "block_2d"]

# The largest finite number of each format.
LARGEST = {np.dtype(jnp.float8_e4m3fn): 448.0, np.dtype(jnp.float8_e5m2): 57344.0}


@dataclass(frozen=True)
class Options:
    """What docs/internals/custom-calls.md calls attributes, checked."""

    dtype: np.dtype[Any]
    granularity: Granularity
    block_size: int
    power_of_two: bool
    # What the user asked for by name.
    implementation: str | None = None

    @property
    def largest(self) -> float:
        """The largest finite number of the format."""
        return LARGEST[self.dtype]


def check_format(name: str, dtype: Any) -> np.dtype[Any]:
    """Returns a format.

    Raises:
        TypeError: it is none of those that there are.
    """
    return check_dtype_named(name, dtype, LARGEST)


def check_options(
    dtype: Any, granularity: Any, block_size: Any, power_of_two: Any, implementation: str | None
) -> Options:
    """Returns the options.

    Raises:
        TypeError: an option of another type, or traced.
        ValueError: an option outside its range.
    """
    found = check_format("dtype", dtype)
    check_word("granularity", granularity, get_args(Granularity))
    size = check_integer("block_size", block_size, 1)
    flag = check_flag("power_of_two", power_of_two)
    return Options(found, granularity, size, flag, implementation)


def check_array(options: Options, x: jax.Array, transposed: bool) -> None:
    """Checks the shape and dtype of what is quantised.

    Raises:
        TypeError: a dtype that is not taken.
        ValueError: too few axes.
    """
    check_dtype("x", x)
    if x.ndim < 2 and (transposed or options.granularity == "block_2d"):
        why = "transposed is set" if transposed else "granularity is 'block_2d'"
        raise ValueError(f"x has shape {x.shape}; it must be [.., M, D] where {why}")
    if x.ndim == 0 and options.granularity != "tensor":
        raise ValueError(
            f"x has shape (); it must be [.., D] where granularity is {options.granularity!r}"
        )


def check_number(name: str, number: Any, options: Options) -> jax.Array:
    """Returns a scale or an amax that was given, in f32.

    Raises:
        TypeError: it is no float.
        ValueError: it is no scalar, or goes with another granularity.
    """
    found = as_array(name, number, "of no axes")
    if options.granularity != "tensor":
        raise ValueError(
            f"{name} is given and granularity is {options.granularity!r}; it must be 'tensor', "
            "or the scales those of the blocks"
        )
    if found.shape != ():
        raise ValueError(f"{name} has shape {found.shape}; it must be a scalar")
    if not jnp.issubdtype(found.dtype, jnp.floating):
        raise TypeError(f"{name} has dtype {found.dtype}; it must be float32")
    return found.astype(jnp.float32)
