"""The sweeps of the kernel for TPUs over logits that lie transposed, [vocab, tokens].

Tokens are lanes: what a row of logits has is a column of registers, and maxima and sums are joined
over the rows of a register once a token. `tpu_kernel.py` has the rest of the kernel.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from .tpu_chunks import Sweeps
from .tpu_plan import LANES

# Registers that are unrolled at a time, and accumulators of each kind.
CHUNK = 64
PARTS = 4


class AcrossSweeps(Sweeps):
    """The sweeps over a tile [block_size, time_block]."""

    def over_groups(self, act: Callable[[Any], None]) -> None:
        """Calls `act` for each group of tokens that are the lanes of a register."""
        for first in range(0, self.plan.time_block, LANES):
            act(pl.ds(first, LANES))

    def over_rows(self, tile: Any, slot: Any, group: Any, act: Any, carry: Any) -> Any:
        """Folds `act` over a tile: a view, its registers, valid rows of the last, and the carry."""

        def run(first: Any, registers: int, rows: int, carry: Any) -> Any:
            view = self.ring.at[slot, pl.ds(first, registers * self.unit), group]
            return act(view, registers, rows, carry)

        return self.over_chunks(tile, CHUNK * self.unit, self.unit, run, carry)

    def largest(self, tile: Any, slot: Any, group: Any) -> jax.Array:
        """The largest logit of each row of registers, of each token."""
        compared = self.plan.dtype if self.formula.compares_bf16 else jnp.float32
        lowest = jnp.full((self.unit, LANES), -jnp.inf, compared)

        def act(view: Any, registers: int, rows: int, carry: Any) -> Any:
            parts = list(carry)
            for register in range(registers):
                x = self.load(view, register).astype(compared)
                if rows < self.unit and register == registers - 1:
                    x = jnp.where(self.is_valid(rows), x.astype(jnp.float32), -jnp.inf)
                    x = x.astype(compared)
                parts[register % PARTS] = jnp.maximum(parts[register % PARTS], x)
            return tuple(parts)

        parts = self.over_rows(tile, slot, group, act, (lowest,) * PARTS)
        most = jnp.maximum(jnp.maximum(parts[0], parts[1]), jnp.maximum(parts[2], parts[3]))
        return most.astype(jnp.float32)

    def exponentials(self, tile: Any, slot: Any, group: Any, peak: jax.Array) -> Any:
        """Sums of exponentials beneath the peaks; and of logits, for smoothing."""
        formula = self.formula
        zero = jnp.zeros((self.unit, LANES), jnp.float32)

        def act(view: Any, registers: int, rows: int, carry: Any) -> Any:
            parts, sums = map(list, carry)
            for register in range(registers):
                z = formula.cap(self.load(view, register).astype(jnp.float32))
                exponential = jnp.exp(z - peak)
                if rows < self.unit and register == registers - 1:
                    exponential = jnp.where(self.is_valid(rows), exponential, 0.0)
                    z = jnp.where(self.is_valid(rows), z, 0.0)
                parts[register % PARTS] += exponential
                if sums:
                    sums[register % PARTS] += z
            return tuple(parts), tuple(sums)

        smooth = (zero,) * PARTS if formula.smooths else ()
        parts, sums = self.over_rows(tile, slot, group, act, ((zero,) * PARTS, smooth))
        return sum(parts[1:], parts[0]), sum(sums[1:], sums[0]) if sums else None

    def write_group(self, tile: Any, slot: Any, group: Any, *scalars: Any) -> None:
        """Writes gradients over the logits of a group of tokens; `scalars` are theirs."""

        def act(view: Any, registers: int, rows: int, carry: Any) -> Any:
            for register in range(registers):
                z = self.formula.cap(self.load(view, register).astype(jnp.float32))
                d = self.formula.gradient(z, *scalars)
                view[pl.ds(register * self.unit, self.unit), :] = d.astype(self.plan.dtype)
            return carry

        self.over_rows(tile, slot, group, act, 0)

    def load(self, view: Any, register: int) -> jax.Array:
        """A register of logits."""
        found: jax.Array = view[pl.ds(register * self.unit, self.unit), :]
        return found

    def is_valid(self, rows: int) -> jax.Array:
        """Which rows of a register are logits."""
        return lax.broadcasted_iota(jnp.int32, (self.unit, LANES), 0) < rows
