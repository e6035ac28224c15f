"""Where a program is for TPUs: kernels in Pallas in the place of products and chunks.

Which platform and how many devices a program is for is known as it is lowered, so what is traced is
both, under a condition over the platform; kernels are chosen by the rule below it. They take no
array that XLA would have to cut over a mesh: there, the plan of every other platform is kept.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

from .. import pallas
from ..compat import tell_devices
from ..cross_entropy.options import Options
from ..pallas import Target
from . import two_passes
from .plan import Plan, Problem, of_columns, of_kernels

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
    wanted: Wanted = (True, True),
) -> tuple[Any, Kernels] | None:
    """Returns tiles of the forward kernel and of those for the gradients `wanted`.

    None where there are no kernels for such operands.
    """
    from . import pallas_tpu  # late: it takes as long to import as all the rest

    if hidden.dtype not in pallas_tpu.DTYPES or 0 in hidden.shape:
        return None
    cut = partial(pallas_tpu.cut, target, hidden, weight, vocab_axis, bias=bias)
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


def plan(target: Target, usual: Plan, hidden: Any, weight: Any, bias: Any, vocab_axis: int) -> Plan:
    """Returns what runs on `target` where elsewhere `usual` does."""
    has_bias = bias is not None
    problem = Problem.of(hidden, weight, vocab_axis, bias=has_bias, reduced=False)
    flat = jax.ShapeDtypeStruct((problem.tokens, problem.hidden), hidden.dtype)
    found = tiles(target, flat, weight, vocab_axis, usual.max_scratch_bytes, bias=has_bias)
    if found is None:
        return of_columns(problem, usual)
    _, kernels = found
    cut, *_ = kernels[0]
    products = 1 + sum(1 + of_hidden + of_weight for _, of_hidden, of_weight in kernels)
    return of_kernels(problem, usual, cut.rows, cut.columns, products, cut.spilled_bytes)


def choose(
    work: Pass,
    usual: Callable[..., Any],
    without: Callable[..., Any],
    on_cuda: Callable[..., Any] | None,
    *operands: Any,
) -> Any:
    """Returns usual(*operands), or what kernels make of them where the program is for TPUs.

    Where it is, but these do not suit it, without(*operands): it has no kernels at all. Where it is
    for NVIDIA's GPUs, on_cuda(*operands), if there is that.
    """
    if work.options.implementation == "pallas" and pallas.interpret_params is not None:
        # The interpreter calls back in order, which a lowering cannot add to a program.
        target = dataclasses.replace(pallas.INTERPRETER, interpret=pallas.interpret_params)
        return work.function(target, (True, True))(*operands)
    others = {} if on_cuda is None else {"cuda": on_cuda}
    if work.options.implementation == "custom_call":
        return jax.lax.platform_dependent(*operands, **others, default=usual)

    def kernels(*operands: Any) -> Any:
        flat, tree = jax.tree.flatten(operands)

        def of_flat(*flat: Any) -> Any:
            return without(*jax.tree.unflatten(tree, flat))

        closed, shapes = jax.make_jaxpr(of_flat, return_shape=True)(*flat)
        keep = tuple(range(len(closed.out_avals)))
        results = _kernels.bind(*flat, without=closed, work=work, tree=tree, keep=keep)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return jax.lax.platform_dependent(*operands, tpu=kernels, **others, default=usual)


_kernels = Primitive("xentile_linear_cross_entropy")
_kernels.multiple_results = True
# How much VMEM there is decides whether logits are made twice or three times.
tell_devices(_kernels)


def _avals(*_: Any, without: Any, keep: tuple[int, ...], **__: Any) -> list[Any]:
    return [without.out_avals[index] for index in keep]


_kernels.def_abstract_eval(_avals)


def _dead_code(used: Sequence[bool], *rest: Any) -> tuple[list[bool], Any]:
    """Drops results that nothing uses: gradients above all."""
    equation = rest[-1]  # from 0.12 on JAX says more before it
    if not any(used):
        return [False] * len(equation.invars), None
    keep = [index for index, one in zip(equation.params["keep"], used, strict=True) if one]
    lean = equation.replace(
        outvars=[var for var, one in zip(equation.outvars, used, strict=True) if one],
        params={**equation.params, "keep": tuple(keep)},
    )
    return [True] * len(equation.invars), lean


pe.dce_rules[_kernels] = _dead_code


def _lower(
    ctx: Any, *operands: Any, without: Any, work: Pass, tree: Any, keep: tuple[int, ...]
) -> Sequence[Any]:
    function: Any = jaxpr_as_fun(without)
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

    def kept(*flat: Any) -> list[Any]:
        found = function(*flat)
        return [found[index] for index in keep]

    results: Sequence[Any] = mlir.lower_fun(kept, multiple_results=True)(ctx, *operands)
    return results


mlir.register_lowering(_kernels, _lower)


def _target(module: Any) -> Target | None:
    """What a module is for; None where it is nothing that kernels are known to run on.

    XLA cannot cut a kernel over a mesh. Within `shard_map` each device has one of its own.
    """
    context = module.axis_context
    manual = getattr(context, "manual_axes", None)
    if manual is None:
        is_whole = getattr(context, "num_devices", None) in (None, 1)
    else:
        is_whole = {*manual} == {*context.mesh.axis_names}
    if not is_whole:
        return None
    try:
        return pallas.target(module)
    except NotImplementedError:
        return None


def _batch(operands: Sequence[Any], axes: Sequence[int | None], **how: Any) -> Any:
    """One after another: each has a gradient of the weight of its own."""
    mapped = [
        jnp.moveaxis(x, axis, 0) for x, axis in zip(operands, axes, strict=True) if axis is not None
    ]

    def one(parts: Any) -> Any:
        left = iter(parts)
        return _kernels.bind(
            *(x if axis is None else next(left) for x, axis in zip(operands, axes, strict=True)),
            **how,
        )

    results = jax.lax.map(one, mapped)
    return results, [0] * len(results)


batching.primitive_batchers[_kernels] = _batch


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **how: Any) -> Any:
    # Second derivatives are those of what it stands for.
    function, keep = jaxpr_as_fun(how["without"]), how["keep"]
    tangents = [ad.instantiate_zeros(one) for one in tangents]
    return jax.jvp(lambda *flat: [function(*flat)[index] for index in keep], [*primals], tangents)


ad.primitive_jvps[_kernels] = _jvp


def _tiles(
    work: Pass, target: Target, wanted: Wanted, hidden: Any, weight: Any, bias: Any
) -> tuple[Any, Kernels] | None:
    of = (target, hidden, weight, work.vocab_axis, work.max_scratch_bytes)
    return tiles(*of, bias=bias is not None, wanted=wanted)


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
