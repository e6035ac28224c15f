"""Cross-entropy over logits: what users call."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .. import gathering, one_program
from ..bound import Bound
from ..checks import as_array
from ..implementations import choose
from ..operation import Implementation
from . import custom_call, parts, reference
from .declaration import OPERATION
from .known import Asked, check_columns
from .options import Options, check_arrays, check_options, narrow_labels
from .reduction import token_factors, weighted, weighted_sum

Reduction = Literal["none", "mean", "sum"]
AxisName = str | Sequence[str]

# Kernels in Pallas are another lowering of the same calls.
IMPLEMENTATIONS = {"custom_call": custom_call, "pallas": custom_call, "reference": reference}


class _Keywords(TypedDict, total=False):
    """The options that both functions have."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float | None
    temperature: float
    block_size: int | None
    time_block: int | None
    donate_logits: bool
    implementation: Implementation | None
    axis_name: AxisName | None


@overload
def cross_entropy(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    reduction: Reduction = ...,
    weights: ArrayLike | None = ...,
    return_lse: Literal[False] = ...,
    **options: Unpack[_Keywords],
) -> jax.Array: ...


@overload
def cross_entropy(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    reduction: Reduction = ...,
    weights: ArrayLike | None = ...,
    return_lse: Literal[True],
    **options: Unpack[_Keywords],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def cross_entropy(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    reduction: Reduction = ...,
    weights: ArrayLike | None = ...,
    return_lse: bool = ...,
    return_entropy: bool = ...,
    return_correct: bool = ...,
    columns: ArrayLike | None = ...,
    **options: Unpack[_Keywords],
) -> Any: ...


def cross_entropy(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    reduction: Reduction = "mean",
    weights: ArrayLike | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    return_lse: bool = False,
    return_entropy: bool = False,
    return_correct: bool = False,
    columns: ArrayLike | None = None,
    block_size: int | None = None,
    time_block: int | None = None,
    donate_logits: bool = False,
    implementation: Implementation | None = None,
    axis_name: AxisName | None = None,
) -> jax.Array | tuple[jax.Array, ...]:
    """Cross-entropy of logits against labels, reduced over all tokens.

    For a token with logits z (f32, after softcap and temperature) and label y, with
    lse = logsumexp(z):

        loss = (1 - e) * (lse - z_y) + e * (lse - mean(z)) + z_loss * lse^2,  e = label_smoothing

    (label smoothing: Szegedy et al., 2016; z-loss: de Brébisson and Vincent, 2016, and Chowdhery et
    al., 2022). Sums are taken in f32 or wider, whatever the dtype of logits. It is differentiable
    in both modes with respect to `logits` and `weights`.

    A token whose label is `ignore_index`, or whose weight is 0, takes no part: it adds nothing, and
    its gradient is 0 whatever its logits. A label outside [0, V) that is not `ignore_index` makes
    the loss and the token's gradient NaN. Logits of -inf are masked entries with gradient 0.

    Args:
      logits: [.., T, V] in bfloat16, float16 or float32; V is any number, a multiple of nothing.
      labels: [.., T], of any integer dtype.
      reduction: "mean" divides the sum of weight * loss by the sum of weights of tokens that take
        part (0 if there is none), "sum" is that sum, "none" gives weight * loss of every token.
      weights: [.., T], or a mask of that shape; ones where None.
      ignore_index: the label of tokens that take no part.
      label_smoothing: the share of the target spread evenly over the vocabulary, in [0, 1].
      z_loss: the weight of lse^2, at least 0.
      softcap: c > 0 replaces z by c * tanh(z / c) (Gemma Team, 2024); None for none.
      temperature: t > 0 divides z, after softcap (Hinton et al., 2015): everything is of the
        distribution at that temperature. On GPUs a mean's gradient then reads logits once more.
      return_lse: whether to return lse too, that of ignored tokens included.
      return_entropy: whether to return the entropy of every token's distribution, in nats
        (Shannon, 1948): lse - sum_v p_v z_v, with the gradient -p_v (z_v - lse + entropy). It is 0
        for ignored tokens.
      return_correct: whether to return which tokens have the largest logit at their label; of
        equal ones the first column counts. It has no derivative, and is False for ignored tokens.
      columns: [.., T, K] with K to 128, of any integer dtype, to return z_c - lse of these columns
        too; None for none. It is 0 for ignored tokens, and NaN for a column outside [0, V), with
        the gradient of -lse alone.
      block_size: vocabulary columns of a tile; None for the tuned number.
      time_block: tokens of a tile; None for the tuned number.
      donate_logits: whether the gradient takes the place of the logits in memory, which halves the
        peak. Where something else reads the logits later (a metric, say), XLA copies them first:
        never wrong, and slower. An argument of `jax.jit` has to be donated there as well.
      implementation: "custom_call" (kernels of the library), "pallas" (kernels for TPUs, for which
        `block_size` is a multiple of 128 and `time_block` of 8, or 16 if logits are bfloat16;
        float16 is not taken), "reference" (the dense program of XLA), or None for what
        `pallas_bridge.info()` says of the platform. It is never replaced by another in silence.
      axis_name: the mesh axis that the vocabulary is sharded over, or several, the slowest first;
        None where it is whole. Within `jax.shard_map` logits are then a device's own columns, and
        labels count those of all. Elsewhere the axes are those of the mesh; it need not be said
        of explicit ones, nor where XLA can tell (docs/how-to/shard.md). Logits stay where they are:
        devices exchange a few numbers a token.

    Returns:
      The loss in float32, a scalar or [.., T] for "none"; where more is asked for, a tuple of the
      loss and of it, in this order: lse [.., T] and entropy [.., T] in float32, correct [.., T] of
      booleans, the columns' log-probabilities [.., T, K] in float32. Under `jax.jit` those that are
      not differentiated come of the pass that makes loss and gradient; where the entropy or the
      log-probabilities are, the gradient takes one more reading of the logits.

    Raises:
      TypeError: a dtype that is not taken, or an option that is no number or is traced.
      ValueError: shapes that disagree, an option outside its range, or an axis that is not there
        or does not divide the vocabulary.

    >>> logits, labels = jnp.zeros((4, 50257)), jnp.array([0, 1, 2, -100])
    >>> print(cross_entropy(logits, labels).round(4))  # ln 50257; -100 is ignored
    10.8249
    """
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}; it must be 'none', 'mean' or 'sum'")
    logits, labels, weights, options, module = _prepare(
        logits,
        labels,
        weights,
        implementation,
        axis_name,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
        temperature=temperature,
        block_size=block_size,
        time_block=time_block,
        every_token=return_lse,
        entropy=return_entropy,
        correct=return_correct,
        donate_logits=donate_logits,
    )
    columns = check_columns(columns, labels.shape)
    asked = Asked(return_lse, return_entropy, return_correct, columns)
    if asked.any:
        known = one_program.run(Bound(module.known_of, options), asked, logits, labels)
        if reduction != "none":
            factors = token_factors(options, reduction, labels, weights)
            return weighted_sum(known.loss, factors), *asked.of(known)
        loss = known.loss if weights is None else weighted(known.loss, weights)
        return loss, *asked.of(known)
    if reduction == "none":
        run, results = Bound(module.per_token, options), (0, 2) if return_lse else (0,)
        loss, _, lse = one_program.run(run, logits, labels, results=results)
        if weights is not None:
            loss = weighted(loss, weights)
    else:
        factors = token_factors(options, reduction, labels, weights)
        run, results = Bound(module.reduced, options), (0, 1) if return_lse else (0,)
        loss, lse = one_program.run(run, logits, labels, factors, results=results)
    return (loss, lse) if return_lse else loss


@overload
def cross_entropy_per_token(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[_Keywords],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def cross_entropy_per_token(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    return_lse: Literal[True],
    **options: Unpack[_Keywords],
) -> tuple[jax.Array, jax.Array, jax.Array]: ...


@overload
def cross_entropy_per_token(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    return_lse: bool = ...,
    return_entropy: bool = ...,
    return_correct: bool = ...,
    columns: ArrayLike | None = ...,
    **options: Unpack[_Keywords],
) -> tuple[jax.Array, ...]: ...


def cross_entropy_per_token(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    return_lse: bool = False,
    return_entropy: bool = False,
    return_correct: bool = False,
    columns: ArrayLike | None = None,
    block_size: int | None = None,
    time_block: int | None = None,
    donate_logits: bool = False,
    implementation: Implementation | None = None,
    axis_name: AxisName | None = None,
) -> tuple[jax.Array, ...]:
    """Loss and log-probability of the label for every token.

    The arguments are those of `cross_entropy`. Both outputs, and lse, may be used and
    differentiated in any combination; the gradient costs one more reading of the logits than that
    of a mean.

    Returns:
      (per_token_loss, per_token_logps), each [.., T] in float32, and after them what else is asked
      for, as `cross_entropy` has it. per_token_logps is z_y - lse, without smoothing or z-loss;
      both are 0 for ignored tokens.

    Raises:
      TypeError: a dtype that is not taken, or an option that is no number or is traced.
      ValueError: shapes that disagree, or an option outside its range.
    """
    logits, labels, _, options, module = _prepare(
        logits,
        labels,
        None,
        implementation,
        axis_name,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
        temperature=temperature,
        block_size=block_size,
        time_block=time_block,
        every_token=return_lse,
        entropy=return_entropy,
        correct=return_correct,
        donate_logits=donate_logits,
    )
    columns = check_columns(columns, labels.shape)
    asked = Asked(return_lse, return_entropy, return_correct, columns)
    if asked.any:
        known = one_program.run(Bound(module.known_of, options), asked, logits, labels)
        return known.loss, known.logps, *asked.of(known)
    run, results = Bound(module.per_token, options), (0, 1, 2) if return_lse else (0, 1)
    loss, logps, lse = one_program.run(run, logits, labels, results=results)
    return (loss, logps, lse) if return_lse else (loss, logps)


def _prepare(
    logits: ArrayLike,
    labels: ArrayLike,
    weights: ArrayLike | None,
    implementation: Implementation | None,
    axis_name: AxisName | None,
    **options: Any,
) -> tuple[jax.Array, jax.Array, jax.Array | None, Options, Any]:
    """Returns checked arrays and options, and the module of the implementation."""
    chosen = choose(OPERATION, implementation)
    module: Any = IMPLEMENTATIONS[chosen]
    logits, labels = as_array("logits", logits, "[.., T, V]"), as_array("labels", labels, "[.., T]")
    weights = None if weights is None else as_array("weights", weights, "[.., T]")
    check_arrays(logits, labels, weights)
    module.check_dtype(logits)
    checked = dataclasses.replace(check_options(**options), implementation=implementation)
    labels, checked = narrow_labels(labels, checked)
    weights = None if weights is None else weights.astype(jnp.float32)
    cut = parts.find(module, logits, axis_name)
    if cut is not None:
        module, labels = cut, cut.place(labels)
        weights = None if weights is None else cut.place(weights)
    elif chosen != "reference":
        logits = gathering.watched(OPERATION, "logits", logits, -1, calls_ask=True)
    return logits, labels, weights, checked, module
