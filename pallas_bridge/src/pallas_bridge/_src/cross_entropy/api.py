"""Cross-entropy over logits: what users call."""

import dataclasses
from typing import Any, Literal, NamedTuple, Unpack, get_args, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .. import gathering, one_program
from ..arrays import wide
from ..bound import Bound
from ..checks import REFERENCE_TAKES_OTHERS, as_array, cast_hint, check_flag, check_word
from ..implementations import choose
from ..keywords import hinted_with
from ..losses.aux_outputs import Request, TokenOutputs, check_columns
from ..losses.options import (
    AxisName,
    LossKeywords,
    Options,
    Reduction,
    check_logits,
    check_options,
    check_tokens,
    narrow_labels,
)
from ..losses.reduction import token_factors, weighted, weighted_sum
from ..losses.traced import Coefficients, check_with_mapping, map_logits
from ..operation import Implementation
from .declaration import OPERATION
from .sharding import Layout, find_layout


class _Keywords(LossKeywords, total=False):
    """The options that both functions have; `_prepare` and `check_options` have their defaults."""

    donate_logits: bool
    axis_name: AxisName | None


class _Arrays(NamedTuple):
    """The checked arrays and options of a loss."""

    logits: jax.Array
    labels: jax.Array
    weights: jax.Array | None
    options: Options
    request: Request
    layout: Layout
    coefficients: Coefficients

    def per_token(self, *indices: int, factors: jax.Array | None = None) -> TokenOutputs:
        """Returns outputs of tokens, at least those of `indices` and what is requested.

        `factors` are what losses are going to be multiplied by.
        """
        run, coefficients = Bound(Layout.per_token, self.layout, self.options), self.coefficients
        results = *indices, *coefficients.indices, *self.request.indices
        arrays = self.request, self.logits, self.labels
        outputs = TokenOutputs(*one_program.run(run, *arrays, results=results))
        loss = coefficients.loss(self.options, self.labels, outputs, factors)
        return outputs._replace(loss=loss)


def _prepare(
    logits: ArrayLike,
    labels: ArrayLike,
    weights: ArrayLike | None,
    columns: ArrayLike | None,
    requested: Request,
    *,
    label_smoothing: float | jax.Array = 0.0,
    z_loss: float | jax.Array = 0.0,
    softcap: float | jax.Array | None = None,
    temperature: float | jax.Array = 1.0,
    donate_logits: bool = False,
    implementation: Implementation | None = None,
    axis_name: AxisName | None = None,
    **others: Any,
) -> _Arrays:
    """Returns checked arrays and options.

    Raises:
        TypeError: logits that no kernel reads.
    """
    chosen = choose(OPERATION, implementation)
    logits, labels = as_array("logits", logits, "[.., T, V]"), as_array("labels", labels, "[.., T]")
    weights = None if weights is None else as_array("weights", weights, "[.., T]")
    check_logits(logits)
    check_tokens(labels, weights, "logits", logits)
    if chosen != "reference" and logits.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise TypeError(
            f"logits have dtype {logits.dtype}; it must be bfloat16, float16 or float32"
            f"{cast_hint(logits)}{REFERENCE_TAKES_OTHERS}"
        )
    coefficients = Coefficients(label_smoothing, z_loss)
    options, mapping = check_with_mapping(
        softcap,
        temperature,
        **coefficients.known,
        **others,
        every_token=requested.lse,
        entropy=requested.entropy,
        correct=requested.correct,
        donate_logits=check_flag("donate_logits", donate_logits),
        implementation=implementation,
    )
    if mapping is not None:
        # Of the gradient, the mapped logits are an operand; others are computed again.
        mapped: jax.Array = jax.checkpoint(map_logits)(wide(logits), *mapping)
        logits = mapped
    options = coefficients.for_kernels(options)
    labels, options = narrow_labels(labels, options)
    weights = None if weights is None else weights.astype(jnp.float32)
    layout = find_layout(logits, axis_name)
    if layout is not None:
        labels = layout.place(labels)
        weights = None if weights is None else layout.place(weights)
    elif chosen != "reference":
        logits = gathering.watched(OPERATION, "logits", logits, -1, calls_ask=True)
    columns = check_columns(OPERATION, columns, labels.shape)
    request = dataclasses.replace(requested, columns=columns)
    return _Arrays(logits, labels, weights, options, request, layout or Layout(), coefficients)


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


@hinted_with(check_options, _prepare)
def cross_entropy(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    reduction: Reduction = "mean",
    weights: ArrayLike | None = None,
    return_lse: bool = False,
    return_entropy: bool = False,
    return_correct: bool = False,
    columns: ArrayLike | None = None,
    **options: Unpack[_Keywords],
) -> jax.Array | tuple[jax.Array, ...]:
    """Cross-entropy of logits against labels, reduced over all tokens.

    For a token with logits z (f32, after softcap and temperature) and label y, with
    lse = logsumexp(z):

        loss = (1 - e) * (lse - z_y) + e * (lse - mean(z)) + z_loss * lse^2,  e = label_smoothing

    (label smoothing: Szegedy et al., 2016; z-loss: de Brébisson and Vincent, 2016, and Chowdhery et
    al., 2022). Sums are taken in f32 or wider, whatever the dtype of logits. It is differentiable
    in both modes with respect to `logits` and `weights`.

    A token whose label is `ignore_index` (an ignored token), or whose weight is 0, adds nothing to
    the loss, and its gradient is 0 whatever its logits. A label outside [0, V) that is not
    `ignore_index` makes the loss and the token's gradient NaN. Logits of -inf are masked entries
    with gradient 0.

    Args:
      logits: [.., T, V] in bfloat16, float16 or float32, with any V of at least 1.
      labels: [.., T], of any integer dtype.
      reduction: "sum" is the sum of weight * loss, "mean" divides it by the sum of the weights of
        tokens that are not ignored (0 if that is 0), "none" gives weight * loss of every token.
      weights: [.., T], or a mask of that shape; ones where None.
      ignore_index: the label of ignored tokens.
      label_smoothing: the share of the target spread evenly over the vocabulary, in [0, 1]. It and
        `z_loss` may be traced scalars, with derivatives, which are not checked. The gradient of a
        sum or a mean then reads logits once more, as that of reduction "none" always does.
      z_loss: the weight of lse^2, at least 0.
      softcap: c > 0 replaces z by c * tanh(z / c) (Gemma Team, 2024); None for none. It and
        `temperature` may be traced scalars likewise; XLA then writes the logits after both in f32,
        which kernels read.
      temperature: t > 0 divides z, after softcap (Hinton et al., 2015), for loss and all other
        outputs. On GPUs the gradient of a mean then reads logits once more.
      return_lse: whether to return lse, also that of ignored tokens.
      return_entropy: whether to return the entropy of every token's distribution, in nats
        (Shannon, 1948): lse - sum_v p_v z_v, with the gradient -p_v (z_v - lse + entropy). It is 0
        for ignored tokens.
      return_correct: whether to return which tokens have their largest logit at the label, the
        first of equal ones. It has no derivative, and is False for ignored tokens.
      columns: [.., T, K] with K to 128, of any integer dtype, to return z_c - lse of these columns;
        None for none. It is 0 for ignored tokens, and NaN for a column outside [0, V), with the
        gradient of -lse alone.
      block_size: vocabulary columns of a tile; None for the tuned number.
      time_block: tokens of a tile; None for the tuned number.
      donate_logits: whether the gradient takes the place of the logits in memory, which halves the
        peak. Where something else reads the logits later (a metric, say), XLA copies them first,
        which is slower. An argument of `jax.jit` has to be donated there as well.
      implementation: "custom_call" (kernels of the library), "pallas" (kernels for TPUs, for which
        `block_size` is a multiple of 128 and `time_block` of 8, or 16 if logits are bfloat16;
        float16 is not taken), "reference" (plain JAX, compiled by XLA), or None for what
        `pallas_bridge.info()` says of the platform. It is never replaced by another in silence.
      axis_name: the mesh axis that the vocabulary is sharded over, or several, the slowest first;
        None where it is whole. Within `jax.shard_map` logits are then a device's own columns, and
        labels count the columns of all devices. Elsewhere the axes are those of the mesh; explicit
        axes need not be named, nor axes that XLA finds (docs/how-to/shard.md). Logits stay on their
        devices, which exchange a few scalars a token.

    Returns:
      The loss in float32, a scalar or [.., T] for "none". Where more is requested, a tuple of the
      loss and, in this order, lse [.., T] and entropy [.., T] in float32, correct [.., T] of
      booleans, the columns' log-probabilities [.., T, K] in float32. Under `jax.jit` the pass that
      makes loss and gradient makes those that are not differentiated, too; the gradient of the
      entropy or of the log-probabilities reads the logits once more.

    Raises:
      TypeError: a dtype that is not taken, or an option that is no number or is traced.
      ValueError: shapes that disagree, an option outside its range, or an axis that the mesh does
        not have or that does not divide the vocabulary.

    >>> logits, labels = jnp.zeros((4, 50257)), jnp.array([0, 1, 2, -100])
    >>> print(cross_entropy(logits, labels).round(4))  # ln 50257; -100 is ignored
    10.8249
    """
    check_word("reduction", reduction, get_args(Reduction))
    requested = Request.checked(return_lse, return_entropy, return_correct)
    arrays = _prepare(logits, labels, weights, columns, requested, **options)
    request, weights = arrays.request, arrays.weights
    if reduction == "none":
        outputs = arrays.per_token(0, factors=weights)
        loss = outputs.loss if weights is None else weighted(outputs.loss, weights)
        return _join(loss, *request.select(outputs))
    factors = token_factors(arrays.options, reduction, arrays.labels, weights)
    if request.any or arrays.coefficients.any_traced:
        outputs = arrays.per_token(0, factors=factors)
        return _join(weighted_sum(outputs.loss, factors), *request.select(outputs))
    run = Bound(Layout.reduced, arrays.layout, arrays.options)
    results = (0, 1) if return_lse else (0,)
    loss, lse = one_program.run(run, arrays.logits, arrays.labels, factors, results=results)
    return (loss, lse) if return_lse else loss


@hinted_with(check_options, _prepare)
def cross_entropy_per_token(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    return_lse: bool = False,
    return_entropy: bool = False,
    return_correct: bool = False,
    columns: ArrayLike | None = None,
    **options: Unpack[_Keywords],
) -> tuple[jax.Array, ...]:
    """Loss and log-probability of the label for every token.

    The arguments are those of `cross_entropy`. Both outputs, and lse, may be used and
    differentiated in any combination; the gradient reads the logits once more than that of a mean.

    Returns:
      (per_token_loss, per_token_logps), each [.., T] in float32, and after them what else is
      requested, as `cross_entropy` returns it. per_token_logps is z_y - lse, without smoothing or
      z-loss; both are 0 for ignored tokens.

    Raises:
      TypeError: a dtype that is not taken, or an option that is no number or is traced.
      ValueError: shapes that disagree, or an option outside its range.
    """
    requested = Request.checked(return_lse, return_entropy, return_correct)
    arrays = _prepare(logits, labels, None, columns, requested, **options)
    outputs = arrays.per_token(0, 1)
    return outputs.loss, outputs.logps, *arrays.request.select(outputs)


def _join(loss: jax.Array, *more: jax.Array) -> jax.Array | tuple[jax.Array, ...]:
    """Returns the loss alone, or a tuple with what else is requested."""
    return (loss, *more) if more else loss
