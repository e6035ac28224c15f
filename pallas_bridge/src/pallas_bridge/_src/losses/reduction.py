"""The reduction of losses of tokens to a scalar, by a factor a token, in plain JAX."""

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from .. import linear
from ..arrays import multiplied
from .options import Options, is_ignored


def token_factors(
    options: Options,
    reduction: Literal["mean", "sum"],
    labels: jax.Array,
    weights: jax.Array | None,
) -> jax.Array:
    """Returns the factor [..] in f32 of every token's loss in the reduced loss.

    It is 0 for ignored tokens, and everywhere where the sum of weights is 0.
    """
    counted = ~is_ignored(options, labels)
    if weights is None:
        factors = counted.astype(jnp.float32)
        # Counted as integers: f32 stops counting at 2^24.
        total = counted.sum(dtype=jnp.int32).astype(jnp.float32)
    else:
        factors = jnp.where(counted, weights, 0)
        total = factors.sum()
    if reduction == "sum":
        return factors
    # The inner where keeps the gradient with respect to weights finite too.
    return jnp.where(total == 0, 0, factors / jnp.where(total == 0, 1, total))


def countable(losses: jax.Array, factors: jax.Array) -> jax.Array:
    """Returns the losses, with 0 for those that are not finite and have a factor of 0."""
    return jnp.where((factors == 0) & ~jnp.isfinite(losses), 0, losses)


def weighted(losses: jax.Array, factors: jax.Array) -> jax.Array:
    """Returns factor * loss; 0 where the factor is 0, whatever the loss."""
    return multiplied(factors, countable(losses, factors))


@jax.custom_jvp
def weighted_sum(losses: jax.Array, factors: jax.Array) -> jax.Array:
    """Returns the scalar sum of factor * loss; the cotangents of losses depend on no loss.

    So one fused call can make losses and gradient (`lowered_rewrites`).
    """
    return weighted(losses, factors).sum()


@partial(weighted_sum.defjvp, symbolic_zeros=True)
def _weighted_sum_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    losses, factors = primals
    losses_dot, factors_dot = map(linear.given, tangents)
    terms = []
    if losses_dot is not None:
        terms.append(jnp.where(factors == 0, 0, multiplied(factors, losses_dot)))
    if factors_dot is not None:
        terms.append(multiplied(countable(losses, factors), factors_dot))
    total: jax.Array = sum(terms[1:], terms[0])
    return weighted_sum(losses, factors), total.sum()
