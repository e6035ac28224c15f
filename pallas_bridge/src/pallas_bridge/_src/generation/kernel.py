"""A token in one kernel, on Hopper: what it takes, its weights as it streams them, and its call.

`crates/xentile-cuda/kernels/decode_step.cuh` documents the kernel.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import library
from ..checks import is_traced
from ..keywords import hinted
from .config import DecoderConfig
from .parameters import Params, check_params, output_matrix

Array = jax.Array
TARGET = "xentile_decode_step"
# CTAs, each with rows of its own of every matrix, and the rows and columns of a stage of its ring.
CTAS, ROWS, COLUMNS = 128, 8, 1024
STAGE = ROWS * COLUMNS
# Words of its state.
STATE_WORDS = 112672
# The dimensions that it is compiled for: those of Qwen3-0.6B. Others may be any.
DIMENSIONS = {
    "hidden_size": 1024,
    "heads": 16,
    "kv_heads": 8,
    "head_dim": 128,
    "mlp_size": 3072,
    "qk_norm": True,
    "qkv_bias": False,
    "window": None,
}


class Step(NamedTuple):
    """What a step returns: logits [1, V], token [1] and its logp [1], and keys, values, state."""

    logits: Array
    token: Array
    logp: Array
    keys: Array
    values: Array
    state: Array


def covers(config: DecoderConfig) -> bool:
    """Returns whether the kernel is for a config."""
    return all(getattr(config, name) == value for name, value in DIMENSIONS.items())


def is_usable(params: Params, config: DecoderConfig, batch: int) -> bool:
    """Returns whether the kernel runs where a program is compiled for CUDA."""
    arrays = jax.tree.leaves({name: one for name, one in params.items() if name != "packed"})
    if batch != 1 or not covers(config) or any(one.dtype != jnp.bfloat16 for one in arrays):
        return False
    outcome = library.attempt()
    if isinstance(outcome, library.LibraryError):
        return False
    if "cuda" not in outcome[1].platforms_of(TARGET):
        return False
    try:
        devices = jax.devices("cuda")
    except RuntimeError:
        return False
    # The kernel is for one device: XLA would gather sharded parameters.
    is_one = len(devices) == 1 or not any(
        is_traced(one) or len(one.sharding.device_set) > 1 for one in arrays
    )
    return is_one and all(map(_is_large_hopper, devices))


def is_packed(params: Params, config: DecoderConfig, batch: int) -> bool:
    """Returns whether parameters are packed and the kernel runs where programs are for CUDA.

    Raises:
        ValueError: packed weights of another config.
    """
    packed = params.get("packed")
    if packed is None:
        return False
    if not covers(config):
        raise ValueError('params["packed"] is given, and no kernel takes this config; leave it out')
    shape = packed_shape(config)
    if jnp.shape(packed) != shape:
        raise ValueError(
            f'params["packed"] has shape {jnp.shape(packed)}; of this config it must be {shape}'
        )
    return is_usable(params, config, batch)


def _is_large_hopper(device: Any) -> bool:
    """Returns whether a GPU is Hopper's, with a multiprocessor for each CTA: they run at once."""
    if getattr(device, "compute_capability", None) != "9.0":
        return False
    return int(getattr(device, "core_count", CTAS)) >= CTAS


def packed_shape(config: DecoderConfig) -> tuple[int, int]:
    """Returns the shape of packed weights."""
    layer_stages = sum(rows * columns for rows, columns in _matrices(config)) // STAGE
    return config.layers * layer_stages + -(-config.vocab_size // ROWS), STAGE


def _matrices(config: DecoderConfig) -> list[tuple[int, int]]:
    d, f, q = config.hidden_size, config.mlp_size, config.heads * config.head_dim
    return [(q + 2 * config.kv_heads * config.head_dim, d), (d, q), (2 * f, d), (d, f)]


@hinted
def pack(params: Params, config: DecoderConfig) -> Params:
    """Returns parameters with a copy of their matrices as the kernel for Hopper streams them.

    `generate` packs by itself whenever it is called; this saves the time, of a few tokens, and lets
    `decode_step` use the kernel. The copy takes as much memory as the parameters. Where there is no
    kernel for the config or the GPU, returns `params`.

    Args:
      params: as `init_params` or `load_hugging_face` make them.
      config: the decoder's.

    Returns:
      `params` and "packed" [T, 8192], which `prefill`, `decode_step` and `generate` take.

    Raises:
      TypeError: arrays of the wrong dtype.
      ValueError: arrays of the wrong shape.
    """
    check_params(params, config)
    if not is_usable(params, config, 1):
        return params
    return {**params, "packed": _pack(params, config)}


def pack_weights(params: Params, config: DecoderConfig) -> Array:
    """Returns matrices of all layers and the head as the kernel streams them, [T, 8192].

    A row is a stage: 8 rows of 1024 columns of a matrix, in the order of the registers of 16 warps.
    Rows are in order of stages, then CTAs; a CTA has consecutive rows of a matrix, and tiles of 8
    rows of the head by turns.
    """
    layers = params["layers"]
    gate, up = jnp.split(layers["gate_up"], 2, axis=1)
    stages = [_stages(one) for one in (layers["qkv"], layers["out"], gate, up, layers["down"])]
    head = output_matrix(params, config)
    head = jnp.pad(head, ((0, -head.shape[0] % ROWS), (0, 0)))
    tiles = head.reshape(-1, ROWS, COLUMNS // 32, 4, 8).transpose(0, 2, 1, 3, 4)
    return jnp.concatenate(
        [jnp.concatenate(stages, axis=1).reshape(-1, STAGE), tiles.reshape(-1, STAGE)]
    )


_pack = jax.jit(pack_weights, static_argnums=1)


def _stages(matrices: Array) -> Array:
    """Returns stages [L, T, 8192] of matrices [L, O, I]."""
    count, rows, columns = matrices.shape
    parts = columns // COLUMNS
    # CTA, stage of rows, row; warp, part, tile of 32 columns, lane's 8 columns.
    split = matrices.reshape(count, CTAS, rows // CTAS // ROWS, ROWS, 16, parts, 2, 4, 8)
    return split.transpose(0, 2, 5, 1, 4, 6, 3, 7, 8).reshape(count, -1, STAGE)


def init_state() -> Array:
    """Returns the state of the first step: packets between CTAs, and their last tag."""
    return jnp.zeros(STATE_WORDS, jnp.int32)


def step(
    params: Params,
    config: DecoderConfig,
    packed: Array,
    tables: list[Array],
    cache: tuple[Array, Array],
    state: Array,
    tokens: Array,
    positions: Array,
) -> Step:
    """Runs a token [1] at a position [1], by a call that updates cache and state in place.

    `tables` are cosines and sines [S, 64] of the cache's positions.
    A token or position outside its range has NaN logits, token -1 and an unchanged cache.
    """
    layers = params["layers"]
    norms = (layers[name] for name in ("attention_norm", "q_norm", "k_norm", "mlp_norm"))
    operands = [packed, params["embedding"], *norms, params["norm"], *tables]
    operands += [tokens, positions, *cache, state]
    one, last = (1,), len(operands) - 1
    results = [((1, config.vocab_size), jnp.float32), (one, jnp.int32), (one, jnp.float32)]
    call = jax.ffi.ffi_call(
        TARGET,
        [jax.ShapeDtypeStruct(*result) for result in results]
        + [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (*cache, state)],
        vmap_method="sequential",
        input_output_aliases={last - 2: 3, last - 1: 4, last: 5},
    )
    return Step(*call(*operands, eps=np.float64(config.eps)))
