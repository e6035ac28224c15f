"""Programs of RMSNorm in FP8 for tools that run no Python.

Arguments are x [T, D], weight [D], and the residual if any; results are those of FP8 quantisation
of the norm, and the sum if any.
"""

from typing import Any

import jax

from ..exporting import DTYPES, Cell, Program, no_tile, settings_alone
from ..fp8_quantize.api import rms_norm_fp8
from ..fp8_quantize.exported import OPTIONS as QUANTIZATION
from ..fp8_quantize.exported import program_of
from ..norm import exported as norm

PLATFORMS = ("cpu", "cuda", "tpu")
OPTIONS = ("eps", "zero_centred", *QUANTIZATION)


def program(cell: Cell) -> Program:
    """Returns a cell's program.

    Raises:
        ConfigError: an option that is not known, or outside its range.
    """
    settings: norm.RmsSettings = cell.settings
    rows = jax.ShapeDtypeStruct((cell.tokens, settings.hidden), DTYPES[cell.dtype])
    weight = jax.ShapeDtypeStruct((settings.hidden,), DTYPES[settings.weight_dtype])

    def normed(x: Any, weight: Any, residual: Any = None, **options: Any) -> Any:
        return rms_norm_fp8(x, weight, residual=residual, **options)

    arguments = [rows, weight, *[rows] * settings.residual]
    return program_of(cell, normed, arguments, OPTIONS)


settings, tile, described = norm.settings, no_tile, settings_alone
