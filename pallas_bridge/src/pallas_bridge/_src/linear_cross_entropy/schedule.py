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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import get_abstract_mesh

from .. import library, meshes, pallas
from ..bound import Bound
from ..checks import check_integer
from ..chunk_loops import zeros
from ..compat import tell_devices
from ..cross_entropy.calls import attributes
from ..deferred import bind_deferred, choose_if_whole, make_primitive
from ..logits_gemms import Gemms, Operands, as_gemm_operands, operand_dtype
from ..losses.options import Options, Tile
from ..losses.vocab_shards import Loss
from ..pallas import Target
from ..partitioning import is_whole
from ..targets import declared
from . import library_plan
from .chunks import ColumnChunks, TokenChunks, keeps_dlogits, run_padded, run_two_passes
from .declaration import OPERATION
from .plan import Plan, Problem, plan_chunks, usual_budget, without_kernels

PassName = Literal["forward", "backward", "fused"]
# How many scalars of each token a pass returns, before gradients.
OUTPUT_COUNTS = {"forward": 4, "backward": 0, "fused": 3}
# The library's targets are named TARGET_forward and so on.
TARGET = "xentile_linear_cross_entropy"
# The outputs of each token that targets return, in this order.
OUTPUTS = ("loss", "logps", "lse", "lse_low", "entropy", "argmax")
# What begins in the library's scratch begins at a multiple of so many bytes.
ALIGNMENT = 256
# Hidden columns from which on a GPU takes longer for logits again than for passes over logits in
# f32: where dlogits of all tokens are saved, and where chunks add to sums of dweight. Estimates, of
# prototypes' times with 4096 columns on two H200s.
LEAST_WIDTH_KEEPING, LEAST_WIDTH_ADDING = 1024, 2048


@dataclass(frozen=True)
class Planner:
    """Plans for arrays, with all that a user says of plans."""

    # `isolated` where losses are to be batch-invariant.
    gemms: Gemms
    tile: Tile
    max_scratch_bytes: int | None

    def schedule(
        self, options: Options, operands: Operands, *, reduced: bool, running: bool = False
    ) -> "Schedule":
        """Returns what runs for operands; `running` as for `plan_passes`."""
        found = self.plan_passes(operands, reduced=reduced, running=running)
        options = self.row_options(options, operands.weight.shape[self.gemms.vocab_axis])
        return Schedule(options, self, *found)

    def row_options(self, options: Options, vocab: int) -> Options:
        """Returns options for the kernels over logits with so many columns."""
        return options.anywhere(vocab) if self.gemms.isolated else options

    def fused_shard_tokens(self, operands: Sequence[Any], *, no_calls: bool = False) -> int:
        """Returns the tokens of a chunk of the forward pass that makes a shard's gradients too.

        0 if none does: where the library's calls, unless there are `no_calls`, are faster than
        XLA's GEMMs. On GPUs they compute logits twice; on CPUs they save them.
        """
        hidden, weight, *_ = operands
        least = LEAST_WIDTH_KEEPING if keeps_dlogits(operands) else LEAST_WIDTH_ADDING
        is_narrow = operand_dtype(hidden, weight).itemsize == 2
        is_faster = is_narrow and hidden.shape[-1] >= least and jax.default_backend() == "gpu"
        if not (no_calls or is_faster):
            return 0
        plan, *_ = self.plan_passes(operands, reduced=True)
        is_fused = plan.schedule == "tokens" and plan.products < 4 and not plan.is_padded
        return plan.tokens if is_fused else 0

    def plan_passes(
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
            limit = check_integer("max_scratch_bytes", limit)
        if not all(isinstance(extent, int) for extent in weight.shape):
            raise ValueError(
                f"weight has shape {weight.shape}; its extents must be numbers: only axes of "
                'tokens may be symbolic, but for implementation="reference"'
            )
        # With running sums, chunks in XLA compute the gradient of a weight in f32.
        taken = jax.ShapeDtypeStruct(weight.shape, jnp.float32) if running else weight
        problem = Problem.of((hidden, taken, bias), vocab_axis, reduced=reduced)
        plan = plan_chunks(problem, limit, isolated=self.gemms.isolated)
        if plan.is_padded:
            return plan, None, None
        problem = Problem.of(operands, vocab_axis, reduced=reduced, running=running)
        # In library calls, a bias does not raise the default budget.
        if limit is None:
            limit = usual_budget(dataclasses.replace(problem, bias=False))
        cuda = library_plan.plan_cuda(problem, limit)
        # Saved logits are a result of the forward pass, which takes memory on other platforms too.
        saves = jax.default_backend() == "cpu"
        cpu = None
        if hidden.dtype == taken.dtype:
            cpu = library_plan.plan_cpu(
                problem, plan, self.tile, hidden.dtype, may_save_logits=saves
            )
        return plan, cuda, cpu


@dataclass(frozen=True)
class Schedule:
    """The plans of a loss, and what runs its passes; everything but the arrays."""

    options: Options
    planner: Planner
    # The plan of chunks in XLA.
    plan: Plan
    # The plans of library calls on NVIDIA GPUs and on CPUs; None where there is no such call.
    cuda: Plan | None
    cpu: Plan | None

    @property
    def is_fused(self) -> bool:
        """Whether the forward pass computes gradients too, where the reduction is inside."""
        every = (one for one in (self.plan, self.cuda, self.cpu) if one is not None)
        return any(one.products < 4 and not one.saves_logits for one in every)

    def forward_saving_logits(self, operands: Operands) -> Any:
        """Returns a pass forward, and the saved logits for `backward_with_logits`, or ()."""
        plan = self.cpu
        saves = plan is not None and plan.saves_logits and has_cpu_calls()
        if not saves or self.options.implementation == "pallas":
            return *self.run("forward", operands), ()
        default = Bound(_forward_saving_nothing, self)
        return call_on("cpu", self._call("cpu", "keep"), default, operands)

    def backward_with_logits(
        self, operands: Operands, saved: Any, cotangents: Any, logits: Any
    ) -> Any:
        """Returns a pass backward, from the logits that `forward_saving_logits` saved."""
        if not logits:
            return self.run("backward", operands, saved, cotangents)
        arrays = operands, saved, cotangents, logits
        default = Bound(_backward_with_nothing, self)
        return call_on("cpu", self._call("cpu", "resume"), default, *arrays)

    def fused(self, operands: Operands, factors: jax.Array, *, needs_losses: bool) -> Any:
        """Returns loss, lse, lse_low, and gradients for cotangents `factors` of the loss.

        `needs_losses` is whether losses of tokens whose factor is 0 are read too.
        """
        every_token = self.options.every_token or needs_losses
        options = dataclasses.replace(self.options, every_token=every_token)
        return dataclasses.replace(self, options=options).run("fused", operands, factors)

    def fused_adding(self, operands: Operands, factors: jax.Array, sums: jax.Array) -> Any:
        """Returns what `fused` does, with dweight added to `sums`, in f32."""
        default = Bound(_fused_adding, self)
        if self.cuda is None or self.cuda.products >= 4 or not has_cuda_call("add"):
            return default(operands, factors, sums)
        return call_on("cuda", self._call("cuda", "add"), default, operands, factors, sums)

    def _leaves_hidden(self, name: PassName, operands: Operands) -> bool:
        """Whether a CUDA call of its own makes dhidden, while devices sum dweight."""
        (tokens, _), plan = operands.hidden.shape, self.cuda
        vocab, mesh = operands.weight.shape[self.planner.gemms.vocab_axis], get_abstract_mesh()
        is_split = any(mesh.shape[name] > 1 for name in mesh.manual_axes)
        is_whole = plan is not None and plan.tokens >= tokens and plan.columns >= vocab
        dtypes = {operands.hidden.dtype, operands.weight.dtype}
        is_called = name == "fused" and dtypes == {jnp.dtype(jnp.bfloat16)}
        return is_split and is_whole and is_called and has_cuda_call("hidden")

    def _room_for_sums(self, hidden: jax.Array) -> int:
        """Returns bytes for sums of dhidden by short tiles; 0 where the budget has none."""
        limit, room = self.planner.max_scratch_bytes, 4 * hidden.size + ALIGNMENT
        assert self.cuda is not None
        return room if limit is None or self.cuda.scratch_bytes + room <= limit else 0

    def _call(self, platform: str, name: str) -> Bound:
        plan = self.cuda if platform == "cuda" else self.cpu
        return Bound(
            call_library, platform, name, self.options, self.planner.gemms.vocab_axis, plan
        )

    def run(self, name: PassName, *arrays: Any) -> Any:
        """Returns the pass `name` of its arrays, operands first.

        - forward: loss, logps, lse and lse_low (what rounding lse left out), each [N] in f32;
        - backward: gradients for saved (lse, lse_low) and cotangents of (loss, logps, lse);
        - fused: loss, lse, lse_low, and gradients for cotangents of the loss.
        """
        options, gemms, plan = self.options, self.planner.gemms, self.plan
        token_chunks = TokenChunks(Loss(options), gemms, plan.tokens)
        by_tokens: Callable[..., Any] = Bound(getattr(TokenChunks, name), token_chunks)
        if plan.batch_invariant:
            return run_padded(name, by_tokens, plan.tokens, *arrays)
        problem = Problem.of(arrays[0], gemms.vocab_axis, reduced=False)
        other = without_kernels(problem, plan)
        chunks = ColumnChunks(options, gemms, other.tokens, other.columns)
        by_columns: Callable[..., Any] = Bound(getattr(ColumnChunks, name), chunks)
        if plan.any_count:
            by_tokens = Bound(run_padded, name, by_tokens, plan.tokens)
            by_columns = Bound(run_padded, name, by_columns, other.tokens)
        default = by_tokens if plan.schedule == "tokens" else by_columns
        find = Bound(_find_kernels, name, options, gemms.vocab_axis, plan.max_scratch_bytes)
        if options.implementation == "pallas" and pallas.interpret_params is not None:
            # Pallas' interpreter has ordered callbacks, which are chosen as a program is traced.
            target = dataclasses.replace(pallas.INTERPRETER, interpret=pallas.interpret_params)
            return find(target, (True, True), arrays[0])(*arrays)
        calls: dict[str, Callable[..., Any]] = {}
        if options.implementation != "custom_call":
            is_unknown = meshes.is_without_devices(*jax.tree.leaves(arrays))
            primitive = _kernels_for_any if is_unknown else _kernels
            calls["tpu"] = partial(bind_deferred, primitive, by_columns, name=name, find=find)
        if self.cuda is not None and has_cuda_call():
            call = self._call("cuda", name)
            if self._leaves_hidden(name, arrays[0]):
                call = Bound(_call_leaving_hidden, call, self._room_for_sums(arrays[0].hidden))
            calls["cuda"] = Bound(bind_call, call, default)
        if self.cpu is not None and has_cpu_calls():
            calls["cpu"] = Bound(bind_call, self._call("cpu", name), default)
        return jax.lax.platform_dependent(*arrays, **calls, default=default)


def _forward_saving_nothing(schedule: Schedule, operands: Operands) -> tuple[Any, ...]:
    """Returns what `forward_saving_logits` does in programs that save none."""
    weight, axis = operands.weight, schedule.planner.gemms.vocab_axis
    assert schedule.cpu is not None
    _, scratch = library_plan.plan_call("cpu", "keep", axis, schedule.cpu, operands)
    logits = zeros(weight, dtype=weight.dtype), zeros(weight, (scratch,), jnp.uint8)
    return *schedule.run("forward", operands), logits


def _backward_with_nothing(schedule: Schedule, *arrays: Any) -> Any:
    return schedule.run("backward", *arrays[:-1])


def _call_leaving_hidden(call: Callable[..., Any], room: int, *arrays: Any) -> Any:
    return call(*arrays, leaves_hidden=True, room=room)


def _fused_adding(schedule: Schedule, operands: Operands, factors: Any, sums: jax.Array) -> Any:
    hidden, weight, *_ = operands
    # In f32 the weight has a gradient in f32, which is added to `sums` unrounded. Hidden states
    # wider than the weight are rounded to its dtype, as they are without this cast.
    rounded = as_gemm_operands(hidden, weight)[0].astype(hidden.dtype)
    operands = operands._replace(hidden=rounded, weight=weight.astype(jnp.float32))
    *numbers, gradients = schedule.fused(operands, factors, needs_losses=False)
    dhidden, dweight, dbias = gradients
    return *numbers, (dhidden, sums + dweight, dbias)


def bind_call(call: Callable[..., Any], default: Callable[..., Any], *arrays: Any) -> Any:
    """Returns call(*arrays), or default(*arrays) where XLA shards the program over a mesh."""
    return bind_deferred(_library_call, default, *arrays, call=call)


def call_on(platform: str, call: Any, default: Any, *arrays: Any) -> Any:
    """Returns call(*arrays) on one device of a `platform`, and default(*arrays) elsewhere."""
    calls = {platform: Bound(bind_call, call, default)}
    return jax.lax.platform_dependent(*arrays, **calls, default=default)


def has_cpu_calls() -> bool:
    """Whether the library is there and has the calls; where not, XLA's chunks stay."""
    return library.has("cpu", f"{TARGET}_resume")


def has_cuda_call(name: str = "fused") -> bool:
    """Whether the library is there and has the call; where not, lowering the others says why."""
    return library.has("cuda", f"{TARGET}_{name}")


def call_library(
    platform: str,
    name: str,
    options: Options,
    vocab_axis: int,
    plan: Plan,
    operands: Operands,
    *others: Any,
    room: int = 0,
    **more: bool,
) -> Any:
    """Returns what the library's call `name` gives, which makes a pass of all chunks.

    `more` are attributes of its own, `room` bytes of scratch beyond the plan's. Both matrices go in
    the dtype of GEMMs, and each gradient has that of its array.
    """
    if platform == "cuda" and name == "fused" and plan.products >= 4:
        fixed = options, vocab_axis, plan
        forward = partial(call_library, platform, "forward", *fixed)
        backward = partial(call_library, platform, "backward", *fixed)
        return run_two_passes(forward, backward, operands, *others)
    tiling, scratch_bytes = library_plan.plan_call(platform, name, vocab_axis, plan, operands)
    hidden, weight, bias, labels = operands
    target, is_backward = declared(f"{TARGET}_{name}"), name in ("backward", "resume")
    every_token = None if is_backward else options.every_token
    values = {**dict(attributes(options, every_token)), **tiling, **more}
    # A bias is the last argument and its gradient the last result, both in f32.
    biases = [] if bias is None else [bias.astype(jnp.float32)]
    flat = [*as_gemm_operands(hidden, weight), labels, *jax.tree.leaves(others), *biases]
    vocab = weight.shape[vocab_axis]
    extents = {"N": len(labels), "D": hidden.shape[1], "V": vocab, "B": scratch_bytes + room}
    results = target.shapes(values, extents, {"hidden": hidden, "weight": weight}, {"bias": bias})
    aliases = target.aliases(always=False) or None
    call = jax.ffi.ffi_call(target.name, [*results.values()], input_output_aliases=aliases)
    found = dict(zip(results, call(*flat, **dict(target.attributes(values))), strict=True))
    if more.get("leaves_hidden"):
        given = found["dhidden"], flat[1], labels, found["scratch"]
        later = declared(f"{TARGET}_hidden")
        values = {**dict(attributes(options, None)), **tiling}
        make_hidden: Any = jax.ffi.ffi_call(later.name, given[0], input_output_aliases={0: 0})
        found["dhidden"] = make_hidden(*given, **dict(later.attributes(values)))
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
    return None if found is None else partial(getattr(found, name), options)


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
    first = OUTPUT_COUNTS[name]
    wanted = first in keep, any(index > first for index in keep)
    if name == "forward" or not any(wanted):
        wanted = True, True
    operands, *_ = jax.tree.unflatten(tree, ctx.avals_in)
    run = find(target, wanted, operands)
    return None if run is None else (ctx.replace(module_context=module, platforms=None), run)


_library_call = make_primitive(OPERATION, "linear_cross_entropy_call", choose_if_whole)
_kernels = make_primitive(OPERATION, "xentile_linear_cross_entropy", _choose_kernels)
# How much VMEM there is decides whether logits are computed twice or three times.
tell_devices(_kernels)
# `_kernels` for abstract meshes, which have no devices to ask.
_kernels_for_any = make_primitive(
    OPERATION, "xentile_linear_cross_entropy_for_any", _choose_kernels
)
