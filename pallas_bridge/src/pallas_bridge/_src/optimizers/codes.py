"""The 8-bit dynamic code of Dettmers et al. (2022), and arrays stored in it by blocks.

A block of B consecutive entries of the last axis has a float32 scale, the largest |entry|; each
entry divided by it is stored as the index of the nearest value of a table of 256. With n = 2^i
(signed) or 2^(i + 1) (unsigned), the decade 10^(i - 6), i = 0..6, holds the centres of n equal
parts of [0.1, 1]; the table also has 0 and 1, and where it is signed the negative centres.
https://arxiv.org/abs/2110.02861
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

# Extents of blocks, the preferred first.
BLOCKS = (256, 128, 64)
DECADES = 7


class Quantized(NamedTuple):
    """An array in 8 bits: codes [.., D], uint8, and scales [.., D / B], float32."""

    codes: jax.Array
    scales: jax.Array

    @property
    def block_size(self) -> int:
        """B."""
        return int(self.codes.shape[-1] // self.scales.shape[-1])


# Exported steps take it and give it back.
jax.export.register_namedtuple_serialization(Quantized, serialized_name="pallas_bridge.Moment8bit")


@dataclass(frozen=True)
class Decade:
    """The part of a code between two powers of ten: `parts` centres, the values below `end`."""

    parts: int
    # The midpoint between the last centre and the next decade's first.
    end: np.float32
    # Entry y has the magnitude floor(y * factor + offset), its code's distance from that of 0.
    factor: np.float32
    offset: np.float32


def decades(*, signed: bool) -> list[Decade]:
    """Returns the decades of a code, the lowest first."""
    found = []
    for decade in range(DECADES):
        parts = 2 ** (decade if signed else decade + 1)
        power = float(f"1e{decade - DECADES + 1}")
        end = power * (1 + 0.9 / parts) if decade + 1 < DECADES else 1 - 0.225 / parts
        # parts - 1 centres are below the decade's first, or one less of the unsigned code.
        offset = parts * 8 / 9 - (0 if signed else 1)
        found.append(
            Decade(parts, np.float32(end), np.float32(parts / power / 0.9), np.float32(offset))
        )
    return found


def table(*, signed: bool) -> np.ndarray:
    """Returns the 256 values of the code, float32 in increasing order."""
    centres = []
    for decade in range(DECADES):
        parts = 2 ** (decade if signed else decade + 1)
        # A centre is 10^(decade - 6) (0.1 + 0.9 (k + 1/2) / parts).
        fractions = 0.1 + 0.9 * (np.arange(parts) + 0.5) / parts
        centres.append(float(f"1e{decade - DECADES + 1}") * fractions)
    positive = np.concatenate(centres)
    negative = -positive[::-1] if signed else positive[:0]
    return np.concatenate([negative, [0.0], positive, [1.0]]).astype(np.float32)


def zero_code(*, signed: bool) -> int:
    """Returns the code of 0."""
    return 127 if signed else 0


def zeros(shape: tuple[int, ...], block: int, *, signed: bool) -> Quantized:
    """Returns zeros in 8 bits."""
    codes = jnp.full(shape, zero_code(signed=signed), jnp.uint8)
    return Quantized(codes, jnp.zeros((*shape[:-1], shape[-1] // block), jnp.float32))


def decode(array: Quantized, *, signed: bool) -> jax.Array:
    """Returns the float32 values of an array in 8 bits."""
    values = jnp.asarray(table(signed=signed))[array.codes.astype(jnp.int32)]
    blocks = values.reshape(*array.scales.shape, array.block_size)
    return (blocks * array.scales[..., None]).reshape(array.codes.shape)


def _nearest(y: jax.Array, *, signed: bool) -> jax.Array:
    """Returns the code nearest to each entry of [-1, 1]; NaN has the code of 1."""
    magnitude = jnp.where(jnp.isnan(y), 1, jnp.minimum(jnp.abs(y), 1))
    first, *others = decades(signed=signed)
    shape = y.shape
    factor, offset, parts = (
        jnp.full(shape, value, jnp.float32) for value in (first.factor, first.offset, first.parts)
    )
    end = first.end
    for one in others:
        is_above = magnitude >= end
        factor = jnp.where(is_above, one.factor, factor)
        offset = jnp.where(is_above, one.offset, offset)
        parts = jnp.where(is_above, np.float32(one.parts), parts)
        end = one.end
    lowest = parts - (0 if signed else 1)
    steps = jnp.clip(jnp.floor(magnitude * factor + offset), lowest, lowest + parts - 1)
    # The half of the smallest value.
    smallest = 1e-6 * (0.1 + 0.45 / first.parts)
    steps = jnp.where(magnitude >= np.float32(smallest / 2), steps, 0)
    steps = steps.astype(jnp.int32)
    top = 128 if signed else 255
    steps = jnp.where(magnitude >= end, top, steps)
    if signed:
        # -1 is not in the table.
        steps = jnp.where(y < 0, -jnp.minimum(steps, top - 1), steps)
    return zero_code(signed=signed) + steps


def encode(x: jax.Array, block: int, *, signed: bool) -> Quantized:
    """Returns a float32 array in 8 bits.

    A block of zeros has scale 0 and the code of 0. A block with NaN has scale NaN, and one with
    infinity scale infinity: none of the block is finite when decoded.
    """
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // block, block)
    # Bits are in the order of |x|, and those of NaN the largest; XLA's maximum on CPUs drops NaN.
    bits = jax.lax.bitcast_convert_type(jnp.abs(blocks), jnp.int32)
    scales = jax.lax.bitcast_convert_type(jnp.max(bits, axis=-1), jnp.float32)
    # 1 / scale, as the kernel has it; 0 of a block of zeros, and of subnormal scales.
    inverse = jnp.where(scales >= np.finfo(np.float32).tiny, 1 / scales, 0)
    scaled = blocks * inverse[..., None]
    codes = _nearest(scaled.reshape(x.shape), signed=signed)
    return Quantized(codes.astype(jnp.uint8), scales)
