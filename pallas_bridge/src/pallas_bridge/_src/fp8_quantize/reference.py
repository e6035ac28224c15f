"""FP8 quantisation written plainly, for XLA to make the dense program of.

It is what kernels are held against, and what runs where there is none. Every bit is as
crates/xentile/src/fp8_quantize.rs says.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..meshes import Names
from .options import Options

# The least scale; the reciprocal of the largest is a normal number too.
LEAST, MOST = np.finfo(np.float32).tiny, np.float32(2.0**126)


def blocks(options: Options) -> tuple[int, int | None]:
    """Returns rows and columns of a block; None is for all columns."""
    if options.granularity == "row":
        return 1, None
    return (options.block_size if options.granularity == "block_2d" else 1), options.block_size


def wide(x: jax.Array) -> jax.Array:
    """Returns x in f32, with 0 of its sign where it is below the normal range."""
    x = x.astype(jnp.float32)
    return jnp.where(jnp.abs(x) < LEAST, jnp.copysign(jnp.float32(0), x), x)


def amax(x: jax.Array, axes: Any = None, over: Names = ()) -> jax.Array:
    """Returns the largest magnitude of finite entries along axes, or 0 where there is none.

    Where mesh axes `over` are given, x has a device's share of its columns.
    """
    magnitudes = jnp.abs(wide(x))
    found = jnp.max(jnp.where(jnp.isfinite(magnitudes), magnitudes, 0), axis=axes, initial=0)
    return jax.lax.pmax(found, over) if over else found


def scale(options: Options, amax: jax.Array) -> jax.Array:
    """Returns the scale of a block with this amax."""
    amax = amax.astype(jnp.float32)
    if options.power_of_two:
        # The largest number is 1.75 times a power of two: a mantissa above takes the next exponent.
        bits = jax.lax.bitcast_convert_type(amax, jnp.uint32)
        rounded = (bits + np.uint32(0x001F_FFFF)) & np.uint32(0x7F80_0000)
        exponent = np.uint32(int(math.log2(options.largest / 1.75)) << 23)
        least = np.uint32(LEAST.view(np.uint32)) + exponent
        found = jax.lax.bitcast_convert_type(jnp.maximum(rounded, least) - exponent, jnp.float32)
    else:
        found = jnp.maximum(amax * np.float32(1 / options.largest), LEAST)
    return jnp.where(amax < LEAST, np.float32(1), found)


def values(options: Options, x: jax.Array, reciprocals: jax.Array) -> jax.Array:
    """Returns values of x by reciprocals of scales, of its shape or one that broadcasts to it."""
    quotient = wide(x) * reciprocals
    return jnp.clip(quotient, -options.largest, options.largest).astype(options.dtype)


def spread(scales: jax.Array, extents: tuple[int, int | None], shape: tuple[int, ...]) -> jax.Array:
    """Returns the scale of each entry of an array, or what broadcasts to it."""
    rows, columns = extents
    if columns is None:
        return scales[..., None]
    scales = jnp.repeat(scales, columns, axis=-1)[..., : shape[-1]]
    if rows > 1:
        scales = jnp.repeat(scales, rows, axis=-2)[..., : shape[-2], :]
    return scales


def scales(options: Options, x: jax.Array, over: Names = ()) -> jax.Array:
    """Returns the scale of each block of x; `over` as of `amax`, where blocks are rows."""
    rows, columns = blocks(options)
    if columns is None:
        return scale(options, amax(x, -1, over))
    extents = [1] * (x.ndim - 1) + [columns]
    if rows > 1:
        extents[-2] = rows
    shape: list[int] = []
    for extent, block in zip(x.shape, extents, strict=True):
        shape += [-(-extent // block), block]
    missing = [(0, -extent % block) for extent, block in zip(x.shape, extents, strict=True)]
    split = jnp.pad(x, missing).reshape(shape)
    return scale(options, amax(split, tuple(range(1, split.ndim, 2))))


def quantize(options: Options, x: jax.Array, over: Names = ()) -> tuple[jax.Array, jax.Array]:
    """Returns values and scales by row or by block; `over` as of `amax`."""
    found = scales(options, x, over)
    return values(options, x, spread(1 / found, blocks(options), x.shape)), found


def quantize_transposed(options: Options, x: jax.Array) -> tuple[jax.Array, ...]:
    """Returns values and scales of x and of the transposed copy."""
    return *quantize(options, x), *quantize(options, jnp.swapaxes(x, -1, -2))


def scaled(
    options: Options, x: jax.Array, scale: jax.Array, over: Names = ()
) -> tuple[jax.Array, jax.Array]:
    """Returns values by a given scale, and amax of each row; `over` as of `amax`."""
    return values(options, x, 1 / scale), amax(x, -1, over)


def scaled_transposed(options: Options, x: jax.Array, scale: jax.Array) -> tuple[jax.Array, ...]:
    """Returns values by a given scale, amax of each row, and the transposed copy."""
    found, most = scaled(options, x, scale)
    return found, most, jnp.swapaxes(found, -1, -2)


def amax_of_rows(options: Options, x: jax.Array, over: Names = ()) -> tuple[jax.Array]:
    """Returns amax of each row; `over` as of `amax`."""
    return (amax(x, -1, over),)
