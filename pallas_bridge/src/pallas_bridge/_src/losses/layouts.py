"""How hidden states and a weight are sharded, where that is known when a program is traced.

Where one mesh axis shards both tokens and vocabulary, tokens stay sharded and the weight is
gathered.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from .. import meshes
from ..compat import shards_by_shardy
from ..logits_gemms import Bias
from ..meshes import Names, entry, spec_of_names
from .vocab_shards import WHOLE, OverDevices


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
    def has_shards(self) -> bool:
        """Whether devices have shards of the vocabulary."""
        mesh = jax.sharding.get_abstract_mesh() if self.mesh is None else self.mesh
        return any(mesh.shape[name] > 1 for name in self.names)

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

    def device_shapes(self, hidden: Any, weight: Any) -> tuple[Any, Any]:
        """Returns shapes of hidden states and the weight as a device's GEMMs take them."""
        if self.mesh is None:
            return hidden, weight
        kept = zip(self.weight, self.gathered or ((), ()), strict=True)
        specs = self.tokens, PartitionSpec(*(None if names else one for one, names in kept))
        shapes = (
            NamedSharding(self.mesh, spec).shard_shape(array.shape)
            for array, spec in zip((hidden, weight), specs, strict=True)
        )
        own_hidden, own_weight = map(jax.ShapeDtypeStruct, shapes, (hidden.dtype, weight.dtype))
        return own_hidden, own_weight

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
        per_token: Any,
    ) -> Any:
        """Returns function(hidden, weight, bias, per_token), by each device of its own.

        `per_token` is a tree of arrays [..], and results are sharded as `results` says.
        """
        if self.mesh is None:
            is_alone = self.exchange().is_whole
            alone = partial(meshes.mark_replicated, self.names if is_alone else ())
            return function(*jax.tree.map(alone, (hidden, weight, bias, per_token)))
        specs = PartitionSpec(*self.tokens, None), self.weight, PartitionSpec(entry(self.names))
        arrays: list[Any] = [
            None if one is None else meshes.place(self.mesh, spec, one)
            for one, spec in zip((hidden, weight, bias), specs, strict=True)
        ]
        # XLA for CPUs fails to compile sums of 16 bits over some axes of a mesh alone.
        is_wide = not {*self.names} <= meshes.explicit_axes(self.mesh)

        def run_own(own: jax.Array, *others: Any) -> Any:
            if is_wide and hidden.dtype != jnp.float32:
                own = jax.lax.pcast(own, self.names, to="varying").astype(hidden.dtype)
            return function(own, *others)

        given = *specs, self.tokens
        mapped = meshes.on_devices(self.mesh, self.axes, run_own, given, results)
        if is_wide:
            arrays[0] = arrays[0].astype(jnp.float32)
        return mapped(*arrays, per_token)


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
        return Layout(names, mesh, axes | {*names}, spec_of_names(tokens), spec_of_names(sharded))
    if names and names != weight_shardings[vocab_axis]:
        raise ValueError(
            f"axis_name is {axis_name!r} and weight is sharded as "
            f"{spec_of_names(weight_shardings)}; its axis {vocab_axis} must be sharded over it, "
            "and over nothing else: reshard it first"
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
    return Layout(shards, mesh, axes, spec_of_names(tokens), spec_of_names(kept), tuple(gathered))
