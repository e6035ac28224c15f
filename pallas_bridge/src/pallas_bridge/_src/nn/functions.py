"""Norms and activations with the signatures of `jax.nn` and Flax."""

import jax
from jax.typing import ArrayLike

from ..activation import api as activation
from ..checks import as_array, check_float
from ..keywords import hinted
from ..norm import api as norm


@hinted
def rms_norm(x: ArrayLike, weight: ArrayLike | None = None, *, epsilon: float = 1e-6) -> jax.Array:
    """Returns `pallas_bridge.rms_norm`, under Flax's name for eps.

    Errors are those of `pallas_bridge.rms_norm`.
    """
    y: jax.Array = norm.rms_norm(x, weight, eps=epsilon)
    return y


@hinted
def layer_norm(
    x: ArrayLike,
    weight: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    epsilon: float = 1e-6,
) -> jax.Array:
    """Returns `pallas_bridge.layer_norm`, under Flax's name for eps.

    `epsilon` is 1e-6 as in Flax, not 1e-5. Errors are those of `pallas_bridge.layer_norm`.
    """
    return norm.layer_norm(x, weight, bias, eps=epsilon)


@hinted
def gelu(x: ArrayLike, approximate: bool = True) -> jax.Array:
    """Returns `pallas_bridge.gelu`, with the arguments of `jax.nn.gelu`."""
    return activation.gelu(x, approximate=approximate)


@hinted
def silu(x: ArrayLike) -> jax.Array:
    """Returns x * sigmoid(x), as `jax.nn.silu` does, by XLA's program: there is no kernel."""
    x = as_array("x", x, "of floats")
    check_float("x", x)
    return jax.nn.silu(x)


@hinted
def swiglu(x: ArrayLike, up: ArrayLike | None = None) -> jax.Array:
    """Returns silu(gate) * up, of one packed array [.., 2F] or of two."""
    return activation.swiglu(x, up)
