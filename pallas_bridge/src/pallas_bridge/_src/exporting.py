"""What an operation says of its programs for tools that run no Python.

Its entry of `exported.EXPORTS`, or `EXPORTS` of its module `api`, has
`PLATFORMS`, the platforms of its programs, the default first; `settings(config)`, what its own
keys of a config say; `program(cell)`; `tile(cell)`, the tile that kernels take, None where they
choose for where they run; and `described(cell, program)`, what its manifest has of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import jax
import jax.numpy as jnp

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}


class ConfigError(ValueError):
    """A config that cannot be exported, and what would do."""


@dataclass(frozen=True)
class Cell:
    """One program: a problem, its platform and its tile."""

    op: str
    platform: str
    # Whether XLA's own program is asked for.
    is_dense: bool
    tokens: int
    vocab: int
    dtype: str
    # None for the kernels' own choice.
    time_block: int | None
    block_size: int | None
    options: Mapping[str, Any]
    # What keys say that the operation alone has.
    settings: Any
    # Of device, or None for a program that fits every TPU.
    kind: str | None
    path: Path

    @property
    def implementation(self) -> Literal["reference"] | None:
        """The option of functions that asks for it."""
        return "reference" if self.is_dense else None


@dataclass(frozen=True)
class Program:
    """A program before it is written."""

    name: str
    function: Callable[..., Any]
    arguments: Sequence[jax.ShapeDtypeStruct]
    # How it is sharded, if that is planned.
    plan: Any = None


def no_tile(cell: Cell) -> dict[str, int | None]:
    """Returns the tile of kernels that have none."""
    return {"time_block": None, "block_size": None}


def settings_alone(cell: Cell, program: Program) -> dict[str, Any]:
    """Returns what a manifest has of an operation that has settings of its own, and no more."""
    return {"settings": dict(vars(cell.settings))}


def check_extent(name: str, extent: Any, where: str = "") -> None:
    """Checks an extent of a config.

    Raises:
        ConfigError: it is no integer of at least 1.
    """
    if not isinstance(extent, int) or isinstance(extent, bool) or extent < 1:
        raise ConfigError(f"{name} is {extent!r}; it must be an integer of at least 1{where}")


def tokens_of(config: Mapping[str, Any]) -> int:
    """Returns the tokens of a config, 512 unless it says another number."""
    return int(config.get("time", 512))


def weight_dtype_of(config: Mapping[str, Any]) -> str:
    """Returns the dtype that a config gives a weight beside rows, theirs unless it says another.

    Raises:
        ConfigError: one that there is not.
    """
    dtype: str = config.get("weight_dtype") or config.get("dtype", "bf16")
    if dtype not in DTYPES:
        raise ConfigError(f"weight_dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    return dtype


def check_options(options: Mapping[str, Any], known: Sequence[str]) -> None:
    """Checks the names of options.

    Raises:
        ConfigError: one that is not known.
    """
    if unknown := sorted({*options} - {*known}):
        names = ", ".join(known)
        raise ConfigError(f"unknown key options.{unknown[0]}; the options are {names}")


@dataclass(frozen=True)
class Exports:
    """What export asks of an operation."""

    # Returns a cell's program of the options that it names.
    make: Callable[[Cell, dict[str, Any]], Program]
    options: tuple[str, ...]
    # Keys of a config that name extents, and others with how each is read of the config.
    extents: tuple[str, ...]
    keys: Mapping[str, Callable[[Mapping[str, Any]], Any]] = field(default_factory=dict)

    # The default first.
    PLATFORMS = ("cpu", "cuda", "tpu")
    tile, described = staticmethod(no_tile), staticmethod(settings_alone)

    def settings(self, config: Mapping[str, Any]) -> SimpleNamespace:
        """Returns the keys of a config that the operation alone has.

        Raises:
            ConfigError: a key that is missing, or a value that is not taken.
        """
        for name in self.extents:
            check_extent(name, config.get(name))
        found = {name: config[name] for name in self.extents}
        more = {name: read(config) for name, read in self.keys.items()}
        return SimpleNamespace(**found, **more)

    def program(self, cell: Cell) -> Program:
        """Returns a cell's program.

        Raises:
            ConfigError: an option that is not known, outside its range, or without a meaning.
        """
        check_options(cell.options, self.options)
        given = {name: value for name, value in cell.options.items() if value is not None}
        return self.make(cell, given)


def flag(name: str) -> Callable[[Mapping[str, Any]], bool]:
    """Returns how a flag is read of a config."""
    return lambda config: bool(config.get(name))


def checked(made: Program) -> Program:
    """Returns a program.

    Raises:
        ConfigError: its options are outside their range.
    """
    try:
        jax.eval_shape(made.function, *made.arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"options: {error}") from None
    return made
