"""Both rules of differentiation, over whichever plan was chosen."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from .. import linear
from ..bound import Bound
from ..custom_call import vary_alike
from ..losses.options import Options
from ..losses.reduction import countable, weighted
from . import columns, on_cpu, on_cuda, on_tpu, one_call, reference, tokens
from . import plan as plans
from .declaration import OPERATION
from .plan import Plan, Problem
from .product import Products
from .product import operands as as_operands
from .tokens import Bias, Gradients


class OfDevice(Protocol):
    """Runs schedules where XLA may find arrays to be cut; comparable, and all of it in its text."""

    def __call__(
        self, options: Options, products: Products, reduced: bool, *arrays: Any
    ) -> "Schedule":
        """Returns what runs for hidden, weight and bias that a device has."""

    def run(self, name: str, whole: "Schedule", *arrays: Any) -> Any:
        """Returns what "forward", "backward" or "fused" of `whole` does, each device its share."""


@dataclass(frozen=True)
class Schedule:
    """Everything but the arrays."""

    options: Options
    products: Products
    plan: Plan
    # What takes its place on NVIDIA's GPUs and on CPUs, where something does.
    cuda: Plan | None
    cpu: Plan | None
    # What makes the schedule of a device of its part of arrays, where XLA may find them to be cut.
    of_device: "OfDevice | None" = None
    # Whether the forward pass may leave logits to the backward pass.
    keeps: bool = True

    @property
    def is_fused(self) -> bool:
        """Whether gradients come with the loss where the reduction is inside."""
        plans = (self.plan, self.cuda, self.cpu)
        return any(plan is not None and plan.products < 4 and not plan.hands_over for plan in plans)

    @property
    def hands_over(self) -> bool:
        """Whether the forward pass leaves logits to the backward pass."""
        has_plan = self.cpu is not None and self.cpu.hands_over and on_cpu.has_library()
        return self.keeps and has_plan and self.options.implementation != "pallas"

    def forward(self, *arrays: Any) -> tuple[jax.Array, ...]:
        """Loss, logps, lse and lse_low of hidden, weight, bias and labels."""
        outputs: tuple[jax.Array, ...] = self.run("forward", self.options, *arrays)
        return outputs

    def backward(self, *arrays: Any) -> Gradients:
        """Gradients for hidden, weight, bias, labels, what was saved and cotangents."""
        gradients: Gradients = self.run("backward", self.options, *arrays)
        return gradients

    def keep(self, *arrays: Any) -> tuple[Any, ...]:
        """What `forward` gives, and last what `resume` takes of it: logits, or nothing."""
        plan = self.cpu
        if plan is None or not self.hands_over:
            return *self.forward(*arrays), ()
        outputs: tuple[Any, ...] = self._on_cpu("keep", Bound(_keep_nothing, self, plan), *arrays)
        return outputs

    def resume(self, *arrays: Any) -> Gradients:
        """What `backward` gives for its arrays and, last, what `keep` left."""
        *others, left = arrays
        if not left:
            return self.backward(*others)
        gradients: Gradients = self._on_cpu("resume", Bound(_resume_nothing, self), *arrays)
        return gradients

    def _on_cpu(self, name: str, default: Callable[..., Any], *arrays: Any) -> Any:
        """The library's call `name` in programs for CPUs, default(*arrays) in others."""
        call = self._calls(name, self.options)["cpu"]
        call = Bound(one_call.choose, call, default)
        return jax.lax.platform_dependent(*arrays, cpu=call, default=default)

    def fused(self, wants_losses: bool, *arrays: Any) -> Any:
        """Loss, lse, lse_low and gradients for hidden, weight, bias, labels and factors.

        `wants_losses` is whether losses of tokens whose factor is 0 are wanted too.
        """
        every_token = self.options.every_token or wants_losses
        return self.run(
            "fused", dataclasses.replace(self.options, every_token=every_token), *arrays
        )

    def add(self, *arrays: Any) -> Any:
        """What `fused` gives for its arrays, but dweight added to sums in f32, the last of them."""
        plan, default = self.cuda, Bound(_add, self)
        if plan is None or plan.products >= 4 or not on_cuda.has_library("add"):
            return default(*arrays)
        call = Bound(on_cuda.run, "add", self.options, self.products.vocab_axis, plan)
        call = Bound(one_call.choose, call, default)
        return jax.lax.platform_dependent(*arrays, cuda=call, default=default)

    def run(self, name: Any, options: Options, *arrays: Any) -> Any:
        if self.of_device is not None:
            whole = dataclasses.replace(self, options=options, of_device=None)
            return self.of_device.run(name, whole, *arrays)
        products, plan = self.products, self.plan
        by_tokens: Callable[..., Any] = Bound(getattr(tokens, name), options, products, plan.tokens)
        if plan.batch_invariant:
            return tokens.in_whole_chunks(name, by_tokens, plan.tokens, *arrays)
        hidden, weight, bias, *_ = arrays
        axis = products.vocab_axis
        problem = Problem.of(hidden, weight, axis, bias=bias is not None, reduced=False)
        other = plans.of_columns(problem, plan)
        chunk = other.tokens, other.columns
        no_kernels: Callable[..., Any]
        no_kernels = Bound(getattr(columns, name), options, products, chunk)
        if plan.any_count:
            by_tokens = Bound(tokens.in_whole_chunks, name, by_tokens, plan.tokens)
            no_kernels = Bound(tokens.in_whole_chunks, name, no_kernels, other.tokens)
        default = by_tokens if plan.schedule == "tokens" else no_kernels
        work = on_tpu.Pass(name, options, axis, plan.max_scratch_bytes)
        return on_tpu.choose(work, default, no_kernels, self._calls(name, options), *arrays)

    def _calls(self, name: str, options: Options) -> dict[str, Any]:
        """What runs on a platform, by its name, where that is not what runs everywhere."""
        fixed = (name, options, self.products.vocab_axis)
        calls = {}
        if self.cuda is not None and on_cuda.has_library():
            calls["cuda"] = Bound(on_cuda.run, *fixed, self.cuda)
        if self.cpu is not None and on_cpu.has_library():
            calls["cpu"] = Bound(on_cpu.run, *fixed, self.cpu)
        return calls


def _keep_nothing(schedule: Schedule, plan: Plan, *arrays: Any) -> tuple[Any, ...]:
    """Returns what `keep` gives where no logits are handed over."""
    nothing = on_cpu.nothing_kept(schedule.products.vocab_axis, plan, *arrays)
    return *schedule.forward(*arrays), nothing


def _resume_nothing(schedule: Schedule, *arrays: Any) -> Gradients:
    return schedule.backward(*arrays[:-1])


def _add(schedule: Schedule, *arrays: Any) -> Any:
    """Returns what `fused` gives, dweight added to sums in f32, the last of the arrays."""
    hidden, weight, *others, sums = arrays
    # As an array in f32, whose gradient is its sums; wider hidden states are rounded.
    wide, dtype = weight.astype(jnp.float32), hidden.dtype
    hidden, _ = as_operands(hidden, weight)
    hidden = hidden.astype(dtype)
    *numbers, (dhidden, dweight, dbias) = schedule.fused(False, hidden, wide, *others)
    return *numbers, (dhidden, sums + dweight, dbias)


def per_token(
    schedule: Schedule, hidden: jax.Array, weight: jax.Array, bias: Bias, labels: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns loss, logps and lse, each [N] in f32.

    The backward pass makes logits again, but for those that the forward pass hands over.
    """
    outputs: tuple[jax.Array, jax.Array, jax.Array] = _per_token(
        schedule, *_alike(hidden, weight, bias, labels)
    )
    return outputs


def _alike(*arrays: jax.Array | None) -> list[jax.Array | None]:
    """Within `shard_map`: has a weight that every device has vary too, so that its gradient does.

    What transposes that is the sum over devices.
    """
    varying = iter(vary_alike([array for array in arrays if array is not None]))
    return [None if array is None else next(varying) for array in arrays]


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _per_token(
    schedule: Schedule, hidden: jax.Array, weight: jax.Array, bias: Bias, labels: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    loss, logps, lse, _ = schedule.forward(hidden, weight, bias, labels)
    return loss, logps, lse


@partial(_per_token.defjvp, symbolic_zeros=True)
def _per_token_jvp(schedule: Schedule, arrays: Any, tangents: Any) -> tuple[Any, Any]:
    loss, logps, lse, lse_low, left = linear.whole(OPERATION, schedule.keep, *arrays)
    residuals = arrays, (lse, lse_low), left
    apply, transpose = Bound(_per_token_tangents, schedule), Bound(_per_token_pull, schedule)
    *moving, _ = map(linear.given, tangents)
    results = loss, logps, lse
    return results, tuple(linear.bind(apply, transpose, residuals, moving, results))


def _per_token_tangents(schedule: Schedule, residuals: Any, tangents: Any) -> Any:
    arrays, *_ = residuals
    dense = partial(reference.per_token, schedule.options, schedule.products)
    return linear.tangents_of(dense, arrays, (*tangents, None))


def _per_token_pull(schedule: Schedule, residuals: Any, cotangents: Any) -> Gradients:
    arrays, saved, left = residuals
    given = tuple(jnp.zeros_like(saved[0]) if one is None else one for one in cotangents)
    return schedule.resume(*arrays, saved, given, left)


def reduced(
    schedule: Schedule,
    hidden: jax.Array,
    weight: jax.Array,
    bias: Bias,
    labels: jax.Array,
    factors: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns the scalar sum of factor * loss, and lse [N], by the rule that the plan allows."""
    if schedule.is_fused:
        value, lse = _fused(schedule, *_alike(hidden, weight, bias, labels, factors))
        return value, lse
    loss, _, lse = per_token(schedule, hidden, weight, bias, labels)
    return weighted(loss, factors).sum(), lse


def running(
    schedule: Schedule,
    hidden: jax.Array,
    weight: jax.Array,
    bias: Bias,
    labels: jax.Array,
    factors: jax.Array,
    sums: jax.Array,
) -> tuple[jax.Array, Gradients]:
    """Returns the scalar sum of factor * loss, and gradients, dweight added to `sums` in f32."""
    arrays = _alike(hidden, weight, bias, labels, factors, sums)
    loss, *_, gradients = schedule.add(*arrays)
    return weighted(loss, factors).sum(), gradients


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _fused(
    schedule: Schedule,
    hidden: jax.Array,
    weight: jax.Array,
    bias: Bias,
    labels: jax.Array,
    factors: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    loss, _, lse, _ = schedule.forward(hidden, weight, bias, labels)
    return weighted(loss, factors).sum(), lse


@partial(_fused.defjvp, symbolic_zeros=True)
def _fused_jvp(schedule: Schedule, primals: Any, tangents: Any) -> tuple[Any, Any]:
    *arrays, factors = primals
    *moving, _, of_factors = map(linear.given, tangents)
    wants_losses = of_factors is not None
    fused = partial(schedule.fused, wants_losses)
    loss, lse, lse_low, gradients = linear.whole(OPERATION, fused, *arrays, factors)
    # As for logits: a cotangent of lse, which is rare, takes the pass again.
    again = (arrays, factors, (lse, lse_low)) if schedule.options.every_token else None
    losses = countable(loss, factors) if wants_losses else None
    residuals = gradients, lse, losses, again
    apply, transpose = Bound(_fused_tangents, schedule), Bound(_fused_pull, schedule)
    results, given = (weighted(loss, factors).sum(), lse), (*moving, of_factors)
    return results, tuple(linear.bind(apply, transpose, residuals, given, results))


def _fused_tangents(
    schedule: Schedule, residuals: Any, tangents: Any
) -> tuple[jax.Array, jax.Array]:
    gradients, lse, losses, again = residuals
    of_loss = linear.along((*gradients, losses), tangents)
    *moving, _ = tangents
    if again is None or all(one is None for one in moving):
        return of_loss, jnp.zeros_like(lse)
    *_, of_lse = _per_token_tangents(schedule, again, moving)
    return of_loss, of_lse


def _fused_pull(schedule: Schedule, residuals: Any, cotangents: Any) -> tuple[Any, ...]:
    (gradients, lse, losses, again), (dloss, dlse) = residuals, cotangents
    if dloss is None:
        dloss = jnp.zeros((), lse.dtype)
    dfactors = None if losses is None else dloss * losses
    if dlse is None:
        return *tokens.scaled(gradients, dloss), dfactors
    arrays, factors, saved = again
    given = (dloss * factors, jnp.zeros_like(dlse), dlse)
    return *schedule.backward(*arrays, saved, given), dfactors
