"""How hidden states and an output matrix are cut over devices, and who is to run what on a part."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .. import meshes
from ..compat import cuts_by_shardy
from ..losses.vocab_shards import OverDevices
from ..meshes import Names
from .tokens import Bias


@dataclass(frozen=True)
class Cut:
    """How hidden states and the matrix lie on a mesh, or on devices that are there already."""

    # The mesh axes that the vocabulary stays cut over.
    names: Names
    # None within `shard_map`, where arrays are a device's; and the axes that get to be so.
    mesh: Any = None
    axes: frozenset[str] = frozenset()
    # What cuts each axis of tokens, and the weight as devices get it.
    tokens: PartitionSpec = field(default_factory=PartitionSpec)
    weight: PartitionSpec = field(default_factory=PartitionSpec)
    # What each axis of the weight is gathered over before it is used.
    gathered: tuple[Names, ...] = ()

    def exchange(self) -> OverDevices | None:
        """Returns how parts exchange numbers; None where there are none, or one."""
        exchange = OverDevices.of(self.names) if self.names else None
        return None if exchange is None or exchange.count == 1 else exchange

    @property
    def leaves_axes(self) -> bool:
        """Whether XLA cuts over other axes of the mesh, so that no kernel takes a product.

        By Shardy: GSPMD would gather a gradient that the forward pass has made.
        """
        has_others = self.mesh is not None and bool({*self.mesh.axis_names} - self.axes)
        return has_others and cuts_by_shardy()

    def whole(self, weight: jax.Array) -> jax.Array:
        """Returns a device's weight as products take it."""
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
        return meshes.of_the_only(self.names, x) if self.exchange() is None else x

    def run(
        self,
        function: Callable[..., Any],
        results: Any,
        hidden: jax.Array,
        weight: jax.Array,
        bias: Bias,
        *others: jax.Array,
    ) -> Any:
        """Returns function(hidden, weight, bias, *others), by each device of its own.

        `others` have a number a token, and results lie as `results` says.
        """
        if self.mesh is None:
            if self.exchange() is None:
                alone = partial(meshes.of_the_only, self.names)
                return function(*jax.tree.map(alone, (hidden, weight, bias, *others)))
            return function(hidden, weight, bias, *others)
        of_hidden = PartitionSpec(*self.tokens, None)
        of_bias = PartitionSpec(meshes.entry(self.names))
        hidden = meshes.place(self.mesh, of_hidden, hidden)
        weight = meshes.place(self.mesh, self.weight, weight)
        bias = None if bias is None else meshes.place(self.mesh, of_bias, bias)
        given = of_hidden, self.weight, of_bias, *[self.tokens] * len(others)
        if {*self.names} <= meshes.explicit_axes(self.mesh) or hidden.dtype == jnp.float32:
            mapped = meshes.on_devices(self.mesh, self.axes, function, given, results)
            return mapped(hidden, weight, bias, *others)

        def of_wide(wide: jax.Array, *arrays: Any) -> Any:
            varying: jax.Array = jax.lax.pcast(wide, self.names, to="varying")
            return function(varying.astype(hidden.dtype), *arrays)

        # XLA for CPUs fails to compile sums of 16 bits over some axes of a mesh alone.
        mapped = meshes.on_devices(self.mesh, self.axes, of_wide, given, results)
        return mapped(hidden.astype(jnp.float32), weight, bias, *others)


def find(hidden: jax.Array, weight: jax.Array, vocab_axis: int, axis_name: Any) -> Cut | None:
    """Returns how arrays are known to be cut; None where they are not.

    Raises:
        TypeError: `axis_name` is no name.
        ValueError: a name of nothing, or parts of more than one size.
    """
    names = meshes.names_of(axis_name)
    if meshes.are_of_devices(names):
        return Cut(names)
    *tokens, width = meshes.cuts(hidden)
    of_weight = meshes.cuts(weight)
    if not names and not any([*tokens, width, *of_weight]):
        return None
    mesh = meshes.with_axes(names, hidden, weight)
    axes = meshes.explicit_axes(mesh)
    if names and not {*names} <= axes:
        # XLA knows of others, and refuses to be told of parts where there is one.
        if meshes.check_divides(mesh, names, "weight", weight.shape[vocab_axis]) == 1:
            return None
        cut: list[Names] = [(), ()]
        cut[vocab_axis] = names
        return Cut(names, mesh, axes | {*names}, _spec(tokens), _spec(cut))
    if names and names != of_weight[vocab_axis]:
        raise ValueError(
            f"axis_name is {axis_name!r} and weight is sharded as {_spec(of_weight)}; its axis "
            f"{vocab_axis} must be sharded over it, and over nothing else: reshard it first"
        )
    # An axis of one device cuts nothing.
    of_weight = [tuple(name for name in one if mesh.shape[name] > 1) for one in of_weight]
    taken = {name for one in tokens for name in one}
    # Devices that have other tokens need the whole of what they share; where devices with the same
    # tokens have parts of D, nobody sums over these.
    gathered: list[Names] = [(), ()]
    kept: list[Names] = [(), ()]
    for axis, one in enumerate(of_weight):
        if {*one} <= taken:
            gathered[axis] = kept[axis] = one
        elif axis == vocab_axis:
            kept[axis] = tuple(name for name in one if name not in taken)
    parts = () if gathered[vocab_axis] else kept[vocab_axis]
    # Of arrays that are there, it is known what every axis cuts.
    axes = axes or frozenset(mesh.axis_names)
    return Cut(parts, mesh, axes, _spec(tokens), _spec(kept), tuple(gathered))


def _spec(cuts: Sequence[Names]) -> PartitionSpec:
    return PartitionSpec(*map(meshes.entry, cuts))
