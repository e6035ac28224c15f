"""Cosines and sines of positions.

An angle is needed to an f32 rounding of 1, and is up to 10^6: so turns are reduced before they are
rounded. A frequency is a fraction of a turn in 64 bits, whose product with a position, modulo a
turn, integers of 32 bits give exactly.
"""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np

from ..arrays import match_rank

# Taylor's series: the next term is below 2^-29 of the result within an eighth of a turn.
_SINE = [(-1) ** k / math.factorial(2 * k + 1) for k in range(5)]
_COSINE = [(-1) ** k / math.factorial(2 * k) for k in range(6)]


def tables(positions: jax.Array, frequencies: np.ndarray, factor: float) -> list[jax.Array]:
    """Returns cos and sin [.., S, R / 2], times `factor`, of positions [.., S].

    Positions are integers, of which 32 bits count; `frequencies` [R / 2] are angles per position,
    in float64, whose own rounding is below that of f32 for positions up to 2^24.
    """
    turns = [Fraction(float(one) / (2 * math.pi)) for one in frequencies]
    fixed = [int(one * 2**64) % 2**64 for one in turns]
    high, low = (
        np.array([one >> shift & 0xFFFFFFFF for one in fixed], np.uint32) for shift in (32, 0)
    )
    cos, sin = _cos_sin(positions.astype(jnp.int32), high, low, np.float32(factor))
    return [cos, sin]


@jax.jit
def _cos_sin(
    positions: jax.Array, high: jax.Array, low: jax.Array, scale: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns cos and sin of positions times frequencies, which are two words of a turn."""
    signed = positions[..., None]
    high, low = match_rank(high, signed), match_rank(low, signed)
    size = jnp.abs(signed).astype(jnp.uint32)
    low_product = size * low
    turn = size * high + _upper(size, low)
    # The nearest quarter of a turn, and what is left, in units of 2^-32 of a turn.
    quarter = (turn + np.uint32(1 << 29)) >> 30
    left = (turn - (quarter << 30)).astype(jnp.int32)
    rest = (low_product >> 8).astype(jnp.int32).astype(jnp.float32) * np.float32(2.0**-56)
    angle = (left.astype(jnp.float32) * np.float32(2.0**-32) + rest) * np.float32(2 * math.pi)
    sine, cosine = _series(angle, _SINE) * angle, _series(angle, _COSINE)
    is_odd = (quarter & 1) == 1
    is_back, is_below = ((quarter + 1) & 2) == 2, ((quarter & 2) == 2) ^ (signed < 0)
    cos, sin = jnp.where(is_odd, sine, cosine), jnp.where(is_odd, cosine, sine)
    return jnp.where(is_back, -cos, cos) * scale, jnp.where(is_below, -sin, sin) * scale


def _upper(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the upper 32 bits of the products of integers of 32 bits."""
    a_low, a_high, b_low, b_high = a & 0xFFFF, a >> 16, b & 0xFFFF, b >> 16
    middle = a_high * b_low + (a_low * b_low >> 16)
    other = a_low * b_high + (middle & 0xFFFF)
    return a_high * b_high + (middle >> 16) + (other >> 16)


def _series(angle: jax.Array, terms: list[float]) -> jax.Array:
    """Returns a series in the square of an angle."""
    square = angle * angle
    total = jnp.full_like(angle, terms[-1])
    for term in reversed(terms[:-1]):
        total = total * square + np.float32(term)
    return total
