"""The two derivative rules: per token, and of a reduced loss with auxiliary outputs.

Operands hold the whole vocabulary or one vocabulary shard. A whole vocabulary counts as one shard:
there is one path, in which shards exchange a few scalars a token (`vocab_shards` has the formulas)
and the only shard exchanges nothing. Auxiliary outputs are entropy, top-1 match and
log-probabilities of given columns, computed from the logits of one chunk of tokens at a time.

Per token, the backward pass recomputes logits, except those that the forward pass saved. With a
reduction, the forward pass computes gradients too. With auxiliary outputs it does so if only the
loss is differentiated, which is known when dead code has been removed from the program.
"""

import dataclasses
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import linear
from ..bound import Bound
from ..chunk_loops import make_alike
from ..cross_entropy import calls as kernels
from ..cross_entropy import reference
from ..deferred import bind_deferred, make_primitive
from ..logits_gemms import Gemms, Gradients, Operands, dense_logits, scale_gradients
from ..losses import aux_outputs, vocab_shards
from ..losses.aux_outputs import Request, TokenOutputs
from ..losses.reduction import countable, weighted
from ..losses.vocab_shards import WHOLE, Labels, Loss, OverDevices, shard_labels
from .chunks import TokenChunks
from .declaration import OPERATION
from .plan import Plan
from .schedule import Schedule, call_library, call_on, has_cuda_call

# Logits in f32 that are computed at once to find the largest of a row.
ROW_MAX_LOGITS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class LinearLoss(Loss):
    """How a loss is computed: everything but the arrays.

    `options` are those of the whole vocabulary; `schedule` has those of a shard.
    """

    gemms: Gemms
    exchange: OverDevices = WHOLE
    # None for the dense program of XLA, and with auxiliary outputs.
    schedule: Schedule | None = None
    is_dense: bool = False
    # Whether the forward pass makes gradients where the reduction is inside.
    is_fused: bool = False
    # Tokens of a chunk, with auxiliary outputs or of a fused pass over a shard.
    chunk_tokens: int = 0
    # Whether correct is an auxiliary output.
    correct: bool = False
    # The plan of a fused pass with auxiliary outputs on NVIDIA's GPUs, where there is one.
    cuda: Plan | None = None

    @property
    def chunks(self) -> TokenChunks:
        """The chunks of passes that no schedule runs."""
        loss = Loss(self.options, self.checked, self.distribution)
        return TokenChunks(loss, self.gemms, self.chunk_tokens)

    @property
    def checked(self) -> OverDevices:
        """The exchange for cotangents that are already summed over devices."""
        return dataclasses.replace(self.exchange, is_checked=True)

    def has_outputs(self, columns: jax.Array | None) -> bool:
        """Whether there are auxiliary outputs."""
        return self.distribution or columns is not None

    def local(self, operands: Operands) -> tuple[Operands, Labels]:
        """Returns operands with labels as a shard numbers them, varying alike; and the labels."""
        width = operands.weight.shape[self.gemms.vocab_axis]
        labels = shard_labels(self.options, self.exchange, operands.labels, width)
        return Operands(*make_alike(*operands._replace(labels=labels.given))), labels


class Saved(NamedTuple):
    """The residuals of a forward pass beside its operands; None for what it has not."""

    lse: jax.Array
    lse_low: jax.Array
    # Which tokens have no logits but -inf in a shard.
    is_empty: jax.Array | None = None
    entropy: jax.Array | None = None
    # The columns' logits, as they go into the softmax.
    picked: jax.Array | None = None
    # What `Schedule.forward_saving_logits` leaves.
    logits: Any = ()


def compute_outputs(
    loss: LinearLoss, requested: Request, operands: Operands, factors: jax.Array | None = None
) -> TokenOutputs:
    """Returns loss, logps and lse, each [N] in f32, and the auxiliary outputs of each token.

    `weight` and `bias` are those of a shard; labels and columns are those of the whole vocabulary.
    With `factors` [N] in f32, 0 for ignored tokens, the loss is the scalar sum of factor * loss.
    """
    if factors is not None and loss.is_fused:
        operands, columns, factors = alike(loss, operands, requested.columns, factors)
        total, *others = _reduced(loss, operands, columns, factors)
        # There are no logps, which nobody reads.
        return aux_outputs.collect(
            loss.options, requested, operands.labels, (total, total, *others)
        )
    operands, columns = alike(loss, operands, requested.columns)
    if loss.is_dense:
        z, probe = dense_logits(loss.gemms, *operands[:3])
        found = reference.requested_outputs(loss, requested, z, operands.labels, probe)
    else:
        per_token = _per_token(loss, operands, columns)
        found = aux_outputs.collect(loss.options, requested, operands.labels, per_token)
    if factors is None:
        return found
    return found._replace(loss=weighted(found.loss, factors).sum())


def alike(loss: LinearLoss, operands: Operands, *per_token: Any) -> list[Any]:
    """Returns arrays that vary over the same mesh axes within `shard_map`.

    Labels and other arrays of tokens stay as they are if there are shards: the exchanged outputs
    are the same on all devices.
    """
    if loss.exchange.is_whole:
        arrays = make_alike(*operands, *per_token)
        return [Operands(*arrays[:4]), *arrays[4:]]
    local, _ = loss.local(operands)
    return [local._replace(labels=operands.labels), *per_token]


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
    run: Any = partial(linear.opaque, OPERATION) if is_differentiated else operator.call
    if loss.has_outputs(columns):
        shard = run(loss.chunks.read_shard, operands, columns)
        width = operands.weight.shape[loss.gemms.vocab_axis]
        outputs, saved = kernels.merge_shards(loss, width, operands.labels, columns, shard)
        return outputs, Saved(*saved)
    local, labels = loss.local(operands)
    *own, logits = run(partial(_run_schedule, loss, is_differentiated), local)
    outputs = vocab_shards.merge_losses(loss.options, loss.exchange, labels, own)
    is_empty = None if loss.exchange.is_whole else own[2] == -jnp.inf
    return outputs[:3], Saved(*outputs[2:], is_empty, logits=logits)


def _run_schedule(loss: LinearLoss, is_differentiated: bool, operands: Operands) -> tuple[Any, ...]:
    """Returns loss, logps, lse and lse_low, and the logits that are saved for a backward pass."""
    assert loss.schedule is not None
    logits: Any = ()
    if is_differentiated:
        *outputs, lse, lse_low, logits = loss.schedule.forward_saving_logits(operands)
    else:
        *outputs, lse, lse_low = loss.schedule.run("forward", operands)
    if not loss.exchange.is_whole and loss.options.softcap is None:
        lse = vocab_shards.mark_empty(lse, lambda: _find_row_max(loss, operands))
    return *outputs, lse, lse_low, logits


def _find_row_max(loss: LinearLoss, operands: Operands) -> Any:
    """Returns the largest logit [N] of each token."""
    chunk = max(ROW_MAX_LOGITS // operands.weight.shape[loss.gemms.vocab_axis], 1)
    chunks = dataclasses.replace(loss.chunks, tokens=chunk)
    (row_max,), _ = chunks.map_logits(lambda z: [z.max(-1)], operands)
    return row_max


def _per_token_tangents(loss: LinearLoss, residuals: Any, tangents: Any) -> Any:
    """Returns tangents of loss, logps, lse, entropy and the columns' logits, by dense logits."""
    operands, columns, _ = residuals

    def dense(hidden: Any, weight: Any, bias: Any) -> Any:
        z, probe = dense_logits(loss.gemms, hidden, weight, bias)
        return reference.token_outputs(loss, z, operands.labels, columns, probe)

    return linear.tangents_of(dense, operands[:3], tangents)


def vjp(loss: LinearLoss, residuals: Any, cotangents: Any) -> Any:
    """Returns gradients for cotangents of the outputs of `forward`, of which None is zeros.

    Residuals are operands, columns and what `forward` saved. dhidden is a shard's, to be summed
    over devices.
    """
    operands, columns, saved = residuals
    cotangents = [None if one is None else loss.exchange.cotangent(one) for one in cotangents]
    if loss.has_outputs(columns):
        arrays: Any = (operands, tuple(saved[:5]), tuple(cotangents), columns)
        return linear.opaque(OPERATION, loss.chunks.backward, *arrays)
    assert loss.schedule is not None
    given = [jnp.zeros_like(saved.lse) if one is None else one for one in cotangents]
    local, labels = loss.local(operands)
    shard = labels, saved.lse, saved.is_empty, given
    given_shard = vocab_shards.shard_cotangents(loss.options, loss.checked, *shard)
    # A loop's carry must vary over the same mesh axes before and after a step.
    flat, tree = jax.tree.flatten((local, saved[:2], given_shard, saved.logits))
    arrays = jax.tree.unflatten(tree, make_alike(*flat))
    return linear.opaque(OPERATION, loss.schedule.backward_with_logits, *arrays)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _reduced(
    loss: LinearLoss, operands: Operands, columns: jax.Array | None, factors: jax.Array
) -> tuple[jax.Array, ...]:
    """Returns the reduced loss, lse, and the auxiliary outputs of `forward`."""
    outputs, _ = forward(loss, operands, columns, is_differentiated=False)
    losses, _, *others = outputs
    return weighted(losses, factors).sum(), *others


@partial(_reduced.defjvp, symbolic_zeros=True)
def _reduced_jvp(loss: LinearLoss, primals: Any, tangents: Any) -> tuple[Any, Any]:
    operands, columns, factors = primals
    moving = [linear.given(one) for one in (*tangents[0][:3], tangents[2])]
    needs_losses = moving[-1] is not None
    losses, saved, correct, gradients = fused(loss, *primals, needs_losses=needs_losses)
    floats = [weighted(losses, factors).sum(), saved.lse]
    floats += [one for one in (saved.entropy, saved.picked) if one is not None]
    # With a cotangent of another output, which is rare, `_reduced_vjp` recomputes the logits.
    is_shard = not loss.exchange.is_whole
    needs_operands = loss.options.every_token or loss.has_outputs(columns) or is_shard
    recompute = (operands, columns, factors, saved) if needs_operands else None
    counted = countable(losses, factors) if needs_losses else None
    residuals = gradients, counted, floats[1:], recompute
    rules = Bound(_reduced_tangents, loss), Bound(_reduced_vjp, loss)
    found = linear.bind(*rules, residuals, moving, floats)
    outputs = *floats, *correct
    return outputs, aux_outputs.with_correct(loss.distribution, outputs, found)


def _reduced_tangents(loss: LinearLoss, residuals: Any, tangents: Any) -> Any:
    gradients, losses, others, recompute = residuals
    *moving, factors_tangent = tangents
    has_moving = any(one is not None for one in moving)
    terms = [] if factors_tangent is None else [linear.along([losses], [factors_tangent])]
    if has_moving:
        # Shards have gradients of their own columns, and shares of dhidden.
        terms += loss.exchange.sum(linear.along(gradients, moving))
    loss_tangent = sum(terms[1:], terms[0])
    if recompute is None or not has_moving:
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
        return *scale_gradients(gradients, loss.exchange.cotangent(dloss)), dfactors
    operands, columns, factors, saved = recompute
    given = (dloss * factors, None, *others)
    return *vjp(loss, (operands, columns, saved), given), dfactors


def fused(
    loss: LinearLoss,
    operands: Operands,
    columns: jax.Array | None,
    factors: jax.Array,
    *,
    needs_losses: bool = False,
) -> tuple[jax.Array, Saved, Any, Gradients]:
    """Returns losses [N], residuals, [correct] or [], and gradients for the losses' `factors`.

    `needs_losses` is whether losses of tokens whose factor is 0 are read too.
    """
    if not loss.has_outputs(columns):
        run: Callable[..., Any] = loss.chunks.fused
        if loss.exchange.is_whole:
            assert loss.schedule is not None
            run = partial(loss.schedule.fused, needs_losses=needs_losses)
        losses, *saved, gradients = linear.opaque(OPERATION, run, operands, factors)
        return losses, Saved(*saved), [], gradients
    default = Bound(_fused_outputs, loss)
    found = bind_deferred(_fused_pass, default, operands, factors, columns, loss=loss)
    losses, lse, lse_low, *others, gradients = found
    entropy = others.pop(0) if loss.distribution else None
    picked = None if columns is None else others.pop(0)
    return losses, Saved(lse, lse_low, None, entropy, picked), others, gradients


def _fused_outputs(loss: LinearLoss, *arrays: Any) -> Any:
    """Returns `TokenChunks.fused` of operands, factors and columns."""
    by_chunks = Bound(TokenChunks.fused, loss.chunks)
    name = "distribution_fused" if loss.distribution else "fused"
    if loss.cuda is None or not has_cuda_call(name):
        return by_chunks(*arrays)
    return call_on("cuda", Bound(_fused_on_cuda, loss, name), by_chunks, *arrays)


def _fused_on_cuda(
    loss: LinearLoss, name: str, operands: Operands, factors: jax.Array, columns: jax.Array | None
) -> Any:
    """Returns what `_fused_outputs` does, by one call of the library's.

    No call has logits of given columns: these are sums of their own, of K rows of the weight a
    token.
    """
    # Tokens without a factor have log-probabilities too.
    options = dataclasses.replace(loss.options, every_token=True)
    fixed: Any = options, loss.gemms.vocab_axis, loss.cuda
    more: Any = {"correct": loss.correct} if loss.distribution else {}
    *found, gradients = call_library("cuda", name, *fixed, operands, factors, **more)
    correct = []
    if loss.distribution:
        correct = [aux_outputs.is_correct(options, operands.labels, found.pop())]
    if columns is not None:
        found.append(aux_outputs.gather_column_logits(options, *operands[:3], columns))
    return *found, *correct, gradients


def _choose_fused_pass(
    ctx: Any, *, loss: LinearLoss, default: Any, tree: Any, keep: Any, **_: Any
) -> Any:
    operands, *_ = jax.tree.unflatten(tree, ctx.avals_in)
    # Gradients come last: of hidden, weight and bias.
    count = len(default.traced.out_avals) - len(jax.tree.leaves(operands[:3]))
    return (ctx, partial(_forward_only, loss)) if max(keep) < count else None


def _forward_only(loss: LinearLoss, operands: Operands, _: jax.Array, columns: Any) -> Any:
    """Returns what `_fused_outputs` does, but gradients: what takes these recomputes them."""
    (losses, _, lse, *others), saved = forward(loss, operands, columns, is_differentiated=False)
    return losses, lse, saved.lse_low, *others


_fused_pass = make_primitive(
    OPERATION, "xentile_linear_cross_entropy_with_outputs", _choose_fused_pass
)
