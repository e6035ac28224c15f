"""Cross-entropy in plain JAX, for XLA to compile: the reference of the kernels.

Kernels are compared with it, forward mode differentiates it, and it runs where there are no
kernels. Logits are the whole vocabulary's, or a shard's (`vocab_shards`).
"""

import operator
from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp

from .. import linear
from ..arrays import wide
from ..bound import Bound
from ..custom_call import vary_alike
from ..losses import aux_outputs
from ..losses.aux_outputs import Request, TokenOutputs
from ..losses.options import Options, is_ignored
from ..losses.reduction import weighted
from ..losses.vocab_shards import (
    WHOLE,
    Exchange,
    Loss,
    merge_argmax,
    merge_picked,
    set_special,
    shard_columns,
    shard_labels,
)


def token_outputs(
    spec: Loss,
    logits: jax.Array,
    labels: jax.Array,
    columns: jax.Array | None,
    probe: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """Returns loss, logps, lse [..], then entropy [..] and the columns' logits [.., K] if wanted.

    `logits` is [.., V] of any float dtype, `labels` [..] of any integer dtype. Outputs are in f32,
    or in the dtype of logits if that is wider. The formulas and the special tokens are those of
    crates/xentile/src/cross_entropy.rs. The gradient of a token all of whose cotangents are 0 is 0,
    whatever its logits: by `with_probe`, unless the caller has a `probe` [..].
    """
    options, exchange = spec.options, spec.exchange
    if probe is None:
        logits, probe = with_probe(logits)
    if spec.distribution or columns is not None:
        # One conversion, so that cotangents are added up before they are rounded.
        logits = wide(logits)
    width = logits.shape[-1]
    of = shard_labels(options, exchange, labels, width)
    logits = _without_gradient(exchange.spread(of.ignored), logits)
    z = options.mapped(wide(logits))
    highest = exchange.max(jax.lax.stop_gradient(z).max(-1))
    shift = exchange.spread(highest)[..., None]
    # A masked entry has no gradient, not even as the label; a row of nothing else is no row.
    masked = (z == -jnp.inf) & (shift > -jnp.inf)
    z = jnp.where(masked, -jnp.inf, z)
    column = jnp.where(of.here, of.given, 0).astype(jnp.int32)
    at_label = jnp.take_along_axis(z, column[..., None], axis=-1)[..., 0]
    # No finite sum gives NaN: inf - inf is.
    below = z - shift
    exponentials = jnp.exp(below)
    sums = [
        exponentials.sum(-1),
        at_label if exchange.is_whole else jnp.where(of.here, at_label, 0),
    ]
    if options.label_smoothing:
        sums.append(z.sum(-1))
    if spec.distribution:
        sums.append(jnp.where(masked, 0, exponentials * jnp.where(masked, 0, below)).sum(-1))
    total, at_label, *more = exchange.sum(*sums)
    lse = jnp.log(total) + highest
    logps = at_label - lse
    loss = (1 - options.label_smoothing) * -logps + options.z_loss * lse**2
    if options.label_smoothing:
        mean = more.pop(0) / (exchange.count * width)
        loss += options.label_smoothing * (lse - mean)
    outputs: tuple[jax.Array, ...] = (*set_special(of, loss, logps), lse)
    if spec.distribution:
        outputs = *outputs, jnp.where(of.ignored, 0, jnp.log(total) - more[0] / total)
    if columns is not None:
        own, first = shard_columns(exchange, width, columns)
        assert own is not None
        picked = aux_outputs.pick(options, logits, own, first)
        outputs = *outputs, merge_picked(exchange, width, columns, picked)
    guarded: tuple[jax.Array, ...] = _tell_probe(exchange, probe, outputs)
    return guarded


@jax.custom_jvp
def with_probe(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns logits [.., V], and a probe [..] whose cotangent is 0 for tokens without a gradient.

    Their rows of the logits' cotangent become 0, where 0 times a number could be NaN.
    """
    return logits, jnp.max(logits, -1)


@with_probe.defjvp
def _with_probe_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    results = with_probe(*primals)
    rules = _with_probe_tangents, _with_probe_cotangents
    return results, tuple(linear.bind(*rules, (), tangents, results))


def _with_probe_tangents(_: Any, tangents: Sequence[Any]) -> tuple[jax.Array, jax.Array]:
    # The probe's own is not read.
    return tangents[0], tangents[0].sum(-1)


def _with_probe_cotangents(_: Any, cotangents: Sequence[Any]) -> tuple[jax.Array | None]:
    dlogits, counts = cotangents
    return (None if dlogits is None else jnp.where(counts[..., None] == 0, 0, dlogits),)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _tell_probe(exchange: Exchange, probe: jax.Array, outputs: Any) -> Any:
    """Returns the outputs; the probe's cotangent says which tokens have one that is not 0."""
    return outputs


@_tell_probe.defjvp
def _tell_probe_jvp(exchange: Exchange, primals: Any, tangents: Any) -> tuple[Any, Any]:
    (probe, outputs), (of_probe, of_outputs) = primals, tangents
    rules = _tell_probe_tangents, Bound(_tell_probe_cotangents, exchange, outputs[0].ndim)
    return outputs, tuple(linear.bind(*rules, (probe,), (of_probe, *of_outputs), outputs))


def _tell_probe_tangents(_: Any, tangents: Sequence[Any]) -> Sequence[Any]:
    return tangents[1:]


def _tell_probe_cotangents(
    exchange: Exchange, rank: int, residuals: Any, cotangents: Any
) -> tuple[Any, ...]:
    (probe,) = residuals
    given = [one for one in cotangents if one is not None]
    has_any = [(one != 0).any(tuple(range(rank, one.ndim))) for one in given]
    counts = exchange.cotangent(reduce(operator.or_, has_any).astype(probe.dtype))
    counts, _ = vary_alike([jnp.broadcast_to(exchange.spread(counts), probe.shape), probe])
    return counts, *cotangents


def requested_outputs(
    spec: Loss,
    request: Request,
    logits: jax.Array,
    labels: jax.Array,
    probe: jax.Array | None = None,
) -> TokenOutputs:
    """Returns `token_outputs` and what else is requested."""
    outputs = token_outputs(spec, logits, labels, request.columns, probe)
    if request.distribution:
        argmax = find_argmax(spec.exchange, logits, outputs[2])
        outputs = *outputs, aux_outputs.is_correct(spec.options, labels, argmax)
    return aux_outputs.collect(spec.options, request, labels, outputs)


def find_argmax(exchange: Exchange, logits: jax.Array, lse: jax.Array) -> jax.Array:
    """Returns the first column [..] with the largest logit; -1 where there is no finite sum."""
    logits = jax.lax.stop_gradient(logits)
    argmax = jnp.argmax(logits, -1).astype(jnp.int32)
    argmax = merge_argmax(exchange, logits.shape[-1], logits.max(-1), argmax)
    return jnp.where(jnp.isnan(lse), -1, argmax)


def reduced(
    options: Options, logits: jax.Array, labels: jax.Array, factors: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the scalar sum of factor * loss, and lse [..], of a whole vocabulary."""
    loss, _, lse = token_outputs(Loss(options), logits, labels, None)
    return weighted(loss, factors).sum(), lse


# What the library's calls of the same names give, in f32 (`calls`).


def forward(options: Options, logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, ...]:
    """Returns loss, logps, lse and lse_low."""
    *outputs, lse = token_outputs(Loss(options), logits, labels, None)
    return *outputs, lse, jnp.zeros_like(lse)


def fused(
    options: Options, logits: jax.Array, labels: jax.Array, dloss: jax.Array
) -> tuple[jax.Array, ...]:
    """Returns loss, lse, lse_low and dlogits."""
    loss, _, *saved = forward(options, logits, labels)
    zeros = jnp.zeros_like(dloss)
    return loss, *saved, *backward(options, logits, labels, *saved, dloss, zeros, zeros)


def backward(
    options: Options,
    logits: jax.Array,
    labels: jax.Array,
    lse: jax.Array,
    low: jax.Array,
    *cotangents: jax.Array,
) -> tuple[jax.Array]:
    """Returns dlogits for lse, lse_low and cotangents."""
    zeros = jnp.zeros_like(lse)
    return distribution_backward(options, logits, labels, lse, low, zeros, *cotangents, zeros)


def distribution(options: Options, logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, ...]:
    """Returns loss, logps, lse, lse_low, entropy, highest and argmax."""
    *outputs, lse, entropy = token_outputs(Loss(options, distribution=True), logits, labels, None)
    highest = jnp.where(jnp.isnan(lse), jnp.nan, logits.max(-1).astype(lse.dtype))
    argmax = find_argmax(WHOLE, logits, lse)
    return *outputs, lse, jnp.zeros_like(lse), entropy, highest, argmax


def distribution_fused(
    options: Options, logits: jax.Array, labels: jax.Array, dloss: jax.Array
) -> tuple[jax.Array, ...]:
    """Returns loss, lse, lse_low, entropy, highest, argmax and dlogits."""
    loss, _, *scalars = distribution(options, logits, labels)
    zeros = jnp.zeros_like(dloss)
    dlogits = backward(options, logits, labels, *scalars[:2], dloss, zeros, zeros)
    return loss, *scalars, *dlogits


def distribution_backward(
    options: Options, logits: jax.Array, labels: jax.Array, *scalars: jax.Array
) -> tuple[jax.Array]:
    """Returns dlogits for lse, lse_low, entropy, and cotangents of loss, logps, lse and entropy."""
    lse, low, entropy, g, h, k, q = (one[..., None] for one in scalars)
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
    is_zero = ignored[..., None] | ((g == 0) & (h == 0) & (k == 0) & (q == 0))
    dz = jnp.where(is_zero, 0, jnp.where(wrong, jnp.nan, dz))
    return (dz.astype(logits.dtype),)


def _without_gradient(tokens: jax.Array, logits: jax.Array) -> jax.Array:
    """Has the rows of `tokens` get a gradient of 0, where 0 times a cotangent could be NaN."""
    return jnp.where(tokens[..., None], jax.lax.stop_gradient(logits), logits)
