"""Hidden states against the part of an output matrix that a device has, by any schedule."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from .. import linear
from ..bound import Bound
from ..cross_entropy import calls as kernels
from ..cross_entropy import reference as of_logits
from ..custom_call import vary_alike
from ..losses import vocab_shards
from ..losses.options import Options, is_ignored
from ..losses.reduction import countable, weighted
from ..losses.vocab_shards import Labels, Loss, OverDevices, shard_labels, shard_options
from . import reference, tokens
from .declaration import OPERATION
from .product import Products, blank, each, operand_dtype, operands
from .schedules import Schedule
from .tokens import Bias, put, rows

Outputs = tuple[jax.Array, jax.Array, jax.Array]

# Logits in f32 that are made at once where a row's largest is looked for.
LOGITS = 1 << 20


@dataclass(frozen=True)
class Work:
    """Everything but the arrays."""

    # Of the whole vocabulary; those of `schedule` are a part's.
    options: Options
    exchange: OverDevices
    products: Products
    # None for the dense program.
    schedule: Schedule | None
    # Tokens of a chunk where gradients are made in the forward pass, of a loss that is reduced.
    fused: int | None = None


def per_token(
    work: Work, hidden: jax.Array, weight: jax.Array, bias: Bias, labels: jax.Array
) -> Outputs:
    """Returns loss, logps and lse, each [N] in f32, of the whole vocabulary.

    `weight` and `bias` are a device's, labels those of the whole.
    """
    # Labels stay as they are: what is made of them and of exchanged numbers is every part's.
    of = _labels(work, weight, labels)
    hidden, weight, bias, _ = alike(hidden, weight, bias, of.given)
    outputs: Outputs = (_dense if work.schedule is None else _per_token)(
        work, hidden, weight, bias, labels
    )
    return outputs


def _labels(work: Work, weight: jax.Array, labels: jax.Array) -> Labels:
    vocab = weight.shape[work.products.vocab_axis]
    return shard_labels(work.options, work.exchange, labels, vocab)


def alike(*arrays: Any) -> list[Any]:
    """Has arrays vary alike, within `shard_map`; what transposes that is a sum over devices."""
    varying = iter(vary_alike([x for x in arrays if x is not None]))
    return [None if x is None else next(varying) for x in arrays]


def reduced(work: Work, *arrays_and_factors: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the scalar sum of factor * loss, and lse [N]."""
    *arrays, factors = arrays_and_factors
    if work.fused is None:
        loss, _, lse = per_token(work, *arrays)
        return weighted(loss, factors).sum(), lse
    hidden, weight, bias, labels = arrays
    of = _labels(work, weight, labels)
    hidden, weight, bias, _ = alike(hidden, weight, bias, of.given)
    value, lse = _fused(work, hidden, weight, bias, labels, factors)
    return value, lse


def _dense(
    work: Work, hidden: jax.Array, weight: jax.Array, bias: Bias, labels: jax.Array
) -> Outputs:
    idle = is_ignored(work.options, labels)
    logits = reference.logits(work.products, idle, hidden, weight, bias)
    of_all = Loss(work.options, work.exchange)
    loss, logps, lse = of_logits.token_outputs(of_all, logits, labels, None)
    return loss, logps, lse


def _of_part(
    work: Work, hidden: jax.Array, weight: jax.Array, bias: Bias, labels: jax.Array
) -> Sequence[Any]:
    """Returns loss, logps, lse and lse_low of a part, and what its backward pass may take."""
    assert work.schedule is not None
    *numbers, lse, lse_low, left = work.schedule.keep(hidden, weight, bias, labels)

    def highest() -> jax.Array:
        x, w = operands(hidden, weight)
        chunk = max(LOGITS // weight.shape[work.products.vocab_axis], 1)

        def body(first: Any, count: int, found: Any) -> Any:
            (some,) = rows(first, count, x)
            return put(found, [work.products.logits(some, w, bias).max(-1)], first)

        (found,) = each(len(labels), chunk, body, (blank(labels),))
        largest: jax.Array = found
        return largest

    if work.options.softcap is None:
        lse = vocab_shards.mark_empty(lse, highest)
    return *numbers, lse, lse_low, left


def forward(work: Work, hidden: jax.Array, weight: jax.Array, bias: Bias, labels: jax.Array) -> Any:
    """Returns the outputs, and what the backward pass takes besides the arrays."""
    of = _labels(work, weight, labels)
    arrays = alike(hidden, weight, bias, of.given)
    *part, left = linear.whole(OPERATION, partial(_of_part, work), *arrays)
    loss, logps, lse, lse_low = vocab_shards.merge_losses(work.options, work.exchange, of, part)
    return (loss, logps, lse), (lse, lse_low, part[2] == -jnp.inf, left)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _per_token(
    work: Work, hidden: jax.Array, weight: jax.Array, bias: Bias, labels: jax.Array
) -> Outputs:
    outputs: Outputs
    outputs, _ = forward(work, hidden, weight, bias, labels)
    return outputs


@partial(_per_token.defjvp, symbolic_zeros=True)
def _per_token_jvp(work: Work, arrays: Any, tangents: Any) -> tuple[Any, Any]:
    outputs, saved = forward(work, *arrays)
    *moving, _ = map(linear.given, tangents)
    apply, transpose = Bound(_tangents, work), Bound(pull, work)
    found = linear.bind(apply, transpose, (arrays, saved), moving, outputs)
    return outputs, tuple(found)


def _tangents(work: Work, residuals: Any, tangents: Any) -> Any:
    arrays, _ = residuals
    return linear.tangents_of(partial(_dense, work), arrays, (*tangents, None))


def pull(work: Work, residuals: Any, cotangents: Any) -> Any:
    """Returns a part's gradients, dhidden to be summed, of the arrays and what `forward` saves.

    A cotangent that is None is one of zeros.
    """
    (hidden, weight, bias, labels), (lse, lse_low, is_empty, left) = residuals
    assert work.schedule is not None
    of = _labels(work, weight, labels)
    given = [jnp.zeros_like(lse) if one is None else one for one in cotangents]
    of_part = vocab_shards.shard_cotangents(work.options, work.exchange, of, lse, is_empty, given)
    # Loops want what they carry to vary as what they make does.
    arrays = alike(hidden, weight, bias, of.given, lse, lse_low, *of_part)
    *arrays, lse, lse_low, g, h, k = arrays
    return work.schedule.resume(*arrays, (lse, lse_low), (g, h, k), left)


def _loss_and_gradients(
    work: Work,
    hidden: jax.Array,
    weight: jax.Array,
    bias: Bias,
    labels: jax.Array,
    factors: jax.Array,
) -> Any:
    """Returns loss, and what `forward` saves, and gradients for cotangents `factors` of the loss.

    Parts exchange numbers of a chunk of tokens, whose logits are there for their gradient.
    """
    assert work.fused is not None
    products, exchange = work.products, dataclasses.replace(work.exchange, is_checked=True)
    options = shard_options(work.options, exchange)
    w = weight.astype(operand_dtype(hidden, weight))
    of = _labels(work, weight, labels)
    idle = tokens.idle_tokens(work.options, labels, factors)
    of_tokens = hidden, factors, idle, *of
    add = partial(tokens.add_gradients, products, weight, w, bias)

    def body(first: Any, count: int, carry: Any) -> Any:
        outputs, sums = carry
        x, g, out, *rest = rows(first, count, *of_tokens)
        own = Labels(*rest)
        z = products.logits(x.astype(w.dtype), w, bias)
        *part, lse, low = kernels.forward(options, z, own.given)
        if work.options.softcap is None:
            lse = vocab_shards.mark_empty(lse, lambda: z.max(-1))
        is_empty = lse == -jnp.inf
        loss, _, lse, low = vocab_shards.merge_losses(
            work.options, exchange, own, (*part, lse, low)
        )
        given = g, jnp.zeros_like(g), jnp.zeros_like(g)
        of_part = vocab_shards.shard_cotangents(work.options, exchange, own, lse, is_empty, given)
        at, beside, g, h, k, _ = alike(lse, low, *of_part, z)
        in_place = tokens.in_place(options)
        dlogits = kernels.backward(in_place, z, own.given, (at, beside), (g, h, k))
        return put(outputs, (loss, lse, low, is_empty), first), add(sums, dlogits, x, out, first)

    outputs = (*[blank(labels)] * 3, blank(of.given, dtype=bool))
    zeros = tokens.blank_gradients(hidden, weight, bias, work.fused)
    outputs, sums = each(len(labels), work.fused, body, (outputs, zeros))
    gradients = tokens.rounded_gradients(sums, hidden, weight, bias)
    loss, lse, low, is_empty = outputs
    return loss, (lse, low, is_empty, ()), gradients


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _fused(
    work: Work,
    hidden: jax.Array,
    weight: jax.Array,
    bias: Bias,
    labels: jax.Array,
    factors: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    (loss, _, lse), _ = forward(work, hidden, weight, bias, labels)
    return weighted(loss, factors).sum(), lse


@partial(_fused.defjvp, symbolic_zeros=True)
def _fused_jvp(work: Work, primals: Any, tangents: Any) -> tuple[Any, Any]:
    *moving, _, of_factors = map(linear.given, tangents)
    loss, saved, gradients = linear.whole(OPERATION, partial(_loss_and_gradients, work), *primals)
    lse, *_ = saved
    results = weighted(loss, primals[-1]).sum(), lse
    losses = None if of_factors is None else countable(loss, primals[-1])
    residuals = primals, saved, gradients, losses
    apply, transpose = Bound(_fused_tangents, work), Bound(_fused_pull, work)
    found = linear.bind(apply, transpose, residuals, (*moving, of_factors), results)
    return results, tuple(found)


def _fused_tangents(work: Work, residuals: Any, tangents: Any) -> Any:
    (*arrays, labels, factors), *_ = residuals

    def dense(hidden: Any, weight: Any, bias: Any, factors: Any) -> Any:
        loss, _, lse = _dense(work, hidden, weight, bias, labels)
        return weighted(loss, factors).sum(), lse

    return linear.tangents_of(dense, (*arrays, factors), tangents)


def _fused_pull(work: Work, residuals: Any, cotangents: Any) -> Any:
    primals, saved, gradients, losses = residuals
    dloss, dlse = cotangents
    if dloss is None:
        dloss = jnp.zeros((), saved[0].dtype)
    dfactors = None if losses is None else dloss * losses
    if dlse is not None:
        # Rare: logits are made again.
        *arrays, factors = primals
        return *pull(work, (arrays, saved), (dloss * factors, None, dlse)), dfactors
    return *tokens.scaled(gradients, work.exchange.cotangent(dloss)), dfactors
