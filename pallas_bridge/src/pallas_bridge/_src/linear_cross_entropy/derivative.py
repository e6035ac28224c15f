"""The two derivative rules: of outputs per token, and of a reduced loss with auxiliary outputs.

Both take operands that are whole, and those of a vocabulary shard, which a device has. Of a shard,
devices exchange a few numbers a token, of which the whole vocabulary's outputs are made
(`vocab_shards` has the formulas). Auxiliary outputs (entropy, top-1 match, log-probabilities of
given columns) are made of logits that a chunk of tokens has at a time.

Per token, the backward pass recomputes logits, but for those that the forward pass saved. Where the
reduction is inside, the forward pass makes gradients too. With auxiliary outputs it does so if
nothing but the loss is differentiated, which is known once a program's dead code is gone.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import linear
from ..bound import Bound
from ..cross_entropy import calls as kernels
from ..cross_entropy import reference
from ..deferred import bind_deferred, make_primitive
from ..losses import aux_outputs, vocab_shards
from ..losses.aux_outputs import Request, TokenOutputs
from ..losses.options import Options
from ..losses.reduction import countable, weighted
from ..losses.vocab_shards import (
    WHOLE,
    Labels,
    OverDevices,
    ShardOutputs,
    shard_labels,
    shard_options,
)
from .chunks import (
    FLOAT32,
    Bias,
    Gemms,
    Gradients,
    Operands,
    TokenChunks,
    as_gemm_operands,
    dense_logits,
    for_each_chunk,
    make_alike,
    masked_tokens,
    put_rows,
    scale_gradients,
    slice_rows,
    write_in_place,
    zeros,
)
from .declaration import OPERATION
from .plan import Plan
from .schedule import (
    Schedule,
    call_cuda,
    call_if_whole,
    has_cuda_call,
)

# What rows of the weight that are gathered take at a time, in bytes, where XLA holds any.
GATHERED_BYTES = 1 << 28
# Logits in f32 that are computed at once to find the largest of a row.
ROW_MAX_LOGITS = 1 << 20


@dataclass(frozen=True)
class LinearLoss:
    """How a loss is computed: everything but the arrays."""

    # Of the whole vocabulary; those of `schedule` are a shard's where there is an `exchange`.
    options: Options
    gemms: Gemms
    # None for the dense program of XLA, and with auxiliary outputs.
    schedule: Schedule | None = None
    # The collectives of vocabulary shards; None for operands that are whole.
    exchange: OverDevices | None = None
    is_dense: bool = False
    # Whether the forward pass makes gradients where the reduction is inside.
    is_fused: bool = False
    # Tokens of a chunk, with auxiliary outputs or of a fused pass over a shard.
    chunk_tokens: int = 0
    # Whether entropy and correct are auxiliary outputs, and whether correct is one.
    distribution: bool = False
    correct: bool = False
    # The plan of a fused pass with auxiliary outputs on NVIDIA's GPUs, where there is one.
    cuda: Plan | None = None

    @property
    def chunks(self) -> TokenChunks:
        """The chunks of passes whose logits no schedule computes."""
        options = shard_options(self.options, self.exchange or WHOLE)
        return TokenChunks(options, self.gemms, self.chunk_tokens)

    @property
    def logits_loss(self) -> vocab_shards.Loss:
        """The loss of logits, for passes that have these."""
        return vocab_shards.Loss(self.options, self.exchange or WHOLE, self.distribution)

    def has_outputs(self, columns: jax.Array | None) -> bool:
        """Whether there are auxiliary outputs."""
        return self.distribution or columns is not None

    def local(self, operands: Operands, columns: jax.Array | None) -> tuple[Any, Any, Any]:
        """Returns operands, columns and labels as a shard numbers them; as they are if whole."""
        if self.exchange is None:
            return operands, columns, None
        width = operands.weight.shape[self.gemms.vocab_axis]
        labels = shard_labels(self.options, self.exchange, operands.labels, width)
        if columns is not None:
            columns = columns - (self.exchange.index() * width).astype(columns.dtype)
        return operands._replace(labels=labels.given), columns, labels


class Saved(NamedTuple):
    """The residuals of a forward pass beside its operands; None for what it has not."""

    lse: jax.Array
    lse_low: jax.Array
    entropy: jax.Array | None = None
    # The columns' logits, as they go into the softmax.
    picked: jax.Array | None = None
    # Which tokens have no logits but -inf in a shard.
    is_empty: jax.Array | None = None
    # What `Schedule.forward_saving_logits` leaves.
    logits: Any = ()


def per_token(loss: LinearLoss, requested: Request, operands: Operands) -> TokenOutputs:
    """Returns loss, logps and lse, each [N] in f32, and the auxiliary outputs of each token.

    `weight` and `bias` are a device's where its loss has an `exchange`; labels and columns are
    those of the whole vocabulary.
    """
    operands, columns = _alike(loss, operands, requested.columns)
    if loss.is_dense:
        z, probe = dense_logits(loss.gemms, operands)
        given = requested, z, operands.labels, probe
        return reference.requested_outputs(loss.logits_loss, *given)
    outputs = _per_token(loss, operands, columns)
    return aux_outputs.collect(loss.options, requested, operands.labels, outputs)


def reduced(
    loss: LinearLoss, requested: Request, operands: Operands, factors: jax.Array
) -> TokenOutputs:
    """Returns the scalar sum of factor * loss, lse [N] and the auxiliary outputs; no logps.

    `factors` is [N] in f32, 0 for ignored tokens.
    """
    if not loss.is_fused:
        found = per_token(loss, requested, operands)
        return found._replace(loss=weighted(found.loss, factors).sum())
    columns = requested.columns
    if loss.exchange is None:
        *arrays, columns, factors = make_alike(*operands, columns, factors)
        operands = Operands(*arrays)
    else:
        operands, columns = _alike(loss, operands, columns)
    total, *others = _reduced(loss, operands, columns, factors)
    outputs = total, total, *others
    return aux_outputs.collect(loss.options, requested, operands.labels, outputs)


def _alike(
    loss: LinearLoss, operands: Operands, columns: jax.Array | None
) -> tuple[Operands, jax.Array | None]:
    """Returns arrays that vary alike within `shard_map`.

    Labels and columns stay as they are where there is an exchange: its results are the same on all
    devices.
    """
    if loss.exchange is None:
        *arrays, columns = make_alike(*operands, columns)
        return Operands(*arrays), columns
    local, *_ = loss.local(operands, None)
    return local.varying_alike()._replace(labels=operands.labels), columns


def dense_outputs(
    loss: LinearLoss, operands: Operands, columns: jax.Array | None
) -> tuple[jax.Array, ...]:
    """Returns loss, logps, lse, entropy and the columns' logits by the dense program."""
    z, probe = dense_logits(loss.gemms, operands)
    return reference.token_outputs(loss.logits_loss, z, operands.labels, columns, probe)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _per_token(
    loss: LinearLoss, operands: Operands, columns: jax.Array | None
) -> tuple[jax.Array, ...]:
    outputs, _ = forward(loss, operands, columns, is_differentiated=False)
    return outputs


@partial(_per_token.defjvp, symbolic_zeros=True)
def _per_token_jvp(loss: LinearLoss, primals: Any, tangents: Any) -> tuple[Any, Any]:
    outputs, saved = forward(loss, *primals, is_differentiated=True)
    moving = [linear.given(one) for one in tangents[0][:3]]
    rules = Bound(_per_token_tangents, loss), Bound(vjp, loss)
    floats = outputs[:-1] if loss.distribution else outputs
    found = linear.bind(*rules, (*primals, saved), moving, floats)
    return outputs, aux_outputs.with_correct(loss.distribution, outputs, found)


def forward(
    loss: LinearLoss, operands: Operands, columns: jax.Array | None, *, is_differentiated: bool
) -> tuple[tuple[jax.Array, ...], Saved]:
    """Returns loss, logps, lse, entropy, the columns' logits and correct, and the residuals."""
    run = _call
    if is_differentiated:
        run = partial(linear.whole, OPERATION)
    local, local_columns, labels = loss.local(operands, columns)
    if loss.exchange is not None:
        if loss.has_outputs(columns):
            arrays = make_alike(*local, local_columns)
            found = run(partial(_shard_outputs, loss), Operands(*arrays[:4]), arrays[4])
            width = operands.weight.shape[loss.gemms.vocab_axis]
            given = loss.logits_loss, width, operands.labels, labels, columns, found
            outputs, (lse, lse_low, is_empty, entropy, picked) = kernels.merge_shards(*given)
            return outputs, Saved(lse, lse_low, entropy, picked, is_empty)
        local = local.varying_alike()
        *shard, logits = run(partial(_shard_forward, loss, is_differentiated), local)
        *outputs, lse_low = vocab_shards.merge_losses(loss.options, loss.exchange, labels, shard)
        is_empty = shard[2] == -jnp.inf
        return tuple(outputs), Saved(outputs[2], lse_low, is_empty=is_empty, logits=logits)
    if loss.has_outputs(columns):
        outputs, lse_low = run(partial(_whole_outputs, loss), operands, columns)
        entropy = outputs[3] if loss.distribution else None
        picked = None if columns is None else outputs[4 if loss.distribution else 3]
        return outputs, Saved(outputs[2], lse_low, entropy, picked)
    found = run(partial(_run_schedule, loss, is_differentiated), operands)
    *outputs, lse_low, logits = found
    return tuple(outputs), Saved(outputs[2], lse_low, logits=logits)


def _call(function: Callable[..., Any], *arrays: Any) -> Any:
    return function(*arrays)


def _run_schedule(loss: LinearLoss, is_differentiated: bool, operands: Operands) -> tuple[Any, ...]:
    """Returns loss, logps, lse and lse_low, and the logits that are saved for a backward pass."""
    assert loss.schedule is not None
    if is_differentiated:
        return loss.schedule.forward_saving_logits(operands)
    return *loss.schedule.forward(operands), ()


def _whole_outputs(loss: LinearLoss, operands: Operands, columns: jax.Array | None) -> Any:
    """Returns `TokenChunks.forward_with_outputs` of whole operands."""
    return loss.chunks.forward_with_outputs(operands, columns, distribution=loss.distribution)


def _shard_outputs(loss: LinearLoss, operands: Operands, columns: jax.Array | None) -> Any:
    """Returns what a shard's logits say of each token; labels and columns are the shard's."""
    labels = operands.labels
    number = zeros(labels)
    like = ShardOutputs(*(number,) * 4)
    if loss.distribution:
        argmax = zeros(labels, dtype=jnp.int32)
        like = like._replace(entropy=number, highest=number, argmax=argmax)
    if columns is not None:
        like = like._replace(picked=zeros(columns))
    results, tree = jax.tree.flatten(like)

    def run_chunk(z: jax.Array, y: jax.Array, *c: jax.Array) -> Any:
        shard = kernels.read_shard(loss.logits_loss, z, y, c[0] if c else None)
        return jax.tree.leaves(shard)

    per_token = [labels] if columns is None else [labels, columns]
    found = loss.chunks.map_logits(run_chunk, operands, tuple(results), *per_token)
    return jax.tree.unflatten(tree, found)


def _shard_forward(
    loss: LinearLoss, is_differentiated: bool, operands: Operands
) -> tuple[Any, ...]:
    """Returns loss, logps, lse and lse_low of a shard, and the logits that are saved."""
    *outputs, lse, lse_low, logits = _run_schedule(loss, is_differentiated, operands)

    def row_max() -> jax.Array:
        hidden, weight, bias, labels = operands
        x, w = as_gemm_operands(hidden, weight)
        chunk = max(ROW_MAX_LOGITS // weight.shape[loss.gemms.vocab_axis], 1)

        def body(first: Any, count: int, found: Any) -> Any:
            (rows,) = slice_rows(first, count, x)
            return put_rows(found, [loss.gemms.logits(rows, w, bias).max(-1)], first)

        (found,) = for_each_chunk(len(labels), chunk, body, (zeros(labels),))
        largest: jax.Array = found
        return largest

    if loss.options.softcap is None:
        lse = vocab_shards.mark_empty(lse, row_max)
    return *outputs, lse, lse_low, logits


def _per_token_tangents(loss: LinearLoss, residuals: Any, tangents: Any) -> Any:
    operands, columns, _ = residuals

    def dense(*arrays: Any) -> Any:
        hidden, weight, bias = arrays
        given = Operands(hidden, weight, bias, operands.labels)
        return dense_outputs(loss, given, columns)

    return linear.tangents_of(dense, operands[:3], tangents)


def vjp(loss: LinearLoss, residuals: Any, cotangents: Any) -> Gradients:
    """Returns gradients for cotangents of the outputs of `forward`, of which None is zeros.

    Residuals are operands, columns and what `forward` saved. dhidden is a shard's, to be summed
    over devices.
    """
    operands, columns, saved = residuals
    first, others = list(cotangents[:3]), list(cotangents[3:])
    if loss.exchange is not None or not loss.has_outputs(columns):
        first = [jnp.zeros_like(saved.lse) if one is None else one for one in first]
    local, local_columns, labels = loss.local(operands, columns)
    if loss.exchange is not None:
        given = loss.options, loss.exchange, labels, saved.lse, saved.is_empty, first
        first = [*vocab_shards.shard_cotangents(*given)]
        others = [None if one is None else loss.exchange.cotangent(one) for one in others]
        if loss.distribution and others[0] is not None:
            others[0] = jnp.where(saved.is_empty, 0, others[0])
        # Loops want what they carry to vary as what they make does.
        flat, tree = jax.tree.flatten((local, local_columns, saved, first, others))
        alike = jax.tree.unflatten(tree, make_alike(*flat))
        local, local_columns, saved, first, others = alike
    lse, lse_low, entropy, picked, _, logits = saved
    if not loss.has_outputs(columns):
        assert loss.schedule is not None
        run: Callable[..., Gradients] = loss.schedule.backward_with_logits
        arrays: tuple[Any, ...] = local, (lse, lse_low), tuple(first), logits
    else:
        run = partial(loss.chunks.backward_with_outputs, distribution=loss.distribution)
        # What has no cotangent need not be kept.
        needed = iter(others)
        entropy, picked = (
            None if one is None or next(needed) is None else one for one in (entropy, picked)
        )
        arrays = local, local_columns, (lse, lse_low, entropy, picked), (*first, *others)
    gradients: Gradients = linear.whole(OPERATION, run, *arrays)
    return gradients


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _reduced(
    loss: LinearLoss, operands: Operands, columns: jax.Array | None, factors: jax.Array
) -> tuple[jax.Array, ...]:
    """Returns the loss, and of what `forward` gives all from lse on."""
    outputs, _ = forward(loss, operands, columns, is_differentiated=False)
    losses, _, *others = outputs
    return weighted(losses, factors).sum(), *others


@partial(_reduced.defjvp, symbolic_zeros=True)
def _reduced_jvp(loss: LinearLoss, primals: Any, tangents: Any) -> tuple[Any, Any]:
    operands, columns, factors = primals
    moving = [linear.given(one) for one in (*tangents[0][:3], tangents[2])]
    needs_losses = moving[-1] is not None
    losses, saved, correct, gradients = _fused(loss, *primals, needs_losses=needs_losses)
    floats = [weighted(losses, factors).sum(), saved.lse]
    floats += [one for one in (saved.entropy, saved.picked) if one is not None]
    # A cotangent of an output beside the loss, which is rare, takes the pass per token.
    needs_operands = loss.options.every_token or loss.has_outputs(columns) or loss.exchange
    recompute = (operands, columns, factors, saved) if needs_operands else None
    counted = countable(losses, factors) if needs_losses else None
    residuals = gradients, counted, floats[1:], recompute
    rules = Bound(_reduced_tangents, loss), Bound(_reduced_vjp, loss)
    found = linear.bind(*rules, residuals, moving, floats)
    outputs = *floats, *correct
    return outputs, aux_outputs.with_correct(loss.distribution, outputs, found)


def _reduced_tangents(loss: LinearLoss, residuals: Any, tangents: Any) -> Any:
    gradients, losses, others, recompute = residuals
    *moving, _ = tangents
    if loss.exchange is not None:
        operands, columns, factors, _ = recompute

        def dense(hidden: Any, weight: Any, bias: Any, factors: Any) -> Any:
            given = Operands(hidden, weight, bias, operands.labels)
            losses, _, *others = dense_outputs(loss, given, columns)
            return weighted(losses, factors).sum(), *others

        return linear.tangents_of(dense, (*operands[:3], factors), tangents)
    loss_tangent = linear.along((*gradients, losses), tangents)
    if recompute is None or all(one is None for one in moving):
        return loss_tangent, *map(jnp.zeros_like, others)
    operands, columns, _, saved = recompute
    _, _, *found = _per_token_tangents(loss, (operands, columns, saved), moving)
    return loss_tangent, *found


def _reduced_vjp(loss: LinearLoss, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    (gradients, losses, (lse, *_), recompute), (dloss, *others) = residuals, cotangents
    if dloss is None:
        dloss = jnp.zeros((), lse.dtype)
    dfactors = None if losses is None else dloss * losses
    if all(one is None for one in others):
        share = dloss if loss.exchange is None else loss.exchange.cotangent(dloss)
        return *scale_gradients(gradients, share), dfactors
    operands, columns, factors, saved = recompute
    given = (dloss * factors, None, *others)
    return *vjp(loss, (operands, columns, saved), given), dfactors


def _fused(
    loss: LinearLoss,
    operands: Operands,
    columns: jax.Array | None,
    factors: jax.Array,
    *,
    needs_losses: bool,
) -> tuple[jax.Array, Saved, Any, Gradients]:
    """Returns losses [N], residuals, [correct] or [], and gradients for the losses' `factors`.

    `needs_losses` is whether losses of tokens whose factor is 0 are read too.
    """
    if loss.exchange is not None:
        losses, saved, gradients = linear.whole(
            OPERATION, partial(_shard_fused, loss), operands, factors
        )
        return losses, saved, [], gradients
    if not loss.has_outputs(columns):
        assert loss.schedule is not None
        run = partial(loss.schedule.fused, needs_losses=needs_losses)
        losses, lse, lse_low, gradients = linear.whole(OPERATION, run, operands, factors)
        return losses, Saved(lse, lse_low), [], gradients
    default = Bound(_fused_outputs, loss)
    found = bind_deferred(_fused_pass, default, operands, columns, factors, loss=loss)
    losses, lse, lse_low, *others, gradients = found
    entropy = others.pop(0) if loss.distribution else None
    picked = None if columns is None else others.pop(0)
    return losses, Saved(lse, lse_low, entropy, picked), others, gradients


def _shard_fused(
    loss: LinearLoss, operands: Operands, factors: jax.Array
) -> tuple[jax.Array, Saved, Gradients]:
    """Returns losses, residuals, and gradients for the losses' `factors`, of a shard.

    Devices exchange numbers of a chunk of tokens, whose logits are there for their gradient.
    """
    assert loss.exchange is not None
    exchange, chunks = dataclasses.replace(loss.exchange, is_checked=True), loss.chunks
    local, _, labels = loss.local(operands, None)

    def run_chunk(z: jax.Array, g: jax.Array, *rows: jax.Array) -> Any:
        own = Labels(*rows)
        *shard, lse, low = kernels.forward(chunks.options, z, own.given)
        if loss.options.softcap is None:
            lse = vocab_shards.mark_empty(lse, lambda: z.max(-1))
        is_empty = lse == -jnp.inf
        outputs = vocab_shards.merge_losses(loss.options, exchange, own, (*shard, lse, low))
        losses, _, lse, low = outputs
        given = g, jnp.zeros_like(g), jnp.zeros_like(g)
        given = vocab_shards.shard_cotangents(loss.options, exchange, own, lse, is_empty, given)
        at, beside, g, h, k, _ = make_alike(lse, low, *given, z)
        options = write_in_place(chunks.options)
        dlogits = kernels.backward(options, z, own.given, (at, beside), (g, h, k))
        return losses, lse, low, is_empty, dlogits

    masked = masked_tokens(loss.options, operands.labels, factors)
    results = (*[zeros(operands.labels)] * 3, zeros(labels.given, dtype=bool))
    found, gradients = chunks.map_gradients(run_chunk, local, masked, results, factors, *labels)
    losses, lse, lse_low, is_empty = found
    return losses, Saved(lse, lse_low, is_empty=is_empty), gradients


def _fused_outputs(loss: LinearLoss, *arrays: Any) -> Any:
    """Returns `TokenChunks.fused_with_outputs` of operands, columns and factors."""
    by_chunks = Bound(_fused_by_chunks, loss)
    if loss.cuda is None or not has_cuda_call(_cuda_call(loss)):
        return by_chunks(*arrays)
    call = Bound(call_if_whole, Bound(_fused_on_cuda, loss, loss.cuda), by_chunks)
    return jax.lax.platform_dependent(*arrays, cuda=call, default=by_chunks)


def _fused_by_chunks(
    loss: LinearLoss, operands: Operands, columns: jax.Array | None, factors: jax.Array
) -> Any:
    given = operands, factors, columns
    return loss.chunks.fused_with_outputs(*given, distribution=loss.distribution)


def _cuda_call(loss: LinearLoss) -> str:
    return "distribution_fused" if loss.distribution else "fused"


def _fused_on_cuda(
    loss: LinearLoss, plan: Plan, operands: Operands, columns: jax.Array | None, factors: jax.Array
) -> Any:
    """Returns what `_fused_outputs` does, by one call of the library's.

    No call has logits of given columns: these are sums of their own, of K rows of the weight a
    token.
    """
    # Tokens without a factor have log-probabilities too.
    options = dataclasses.replace(loss.options, every_token=True)
    axis = loss.gemms.vocab_axis
    more = {"correct": loss.correct} if loss.distribution else {}
    name = _cuda_call(loss)
    *found, gradients = call_cuda(name, options, axis, plan, operands, factors, **more)
    correct = []
    if loss.distribution:
        correct = [aux_outputs.is_correct(options, operands.labels, found.pop())]
    if columns is not None:
        found.append(gather_column_logits(options, *operands[:3], columns))
    return *found, *correct, gradients


def gather_column_logits(
    options: Options, hidden: jax.Array, weight: jax.Array, bias: Bias, columns: jax.Array
) -> jax.Array:
    """Returns columns' logits [N, K] of a weight [V, D], as `aux_outputs.pick` gives them."""
    x, w = as_gemm_operands(hidden, weight)
    here, at = aux_outputs.find_columns(columns, 0, len(w))

    def body(first: Any, count: int, z: jax.Array) -> jax.Array:
        x_rows, at_rows = slice_rows(first, count, x, at)
        found = (x_rows[:, None].astype(FLOAT32) * w[at_rows].astype(FLOAT32)).sum(-1)
        (z,) = put_rows((z,), (found,), first)
        return z

    chunk = GATHERED_BYTES // (columns.shape[-1] * w.shape[1] * w.dtype.itemsize)
    chunk = min(max(chunk, 1), max(len(x), 1))
    z = for_each_chunk(len(x), chunk, body, zeros(columns))
    z = options.mapped(z if bias is None else z + bias.astype(FLOAT32)[at])
    return jnp.where(here, z, jnp.nan)


def _choose_fused_pass(
    ctx: Any, *, loss: LinearLoss, default: Any, tree: Any, keep: Any, **_: Any
) -> Any:
    operands, *_ = jax.tree.unflatten(tree, ctx.avals_in)
    # Gradients come last: of hidden, weight and bias.
    count = len(default.traced.out_avals) - len(jax.tree.leaves(operands[:3]))
    return (ctx, partial(_forward_only, loss)) if max(keep) < count else None


def _forward_only(loss: LinearLoss, operands: Operands, columns: Any, _: jax.Array) -> Any:
    """Returns what `_fused_outputs` does, but gradients: what takes these recomputes them."""
    (losses, _, lse, *others), lse_low = _whole_outputs(loss, operands, columns)
    return losses, lse, lse_low, *others


_fused_pass = make_primitive(
    OPERATION, "xentile_linear_cross_entropy_with_outputs", _choose_fused_pass
)
