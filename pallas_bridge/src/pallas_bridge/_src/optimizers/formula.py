"""The formulas of a step, in plain JAX: XLA's program of every optimizer that has moments.

Adam (Kingma and Ba, 2015) with decoupled weight decay (Loshchilov and Hutter, 2019), and Lion (Chen
et al., 2023), as optax has them. All is computed in float32.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from . import codes, rounding
from .trees import Leaf, is_quantized

Rule = Literal["adam", "lion"]


class Scalars(NamedTuple):
    """The scalars of a step: float32, and the last two uint32."""

    learning_rate: jax.Array
    b1: jax.Array
    rest1: jax.Array
    b2: jax.Array
    rest2: jax.Array
    eps: jax.Array
    eps_root: jax.Array
    weight_decay: jax.Array
    # Adam steps along mu_scale mu + grad_scale g, over the root of nu_scale nu.
    mu_scale: jax.Array
    grad_scale: jax.Array
    nu_scale: jax.Array
    # The factor of gradients.
    clip: jax.Array
    step: jax.Array
    seed: jax.Array


def update(
    rule: Rule, scalars: Scalars, grad: jax.Array, param: jax.Array, moments: list[Any], leaf: Leaf
) -> tuple[jax.Array, list[Any]]:
    """Returns what to add to a parameter, in float32, and its moments after the step."""
    wide = [
        codes.decode(one, signed=index == 0) if is_quantized(one) else one
        for index, one in enumerate(moments)
    ]
    g = grad.astype(jnp.float32) * scalars.clip
    if rule == "adam":
        mu = scalars.rest1 * g + scalars.b1 * wide[0]
        nu = scalars.rest2 * (g * g) + scalars.b2 * wide[1]
        root = jnp.sqrt(nu * scalars.nu_scale + scalars.eps_root)
        step = (scalars.mu_scale * mu + scalars.grad_scale * g) / (root + scalars.eps)
        wide = [mu, nu]
    else:
        step = jnp.sign(scalars.rest1 * g + scalars.b1 * wide[0])
        wide = [scalars.rest2 * g + scalars.b2 * wide[0]]
    if leaf.decays:
        step = step + scalars.weight_decay * param.astype(jnp.float32)
    kept = [
        codes.encode(one, old.block_size, signed=index == 0) if is_quantized(old) else one
        for index, (one, old) in enumerate(zip(wide, moments, strict=True))
    ]
    return -scalars.learning_rate * step, kept


def apply(
    scalars: Scalars, param: jax.Array, change: jax.Array, leaf: Leaf, *, rounds: bool
) -> jax.Array:
    """Returns a parameter after the step; bfloat16 is rounded stochastically if it `rounds`."""
    seed = scalars.seed if rounds else None
    return added(param, change, leaf.number, scalars.step, seed)


def added(
    param: jax.Array, change: jax.Array, number: int, step: jax.Array, seed: jax.Array | None
) -> jax.Array:
    """Returns a parameter plus a change, in its dtype; a seed rounds bfloat16 stochastically."""
    wide = param.astype(jnp.float32) + change
    if seed is not None and param.dtype == jnp.bfloat16:
        return rounding.round_stochastically(wide, rounding.bits(param.shape, number, step, seed))
    return wide.astype(param.dtype)


def clipping(norm: jax.Array, max_norm: ArrayLike) -> jax.Array:
    """Returns the factor that scales gradients to a norm of `max_norm` if theirs is larger."""
    most = jnp.asarray(max_norm, jnp.float32)
    is_within = (norm <= most) | jnp.isinf(most)
    return jnp.where(is_within, jnp.float32(1), most / norm)


def bias_correction(rest: jax.Array, steps: jax.Array) -> jax.Array:
    """Returns 1 / (1 - b^steps) for rest = 1 - b, whose digits b in float32 has lost near 1."""
    return -1 / jnp.expm1(steps.astype(jnp.float32) * jnp.log1p(-rest))


def seed_of(seed: ArrayLike) -> jax.Array:
    """Returns a seed as uint32."""
    return jnp.asarray(np.uint32(seed % 2**32) if isinstance(seed, int) else seed).astype(
        jnp.uint32
    )
