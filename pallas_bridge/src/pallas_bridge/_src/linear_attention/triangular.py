"""Inverses of unit lower triangular matrices, by elementwise arithmetic and GEMMs alone.

Unlike a triangular solve of a library, XLA shards these over any mesh and has them everywhere.
"""

import jax
import jax.numpy as jnp

from ..arrays import match_rank

# Columns of the diagonal blocks that forward substitution inverts.
BLOCK = 16


def invert_unit_lower(strictly_lower: jax.Array) -> jax.Array:
    """Returns (I + A)^-1 for a strictly lower triangular A [.., C, C] with C a power of two.

    Diagonal blocks of 16 are inverted by forward substitution. Pairs of blocks are then merged:
    the inverse of [[L, 0], [M, R]] is [[L^-1, 0], [-R^-1 M L^-1, R^-1]].
    """
    size = strictly_lower.shape[-1]
    block = min(BLOCK, size)
    inverse = _substitute(_diagonal_blocks(strictly_lower, block))
    while block < size:
        left, right = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        below = _diagonal_blocks(strictly_lower, 2 * block)[..., block:, :block]
        highest = jax.lax.Precision.HIGHEST
        corner = -jnp.matmul(jnp.matmul(right, below, precision=highest), left, precision=highest)
        upper = jnp.concatenate([left, jnp.zeros_like(left)], -1)
        inverse = jnp.concatenate([upper, jnp.concatenate([corner, right], -1)], -2)
        block *= 2
    return inverse[..., 0, :, :]


def _diagonal_blocks(matrix: jax.Array, block: int) -> jax.Array:
    """Returns the blocks on the diagonal, [.., C / block, block, block]."""
    starts = range(0, matrix.shape[-1], block)
    blocks = [matrix[..., i : i + block, i : i + block] for i in starts]
    return jnp.stack(blocks, -3)


def _substitute(lower: jax.Array) -> jax.Array:
    """Returns (I + A)^-1, of which a row is there once all above it are subtracted."""
    size = lower.shape[-1]
    inverse = jnp.zeros_like(lower)
    inverse = inverse + match_rank(jnp.eye(size, dtype=lower.dtype), inverse)
    for row in range(size - 1):
        inverse = inverse - lower[..., :, row, None] * inverse[..., row, None, :]
    return inverse
