"""Cross-entropy written plainly, for XLA to make the dense program of.

Slow and large on purpose: it is what kernels are compared with, and what runs where there is none.
"""

import jax
import jax.numpy as jnp

from .options import Options, is_ignored
from .reduction import weighted


def per_token(
    options: Options, logits: jax.Array, labels: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns loss, logps and lse, each [..], in f32 or in the dtype of logits if that is wider.

    `logits` is [.., V] of any float dtype, `labels` [..] of any integer dtype. The formulas and the
    special tokens are those of crates/xentile/src/cross_entropy.rs.
    """
    vocab = logits.shape[-1]
    ignored = is_ignored(options, labels)
    logits = _without_gradient(ignored, logits)
    z = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    if options.softcap is not None:
        z = options.softcap * jnp.tanh(z / options.softcap)
    highest = jax.lax.stop_gradient(z.max(axis=-1, keepdims=True))
    # A masked entry has no gradient, not even as the label; a row of nothing else is no row.
    z = jnp.where((z == -jnp.inf) & (highest > -jnp.inf), -jnp.inf, z)
    # No finite sum gives NaN: inf - inf is.
    lse = jnp.log(jnp.exp(z - highest).sum(axis=-1)) + highest[..., 0]

    in_range = (labels >= 0) & (labels < vocab)
    column = jnp.where(in_range, labels, 0).astype(jnp.int32)
    at_label = jnp.take_along_axis(z, column[..., None], axis=-1)[..., 0]

    smoothing = options.label_smoothing
    logps = at_label - lse
    loss = (1 - smoothing) * -logps + options.z_loss * lse**2
    if smoothing:
        loss += smoothing * (lse - z.mean(axis=-1))
    # As a factor, so that the gradient is NaN as well.
    valid = jnp.where(in_range | ignored, 1, jnp.nan).astype(z.dtype)
    return (
        jnp.where(ignored, 0, loss * valid),
        jnp.where(ignored, 0, logps * valid),
        lse,
    )


def reduced(
    options: Options, logits: jax.Array, labels: jax.Array, factors: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the scalar sum of factor * loss, and lse [..]."""
    _, _, lse = per_token(options, logits, labels)
    loss, _, _ = per_token(options, _without_gradient(factors == 0, logits), labels)
    return weighted(loss, factors).sum(), lse


def _without_gradient(tokens: jax.Array, logits: jax.Array) -> jax.Array:
    """Has the rows of `tokens` get a gradient of 0, where 0 times what flows back could be NaN."""
    return jnp.where(tokens[..., None], jax.lax.stop_gradient(logits), logits)


def check_dtype(logits: jax.Array) -> None:
    """Takes every float."""
