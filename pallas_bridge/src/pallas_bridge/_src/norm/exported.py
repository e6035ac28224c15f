"""Programs of RMSNorm and LayerNorm for tools that run no Python: all results and gradients.

RMSNorm: arguments are x [T, D], weight [D], the residual if any, and cotangents dy and, with a
residual, dsum; results are y, the sum if any, rstd [T], dx, which is dresidual too, and dweight.

LayerNorm: arguments are x [T, D], weight [D], bias [D] if any, and the cotangent dy; results are y,
mean [T], rstd [T], dx, dweight, and dbias if any.
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
from .api import layer_norm, rms_norm
from .declaration import LAYER_NORM

PLATFORMS = ("cpu", "cuda", "tpu")
OPTIONS = ("eps", "zero_centred")


@dataclass(frozen=True)
class Settings:
    """The keys of a config that norms alone have."""

    hidden: int
    # Of weight and bias.
    weight_dtype: str


@dataclass(frozen=True)
class RmsSettings(Settings):
    """Those of RMSNorm."""

    residual: bool


@dataclass(frozen=True)
class LayerSettings(Settings):
    """Those of LayerNorm."""

    bias: bool


def settings(config: Mapping[str, Any]) -> Settings:
    """Returns the keys of a config that norms alone have.

    Raises:
        ConfigError: a key that is missing, or a value that is not taken.
    """
    check_extent("hidden", config.get("hidden"))
    shared = config["hidden"], weight_dtype_of(config)
    if config["op"] == LAYER_NORM.name:
        return LayerSettings(*shared, bool(config.get("bias")))
    return RmsSettings(*shared, bool(config.get("residual")))


def program(cell: Cell) -> Program:
    """Returns a cell's program.

    Raises:
        ConfigError: an option that is not known.
    """
    settings, is_layer = cell.settings, cell.op == LAYER_NORM.name
    check_options(cell.options, OPTIONS[:1] if is_layer else OPTIONS)
    options: dict[str, Any] = {
        **cell.options,
        "implementation": "reference" if cell.is_dense else None,
    }
    rows = jax.ShapeDtypeStruct((cell.tokens, settings.hidden), DTYPES[cell.dtype])
    columns = jax.ShapeDtypeStruct((settings.hidden,), DTYPES[settings.weight_dtype])
    if is_layer:
        arrays, outputs = [rows, columns, *[columns] * settings.bias], 1
    else:
        arrays, outputs = [rows, columns, *[rows] * settings.residual], 1 + settings.residual

    def norm(x: Any, weight: Any, more: Any = None) -> Any:
        if is_layer:
            found = layer_norm(x, weight, more, return_statistics=True, **options)
        else:
            found = rms_norm(x, weight, residual=more, return_rstd=True, **options)
        return tuple(found[:outputs]), found[outputs:]

    def forward_and_backward(*arguments: Any) -> Any:
        found, pull, statistics = jax.vjp(norm, *arguments[: len(arrays)], has_aux=True)
        gradients = pull(arguments[len(arrays) :])
        # The gradient of a residual is dx.
        return *found, *statistics, *(gradients if is_layer else gradients[:2])

    arguments = [*arrays, *[rows] * outputs]
    return Program("forward_and_backward", forward_and_backward, arguments)


tile, described = no_tile, settings_alone
