"""What devices compute of hidden states and an output matrix that XLA finds to be cut.

Each runs the schedule that fits what it has: its tokens against its columns of the vocabulary.
Where both are cut over one axis of a mesh, tokens stay and the matrix is gathered.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from .. import auto_partitioning, gathering
from ..bound import Bound
from ..losses.vocab_shards import OverDevices, shard_options
from ..meshes import Names
from . import parts
from .declaration import OPERATION
from .schedules import OfDevice, Schedule
from .tokens import Bias, Gradients

# Axes of the vocabulary and of hidden states; those of tokens are numbered.
V, D = "V", "D"


def run(name: str, schedule: Schedule, of_device: OfDevice, *arrays: Any) -> Any:
    """Returns what a schedule's "forward", "backward" or "fused" does, of its arrays.

    Hidden states are [.., D], and numbers of tokens [..]: axes that are cut could not be flattened
    where they are.
    """
    hidden, _, bias, *_ = arrays
    flat, tree = jax.tree.flatten(arrays)
    tokens = tuple(f"n{index}" for index in range(hidden.ndim - 1))
    of_weight = (V, D) if schedule.products.vocab_axis == 0 else (D, V)
    of_bias = [] if bias is None else [(V,)]
    first = ((*tokens, D), of_weight, *of_bias)
    operands = (*first, *[tokens] * (len(flat) - len(first)))
    numbers = {"forward": 4, "backward": 0, "fused": 3}[name]
    results = (*[tokens] * numbers, *(() if name == "forward" else first))
    axes = auto_partitioning.Arrays(operands, results, (*tokens, V), (V,))
    work = _Work(name, schedule, of_device, tree, operands, results, hidden.shape[:-1])
    text = f"{OPERATION}_{name} {schedule} {of_device}"
    whole, local = Bound(_Work.whole, work), Bound(_Work.local, work)
    found = auto_partitioning.bind(
        auto_partitioning.Work(OPERATION, text, axes, whole, local), *flat
    )
    of_tokens, gradients = tuple(found[:numbers]), found[numbers:]
    if name == "forward":
        return of_tokens
    dhidden, dweight, *dbias = gradients
    made = dhidden, dweight, dbias[0] if dbias else None
    return made if name == "backward" else (*of_tokens, made)


@dataclasses.dataclass(frozen=True)
class _Work:
    """A pass of flat arrays, whole or a device's."""

    name: str
    schedule: Schedule
    of_device: OfDevice
    tree: Any
    operands: tuple[tuple[str, ...], ...]
    results: tuple[tuple[str, ...], ...]
    # The extents of all axes of tokens.
    tokens: tuple[int, ...]

    def whole(self, *arrays: jax.Array) -> list[jax.Array]:
        """Returns what the schedule makes of whole arrays."""
        return self._of_flat(partial(self.schedule.run, self.name, self.schedule.options), *arrays)

    def local(
        self, cuts: Mapping[str, Names], uneven: Mapping[str, int]
    ) -> Callable[..., Sequence[jax.Array]]:
        """Returns what a device makes of its own; mesh axes cut tokens and the vocabulary."""
        of_tokens = [cuts[f"n{index}"] for index in range(len(self.tokens))]
        names = tuple(name for one in of_tokens for name in one)

        def of_own(*arrays: jax.Array) -> list[jax.Array]:
            weight = arrays[1]
            if V in uneven:
                vocab = weight.shape[self.schedule.products.vocab_axis]
                gathering.tell_uneven(OPERATION, V, vocab, uneven[V])
            device = _Device(self.schedule, self.of_device, names, cuts[V])
            given = [
                auto_partitioning.without_padding(one, of_tokens, self.tokens)
                if self._has_tokens(axes)
                else one
                for one, axes in zip(arrays, self.operands, strict=True)
            ]
            return self._of_flat(getattr(device, self.name), *given)

        return of_own

    def _has_tokens(self, axes: tuple[str, ...]) -> bool:
        return axes[: len(self.tokens)] == self.operands[0][:-1]

    def _of_flat(self, function: Callable[..., Any], *arrays: jax.Array) -> list[jax.Array]:
        """Returns function of arrays with one axis of tokens, whose results have all of them."""
        leading = arrays[0].shape[:-1]
        flat = [
            one.reshape(-1, *one.shape[len(leading) :]) if self._has_tokens(axes) else one
            for one, axes in zip(arrays, self.operands, strict=True)
        ]
        found = jax.tree.leaves(function(*jax.tree.unflatten(self.tree, flat)))
        return [
            one.reshape(*leading, *one.shape[1:]) if self._has_tokens(axes) else one
            for one, axes in zip(found, self.results, strict=True)
        ]


@dataclasses.dataclass(frozen=True)
class _Device:
    """What one device does."""

    # For arrays that are whole.
    whole: Schedule
    of_device: OfDevice
    # The mesh axes that cut tokens and the vocabulary.
    tokens: Names
    columns: Names

    def _work(self, reduced: bool, *arrays: Any) -> tuple[Schedule, parts.Work | None]:
        """Returns a schedule for what the device has, and how parts use it, if there are."""
        options, products = self.whole.options, self.whole.products
        if not self.columns:
            return self.of_device(options, products, reduced, *arrays), None
        # A cotangent is the whole's on every device.
        exchange = OverDevices(self.columns, is_checked=True)
        own = self.of_device(shard_options(options, exchange), products, False, *arrays)
        return own, parts.Work(options, exchange, products, own)

    def forward(
        self, hidden: jax.Array, weight: jax.Array, bias: Bias, labels: jax.Array
    ) -> Sequence[jax.Array]:
        """Returns loss, logps, lse and lse_low."""
        own, work = self._work(False, hidden, weight, bias)
        if work is None:
            return own.forward(hidden, weight, bias, labels)
        work = dataclasses.replace(work, schedule=dataclasses.replace(own, keeps=False))
        outputs, (_, lse_low, *_) = parts.forward(work, hidden, weight, bias, labels)
        return *outputs, lse_low

    def backward(
        self,
        hidden: jax.Array,
        weight: jax.Array,
        bias: Bias,
        labels: jax.Array,
        saved: Any,
        cotangents: Any,
    ) -> Gradients:
        """Returns gradients for saved (lse, lse_low) and cotangents."""
        arrays = hidden, weight, bias, labels
        own, work = self._work(False, hidden, weight, bias)
        if work is None:
            return self._sums(own.backward(*arrays, saved, tuple(cotangents)))
        # As padding: a part all of whose columns have a bias of -inf.
        is_empty = jnp.zeros(labels.shape, bool)
        if bias is not None and self.whole.options.softcap is None:
            is_empty |= bias.max() == -jnp.inf
        return self._sums(parts.pull(work, (arrays, (*saved, is_empty, ())), cotangents))

    def fused(
        self,
        hidden: jax.Array,
        weight: jax.Array,
        bias: Bias,
        labels: jax.Array,
        factors: jax.Array,
    ) -> Any:
        """Returns loss, lse, lse_low and gradients for cotangents of the loss."""
        arrays = hidden, weight, bias, labels
        own, work = self._work(True, hidden, weight, bias)
        if work is not None:
            (loss, _, lse), saved = parts.forward(work, *arrays)
            gradients = parts.pull(work, (arrays, saved), (factors, None, None))
            return loss, lse, saved[1], self._sums(gradients)
        if own.is_fused:
            *numbers, gradients = own.fused(False, *arrays, factors)
            return *numbers, self._sums(gradients)
        loss, _, lse, lse_low, left = own.keep(*arrays)
        given = factors, jnp.zeros_like(factors), jnp.zeros_like(factors)
        gradients = own.resume(*arrays, (lse, lse_low), given, left)
        return loss, lse, lse_low, self._sums(gradients)

    def _sums(self, gradients: Gradients) -> Gradients:
        """Returns gradients with what other devices have of them."""
        dhidden, dweight, dbias = gradients
        of_weight = partial(_sum, self.tokens)
        return (
            _sum(self.columns, dhidden),
            of_weight(dweight),
            None if dbias is None else of_weight(dbias),
        )


def _sum(axes: Names, x: jax.Array) -> jax.Array:
    """Returns the sum over devices, which is rounded last."""
    return jax.lax.psum(x.astype(jnp.float32), axes).astype(x.dtype) if axes else x
