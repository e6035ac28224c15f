"""How operands are sharded over devices, and what each device computes.

A `Layout` describes arrays whose sharding is known when a program is traced. Where XLA's
partitioner shards arrays while it compiles, a `PartitionedSchedule` has each device run a plan for
its own tokens and its vocabulary shard. Where one mesh axis shards both tokens and vocabulary,
tokens stay sharded and the weight is gathered.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .. import auto_partitioning, gathering, meshes
from ..bound import Bound
from ..compat import shards_by_shardy
from ..logits_gemms import Bias
from ..losses.options import Options
from ..losses.vocab_shards import WHOLE, OverDevices, shard_options
from ..meshes import Names
from . import derivative
from .chunks import Operands
from .declaration import OPERATION
from .derivative import LinearLoss, Saved
from .schedule import OUTPUT_COUNTS, PassName, Schedule

# Axes of the vocabulary and of hidden states; those of tokens are numbered.
V, D = "V", "D"


@dataclass(frozen=True)
class Layout:
    """How hidden states and weight are sharded, over a mesh or within `shard_map`."""

    # The mesh axes that the vocabulary stays sharded over.
    names: Names
    # None within `shard_map`, where arrays are a device's; and the axes that get to be so.
    mesh: Any = None
    axes: frozenset[str] = frozenset()
    # What shards each axis of tokens, and the weight as devices get it.
    tokens: PartitionSpec = field(default_factory=PartitionSpec)
    weight: PartitionSpec = field(default_factory=PartitionSpec)
    # What each axis of the weight is gathered over before it is used.
    gathered: tuple[Names, ...] = ()

    def exchange(self) -> OverDevices:
        """Returns the collectives of vocabulary shards."""
        exchange = OverDevices.of(self.names) if self.names else WHOLE
        return WHOLE if exchange.count == 1 else exchange

    @property
    def leaves_axes(self) -> bool:
        """Whether XLA shards over other axes of the mesh, so that no kernel takes a GEMM.

        By Shardy: GSPMD would gather a gradient that the forward pass has made.
        """
        has_others = self.mesh is not None and bool({*self.mesh.axis_names} - self.axes)
        return has_others and shards_by_shardy()

    def gather(self, weight: jax.Array) -> jax.Array:
        """Returns a device's weight as GEMMs take it."""
        for axis, names in enumerate(self.gathered):
            if names:
                weight = jax.lax.all_gather(weight, names, axis=axis, tiled=True)
        return weight

    def total(self, loss: jax.Array) -> jax.Array:
        """Returns the sum over all tokens of sums over a device's."""
        names = [name for one in self.tokens for name in meshes.tuple_of(one)]
        return jax.lax.psum(loss, tuple(names)) if names else loss

    def place(self, x: jax.Array) -> jax.Array:
        """Has an array of a number a token lie as the tokens do."""
        if self.mesh is not None:
            return meshes.place(self.mesh, self.tokens, x)
        return meshes.mark_replicated(self.names, x) if self.exchange().is_whole else x

    def run(
        self,
        function: Callable[..., Any],
        results: Any,
        hidden: jax.Array,
        weight: jax.Array,
        bias: Bias,
        *per_token: jax.Array | None,
    ) -> Any:
        """Returns function(hidden, weight, bias, *per_token), by each device of its own.

        `per_token` are [..] each, and results are sharded as `results` says.
        """
        if self.mesh is None:
            if self.exchange().is_whole:
                alone = partial(meshes.mark_replicated, self.names)
                return function(*jax.tree.map(alone, (hidden, weight, bias, *per_token)))
            return function(hidden, weight, bias, *per_token)
        hidden_spec = PartitionSpec(*self.tokens, None)
        bias_spec = PartitionSpec(meshes.entry(self.names))
        hidden = meshes.place(self.mesh, hidden_spec, hidden)
        weight = meshes.place(self.mesh, self.weight, weight)
        bias = None if bias is None else meshes.place(self.mesh, bias_spec, bias)
        given = hidden_spec, self.weight, bias_spec, *[self.tokens] * len(per_token)
        if {*self.names} <= meshes.explicit_axes(self.mesh) or hidden.dtype == jnp.float32:
            mapped = meshes.on_devices(self.mesh, self.axes, function, given, results)
            return mapped(hidden, weight, bias, *per_token)

        def run_wide(wide: jax.Array, *arrays: Any) -> Any:
            varying: jax.Array = jax.lax.pcast(wide, self.names, to="varying")
            return function(varying.astype(hidden.dtype), *arrays)

        # XLA for CPUs fails to compile sums of 16 bits over some axes of a mesh alone.
        mapped = meshes.on_devices(self.mesh, self.axes, run_wide, given, results)
        return mapped(hidden.astype(jnp.float32), weight, bias, *per_token)


def find_layout(
    hidden: jax.Array, weight: jax.Array, vocab_axis: int, axis_name: Any
) -> Layout | None:
    """Returns how arrays are known to be sharded; None where they are not.

    Raises:
        TypeError: `axis_name` is no name.
        ValueError: a name of nothing, or shards of more than one size.
    """
    names = meshes.names_of(axis_name)
    if meshes.are_of_devices(names):
        return Layout(names)
    *tokens, width = meshes.sharded_over(hidden)
    weight_shardings = meshes.sharded_over(weight)
    if not names and not any([*tokens, width, *weight_shardings]):
        return None
    mesh = meshes.with_axes(names, hidden, weight)
    axes = meshes.explicit_axes(mesh)
    if names and not {*names} <= axes:
        # XLA knows of other devices, and refuses shardings for a single one.
        if meshes.check_divides(mesh, names, "weight", weight.shape[vocab_axis]) == 1:
            return None
        sharded: list[Names] = [(), ()]
        sharded[vocab_axis] = names
        return Layout(names, mesh, axes | {*names}, _spec(tokens), _spec(sharded))
    if names and names != weight_shardings[vocab_axis]:
        raise ValueError(
            f"axis_name is {axis_name!r} and weight is sharded as {_spec(weight_shardings)}; its "
            f"axis {vocab_axis} must be sharded over it, and over nothing else: reshard it first"
        )
    # An axis of one device shards nothing.
    weight_shardings = [
        tuple(name for name in one if mesh.shape[name] > 1) for one in weight_shardings
    ]
    taken = {name for one in tokens for name in one}
    # Devices that have other tokens need the whole of what they share; where devices with the same
    # tokens have shards of D, nobody sums over these.
    gathered: list[Names] = [(), ()]
    kept: list[Names] = [(), ()]
    for axis, one in enumerate(weight_shardings):
        if {*one} <= taken:
            gathered[axis] = kept[axis] = one
        elif axis == vocab_axis:
            kept[axis] = tuple(name for name in one if name not in taken)
    shards = () if gathered[vocab_axis] else kept[vocab_axis]
    # Of arrays that are there, it is known what every axis shards.
    axes = axes or frozenset(mesh.axis_names)
    return Layout(shards, mesh, axes, _spec(tokens), _spec(kept), tuple(gathered))


def _spec(shardings: Sequence[Names]) -> PartitionSpec:
    return PartitionSpec(*map(meshes.entry, shardings))


@dataclass(frozen=True)
class PartitionedSchedule(Schedule):
    """A schedule of arrays that XLA may shard: each device runs a plan for its own."""

    def forward_saving_logits(self, operands: Operands) -> Any:
        """Returns what `forward` does, and no logits: nobody saves those of a device."""
        return *self.forward(operands), ()

    def run(self, name: PassName, options: Options, *arrays: Any) -> Any:
        """Returns the pass `name` of its arrays, operands first.

        Hidden states are [.., D], and what is of tokens [..]: axes that are sharded could not be
        flattened where they are.
        """
        (hidden, _, bias, _), *_ = arrays
        flat, tree = jax.tree.flatten(arrays)
        tokens = tuple(f"n{index}" for index in range(hidden.ndim - 1))
        weight_axes = (V, D) if self.planner.gemms.vocab_axis == 0 else (D, V)
        first = ((*tokens, D), weight_axes, *([] if bias is None else [(V,)]))
        operands = (*first, *[tokens] * (len(flat) - len(first)))
        count = OUTPUT_COUNTS[name]
        results = (*[tokens] * count, *(() if name == "forward" else first))
        axes = auto_partitioning.Arrays(operands, results, (*tokens, V), (V,))
        schedule = Schedule(options, self.planner, self.plan, self.cuda, self.cpu)
        work = _Pass(name, schedule, tree, axes, hidden.shape[:-1])
        # It names all that devices compute.
        text = f"{OPERATION}_{name} {schedule}"
        run_whole, run_local = Bound(_Pass.whole, work), Bound(_Pass.local, work)
        found = auto_partitioning.bind(
            auto_partitioning.Work(OPERATION, text, axes, run_whole, run_local), *flat
        )
        outputs, gradients = tuple(found[:count]), found[count:]
        if name == "forward":
            return outputs
        dhidden, dweight, *dbias = gradients
        made = dhidden, dweight, dbias[0] if dbias else None
        return made if name == "backward" else (*outputs, made)


@dataclass(frozen=True)
class _Pass:
    """A pass of flat arrays, whole or a device's."""

    name: PassName
    schedule: Schedule
    tree: Any
    arrays: auto_partitioning.Arrays
    # The extents of all axes of tokens.
    tokens: tuple[int, ...]

    def whole(self, *arrays: jax.Array) -> list[jax.Array]:
        """Returns what the schedule makes of whole arrays."""
        return self._run_flat(partial(self.schedule.run, self.name, self.schedule.options), *arrays)

    def local(
        self, mesh_axes: Mapping[str, Names], uneven: Mapping[str, int]
    ) -> Callable[..., Sequence[jax.Array]]:
        """Returns what a device makes of its own; mesh axes shard tokens and the vocabulary."""
        token_shardings = [mesh_axes[f"n{index}"] for index in range(len(self.tokens))]
        names = tuple(name for one in token_shardings for name in one)
        run_own = partial(self._run_on_device, names, mesh_axes[V])

        def clean(x: jax.Array) -> jax.Array:
            return auto_partitioning.without_padding(x, token_shardings, self.tokens)

        def run_shard(*arrays: jax.Array) -> list[jax.Array]:
            if V in uneven:
                vocab = arrays[1].shape[self.schedule.planner.gemms.vocab_axis]
                gathering.tell_uneven(OPERATION, V, vocab, uneven[V])
            return self._run_flat(run_own, *self._of_tokens(clean, self.arrays.operands, arrays))

        return run_shard

    def _of_tokens(
        self, function: Callable[[jax.Array], jax.Array], axes: Any, arrays: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """Returns arrays with `function` of those whose first axes are those of tokens."""
        tokens = self.arrays.operands[0][:-1]
        pairs = zip(arrays, axes, strict=True)
        return [function(x) if one[: len(tokens)] == tokens else x for x, one in pairs]

    def _run_flat(self, function: Callable[..., Any], *arrays: jax.Array) -> list[jax.Array]:
        """Returns function of arrays with one axis of tokens, whose results have all of them."""
        leading = arrays[0].shape[:-1]

        def flatten(x: jax.Array) -> jax.Array:
            return x.reshape(-1, *x.shape[len(leading) :])

        def unflatten(x: jax.Array) -> jax.Array:
            return x.reshape(*leading, *x.shape[1:])

        flat = self._of_tokens(flatten, self.arrays.operands, arrays)
        found = jax.tree.leaves(function(*jax.tree.unflatten(self.tree, flat)))
        return self._of_tokens(unflatten, self.arrays.results, found)

    def _run_on_device(
        self, tokens: Names, columns: Names, operands: Operands, *more: Any
    ) -> tuple[Any, ...]:
        """Returns the pass of a device's arrays; mesh axes shard `tokens` and `columns`."""
        options, planner = self.schedule.options, self.schedule.planner
        # A cotangent is the whole's on every device.
        exchange = OverDevices(columns, is_checked=True)
        reduced = self.name == "fused" and exchange.is_whole
        own = planner.schedule(shard_options(options, exchange), operands, reduced=reduced)
        loss = LinearLoss(options, planner.gemms, own, exchange)
        forward = partial(derivative.forward, loss, operands, None)
        outputs: Sequence[Any] = ()
        if self.name == "forward":
            outputs, saved = forward(is_differentiated=False)
            return *outputs, saved.lse_low
        if self.name == "backward":
            (lse, lse_low), cotangents = more
            # As padding: a shard all of whose columns have a bias of -inf.
            is_empty = jnp.zeros(operands.labels.shape, bool)
            if operands.bias is not None and options.softcap is None:
                is_empty |= operands.bias.max() == -jnp.inf
            saved = Saved(lse, lse_low, is_empty)
            gradients = derivative.vjp(loss, (operands, None, saved), cotangents)
        elif reduced and own.is_fused:
            *outputs, gradients = own.fused(operands, *more, needs_losses=False)
        else:
            (losses, *_), saved = forward(is_differentiated=True)
            outputs = losses, saved.lse, saved.lse_low
            gradients = derivative.vjp(loss, (operands, None, saved), (*more, None, None))
        dhidden, *others = gradients
        others = jax.tree.map(partial(_sum, tokens), others)
        return *outputs, _sum(columns, dhidden), *others


def _sum(axes: Names, x: jax.Array) -> jax.Array:
    """Returns the sum over devices, which is rounded last."""
    return jax.lax.psum(x.astype(jnp.float32), axes).astype(x.dtype) if axes else x
