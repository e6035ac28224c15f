"""Where a program is for TPUs: kernels in Pallas in the place of products and chunks.

Which platform and how many devices a program is for is known as it is lowered, so what is traced is
both, under a condition over the platform; kernels are chosen by the rule below it. They take no
array that XLA would have to cut over a mesh: there, the plan of every other platform is kept.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
from jax.interpreters import mlir

from .. import meshes, pallas
from ..bound import Bound
from ..compat import tell_devices
from ..losses.options import Options, Tile
from ..pallas import Target
from ..partitioning import is_whole
from . import deferred, one_call, two_passes
from .plan import Plan, Problem, of_columns, of_kernels
from .product import operand_dtype

# A tiling and which gradients it makes: of hidden, of the weight and bias.
Kernels = tuple[tuple[Any, bool, bool], ...]
Wanted = tuple[bool, bool]


@dataclass(frozen=True)
class Pass:
    """A pass over the operands: hidden, weight, bias, labels, and what else it takes."""

    name: Literal["forward", "backward", "fused"]
    options: Options
    vocab_axis: int
    # What may be held in HBM.
    max_scratch_bytes: int

    @property
    def gradients_from(self) -> int:
        """Where gradients begin among the results: of hidden, of the weight, of the bias."""
        return {"forward": 4, "backward": 0, "fused": 3}[self.name]

    def function(self, target: Target, wanted: Wanted) -> Callable[..., Any]:
        """Returns what runs it on `target`, zeros in the place of gradients not `wanted`."""
        passes: Any = {"forward": _forward, "backward": _backward, "fused": _fused}
        chosen: Callable[..., Any] = partial(passes[self.name], self, target, wanted)
        return chosen


def tiles(
    target: Target,
    hidden: Any,
    weight: Any,
    vocab_axis: int,
    max_scratch_bytes: int,
    *,
    bias: bool,
    named: Tile = (None, None),
    wanted: Wanted = (True, True),
) -> tuple[Any, Kernels] | None:
    """Returns tiles of the forward kernel and of those for the gradients `wanted`.

    They are no larger than what is `named`. None where there are no kernels for such operands.

    Raises:
        ValueError: a named extent that is not made of whole registers.
    """
    from . import pallas_tpu  # late: it takes as long to import as all the rest

    is_known = all(isinstance(extent, int) and extent > 0 for extent in hidden.shape)
    if operand_dtype(hidden, weight) not in pallas_tpu.DTYPES or not is_known:
        return None
    cut = partial(pallas_tpu.cut, target, hidden, weight, vocab_axis, bias=bias, named=named)
    forward = cut()
    at_once = cut(makes_hidden=wanted[0], makes_weight=wanted[1])
    if at_once is None and all(wanted):
        at_once = cut(makes_hidden=True, makes_weight=True, spills=True)
        if at_once is not None and at_once.spilled_bytes > max_scratch_bytes:
            at_once = None
    kernels = [(at_once, *wanted)]
    if at_once is None:
        kernels = [(cut(makes_hidden=True), True, False), (cut(makes_weight=True), False, True)]
    if forward is None or any(one is None for one, _, _ in kernels):
        return None
    return forward, tuple(kernels)


def plan(
    target: Target, usual: Plan, hidden: Any, weight: Any, bias: Any, vocab_axis: int, named: Tile
) -> Plan:
    """Returns what runs on `target` where elsewhere `usual` does.

    Raises:
        ValueError: as for `tiles`.
    """
    has_bias = bias is not None
    problem = Problem.of(hidden, weight, vocab_axis, bias=has_bias, reduced=False)
    flat = jax.ShapeDtypeStruct((problem.tokens, problem.hidden), hidden.dtype)
    limit = usual.max_scratch_bytes
    found = tiles(target, flat, weight, vocab_axis, limit, bias=has_bias, named=named)
    if found is None:
        return of_columns(problem, usual)
    _, kernels = found
    cut, *_ = kernels[0]
    products = 1 + sum(1 + of_hidden + of_weight for _, of_hidden, of_weight in kernels)
    tile = cut.rows, cut.columns
    return of_kernels(problem, usual, tile, products, cut.spilled_bytes, moved(*found))


def moved(forward: Any, kernels: Kernels) -> dict[str, int]:
    """Returns the bytes that each kernel moves between HBM and VMEM, by its name."""
    from . import pallas_tpu

    gradients = [{"makes_hidden": one, "makes_weight": other} for _, one, other in kernels]
    made = zip((forward, *(one for one, _, _ in kernels)), ({}, *gradients), strict=True)
    return {pallas_tpu.name_of(**what): one.bytes_moved(**what) for one, what in made}


def choose(
    work: Pass,
    default: Callable[..., Any],
    no_kernels: Callable[..., Any],
    calls: Mapping[str, Callable[..., Any]],
    *operands: Any,
) -> Any:
    """Returns default(*operands), or what kernels make of them where the program is for TPUs.

    Where it is, but these do not suit it, no_kernels(*operands): it has no kernels at all. On the
    platforms of `calls`, what these make of them, unless XLA cuts the program over a mesh.
    """
    if work.options.implementation == "pallas" and pallas.interpret_params is not None:
        # The interpreter calls back in order, which a lowering cannot add to a program.
        target = dataclasses.replace(pallas.INTERPRETER, interpret=pallas.interpret_params)
        return work.function(target, (True, True))(*operands)
    others = {name: Bound(one_call.choose, call, default) for name, call in calls.items()}
    if work.options.implementation == "custom_call":
        return jax.lax.platform_dependent(*operands, **others, default=default)

    is_untold = meshes.is_without_devices(*jax.tree.leaves(operands))
    made = _kernels_for_any if is_untold else _kernels
    kernels = partial(deferred.bind, made, no_kernels, work=work)
    return jax.lax.platform_dependent(*operands, tpu=kernels, **others, default=default)


_kernels = deferred.primitive("xentile_linear_cross_entropy")
# How much VMEM there is decides whether logits are made twice or three times.
tell_devices(_kernels)
# The same where a mesh has no devices to tell of.
_kernels_for_any = deferred.primitive("xentile_linear_cross_entropy_for_any")


def _lower(
    ctx: Any, *operands: Any, default: Any, work: Pass, tree: Any, keep: tuple[int, ...]
) -> Sequence[Any]:
    function: Any = default
    # Pallas would have a kernel for each platform of the module.
    module = ctx.module_context.replace(platforms=("tpu",))
    target = _target(module)
    if target is not None:
        first = work.gradients_from
        wanted = first in keep, any(index > first for index in keep)
        if work.name == "forward" or not any(wanted):
            wanted = True, True
        hidden, weight, bias, *_ = jax.tree.unflatten(tree, ctx.avals_in)
        if _tiles(work, target, wanted, hidden, weight, bias) is not None:
            ctx = ctx.replace(module_context=module, platforms=None)
            run = work.function(target, wanted)

            def function(*flat: Any) -> Any:
                return jax.tree.leaves(run(*jax.tree.unflatten(tree, flat)))

    results: Sequence[Any] = deferred.lower(ctx, function, keep, *operands)
    return results


mlir.register_lowering(_kernels, _lower)
mlir.register_lowering(_kernels_for_any, _lower)


def _target(module: Any) -> Target | None:
    """What a module is for; None where it is nothing that kernels are known to run on."""
    if not is_whole(module):
        return None
    try:
        return pallas.target(module)
    except NotImplementedError:
        return None


def _tiles(
    work: Pass, target: Target, wanted: Wanted, hidden: Any, weight: Any, bias: Any
) -> tuple[Any, Kernels] | None:
    of = (target, hidden, weight, work.vocab_axis, work.max_scratch_bytes)
    return tiles(*of, bias=bias is not None, named=work.options.tile, wanted=wanted)


def _forward(
    work: Pass, target: Target, wanted: Wanted, hidden: Any, weight: Any, bias: Any, labels: Any
) -> tuple[jax.Array, ...]:
    from . import pallas_tpu

    found = _tiles(work, target, wanted, hidden, weight, bias)
    assert found is not None
    return pallas_tpu.forward(target, found[0], work.options, hidden, weight, bias, labels)


def _backward(
    work: Pass,
    target: Target,
    wanted: Wanted,
    hidden: Any,
    weight: Any,
    bias: Any,
    labels: Any,
    saved: Any,
    cotangents: Any,
) -> Any:
    from . import pallas_tpu

    found = _tiles(work, target, wanted, hidden, weight, bias)
    assert found is not None
    return pallas_tpu.backward(
        target, found[1], work.options, hidden, weight, bias, labels, saved, cotangents
    )


def _fused(work: Pass, target: Target, wanted: Wanted, *operands: Any) -> Any:
    """Loss, lse, lse_low and gradients for cotangents of the loss.

    Logits are made twice all the same: to make them once, HBM would have to hold some.
    """
    passes = (partial(one, work, target, wanted) for one in (_forward, _backward))
    return two_passes.fused(*passes, *operands)
