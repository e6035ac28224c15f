"""Programs of activations for tools that run no Python: y, and the gradient.

Arguments are x [T, F], or [T, 2F] where it packs two arrays, and dy [T, F]; results y [T, F], and
dx.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

import jax

from ..checks import check_float32
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
from . import custom_call
from .options import Kind, Options

PLATFORMS = ("cpu", "cuda", "tpu")
OPTIONS = ("kind", "alpha", "limit", "up_offset")
LAYOUTS = ("single", "halves", "interleaved")


@dataclass(frozen=True)
class Settings:
    """What a config says beside what every operation has."""

    # Columns of y.
    mlp: int
    layout: Any


def settings(config: Mapping[str, Any]) -> Settings:
    """Returns what a config says beside what every operation has.

    Raises:
        ConfigError: a key that is missing, or a value that is not taken.
    """
    check_extent("mlp", config.get("mlp"))
    layout = config.get("layout") or "halves"
    if layout not in LAYOUTS:
        raise ConfigError(f"layout is {layout!r}; it must be one of {', '.join(LAYOUTS)}")
    return Settings(config["mlp"], layout)


def program(cell: Cell) -> Program:
    """Returns a cell's program.

    Raises:
        ConfigError: an option that is not known, or has no meaning for the others.
    """
    check_options(cell.options, OPTIONS)
    settings: Settings = cell.settings
    given = {name: value for name, value in cell.options.items() if value is not None}
    kind = given.pop("kind", "silu")
    if kind not in get_args(Kind):
        raise ConfigError(
            f"options.kind is {kind!r}; it must be one of {', '.join(get_args(Kind))}"
        )
    for name, value in given.items():
        given[name] = check_float32(name, value, is_positive=name != "up_offset")
    if given.get("alpha", 1.0) != 1 and kind != "silu":
        raise ConfigError(f"options.alpha is {given['alpha']}; it must be 1 where kind is not silu")
    if settings.layout == "single" and ("limit" in given or given.get("up_offset")):
        raise ConfigError("options.limit or up_offset is set; layout single has no gate")
    implementation = "reference" if cell.is_dense else None
    options = Options(kind, settings.layout, implementation=implementation, **given)

    def forward_and_backward(x: Any, dy: Any) -> Any:
        y, pull = jax.vjp(lambda x: custom_call.activation(options, x), x)
        return y, *pull(dy)

    packs = 1 if settings.layout == "single" else 2
    x, dy = (
        jax.ShapeDtypeStruct((cell.tokens, columns), DTYPES[cell.dtype])
        for columns in (settings.mlp * packs, settings.mlp)
    )
    return Program("forward_and_backward", forward_and_backward, [x, dy])


tile, described = no_tile, settings_alone
