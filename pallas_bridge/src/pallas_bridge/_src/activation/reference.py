"""Activations written plainly, for XLA to make the dense program of.

It is what kernels are held against, and what runs where there is none.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp

from ..arrays import wide
from .options import Options


def forward(options: Options, *arrays: jax.Array) -> jax.Array:
    """Returns y of x, or of gate and up.

    The formulas are those of crates/xentile/src/activation.rs. Numbers are f32, or the dtype of x
    where that is wider, and y is rounded once.
    """
    x, *up = arrays
    if options.layout == "halves":
        x, *up = jnp.split(x, 2, axis=-1)
    elif options.layout == "interleaved":
        pairs = x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
        x, up = pairs[..., 0], [pairs[..., 1]]
    z = wide(x)
    if not up:
        return function(options, z).astype(x.dtype)
    other = wide(up[0])
    if options.limit is not None:
        # An entry at the limit has the derivative of those within.
        z = jnp.where(z > options.limit, options.limit, z)
        outside = jnp.abs(other) > options.limit
        other = jnp.where(outside, jnp.copysign(options.limit, other), other)
    y: jax.Array = (function(options, z) * (other + options.up_offset)).astype(x.dtype)
    return y


def function(options: Options, x: jax.Array) -> jax.Array:
    """Returns f(x)."""
    if options.kind == "silu":
        return x * jax.nn.sigmoid(options.alpha * x)
    if options.kind == "gelu_tanh":
        first = 2 * (2 / jnp.pi) ** 0.5
        # (1 + tanh(z / 2)) / 2 is the sigmoid of z, which is 0 or 1 beyond 20.
        z = x * (first + first * 0.044715 * jnp.minimum(x * x, 400))
        return x * jax.nn.sigmoid(z)
    if options.kind == "gelu_erf":
        return 0.5 * x * jax.lax.erfc(-x * 0.5**0.5)
    above = jnp.where(x <= 0, 0, x)
    return above * above if options.kind == "squared_relu" else above


def gradients(
    options: Options, arrays: Sequence[jax.Array], dy: jax.Array
) -> tuple[jax.Array, ...]:
    """Returns the gradient of each array, made anew from arrays, in its dtype."""
    found: tuple[jax.Array, ...] = jax.vjp(partial(forward, options), *arrays)[1](dy)
    return found
