"""How the vocabulary of logits lies on a mesh, and what runs there."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from .. import meshes
from ..bound import Bound
from ..losses.aux_outputs import Request, TokenOutputs
from ..losses.options import Options
from ..losses.reduction import weighted
from ..losses.vocab_shards import WHOLE, Exchange, OverAxis, OverDevices
from ..meshes import Names
from . import derivative


def _keep(x: jax.Array) -> jax.Array:
    return x


@dataclass(frozen=True)
class Layout:
    """How a vocabulary lies on a mesh: whole, in shards that exchange scalars, or on devices."""

    exchange: Exchange = WHOLE
    # Have logits, and arrays of a scalar a token, lie as the functions below take them.
    place_logits: Callable[[jax.Array], jax.Array] = _keep
    place: Callable[[jax.Array], jax.Array] = _keep
    # Of explicit axes: the mesh, how tokens lie on it, and the axes that shard the vocabulary.
    explicit: tuple[Any, PartitionSpec, Names] | None = None

    def per_token(
        self, options: Options, request: Request, logits: jax.Array, labels: jax.Array
    ) -> TokenOutputs:
        """Returns loss, logps, lse and what is requested of each token."""
        if self.explicit is not None:
            return _run_on_devices(*self.explicit, options, request, logits, labels)
        if request.columns is not None:
            request = dataclasses.replace(request, columns=self.place(request.columns))
        logits = self.place_logits(logits)
        return derivative.per_token(options, self.exchange, request, logits, labels)

    def reduced(
        self, options: Options, logits: jax.Array, labels: jax.Array, factors: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the scalar sum of factor * loss, and lse [..]."""
        if self.exchange.is_whole and self.explicit is None:
            return derivative.reduced(options, self.place_logits(logits), labels, factors)
        loss, _, lse, *_ = self.per_token(options, Request(), logits, labels)
        return weighted(loss, factors).sum(), lse


def find_layout(logits: jax.Array, axis_name: Any) -> Layout | None:
    """Returns how the vocabulary lies; None where no mesh axes are known to shard it.

    Raises:
        TypeError: `axis_name` is no name.
        ValueError: a name of no axis, or shards of more than one size.
    """
    names = meshes.names_of(axis_name)
    if meshes.are_of_devices(names):
        exchange = OverDevices.of(names)
        if exchange.count > 1:
            return Layout(exchange)
        place = Bound(meshes.mark_replicated, names)
        return Layout(place_logits=place, place=place)
    *leading, last = meshes.sharded_over(logits)
    if not names and not last:
        return None
    names = names or last
    mesh = meshes.with_axes(names, logits)
    if {*names} & meshes.explicit_axes(mesh):
        if names != last:
            raise ValueError(
                f"axis_name is {axis_name!r} and logits are sharded as "
                f"{meshes.spec_of_names([*leading, last])}; "
                "their last axis must be sharded over it, and over nothing else: reshard it first"
            )
        tokens = meshes.spec_of_names(leading)
        place = Bound(meshes.place, mesh, tokens)
        if math.prod(mesh.shape[name] for name in names) > 1:
            return Layout(place=place, explicit=(mesh, tokens, last))
        place_logits = Bound(meshes.place, mesh, PartitionSpec(*tokens, None))
        return Layout(place_logits=place_logits, place=place)
    count = meshes.check_divides(mesh, names, "logits", logits.shape[-1])
    if count == 1:
        return None
    return Layout(OverAxis(count), Bound(_shard_last_axis, mesh, names, count))


def _shard_last_axis(mesh: Any, names: Names, count: int, logits: jax.Array) -> jax.Array:
    """Returns logits [.., shards, V / shards], which XLA shards over a mesh."""
    *tokens, vocab = logits.shape
    shards = logits.reshape(*tokens, count, vocab // count)
    leading = [PartitionSpec.UNCONSTRAINED] * (logits.ndim - 1)
    spec = PartitionSpec(*leading, meshes.entry(names), None)
    sharded: jax.Array = jax.lax.with_sharding_constraint(shards, NamedSharding(mesh, spec))
    return sharded


def _run_on_devices(
    mesh: Any,
    tokens: PartitionSpec,
    names: Names,
    options: Options,
    request: Request,
    logits: jax.Array,
    labels: jax.Array,
) -> TokenOutputs:
    """Has every device run the kernels on its own columns and tokens."""
    column_spec = PartitionSpec(*tokens, *[None] * (logits.ndim - len(tokens)))
    columns = [] if request.columns is None else [meshes.place(mesh, column_spec, request.columns)]

    def run(logits: jax.Array, labels: jax.Array, *columns: jax.Array) -> list[jax.Array]:
        own = dataclasses.replace(request, columns=columns[0] if columns else None)
        exchange = OverDevices.of(names)
        return jax.tree.leaves(derivative.per_token(options, exchange, own, logits, labels))

    specs = PartitionSpec(*tokens, meshes.entry(names)), tokens, *[column_spec] * len(columns)
    fields = request.fields
    results = [column_spec if field == "column_logps" else tokens for field in fields]
    mapped = meshes.on_devices(mesh, meshes.explicit_axes(mesh), run, specs, results)
    return TokenOutputs(**dict(zip(fields, mapped(logits, labels, *columns), strict=True)))
