"""Deferred lowering: primitives for which lowering chooses a function, as it knows the program.

Such a primitive has the parameters `default`, the function that is taken unless another is chosen,
and `keep`, the indices of the results that are left; what else it has is its own.
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

from ..meshes import cuts, entry, on_devices
from .declaration import OPERATION


def primitive(name: str) -> Primitive:
    """Returns a primitive with every rule but that for lowering."""
    made = Primitive(name)
    made.multiple_results = True
    made.def_impl(partial(xla_interpreter.apply_primitive, made))
    made.def_abstract_eval(_avals)
    pe.dce_rules[made] = _dead_code
    batching.primitive_batchers[made] = partial(_batch, made)
    ad.primitive_jvps[made] = _jvp
    return made


@dataclass(frozen=True)
class Default:
    """A function of flat arrays, traced; equal to another of the same function.

    Arrays and how JAX is set up are what JAX's caches compare besides.
    """

    function: Callable[..., Any]
    tree: Any
    traced: Any = field(compare=False, repr=False)

    def __call__(self, *flat: Any) -> Any:
        """Returns the function's results, flat."""
        return jaxpr_as_fun(self.traced)(*flat)


def bind(made: Primitive, default: Callable[..., Any], *operands: Any, **how: Any) -> Any:
    """Returns default(*operands), or what the lowering of `made` chooses in its place.

    `default` and `how` are hashable values, which JAX's caches compare and keep. The parameter
    `tree` of `made` says how operands lie flat.
    """
    flat, tree = jax.tree.flatten(operands)

    def of_flat(*flat: Any) -> Any:
        return default(*jax.tree.unflatten(tree, flat))

    closed, shapes = jax.make_jaxpr(of_flat, return_shape=True)(*flat)
    keep = tuple(range(len(closed.out_avals)))
    results = made.bind(*flat, default=Default(default, tree, closed), tree=tree, keep=keep, **how)
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def _avals(*_: Any, default: Any, keep: tuple[int, ...], **__: Any) -> list[Any]:
    return [default.traced.out_avals[index] for index in keep]


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


def _batch(made: Primitive, operands: Sequence[Any], axes: Sequence[int | None], **how: Any) -> Any:
    """One after another: each has a gradient of the weight of its own.

    Where a mesh of explicit axes cuts the mapped axis, each device has its own share.
    """
    default, keep = how.pop("default"), how.pop("keep")
    how.pop("tree")

    def one(*flat: Any) -> list[Any]:
        # Traced anew: within `shard_map` types are others.
        found = bind(made, default.function, *jax.tree.unflatten(default.tree, flat), **how)
        leaves = jax.tree.leaves(found)
        return [leaves[index] for index in keep]

    def in_turn(*flat: Any) -> list[Any]:
        mapped = [x for x, axis in zip(flat, axes, strict=True) if axis is not None]

        def of_parts(parts: Any) -> list[Any]:
            left = iter(parts)
            return one(
                *(x if axis is None else next(left) for x, axis in zip(flat, axes, strict=True))
            )

        found: list[Any] = jax.lax.map(of_parts, mapped)
        return found

    given = [
        x if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(operands, axes, strict=True)
    ]
    found = (cuts(x)[0] for x, axis in zip(given, axes, strict=True) if axis is not None)
    names = next(filter(None, found), ())
    if names and jax.__version_info__ < (0, 10):
        raise NotImplementedError(
            f"{OPERATION}: vmap of an axis that explicit mesh axes {names} cut needs jax 0.10 or "
            f"later, and this is jax {jax.__version__}: reshard it first, or use shard_map"
        )
    if names:
        of_mapped = PartitionSpec(entry(names))
        specs = tuple(PartitionSpec() if axis is None else of_mapped for axis in axes)
        given = [jax.sharding.reshard(*pair) for pair in zip(given, specs, strict=True)]
        mesh = next(jax.typeof(x).sharding.mesh for x in given if any(cuts(x)))
        in_turn = on_devices(mesh, frozenset(names), in_turn, specs, of_mapped, is_checked=False)
    results = in_turn(*given)
    return results, [0] * len(results)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **how: Any) -> Any:
    # Second derivatives are those of the default.
    function, keep = how["default"], how["keep"]
    tangents = [ad.instantiate_zeros(one) for one in tangents]
    return jax.jvp(_only(keep, function), [*primals], tangents)


def lower(ctx: Any, function: Callable[..., Any], keep: Sequence[int], *operands: Any) -> Any:
    """Puts function(*operands), a flat list, in the place of a primitive."""
    return mlir.lower_fun(_only(keep, function), multiple_results=True)(ctx, *operands)


def _only(keep: Sequence[int], function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what gives the results `keep` of a function."""

    def some(*flat: Any) -> list[Any]:
        results = function(*flat)
        return [results[index] for index in keep]

    return some
