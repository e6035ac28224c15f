"""Cross-entropy of hidden states against an output matrix: what users call."""

import dataclasses
import operator
from functools import partial
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from .. import gathering, meshes, one_program, pallas
from ..bound import Bound
from ..checks import as_array, check_dtype
from ..cross_entropy.api import AxisName
from ..implementations import choose
from ..losses import vocab_shards
from ..losses.aux_outputs import Request, TokenOutputs, check_columns
from ..losses.options import Options, Tile, check_options, check_tile, narrow_labels
from ..losses.reduction import token_factors, weighted
from ..operation import Implementation
from . import (
    auto_parts,
    known,
    known_parts,
    on_cpu,
    on_cuda,
    on_tpu,
    parts,
    reduced_known,
    reference,
    schedules,
    tokens,
)
from . import plan as plans
from .cut import Cut
from .cut import find as find_cut
from .declaration import OPERATION
from .plan import Plan, Problem
from .product import Products

Reduction = Literal["none", "mean", "sum"]


class _Keywords(TypedDict, total=False):
    """The options that the functions have besides those that decide what they return."""

    bias: ArrayLike | None
    vocab_axis: int | None
    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float | None
    temperature: float
    max_scratch_bytes: int | None
    block_size: int | None
    time_block: int | None
    implementation: Implementation | None
    axis_name: AxisName | None
    batch_invariant: bool


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


def linear_cross_entropy(
    hidden: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    reduction: Reduction = "mean",
    weights: ArrayLike | None = None,
    vocab_axis: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    return_lse: bool = False,
    return_entropy: bool = False,
    return_correct: bool = False,
    columns: ArrayLike | None = None,
    max_scratch_bytes: int | None = None,
    block_size: int | None = None,
    time_block: int | None = None,
    implementation: Implementation | None = None,
    axis_name: AxisName | None = None,
    batch_invariant: bool = False,
) -> jax.Array | tuple[jax.Array, ...]:
    """Cross-entropy of the logits hidden x weight + bias, which are never in memory at once.

    The loss, its options and its special tokens are those of `cross_entropy`. Logits are sums in
    f32, with the bias added in f32, and never rounded. Their softmax, or its gradient, is rounded
    once to be an operand of the gradients' products; gradients are sums in f32, rounded once, to
    the dtypes of what they belong to. It is differentiable in both modes with respect to `hidden`,
    `weight`, `bias` and `weights`; forward mode of per-token outputs, of lse, and of a loss whose
    plan makes logits again, is the dense program's, with all logits in memory.

    Axes of tokens may be symbolic in a program that is exported. Its chunks have 512 tokens at
    most, the last one padded, and XLA's own program runs on every platform, without a custom call;
    the kernels of the library take the softmax and its gradient where `implementation` names them.

    `hidden` and `weight` may differ in dtype, f32 beside one of 16 bits. Products then take the
    narrower dtype, to which the wider array is rounded first, and the gradient of an array in f32
    is its sums, never rounded.

    Tokens that are ignored or whose factor is 0 add 0 to every gradient, whatever their hidden
    state holds (on GPUs, where logits are made again, one that is not finite makes dweight NaN).
    A NaN in that of another token stays in its loss and its row of dhidden, and makes dweight NaN;
    one in the weight reaches every token that counts.

    Where the reduction is inside, gradients are made in the forward pass: three products of N x D
    x V, which is the least. With reduction "none", for float16, and where memory is short, logits
    are made again in the backward pass: four; on CPUs the forward pass hands it those there is room
    for. On TPUs kernels make them again too, a tile at a time, and hold next to nothing. `explain`
    says which, and what it takes.

    Args:
      hidden: [.., D] in bfloat16, float16 or float32; N is the product of the leading axes.
      weight: [V, D] or [D, V], in the dtype of `hidden`, or f32 beside 16 bits either way.
      labels: [..], of any integer dtype.
      bias: [V], of any float dtype, or None.
      reduction: "mean", "sum" or "none", as for `cross_entropy`.
      weights: [..], or a mask of that shape; ones where None.
      vocab_axis: which axis of `weight` is V, 0 or 1; it has to be said where V = D.
      ignore_index: the label of tokens that take no part.
      label_smoothing: the share of the target spread evenly over the vocabulary, in [0, 1].
      z_loss: the weight of lse^2, at least 0.
      softcap: c > 0 replaces z by c * tanh(z / c); None for none.
      temperature: t > 0 divides z, after softcap, as for `cross_entropy`.
      return_lse: whether to return lse too, that of ignored tokens included.
      return_entropy: whether to return the entropy of every token's distribution, as for
        `cross_entropy`.
      return_correct: whether to return which tokens have the largest logit at their label,
        likewise.
      columns: [.., K] with K to 128, to return the log-probabilities of these columns too,
        likewise. Beside a mean or a sum all three come with the gradients, under `jax.jit` and
        where nothing but the loss is differentiated; columns, of a weight [V, D]. Else logits are
        made a chunk of tokens at a time, and again in the backward pass: four products.
      max_scratch_bytes: what may be held beyond operands and results, in bytes. None stands for
        what chunks of 4096 tokens take: 4096 * V logits in f32, with their gradient in 16 bits
        beside them if the operands have these, and, for more tokens than that and a weight of 16
        bits, V * D sums in f32. On GPUs logits count as wide as operands, and 256 MiB is the least.
        Where the number of tokens is symbolic (`jax.export`) it is the limit of what does not grow
        with them, and None stands for chunks of 512. Beside it there are 32 bytes a token, and
        hidden states and their gradient once more, padded to whole chunks.
      block_size: vocabulary columns of a tile; None for the tuned number. On CPUs of a block
        of columns, which is narrower where `max_scratch_bytes` has no room for it; on TPUs of both
        kernels, a multiple of 128, fewer where VMEM has no room; on GPUs, and where XLA makes
        chunks, of the kernels over logits. Sums are cut by it, so that their last bits may be
        others.
      time_block: tokens of a tile, likewise; on CPUs those of a task, which change no bit.
      implementation: "reference" for the dense program of XLA; else as for `cross_entropy`.
      axis_name: the mesh axis that the vocabulary of `weight` and `bias` is sharded over, or
        several; as for `cross_entropy`. The weight stays where it is, and so does its gradient;
        that of `hidden` is summed over devices.
      batch_invariant: whether a token's loss, log-probabilities and row of dhidden are to have the
        same bits however many other tokens a device has, for equal cotangents. Products are XLA's
        then, of 512 tokens each, the last ones padded, so that no library takes another order of
        sums for more of them. It takes no kernels of products, and one token what 512 take. On GPUs
        it holds within a process, and a vocabulary that is no multiple of 32 has no kernels at all.

    Returns:
      The loss in float32, a scalar or [..] for "none"; where more is asked for, a tuple of the loss
      and of it, in this order: lse [..] and entropy [..] in float32, correct [..] of booleans, the
      columns' log-probabilities [.., K] in float32.

    Raises:
      TypeError: a dtype that is not taken, or an option that is no number or is traced.
      ValueError: shapes that disagree, an option outside its range, or a budget below the least.

    >>> hidden, weight = jnp.ones((4, 8)), jnp.zeros((50257, 8))
    >>> print(linear_cross_entropy(hidden, weight, jnp.arange(4)).round(4))  # ln 50257
    10.8249
    """
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}; it must be 'none', 'mean' or 'sum'")
    options = check_options(
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
        temperature=temperature,
        block_size=block_size,
        time_block=time_block,
        every_token=return_lse,
        donate_logits=False,
    )
    of = _Arrays(hidden, weight, labels, bias, weights, vocab_axis, options, implementation)
    cut = of.find(axis_name)
    planner = of.planner(max_scratch_bytes, batch_invariant)
    asked = Request(return_lse, return_entropy, return_correct, check_columns(columns, of.shape))
    if asked.any:
        work = None if reduction == "none" or cut is not None else of.reduced_known(planner, asked)
        if work is not None and reduction != "none":
            return _reduced_known(of, work, reduction, asked)
        found = _known(of, cut, planner, asked)
        if reduction == "none":
            loss = found.loss if of.weights is None else weighted(found.loss, of.weights)
        else:
            factors = token_factors(of.options, reduction, of.labels, of.weights)
            loss = weighted(found.loss, factors).sum()
        return loss, *asked.select(found)
    if reduction == "none":
        loss, _, lse = _per_token(of, cut, planner)
        loss = loss if of.weights is None else weighted(loss, of.weights)
    else:
        loss, lse = _reduced(of, cut, planner, reduction)
    return (loss, lse) if return_lse else loss


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

    Equivalent to `jax.value_and_grad` of `linear_cross_entropy`, whose other arguments these are,
    and `dweight_sums + dweight`, where dweight is not rounded. On GPUs products add to the sums
    where they lie, so that a step takes no other array of the weight's size: donate them
    (`jax.jit(.., donate_argnames=..)`) or carry them through `jax.lax.scan`. It cannot be
    differentiated.

    Args:
      hidden: [.., D].
      weight: [V, D] or [D, V].
      labels: [..].
      dweight_sums: the sums so far, in float32 and of the shape of `weight`; zeros at first.
      bias: [V], or None.
      reduction: "mean" or "sum".
      weights: as for `linear_cross_entropy`, and so are all that follow.
      vocab_axis: which axis of `weight` is V.
      ignore_index: the label of tokens that take no part.
      label_smoothing: the share of the target spread evenly over the vocabulary.
      z_loss: the weight of lse^2.
      softcap: c > 0 replaces z by c * tanh(z / c).
      temperature: t > 0 divides z, after softcap.
      max_scratch_bytes: what may be held beyond operands and results, in bytes.
      block_size: vocabulary columns of a tile.
      time_block: tokens of a tile.
      implementation: "reference" for the dense program of XLA.
      batch_invariant: whether a token's row of dhidden is to have the same bits in any microbatch.

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
    call = _Arrays(hidden, weight, labels, bias, weights, vocab_axis, options, implementation)
    planner = call.planner(max_scratch_bytes, batch_invariant)
    x, w, b, y = call.flat
    sums = as_array("dweight_sums", dweight_sums, "of the shape of weight")
    if sums.dtype != jnp.float32:
        raise TypeError(f"dweight_sums have dtype {sums.dtype}; it must be float32")
    if sums.shape != w.shape:
        raise ValueError(
            f"dweight_sums have shape {sums.shape}; it must be that of weight, {w.shape}"
        )
    given = None if call.weights is None else call.weights.reshape(-1)
    factors = token_factors(call.options, reduction, y, given)
    if call.implementation == "reference":
        run = call.functions(True, planner)
        of = (x, w.astype(jnp.float32), *(() if b is None else (b,)))

        def loss_of(x: Any, w: Any, b: Any = None) -> Any:
            return run.reduced(x, w, b, y, factors)[0]

        loss, (dhidden, dweight, *dbias) = jax.value_and_grad(loss_of, tuple(range(len(of))))(*of)
        return loss, (dhidden.reshape(jnp.shape(hidden)), sums + dweight, *dbias)
    chosen = planner.plans(x, w, b, call.axis, True, call.options.tile, running=True)
    options = planner.of_rows(call.options, w.shape[call.axis])
    schedule = schedules.Schedule(options, Products(call.axis, batch_invariant), *chosen)
    loss, (dhidden, dweight, dbias) = schedules.running(schedule, x, w, b, y, factors, sums)
    dhidden = dhidden.reshape(jnp.shape(hidden))
    return loss, (dhidden, dweight) if dbias is None else (dhidden, dweight, dbias)


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


def linear_cross_entropy_per_token(
    hidden: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    vocab_axis: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    return_lse: bool = False,
    return_entropy: bool = False,
    return_correct: bool = False,
    columns: ArrayLike | None = None,
    max_scratch_bytes: int | None = None,
    block_size: int | None = None,
    time_block: int | None = None,
    implementation: Implementation | None = None,
    axis_name: AxisName | None = None,
    batch_invariant: bool = False,
) -> tuple[jax.Array, ...]:
    """Loss and log-probability of the label for every token.

    The arguments are those of `linear_cross_entropy`. All outputs may be used and differentiated in
    any combination, for at most one product of N x D x V more than a mean takes.

    Returns:
      (per_token_loss, per_token_logps), each [..] in float32, and after them what else is asked
      for, as `linear_cross_entropy` has it.

    Raises:
      TypeError: a dtype that is not taken, or an option that is no number or is traced.
      ValueError: shapes that disagree, an option outside its range, or a budget below the least.
    """
    options = check_options(
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
        temperature=temperature,
        block_size=block_size,
        time_block=time_block,
        every_token=return_lse,
        donate_logits=False,
    )
    of = _Arrays(hidden, weight, labels, bias, None, vocab_axis, options, implementation)
    cut = of.find(axis_name)
    planner = of.planner(max_scratch_bytes, batch_invariant)
    asked = Request(return_lse, return_entropy, return_correct, check_columns(columns, of.shape))
    if asked.any:
        found = _known(of, cut, planner, asked)
        return found.loss, found.logps, *asked.select(found)
    loss, logps, lse = _per_token(of, cut, planner)
    return (loss, logps, lse) if return_lse else (loss, logps)


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
    """Says how `linear_cross_entropy` would be cut, for arrays or `jax.ShapeDtypeStruct`.

    `platform` is "cpu", "cuda" or "tpu", or a kind of TPU as JAX names it ("TPU v6 lite"); None
    stands for JAX's default device. Programs for TPUs that XLA cuts over a mesh take no kernels.
    It is the plan of a loss by itself, at any temperature, and on GPUs of one with entropy and
    *correct* beside it; what else says something of tokens goes by chunks of XLA's products. It
    depends on how many tokens there are, and so do the last bits of a token's loss and row of
    dhidden, also where libraries sum a product in another order for more rows; with
    `batch_invariant` neither does.

    Returns:
      The plan, with schedule, chunk or tile, products and scratch; `print` shows it in a line.

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
    axis = _vocab_axis(hidden, weight, bias, vocab_axis)
    of = (hidden, weight, bias, axis)
    planner = _Planner(max_scratch_bytes, batch_invariant)
    plan, cuda, cpu = planner.plans(*of, reduction != "none", tile)
    if plan.batch_invariant:
        return plan
    if platform is None:
        device = jax.devices()[0]
        known = {"gpu": "cuda", "tpu": device.device_kind}
        platform = known.get(device.platform, "cpu")
    if platform == "cuda" and cuda is not None:
        return cuda
    if platform == "cpu" and cpu is not None and on_cpu.has_library():
        return cpu
    if platform in ("cpu", "cuda"):
        return plan
    return on_tpu.plan(_tpu(platform), plan, hidden, weight, bias, axis, tile)


def _tpu(platform: str) -> pallas.Target:
    """Returns the TPU that a platform is."""
    targets = {"tpu": pallas.ANY, **pallas.TARGETS}
    if platform not in targets:
        names = ", ".join(map(repr, ("cpu", "cuda", *targets)))
        raise ValueError(f"platform is {platform!r}; it must be one of {names}, or None")
    return targets[platform]


class _Arrays:
    """Checked arrays, and what runs them."""

    def __init__(
        self,
        hidden: ArrayLike,
        weight: ArrayLike,
        labels: ArrayLike,
        bias: ArrayLike | None,
        weights: ArrayLike | None,
        vocab_axis: int | None,
        options: Options,
        implementation: Implementation | None,
    ) -> None:
        self.asked, self.implementation = implementation, choose(OPERATION, implementation)
        self.hidden = as_array("hidden", hidden, "[.., D]")
        self.weight = as_array("weight", weight, "[V, D] or [D, V]")
        y = as_array("labels", labels, "[..], a label a token")
        self.bias = None if bias is None else as_array("bias", bias, "[V]")
        self.axis = _vocab_axis(self.hidden, self.weight, self.bias, vocab_axis)
        meshes.check_whole(OPERATION, "hidden", self.hidden, columns=-1)
        # Every chunk takes all of D.
        self.weight = meshes.with_whole_axis(self.weight, 1 - self.axis, self.hidden)
        self.shape = self.hidden.shape[:-1]
        if not jnp.issubdtype(y.dtype, jnp.integer):
            raise TypeError(f"labels have dtype {y.dtype}; it must be an integer")
        y = self._per_token("labels", y)
        options = dataclasses.replace(options, implementation=implementation)
        self.labels, self.options = narrow_labels(y, options)
        if not all(isinstance(extent, int) for extent in self.shape):
            self.options = self.options.in_xla()
        self.weights = None
        if weights is not None:
            self.weights = self._per_token("weights", weights).astype(jnp.float32)

    def _per_token(self, name: str, array: ArrayLike) -> jax.Array:
        """Returns an array of a number a token."""
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
    def flat(self) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array]:
        """Hidden [N, D], weight, bias and labels [N]."""
        hidden = self.hidden.reshape(-1, self.hidden.shape[-1])
        return hidden, self.weight, self.bias, self.labels.reshape(-1)

    @property
    def as_run(self) -> tuple[jax.Array, jax.Array, jax.Array | None, jax.Array]:
        """The same, with all axes of tokens where XLA may cut any of them (`auto_parts`)."""
        is_known = all(isinstance(extent, int) for extent in self.shape)
        has_kernels = self.implementation != "reference"
        if is_known and has_kernels and meshes.are_left_to_xla(self.hidden, self.weight):
            return self.hidden, self.weight, self.bias, self.labels
        return self.flat

    def planner(self, max_scratch_bytes: int | None, batch_invariant: bool) -> "_Planner":
        """Returns what plans for them.

        Raises:
            ValueError: something that the implementation does not have.
        """
        if batch_invariant and self.implementation == "reference":
            raise ValueError(
                "batch_invariant is True with the implementation 'reference', whose products have "
                "as many rows as there are tokens: it takes 'custom_call' or 'pallas'"
            )
        return _Planner(max_scratch_bytes, batch_invariant)

    def functions(
        self,
        reduced: bool,
        planner: "_Planner",
        cut: Cut | None = None,
    ) -> "_Functions":
        """Returns what computes, by the implementation and the plan.

        With a `cut`, arrays are a device's.
        """
        hidden, weight, bias, _ = self.flat
        products, options = Products(self.axis, planner.batch_invariant), self.options
        exchange = None if cut is None else cut.exchange()
        fused = None
        if cut is not None and exchange is not None:
            options = vocab_shards.shard_options(options, exchange)
            if reduced and cut.leaves_axes and self.implementation != "reference":
                fused = planner.chunk(hidden, weight, bias, self.axis, options.tile)
            reduced = False
        schedule = None
        if self.implementation != "reference":
            schedule = planner(options, products, reduced, hidden, weight, bias)
            is_cut_by_xla = exchange is None and meshes.are_left_to_xla(hidden, weight)
            # No device has a part of tokens of which nobody knows how many there are.
            if is_cut_by_xla and not schedule.plan.any_count:
                schedule = dataclasses.replace(schedule, of_device=planner, keeps=False)
        if exchange is not None:
            return _Functions(
                parts, (parts.Work(self.options, exchange, products, schedule, fused),)
            )
        if schedule is None:
            return _Functions(reference, (options, products))
        return _Functions(schedules, (schedule,))

    def known_of(
        self,
        planner: "_Planner",
        asked: Request,
        exchange: vocab_shards.OverDevices | None = None,
    ) -> TokenOutputs:
        """Returns what is asked for of each token [..].

        With an `exchange`, the weight is a part's.
        """
        if exchange is None and self.implementation != "reference":
            # Tokens are flattened, which leaves them where they are if the first axis alone is cut.
            for axis in range(1, self.hidden.ndim - 1):
                self.hidden = gathering.watched(
                    OPERATION, "hidden", self.hidden, axis, axis_of="tokens"
                )
        hidden, weight, bias, labels = self.flat
        columns = asked.columns
        if columns is not None:
            columns = columns.reshape(-1, columns.shape[-1])
        flat = dataclasses.replace(asked, columns=columns)
        is_dense = self.implementation == "reference"
        chunk = 1 if is_dense else self._chunk(planner)
        products = Products(self.axis, planner.batch_invariant)
        options = planner.of_rows(self.options, weight.shape[self.axis])
        chunks = known.Chunks(options, products, chunk, flat.distribution)
        is_symbolic = not isinstance(labels.shape[0], int)
        if planner.batch_invariant or (is_symbolic and not is_dense):
            hidden, labels, columns = tokens.padded(chunk, hidden, labels, columns)
            flat = dataclasses.replace(flat, columns=columns)
        given = flat, hidden, weight, bias, labels
        if exchange is None:
            make: Any = known.known_of_dense if is_dense else known.known_of
            found = one_program.run(Bound(make, chunks), *given)
        else:
            work = known_parts.Parts(chunks, exchange)
            make = known_parts.known_of_dense if is_dense else known_parts.known_of
            found = one_program.run(Bound(make, work), *given)
        count = self.labels.size
        shaped: TokenOutputs = jax.tree.map(
            lambda one: one[:count].reshape(*self.shape, *one.shape[1:]), found
        )
        return shaped

    def reduced_known(self, planner: "_Planner", asked: Request) -> reduced_known.Work | None:
        """Returns what makes gradients with a loss and all that is asked for, or None."""
        hidden, weight, bias, _ = self.flat
        is_whole = not meshes.are_left_to_xla(hidden, weight)
        has_pass = self.implementation != "reference" and not planner.batch_invariant
        # Columns of a [D, V] weight are no rows to gather.
        has_rows = asked.columns is None or self.axis == 0
        if not (has_rows and is_whole and has_pass):
            return None
        products = Products(self.axis, False)
        schedule = planner(self.options, products, True, hidden, weight, bias)
        # Nobody pads the chunks of this pass.
        if not schedule.is_fused or schedule.plan.any_count:
            return None
        chunks = known.Chunks(schedule.options, products, self._chunk(planner), asked.distribution)
        cuda = schedule.cuda
        cuda = cuda if cuda is not None and cuda.products < 4 else None
        return reduced_known.Work(chunks, cuda, asked.correct)

    def _chunk(self, planner: "_Planner") -> int:
        """Returns the tokens of a chunk where something is asked for of each."""
        hidden, weight, bias, labels = self.flat
        of = (hidden, weight, bias, self.axis)
        plan, _, _ = planner.plans(*of, False, self.options.tile)
        if plan.batch_invariant:
            return plan.tokens
        chunk = max(min(plan.tokens, plans.USUAL_TOKENS), 1)
        if plan.schedule != "tokens":
            # Too few bytes for sums of dweight, which are taken all the same.
            of_logit = 12 if plan.any_count else 8
            chunk = max(plan.max_scratch_bytes // (of_logit * weight.shape[self.axis]), 1)
        if plan.any_count:
            return min(chunk, plan.tokens)
        return min(chunk, max(len(labels), 1))

    def find(self, axis_name: AxisName | None) -> Cut | None:
        """Returns how they are known to be cut; where they are not, a gather is to be told of."""
        cut = find_cut(self.hidden, self.weight, self.axis, axis_name)
        if cut is None and self.implementation != "reference":
            self.hidden = gathering.watched(OPERATION, "hidden", self.hidden, -1, axis_of="D")
            self.weight = gathering.watched(
                OPERATION, "weight", self.weight, self.axis, calls_ask=True
            )
        return cut

    def place(self, cut: Cut) -> None:
        """Has what has a number a token lie as tokens do."""
        self.labels = cut.place(self.labels)
        self.weights = None if self.weights is None else cut.place(self.weights)

    def of_device(
        self, hidden: jax.Array, weight: jax.Array, bias: jax.Array | None, labels: jax.Array
    ) -> "_Arrays":
        """Returns what a device has of them."""
        given = self.axis, self.options, self.asked
        return _Arrays(hidden, weight, labels, bias, None, *given)


def _per_token(
    of: _Arrays, cut: Cut | None, planner: "_Planner"
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns loss, logps and lse, each [..] in f32; has weights lie as these do."""
    if cut is None:
        outputs = of.functions(False, planner).per_token(*of.as_run)
        loss, logps, lse = (one.reshape(of.shape) for one in outputs)
        return loss, logps, lse

    def of_device(hidden: Any, weight: Any, bias: Any, labels: Any) -> Any:
        one = of.of_device(hidden, cut.whole(weight), bias, labels)
        run = one.functions(False, planner, cut)
        return tuple(output.reshape(one.shape) for output in run.per_token(*one.flat))

    of.place(cut)
    results = (cut.tokens,) * 3
    found: tuple[jax.Array, jax.Array, jax.Array] = cut.run(
        of_device, results, of.hidden, of.weight, of.bias, of.labels
    )
    return found


def _known(of: _Arrays, cut: Cut | None, planner: "_Planner", asked: Request) -> TokenOutputs:
    """Returns what is asked for of each token [..]; has weights lie as these do."""
    if cut is None:
        return of.known_of(planner, asked)
    columns = [] if asked.columns is None else [cut.place(asked.columns)]
    names = ["loss", "logps", "lse", *(["entropy", "correct"] if asked.distribution else [])]
    names += ["column_logps"] * len(columns)

    def of_device(hidden: Any, weight: Any, bias: Any, labels: Any, *columns: Any) -> Any:
        one = of.of_device(hidden, cut.whole(weight), bias, labels)
        given = dataclasses.replace(asked, columns=columns[0] if columns else None)
        found = one.known_of(planner, given, cut.exchange())
        return tuple(getattr(found, name) for name in names)

    of.place(cut)
    results = (cut.tokens,) * len(names)
    found = cut.run(of_device, results, of.hidden, of.weight, of.bias, of.labels, *columns)
    return TokenOutputs(**dict(zip(names, found, strict=True)))


def _reduced(
    of: _Arrays,
    cut: Cut | None,
    planner: "_Planner",
    reduction: Literal["mean", "sum"],
) -> tuple[jax.Array, jax.Array]:
    """Returns the scalar loss and lse [..]."""
    if cut is None:
        *arrays, labels = of.as_run
        weights = None if of.weights is None else of.weights.reshape(labels.shape)
        factors = token_factors(of.options, reduction, labels, weights)
        loss, lse = of.functions(True, planner).reduced(*arrays, labels, factors)
        return loss, lse.reshape(of.shape)

    def of_device(hidden: Any, weight: Any, bias: Any, labels: Any, factors: Any) -> Any:
        one = of.of_device(hidden, cut.whole(weight), bias, labels)
        run = one.functions(True, planner, cut)
        loss, lse = run.reduced(*one.flat, factors.reshape(-1))
        return cut.total(loss), lse.reshape(one.shape)

    of.place(cut)
    factors = token_factors(of.options, reduction, of.labels, of.weights)
    results = PartitionSpec(), cut.tokens
    loss, lse = cut.run(of_device, results, of.hidden, of.weight, of.bias, of.labels, factors)
    return loss, lse


def _reduced_known(
    of: _Arrays, work: reduced_known.Work, reduction: Literal["mean", "sum"], asked: Request
) -> tuple[jax.Array, ...]:
    """Returns the scalar loss, and what is asked for of each token [..]."""
    hidden, weight, bias, labels = of.flat
    weights = None if of.weights is None else of.weights.reshape(-1)
    factors = token_factors(of.options, reduction, labels, weights)
    columns = asked.columns
    columns = None if columns is None else columns.reshape(-1, columns.shape[-1])
    flat = dataclasses.replace(asked, columns=columns)
    run = Bound(reduced_known.reduced, work)
    found = one_program.run(run, flat, hidden, weight, bias, labels, factors)
    return found.loss, *(one.reshape(*of.shape, *one.shape[1:]) for one in asked.select(found))


@dataclasses.dataclass(frozen=True)
class _Planner:
    """Makes schedules of arrays, with all that a user says of their plan."""

    max_scratch_bytes: int | None
    batch_invariant: bool

    def __call__(
        self, options: Options, products: Products, reduced: bool, *arrays: Any
    ) -> schedules.Schedule:
        """Returns what runs for hidden [N, D], weight and bias."""
        hidden, weight, bias = arrays
        axis = products.vocab_axis
        chosen = self.plans(hidden, weight, bias, axis, reduced, options.tile)
        options = self.of_rows(options, weight.shape[axis])
        return schedules.Schedule(options, products, *chosen)

    def of_rows(self, options: Options, vocab: int) -> Options:
        """Returns options for the kernels over logits with so many columns."""
        return options.anywhere(vocab) if self.batch_invariant else options

    def plans(
        self,
        hidden: Any,
        weight: Any,
        bias: Any,
        vocab_axis: int,
        reduced: bool,
        tile: Tile,
        *,
        running: bool = False,
    ) -> tuple[Plan, Plan | None, Plan | None]:
        """Returns the plan, and what takes its place on NVIDIA's GPUs and on CPUs, if anything."""
        limit = self.max_scratch_bytes
        if limit is not None:
            try:
                limit = operator.index(limit)
            except TypeError:
                raise TypeError(
                    f"max_scratch_bytes is {limit!r}; it must be an integer, in bytes"
                ) from None
        has_bias = bias is not None
        of = partial(Problem.of, hidden, vocab_axis=vocab_axis, bias=has_bias, reduced=reduced)
        if not all(isinstance(extent, int) for extent in weight.shape):
            raise ValueError(
                f"weight has shape {weight.shape}; its extents must be numbers: only axes of "
                'tokens may be symbolic, but for implementation="reference"'
            )
        # XLA adds to running sums what it makes of a weight in f32.
        taken = jax.ShapeDtypeStruct(weight.shape, jnp.float32) if running else weight
        if self.batch_invariant:
            return plans.batch_invariant(of(taken), limit), None, None
        if not isinstance(of(taken).tokens, int):
            return plans.any_count(of(taken), limit), None, None
        plan = plans.choose(of(taken), limit)
        problem = of(weight, running=running)
        # There the usual budget is no larger with a bias.
        if limit is None:
            limit = plans.usual_budget(dataclasses.replace(problem, bias=False))
        on_gpus = on_cuda.choose(problem, limit)
        # What is handed over takes memory on every platform, unless one program has both passes.
        hands_over = jax.default_backend() == "cpu"
        on_cpus = None
        if hidden.dtype == taken.dtype:
            on_cpus = on_cpu.choose(problem, plan, tile, hidden.dtype, hands_over=hands_over)
        return plan, on_gpus, on_cpus

    def chunk(
        self, hidden: jax.Array, weight: jax.Array, bias: Any, vocab_axis: int, tile: Tile
    ) -> int | None:
        """Returns the tokens of chunks that have gradients in the forward pass; None for none.

        Nobody pads these chunks.
        """
        plan, _, _ = self.plans(hidden, weight, bias, vocab_axis, True, tile)
        is_padded = plan.batch_invariant or plan.any_count
        is_fused = plan.schedule == "tokens" and plan.products < 4 and not is_padded
        return plan.tokens if is_fused else None

    def run(self, name: str, whole: schedules.Schedule, *arrays: Any) -> Any:
        """Returns what a pass of `whole` does, each device its share."""
        return auto_parts.run(name, whole, self, *arrays)


@dataclasses.dataclass(frozen=True)
class _Functions:
    """Both functions of an implementation, with all but their arrays."""

    module: Any
    fixed: tuple[Any, ...]

    def per_token(self, *arrays: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        run = Bound(self.module.per_token, *self.fixed)
        outputs: tuple[jax.Array, jax.Array, jax.Array] = one_program.run(run, *arrays)
        return outputs

    def reduced(self, *arrays: Any) -> tuple[jax.Array, jax.Array]:
        run = Bound(self.module.reduced, *self.fixed)
        outputs: tuple[jax.Array, jax.Array] = one_program.run(run, *arrays)
        return outputs


def _vocab_axis(hidden: Any, weight: Any, bias: Any, vocab_axis: int | None) -> int:
    """Returns which axis of the weight is the vocabulary's, having checked shapes and dtypes."""
    check_dtype("hidden", hidden)
    check_dtype("weight", weight)
    if weight.dtype != hidden.dtype and jnp.float32 not in (weight.dtype, hidden.dtype):
        raise TypeError(
            f"weight has dtype {weight.dtype} and hidden {hidden.dtype}; of two dtypes one must be "
            "float32: cast the one that may be rounded"
        )
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
