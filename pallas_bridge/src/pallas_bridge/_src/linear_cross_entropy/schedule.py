"""What runs each pass of a loss, on each platform.

A `Planner` plans for arrays, and a `Schedule` runs the plan by one of these:

- chunks in XLA (`chunks`), on every platform;
- one call of the library for all chunks, on CPUs and NVIDIA GPUs (`library_plan`);
- kernels in Pallas, on TPUs (`pallas_tpu`).

Platform and number of devices of a program are known when the program is lowered. So a pass is
traced as `jax.lax.platform_dependent` of primitives that choose when they are lowered: a library
call or a kernel on one device, and chunks in XLA where XLA would shard the arrays.
"""

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from .. import library, meshes, pallas
from ..bound import Bound
from ..chunk_loops import zeros
from ..compat import tell_devices
from ..cross_entropy.calls import attributes
from ..deferred import bind_deferred, make_primitive
from ..logits_gemms import Gemms, as_gemm_operands
from ..losses.options import Options, Tile
from ..losses.vocab_shards import Loss
from ..pallas import Target
from ..partitioning import is_whole
from ..targets import declared
from . import library_plan
from . import plan as plans
from .chunks import ColumnChunks, Operands, TokenChunks, run_padded, run_two_passes
from .declaration import OPERATION
from .plan import Plan, Problem

PassName = Literal["forward", "backward", "fused"]
# The library's targets are named TARGET_forward and so on.
TARGET = "xentile_linear_cross_entropy"
# The outputs of each token that targets return, in this order.
OUTPUTS = ("loss", "logps", "lse", "lse_low", "entropy", "argmax")


@dataclass(frozen=True)
class Schedule:
    """The plans of a loss, and what runs its passes; everything but the arrays."""

    options: Options
    gemms: Gemms
    # The plan of chunks in XLA.
    plan: Plan
    # The plans of library calls on NVIDIA GPUs and on CPUs; None where there is no such call.
    cuda: Plan | None
    cpu: Plan | None
    # Where XLA may shard arrays, partition(name, schedule, *arrays) runs a pass on each device's
    # shards. It is hashable, and its text names all that it does.
    partition: Callable[..., Any] | None = None
    # Whether the forward pass may save logits for the backward pass.
    may_save_logits: bool = True

    @property
    def is_fused(self) -> bool:
        """Whether the forward pass computes gradients too, where the reduction is inside."""
        plans = (self.plan, self.cuda, self.cpu)
        return any(plan is not None and plan.products < 4 and not plan.hands_over for plan in plans)

    @property
    def saves_logits(self) -> bool:
        """Whether the forward pass saves logits for the backward pass."""
        has_plan = self.cpu is not None and self.cpu.hands_over and has_cpu_calls()
        return self.may_save_logits and has_plan and self.options.implementation != "pallas"

    def forward(self, operands: Operands) -> Any:
        """Returns loss, logps, lse and lse_low (what rounding lse left out), each [N] in f32."""
        return self.run("forward", self.options, operands)

    def backward(self, operands: Operands, saved: Any, cotangents: Any) -> Any:
        """Returns gradients for saved (lse, lse_low) and cotangents of (loss, logps, lse)."""
        return self.run("backward", self.options, operands, saved, cotangents)

    def forward_saving_logits(self, operands: Operands) -> Any:
        """Returns what `forward` does, and the saved logits for `backward_with_logits`, or ()."""
        plan = self.cpu
        if plan is None or not self.saves_logits:
            return *self.forward(operands), ()
        call = Bound(call_cpu, "keep", self.options, self.gemms.vocab_axis, plan)
        return call_on("cpu", call, Bound(_forward_saving_nothing, self, plan), operands)

    def backward_with_logits(
        self, operands: Operands, saved: Any, cotangents: Any, logits: Any
    ) -> Any:
        """Returns what `backward` does, from the logits that `forward_saving_logits` saved."""
        if not logits:
            return self.backward(operands, saved, cotangents)
        call = Bound(call_cpu, "resume", self.options, self.gemms.vocab_axis, self.cpu)
        arrays = operands, saved, cotangents, logits
        return call_on("cpu", call, Bound(_backward_with_nothing, self), *arrays)

    def fused(self, operands: Operands, factors: jax.Array, *, needs_losses: bool) -> Any:
        """Returns loss, lse, lse_low, and gradients for cotangents `factors` of the loss.

        `needs_losses` is whether losses of tokens whose factor is 0 are read too.
        """
        every_token = self.options.every_token or needs_losses
        options = dataclasses.replace(self.options, every_token=every_token)
        return self.run("fused", options, operands, factors)

    def fused_adding(self, operands: Operands, factors: jax.Array, sums: jax.Array) -> Any:
        """Returns what `fused` does, with dweight added to `sums`, in f32."""
        plan, default = self.cuda, Bound(_fused_adding, self)
        if plan is None or plan.products >= 4 or not has_cuda_call("add"):
            return default(operands, factors, sums)
        call = Bound(call_cuda, "add", self.options, self.gemms.vocab_axis, plan)
        return call_on("cuda", call, default, operands, factors, sums)

    def run(self, name: PassName, options: Options, *arrays: Any) -> Any:
        """Returns the pass `name` of its arrays, operands first."""
        if self.partition is not None:
            whole = dataclasses.replace(self, options=options, partition=None)
            return self.partition(name, whole, *arrays)
        gemms, plan = self.gemms, self.plan
        token_chunks = TokenChunks(Loss(options), gemms, plan.tokens)
        by_tokens: Callable[..., Any] = Bound(getattr(TokenChunks, name), token_chunks)
        if plan.batch_invariant:
            return run_padded(name, by_tokens, plan.tokens, *arrays)
        problem = Problem.of(arrays[0], gemms.vocab_axis, reduced=False)
        other = plans.without_kernels(problem, plan)
        chunks = ColumnChunks(options, gemms, other.tokens, other.columns)
        by_columns: Callable[..., Any] = Bound(getattr(ColumnChunks, name), chunks)
        if plan.any_count:
            by_tokens = Bound(run_padded, name, by_tokens, plan.tokens)
            by_columns = Bound(run_padded, name, by_columns, other.tokens)
        default = by_tokens if plan.schedule == "tokens" else by_columns
        find = Bound(_find_kernels, name, options, gemms.vocab_axis, plan.max_scratch_bytes)
        calls = {
            platform: Bound(call_if_whole, call, default)
            for platform, call in self._calls(name, options).items()
        }
        if options.implementation == "pallas" and pallas.interpret_params is not None:
            # Pallas' interpreter has ordered callbacks, which are chosen as a program is traced.
            target = dataclasses.replace(pallas.INTERPRETER, interpret=pallas.interpret_params)
            return find(target, (True, True), arrays[0])(*arrays)
        if options.implementation == "custom_call":
            return jax.lax.platform_dependent(*arrays, **calls, default=default)
        is_unknown = meshes.is_without_devices(*jax.tree.leaves(arrays))
        primitive = _kernels_for_any if is_unknown else _kernels
        on_tpu = partial(bind_deferred, primitive, by_columns, name=name, find=find)
        return jax.lax.platform_dependent(*arrays, tpu=on_tpu, **calls, default=default)

    def _calls(self, name: str, options: Options) -> dict[str, Any]:
        """The library's calls for a pass, by platform, where there are any."""
        fixed = (name, options, self.gemms.vocab_axis)
        calls = {}
        if self.cuda is not None and has_cuda_call():
            calls["cuda"] = Bound(call_cuda, *fixed, self.cuda)
        if self.cpu is not None and has_cpu_calls():
            calls["cpu"] = Bound(call_cpu, *fixed, self.cpu)
        return calls


def _forward_saving_nothing(schedule: Schedule, plan: Plan, operands: Operands) -> tuple[Any, ...]:
    """Returns what `forward_saving_logits` does in programs that save none."""
    weight = operands.weight
    _, scratch = library_plan.plan_call("cpu", "keep", schedule.gemms.vocab_axis, plan, operands)
    logits = zeros(weight, dtype=weight.dtype), zeros(weight, (scratch,), jnp.uint8)
    return *schedule.forward(operands), logits


def _backward_with_nothing(schedule: Schedule, *arrays: Any) -> Any:
    return schedule.backward(*arrays[:-1])


def _fused_adding(schedule: Schedule, operands: Operands, factors: Any, sums: jax.Array) -> Any:
    hidden, weight, *_ = operands
    # In f32 the weight has a gradient in f32, which is added to `sums` unrounded. Hidden states
    # wider than the weight are rounded to its dtype, as they are without this cast.
    rounded = as_gemm_operands(hidden, weight)[0].astype(hidden.dtype)
    operands = operands._replace(hidden=rounded, weight=weight.astype(jnp.float32))
    *numbers, gradients = schedule.fused(operands, factors, needs_losses=False)
    dhidden, dweight, dbias = gradients
    return *numbers, (dhidden, sums + dweight, dbias)


@dataclass(frozen=True)
class Planner:
    """Plans for arrays, with all that a user says of plans."""

    # `isolated` where losses are to be batch-invariant.
    gemms: Gemms
    tile: Tile
    max_scratch_bytes: int | None

    def schedule(
        self, options: Options, operands: Any, *, reduced: bool, running: bool = False
    ) -> Schedule:
        """Returns what runs for operands; `running` as for `plans`."""
        found = self.plans(operands, reduced=reduced, running=running)
        options = self.row_options(options, operands.weight.shape[self.gemms.vocab_axis])
        return Schedule(options, self.gemms, *found)

    def row_options(self, options: Options, vocab: int) -> Options:
        """Returns options for the kernels over logits with so many columns."""
        return options.anywhere(vocab) if self.gemms.isolated else options

    def plans(
        self, operands: Sequence[Any], *, reduced: bool, running: bool = False
    ) -> tuple[Plan, Plan | None, Plan | None]:
        """Returns the plans of chunks in XLA, of a CUDA call and of a CPU call.

        A plan is None where the platform has no such call. Operands are hidden, weight and bias, or
        their shapes and dtypes. `reduced` is whether the reduction is inside, `running` whether
        dweight is added to sums.
        """
        hidden, weight, bias, *_ = operands
        limit, vocab_axis = self.max_scratch_bytes, self.gemms.vocab_axis
        if limit is not None:
            try:
                limit = operator.index(limit)
            except TypeError:
                raise TypeError(
                    f"max_scratch_bytes is {limit!r}; it must be an integer, in bytes"
                ) from None
        if not all(isinstance(extent, int) for extent in weight.shape):
            raise ValueError(
                f"weight has shape {weight.shape}; its extents must be numbers: only axes of "
                'tokens may be symbolic, but for implementation="reference"'
            )
        # With running sums, chunks in XLA compute the gradient of a weight in f32.
        taken = jax.ShapeDtypeStruct(weight.shape, jnp.float32) if running else weight
        problem = Problem.of((hidden, taken, bias), vocab_axis, reduced=reduced)
        if self.gemms.isolated:
            return plans.plan_equal_chunks(problem, limit), None, None
        is_known = isinstance(problem.tokens, int)
        if not is_known:
            return plans.plan_symbolic(problem, limit), None, None
        plan = plans.plan_chunks(problem, limit)
        problem = Problem.of(operands, vocab_axis, reduced=reduced, running=running)
        # In library calls, a bias does not raise the default budget.
        if limit is None:
            limit = plans.usual_budget(dataclasses.replace(problem, bias=False))
        cuda = library_plan.plan_cuda(problem, limit)
        # Saved logits are a result of the forward pass, which takes memory on other platforms too.
        saves = jax.default_backend() == "cpu"
        cpu = None
        if hidden.dtype == taken.dtype:
            cpu = library_plan.plan_cpu(problem, plan, self.tile, hidden.dtype, hands_over=saves)
        return plan, cuda, cpu

    def fused_chunk_tokens(self, operands: Operands) -> int | None:
        """Returns the tokens of a chunk whose forward pass computes gradients too.

        None if no pass does, or if the plan pads its chunks.
        """
        plan, _, _ = self.plans(operands, reduced=True)
        is_padded = plan.batch_invariant or plan.any_count
        is_fused = plan.schedule == "tokens" and plan.products < 4 and not is_padded
        return plan.tokens if is_fused else None

    def output_chunk_tokens(self, operands: Operands) -> int:
        """Returns the tokens of a chunk whose logits have auxiliary outputs."""
        plan, _, _ = self.plans(operands, reduced=False)
        if plan.batch_invariant:
            return plan.tokens
        chunk = max(min(plan.tokens, plans.USUAL_TOKENS), 1)
        if plan.schedule != "tokens":
            # The budget is too small for sums of dweight, which are made nevertheless.
            logit_bytes = 12 if plan.any_count else 8
            row_bytes = logit_bytes * operands.weight.shape[self.gemms.vocab_axis]
            chunk = max(plan.max_scratch_bytes // row_bytes, 1)
        return min(chunk, plan.tokens if plan.any_count else max(operands.labels.shape[0], 1))


def has_cpu_calls() -> bool:
    """Whether the library is there and has the calls; where not, XLA's chunks stay."""
    return library.has("cpu", f"{TARGET}_resume")


def has_cuda_call(name: str = "fused") -> bool:
    """Whether the library is there and has the call; where not, lowering the others says why."""
    return library.has("cuda", f"{TARGET}_{name}")


def call_cpu(name: str, options: Options, vocab_axis: int, plan: Plan, *arrays: Any) -> Any:
    """Returns what the library's call `name` for CPUs gives."""
    call = library_plan.plan_call("cpu", name, vocab_axis, plan, arrays[0])
    return call_library(name, options, *call, *arrays)


def call_cuda(
    name: str, options: Options, vocab_axis: int, plan: Plan, *arrays: Any, **more: bool
) -> Any:
    """Returns what the library's call `name` for GPUs gives; `more` are its own attributes."""
    if name == "fused" and plan.products >= 4:
        forward = partial(call_cuda, "forward", options, vocab_axis, plan)
        backward = partial(call_cuda, "backward", options, vocab_axis, plan)
        return run_two_passes(forward, backward, *arrays)
    tiling, scratch = library_plan.plan_call("cuda", name, vocab_axis, plan, arrays[0])
    return call_library(name, options, {**tiling, **more}, scratch, *arrays)


def call_library(
    name: str,
    options: Options,
    tiling: Mapping[str, int],
    scratch_bytes: int,
    operands: Operands,
    *others: Any,
) -> Any:
    """Returns what the library's call `name` gives, which makes a pass of all chunks.

    `tiling` has the attributes that say how it is tiled. Both matrices go in the dtype of GEMMs,
    and each gradient has that of its array.
    """
    hidden, weight, bias, labels = operands
    target, is_backward = declared(f"{TARGET}_{name}"), name in ("backward", "resume")
    every_token = None if is_backward else options.every_token
    values = {**dict(attributes(options, every_token)), **tiling}
    # A bias is the last argument and its gradient the last result, both in f32.
    biases = [] if bias is None else [bias.astype(jnp.float32)]
    flat = [*as_gemm_operands(hidden, weight), labels, *jax.tree.leaves(others), *biases]
    vocab = weight.size // hidden.shape[1]
    extents = {"N": len(labels), "D": hidden.shape[1], "V": vocab, "B": scratch_bytes}
    results = target.shapes(values, extents, {"hidden": hidden, "weight": weight}, {"bias": bias})
    aliases = target.aliases(always=False) or None
    call = jax.ffi.ffi_call(target.name, [*results.values()], input_output_aliases=aliases)
    found = dict(zip(results, call(*flat, **dict(target.attributes(values))), strict=True))
    outputs = tuple(found[one] for one in OUTPUTS if one in found)
    if "dhidden" not in found:
        saved = [(found["kept"], found["scratch"])] if "kept" in found else []
        return *outputs, *saved
    dbias = None if bias is None else found["dbias"].astype(bias.dtype)
    gradients = found["dhidden"], found["dweight"], dbias
    return gradients if is_backward else (*outputs, gradients)


def _find_kernels(
    name: PassName,
    options: Options,
    vocab_axis: int,
    max_scratch_bytes: int,
    target: Target,
    wanted: tuple[bool, bool],
    operands: Any,
) -> Callable[..., Any] | None:
    """Returns a pass by kernels in Pallas on `target`; None where these do not fit.

    `wanted` is which gradients it makes, of hidden and of the others; it returns zeros for others.
    """
    from . import pallas_tpu  # late: it takes as long to import as all the rest

    found = pallas_tpu.choose_kernels(
        target, operands, vocab_axis, max_scratch_bytes, named=options.tile, wanted=wanted
    )
    return None if found is None else partial(pallas_tpu.run_pass, name, target, found, options)


def call_if_whole(call: Callable[..., Any], default: Callable[..., Any], *arrays: Any) -> Any:
    """Returns call(*arrays), or default(*arrays) where XLA shards the program over a mesh."""
    return bind_deferred(_library_call, default, *arrays, call=call)


def call_on(
    platform: str, call: Callable[..., Any], default: Callable[..., Any], *arrays: Any
) -> Any:
    """Returns call(*arrays) on one device of a `platform`, and default(*arrays) elsewhere."""
    calls = {platform: Bound(call_if_whole, call, default)}
    return jax.lax.platform_dependent(*arrays, **calls, default=default)


def _choose_call(ctx: Any, *, call: Callable[..., Any], **_: Any) -> Any:
    return (ctx, call) if is_whole(ctx.module_context) else None


def _choose_kernels(
    ctx: Any, *, name: PassName, find: Any, tree: Any, keep: Sequence[int], **_: Any
) -> Any:
    # Pallas would have a kernel for each platform of the module.
    module = ctx.module_context.replace(platforms=("tpu",))
    if not is_whole(module):
        return None
    try:
        target = pallas.target(module)
    except NotImplementedError:
        return None
    # Where gradients begin among the results: of hidden, of the weight, of the bias.
    first = {"forward": 4, "backward": 0, "fused": 3}[name]
    wanted = first in keep, any(index > first for index in keep)
    if name == "forward" or not any(wanted):
        wanted = True, True
    operands, *_ = jax.tree.unflatten(tree, ctx.avals_in)
    run = find(target, wanted, operands)
    return None if run is None else (ctx.replace(module_context=module, platforms=None), run)


_library_call = make_primitive(OPERATION, "linear_cross_entropy_call", _choose_call)
_kernels = make_primitive(OPERATION, "xentile_linear_cross_entropy", _choose_kernels)
# How much VMEM there is decides whether logits are computed twice or three times.
tell_devices(_kernels)
# `_kernels` for abstract meshes, which have no devices to ask.
_kernels_for_any = make_primitive(
    OPERATION, "xentile_linear_cross_entropy_for_any", _choose_kernels
)
