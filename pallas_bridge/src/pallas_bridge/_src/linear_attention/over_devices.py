"""A sequence that is sharded over devices: the state before each device's tokens.

A device's tokens take the state S before them to M S + N. M is exp(sum g) for linear attention, and
for the delta rule a matrix [K, K], the product of exp(g_t) (I - b_t k_t k_t'). Of two neighbours

    (M_2, N_2) after (M_1, N_1) = (M_2 M_1, M_2 N_1 + N_2)

which is associative: about log2(n) exchanges give each of n devices all that is before it, where
passing states on from device to device would have one of them work at a time. JAX derives the
gradient, whose exchanges go the other way.
"""

import jax
import jax.numpy as jnp

from ..meshes import Names
from .program import LEAST_LOG_DECAY


def starts_with_segment(names: Names, ids: jax.Array) -> jax.Array:
    """Returns whether a device's first token [B, 1] has another segment than the token before.

    The first device's has not.
    """
    before = _shift(names, ids[:, -1:], 1)
    return (jax.lax.axis_index(names) > 0) & (before != ids[:, :1])


def decayed_transition(
    k: jax.Array, v: jax.Array, g: jax.Array, precision: jax.lax.Precision | None
) -> tuple[jax.Array, jax.Array]:
    """Returns M [B, H', 1, 1] and N [B, H', K, V] of linear attention, in float32."""
    batch, length, heads, width = k.shape
    log_decay = jnp.maximum(g.astype(jnp.float32), LEAST_LOG_DECAY)
    # From the end on, so that no small sum is a difference of large ones.
    sums = jax.lax.cumsum(log_decay, axis=1, reverse=True)
    to_end = jnp.exp(jnp.concatenate([sums[:, 1:], jnp.zeros_like(sums[:, :1])], axis=1))
    added = to_end[..., None] * v.astype(jnp.float32)
    added = added.reshape(batch, length, heads, -1, v.shape[-1])
    wide = k.astype(jnp.float32)
    state = jnp.einsum("bthk,bthrv->bhrkv", wide, added, precision=precision)
    return jnp.exp(sums[:, 0])[..., None, None], state.reshape(batch, -1, width, v.shape[-1])


def state_before(
    names: Names, transition: jax.Array, added: jax.Array, first: jax.Array | None
) -> jax.Array:
    """Returns the state before a device's tokens, of its M and N and the state before all tokens.

    M is [B, H', 1, 1] or [B, H', K, K]; states are [B, H', K, V]; None stands for 0.
    """
    index, count = jax.lax.axis_index(names), int(jax.lax.axis_size(names))
    is_scalar = transition.shape[-1] == 1
    identity = jnp.ones_like(transition)
    if not is_scalar:
        identity = jnp.broadcast_to(jnp.eye(transition.shape[-1]), transition.shape)

    def times(m: jax.Array, x: jax.Array) -> jax.Array:
        product = m * x if is_scalar else jnp.matmul(m, x, precision=jax.lax.Precision.HIGHEST)
        return product

    step = 1
    while step < count - 1:
        before = _shift(names, transition, step), _shift(names, added, step)
        added = times(transition, before[1]) + added
        transition = jnp.where(index >= step, times(transition, before[0]), transition)
        step *= 2
    transition, added = _shift(names, transition, 1), _shift(names, added, 1)
    if first is None:
        return added
    return times(jnp.where(index == 0, identity, transition), first) + added


def last_state(names: Names, state: jax.Array) -> jax.Array:
    """Returns the state of the last device, on every one."""
    is_last = jax.lax.axis_index(names) == jax.lax.axis_size(names) - 1
    found: jax.Array = jax.lax.psum(jnp.where(is_last, state, 0), names)
    return found


def _shift(names: Names, x: jax.Array, step: int) -> jax.Array:
    """Returns x of the device `step` before, and zeros where there is none."""
    count = int(jax.lax.axis_size(names))
    pairs = [(index, index + step) for index in range(count - step)]
    shifted: jax.Array = jax.lax.ppermute(x, names, pairs)
    return shifted
