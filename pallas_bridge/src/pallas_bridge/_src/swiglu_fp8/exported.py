"""Programs of SwiGLU in FP8 for tools that run no Python.

The argument is x [T, 2F], which packs gate and up; results are those of FP8 quantisation of y
[T, F].
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from ..exporting import DTYPES, Cell, Program, check_extent, no_tile, settings_alone
from ..fp8_quantize.api import swiglu_fp8
from ..fp8_quantize.exported import OPTIONS as QUANTIZATION
from ..fp8_quantize.exported import program_of

PLATFORMS = ("cpu", "cuda", "tpu")
OPTIONS = ("interleaved", "alpha", "limit", "up_offset", *QUANTIZATION)


@dataclass(frozen=True)
class Settings:
    """What a config says beside what every operation has."""

    # Columns of y.
    mlp: int


def settings(config: Mapping[str, Any]) -> Settings:
    """Returns what a config says beside what every operation has.

    Raises:
        ConfigError: a key that is missing, or a value that is not taken.
    """
    check_extent("mlp", config.get("mlp"))
    return Settings(config["mlp"])


def program(cell: Cell) -> Program:
    """Returns a cell's program.

    Raises:
        ConfigError: an option that is not known, or outside its range.
    """
    settings: Settings = cell.settings
    x = jax.ShapeDtypeStruct((cell.tokens, 2 * settings.mlp), DTYPES[cell.dtype])
    return program_of(cell, swiglu_fp8, [x], OPTIONS)


tile, described = no_tile, settings_alone
