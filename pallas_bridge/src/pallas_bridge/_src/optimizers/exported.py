"""Programs of optimizers' steps for tools: one array, from its gradient and state to its next.

- adamw: params and grads [T, D], mu, nu; gives new params, mu and nu.
- adamw8bit, lion8bit: params and grads [T, B, S], and of each moment codes and scales [T, B]; give
  the same without grads. Blocks have S = block_size entries.
- muon: params, grads and mu [T, D]; gives new params and mu.

A norm follows where there is a `max_norm`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..exporting import DTYPES, Cell, ConfigError, Exports, Program, checked
from . import api
from .codes import BLOCKS, Quantized
from .muon import muon
from .trees import State

OPTIMIZERS: Mapping[str, tuple[Callable[..., Any], int]] = {
    "adamw": (api.adamw, 2),
    "adamw8bit": (api.adamw8bit, 2),
    "lion8bit": (api.lion8bit, 1),
}
"""Optimizers by operation, with the numbers of their moments."""
Shape = jax.ShapeDtypeStruct


def _block_size(given: dict[str, Any]) -> int:
    block = given.pop("block_size", BLOCKS[0])
    if block not in BLOCKS:
        raise ConfigError(f"options.block_size is {block!r}; it must be one of {BLOCKS}")
    return int(block)


def _program(cell: Cell, given: dict[str, Any]) -> Program:
    make, moments = OPTIMIZERS[cell.op]
    by_name = None if cell.platform == "tpu" else "custom_call"
    given["implementation"] = cell.implementation or by_name
    step, has_norm = given.pop("step", 10), given.get("max_norm") is not None
    if has_norm:
        # JSON has infinity as a word.
        given["max_norm"] = float(given["max_norm"])
    shape: tuple[int, ...]
    if cell.op == "adamw":
        shape = (cell.tokens, cell.settings.hidden)
        state = [Shape(shape, jnp.float32)] * moments
    else:
        shape = (cell.tokens, cell.settings.blocks, _block_size(given))
        state = [Shape(shape, jnp.uint8), Shape(shape[:2], jnp.float32)] * moments
    optimizer: Any = make(learning_rate=1e-2, weight_decay=0.1, **given)

    def flat(one: jax.Array) -> jax.Array:
        return one.reshape(cell.tokens, -1)

    def forward(params: jax.Array, grads: jax.Array, *state: jax.Array) -> Any:
        arrays: list[Any] = [*state]
        if cell.op != "adamw":
            arrays = [
                Quantized(flat(codes), scales)
                for codes, scales in zip(state[::2], state[1::2], strict=True)
            ]
        mu, nu, *_ = *arrays, None
        norm = jnp.float32(0) if has_norm else None
        before = State(jnp.int32(step - 1), mu, nu, norm)
        new, after = optimizer.update_and_apply(flat(grads), before, flat(params))
        results = [new, *jax.tree.leaves([after.mu, after.nu][:moments])]
        shapes = [params.shape, *(one.shape for one in state)]
        shaped = [one.reshape(like) for one, like in zip(results, shapes, strict=True)]
        return *shaped, *([after.norm] if has_norm else [])

    rows = Shape(shape, DTYPES[cell.dtype])
    return checked(Program("forward", forward, [rows, rows, *state]))


def _muon(cell: Cell, given: dict[str, Any]) -> Program:
    step = given.pop("step", 10)
    optimizer: Any = muon(1e-2, weight_decay=0.1)

    def forward(params: jax.Array, grads: jax.Array, mu: jax.Array) -> Any:
        before = optimizer.init(params)._replace(count=jnp.int32(step - 1), mu=mu)
        new, after = optimizer.update_and_apply(grads, before, params)
        return new, after.mu

    shape = (cell.tokens, cell.settings.hidden)
    rows = Shape(shape, DTYPES[cell.dtype])
    return checked(Program("forward", forward, [rows, rows, Shape(shape, jnp.float32)]))


OPTIONS = ("step", "max_norm", "rounding_seed")
EXPORTS: Mapping[str, Exports] = {
    name: Exports(_program, OPTIONS, ("hidden",))
    if name == "adamw"
    else Exports(_program, (*OPTIONS, "block_size"), ("blocks",))
    for name in OPTIMIZERS
} | {"muon": Exports(_muon, ("step",), ("hidden",))}
