"""The functions of linear cross-entropy that users call, and the checks of their arguments."""

import copy
import dataclasses
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from .. import gathering, meshes, one_program, pallas
from ..arrays import wide
from ..bound import Bound
from ..checks import as_array, check_dtype, is_traced, promoted
from ..cross_entropy.api import AxisName
from ..implementations import choose
from ..keywords import hinted, hinted_with
from ..losses.aux_outputs import Request, TokenOutputs, check_columns
from ..losses.options import Options, check_options, check_tile, narrow_labels
from ..losses.reduction import token_factors, weighted
from ..losses.traced import Coefficients
from ..losses.vocab_shards import WHOLE, shard_options
from ..operation import Implementation
from . import derivative, schedule
from .chunks import Gemms, Operands, make_alike, pad_tokens
from .declaration import OPERATION
from .derivative import LinearLoss
from .plan import Plan
from .schedule import Planner
from .sharding import Layout, Partitioned, find_layout

Reduction = Literal["none", "mean", "sum"]


class _Keywords(TypedDict, total=False):
    """The options that all functions have."""

    bias: ArrayLike | None
    vocab_axis: int | None
    ignore_index: int
    label_smoothing: float | jax.Array
    z_loss: float | jax.Array
    softcap: float | None
    temperature: float | jax.Array
    max_scratch_bytes: int | None
    block_size: int | None
    time_block: int | None
    implementation: Implementation | None
    axis_name: AxisName | None
    batch_invariant: bool


def _prepare(
    hidden: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    weights: ArrayLike | None,
    return_lse: bool,
    *,
    bias: ArrayLike | None = None,
    vocab_axis: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float | jax.Array = 0.0,
    z_loss: float | jax.Array = 0.0,
    softcap: float | None = None,
    temperature: float | jax.Array = 1.0,
    max_scratch_bytes: int | None = None,
    block_size: int | None = None,
    time_block: int | None = None,
    implementation: Implementation | None = None,
    axis_name: AxisName | None = None,
    batch_invariant: bool = False,
) -> tuple["_Call", Coefficients]:
    """Returns checked arguments, sharded as known, and the coefficients of the loss."""
    coefficients = Coefficients(label_smoothing, z_loss)
    hidden, bias, kernel_temperature = _divide(hidden, bias, temperature, softcap)
    options = check_options(
        **coefficients.known,
        ignore_index=ignore_index,
        softcap=softcap,
        temperature=kernel_temperature,
        block_size=block_size,
        time_block=time_block,
        every_token=return_lse,
        donate_logits=False,
    )
    call = _Call(
        hidden,
        weight,
        labels,
        weights,
        bias,
        vocab_axis,
        coefficients.for_kernels(options),
        implementation,
        max_scratch_bytes,
        batch_invariant,
    )
    call.find_layout(axis_name)
    return call, coefficients


@overload
def linear_cross_entropy(
    hidden: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    *,
    reduction: Reduction = ...,
    weights: ArrayLike | None = ...,
    return_lse: Literal[False] = ...,
    **options: Unpack[_Keywords],
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
    **options: Unpack[_Keywords],
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
    **options: Unpack[_Keywords],
) -> Any: ...


@hinted_with(_prepare)
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
    **options: Unpack[_Keywords],
) -> Any:
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
      softcap: c > 0 replaces z by c * tanh(z / c); None for none.
      temperature: t > 0 divides z, after softcap, as for `cross_entropy`. It may be a traced
        scalar, with a derivative, where there is no softcap: `hidden` and `bias` are then divided
        by it, and `hidden` is rounded to its dtype.
      return_lse: whether to return lse too, that of ignored tokens included.
      return_entropy: whether to return the entropy of every token's distribution, as for
        `cross_entropy`.
      return_correct: whether to return which tokens have the largest logit at their label,
        likewise.
      columns: [.., K] with K to 128, to return the log-probabilities of these columns too,
        likewise. With a reduction the pass that computes gradients computes all three, under
        `jax.jit` and where nothing but the loss is differentiated (columns, of a weight [V, D]).
        Otherwise logits are computed a chunk of tokens at a time, and recomputed in the backward
        pass: four GEMMs.
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
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}; it must be 'none', 'mean' or 'sum'")
    call, coefficients = _prepare(hidden, weight, labels, weights, return_lse, **options)
    columns = check_columns(OPERATION, columns, call.shape)
    requested = Request(return_lse, return_entropy, return_correct, columns)
    if reduction == "none":
        found = call.outputs(requested)
        loss = coefficients.loss(call.options, call.labels, found, call.weights)
        loss = loss if call.weights is None else weighted(loss, call.weights)
    elif coefficients.any_traced:
        found, factors = call.outputs(requested), call.factors(reduction)
        loss = coefficients.loss(call.options, call.labels, found, factors)
        loss = weighted(loss, factors).sum()
    else:
        found = call.outputs(requested, reduction)
        loss = found.loss
    outputs = requested.select(found)
    return (loss, *outputs) if outputs else loss


@hinted
def linear_cross_entropy_value_and_grad(
    hidden: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    *,
    dweight_sums: ArrayLike,
    bias: ArrayLike | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    weights: ArrayLike | None = None,
    vocab_axis: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    max_scratch_bytes: int | None = None,
    block_size: int | None = None,
    time_block: int | None = None,
    implementation: Implementation | None = None,
    batch_invariant: bool = False,
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
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}; it must be 'mean' or 'sum'")
    options = check_options(
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
        temperature=temperature,
        block_size=block_size,
        time_block=time_block,
        every_token=False,
        donate_logits=False,
    )
    call = _Call(
        hidden,
        weight,
        labels,
        weights,
        bias,
        vocab_axis,
        options,
        implementation,
        max_scratch_bytes,
        batch_invariant,
    )
    operands, factors = call.flat, call.factors(reduction).reshape(-1)
    sums = as_array("dweight_sums", dweight_sums, "of the shape of weight")
    if sums.dtype != jnp.float32:
        raise TypeError(f"dweight_sums have dtype {sums.dtype}; it must be float32")
    if sums.shape != operands.weight.shape:
        raise ValueError(
            f"dweight_sums have shape {sums.shape}; it must be that of weight, "
            f"{operands.weight.shape}"
        )
    if call.is_dense:
        dense = LinearLoss(call.options, call.planner.gemms, is_dense=True)

        def run_dense(x: Any, w: Any, b: Any) -> jax.Array:
            given = Operands(x, w, b, operands.labels)
            return derivative.reduced(dense, Request(), given, factors).loss

        value_and_grad = jax.value_and_grad(run_dense, (0, 1, 2))
        wide = operands.weight.astype(jnp.float32)
        loss, (dhidden, dweight, dbias) = value_and_grad(operands.hidden, wide, operands.bias)
        sums = sums + dweight
    else:
        planned = call.planner.schedule(call.options, operands, reduced=True, running=True)
        *arrays, factors, sums = make_alike(*operands, factors, sums)
        losses, *_, gradients = planned.fused_adding(Operands(*arrays), factors, sums)
        loss, (dhidden, sums, dbias) = weighted(losses, factors).sum(), gradients
    dhidden = dhidden.reshape(jnp.shape(hidden)).astype(jnp.result_type(hidden))
    return loss, (dhidden, sums) if dbias is None else (dhidden, sums, dbias)


@overload
def linear_cross_entropy_per_token(
    hidden: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[_Keywords],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def linear_cross_entropy_per_token(
    hidden: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    *,
    return_lse: Literal[True],
    **options: Unpack[_Keywords],
) -> tuple[jax.Array, jax.Array, jax.Array]: ...


@overload
def linear_cross_entropy_per_token(
    hidden: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    *,
    return_lse: bool = ...,
    return_entropy: bool = ...,
    return_correct: bool = ...,
    columns: ArrayLike | None = ...,
    **options: Unpack[_Keywords],
) -> tuple[jax.Array, ...]: ...


@hinted_with(_prepare)
def linear_cross_entropy_per_token(
    hidden: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    *,
    return_lse: bool = False,
    return_entropy: bool = False,
    return_correct: bool = False,
    columns: ArrayLike | None = None,
    **options: Unpack[_Keywords],
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
    call, coefficients = _prepare(hidden, weight, labels, None, return_lse, **options)
    columns = check_columns(OPERATION, columns, call.shape)
    requested = Request(return_lse, return_entropy, return_correct, columns)
    found = call.outputs(requested)
    loss = coefficients.loss(call.options, call.labels, found)
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
    for name, array, right in (
        ("hidden", hidden, "[.., D]"),
        ("weight", weight, "[V, D] or [D, V]"),
    ):
        if array is None:
            raise TypeError(f"{name} is None; it must be an array {right}, or its shape and dtype")
    if jnp.float32 not in (dtypes := {hidden.dtype, weight.dtype}) and len(dtypes) > 1:
        hidden, weight = jax.eval_shape(_promoted, hidden, weight)
    axis = _vocab_axis(hidden, weight, bias, vocab_axis)
    planner = Planner(Gemms(axis, batch_invariant), tile, max_scratch_bytes)
    plan, cuda, cpu = planner.plans((hidden, weight, bias), reduced=reduction != "none")
    if plan.batch_invariant:
        return plan
    if platform is None:
        device = jax.devices()[0]
        names = {"gpu": "cuda", "tpu": device.device_kind}
        platform = names.get(device.platform, "cpu")
    if platform == "cuda" and cuda is not None:
        return cuda
    if platform == "cpu" and cpu is not None and schedule.has_cpu_calls():
        return cpu
    if platform in ("cpu", "cuda"):
        return plan
    target = _tpu(platform)
    from . import pallas_tpu  # late: it takes as long to import as all the rest

    return pallas_tpu.plan(target, plan, (hidden, weight, bias), axis, tile)


def _tpu(platform: str) -> pallas.Target:
    """Returns the TPU of a platform."""
    targets = {"tpu": pallas.ANY, **pallas.TARGETS}
    if platform not in targets:
        names = ", ".join(map(repr, ("cpu", "cuda", *targets)))
        raise ValueError(f"platform is {platform!r}; it must be one of {names}, or None")
    return targets[platform]


class _Call:
    """Checked arguments, and what computes their loss."""

    def __init__(
        self,
        hidden: ArrayLike,
        weight: ArrayLike,
        labels: ArrayLike,
        weights: ArrayLike | None,
        bias: ArrayLike | None,
        vocab_axis: int | None,
        options: Options,
        implementation: Implementation | None,
        max_scratch_bytes: int | None,
        batch_invariant: bool,
    ) -> None:
        # Whether all is XLA's own program.
        self.is_dense = choose(OPERATION, implementation) == "reference"
        self.hidden, self.weight = _promoted(
            as_array("hidden", hidden, "[.., D]"), as_array("weight", weight, "[V, D] or [D, V]")
        )
        y = as_array("labels", labels, "[..], a label a token")
        self.bias = None if bias is None else as_array("bias", bias, "[V]")
        self.axis = _vocab_axis(self.hidden, self.weight, self.bias, vocab_axis)
        meshes.check_whole(OPERATION, "hidden", self.hidden, columns=-1)
        # Every chunk takes all of D.
        self.weight = meshes.with_whole_axis(self.weight, 1 - self.axis, self.hidden)
        self.shape = self.hidden.shape[:-1]
        if not jnp.issubdtype(y.dtype, jnp.integer):
            raise TypeError(f"labels have dtype {y.dtype}; it must be an integer")
        y = self._check_tokens("labels", y)
        options = dataclasses.replace(options, implementation=implementation)
        self.labels, self.options = narrow_labels(y, options)
        if not all(isinstance(extent, int) for extent in self.shape):
            self.options = self.options.in_xla()
        self.weights = None
        if weights is not None:
            self.weights = self._check_tokens("weights", weights).astype(jnp.float32)
        if batch_invariant and self.is_dense:
            raise ValueError(
                "batch_invariant is True with the implementation 'reference', whose products have "
                "as many rows as there are tokens: it takes 'custom_call' or 'pallas'"
            )
        gemms = Gemms(self.axis, batch_invariant)
        self.planner = Planner(gemms, self.options.tile, max_scratch_bytes)
        # How arrays are known to be sharded; None where they are not. On devices, arrays are a
        # device's.
        self.layout: Layout | None = None

    def _check_tokens(self, name: str, array: ArrayLike) -> jax.Array:
        """Returns a checked array of the shape of the tokens."""
        array = as_array(name, array, "[..], a number a token")
        if jnp.issubdtype(array.dtype, jnp.complexfloating):
            raise TypeError(f"{name} have dtype {array.dtype}; it must be real")
        if array.shape != self.shape:
            raise ValueError(
                f"{name} have shape {array.shape}; it must be that of hidden without its last "
                f"axis, {self.shape}"
            )
        return array

    @property
    def flat(self) -> Operands:
        """The operands, with one axis of tokens."""
        hidden = self.hidden.reshape(-1, self.hidden.shape[-1])
        return Operands(hidden, self.weight, self.bias, self.labels.reshape(-1))

    @property
    def unflattened(self) -> Operands:
        """The same, with all axes of tokens where XLA may shard any of them (`Partitioned`)."""
        # A single token has no axis, and nothing to shard.
        is_known = self.shape and all(isinstance(extent, int) for extent in self.shape)
        is_open = self.layout is None and not self.is_dense
        if is_known and is_open and meshes.are_left_to_xla(self.hidden, self.weight):
            return Operands(self.hidden, self.weight, self.bias, self.labels)
        return self.flat

    def factors(self, reduction: Literal["mean", "sum"]) -> jax.Array:
        """Returns the factor [..] of every token's loss."""
        return token_factors(self.options, reduction, self.labels, self.weights)

    def find_layout(self, axis_name: AxisName | None) -> None:
        """Finds how arrays are known to be sharded; else warns where XLA gathers some."""
        layout = find_layout(self.hidden, self.weight, self.axis, axis_name)
        if layout is not None:
            self.layout = layout
            self.labels = layout.place(self.labels)
            self.weights = None if self.weights is None else layout.place(self.weights)
        elif not self.is_dense:
            self.hidden = gathering.watched(OPERATION, "hidden", self.hidden, -1, axis_of="D")
            self.weight = gathering.watched(
                OPERATION, "weight", self.weight, self.axis, calls_ask=True
            )

    def outputs(
        self, requested: Request, reduction: Literal["mean", "sum"] | None = None
    ) -> TokenOutputs:
        """Returns loss, logps, lse and the `requested` outputs of each token [..].

        With a reduction the loss is a scalar, and there are no logps.
        """
        factors = None if reduction is None else self.factors(reduction)
        layout = self.layout
        if layout is None:
            return self._outputs(requested, factors)
        fields = dict.fromkeys(requested.fields, layout.tokens)
        if factors is not None:
            del fields["logps"]
            fields["loss"] = PartitionSpec()

        def on_device(
            hidden: Any, weight: Any, bias: Any, labels: Any, factors: Any, columns: Any
        ) -> dict[str, jax.Array]:
            own = copy.copy(self)
            own.hidden, own.weight, own.bias = hidden, layout.gather(weight), bias
            own.labels, own.shape = labels, labels.shape
            found = own._outputs(dataclasses.replace(requested, columns=columns), factors)
            if factors is not None:
                found = found._replace(loss=layout.total(found.loss))
            return {name: getattr(found, name) for name in fields}

        columns = None if requested.columns is None else layout.place(requested.columns)
        arrays = self.hidden, self.weight, self.bias, self.labels, factors, columns
        found = layout.run(on_device, fields, *arrays)
        return TokenOutputs(**{"logps": found["loss"], **found})

    def _outputs(self, requested: Request, factors: jax.Array | None) -> TokenOutputs:
        """Returns the outputs of whole arrays, or a device's; `factors` reduce the loss."""
        loss = self._loss(requested, is_reduced=factors is not None)
        operands = self.flat
        if not requested.any:
            operands = self.unflattened
        elif loss.exchange.is_whole and not self.is_dense:
            # Flattening leaves tokens where they are if the first axis alone is sharded.
            for axis in range(1, self.hidden.ndim - 1):
                self.hidden = gathering.watched(
                    OPERATION, "hidden", self.hidden, axis, axis_of="tokens"
                )
            operands = self.flat
        hidden, labels, columns = operands.hidden, operands.labels, requested.columns
        if columns is not None:
            columns = columns.reshape(-1, columns.shape[-1])
        factors = None if factors is None else factors.reshape(labels.shape)
        has_chunks = requested.any and not self.is_dense
        if has_chunks and (loss.gemms.isolated or not isinstance(labels.shape[0], int)):
            arrays = pad_tokens(loss.chunk_tokens, hidden, labels, columns, factors)
            hidden, labels, columns, factors = arrays
        operands = operands._replace(hidden=hidden, labels=labels)
        requested = dataclasses.replace(requested, columns=columns)
        run: Any = derivative.per_token if factors is None else derivative.reduced
        more = [] if factors is None else [factors]
        found: TokenOutputs = one_program.run(Bound(run, loss), requested, operands, *more)
        if labels.shape == self.shape:
            return found
        count = self.labels.size

        def shape(one: jax.Array) -> jax.Array:
            # A scalar is a loss that is reduced.
            return one[:count].reshape(*self.shape, *one.shape[1:]) if one.ndim else one

        shaped: TokenOutputs = jax.tree.map(shape, found)
        return shaped

    def _loss(self, requested: Request, *, is_reduced: bool) -> LinearLoss:
        """Returns how the loss and what is requested are computed, by implementation and plan."""
        operands, planner, layout = self.flat, self.planner, self.layout
        exchange = WHOLE if layout is None else layout.exchange()
        loss = LinearLoss(
            self.options,
            planner.gemms,
            exchange=exchange,
            is_dense=self.is_dense,
            distribution=requested.distribution,
            correct=requested.correct,
        )
        if self.is_dense:
            return loss
        if requested.any:
            options = planner.row_options(self.options, operands.weight.shape[self.axis])
            chunk = planner.output_chunk_tokens(operands)
            loss = dataclasses.replace(loss, options=options, chunk_tokens=chunk)
            is_known = is_reduced and layout is None
            return self._fuse_outputs(loss, requested) if is_known else loss
        if layout is not None and not exchange.is_whole:
            own = planner.schedule(shard_options(self.options, exchange), operands, reduced=False)
            can_fuse = is_reduced and layout.leaves_axes
            fused_chunk = planner.fused_chunk_tokens(operands) if can_fuse else None
            return dataclasses.replace(
                loss,
                schedule=own,
                is_fused=fused_chunk is not None,
                chunk_tokens=fused_chunk or 0,
            )
        planned = planner.schedule(self.options, operands, reduced=is_reduced)
        # Nothing shards a symbolic number of tokens.
        if meshes.are_left_to_xla(*operands[:2]) and not planned.plan.any_count:
            partition = Partitioned(planner)
            planned = dataclasses.replace(planned, partition=partition, may_save_logits=False)
        is_fused = is_reduced and planned.is_fused
        return dataclasses.replace(
            loss, options=planned.options, schedule=planned, is_fused=is_fused
        )

    def _fuse_outputs(self, loss: LinearLoss, requested: Request) -> LinearLoss:
        """Returns `loss` with auxiliary outputs by the pass that makes gradients, if it can."""
        operands, planner = self.flat, self.planner
        is_whole = not meshes.are_left_to_xla(*operands[:2])
        # A weight [D, V] has no rows to gather for the columns.
        has_rows = requested.columns is None or self.axis == 0
        if not (has_rows and is_whole) or planner.gemms.isolated:
            return loss
        planned = planner.schedule(self.options, operands, reduced=True)
        # Nobody pads the chunks of this pass.
        if not planned.is_fused or planned.plan.any_count:
            return loss
        cuda = planned.cuda
        cuda = cuda if cuda is not None and cuda.products < 4 else None
        return dataclasses.replace(loss, is_fused=True, cuda=cuda)


def _divide(hidden: Any, bias: Any, temperature: Any, softcap: Any) -> Any:
    """Returns hidden, bias and temperature; of a traced one, both divided by it, and 1.

    Raises:
        TypeError: a temperature that is traced and no scalar, or one beside a softcap.
    """
    if not is_traced(temperature):
        return hidden, bias, temperature
    if softcap is not None:
        raise TypeError(
            "temperature is traced and softcap is given; it must be a Python number then, since "
            "hidden cannot be divided by it before the softcap"
        )
    if temperature.ndim or not jnp.issubdtype(temperature.dtype, jnp.floating):
        raise TypeError(
            f"temperature is traced, of shape {temperature.shape} and dtype {temperature.dtype}; "
            "it must be a scalar of a float dtype"
        )
    hidden = as_array("hidden", hidden, "[.., D]")
    check_dtype("hidden", hidden)
    divisor = temperature.astype(jnp.float32)
    divided = (hidden.astype(jnp.float32) / divisor).astype(hidden.dtype)
    return divided, None if bias is None else wide(as_array("bias", bias, "[V]")) / divisor, 1.0


def _promoted(hidden: jax.Array, weight: jax.Array) -> tuple[jax.Array, ...]:
    """Returns both in f32 where one is bfloat16 and one float16, which GEMMs do not take."""
    is_f32_in = jnp.float32 in (hidden.dtype, weight.dtype)
    return (hidden, weight) if is_f32_in else promoted(hidden, weight)


def _vocab_axis(hidden: Any, weight: Any, bias: Any, vocab_axis: int | None) -> int:
    """Returns which axis of the weight is the vocabulary's, having checked shapes and dtypes."""
    check_dtype("hidden", hidden)
    check_dtype("weight", weight)
    if hidden.ndim == 0 or hidden.shape[-1] == 0:
        raise ValueError(f"hidden has shape {hidden.shape}; it must be [.., D] with D at least 1")
    width = hidden.shape[-1]
    if weight.ndim != 2 or 0 in weight.shape:
        raise ValueError(
            f"weight has shape {weight.shape}; it must be [V, {width}] or [{width}, V]"
        )
    if vocab_axis is None:
        if weight.shape == (width, width):
            raise ValueError(
                f"weight has shape {weight.shape}, of which either axis may be the vocabulary's; "
                "set vocab_axis to 0 for [V, D] or to 1 for [D, V]"
            )
        vocab_axis = 0 if weight.shape[1] == width else 1
    if vocab_axis not in (0, 1):
        raise ValueError(f"vocab_axis is {vocab_axis!r}; it must be 0, 1 or None")
    if weight.shape[1 - vocab_axis] != width:
        raise ValueError(
            f"weight has shape {weight.shape} and hidden {hidden.shape}; axis {1 - vocab_axis} of "
            f"weight must have the {width} columns of hidden"
        )
    vocab = weight.shape[vocab_axis]
    if bias is not None:
        if not jnp.issubdtype(bias.dtype, jnp.floating):
            raise TypeError(f"bias has dtype {bias.dtype}; it must be a float")
        if bias.shape != (vocab,):
            raise ValueError(
                f"bias has shape {bias.shape}; it must be ({vocab},), a number a column of the "
                "vocabulary"
            )
    return vocab_axis
