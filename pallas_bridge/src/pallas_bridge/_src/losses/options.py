"""The options of cross-entropy and the checks of what a user passes."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import jax
import jax.numpy as jnp
import numpy as np

from ..checks import check_integer, check_number
from ..operation import Implementation

AxisName = str | Sequence[str]
Reduction = Literal["none", "mean", "sum"]


class LossKeywords(TypedDict, total=False):
    """The options that losses of logits and linear losses have; `check_options` has defaults."""

    ignore_index: int
    label_smoothing: float | jax.Array
    z_loss: float | jax.Array
    softcap: float | jax.Array | None
    temperature: float | jax.Array
    block_size: int | None
    time_block: int | None
    implementation: Implementation | None


# Tokens and columns of a tile, None for tuned ones.
Tile = tuple[int | None, int | None]

INT32 = np.iinfo(np.int32)
LEAST_TEMPERATURE = 2.0**-40
# Elements in f32 of a cache line of a GPU.
LINE = 32


@dataclass(frozen=True)
class Options:
    """The attributes of docs/internals/custom-calls.md, checked, and what chooses calls."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float | None
    block_size: int | None
    time_block: int | None
    # Whether lse and loss are wanted of ignored tokens too.
    every_token: bool
    # Whether dlogits take the place of the logits in memory.
    donate_logits: bool
    # The implementation that the user named.
    implementation: str | None = None
    # What logits are divided by, after softcap.
    temperature: float = 1.0
    # Whether entropy and *correct* are requested, where calls give both.
    entropy: bool = True
    correct: bool = True
    # Platforms where the XLA reference takes the place of kernels, unless these are named.
    dense_on: tuple[str, ...] = ()

    def anywhere(self, vocab: int) -> "Options":
        """Returns options by which a row of f32 has the same bits wherever it lies among others.

        Kernels for NVIDIA's GPUs cut a row where lines of memory begin (kernels/ring.cuh).
        """
        if vocab % LINE == 0 or "cuda" in self.dense_on:
            return self
        implementation = None if self.implementation == "custom_call" else self.implementation
        return dataclasses.replace(self, dense_on=("cuda",), implementation=implementation)

    def in_xla(self) -> "Options":
        """Returns options by which no platform takes kernels, unless these are named.

        An exported program has no custom calls then.
        """
        if self.implementation is not None:
            return self
        return dataclasses.replace(self, dense_on=("cpu", "cuda", "tpu"))

    def mapped(self, logits: jax.Array) -> jax.Array:
        """Returns what the softmax takes, of logits in its dtype."""
        z = logits
        if self.softcap is not None:
            z = self.softcap * jnp.tanh(z / self.softcap)
        return z if self.temperature == 1 else z / self.temperature

    def slope(self, mapped: jax.Array) -> jax.Array | float:
        """Returns the derivative of `mapped`, of its result."""
        slope: jax.Array | float = 1 / self.temperature
        if self.softcap is not None:
            slope = (1 - (mapped * (self.temperature / self.softcap)) ** 2) * slope
        return slope

    @property
    def tile(self) -> Tile:
        """The extents of a tile that the user named."""
        return self.time_block, self.block_size


def check_tile(time_block: Any, block_size: Any) -> Tile:
    """Returns a tile.

    Raises:
        TypeError: an extent that is no integer, or traced.
        ValueError: one below 1.
    """
    block_size = None if block_size is None else check_integer("block_size", block_size, 1)
    return None if time_block is None else check_integer("time_block", time_block, 1), block_size


def check_options(
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    block_size: int | None = None,
    time_block: int | None = None,
    implementation: Implementation | None = None,
    **flags: Any,
) -> Options:
    """Returns the options, of which `flags` are not checked.

    Raises:
        TypeError: an option that is no number, or traced.
        ValueError: an option outside its range.
    """
    smoothing = check_number("label_smoothing", label_smoothing)
    weight = check_number("z_loss", z_loss)
    if not 0 <= smoothing <= 1:
        raise ValueError(f"label_smoothing is {smoothing}; it must be in [0, 1]")
    if not (weight >= 0 and math.isfinite(weight)):
        raise ValueError(f"z_loss is {weight}; it must be finite and at least 0")
    cap = None if softcap is None else check_number("softcap", softcap)
    if cap is not None and not (cap > 0 and math.isfinite(cap)):
        raise ValueError(f"softcap is {cap}; it must be finite and above 0, or None")
    warmth = check_number("temperature", temperature)
    if not LEAST_TEMPERATURE <= warmth <= 1 / LEAST_TEMPERATURE:
        raise ValueError(
            f"temperature is {warmth}; it must be above 0, in [2^-40, 2^40]: to take the likeliest "
            "token, ask for return_correct"
        )
    time_block, block_size = check_tile(time_block, block_size)
    return Options(
        ignore_index=check_integer("ignore_index", ignore_index),
        label_smoothing=smoothing,
        z_loss=weight,
        softcap=cap,
        block_size=block_size,
        time_block=time_block,
        temperature=warmth,
        implementation=implementation,
        **flags,
    )


def check_logits(logits: jax.Array) -> None:
    """Checks the shape and the dtype of logits.

    Raises:
        TypeError: a dtype that is not taken.
        ValueError: no axis, or a vocabulary of 0.
    """
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise TypeError(
            f"logits have dtype {logits.dtype}; it must be bfloat16, float16 or float32"
        )
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ValueError(
            f"logits have shape {logits.shape}; it must be [.., T, V] with V at least 1"
        )


def check_tokens(labels: jax.Array, weights: jax.Array | None, of: str, array: jax.Array) -> None:
    """Checks labels and weights, one for each token of an `array` that messages call `of`.

    Raises:
        TypeError: a dtype that is not taken.
        ValueError: another shape than that of the array without its last axis.
    """
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"labels have dtype {labels.dtype}; it must be an integer")
    if weights is not None and jnp.issubdtype(weights.dtype, jnp.complexfloating):
        raise TypeError(f"weights have dtype {weights.dtype}; it must be real")
    tokens = array.shape[:-1]
    for name, one in (("labels", labels), ("weights", weights)):
        if one is not None and one.shape != tokens:
            raise ValueError(
                f"{name} have shape {one.shape}; it must be that of {of} without the last axis, "
                f"{tokens}"
            )


def narrow_labels(labels: jax.Array, options: Options) -> tuple[jax.Array, Options]:
    """Returns labels as int32 or int64, which kernels read, and options with what is ignored there.

    Meaning is kept: a label that int32 does not hold stays out of range, or ignored.
    """
    if labels.dtype in (jnp.int32, jnp.int64):
        return labels, options
    held = jnp.iinfo(labels.dtype)
    if held.max <= INT32.max:
        return labels.astype(jnp.int32), options
    # uint32 and uint64. No vocabulary reaches 2^31 - 1, which stands for every label beyond it.
    beyond = labels >= np.array(INT32.max, labels.dtype)
    narrow = jnp.where(beyond, INT32.max, labels.astype(jnp.int32))
    if not INT32.max <= options.ignore_index <= int(held.max):
        return narrow, options
    ignored = labels == np.array(options.ignore_index, labels.dtype)
    narrow = jnp.where(ignored, INT32.min, narrow)
    return narrow, dataclasses.replace(options, ignore_index=int(INT32.min))


def is_ignored(options: Options, labels: jax.Array) -> jax.Array:
    """Returns which tokens are ignored, for labels of `narrow_labels`."""
    held = jnp.iinfo(labels.dtype)
    if not int(held.min) <= options.ignore_index <= int(held.max):
        return jnp.zeros(labels.shape, bool)
    return labels == options.ignore_index
