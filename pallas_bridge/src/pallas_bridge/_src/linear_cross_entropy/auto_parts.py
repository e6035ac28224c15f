"""What devices compute of hidden states and an output matrix that XLA finds to be cut.

Each runs the schedule that fits what it has: its tokens against its columns of the vocabulary.
Where both are cut over one axis of a mesh, tokens stay and the matrix is gathered.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from .. import auto_partitioning, gathering
from ..meshes import Names
from ..vocab_parts import OverDevices, options_of_part
from . import parts
from .declaration import OPERATION
from .schedules import OfDevice, Schedule
from .tokens import Bias, Gradients

# Axes of tokens, of the vocabulary, and of hidden states.
N, V, D = "n", "v", "d"


def run(name: str, schedule: Schedule, of_device: OfDevice, *arrays: Any) -> Any:
    """Returns what a schedule's "forward", "backward" or "fused" does, of its arrays."""
    _, weight, bias, labels, *_ = arrays
    flat, tree = jax.tree.flatten(arrays)
    of_weight = (V, D) if schedule.products.vocab_axis == 0 else (D, V)
    of_bias = [] if bias is None else [(V,)]
    first = ((N, D), of_weight, *of_bias)
    operands = (*first, *[(N,)] * (len(flat) - len(first)))
    numbers = {"forward": 4, "backward": 0, "fused": 3}[name]
    results = (*[(N,)] * numbers, *(() if name == "forward" else first))
    vocab = weight.shape[schedule.products.vocab_axis]

    def whole(*flat: jax.Array) -> list[jax.Array]:
        found = schedule.run(name, schedule.options, *jax.tree.unflatten(tree, flat))
        return jax.tree.leaves(found)

    def local(
        cuts: Mapping[str, Names], uneven: Mapping[str, int]
    ) -> Callable[..., Sequence[jax.Array]]:
        if V in uneven:
            gathering.tell_uneven(OPERATION, "weight", vocab, uneven[V])
        device = _Device(schedule, of_device, cuts[N], cuts[V], len(labels))

        def of_own(*flat: jax.Array) -> list[jax.Array]:
            found = getattr(device, name)(*jax.tree.unflatten(tree, flat))
            return jax.tree.leaves(found)

        return of_own

    axes = auto_partitioning.Arrays(operands, results, (N, V), (V,))
    text = f"{OPERATION}_{name} {schedule} {of_device}"
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
class _Device:
    """What one device does."""

    # For arrays that are whole.
    whole: Schedule
    of_device: OfDevice
    # The mesh axes that cut tokens and the vocabulary.
    tokens: Names
    columns: Names
    # All tokens.
    count: int

    def _work(self, reduced: bool, *arrays: Any) -> tuple[Schedule, parts.Work | None]:
        """Returns a schedule for what the device has, and how parts use it, if there are."""
        options, products = self.whole.options, self.whole.products
        if not self.columns:
            return self.of_device(options, products, reduced, *arrays), None
        own = self.of_device(options_of_part(options), products, False, *arrays)
        # A cotangent is the whole's on every device.
        exchange = OverDevices(self.columns, is_checked=True)
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
        hidden, *cotangents = self._of_tokens(hidden, *cotangents)
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
        hidden, factors = self._of_tokens(hidden, factors)
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

    def _of_tokens(self, *arrays: jax.Array) -> list[jax.Array]:
        """Returns arrays with zeros for what fills up the tokens of the last device."""
        if not self.tokens:
            return [*arrays]
        rows = len(arrays[0])
        if rows * math.prod(jax.lax.axis_size(name) for name in self.tokens) == self.count:
            return [*arrays]
        index = jax.lax.axis_index(self.tokens) * rows + jnp.arange(rows)
        is_token = index < self.count
        return [
            jnp.where(is_token.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros((), x.dtype))
            for x in arrays
        ]

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
