"""The functions of linear cross-entropy that users call."""

import dataclasses
from typing import Any, Literal, Unpack, get_args, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .. import device_memory, pallas
from ..checks import as_array, check_operand, check_word
from ..chunk_loops import make_alike
from ..keywords import hinted_with
from ..logits_gemms import Operands, promote_operands
from ..losses.aux_outputs import Request
from ..losses.layouts import find_layout
from ..losses.options import AxisName, LossKeywords, Reduction, check_options
from ..losses.reduction import token_factors, weighted
from . import derivative, schedule
from .call import Call
from .plan import Plan


class _PlanKeywords(LossKeywords, total=False):
    """The options that all functions have; `Call` and `check_options` have their defaults."""

    vocab_axis: int | None
    max_scratch_bytes: int | None
    batch_invariant: bool


class _ShardedKeywords(_PlanKeywords, total=False):
    """The options of functions whose weight may be sharded; `Call.place` has the default."""

    bias: ArrayLike | None
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

    The loss, its options and its special tokens are those of `cross_entropy`. It is differentiable
    in both modes with respect to `hidden`, `weight`, `bias` and `weights`. Forward mode of lse, of
    per-token outputs, and of a loss whose plan recomputes logits runs XLA's dense program, which
    holds all logits.

    Logits are float32 sums, the bias included, and are not rounded. Their gradient is rounded once,
    to the dtype of GEMM operands. The gradient of an array is a float32 sum, rounded once to the
    dtype of the array.

    `hidden` and `weight` may differ in dtype. If one is float32 and the other has 16 bits, the
    float32 array is rounded to the 16-bit dtype for the GEMMs, and its gradient is not rounded.
    bfloat16 beside float16 is promoted to float32, as by `jnp`.

    A token that is ignored, or whose factor is 0, adds 0 to every gradient, whatever its hidden
    state. On GPUs there is an exception: where logits are recomputed, a hidden state that is not
    finite makes dweight NaN. A NaN in the hidden state of another token makes its loss, its row of
    dhidden and dweight NaN. A NaN in the weight reaches every token that counts.

    With a reduction the forward pass computes gradients too, in three GEMMs of N x D x V. With
    reduction "none", in float16, and where memory is short, the backward pass recomputes logits,
    in four GEMMs, or fewer on CPUs with memory to save logits. Kernels for TPUs recompute logits a
    tile at a time, and hold almost nothing. `explain` returns the plan and its memory.

    Axes of tokens may be symbolic in an exported program. Chunks then have at most 512 tokens, the
    last one padded, and XLA's own program runs on every platform, unless `implementation` names the
    kernels of the library.

    Args:
      hidden: [.., D] in bfloat16, float16 or float32; N is the product of the leading axes.
      weight: [V, D] or [D, V], in any of these dtypes.
      labels: [..], of any integer dtype.
      bias: [V], of any float dtype, or None.
      reduction: "mean", "sum" or "none", as for `cross_entropy`.
      weights: [..], or a mask of that shape; ones where None.
      vocab_axis: which axis of `weight` is V, 0 or 1; required where V = D.
      ignore_index: the label of ignored tokens.
      label_smoothing: as for `cross_entropy`. If it or `z_loss` is traced, the backward pass of a
        sum or a mean recomputes logits, as that of reduction "none" does.
      z_loss: as for `cross_entropy`.
      softcap: as for `cross_entropy`. If it is traced, XLA's program runs over chunks of tokens,
        and recomputes their logits in the backward pass.
      temperature: as for `cross_entropy`. If it is traced, a loss with a softcap runs likewise.
        Without one, `hidden` and `bias` are divided by it, and `hidden` is rounded to its dtype.
      return_lse: whether to return lse too, that of ignored tokens included.
      return_entropy: whether to return the entropy of every token's distribution.
      return_correct: whether to return which tokens have the largest logit at their label.
      columns: [.., K] with K to 128, to return the log-probabilities of these columns too. Under
        `jax.jit` the pass that computes the gradients of a reduced loss computes all three outputs,
        if nothing but the loss is differentiated (columns: of a weight [V, D]). Otherwise logits
        are computed a chunk of tokens at a time, and recomputed in the backward pass: four GEMMs.
      max_scratch_bytes: bytes that may be held beyond operands and results. None stands for those
        of chunks of 4096 tokens: their logits in float32, a 16-bit gradient of these for 16-bit
        operands, and, for more tokens and a 16-bit weight, V * D sums in float32. On GPUs logits
        have the dtype of operands, and the default is at least 256 MiB. For a symbolic number of
        tokens the budget is for what does not grow with it, and None stands for chunks of 512.
      block_size: vocabulary columns of a tile, at most; None for the tuned number. It is narrowed
        to fit `max_scratch_bytes` on CPUs, and VMEM on TPUs, where it is a multiple of 128. It
        changes the order of sums, and so their last bits.
      time_block: tokens of a tile, likewise; on CPUs those of a task, which change no bit.
      implementation: "reference" for the dense program of XLA; else as for `cross_entropy`.
      axis_name: the mesh axis that the vocabulary of `weight` and `bias` is sharded over, or
        several, as for `cross_entropy`. The weight and its gradient stay where they are; the
        gradient of `hidden` is summed over devices.
      batch_invariant: whether a token's loss, log-probabilities and row of dhidden have the same
        bits however many other tokens a device has, for equal cotangents. XLA then computes GEMMs
        of 512 tokens each, the last ones padded; one token takes as long as 512. On GPUs it holds
        within a process, and a vocabulary that is no multiple of 32 has no kernels.

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
    flags = Request.checked(return_lse, return_entropy, return_correct)
    requested = call.place(flags, columns, axis_name=axis_name)
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
    bias: ArrayLike | None = None,
    **options: Unpack[_PlanKeywords],
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
      TypeError, ValueError: as for `linear_cross_entropy`, and for sums that are not float32.
    """
    check_word("reduction", reduction, ("mean", "sum"))
    hidden = as_array("hidden", hidden, "[.., D]")
    call = Call(hidden, weight, labels, weights, takes_traced=False, bias=bias, **options)
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
      TypeError, ValueError: as for `linear_cross_entropy`.
    """
    axis_name = options.pop("axis_name", None)
    call = Call(hidden, weight, labels, None, return_lse, **options)
    flags = Request.checked(return_lse, return_entropy, return_correct)
    requested = call.place(flags, columns, axis_name=axis_name)
    found = call.outputs(requested)
    loss = call.coefficients.loss(call.options, call.labels, found)
    return loss, found.logps, *requested.select(found)


@hinted_with(check_options, Call.__init__)
def explain(
    hidden: Any,
    weight: Any,
    *,
    bias: Any = None,
    reduction: Reduction = "mean",
    platform: str | None = None,
    axis_name: AxisName | None = None,
    **options: Unpack[_PlanKeywords],
) -> Plan:
    """Returns the plan of `linear_cross_entropy`, for arrays or `jax.ShapeDtypeStruct`.

    The other options are those of the loss. `platform` is "cpu", "cuda" or "tpu", or a kind of TPU
    as JAX names it ("TPU v6 lite"); None stands for that of the mesh, or JAX's default device.
    Programs for TPUs that XLA shards over a mesh take no kernels. The plan is that of a loss alone,
    and on GPUs also of one with entropy and *correct*; other auxiliary outputs take chunks by XLA.

    Arrays with a `NamedSharding` have the plan of one device, and `memory`: what each device holds
    for loss and gradients, sharded as their arrays, by XLA's analysis of the program of `jax.jit`,
    which is compiled. Within `jax.shard_map`, arrays are a device's own, and there is no `memory`.

    Returns:
      The plan, with schedule, chunk or tile, products (GEMMs) and scratch; `print` shows a line.

    Raises:
      TypeError, ValueError: as for `linear_cross_entropy`, and for a platform that is unknown or
        not the mesh's, shapes that a mesh does not divide, and a mesh without devices.
    """
    check_word("reduction", reduction, get_args(Reduction))
    given = {"hidden": hidden, "weight": weight, "bias": bias}
    arrays = {name: device_memory.as_shape(name, x) for name, x in given.items() if x is not None}
    checked: list[Call] = []

    def check(hidden: Any, weight: Any, bias: Any = None) -> None:
        labels = jnp.zeros(hidden.shape[:-1], jnp.int32)
        checked.append(Call(hidden, weight, labels, None, bias=bias, **options))

    jax.eval_shape(check, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays.values()))
    (call,) = checked
    if options.get("implementation") == "reference":
        raise ValueError("implementation is 'reference', whose program has all logits, and no plan")
    mesh = device_memory.find_mesh(**arrays)
    tpus = {"tpu": pallas.ANY, **pallas.TARGETS}
    platform = device_memory.find_platform(mesh, platform, ("cpu", "cuda", *tpus))
    hidden, weight, bias = (*arrays.values(), None)[:3]
    layout = find_layout(hidden, weight, call.axis, axis_name)
    own = (hidden, weight) if layout is None else layout.device_shapes(hidden, weight)
    operands = *jax.eval_shape(promote_operands, *own), bias
    reduced = reduction != "none"
    no_calls = device_memory.is_explicit(mesh) if layout is None else layout.leaves_axes
    if reduced and not axis_name and mesh is not None and not device_memory.is_explicit(mesh):
        # One pass makes devices' gradients if the plan of whole arrays says so.
        whole = Operands(hidden, weight, bias, hidden)
        reduced = call.planner.schedule(call.options, whole, reduced=True).is_fused
    if layout is not None and layout.has_shards:
        # The pass that makes a shard's loss and gradients is chunks in XLA.
        reduced = reduced and call.planner.fused_shard_tokens(operands, no_calls=no_calls) > 0
        no_calls |= reduced
    plan, cuda, cpu = call.planner.plan_passes(operands, reduced=reduced)
    calls = {"cuda": cuda, "cpu": cpu if schedule.has_cpu_calls() else None}
    plan = (None if no_calls else calls.get(platform)) or plan
    if platform in tpus and not plan.batch_invariant:
        from . import pallas_tpu  # late: it takes as long to import as all the rest

        plan = pallas_tpu.plan(tpus[platform], plan, operands, call.axis, call.options.tile)
    if mesh is None:
        return plan

    def loss(hidden: Any, weight: Any, bias: Any, labels: Any) -> Any:
        more: Any = {"reduction": reduction, "axis_name": axis_name, **options}
        return linear_cross_entropy(hidden, weight, labels, bias=bias, **more)

    memory = device_memory.measure_loss(mesh, loss, (hidden, weight, bias))
    return dataclasses.replace(plan, memory=memory)
