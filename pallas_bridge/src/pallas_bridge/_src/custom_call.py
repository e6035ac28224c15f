"""One JAX primitive for every custom call of the library.

An operation declares the operands and results of its calls (`arrays`), and an equivalent XLA
program. The primitive's abstract values, `vmap` without a loop or a transpose, partitioning over a
mesh (`partitioning`), dead-code elimination and lowering follow; docs/internals/calls-in-jax.md
explains the rules.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe
from jax.interpreters import xla as xla_interpreter
from jax.sharding import PartitionSpec

from . import auto_partitioning, gathering, library, pallas, partitioning, refusal
from .arrays import Dims, Result, Signature, factor_of, reshaped, spec_of, with_mapped_axis
from .bound import Bound
from .compat import tell_devices, varying_axes
from .meshes import (
    Names,
    explicit_axes,
    in_order,
    may_be_left_to_xla,
    on_devices,
    tuple_of,
)
from .operation import Operation
from .targets import declared


@dataclass(frozen=True)
class WithoutGradient:
    """The call to make if nothing uses the gradients: the results from `first_unused` on."""

    first_unused: int
    call: "Call"
    # Indices of the operands that `call` takes, and for each result before `first_unused` the index
    # of the result of `call` that replaces it.
    operands: tuple[int, ...]
    results: tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """A custom call: its target, operands, results and attributes.

    JAX's caches compare calls, so two calls are equal only if they lower to the same code. Fields
    that are functions must be comparable: `Bound`, or functions of a module.
    """

    operation: Operation
    target: str
    operands: tuple[str, ...]
    results: tuple[Result, ...]
    attributes: tuple[tuple[str, Any], ...] = ()
    # Named axes that may be sharded over a mesh, as those of tokens may (`Signature`).
    sharded: tuple[str, ...] = ()
    # An operand and the result that overwrites its memory. XLA first copies an operand that
    # something reads later.
    reuses: tuple[int, int] | None = None
    without_gradient: WithoutGradient | None = field(default=None, repr=False)
    # In programs for CUDA only: pairs of an array's dims and of its named axes, such as "S", that
    # memory holds before the last axis of tokens. The attribute "tokens_first" tells the handler.
    outward: tuple[tuple[str, str], ...] = ()
    # Further attributes in programs for CUDA only, which may add results, such as scratch.
    for_cuda: tuple[tuple[str, Any], ...] = ()
    # Lowers the call together with others (`lowered_rewrites`).
    rewrite: "Rewrite | None" = field(default=None, repr=False)
    # The implementation that the user named, "pallas" or "custom_call"; None for the platform's.
    implementation: str | None = None
    # Returns the Pallas kernel of a call for a TPU, a function of the operands.
    for_tpu: Callable[[pallas.Target, "Call"], Callable[..., Sequence[jax.Array]]] | None = field(
        default=None, repr=False
    )
    # XLA's program for the same operands, which runs on platforms without a kernel.
    dense: Callable[..., Sequence[jax.Array]] | None = field(default=None, repr=False)
    # Platforms where `dense` is faster, and runs unless the user names an implementation.
    dense_on: tuple[str, ...] = ()
    # The call's name in the operation's table of measured choices (`library.prefers_xla`).
    variant: str = ""
    # Whether `dense` replaces the call where XLA shards an axis that kernels need whole.
    dense_if_sharded: bool = False
    # Whether `dense` consists of other calls, each with its own choice of implementation. It then
    # replaces the call wherever there is no kernel, even if the user named one, where XLA shards
    # arrays, and where an operand that tokens share is mapped.
    is_composed: bool = False
    # Converts the operands to those of the handler. Only for composed calls, whose arrays XLA does
    # not shard.
    prepared: Callable[..., Sequence[jax.Array]] | None = field(default=None, repr=False)
    # Computes a device's share where the operands' last axis is sharded.
    on_shards: "OnShards | None" = field(default=None, repr=False)

    @cached_property
    def columns(self) -> str | None:
        """The named axis that may be sharded over devices, if the call has `on_shards`."""
        if self.on_shards is None:
            return None
        dims = map(Dims.of, self.operands)
        (name,) = {name for one in dims if one.has_tokens for name in one.factors}
        return name

    @cached_property
    def has_whole_axes(self) -> bool:
        """Whether handlers need an axis of an operand whole."""
        return any(
            name not in self.sharded for one in self.signature.operands for name in one.factors
        )

    @cached_property
    def signature(self) -> Signature:
        """The parsed `operands`, `results` and `sharded`."""
        return Signature.of(self.operands, self.results, self.sharded)

    def layout(self, dims: str, aval: Any) -> tuple[int, ...]:
        """Returns an array's axes in the memory order of `outward`, the innermost first."""
        order = [*range(aval.ndim)]
        declared, axes = Dims.of(dims), dict(self.outward).get(dims, "")
        leading = declared.leading(aval)
        if leading > 0:
            for place, axis in enumerate(axes.split(), leading - 1):
                index = leading + declared.names.index(axis)
                order.remove(index)
                order.insert(place, index)
        return tuple(reversed(order))


def declared_call(
    operation: Operation,
    target: str,
    attributes: Mapping[str, Any],
    dtypes: Mapping[str, Any] | None = None,
    **others: Any,
) -> Call:
    """Returns a call of a target with the arrays that the library declares.

    `attributes` are plain values, None for absent ones; `dtypes` maps results that may have one of
    several dtypes to theirs; `others` are fields of `Call`.
    """
    one = declared(target)
    return Call(
        operation=operation,
        target=target,
        operands=one.operands(attributes),
        results=one.results(attributes, dtypes or {}),
        attributes=one.attributes(attributes),
        **{"sharded": one.sharded, "reuses": one.reuses, **others},
    )


class OnShards(Protocol):
    """Computes a device's share of a call whose last axis is sharded."""

    def __call__(self, axes: Names, *operands: jax.Array) -> Sequence[jax.Array]:
        """Returns a device's results; `axes` of the mesh shard the axis, and are bound."""


def dense_over(dense: Callable[..., Any], over: Names, *operands: jax.Array) -> Any:
    """Returns `dense` of shards of columns over the mesh axes `over`."""
    return dense(*operands, over=over)


# Lowers one call: a function of a context, operands, and `call`, `keep` and `mapped`.
Lower = Callable[..., Sequence[Any]]
# Lowers a call alone or together with others: a hashable function of a `Lower` and its arguments.
Rewrite = Callable[..., Sequence[Any]]


def bind(
    call: Call, *operands: jax.Array, keep: tuple[int, ...] | None = None
) -> tuple[jax.Array, ...]:
    """Binds `call` in the program being traced, or runs it; returns the results `keep`."""
    keep = tuple(range(len(call.results))) if keep is None else keep
    if call.implementation == "pallas" and pallas.interpret_params is not None:
        # The interpreter calls back in order, which a lowering cannot add to a program.
        results = _kernel(None, call)(*operands)
        return tuple(results[index] for index in keep)
    return tuple(_bind(*vary_alike(operands), call=call, keep=keep, mapped=0))


_custom_call = Primitive("xentile_custom_call")
# The same where XLA may choose how arrays are sharded. Its lowering gets the program's devices, to
# ask XLA for the sharding; JAX refuses it where there is only an abstract mesh.
_call_that_asks = Primitive("xentile_custom_call_that_asks")
tell_devices(_call_that_asks)
PRIMITIVES = (_custom_call, _call_that_asks)


def _bind(*operands: Any, call: Call, **params: Any) -> list[jax.Array]:
    """Binds a call with the primitive that its lowering needs."""
    asks = (call.on_shards is not None or call.has_whole_axes) and may_be_left_to_xla(*operands)
    primitive = _call_that_asks if asks else _custom_call
    results: list[jax.Array] = primitive.bind(*operands, call=call, **params)
    return results


def vary_alike(operands: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns operands that all vary over the `shard_map` axes that any of them varies over."""
    varying = [varying_axes(jax.typeof(operand)) for operand in operands]
    everywhere = frozenset[str]().union(*varying)
    return [
        jax.lax.pcast(operand, tuple(sorted(everywhere - axes)), to="varying")
        if everywhere - axes
        else operand
        for operand, axes in zip(operands, varying, strict=True)
    ]


def _abstract_eval(*avals: Any, call: Call, keep: tuple[int, ...], mapped: int) -> list[Any]:
    call.signature.check_sharding(call.operation, call.target, avals, call.columns)
    results = call.signature.result_avals(call.results, avals, mapped)
    return [results[index] for index in keep]


def _batch(
    operands: Sequence[Any],
    axes: Sequence[int | None],
    *,
    call: Call,
    keep: tuple[int, ...],
    mapped: int,
) -> tuple[Sequence[Any], Sequence[int]]:
    """Turns the mapped axis into an axis of tokens, which shared operands may lack."""
    signature = call.signature
    most = mapped if signature.sums else None
    given, place = with_mapped_axis(signature.operands, operands, axes, most)
    results = _bind(*vary_alike(given), call=call, keep=keep, mapped=mapped + signature.sums)
    return results, [place] * len(keep)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: Call, **params: Any) -> Any:
    results = _bind(*primals, call=call, **params)
    return results, refusal.tangents_of(call.operation, results, tangents)


def _dead_code(used: Sequence[bool], *rest: Any) -> tuple[list[bool], Any]:
    """Drops unused results, and replaces a call whose gradients nothing uses."""
    equation = rest[-1]  # from 0.12 on JAX says more before it
    if not any(used):
        return [False] * len(equation.invars), None
    call, keep = equation.params["call"], equation.params["keep"]
    wanted = [index for index, is_used in zip(keep, used, strict=True) if is_used]
    operands = range(len(equation.invars))
    other = call.without_gradient
    if other is not None and max(wanted) < other.first_unused:
        operands = other.operands
        wanted = [other.results[index] for index in wanted]
        call = other.call
    lean = equation.replace(
        invars=[equation.invars[index] for index in operands],
        outvars=[var for var, is_used in zip(equation.outvars, used, strict=True) if is_used],
        params={**equation.params, "call": call, "keep": tuple(wanted)},
    )
    return [index in operands for index in range(len(equation.invars))], lean


def _lower(ctx: Any, *operands: Any, call: Call, **params: Any) -> Sequence[Any]:
    if call.rewrite is None:
        return _lower_alone(ctx, *operands, call=call, **params)
    # `rewrite` applies once: the lowering may bind the call again, for a platform or a device.
    alone = dataclasses.replace(call, rewrite=None)
    return call.rewrite(_lower_alone, ctx, *operands, call=alone, **params)


def _lower_alone(
    ctx: Any, *operands: Any, call: Call, keep: tuple[int, ...], mapped: int
) -> Sequence[Any]:
    module = ctx.module_context
    platforms = tuple(ctx.platforms or module.platforms)
    params: dict[str, Any] = {"call": call, "keep": keep, "mapped": mapped}
    if call.dense is not None:
        without = {
            one
            for one in platforms
            if one in call.dense_on
            or library.prefers_xla(one, call.operation.name, call.variant)
            or ((one != "cpu" or call.is_composed) and not _has_kernel(call, one))
        }
        chooses = call.implementation is None or call.is_composed
        is_mapped = call.signature.mapped_axes(ctx.avals_in) > 0
        if call.is_composed and (mapped or is_mapped or not partitioning.is_whole(module)):
            return _lower_dense(ctx, *operands, **params)
        if chooses and without == {*platforms}:
            return _lower_dense(ctx, *operands, **params)
        if chooses and without:
            kernels = {
                one: "pallas" if one == "tpu" else "custom_call"
                for one in platforms
                if one not in without
            }
            return _lower_for_each(ctx, *operands, **params, of=kernels)
        is_gathered = call.dense_if_sharded or is_mapped
        if call.implementation is None and is_gathered and not partitioning.is_whole(module):
            # XLA would gather arrays for the kernel.
            return _lower_dense(ctx, *operands, **params)
    others = tuple(platform for platform in platforms if platform != "tpu")
    if call.implementation is None and others != platforms and others:
        return _lower_for_each(
            ctx, *operands, **params, of={"tpu": "pallas"}, default="custom_call"
        )
    if call.for_tpu is None and not others:
        _check_platforms(call, platforms)
    if not others or (call.implementation == "pallas" and others != platforms):
        return _lower_pallas(ctx, *operands, call=call, keep=keep)
    if call.implementation == "pallas":
        raise NotImplementedError(
            f'{call.operation}: implementation "pallas" is for TPUs, and the program for '
            f'{", ".join(platforms)}: "custom_call" runs where info() says, "reference" everywhere'
        )
    _check_platforms(call, others)
    if call.for_cuda and platforms == ("cuda",):
        call = _as_for_cuda(call)
    results = call.signature.result_avals(call.results, ctx.avals_in, mapped)
    if call.columns in call.signature.sharded_over(ctx.avals_in):
        return _lower_explicit(ctx, *operands, **params)
    if call.on_shards is not None and auto_partitioning.asks(ctx):
        return _lower_in_parts(ctx, *operands, **params)
    _ask_of_whole_axes(ctx, call, operands)
    how = partitioning.layout(
        call.signature, ctx.avals_in, results, mapped, partitioning.device_count(module)
    )
    before, given = ctx.avals_in, list(map(reshaped, ctx.avals_in, how.operands))
    if call.prepared is not None:
        how = dataclasses.replace(how, attributes={})
        given = jax.make_jaxpr(call.prepared)(*ctx.avals_in).out_avals
        prepare = mlir.lower_fun(call.prepared, multiple_results=True)
        operands, before = prepare(ctx.replace(avals_out=given), *operands), given
    found = list(map(reshaped, results, how.results))
    attributes = dict(call.attributes)
    layouts: dict[str, Any] = {}
    if call.outward and platforms == ("cuda",):
        attributes["tokens_first"] = np.bool_(True)
        names = [result.dims for result in call.results]
        layouts = {
            "operand_layouts": [*map(call.layout, call.operands, given)],
            "result_layouts": [*map(call.layout, names, found)],
        }
    lowering = jax.ffi.ffi_lowering(
        call.target,
        operand_output_aliases=dict([call.reuses] if call.reuses else []),
        extra_attributes=how.attributes,
        **layouts,
    )
    values = lowering(
        ctx.replace(avals_in=given, avals_out=found),
        *map(partial(_reshape, ctx), operands, before, given),
        **attributes,
    )
    outputs = []
    for index in keep:
        value, made, aval = values[index], found[index], results[index]
        if call.signature.results[index].has_tokens:
            outputs.append(_reshape(ctx, value, made, aval))
        else:
            add = mlir.lower_fun(partial(jnp.sum, axis=how.summed), multiple_results=False)
            outputs.extend(add(ctx.replace(avals_in=[made], avals_out=[aval]), value))
    return outputs


def _as_for_cuda(call: Call) -> Call:
    """Returns a call with its attributes for CUDA, and the results that these add behind others."""
    values, one = dict((*call.attributes, *call.for_cuda)), declared(call.target)
    return dataclasses.replace(
        call, attributes=one.attributes(values), results=one.results(values, {}), for_cuda=()
    )


def _ask_of_whole_axes(ctx: Any, call: Call, operands: Sequence[Any]) -> None:
    """Makes XLA warn, when it compiles, of axes that it gathers since handlers need them whole."""
    pairs = zip(call.signature.operands, ctx.avals_in, operands, strict=True)
    for index, (dims, aval, value) in enumerate(pairs):
        axes = enumerate(dims.factors, dims.leading(aval))
        # `gathering.watched` covers the vocabulary of logits.
        whole = {axis: name for axis, name in axes if name not in (*call.signature.sharded, "V")}
        # A weight [D] that tokens share is small, and gathered by design.
        is_weight = not dims.has_tokens and len(dims.names) == 1
        if whole and not is_weight:
            what = f"operand {index} of {call.target}"
            gathering.ask(ctx, call.operation, what, whole, value, aval)


def _lower_in_parts(
    ctx: Any, *operands: Any, call: Call, keep: tuple[int, ...], mapped: int
) -> Sequence[Any]:
    """Lowers a call that each device computes on the tokens and columns that XLA gives it."""
    avals = ctx.avals_in
    arrays = _factors(call, avals, mapped)
    columns = call.columns
    assert columns is not None
    extent = call.signature.extents(avals)[columns]

    def local(mesh_axes: Mapping[str, Names], uneven: Mapping[str, int]) -> Callable[..., Any]:
        if columns in uneven:
            gathering.tell_uneven(call.operation, columns, extent, uneven[columns])
        return _on_device(call, mapped, avals, mesh_axes)

    results = call.signature.result_avals(call.results, avals, mapped)
    whole = partial(_bind_all, call, mapped)
    # Determines what devices compute; begins with the target (`auto_partitioning.named`).
    name = f"{call.target} {call} {call.on_shards} {mapped}"
    values = auto_partitioning.lower(
        ctx.replace(avals_out=results), operands, name, arrays, whole, local
    )
    return [values[index] for index in keep]


def _lower_explicit(
    ctx: Any, *operands: Any, call: Call, keep: tuple[int, ...], mapped: int
) -> Sequence[Any]:
    """Lowers a call to a `shard_map` over the explicit axes of a mesh, as types shard arrays."""
    avals = ctx.avals_in
    arrays = _factors(call, avals, mapped)
    mesh_axes: dict[str, Names] = {}
    for axes, aval in zip(arrays.operands, avals, strict=True):
        for axis, one in zip(axes, spec_of(aval), strict=True):
            name, _ = factor_of(axis)
            mesh_axes[name] = mesh_axes.get(name) or tuple_of(one)
    mesh = next(aval.sharding.mesh for aval in avals if not aval.sharding.mesh.empty)
    if call.columns is not None:
        mesh_axes[call.columns] = in_order(mesh, mesh_axes[call.columns])
    given, found = (
        tuple(auto_partitioning.spec_of_axes(axes, mesh_axes) for axes in side)
        for side in (arrays.operands, arrays.results)
    )
    own = _on_device(call, mapped, avals, mesh_axes)

    def run_on_mesh(*arrays: jax.Array) -> list[jax.Array]:
        function = on_devices(mesh, explicit_axes(mesh), own, given, found, is_checked=False)
        placed = [jax.sharding.reshard(*pair) for pair in zip(arrays, given, strict=True)]
        results = function(*placed)
        return [
            jax.sharding.reshard(results[index], PartitionSpec(*spec_of(aval)))
            for index, aval in zip(keep, ctx.avals_out, strict=True)
        ]

    with jax.sharding.use_abstract_mesh(mesh):
        values: Sequence[Any] = mlir.lower_fun(run_on_mesh, multiple_results=True)(ctx, *operands)
    return values


def _factors(call: Call, avals: Sequence[Any], mapped: int) -> auto_partitioning.Arrays:
    """Returns names of all axes of a call's arrays: `t0`, `t1`.. for tokens, and declared ones."""
    signature = call.signature
    count = len(signature.leading(avals)) - len(signature.sharded)

    def axes(dims: Dims, leading: int) -> auto_partitioning.Axes:
        return (*(f"t{index}" for index in range(leading)), *dims.names)

    given = tuple(
        axes(dims, count if dims.has_tokens else dims.leading(aval))
        for dims, aval in zip(signature.operands, avals, strict=True)
    )
    found = tuple(axes(dims, count if dims.has_tokens else mapped) for dims in signature.results)
    columns = () if call.columns is None else (call.columns,)
    sharded = (*(f"t{index}" for index in range(count)), *columns)
    sides = enumerate((*signature.operands, *signature.results))
    followers = tuple(index for index, dims in sides if not dims.has_tokens)
    return auto_partitioning.Arrays(given, found, sharded, columns, followers)


def _on_device(
    call: Call, mapped: int, avals: Sequence[Any], mesh_axes: Mapping[str, Names]
) -> Callable[..., tuple[jax.Array, ...]]:
    """Returns the function of a device's shards, which runs where `mesh_axes` are bound."""
    signature, columns = call.signature, mesh_axes.get(call.columns or "", ())
    assert call.on_shards is not None
    function: Callable[..., Any] = partial(_bind_all, call, mapped)
    if columns:
        function = _mapped_as(call, Bound(call.on_shards, columns), mapped, avals)
    leading = signature.leading(avals)[: len(signature.leading(avals)) - len(signature.sharded)]
    of_tokens = [mesh_axes.get(f"t{index}", ()) for index in range(len(leading))]
    # Axes over which sums are sharded.
    summed = tuple(name for names in of_tokens[mapped:] for name in names)

    def run_shard(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        if summed:
            clean = auto_partitioning.without_padding
            arrays = tuple(
                clean(one, of_tokens, leading) if dims.has_tokens else one
                for one, dims in zip(arrays, signature.operands, strict=True)
            )
        pairs = zip(function(*arrays), signature.results, strict=True)
        return tuple(
            one if dims.has_tokens or not summed else jax.lax.psum(one, summed)
            for one, dims in pairs
        )

    return run_shard


def _bind_all(call: Call, mapped: int, *operands: jax.Array) -> list[jax.Array]:
    keep = tuple(range(len(call.results)))
    results: list[jax.Array] = _bind(*vary_alike(operands), call=call, keep=keep, mapped=mapped)
    return results


def _reshape(ctx: Any, value: Any, before: Any, after: Any) -> Any:
    """Returns an `ir.Value` of the type `before` in the shape of `after`."""
    if before.shape == after.shape:
        return value
    if not all(isinstance(extent, int) for extent in after.shape):
        # A shape with symbolic extents is a value of the program.
        symbolic = mlir.lower_fun(lambda x: jnp.reshape(x, after.shape), multiple_results=False)
        (reshaped_value,) = symbolic(ctx.replace(avals_in=[before], avals_out=[after]), value)
        return reshaped_value
    element = ir.RankedTensorType(value.type).element_type
    return stablehlo.reshape(ir.RankedTensorType.get(after.shape, element), value)


def _dense(
    call: Call, keep: tuple[int, ...], mapped: int, avals: Sequence[Any]
) -> Callable[..., list[jax.Array]]:
    """Returns XLA's program for a call with operands of the types `avals`."""
    assert call.dense is not None
    function = _mapped_as(call, call.dense, mapped, avals)

    def kept(*arrays: jax.Array) -> list[jax.Array]:
        results = function(*arrays)
        return [results[index] for index in keep]

    return kept


def _mapped_as(
    call: Call, function: Callable[..., Sequence[jax.Array]], mapped: int, avals: Sequence[Any]
) -> Callable[..., Sequence[jax.Array]]:
    """Returns a function of a call's operands, mapped over axes that shared operands have."""
    signature = call.signature
    leading = [
        None if dims.has_tokens else dims.leading(aval)
        for dims, aval in zip(signature.operands, avals, strict=True)
    ]
    for axis in reversed(range(max(mapped, signature.mapped_axes(avals)))):
        axes = [0 if count is None or count > axis else None for count in leading]
        function = jax.vmap(function, in_axes=axes)
    return function


def _lower_dense(ctx: Any, *operands: Any, **params: Any) -> Sequence[Any]:
    """Lowers a call to XLA's program."""
    lower = mlir.lower_fun(_dense(**params, avals=ctx.avals_in), multiple_results=True)
    results: Sequence[Any] = lower(ctx, *operands)
    return results


def _has_kernel(call: Call, platform: str) -> bool:
    """Returns whether a call has a kernel for a platform; False without a library."""
    if platform == "tpu":
        return call.for_tpu is not None
    outcome = library.attempt()
    return not isinstance(outcome, library.LibraryError) and platform in outcome[1].platforms_of(
        call.target
    )


def _check_platforms(call: Call, platforms: Sequence[str]) -> None:
    """Checks that the library has kernels for at least one of the platforms.

    One is enough, since JAX does not say which platform a branch of a program is for. XLA refuses
    the call where it then runs on another platform.

    Raises:
        LibraryError: there is no library, or it was built without the platform's kernels.
        NotImplementedError: the target has no kernels for any of the platforms.
    """
    loaded = library.require()
    kernels = loaded.platforms_of(call.target)
    if kernels & {*platforms}:
        return
    names, have = ", ".join(platforms), ", ".join(sorted(kernels)) or "none"
    dense = 'implementation="reference" runs everywhere, as the dense program'
    for platform in platforms:
        if platform in library.BUILDS and platform not in loaded.platforms:
            raise library.LibraryError(
                f"{call.operation}: no kernel for platform {names}: {loaded.path} was built "
                f"without (it has kernels for {have}): {library.BUILDS[platform]}; {dense}"
            )
    raise NotImplementedError(
        f"{call.operation}: no kernel for platform {names} (there are kernels for {have}); {dense}"
    )


def _lower_for_each(
    ctx: Any,
    *operands: Any,
    call: Call,
    keep: tuple[int, ...],
    mapped: int,
    of: Mapping[str, str],
    default: str | None = None,
) -> Sequence[Any]:
    """Lowers a call to a conditional over the platform.

    `of` maps platforms to implementations; `default` is that of others, None for XLA's program.
    """

    def named(implementation: str | None) -> Callable[..., Any]:
        if implementation is None:
            return _dense(call, keep, mapped, ctx.avals_in)
        # The named implementation also runs for composed calls.
        one = dataclasses.replace(call, implementation=implementation, is_composed=False)
        return partial(_bind, call=one, keep=keep, mapped=mapped)

    branches = {platform: named(implementation) for platform, implementation in of.items()}
    lower = mlir.lower_fun(
        lambda *arrays: jax.lax.platform_dependent(*arrays, **branches, default=named(default)),
        multiple_results=True,
    )
    results: Sequence[Any] = lower(ctx, *operands)
    return results


def _lower_pallas(ctx: Any, *operands: Any, call: Call, keep: tuple[int, ...]) -> Sequence[Any]:
    """Lowers a call to its Pallas kernel."""
    # Otherwise Pallas wants a kernel for each platform of the module.
    module = ctx.module_context.replace(platforms=("tpu",))
    ctx = ctx.replace(module_context=module, platforms=None)
    kernel = _kernel(module, call)
    lower = mlir.lower_fun(
        lambda *arrays: [kernel(*arrays)[index] for index in keep], multiple_results=True
    )
    results: Sequence[Any] = lower(ctx, *operands)
    return results


def _kernel(module_context: Any, call: Call) -> Callable[..., Sequence[jax.Array]]:
    """Returns the Pallas kernel of a call, a function of its operands.

    Without `module_context` the kernel is for Pallas' interpreter.

    Raises:
        NotImplementedError: the implementation is "custom_call", or the TPU is not supported.
    """
    if module_context is None:
        chosen = dataclasses.replace(pallas.INTERPRETER, interpret=pallas.interpret_params)
    elif call.implementation == "custom_call":
        raise NotImplementedError(
            f'{call.operation}: implementation "custom_call" is for CPUs and GPUs, and the program '
            'for tpu: it must be "pallas", "reference" or None'
        )
    else:
        chosen = pallas.target(module_context)
    assert call.for_tpu is not None
    return call.for_tpu(chosen, call)


# One rule for all platforms: a program for CPUs and GPUs holds each call once. Under a conditional
# with a rule for each platform, no result could overwrite an operand. Rules are not cached, because
# JAX does not show a cached rule where its operands come from (`lowered_rewrites`).
for _primitive in PRIMITIVES:
    _primitive.multiple_results = True
    _primitive.def_impl(partial(xla_interpreter.apply_primitive, _primitive))
    _primitive.def_abstract_eval(_abstract_eval)
    batching.primitive_batchers[_primitive] = _batch
    ad.primitive_jvps[_primitive] = _jvp
    pe.dce_rules[_primitive] = _dead_code
    mlir.register_lowering(_primitive, _lower, cacheable=False)
