"""Primitives whose lowering chooses what runs, as it knows the program: platform and devices.

A primitive is traced with a default, a function of the operands. Lowering runs the default, or the
function that the primitive's `choose` returns in its place. Of JAX's transformations, only dead
code elimination looks inside and drops unused results; derivatives are refused (`refusal`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe
from jax.interpreters import xla as xla_interpreter
from jax.sharding import PartitionSpec

from . import refusal
from .meshes import entry, on_devices, sharded_over
from .operation import Operation
from .partitioning import is_whole


def make_primitive(operation: Operation, name: str, choose: Callable[..., Any]) -> Primitive:
    """Returns a primitive of an operation for which lowering chooses a function.

    Its parameters are `default`, the function that runs if none is chosen, `tree`, the tree
    structure of the operands, and `keep`, the indices of the results that are used; others are its
    own. choose(ctx, default, tree, keep, **others) returns None, or the context to lower in and a
    function of the operands.
    """
    made = Primitive(name)
    made.multiple_results = True
    made.def_impl(partial(xla_interpreter.apply_primitive, made))
    made.def_abstract_eval(_avals)
    pe.dce_rules[made] = _drop_unused
    batching.primitive_batchers[made] = partial(_batch, operation, made)
    ad.primitive_jvps[made] = partial(_jvp, operation, made)
    mlir.register_lowering(made, partial(_lower, choose))
    return made


@dataclass(frozen=True)
class Default:
    """A traced function of flat arrays; two are equal if their functions are.

    JAX's caches compare the operands' types and JAX's configuration in addition.
    """

    function: Callable[..., Any]
    tree: Any
    traced: Any = field(compare=False, repr=False)

    def __call__(self, *flat: Any) -> Any:
        """Returns the function's results, flat."""
        return jaxpr_as_fun(self.traced)(*flat)


def bind_deferred(made: Primitive, default: Callable[..., Any], *operands: Any, **how: Any) -> Any:
    """Returns default(*operands), or what the lowering of `made` chooses in its place.

    `default` and `how` are hashable values, which JAX's caches compare and keep.
    """
    flat, tree = jax.tree.flatten(operands)

    def call_flat(*flat: Any) -> Any:
        return default(*jax.tree.unflatten(tree, flat))

    closed, shapes = jax.make_jaxpr(call_flat, return_shape=True)(*flat)
    keep = tuple(range(len(closed.out_avals)))
    results = made.bind(*flat, default=Default(default, tree, closed), tree=tree, keep=keep, **how)
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def choose_if_whole(ctx: Any, *, call: Callable[..., Any], **_: Any) -> Any:
    """Chooses `call` in programs of one device, where XLA shards nothing over a mesh."""
    return (ctx, call) if is_whole(ctx.module_context) else None


def _avals(*_: Any, default: Any, keep: tuple[int, ...], **__: Any) -> list[Any]:
    return [default.traced.out_avals[index] for index in keep]


def _drop_unused(used: Sequence[bool], *rest: Any) -> tuple[list[bool], Any]:
    """Drops results that nothing uses: gradients above all."""
    equation = rest[-1]  # JAX 0.12 passes other arguments before it
    if not any(used):
        return [False] * len(equation.invars), None
    keep = [index for index, one in zip(equation.params["keep"], used, strict=True) if one]
    lean = equation.replace(
        outvars=[var for var, one in zip(equation.outvars, used, strict=True) if one],
        params={**equation.params, "keep": tuple(keep)},
    )
    return [True] * len(equation.invars), lean


def _batch(
    operation: Operation,
    made: Primitive,
    operands: Sequence[Any],
    axes: Sequence[int | None],
    **how: Any,
) -> Any:
    """Runs one example after another (`jax.lax.map`), as each has its own gradient of the weight.

    If explicit mesh axes shard the mapped axis, each device runs its own examples.
    """
    default, keep = how.pop("default"), how.pop("keep")
    how.pop("tree")

    def run_one(*flat: Any) -> list[Any]:
        # Traced again, because types within `shard_map` differ.
        arrays = jax.tree.unflatten(default.tree, flat)
        leaves = jax.tree.leaves(bind_deferred(made, default.function, *arrays, **how))
        return [leaves[index] for index in keep]

    def run_each(*flat: Any) -> list[Any]:
        mapped = [x for x, axis in zip(flat, axes, strict=True) if axis is not None]

        def run_mapped(slices: Any) -> list[Any]:
            left = iter(slices)
            every = (x if axis is None else next(left) for x, axis in zip(flat, axes, strict=True))
            return run_one(*every)

        found: list[Any] = jax.lax.map(run_mapped, mapped)
        return found

    given = [
        x if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(operands, axes, strict=True)
    ]
    found = (sharded_over(x)[0] for x, axis in zip(given, axes, strict=True) if axis is not None)
    names = next(filter(None, found), ())
    if names and jax.__version_info__ < (0, 10):
        raise NotImplementedError(
            f"{operation}: vmap of an axis that explicit mesh axes {names} shard needs jax 0.10 or "
            f"later, and this is jax {jax.__version__}: reshard it first, or use shard_map"
        )
    if names:
        mapped_spec = PartitionSpec(entry(names))
        specs = tuple(PartitionSpec() if axis is None else mapped_spec for axis in axes)
        given = [jax.sharding.reshard(*pair) for pair in zip(given, specs, strict=True)]
        mesh = next(jax.typeof(x).sharding.mesh for x in given if any(sharded_over(x)))
        run_each = on_devices(
            mesh, frozenset(names), run_each, specs, mapped_spec, is_checked=False
        )
    results = run_each(*given)
    return results, [0] * len(results)


def _jvp(
    operation: Operation,
    made: Primitive,
    primals: Sequence[Any],
    tangents: Sequence[Any],
    **how: Any,
) -> Any:
    results = made.bind(*primals, **how)
    return results, refusal.tangents_of(operation, results, tangents)


def _lower(choose: Callable[..., Any], ctx: Any, *operands: Any, **how: Any) -> Sequence[Any]:
    function, chosen = how["default"], choose(ctx, **how)
    if chosen is not None:
        ctx, run = chosen

        def function(*flat: Any) -> Any:
            return jax.tree.leaves(run(*jax.tree.unflatten(how["tree"], flat)))

    lowering = mlir.lower_fun(_keeping(how["keep"], function), multiple_results=True)
    results: Sequence[Any] = lowering(ctx, *operands)
    return results


def _keeping(keep: Sequence[int], function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that gives the results `keep` of another."""

    def some(*flat: Any) -> list[Any]:
        results = function(*flat)
        return [results[index] for index in keep]

    return some
