"""The functions of linear cross-entropy that users call."""

from typing import Any, Literal, Unpack, get_args, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .. import pallas
from ..checks import as_array, check_flag, check_operand, check_word
from ..chunk_loops import make_alike
from ..keywords import hinted, hinted_with
from ..logits_gemms import Gemms, Operands, find_vocab_axis, promote_operands
from ..losses.aux_outputs import Request
from ..losses.options import AxisName, LossKeywords, check_options, check_tile
from ..losses.reduction import token_factors, weighted
from . import derivative, schedule
from .call import Call
from .plan import Plan
from .schedule import Planner

Reduction = Literal["none", "mean", "sum"]


class _Keywords(LossKeywords, total=False):
    """The options that all functions have; `Call` and `check_options` have their defaults."""

    bias: ArrayLike | None
    vocab_axis: int | None
    temperature: float | jax.Array
    max_scratch_bytes: int | None
    batch_invariant: bool


class _ShardedKeywords(_Keywords, total=False):
    """The options of functions whose weight may be sharded; `Call.place` has the default."""

    axis_name: AxisName | None


@overload
def linear_cross_entropy(
    hidden: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    *,
    reduction: Reduction = ...,
    weights: ArrayLike | None = ...,
    return_lse: Literal[False] = ...,
    **options: Unpack[_ShardedKeywords],
) -> jax.Array: ...


@overload
def linear_cross_entropy(
    hidden: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    *,
    reduction: Reduction = ...,
    weights: ArrayLike | None = ...,
    return_lse: Literal[True],
    **options: Unpack[_ShardedKeywords],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def linear_cross_entropy(
    hidden: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    *,
    reduction: Reduction = ...,
    weights: ArrayLike | None = ...,
    return_lse: bool = ...,
    return_entropy: bool = ...,
    return_correct: bool = ...,
    columns: ArrayLike | None = ...,
    **options: Unpack[_ShardedKeywords],
) -> Any: ...


@hinted_with(check_options, Call.__init__, Call.place)
def linear_cross_entropy(
    hidden: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    *,
    reduction: Reduction = "mean",
    weights: ArrayLike | None = None,
    return_lse: bool = False,
    return_entropy: bool = False,
    return_correct: bool = False,
    columns: ArrayLike | None = None,
    **options: Unpack[_ShardedKeywords],
) -> jax.Array | tuple[jax.Array, ...]:
    """Cross-entropy of the logits hidden x weight + bias, which are never in memory at once.

    The loss, its options and its special tokens are those of `cross_entropy`. Logits are sums in
    f32, the bias included, and never rounded. Their gradient, or their softmax, is rounded once, to
    be a GEMM's operand; gradients are sums in f32, rounded once, to the dtype of their operand.
    Both modes differentiate it with respect to `hidden`, `weight`, `bias` and `weights`. Forward
    mode of per-token outputs, of lse, and of a loss whose plan recomputes logits, is that of XLA's
    dense program, with all logits in memory.

    Axes of tokens may be symbolic in a program that is exported. Its chunks have at most 512
    tokens, the last one padded, and XLA's own program runs on every platform, without a custom
    call, unless `implementation` names the kernels of the library.

    `hidden` and `weight` may differ in dtype. Of f32 beside 16 bits GEMMs take the narrower dtype,
    to which the wider array is rounded first, and the gradient of an array in f32 is its sums,
    never rounded. bfloat16 beside float16 is promoted to float32, as by `jnp`, with GEMMs of that.

    Tokens that are ignored or whose factor is 0 add 0 to every gradient, whatever their hidden
    state (on GPUs, where logits are recomputed, one that is not finite makes dweight NaN). A NaN in
    the hidden state of another token makes its loss, its row of dhidden and dweight NaN; a NaN in
    the weight reaches every token that counts.

    With a reduction the forward pass computes gradients too: three GEMMs of N x D x V, the fewest
    there are. With reduction "none", for float16, and where memory is short, the backward pass
    recomputes logits: four GEMMs, fewer on CPUs, where the forward pass saves the logits there is
    memory for. On TPUs kernels recompute logits a tile at a time, and hold next to nothing.
    `explain` says which, and how much memory it takes.

    Args:
      hidden: [.., D] in bfloat16, float16 or float32; N is the product of the leading axes.
      weight: [V, D] or [D, V], in any of these dtypes.
      labels: [..], of any integer dtype.
      bias: [V], of any float dtype, or None.
      reduction: "mean", "sum" or "none", as for `cross_entropy`.
      weights: [..], or a mask of that shape; ones where None.
      vocab_axis: which axis of `weight` is V, 0 or 1; required where V = D.
      ignore_index: the label of tokens that take no part.
      label_smoothing: the share of the target spread evenly over the vocabulary, in [0, 1]. It and
        `z_loss` may be traced scalars, with derivatives, which are not checked; the backward pass
        of a sum or a mean then recomputes logits, as that of reduction "none" does.
      z_loss: the weight of lse^2, at least 0.
      softcap: c > 0 replaces z by c * tanh(z / c); None for none. It may be a traced scalar, with
        a derivative: XLA's program then runs over chunks of tokens, and recomputes their logits in
        the backward pass.
      temperature: t > 0 divides z, after softcap, as for `cross_entropy`. It may be a traced
        scalar, likewise with a softcap; without one, `hidden` and `bias` are divided by it, and
        `hidden` is rounded to its dtype.
      return_lse: whether to return lse too, that of ignored tokens included.
      return_entropy: whether to return the entropy of every token's distribution.
      return_correct: whether to return which tokens have the largest logit at their label.
      columns: [.., K] with K to 128, to return the log-probabilities of these columns too; these
        outputs are those of `cross_entropy`. With a reduction the pass that computes gradients
        computes all three, under `jax.jit` and where nothing but the loss is differentiated
        (columns, of a weight [V, D]). Otherwise logits are computed a chunk of tokens at a time,
        and recomputed in the backward pass: four GEMMs.
      max_scratch_bytes: bytes that may be held beyond operands and results. None stands for those
        of chunks of 4096 tokens: 4096 * V logits in f32, with their gradient in 16 bits if operands
        have 16, and, for more tokens than that and a weight of 16 bits, V * D sums in f32. On GPUs
        logits have the dtype of operands, and 256 MiB is the least. Where the number of tokens is
        symbolic (`jax.export`) it limits what does not grow with them, and None stands for chunks
        of 512; in addition there are 32 bytes a token, and hidden states and their gradient once
        more, padded to whole chunks.
      block_size: vocabulary columns of a tile; None for the tuned number. On CPUs it is of a block
        of columns, narrower where `max_scratch_bytes` has no room for it; on TPUs of both kernels,
        a multiple of 128, fewer where VMEM has no room; on GPUs, and with chunks of XLA's, of the
        kernels over logits. It changes the order of sums, and so their last bits.
      time_block: tokens of a tile, likewise; on CPUs those of a task, which change no bit.
      implementation: "reference" for the dense program of XLA; else as for `cross_entropy`.
      axis_name: the mesh axis that the vocabulary of `weight` and `bias` is sharded over, or
        several; as for `cross_entropy`. The weight stays where it is, and so does its gradient;
        that of `hidden` is summed over devices.
      batch_invariant: whether a token's loss, log-probabilities and row of dhidden have the same
        bits however many other tokens a device has, for equal cotangents. GEMMs are XLA's then, of
        512 tokens each, the last ones padded, so that no library orders sums by their number; one
        token takes as long as 512. On GPUs it holds within a process, and a vocabulary that is no
        multiple of 32 has no kernels at all.

    Returns:
      The loss in float32, a scalar or [..] for "none"; with auxiliary outputs, a tuple of the loss
      and of those requested, in this order: lse [..] and entropy [..] in float32, correct [..] of
      booleans, the columns' log-probabilities [.., K] in float32.

    Raises:
      TypeError: a dtype that is not taken, or an option that is no number or is traced.
      ValueError: shapes that disagree, an option outside its range, or a budget below the least.

    >>> hidden, weight = jnp.ones((4, 8)), jnp.zeros((50257, 8))
    >>> print(linear_cross_entropy(hidden, weight, jnp.arange(4)).round(4))  # ln 50257
    10.8249
    """
    check_word("reduction", reduction, get_args(Reduction))
    axis_name = options.pop("axis_name", None)
    call = Call(hidden, weight, labels, weights, return_lse, **options)
    requested = Request.checked(return_lse, return_entropy, return_correct)
    requested = call.place(requested, columns, axis_name=axis_name)
    factors = call.weights
    if reduction != "none":
        factors = token_factors(call.options, reduction, call.labels, call.weights)
    if reduction != "none" and not call.coefficients.any_traced and call.mapping is None:
        found = call.outputs(requested, factors)
        loss = found.loss
    else:
        found = call.outputs(requested)
        loss = call.coefficients.loss(call.options, call.labels, found, factors)
        loss = loss if factors is None else weighted(loss, factors)
        loss = loss if reduction == "none" else loss.sum()
    outputs = requested.select(found)
    return (loss, *outputs) if outputs else loss


@hinted_with(check_options, Call.__init__)
def linear_cross_entropy_value_and_grad(
    hidden: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    *,
    dweight_sums: ArrayLike,
    reduction: Literal["mean", "sum"] = "mean",
    weights: ArrayLike | None = None,
    **options: Unpack[_Keywords],
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Loss and gradients of a microbatch, with the weight's accumulated in f32.

    Equivalent to `jax.value_and_grad` of `linear_cross_entropy` and `dweight_sums + dweight`, where
    dweight is not rounded. On GPUs GEMMs add to the sums in place, so that a step takes no other
    array of the weight's size: donate them (`jax.jit(.., donate_argnames=..)`) or carry them
    through `jax.lax.scan`. It cannot be differentiated.

    The other arguments are those of `linear_cross_entropy`. `dweight_sums` is the sums so far, in
    float32 and of the shape of `weight`; zeros at first.

    Returns:
      (loss, (dhidden, dweight_sums)), or (loss, (dhidden, dweight_sums, dbias)) with a bias.

    Raises:
      TypeError: sums that are not float32, a dtype that is not taken, or an option that is no
        number.
      ValueError: shapes that disagree, an option outside its range, or a budget below the least.
    """
    check_word("reduction", reduction, ("mean", "sum"))
    hidden = as_array("hidden", hidden, "[.., D]")
    call = Call(hidden, weight, labels, weights, takes_traced=False, **options)
    operands = call.flat
    factors = token_factors(call.options, reduction, call.labels, call.weights).reshape(-1)
    sums = as_array("dweight_sums", dweight_sums, "of the shape of weight")
    like = operands.weight.shape, jnp.float32
    check_operand("dweight_sums", sums, *like, "the shape of weight", "this call")
    if call.is_dense:
        dense = call.choose_loss(Request(), is_reduced=True)

        def run_dense(x: Any, w: Any, b: Any) -> jax.Array:
            given = Operands(x, w, b, operands.labels)
            return derivative.compute_outputs(dense, Request(), given, factors).loss

        arrays = operands.hidden, operands.weight.astype(jnp.float32), operands.bias
        loss, (dhidden, dweight, dbias) = jax.value_and_grad(run_dense, (0, 1, 2))(*arrays)
        sums = sums + dweight
    else:
        planned = call.planner.schedule(call.options, operands, reduced=True, running=True)
        *given, factors, sums = make_alike(*operands, factors, sums)
        losses, *_, gradients = planned.fused_adding(Operands(*given), factors, sums)
        loss, (dhidden, sums, dbias) = weighted(losses, factors).sum(), gradients
    dhidden = dhidden.reshape(hidden.shape).astype(hidden.dtype)
    return loss, (dhidden, sums) if dbias is None else (dhidden, sums, dbias)


@hinted_with(check_options, Call.__init__, Call.place)
def linear_cross_entropy_per_token(
    hidden: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    *,
    return_lse: bool = False,
    return_entropy: bool = False,
    return_correct: bool = False,
    columns: ArrayLike | None = None,
    **options: Unpack[_ShardedKeywords],
) -> tuple[jax.Array, ...]:
    """Loss and log-probability of the label for every token.

    The arguments are those of `linear_cross_entropy`. All outputs may be used and differentiated in
    any combination, for at most one GEMM of N x D x V more than a mean takes.

    Returns:
      (per_token_loss, per_token_logps), each [..] in float32, and after them the auxiliary outputs
      that are requested, as for `linear_cross_entropy`.

    Raises:
      TypeError: a dtype that is not taken, or an option that is no number or is traced.
      ValueError: shapes that disagree, an option outside its range, or a budget below the least.
    """
    axis_name = options.pop("axis_name", None)
    call = Call(hidden, weight, labels, None, return_lse, **options)
    requested = Request.checked(return_lse, return_entropy, return_correct)
    requested = call.place(requested, columns, axis_name=axis_name)
    found = call.outputs(requested)
    loss = call.coefficients.loss(call.options, call.labels, found)
    return loss, found.logps, *requested.select(found)


@hinted
def explain(
    hidden: Any,
    weight: Any,
    *,
    bias: Any = None,
    reduction: Reduction = "mean",
    vocab_axis: int | None = None,
    max_scratch_bytes: int | None = None,
    block_size: int | None = None,
    time_block: int | None = None,
    batch_invariant: bool = False,
    platform: str | None = None,
) -> Plan:
    """Returns the plan of `linear_cross_entropy`, for arrays or `jax.ShapeDtypeStruct`.

    `platform` is "cpu", "cuda" or "tpu", or a kind of TPU as JAX names it ("TPU v6 lite"); None
    stands for JAX's default device. Programs for TPUs that XLA shards over a mesh take no kernels.
    It is the plan of a loss alone, at any temperature, and on GPUs of one with entropy and
    *correct*; other auxiliary outputs take chunks of XLA's. The plan depends on the number of
    tokens, and so do the last bits of a token's loss and row of dhidden, also where libraries order
    a GEMM's sums by the number of rows; with `batch_invariant` neither does.

    Returns:
      The plan, with schedule, chunk or tile, products (GEMMs) and scratch; `print` shows a line.

    Raises:
      TypeError: a dtype that is not taken, or an option that is no number.
      ValueError: shapes that disagree, a budget below the least, a tile that is not taken, or an
        unknown platform.
    """
    tile = check_tile(time_block, block_size)
    batch_invariant = check_flag("batch_invariant", batch_invariant)
    check_word("reduction", reduction, get_args(Reduction))
    given = {"hidden": (hidden, "[.., D]"), "weight": (weight, "[V, D] or [D, V]")}
    given |= {} if bias is None else {"bias": (bias, "[V]")}
    for name, (one, right) in given.items():
        if not isinstance(one, jax.ShapeDtypeStruct):
            given[name] = as_array(name, one, f"{right}, or its shape and dtype"), right
    hidden, weight, bias = (given.get(name, (None,))[0] for name in ("hidden", "weight", "bias"))
    if jnp.float32 not in (dtypes := {hidden.dtype, weight.dtype}) and len(dtypes) > 1:
        hidden, weight = jax.eval_shape(promote_operands, hidden, weight)
    axis = find_vocab_axis(hidden, weight, bias, vocab_axis)
    planner = Planner(Gemms(axis, batch_invariant), tile, max_scratch_bytes)
    plan, cuda, cpu = planner.plan_passes((hidden, weight, bias), reduced=reduction != "none")
    if plan.batch_invariant:
        return plan
    if platform is None:
        device = jax.devices()[0]
        names = {"gpu": "cuda", "tpu": device.device_kind}
        platform = names.get(device.platform, "cpu")
    calls = {"cpu": cpu if schedule.has_cpu_calls() else None, "cuda": cuda}
    tpus = {"tpu": pallas.ANY, **pallas.TARGETS}
    check_word("platform", platform, (*calls, *tpus), or_none=True)
    if platform in calls:
        return calls[platform] or plan
    from . import pallas_tpu  # late: it takes as long to import as all the rest

    return pallas_tpu.plan(tpus[platform], plan, (hidden, weight, bias), axis, tile)
