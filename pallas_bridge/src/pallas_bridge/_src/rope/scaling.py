"""Inverse frequencies, and how published models scale them for contexts beyond their training.

All of it is numbers that are known when a program is traced, in float64.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ..checks import check_flag, check_number


@dataclass(frozen=True)
class _FactorScaling:
    """A scaling by `factor` alone."""

    factor: float

    def __post_init__(self) -> None:
        """Checks the parameter."""
        _check(self, "factor", least=1)


@dataclass(frozen=True)
class LinearScaling(_FactorScaling):
    """Position interpolation (Chen et al., 2023): every frequency over `factor`, at least 1.

    Raises:
      TypeError: a parameter that is no number.
      ValueError: a parameter outside its range.
    """


@dataclass(frozen=True)
class NtkScaling(_FactorScaling):
    """NTK-aware interpolation (bloc97, 2023): the base times factor^(R / (R - 2)).

    R is the number of rotated columns, at least 4, and `factor` at least 1. The highest frequency
    stays, and the lowest is divided by `factor`.

    Raises:
      TypeError: a parameter that is no number.
      ValueError: a parameter outside its range.
    """


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al., "Efficient Context Window Extension of Large Language Models", 2023).

    Frequencies that turn more than `beta_fast` times in `original_length` positions stay, those
    that turn less than `beta_slow` times are divided by `factor`, and between them there is a ramp
    over the index of the pair. Cosine and sine are multiplied by `attention_factor`.

    Args:
      factor: at least 1.
      original_length: positions that the model was trained on, at least 1.
      beta_fast: above `beta_slow`.
      beta_slow: above 0.
      attention_factor: above 0; None for 0.1 ln(factor) + 1.
      truncate: whether the ends of the ramp are rounded outwards to whole pairs, as in the authors'
        program and by default in Hugging Face's; False for gpt-oss, whose configuration says so.

    Raises:
      TypeError: a parameter that is no number, or a flag that is no bool.
      ValueError: a parameter outside its range.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        """Checks the parameters."""
        _check(self, "factor", least=1)
        _check(self, "original_length", least=1)
        _check(self, "beta_slow", above=0)
        _check(self, "beta_fast", above=self.beta_slow)
        if self.attention_factor is not None:
            _check(self, "attention_factor", above=0)
        check_flag(f"{type(self).__name__}: truncate", self.truncate)


@dataclass(frozen=True)
class Llama3Scaling:
    """The scaling of Llama 3.1 (Llama team, "The Llama 3 Herd of Models", 2024, and its program).

    Wavelengths above original_length / low_freq_factor are multiplied by `factor`, those below
    original_length / high_freq_factor stay, and frequencies between are a mean of both, weighted by
    (original_length / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor).

    Args:
      factor: at least 1.
      low_freq_factor: above 0.
      high_freq_factor: above `low_freq_factor`.
      original_length: positions that the model was trained on, at least 1.

    Raises:
      TypeError: a parameter that is no number.
      ValueError: a parameter outside its range.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int

    def __post_init__(self) -> None:
        """Checks the parameters."""
        _check(self, "factor", least=1)
        _check(self, "low_freq_factor", above=0)
        _check(self, "high_freq_factor", above=self.low_freq_factor)
        _check(self, "original_length", least=1)


Scaling = LinearScaling | NtkScaling | YarnScaling | Llama3Scaling


def _check(of: Any, name: str, *, least: float | None = None, above: float | None = None) -> None:
    value = check_number(f"{type(of).__name__}: {name}", getattr(of, name))
    if isinstance(getattr(of, name), jax.Array):
        # Within `jax.jit` what is computed from it would be traced.
        object.__setattr__(of, name, value)
    right = f"at least {least}" if above is None else f"above {above:g}"
    is_in = value >= least if least is not None else above is not None and value > above
    if not (math.isfinite(value) and is_in):
        raise ValueError(f"{type(of).__name__}: {name} is {value:g}; it must be finite and {right}")


def frequencies(base: float, rotary_dim: int, scaling: Scaling | None) -> tuple[np.ndarray, float]:
    """Returns angles per position [R / 2], and what cosine and sine are multiplied by.

    Without scaling they are base^(-2 i / R) of the pair i (Su et al., 2021).

    Raises:
      ValueError: a scaling that has no meaning for so few columns, or for such a base.
    """
    if isinstance(scaling, NtkScaling):
        if rotary_dim < 4:
            raise ValueError(f"rotary_dim is {rotary_dim}; with NtkScaling it must be at least 4")
        base *= scaling.factor ** (rotary_dim / (rotary_dim - 2))
    found = base ** -(np.arange(0, rotary_dim, 2, dtype=np.float64) / max(rotary_dim, 1))
    if isinstance(scaling, LinearScaling):
        return found / scaling.factor, 1.0
    if isinstance(scaling, YarnScaling):
        return _yarn(found, base, rotary_dim, scaling)
    if isinstance(scaling, Llama3Scaling):
        return _llama3(found, scaling), 1.0
    return found, 1.0


def _yarn(
    found: np.ndarray, base: float, rotary_dim: int, scaling: YarnScaling
) -> tuple[np.ndarray, float]:
    if not base > 1:
        raise ValueError(f"base is {base:g}; with YarnScaling it must be above 1")

    def pair(turns: float) -> float:
        """The pair, a fraction, that turns so often in the original length."""
        wavelength = scaling.original_length / turns
        return rotary_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(base))

    low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    index = np.arange(rotary_dim // 2)
    ramp = np.clip((index - low) / (high - low if high != low else 0.001), 0, 1)
    factor = scaling.attention_factor
    if factor is None:
        factor = 0.1 * math.log(scaling.factor) + 1
    return found / scaling.factor * ramp + found * (1 - ramp), factor


def _llama3(found: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_length * found / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    scaled: np.ndarray = (1 - kept) * found / scaling.factor + kept * found
    return scaled
