"""Programs of rotary position embedding for tools that run no Python: y, and the gradient.

Arguments are x [T, H, D], positions [T] and dy [T, H, D]; results y, and dx.
"""

from collections.abc import Mapping
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
from .api import rope

PLATFORMS = ("cpu", "cuda", "tpu")
OPTIONS = ("base", "interleaved", "rotary_dim")


@dataclass(frozen=True)
class Settings:
    """What a config says beside what every operation has."""

    heads: int
    head_dim: int


def settings(config: Mapping[str, Any]) -> Settings:
    """Returns what a config says beside what every operation has.

    Raises:
        ConfigError: a key that is missing, or a value that is not taken.
    """
    for name in ("heads", "head_dim"):
        check_extent(name, config.get(name))
    return Settings(config["heads"], config["head_dim"])


def program(cell: Cell) -> Program:
    """Returns a cell's program.

    Raises:
        ConfigError: an option that is not known, or outside its range.
    """
    check_options(cell.options, OPTIONS)
    settings: Settings = cell.settings
    given = {name: value for name, value in cell.options.items() if value is not None}
    given.setdefault("rotary_dim", settings.head_dim // 2 * 2)
    implementation: Any = "reference" if cell.is_dense else None

    def forward_and_backward(x: Any, positions: Any, dy: Any) -> Any:
        def f(x: Any) -> Any:
            return rope(x, positions=positions, **given, implementation=implementation)

        y, pull = jax.vjp(f, x)
        return y, *pull(dy)

    shape = (cell.tokens, settings.heads, settings.head_dim)
    rows = jax.ShapeDtypeStruct(shape, DTYPES[cell.dtype])
    positions = jax.ShapeDtypeStruct((cell.tokens,), jnp.int32)
    try:
        jax.eval_shape(forward_and_backward, rows, positions, rows)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"options: {error}") from None
    return Program("forward_and_backward", forward_and_backward, [rows, positions, rows])


tile, described = no_tile, settings_alone
