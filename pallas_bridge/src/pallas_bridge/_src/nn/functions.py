"""Norms and activations with the signatures of `jax.nn` and Flax."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ..activation import api as activation
from ..norm import api as norm


def rms_norm(x: ArrayLike, weight: ArrayLike | None = None, *, epsilon: float = 1e-6) -> jax.Array:
    """Returns `pallas_bridge.rms_norm`, with a weight of ones if it is None.

    Errors are those of `pallas_bridge.rms_norm`.
    """
    return norm.rms_norm(x, _ones(x) if weight is None else weight, eps=epsilon)


def layer_norm(
    x: ArrayLike,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    epsilon: float = 1e-6,
) -> jax.Array:
    """Returns `pallas_bridge.layer_norm`, with a weight of ones if it is None.

    `epsilon` is 1e-6 as in Flax, not 1e-5. Errors are those of `pallas_bridge.layer_norm`.
    """
    return norm.layer_norm(x, _ones(x) if weight is None else weight, bias, eps=epsilon)


def gelu(x: ArrayLike, approximate: bool = True) -> jax.Array:
    """Returns `pallas_bridge.gelu`, with the arguments of `jax.nn.gelu`."""
    return activation.gelu(x, approximate=approximate)


def silu(x: ArrayLike) -> jax.Array:
    """Returns x * sigmoid(x), as `jax.nn.silu` does, by XLA's program: there is no kernel."""
    return jax.nn.silu(x)


def swiglu(x: ArrayLike, up: ArrayLike | None = None) -> jax.Array:
    """Returns silu(gate) * up, of one packed array [.., 2F] or of two."""
    return activation.swiglu(x, up)


def _ones(x: Any) -> jax.Array:
    array = jnp.asarray(x)
    return jnp.ones(array.shape[-1:], array.dtype)
