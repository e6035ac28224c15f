"""What the sweeps of the kernel for TPUs have in common, whichever way logits lie."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from .tpu_plan import Plan, sublanes


class Sweeps:
    """The vector operations on every logit of a tile."""

    # `largest`, `exponentials` and `write_group` are of a group of tokens in one register.
    over_groups: Callable[[Callable[[Any], None]], None]
    largest: Callable[..., Any]
    exponentials: Callable[..., Any]
    write_group: Callable[..., None]

    def __init__(self, plan: Plan, formula: Any, ring: Any, state: Any) -> None:
        self.plan, self.formula, self.ring, self.state = plan, formula, ring, state
        self.unit = sublanes(plan.dtype)

    def reduce(self, tile: Any, slot: Any) -> None:
        """Adds a tile to the maxima and sums of its tokens."""

        def act(group: Any) -> None:
            state, own = self.state, self.plan.state_of(group, group)
            before = state.highest[own]
            peak = jnp.maximum(before, self.formula.cap(self.largest(tile, slot, group)))
            total, sums = self.exponentials(tile, slot, group, peak)
            state.highest[own] = peak
            state.total[own] = state.total[own] * jnp.exp(before - peak) + total
            if sums is not None:
                state.sums[own] += sums

        self.over_groups(act)

    def write(self, tile: Any, slot: Any) -> None:
        """Writes gradients over the logits of a tile."""

        def act(group: Any) -> None:
            state, own = self.state, self.plan.state_of(group, group)
            even = state.spread[own] if self.formula.smooths else None
            scalars = state.shift[own], state.scale[own], even, state.takes_part[own] != 0
            self.write_group(tile, slot, group, *scalars)

        self.over_groups(act)

    def over_chunks(
        self, tile: Any, size: int, unit: int, act: Callable[..., Any], carry: Any
    ) -> Any:
        """Folds `act` over chunks of `size` logits of each token, in registers of `unit`.

        `act` takes the first logit, how many registers there are, how many logits the last of them
        has, and the carry. The last tile alone is ragged: others are whole chunks.
        """
        plan = self.plan
        last = plan.vocab - (plan.tiles - 1) * plan.block_size
        full, whole = plan.block_size // size, last // size
        chunks = jnp.where(tile == plan.tiles - 1, whole, full) if whole != full else full

        def body(index: Any, carry: Any) -> Any:
            return act(pl.multiple_of(index * size, size), size // unit, unit, carry)

        carry = lax.fori_loop(0, chunks, body, carry)
        if rest := last % size:

            def tail(carry: Any) -> Any:
                registers = -(-rest // unit)
                return act(whole * size, registers, rest - (registers - 1) * unit, carry)

            carry = lax.cond(tile == plan.tiles - 1, tail, lambda carry: carry, carry)
        return carry
