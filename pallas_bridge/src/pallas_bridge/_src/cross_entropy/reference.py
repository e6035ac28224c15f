"""Cross-entropy written plainly, for XLA to make the dense program of.

Slow and large on purpose: it is what kernels are compared with, and what runs where there is none.
"""

import jax
import jax.numpy as jnp

from ..arrays import wide
from . import known
from .known import Asked, Known
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
    z = options.mapped(wide(logits))
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


def distribution(
    options: Options, logits: jax.Array, labels: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns entropy, highest and argmax, each [..]; argmax is -1 where there is no finite sum."""
    ignored = is_ignored(options, labels)
    highest, argmax = logits.max(-1), jnp.argmax(logits, -1).astype(jnp.int32)
    z = options.mapped(wide(_without_gradient(ignored, logits)))
    largest = jax.lax.stop_gradient(z.max(axis=-1, keepdims=True))
    masked = (z == -jnp.inf) & (largest > -jnp.inf)
    below = jnp.where(masked, 0, z - largest)
    exponentials = jnp.where(masked, 0, jnp.exp(below))
    total = exponentials.sum(-1)
    entropy = jnp.log(total) - (exponentials * below).sum(-1) / total
    unknown = jnp.isnan(entropy)
    return (
        jnp.where(ignored, 0, entropy),
        jnp.where(unknown, jnp.nan, jax.lax.stop_gradient(highest).astype(z.dtype)),
        jnp.where(unknown, -1, argmax),
    )


def known_of(options: Options, asked: Asked, logits: jax.Array, labels: jax.Array) -> Known:
    """Returns what is asked for of each token."""
    outputs = known_floats(options, asked.distribution, logits, labels, asked.columns)
    if asked.distribution:
        argmax = distribution(options, logits, labels)[2]
        outputs = *outputs, known.is_correct(options, labels, argmax)
    return known.ordered(options, asked, labels, outputs)


def known_floats(
    options: Options,
    with_distribution: bool,
    logits: jax.Array,
    labels: jax.Array,
    columns: jax.Array | None,
) -> tuple[jax.Array, ...]:
    """Returns loss, logps, lse, entropy and the columns' logits, of those asked for."""
    # Once for all, so that what flows back is added up before it is rounded.
    logits = wide(logits)
    outputs: tuple[jax.Array, ...] = per_token(options, logits, labels)
    if with_distribution:
        outputs = *outputs, distribution(options, logits, labels)[0]
    if columns is not None:
        plain = _without_gradient(is_ignored(options, labels), logits)
        outputs = *outputs, known.pick(options, plain, columns)
    return outputs


def distribution_forward(
    options: Options, logits: jax.Array, labels: jax.Array
) -> tuple[jax.Array, ...]:
    """Returns what the call for it does, in f32: loss, logps, lse, lse_low, and those."""
    loss, logps, lse = per_token(options, logits, labels)
    entropy, highest, argmax = distribution(options, logits, labels)
    return loss, logps, lse, jnp.zeros_like(lse), entropy, highest, argmax


def distribution_fused(
    options: Options, logits: jax.Array, labels: jax.Array, dloss: jax.Array
) -> tuple[jax.Array, ...]:
    """Returns what the call for it does: loss, lse, lse_low, entropy, highest, argmax, dlogits."""
    loss, _, *numbers = distribution_forward(options, logits, labels)
    nothing = jnp.zeros_like(dloss)
    dlogits = backward(options, logits, labels, *numbers[:2], dloss, nothing, nothing)
    return loss, *numbers, *dlogits


def distribution_backward(
    options: Options, logits: jax.Array, labels: jax.Array, *numbers: jax.Array
) -> tuple[jax.Array]:
    """Returns dlogits as the call does: of lse, lse_low, entropy and cotangents."""
    lse, low, entropy, g, h, k, q = (one[..., None] for one in numbers)
    vocab = logits.shape[-1]
    z = options.mapped(logits.astype(jnp.float32))
    log_p = (z - lse) - low
    p = jnp.exp(log_p)
    a = g * (1 + 2 * options.z_loss * lse) - h + k
    column = jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1)
    at_label = h - g * (1 - options.label_smoothing)
    dz = a * p + jnp.where(column == labels[..., None], at_label, 0)
    dz -= g * options.label_smoothing / vocab
    dz -= q * p * jnp.where(p == 0, 0, log_p + entropy)
    dz = jnp.where(z == -jnp.inf, 0, dz * options.slope(z))
    ignored = is_ignored(options, labels)
    wrong = ((labels < 0) | (labels >= vocab))[..., None] | ~jnp.isfinite(lse)
    idle = ignored[..., None] | ((g == 0) & (h == 0) & (k == 0) & (q == 0))
    dz = jnp.where(idle, 0, jnp.where(wrong, jnp.nan, dz))
    return (dz.astype(logits.dtype),)


def forward(options: Options, logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, ...]:
    """Returns what the call for it does, in f32: loss, logps, lse and lse_low."""
    *outputs, lse = per_token(options, logits, labels)
    return *outputs, lse, jnp.zeros_like(lse)


def backward(
    options: Options,
    logits: jax.Array,
    labels: jax.Array,
    lse: jax.Array,
    low: jax.Array,
    *cotangents: jax.Array,
) -> tuple[jax.Array]:
    """Returns dlogits as the call does: of lse, lse_low and cotangents."""
    nothing = jnp.zeros_like(lse)
    return distribution_backward(options, logits, labels, lse, low, nothing, *cotangents, nothing)


def fused(
    options: Options, logits: jax.Array, labels: jax.Array, dloss: jax.Array
) -> tuple[jax.Array, ...]:
    """Returns what the call for it does: loss, lse, lse_low and dlogits."""
    loss, _, lse, low = forward(options, logits, labels)
    nothing = jnp.zeros_like(dloss)
    return loss, lse, low, *backward(options, logits, labels, lse, low, dloss, nothing, nothing)


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
