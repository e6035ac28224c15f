"""Programs of LayerNorm for tools that run no Python: all that it gives, and its gradients.

Arguments are x [T, D], weight [D], bias [D] if any, and the cotangent dy; results y, mean [T],
rstd [T], dx, dweight, and dbias if any.
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
from .api import layer_norm

PLATFORMS = ("cpu", "cuda", "tpu")
OPTIONS = ("eps",)


@dataclass(frozen=True)
class Settings:
    """What a config says beside what every operation has."""

    hidden: int
    bias: bool
    # Of weight and bias.
    weight_dtype: str


def settings(config: Mapping[str, Any]) -> Settings:
    """Returns what a config says beside what every operation has.

    Raises:
        ConfigError: a key that is missing, or a value that is not taken.
    """
    check_extent("hidden", config.get("hidden"))
    return Settings(config["hidden"], bool(config.get("bias")), weight_dtype_of(config))


def program(cell: Cell) -> Program:
    """Returns a cell's program.

    Raises:
        ConfigError: an option that is not known.
    """
    check_options(cell.options, OPTIONS)
    settings: Settings = cell.settings
    options: dict[str, Any] = {
        **cell.options,
        "return_statistics": True,
        "implementation": "reference" if cell.is_dense else None,
    }

    def forward_and_backward(*arguments: Any) -> Any:
        *arrays, dy = arguments

        def f(x: Any, weight: Any, bias: Any = None) -> Any:
            y, *statistics = layer_norm(x, weight, bias, **options)
            return y, statistics

        y, pull, statistics = jax.vjp(f, *arrays, has_aux=True)
        return y, *statistics, *pull(dy)

    rows = jax.ShapeDtypeStruct((cell.tokens, settings.hidden), DTYPES[cell.dtype])
    columns = jax.ShapeDtypeStruct((settings.hidden,), DTYPES[settings.weight_dtype])
    arguments = [rows, columns, *[columns] * settings.bias, rows]
    return Program("forward_and_backward", forward_and_backward, arguments)


tile, described = no_tile, settings_alone
