"""Stochastic rounding of float32 to bfloat16, by Philox of seed, step, array and index.

Salmon et al. (2011), Philox4x32-10. Entry k of an array, counted in row-major order, takes 16 of
the 128 bits of the counter (k // 8, array, step, 0) under the key (seed, 0): half (k % 2) of word
(k % 8) // 2. So bits depend on no device, no sharding and no order.
"""

import jax
import jax.numpy as jnp
import numpy as np

MULTIPLIERS = (np.uint32(0xD2511F53), np.uint32(0xCD9E8D57))
WEYL = (np.uint32(0x9E3779B9), np.uint32(0xBB67AE85))
ROUNDS = 10
# Entries that one counter has bits for.
GROUP = 8

Words = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def _multiplied(x: jax.Array, by: np.uint32) -> tuple[jax.Array, jax.Array]:
    """Returns the high and the low 32 bits of a product of 32-bit numbers."""
    low_by, high_by = np.uint32(by & 0xFFFF), np.uint32(by >> 16)
    low, high = x & 0xFFFF, x >> 16
    first = low * low_by
    middle = high * low_by + (first >> 16)
    other = low * high_by + (middle & 0xFFFF)
    return high * high_by + (middle >> 16) + (other >> 16), x * by


def philox(counter: Words, key: tuple[jax.Array, jax.Array]) -> Words:
    """Returns the four words of Philox4x32-10; all are uint32 arrays that broadcast."""
    a, b, c, d = counter
    first, second = key
    for _ in range(ROUNDS):
        high, low = _multiplied(a, MULTIPLIERS[0])
        other_high, other_low = _multiplied(c, MULTIPLIERS[1])
        a, b, c, d = other_high ^ b ^ first, other_low, high ^ d ^ second, low
        first, second = first + WEYL[0], second + WEYL[1]
    return a, b, c, d


def bits(shape: tuple[int, ...], number: int, step: jax.Array, seed: jax.Array) -> jax.Array:
    """Returns 16 random bits for each entry of an array, uint32 of its shape.

    `number` is the array's, and the other two are uint32.
    """
    zero = jnp.uint32(0)

    def words(groups: jax.Array) -> Words:
        return philox((groups, jnp.uint32(number), step, zero), (seed, zero))

    def index(extents: tuple[int, ...]) -> jax.Array:
        found = jnp.zeros(extents, jnp.uint32)
        stride = 1
        for axis in reversed(range(len(extents))):
            iota = jax.lax.broadcasted_iota(jnp.uint32, extents, axis)
            found, stride = found + iota * np.uint32(stride), stride * extents[axis]
        return found

    if shape and shape[-1] % GROUP == 0:
        groups = index((*shape[:-1], shape[-1] // GROUP))
        pairs = jnp.stack(words(groups), axis=-1)
        return jnp.stack([pairs & 0xFFFF, pairs >> 16], axis=-1).reshape(shape)
    entries = index(shape)
    drawn = words(entries // GROUP)
    word = entries % GROUP // 2
    chosen = jnp.select([word == place for place in range(4)], drawn)
    return jnp.where(entries % 2 == 1, chosen >> 16, chosen & 0xFFFF)


def round_stochastically(x: jax.Array, random: jax.Array) -> jax.Array:
    """Returns float32 rounded to bfloat16, away from 0 with the probability that keeps the mean.

    `random` are 16 bits for each entry. NaN stays NaN.
    """
    raised = jax.lax.bitcast_convert_type(x, jnp.uint32) + random
    high = (raised >> 16).astype(jnp.uint16)
    high = jnp.where(jnp.isnan(x), np.uint16(0x7FC0), high)
    return jax.lax.bitcast_convert_type(high, jnp.bfloat16)
