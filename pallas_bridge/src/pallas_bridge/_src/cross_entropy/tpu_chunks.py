"""The loop over a tile's part of the vocabulary that all sweeps of the kernel for TPUs have."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from .tpu_plan import Plan


def over_chunks(
    plan: Plan, tile: Any, size: int, unit: int, act: Callable[..., Any], carry: Any
) -> Any:
    """Folds `act` over chunks of `size` logits of each token, in registers of `unit`.

    `act` takes the first logit, how many registers there are, how many logits the last of them has,
    and the carry. The last tile alone is ragged: others are whole chunks.
    """
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
