"""Programs of RMSNorm for tools that run no Python: all that it gives, and its gradients.

Arguments are x [T, D], weight [D], residual if any, and cotangents dy and, with a residual, dsum;
results y, the sum if any, rstd [T], dx, which is dresidual too, and dweight.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from ..exporting import (
    DTYPES,
    Cell,
    Program,
    check_extent,
    check_options,
    no_tile,
    settings_alone,
    weight_dtype_of,
)
from .api import rms_norm

PLATFORMS = ("cpu", "cuda", "tpu")
OPTIONS = ("eps", "zero_centred")


@dataclass(frozen=True)
class Settings:
    """What a config says beside what every operation has."""

    hidden: int
    residual: bool
    # Of the weight.
    weight_dtype: str


def settings(config: Mapping[str, Any]) -> Settings:
    """Returns what a config says beside what every operation has.

    Raises:
        ConfigError: a key that is missing, or a value that is not taken.
    """
    check_extent("hidden", config.get("hidden"))
    return Settings(config["hidden"], bool(config.get("residual")), weight_dtype_of(config))


def program(cell: Cell) -> Program:
    """Returns a cell's program.

    Raises:
        ConfigError: an option that is not known.
    """
    check_options(cell.options, OPTIONS)
    settings: Settings = cell.settings
    count = 3 if settings.residual else 2
    options: dict[str, Any] = {
        **cell.options,
        "return_rstd": True,
        "implementation": "reference" if cell.is_dense else None,
    }

    def forward_and_backward(*arguments: Any) -> Any:
        arrays, cotangents = arguments[:count], arguments[count:]

        def f(x: Any, weight: Any, residual: Any = None) -> Any:
            *found, rstd = rms_norm(x, weight, residual=residual, **options)
            return tuple(found), rstd

        found, pull, rstd = jax.vjp(f, *arrays, has_aux=True)
        dx, dweight, *_ = pull(tuple(cotangents))
        return *found, rstd, dx, dweight

    rows = jax.ShapeDtypeStruct((cell.tokens, settings.hidden), DTYPES[cell.dtype])
    weight = jax.ShapeDtypeStruct((settings.hidden,), DTYPES[settings.weight_dtype])
    arguments = [rows, weight, *[rows] * (2 * count - 3)]
    return Program("forward_and_backward", forward_and_backward, arguments)


tile, described = no_tile, settings_alone
