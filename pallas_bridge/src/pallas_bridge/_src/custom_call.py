"""One JAX primitive for every custom call of the library.

A call here follows one rule, which docs/custom-calls.md explains: all operands and results have the
same leading axes, and the handler treats what lies behind them one by one. From that rule alone
come `vmap` without a loop or a transpose, partitioning over a mesh, and lowering; an operation says
only what its calls take and give.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe
from jax.interpreters import xla as xla_interpreter
from jax.sharding import NamedSharding, PartitionSpec

from . import library, pallas
from .compat import varying_axes


@dataclass(frozen=True)
class Like:
    """A result of the shape and dtype of an operand."""

    operand: int


@dataclass(frozen=True)
class PerToken:
    """A result of the leading axes alone, in f32."""


@dataclass(frozen=True)
class Lighter:
    """What to call where nothing needs the results from `first_unused` on."""

    first_unused: int
    call: "Call"
    # Which operands that call takes, and which of its results stand for those that are left.
    operands: tuple[int, ...]
    results: tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """A custom call: its target, what it gives, and its attributes.

    The last operand has the leading axes alone; every other begins with them.
    """

    # The function of this package that it belongs to, for messages.
    operation: str
    target: str
    results: tuple[Like | PerToken, ...]
    attributes: tuple[tuple[str, Any], ...] = ()
    # The operand whose memory a result takes. Where something else reads it later, XLA copies it
    # first.
    reuses: tuple[int, int] | None = None
    lighter: Lighter | None = field(default=None, repr=False)
    # Whether its one result is its first operand where the last is 1 everywhere.
    is_product: bool = False
    # What the user asked for by name: "pallas" or "custom_call"; None for what the platform has.
    implementation: str | None = None


def bind(call: Call, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """Makes `call` part of the program being traced, or runs it."""
    if call.implementation == "pallas" and pallas.interpret_params is not None:
        # The interpreter calls back in order, which a lowering cannot add to a program.
        return tuple(pallas.kernel(None, call)(*operands))
    keep = tuple(range(len(call.results)))
    return tuple(_custom_call.bind(*vary_alike(operands), call=call, keep=keep))


_custom_call = Primitive("xentile_custom_call")
_custom_call.multiple_results = True
_custom_call.def_impl(partial(xla_interpreter.apply_primitive, _custom_call))


def vary_alike(operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Within `shard_map`: has all operands vary over the axes that any of them varies over."""
    varying = [varying_axes(jax.typeof(operand)) for operand in operands]
    everywhere = frozenset[str]().union(*varying)
    return [
        jax.lax.pcast(operand, tuple(sorted(everywhere - axes)), to="varying")
        if everywhere - axes
        else operand
        for operand, axes in zip(operands, varying, strict=True)
    ]


def _result_avals(call: Call, avals: Sequence[Any]) -> list[Any]:
    return [
        avals[result.operand]
        if isinstance(result, Like)
        else avals[-1].update(dtype=np.dtype(np.float32), weak_type=False)
        for result in call.results
    ]


def _abstract_eval(*avals: Any, call: Call, keep: tuple[int, ...]) -> list[Any]:
    leading = avals[-1]
    for index, aval in enumerate(avals):
        # What XLA's partitioner may do in silence, gathering a cut axis, is refused where the user
        # has asked to be told (meshes of explicit axes).
        sharding = getattr(aval, "sharding", None)
        if isinstance(sharding, NamedSharding) and sharding.spec:
            spec = [*sharding.spec, *[None] * (aval.ndim - len(sharding.spec))]
            own = [*leading.sharding.spec, *[None] * (leading.ndim - len(leading.sharding.spec))]
            if spec[: leading.ndim] != own or any(
                axis is not None for axis in spec[leading.ndim :]
            ):
                raise ValueError(
                    f"{call.operation}: operand {index} of {call.target} is sharded as "
                    f"{PartitionSpec(*spec)}; its leading axes must be sharded as "
                    f"{PartitionSpec(*own)} and the others not at all: reshard it first"
                )
    results = _result_avals(call, avals)
    return [results[index] for index in keep]


_custom_call.def_abstract_eval(_abstract_eval)


def _batch(
    operands: Sequence[Any], axes: Sequence[int | None], *, call: Call, keep: tuple[int, ...]
) -> tuple[Sequence[Any], Sequence[int]]:
    """Makes the mapped axis a leading one, where the first operand has it if that can be."""
    size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
    leading = operands[-1].ndim - (axes[-1] is not None)
    place = axes[0] if axes[0] is not None and axes[0] <= leading else 0
    moved = [
        jnp.broadcast_to(jnp.expand_dims(x, place), (*x.shape[:place], size, *x.shape[place:]))
        if axis is None
        else jnp.moveaxis(x, axis, place)
        for x, axis in zip(operands, axes, strict=True)
    ]
    return _custom_call.bind(*vary_alike(moved), call=call, keep=keep), [place] * len(keep)


batching.primitive_batchers[_custom_call] = _batch


def _refuse_derivative(*_: Any, call: Call, **__: Any) -> NoReturn:
    raise NotImplementedError(
        f"{call.operation}: second derivatives (grad of grad, hessian, jvp of grad) have no "
        'kernel; implementation="reference" has them'
    )


ad.primitive_jvps[_custom_call] = _refuse_derivative
ad.primitive_transposes[_custom_call] = _refuse_derivative


def _dead_code(used: Sequence[bool], *rest: Any) -> tuple[list[bool], Any]:
    """Drops results that nothing uses, and makes the lighter call where they allow it."""
    equation = rest[-1]  # from 0.12 on JAX says more before it
    if not any(used):
        return [False] * len(equation.invars), None
    call, keep = equation.params["call"], equation.params["keep"]
    wanted = [index for index, is_used in zip(keep, used, strict=True) if is_used]
    operands = range(len(equation.invars))
    if call.lighter is not None and max(wanted) < call.lighter.first_unused:
        operands = call.lighter.operands
        wanted = [call.lighter.results[index] for index in wanted]
        call = call.lighter.call
    lean = equation.replace(
        invars=[equation.invars[index] for index in operands],
        outvars=[var for var, is_used in zip(equation.outvars, used, strict=True) if is_used],
        params={"call": call, "keep": tuple(wanted)},
    )
    return [index in operands for index in range(len(equation.invars))], lean


pe.dce_rules[_custom_call] = _dead_code


def _lower(ctx: Any, *operands: Any, call: Call, keep: tuple[int, ...]) -> Sequence[Any]:
    if call.is_product and _is_one(operands[-1]):
        return [operands[0]]
    platforms = tuple(ctx.platforms or ctx.module_context.platforms)
    others = tuple(platform for platform in platforms if platform != "tpu")
    if call.implementation is None and others != platforms and others:
        return _lower_for_each(ctx, *operands, call=call, keep=keep)
    if not others or (call.implementation == "pallas" and others != platforms):
        return _lower_pallas(ctx, *operands, call=call, keep=keep)
    if call.implementation == "pallas":
        raise NotImplementedError(
            f'{call.operation}: implementation "pallas" is for TPUs, and the program for '
            f'{", ".join(platforms)}: "custom_call" runs where info() says, "reference" everywhere'
        )
    _check_platforms(call, others)
    results = _result_avals(call, ctx.avals_in)
    lowering = jax.ffi.ffi_lowering(
        call.target,
        operand_output_aliases=dict([call.reuses] if call.reuses else []),
        extra_attributes=_partitioning([*ctx.avals_in], results),
    )
    outputs = lowering(ctx.replace(avals_out=results), *operands, **dict(call.attributes))
    return [outputs[index] for index in keep]


# What carries a constant's ones on.
_CARRIERS = {f"stablehlo.{name}" for name in ("broadcast_in_dim", "convert", "multiply", "reshape")}


def _is_one(value: Any, steps: int = 8) -> bool:
    """Whether the program says, within so many steps, that the `ir.Value` is 1 everywhere."""
    owner = value.owner
    if steps == 0 or not isinstance(owner, ir.Operation | ir.OpView):
        return False
    operation = owner.operation
    if operation.name == "stablehlo.constant":
        constant = operation.attributes["value"]
        return (
            isinstance(constant, ir.DenseFPElementsAttr)
            and constant.is_splat
            and ir.FloatAttr(constant.get_splat_value()).value == 1
        )
    return operation.name in _CARRIERS and all(
        _is_one(operand, steps - 1) for operand in operation.operands
    )


def _partitioning(operands: Sequence[Any], results: Sequence[Any]) -> dict[str, ir.Attribute]:
    """Tells XLA that the leading axes may be cut, and no others."""
    avals = [*operands, *results]
    widest = max(avals, key=lambda aval: aval.ndim)
    if not all(isinstance(extent, int) for extent in widest.shape):
        return {}  # neither notation has extents that are not known yet
    leading = operands[-1].ndim
    batch: dict[str, ir.Attribute] = {"num_batch_dims": ir.StringAttr.get(str(leading))}
    attributes: dict[str, ir.Attribute] = {"mhlo.frontend_attributes": ir.DictAttr.get(batch)}
    if jax.config.values["jax_use_shardy_partitioner"]:
        # Axis n of every operand and result is one factor, the letters are its notation.
        names = "ijklmnopqrstuvwxyz"[: widest.ndim]

        def axes(avals: Sequence[Any]) -> str:
            return ", ".join(f"[{', '.join(names[: aval.ndim])}]" for aval in avals)

        extents = ", ".join(map("{}={}".format, names, widest.shape))
        whole = ", ".join(names[leading:])
        attributes["sdy.sharding_rule"] = ir.Attribute.parse(
            f"#sdy.op_sharding_rule<({axes(operands)})->({axes(results)}) {{{extents}}}"
            f"{f' need_replication={{{whole}}},' if whole else ','} custom>"
        )
    return attributes


def _check_platforms(call: Call, platforms: Sequence[str]) -> None:
    """Refuses to compile for platforms of which the library has kernels for none.

    In a program for several, JAX does not say which of them a branch is for, so that one with
    kernels is enough; XLA refuses the call where it then runs on another.

    Raises:
        LibraryError: there is no library, or it was built without kernels that it could have.
        NotImplementedError: there are no kernels for such a platform.
    """
    loaded = library.require()
    if loaded.platforms & {*platforms}:
        return
    names, have = ", ".join(platforms), ", ".join(sorted(loaded.platforms)) or "none"
    dense = 'implementation="reference" runs everywhere, as the dense program'
    for platform in platforms:
        if platform in library.BUILDS:
            raise library.LibraryError(
                f"{call.operation}: no kernel for platform {names}: {loaded.path} was built "
                f"without (it has kernels for {have}): {library.BUILDS[platform]}; {dense}"
            )
    raise NotImplementedError(
        f"{call.operation}: no kernel for platform {names} (there are kernels for {have}); {dense}"
    )


def _lower_for_each(ctx: Any, *operands: Any, call: Call, keep: tuple[int, ...]) -> Sequence[Any]:
    """Puts a conditional over the platform in the call's place: TPUs have no custom calls."""

    def of(implementation: str) -> Any:
        named = dataclasses.replace(call, implementation=implementation)
        return lambda *arrays: tuple(_custom_call.bind(*arrays, call=named, keep=keep))

    lower = mlir.lower_fun(
        lambda *arrays: jax.lax.platform_dependent(
            *arrays, tpu=of("pallas"), default=of("custom_call")
        ),
        multiple_results=True,
    )
    results: Sequence[Any] = lower(ctx, *operands)
    return results


def _lower_pallas(ctx: Any, *operands: Any, call: Call, keep: tuple[int, ...]) -> Sequence[Any]:
    """Puts the call's kernel in Pallas in its place."""
    # Pallas would have a kernel for each platform of the module.
    module = ctx.module_context.replace(platforms=("tpu",))
    ctx = ctx.replace(module_context=module, platforms=None)
    kernel = pallas.kernel(module, call)
    lower = mlir.lower_fun(
        lambda *arrays: [kernel(*arrays)[index] for index in keep], multiple_results=True
    )
    results: Sequence[Any] = lower(ctx, *operands)
    return results


# One rule for all platforms, not one for each: a program for several holds each call once, and not
# once a platform under a conditional, through which no result could take the place of an operand.
# But for TPUs, that is. Not cached, because a cached rule is not shown where its operands come from
# (`_is_one`).
mlir.register_lowering(_custom_call, _lower, cacheable=False)
