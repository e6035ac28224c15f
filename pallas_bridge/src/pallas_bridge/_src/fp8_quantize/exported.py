"""Programs of FP8 quantisation for tools that run no Python: values and scales.

The argument is x [T, D]; results are values [T, D] and scales, a scalar, [T] or by block, and those
of the transposed copy [D, T] where the option `transposed` is set.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..exporting import (
    DTYPES,
    Cell,
    ConfigError,
    Program,
    check_extent,
    check_options,
    no_tile,
    settings_alone,
)
from .api import fp8_quantize

PLATFORMS = ("cpu", "cuda", "tpu")
OPTIONS = ("granularity", "block_size", "power_of_two", "format", "transposed")
FORMATS = {"f8e4m3fn": jnp.float8_e4m3fn, "f8e5m2": jnp.float8_e5m2}


@dataclass(frozen=True)
class Settings:
    """What a config says beside what every operation has."""

    hidden: int


def settings(config: Mapping[str, Any]) -> Settings:
    """Returns what a config says beside what every operation has.

    Raises:
        ConfigError: a key that is missing, or a value that is not taken.
    """
    check_extent("hidden", config.get("hidden"))
    return Settings(config["hidden"])


def program(cell: Cell) -> Program:
    """Returns a cell's program.

    Raises:
        ConfigError: an option that is not known, or outside its range.
    """
    settings: Settings = cell.settings
    rows = jax.ShapeDtypeStruct((cell.tokens, settings.hidden), DTYPES[cell.dtype])
    return program_of(cell, fp8_quantize, [rows], OPTIONS)


def program_of(
    cell: Cell,
    function: Callable[..., Any],
    arguments: Sequence[jax.ShapeDtypeStruct],
    known: Sequence[str],
) -> Program:
    """Returns a cell's program of a function that quantises: all that it gives of its arguments.

    Raises:
        ConfigError: an option that is not known, or outside its range.
    """
    check_options(cell.options, known)
    options: dict[str, Any] = {
        name: value for name, value in cell.options.items() if value is not None
    }
    name = options.pop("format", "f8e4m3fn")
    if name not in FORMATS:
        raise ConfigError(f"options.format is {name!r}; it must be one of {', '.join(FORMATS)}")
    options |= {"dtype": FORMATS[name], "implementation": "reference" if cell.is_dense else None}

    def forward(*arrays: Any) -> Any:
        return tuple(jax.tree.leaves(function(*arrays, **options)))

    try:
        jax.eval_shape(forward, *arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"options: {error}") from None
    return Program("forward", forward, arguments)


tile, described = no_tile, settings_alone
