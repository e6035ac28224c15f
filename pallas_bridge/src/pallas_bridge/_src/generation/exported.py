"""The program of `microbench decode`: steps of a decoder, and reads of the bytes of a step.

It takes two numbers in int32: of steps, those of the kernel rounded up to blocks of
`STEPS_OF_BLOCK`, and of reads; and gives the last tokens [B], their log-probabilities [B] and a sum
of the words read. Weights are random numbers that take no time to draw. All steps are at one
position.
"""

import math
from collections.abc import Mapping
from functools import partial, reduce
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from ..exporting import Cell, ConfigError, Program, check_extent, check_options, no_tile
from . import cpu_kernels, kernel, sampling_kernel
from .cache import Cache, init_cache
from .config import DecoderConfig
from .generate import STEPS_OF_BLOCK
from .model import LARGEST_PAGE, position_tables, step_by_layers
from .parameters import Params, layer_shapes, outer_shapes
from .sampling import Sampling, check_sampling, make_keys, make_sampler

Array = jax.Array
# Rows of words that are read, which XLA's threads on CPUs share.
ROWS = 1024


class DecodeExports:
    """What export asks of an operation, for decoding."""

    PLATFORMS = ("cpu", "cuda")
    tile = staticmethod(no_tile)

    def settings(self, config: Mapping[str, Any]) -> SimpleNamespace:
        """Returns the decoder's config, the sequences, and the position of their tokens.

        Raises:
            ConfigError: a key that is missing, or a value that is not taken.
        """
        for name in ("batch", "position"):
            check_extent(name, config.get(name))
        given = config.get("model")
        if not isinstance(given, Mapping):
            raise ConfigError(f"model is {given!r}; it must be the object of a config.json")
        try:
            model = DecoderConfig.from_hugging_face(given)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"model: {error}") from None
        return SimpleNamespace(model=model, batch=config["batch"], position=config["position"])

    def program(self, cell: Cell) -> Program:
        """Returns a cell's program.

        Raises:
            ConfigError: an option that is not known, or outside its range.
        """
        check_options(cell.options, Sampling._fields)
        given = {name: None for name in Sampling._fields} | dict(cell.options)
        if given["temperature"] is None:
            for name in (name for name, value in given.items() if value is not None):
                raise ConfigError(f"options: {name} needs a temperature; add one, such as 1.0")
            given["temperature"] = 0.0
        try:
            sampling = check_sampling(**given)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"options: {error}") from None
        number = jax.ShapeDtypeStruct((), jnp.int32)

        def decode(steps: Array, reads: Array) -> tuple[Array, Array, Array]:
            tokens, logps = _run_steps(cell, sampling, steps)
            return tokens, logps, _read(cell, reads)

        return Program("decode", decode, [number, number])

    def described(self, cell: Cell, program: Program) -> dict[str, Any]:
        """Returns what a manifest has of it: the bytes of a step, and whether it is one kernel."""
        return {"settings": {"bytes": step_bytes(cell), "is_one_kernel": _has_kernel(cell)}}


def step_bytes(cell: Cell) -> int:
    """Returns the bytes that a step reads: weights once, and the cache's positions."""
    config, size = cell.settings.model, 2 if cell.dtype != "f32" else 4
    shapes = outer_shapes(config)
    # Of an embedding that is not the head too, a step reads a row for each sequence.
    outer = [shape for name, shape in shapes.items() if config.tied_head or name != "embedding"]
    weights = sum(map(math.prod, outer))
    weights += config.layers * sum(map(math.prod, layer_shapes(config).values()))
    cached = 2 * cell.settings.batch * cell.settings.position * config.layers
    found: int = size * (weights + cached * config.kv_heads * config.head_dim)
    return found


def _has_kernel(cell: Cell) -> bool:
    is_covered = kernel.covers(cell.settings.model, cell.settings.batch) and cell.dtype == "bf16"
    return cell.platform == "cuda" and is_covered and not cell.is_dense


def _draw(shape: tuple[int, ...], name: str, dtype: Any, seed: Array) -> Array:
    """Returns numbers from -1/32 to 1/32 by a hash of their place; of a norm ones."""
    if "norm" in name:
        return jnp.ones(shape, dtype)
    place = jax.lax.iota(jnp.uint32, math.prod(shape[1:])) + seed.astype(jnp.uint32)
    rows = jax.lax.iota(jnp.uint32, shape[0])[:, None] * jnp.uint32(0x85EBCA6B)
    bits = (place[None] ^ rows) * jnp.uint32(0x9E3779B1)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(0x2C1B3C6D) >> 16
    found: Array = (bits.astype(jnp.float32) - 32768.0) * 2.0**-20
    return found.astype(dtype).reshape(shape)


def _run_steps(cell: Cell, sampling: Sampling, steps: Array) -> tuple[Array, Array]:
    config, batch = cell.settings.model, cell.settings.batch
    dtype = jnp.dtype({"bf16": jnp.bfloat16, "f16": jnp.float16, "f32": jnp.float32}[cell.dtype])
    # XLA folds no constants of arrays that depend on an operand.
    seed = jnp.minimum(steps, 0)
    params: Params = {
        name: _draw(shape, name, dtype, seed) for name, shape in outer_shapes(config).items()
    }
    params["layers"] = {
        name: _draw((config.layers, *shape), name, dtype, seed)
        for name, shape in layer_shapes(config).items()
    }
    length = -(-(cell.settings.position + 1) // LARGEST_PAGE) * LARGEST_PAGE
    cache = init_cache(config, batch, length, dtype=dtype)
    positions = jnp.full(batch, cell.settings.position, jnp.int32)
    on_cpu = cell.platform == "cpu" and cpu_kernels.are_there() and not cell.is_dense
    has_kernel, by_layers = _has_kernel(cell), partial(step_by_layers, config, on_cpu)
    has_sampler = sampling_kernel.covers(config.vocab_size) and not cell.is_dense
    sampler = make_sampler(make_keys(jnp.arange(batch)), sampling, has_sampler)
    packed: Any = kernel.pack_weights(params, config) if has_kernel else None
    tables = position_tables(config, jnp.arange(length, dtype=jnp.int32))
    state = kernel.init_state(config, batch) if has_kernel else None

    def run_step(carry: Any, step: Array) -> Any:
        cache, state, (tokens, _) = carry
        if has_kernel:
            one = kernel.step(params, config, packed, tables, cache, state, tokens, positions)
            cache, state, logits = Cache(one.keys, one.values), one.state, one.logits
        else:
            operands = (params, cache, tokens, positions, cell.implementation)
            logits, cache = by_layers(*operands)
        is_drawn = has_kernel and sampling.temperature is None
        drawn = (one.token, one.logp) if is_drawn else sampler(logits, step)
        return cache, state, drawn

    # As in `generate`.
    count = STEPS_OF_BLOCK if has_kernel else 1

    def run_block(block: Array, carry: Any) -> Any:
        steps = [jnp.full(batch, block * count + index) for index in range(count)]
        return reduce(run_step, jax.lax.optimization_barrier(steps), carry)

    drawn = jnp.zeros(batch, jnp.int32), jnp.zeros(batch, jnp.float32)
    blocks = -(-steps // count)
    found: tuple[Array, Array] = jax.lax.fori_loop(0, blocks, run_block, (cache, state, drawn))[2]
    return found


def _read(cell: Cell, reads: Array) -> Array:
    """Returns a sum that takes reading as many bytes as a step does, `reads` times."""
    columns = step_bytes(cell) // 4 // ROWS
    words = jnp.broadcast_to(jnp.minimum(reads, 0), (ROWS, columns)) + jnp.arange(columns)

    def read(index: Array, total: Array) -> Array:
        return total ^ (words ^ index).sum(1).sum()

    found: Array = jax.lax.fori_loop(0, reads, read, jnp.int32(0))
    return found


EXPORTS = DecodeExports()
