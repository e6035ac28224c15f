"""Outputs and gradients of losses from a few scalars a token: plain JAX beside every kernel.

A pass over logits finds lse, the label's logit and, for label smoothing, the sum of all logits;
lse_low is what rounding lse left out. The formulas and the special tokens are those of
crates/xentile/src/cross_entropy.rs.
"""

import operator
from collections.abc import Sequence
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp

from .options import Options, is_ignored


def _out_of_range(options: Options, vocab: int, labels: jax.Array) -> jax.Array:
    in_range = (labels >= 0) & (labels < vocab)
    return ~in_range & ~is_ignored(options, labels)


def outputs_of_sums(
    options: Options,
    vocab: int,
    labels: jax.Array,
    sums: Sequence[jax.Array] | jax.Array,
    is_masked: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns loss, logps, lse and lse_low [N] of a row's lse, lse_low, z_y and sum of z.

    Unless `options.every_token`, they are 0 where `is_masked`, by default for ignored tokens.
    """
    lse, low, at_label, total = sums
    logps = (at_label - lse) - low
    e = options.label_smoothing
    loss = (1 - e) * -logps + options.z_loss * lse**2
    if e:
        loss += e * ((lse - total / vocab) + low)
    bad, ignored = _out_of_range(options, vocab, labels), is_ignored(options, labels)

    def masked(values: jax.Array) -> jax.Array:
        return jnp.where(ignored, 0, jnp.where(bad, jnp.nan, values))

    def requested(values: jax.Array) -> jax.Array:
        unused = ignored if is_masked is None else is_masked
        return values if options.every_token else jnp.where(unused, 0, values)

    return requested(masked(loss)), requested(masked(logps)), requested(lse), requested(low)


def mask_cotangents(
    options: Options, vocab: int, labels: jax.Array, *given: jax.Array
) -> list[jax.Array]:
    """Returns cotangents that are 0 for masked tokens, and NaN for labels out of range."""
    is_masked = is_ignored(options, labels)
    is_masked |= jnp.stack([cotangent == 0 for cotangent in given]).all(0)
    bad = _out_of_range(options, vocab, labels)
    return [jnp.where(is_masked, 0, jnp.where(bad, jnp.nan, cotangent)) for cotangent in given]


def masked_tokens(options: Options, labels: jax.Array, *cotangents: jax.Array) -> jax.Array:
    """Returns which tokens [N] take no part: ignored ones, and those without a cotangent."""
    are_zero = (~one if one.dtype == bool else one == 0 for one in cotangents)
    return is_ignored(options, labels) | reduce(operator.and_, are_zero)


def gradient_scalars(
    options: Options, vocab: int, labels: jax.Array, saved: Any, cotangents: Any
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns p_factor, at_label and even, each [N] in f32, and which tokens have a gradient.

    dlogits = p_factor exp(z - lse) + at_label [v = y] - even.

    `saved` is (lse, lse_low), and cotangents are of (loss, logps, lse).
    """
    lse, low = saved
    g, h, k = mask_cotangents(options, vocab, labels, *cotangents)
    p_factor = (g * (1 + 2 * options.z_loss * lse) - h + k) * jnp.exp(-low)
    at_label = h - g * (1 - options.label_smoothing)
    even = g * (options.label_smoothing / vocab)
    return p_factor, at_label, even, (g != 0) | (h != 0) | (k != 0)


def make_dlogits(
    options: Options, z: jax.Array, labels: jax.Array, first: Any, lse: jax.Array, *scalars: Any
) -> jax.Array:
    """Returns dlogits [N, width] in f32, by the `gradient_scalars` of rows.

    z are logits of columns from `first` on, after softcap and temperature.
    """
    p_factor, at_label, even, active = (one[:, None] for one in scalars)
    is_label = find_labels(labels, first, z.shape[-1])
    dz = p_factor * jnp.exp(z - lse[:, None]) + jnp.where(is_label, at_label, 0)
    if options.label_smoothing:
        dz -= even
    if options.softcap is not None or options.temperature != 1:
        dz *= options.slope(z)
    # Logits of -inf have no gradient; where there is no softmax, it is NaN everywhere.
    dz = jnp.where((z == -jnp.inf) & jnp.isfinite(lse)[:, None], 0, dz)
    return jnp.where(active, dz, 0)


def find_labels(labels: jax.Array, first: Any, width: int) -> jax.Array:
    """Returns which of `width` columns from `first` on are their row's label, [N, width]."""
    column = jax.lax.broadcasted_iota(labels.dtype, (len(labels), width), 1)
    return column + jnp.asarray(first, labels.dtype) == labels[:, None]
