"""What each device computes where XLA's partitioner shards arrays while it compiles.

A `PartitionedSchedule` has each device run a plan for its own tokens and its vocabulary shard.
Where one mesh axis shards both tokens and vocabulary, tokens stay sharded and the weight is
gathered. `losses.layouts` has arrays whose sharding is known when a program is traced.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from .. import auto_partitioning, gathering
from ..bound import Bound
from ..logits_gemms import Operands
from ..losses.vocab_shards import OverDevices, shard_options
from ..meshes import Names, sum_wide
from . import derivative
from .declaration import OPERATION
from .derivative import LinearLoss, Saved
from .schedule import OUTPUT_COUNTS, PassName, Schedule

# Axes of the vocabulary and of hidden states; those of tokens are numbered.
V, D = "V", "D"


@dataclass(frozen=True)
class PartitionedSchedule(Schedule):
    """A schedule of arrays that XLA may shard: each device runs a plan for its own."""

    def forward_saving_logits(self, operands: Operands) -> Any:
        """Returns a pass forward, and no logits: nobody saves those of a device."""
        return *self.run("forward", operands), ()

    def run(self, name: PassName, *arrays: Any) -> Any:
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
        schedule = Schedule(**vars(self))
        each = _Pass(name, schedule, tree, axes, hidden.shape[:-1])
        # It names all that devices compute.
        text = f"{OPERATION}_{name} {schedule}"
        run_whole, run_local = Bound(_Pass.whole, each), Bound(_Pass.local, each)
        work = auto_partitioning.Work(OPERATION, text, axes, run_whole, run_local)
        found = auto_partitioning.bind(work, *flat)
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
        return self._run_flat(partial(self.schedule.run, self.name), *arrays)

    def local(
        self, mesh_axes: Mapping[str, Names], uneven: Mapping[str, int]
    ) -> Callable[..., Sequence[jax.Array]]:
        """Returns what a device makes of its own; mesh axes shard tokens and the vocabulary."""
        token_shardings = [mesh_axes[f"n{index}"] for index in range(len(self.tokens))]
        names = tuple(name for one in token_shardings for name in one)
        run_own = partial(self._run_on_device, names, mesh_axes[V])
        given: Any = {"mesh_axes": token_shardings, "extents": self.tokens}
        clean = partial(auto_partitioning.without_padding, **given)

        def run_shard(*arrays: jax.Array) -> list[jax.Array]:
            if V in uneven:
                vocab = arrays[1].shape[self.schedule.planner.gemms.vocab_axis]
                gathering.tell_uneven(OPERATION, V, vocab, uneven[V])
            return self._run_flat(run_own, *self._map_tokens(clean, self.arrays.operands, arrays))

        return run_shard

    def _map_tokens(
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

        flat = self._map_tokens(flatten, self.arrays.operands, arrays)
        found = jax.tree.leaves(function(*jax.tree.unflatten(self.tree, flat)))
        return self._map_tokens(unflatten, self.arrays.results, found)

    def _run_on_device(
        self, tokens: Names, columns: Names, operands: Operands, *more: Any
    ) -> tuple[Any, ...]:
        """Returns the pass of a device's arrays; mesh axes shard `tokens` and `columns`."""
        options, planner = self.schedule.options, self.schedule.planner
        # A cotangent is the whole's on every device.
        exchange = OverDevices(columns, is_checked=True)
        reduced = self.name == "fused" and exchange.is_whole
        own = planner.schedule(shard_options(options, exchange), operands, reduced=reduced)
        is_shard = self.name == "fused" and not exchange.is_whole
        loss = LinearLoss(
            options=options,
            gemms=planner.gemms,
            exchange=exchange,
            schedule=own,
            chunk_tokens=planner.fused_shard_tokens(operands) if is_shard else 0,
        )
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
        elif loss.chunk_tokens or (reduced and own.is_fused):
            losses, saved, _, gradients = derivative.fused(loss, operands, None, *more)
            outputs = losses, saved.lse, saved.lse_low
        else:
            (losses, *_), saved = forward(is_differentiated=True)
            outputs = losses, saved.lse, saved.lse_low
            gradients = derivative.vjp(loss, (operands, None, saved), (*more, None, None))
        dhidden, *others = gradients
        others = jax.tree.map(partial(sum_wide, tokens), others)
        return *outputs, sum_wide(columns, dhidden), *others
