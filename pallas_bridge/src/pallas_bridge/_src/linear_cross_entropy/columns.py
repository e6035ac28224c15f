"""Chunks of the vocabulary, written for XLA: for budgets below what sums of dweight take.

The forward pass keeps lse alone (Dao et al., 2022, for the running maximum); the backward pass
makes each chunk's logits again and is done with its part of dweight (the order is that of Wijmans
et al., 2024). Where sums of dhidden do not fit either, tokens are cut too, and dhidden and dweight
are swept for one after the other.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ..losses.options import Options, is_ignored
from . import two_passes
from .product import FLOAT32, Products, blank, each, holds_all, operand_dtype, without_rows
from .tokens import Bias, Gradients, idle_tokens, put, rows


def forward(
    options: Options,
    products: Products,
    chunk: tuple[int, int],
    hidden: jax.Array,
    weight: jax.Array,
    bias: Bias,
    labels: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns loss, logps, lse and lse_low, each [N] in f32."""
    tokens, columns = chunk
    vocab = weight.shape[products.vocab_axis]
    dtype = operand_dtype(hidden, weight)

    def of_tokens(first: Any, count: int, outputs: Any) -> Any:
        x, y = rows(first, count, hidden, labels)
        x = x.astype(dtype)

        def of_columns(start: Any, width: int, state: Any) -> Any:
            highest, total, at_label, plain = state
            z = _logits(options, products, x, weight, bias, start, width)
            higher = jnp.maximum(highest, z.max(-1))
            # A row of -inf so far has no exponent to shift by.
            shift = jnp.where(higher == -jnp.inf, 0, higher)
            total = total * jnp.exp(highest - shift) + jnp.exp(z - shift[:, None]).sum(-1)
            here = _is_label(y, start, width)
            at_label += jnp.where(here, z, 0).sum(-1)
            return higher, total, at_label, plain + z.sum(-1)

        zero = blank(x, (count,))
        state = (zero - jnp.inf, zero, zero, zero)
        highest, total, at_label, plain = each(vocab, columns, of_columns, state)
        log = jnp.log(total)
        lse = highest + log
        # A row of -inf alone is no row, and neither is one with +inf.
        lse = jnp.where(jnp.isfinite(lse), lse, jnp.nan)
        # The error of a sum, whichever term is larger.
        is_larger = jnp.abs(highest) >= jnp.abs(log)
        low = jnp.where(is_larger, (highest - lse) + log, (log - lse) + highest)
        found = _outputs(options, vocab, y, lse, low, at_label, plain / vocab)
        return put(outputs, found, first)

    outputs = (blank(labels),) * 4
    loss, logps, lse, low = each(labels.shape[0], tokens, of_tokens, outputs)
    return loss, logps, lse, low


def fused(
    options: Options,
    products: Products,
    chunk: tuple[int, int],
    hidden: jax.Array,
    weight: jax.Array,
    bias: Bias,
    labels: jax.Array,
    factors: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, Gradients]:
    """Returns loss, lse and lse_low, each [N] in f32, and gradients for `factors`."""
    passes = (partial(one, options, products, chunk) for one in (forward, backward))
    return two_passes.fused(*passes, hidden, weight, bias, labels, factors)


def backward(
    options: Options,
    products: Products,
    chunk: tuple[int, int],
    hidden: jax.Array,
    weight: jax.Array,
    bias: Bias,
    labels: jax.Array,
    saved: tuple[jax.Array, jax.Array],
    cotangents: tuple[jax.Array, jax.Array, jax.Array],
) -> Gradients:
    """Returns gradients for saved (lse, lse_low) and cotangents of (loss, logps, lse), each [N]."""
    tokens, columns = chunk
    vocab = weight.shape[products.vocab_axis]
    per_token = (labels, *saved, *cotangents)
    dweight = blank(weight, dtype=weight.dtype)
    dbias = None if bias is None else blank(bias, dtype=bias.dtype)
    dtype = operand_dtype(hidden, weight)
    idle = idle_tokens(options, labels, *cotangents)

    def operands(x: Any, out: Any) -> jax.Array:
        """Hidden states, but none of idle tokens, whose logits matter no more."""
        return without_rows(out, x).astype(dtype)

    def add_of_hidden(total: Any, dz: Any, start: Any, width: int) -> jax.Array:
        part = products.columns(weight, start, width).astype(dtype)
        summed: jax.Array = total + products.of_hidden(dz, part, FLOAT32)
        return summed

    def dlogits(x: Any, per_token: Any, start: Any, width: int) -> jax.Array:
        y, lse, low, *given = per_token
        z = _logits(options, products, x, weight, bias, start, width)
        return _dlogits(options, vocab, z, y, (lse, low), given, start)

    if holds_all(tokens, labels.shape[0]):
        x = operands(hidden, idle)

        def at_once(start: Any, width: int, sums: Any) -> Any:
            total, others = sums
            dz = dlogits(x, per_token, start, width)
            total = add_of_hidden(total, dz, start, width)
            part = (products.of_weight(dz, x, FLOAT32), dz.sum(0, dtype=jnp.float32))
            return total, _ended(products, others, *part, start)

        sums = (blank(hidden), (dweight, dbias))
        total, (dweight, dbias) = each(vocab, columns, at_once, sums)
        return without_rows(idle, total).astype(hidden.dtype), dweight, dbias

    def for_hidden(first: Any, count: int, outputs: Any) -> Any:
        x, out, *of_rows = rows(first, count, hidden, idle, *per_token)
        x = x.astype(dtype)

        def add(start: Any, width: int, total: Any) -> Any:
            dz = dlogits(x, of_rows, start, width)
            return add_of_hidden(total, dz, start, width)

        total = each(vocab, columns, add, blank(x))
        return put(outputs, (without_rows(out, total),), first)

    def for_weight(start: Any, width: int, others: Any) -> Any:
        def add(first: Any, count: int, totals: Any) -> Any:
            x, out, *of_rows = rows(first, count, hidden, idle, *per_token)
            x = operands(x, out)
            dz = dlogits(x, of_rows, start, width)
            of_weight, of_bias = totals
            of_weight += products.of_weight(dz, x, FLOAT32)
            return of_weight, of_bias + dz.sum(0, dtype=jnp.float32)

        part = products.columns(weight, start, width)
        totals = (blank(part), blank(part, (width,)))
        of_weight, of_bias = each(labels.shape[0], tokens, add, totals)
        return _ended(products, others, of_weight, of_bias, start)

    outputs = (blank(hidden, dtype=hidden.dtype),)
    (dhidden,) = each(labels.shape[0], tokens, for_hidden, outputs)
    dweight, dbias = each(vocab, columns, for_weight, (dweight, dbias))
    return dhidden, dweight, dbias


def _ended(
    products: Products, others: Any, of_weight: jax.Array, of_bias: jax.Array, start: Any
) -> tuple[jax.Array, Bias]:
    dweight, dbias = others
    if dbias is not None:
        (dbias,) = put((dbias,), (of_bias,), start)
    return products.put(dweight, of_weight, start), dbias


def _logits(
    options: Options,
    products: Products,
    x: jax.Array,
    weight: jax.Array,
    bias: Bias,
    start: Any,
    width: int,
) -> jax.Array:
    """Returns logits of columns from `start` on, in f32, after softcap and temperature."""
    part = products.columns(weight, start, width).astype(x.dtype)
    of_part = None if bias is None else jax.lax.dynamic_slice_in_dim(bias, start, width)
    z = products.logits(x, part, of_part)
    return options.mapped(z)


def _is_label(labels: jax.Array, start: Any, width: int) -> jax.Array:
    column = jax.lax.broadcasted_iota(labels.dtype, (len(labels), width), 1)
    return column + jnp.asarray(start, labels.dtype) == labels[:, None]


def _outputs(
    options: Options,
    vocab: int,
    labels: jax.Array,
    lse: jax.Array,
    low: jax.Array,
    at_label: jax.Array,
    mean: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Loss, logps, lse and lse_low of whole rows, as the contract has them."""
    ignored = is_ignored(options, labels)
    valid = jnp.where((labels >= 0) & (labels < vocab) | ignored, 1, jnp.nan)
    smoothing = options.label_smoothing
    logps = (at_label - lse) - low
    loss = (1 - smoothing) * -logps + options.z_loss * lse**2
    if smoothing:
        loss += smoothing * ((lse - mean) + low)
    return jnp.where(ignored, 0, loss * valid), jnp.where(ignored, 0, logps * valid), lse, low


def _dlogits(
    options: Options,
    vocab: int,
    z: jax.Array,
    labels: jax.Array,
    saved: Any,
    cotangents: Any,
    start: Any,
) -> jax.Array:
    """The gradient of a chunk of logits, in f32."""
    (lse, low), (g, h, k) = saved, cotangents
    ignored = is_ignored(options, labels)
    idle = ignored | ((g == 0) & (h == 0) & (k == 0))
    valid = jnp.where((labels >= 0) & (labels < vocab) | ignored, 1, jnp.nan)
    smoothing = options.label_smoothing
    of_p = (g * (1 + 2 * options.z_loss * lse) - h + k) * valid * jnp.exp(-low)
    at_label = (h - g * (1 - smoothing)) * valid
    p = jnp.exp(z - lse[:, None])
    dz = of_p[:, None] * p + jnp.where(_is_label(labels, start, z.shape[1]), at_label[:, None], 0)
    dz -= (g * smoothing / vocab)[:, None]
    if options.softcap is not None or options.temperature != 1:
        dz *= options.slope(z)
    # A masked entry has none, and a row that is no row has NaN everywhere.
    dz = jnp.where((z == -jnp.inf) & jnp.isfinite(lse)[:, None], 0, dz)
    return jnp.where(idle[:, None], 0, dz)
