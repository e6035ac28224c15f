"""A decoder over a cache of keys and values: `prefill` of prompts and `decode_step` of one token.

On Hopper `kernel.step` decodes a whole token of some configs in one launch.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..activation.api import swiglu
from ..arrays import match_rank
from ..checks import as_operand, is_traced
from ..flash_attention.api import flash_attention
from ..flash_attention.paged import paged_attention
from ..keywords import hinted
from ..norm.api import rms_norm
from ..operation import Implementation
from ..rope.api import rope
from ..rope.qk_norm import qk_norm_rope
from ..rope.scaling import frequencies
from ..rope.tables import tables as rope_tables
from . import cpu_kernels, kernel
from .cache import Cache
from .config import DecoderConfig
from .cpu_kernels import linear
from .parameters import MATRICES, Params, are_packed_alone, check_params, output_matrix

Array = jax.Array
# Keys of a page, in which kernels for GPUs read a cache; a power of two.
LARGEST_PAGE = 128


@hinted
def prefill(
    params: Params,
    config: DecoderConfig,
    cache: Cache,
    tokens: ArrayLike,
    lengths: ArrayLike | None = None,
) -> tuple[Array, Cache]:
    """Runs prompts through the decoder and fills the cache from position 0.

    Args:
      params: as `init_params` or `load_hugging_face` make them.
      config: the decoder's.
      cache: of B sequences of at least T tokens. It is donated, and cannot be used again.
      tokens: integers [B, T]: prompts, padded at the right with any token.
      lengths: integers [B]: tokens of each prompt, 1 to T; None for T.

    Returns:
      Logits [B, V] in float32 after each prompt's last token, and the cache. A row with a token or
      a length outside its range has NaN logits.

    Raises:
      TypeError: arrays of the wrong dtype.
      ValueError: arrays of the wrong shape, a cache that was donated before, or, in arrays that are
        not on a device, a token or length outside its range.
    """
    check_params(params, config)
    tokens = check_tokens("tokens", tokens, config, 2)
    batch, most = tokens.shape
    length = _check_cache(cache, params, config, batch)
    if not 0 < most <= length:
        raise ValueError(f"tokens has {most} columns; it must be 1 to {length}, the cache's length")
    lengths = check_lengths("lengths", lengths, "tokens", tokens)
    on_cpu = cpu_kernels.are_usable(params)
    found: tuple[Array, Cache] = _prefill(params, config, cache, tokens, lengths, on_cpu)
    return found


@hinted
def decode_step(
    params: Params,
    config: DecoderConfig,
    cache: Cache,
    tokens: ArrayLike,
    positions: ArrayLike,
) -> tuple[Array, Cache]:
    """Runs one token of each sequence through the decoder.

    Args:
      params: as `init_params` or `load_hugging_face` make them.
      config: the decoder's.
      cache: keys and values of positions below `positions`. It is donated: updated in place, and
        cannot be used again.
      tokens: integers [B].
      positions: integers [B]: of these tokens, from 0 on.

    Returns:
      Logits [B, V] in float32 of the next token, and the cache, in which only `positions` changed.
      A row whose token or position is outside its range has NaN logits and an unchanged cache.

    Raises:
      TypeError: arrays of the wrong dtype.
      ValueError: arrays of the wrong shape, a cache that was donated before, or, in arrays that are
        not on a device, a token or position outside its range.
    """
    # Parameters are checked as the call is traced: this is called for each token.
    if "embedding" not in params:
        check_params(params, config)
    tokens = check_tokens("tokens", tokens, config, 1)
    length = _check_cache(cache, params, config, tokens.shape[0])
    positions = check_integers(
        "positions", positions, tokens.shape, 0, length - 1, "the last of the cache"
    )
    # JAX refuses arrays on other devices than these.
    arrays = [params["packed" if "packed" in params else "embedding"]]
    has_kernel = "packed" in params and kernel.is_there_for(arrays)
    static = has_kernel, cpu_kernels.are_usable(arrays)
    found: tuple[Array, Cache] = _decode_step(params, config, cache, tokens, positions, *static)
    return found


@partial(jax.jit, static_argnums=(1, 5), donate_argnums=2)
def _prefill(
    params: Params,
    config: DecoderConfig,
    cache: Cache,
    tokens: Array,
    lengths: Array,
    on_cpu: bool,
) -> tuple[Array, Cache]:
    most = tokens.shape[1]
    positions = jnp.arange(most, dtype=jnp.int32)
    is_padding = positions[None] >= lengths[:, None]
    is_valid = (_is_token(tokens, config) | is_padding).all(1) & (lengths > 0) & (lengths <= most)

    def attend(layer: Array, cache: Cache, q: Array, k: Array, v: Array) -> tuple[Array, Cache]:
        operands = (cache, k, v, layer, jnp.zeros(k.shape[0], jnp.int32))
        if on_cpu:
            cache = jax.lax.platform_dependent(
                *operands, cpu=cpu_kernels.append, default=_append_prompts
            )
        else:
            cache = _append_prompts(*operands)
        # Queries of padding see keys of their own prompt; no other query sees padding.
        return flash_attention(q, k, v, causal=True, window=_window(config)), cache

    x, cache = hidden_states(params, config, cache, tokens, positions, attend, on_cpu=on_cpu)
    last = jnp.clip(lengths - 1, 0, most - 1)
    x = jnp.take_along_axis(x, last[:, None, None], axis=1)[:, 0]
    return jnp.where(is_valid[:, None], _logits(params, config, x, on_cpu), jnp.nan), cache


def _append_prompts(cache: Cache, k: Array, v: Array, layer: Array, positions: Array) -> Cache:
    """Returns the cache with keys and values of prompts, which begin at position 0."""
    start = (layer, *4 * [jnp.int32(0)])
    keys = jax.lax.dynamic_update_slice(cache.keys, k[None], start)
    return Cache(keys, jax.lax.dynamic_update_slice(cache.values, v[None], start))


@partial(jax.jit, static_argnums=(1, 5, 6), donate_argnums=2)
def _decode_step(
    params: Params,
    config: DecoderConfig,
    cache: Cache,
    tokens: Array,
    positions: Array,
    has_kernel: bool,
    on_cpu: bool,
) -> tuple[Array, Cache]:
    check_params(params, config)
    by_layers = partial(step_by_layers, config, on_cpu)
    if not (has_kernel and kernel.fits(params, config, tokens.shape[0])):
        return by_layers(params, cache, tokens, positions)

    def in_one_kernel(
        params: Params, cache: Cache, tokens: Array, positions: Array
    ) -> tuple[Array, Cache]:
        tables = position_tables(config, jnp.arange(cache.keys.shape[2], dtype=jnp.int32))
        packed, state = params["packed"], kernel.init_state(config, tokens.shape[0])
        found = kernel.step(params, config, packed, tables, cache, state, tokens, positions)
        return found.logits, Cache(found.keys, found.values)

    operands = (params, cache, tokens, positions)
    found: tuple[Array, Cache] = jax.lax.platform_dependent(
        *operands, cuda=in_one_kernel, default=by_layers
    )
    return found


def step_by_layers(
    config: DecoderConfig,
    on_cpu: bool,
    params: Params,
    cache: Cache,
    tokens: Array,
    positions: Array,
    implementation: Implementation | None = None,
) -> tuple[Array, Cache]:
    """Returns logits [B, V] and the cache after tokens [B] at positions [B], layer by layer.

    `on_cpu` tells whether CPUs run their kernels; `implementation` "reference" is XLA's program.
    """
    batch, length = cache.keys.shape[1:3]
    is_valid = _is_token(tokens, config) & (positions >= 0) & (positions < length)
    rows = jnp.arange(batch, dtype=jnp.int32)
    # Rows that are not valid write beyond the cache, which drops what they write.
    written = jnp.where(is_valid, positions, length)
    positions = jnp.where(is_valid, positions, 0)

    def attend(layer: Array, cache: Cache, q: Array, k: Array, v: Array) -> tuple[Array, Cache]:
        operands = (layer, cache, q, k, v, written, positions)
        if not on_cpu:
            return by_xla(*operands)
        found: tuple[Array, Cache] = jax.lax.platform_dependent(
            *operands, cpu=by_kernels, default=by_xla
        )
        return found

    def by_kernels(
        layer: Array, cache: Cache, q: Array, k: Array, v: Array, written: Array, positions: Array
    ) -> tuple[Array, Cache]:
        cache = cpu_kernels.append(cache, k, v, layer, written)
        return cpu_kernels.attend(config, q, cache, layer, positions + 1), cache

    def by_xla(
        layer: Array, cache: Cache, q: Array, k: Array, v: Array, written: Array, positions: Array
    ) -> tuple[Array, Cache]:
        cache = Cache(
            cache.keys.at[layer, rows, written].set(k[:, 0], mode="drop"),
            cache.values.at[layer, rows, written].set(v[:, 0], mode="drop"),
        )
        operands = (q, *cache, layer, positions + 1)
        in_layer = partial(attend_in_layer, config, implementation=implementation)
        in_pages = partial(attend_in_pages, config)
        if q.dtype == jnp.float32 or implementation == "reference":
            return in_layer(*operands), cache
        o = jax.lax.platform_dependent(*operands, cuda=in_pages, default=in_layer)
        return o, cache

    places = tokens[:, None], positions[:, None]
    how: Any = {"on_cpu": on_cpu, "implementation": implementation}
    x, cache = hidden_states(params, config, cache, *places, attend, **how)
    return jnp.where(is_valid[:, None], _logits(params, config, x[:, 0], on_cpu), jnp.nan), cache


def attend_in_layer(
    config: DecoderConfig,
    q: Array,
    keys: Array,
    values: Array,
    layer: Array,
    lengths: Array,
    implementation: Implementation | None = None,
) -> Array:
    """Returns the attention of q [B, 1, H, head_dim] over the first `lengths` [B] keys of a layer.

    `keys` and `values` are those of a cache.
    """
    how: Any = {"window": _window(config), "implementation": implementation}
    o: Array = flash_attention(
        q, keys[layer], values[layer], causal=True, kv_lengths=lengths, **how
    )
    return o


def attend_in_pages(
    config: DecoderConfig, q: Array, keys: Array, values: Array, layer: Array, lengths: Array
) -> Any:
    """Returns what `attend_in_layer` does, with all layers as one pool of pages.

    Kernels for GPUs read keys where they are in the pool; XLA would copy a layer for them.
    """
    batch, length = keys.shape[1:3]
    page_size = math.gcd(length, LARGEST_PAGE)
    pages = jnp.arange(batch * length // page_size, dtype=jnp.int32).reshape(batch, -1)
    tables = layer * pages.size + pages
    k, v = (x.reshape(-1, page_size, *x.shape[3:]) for x in (keys, values))
    return paged_attention(q, k, v, tables, lengths, window=_window(config))


def hidden_states(
    params: Params,
    config: DecoderConfig,
    state: Any,
    tokens: Array,
    positions: Array,
    attend: Callable[[Array, Any, Array, Array, Array], tuple[Array, Any]],
    *,
    on_cpu: bool = False,
    implementation: Implementation | None = None,
) -> tuple[Array, Any]:
    """Returns hidden states [B, T, D] after the last norm, and the state.

    Args:
        params: Parameters.
        config: The decoder's.
        state: A pytree that `attend` reads and updates.
        tokens: [B, T].
        positions: [T] or [B, T].
        attend: Takes the layer's index, the state, q [B, T, H, head_dim], k and v
            [B, T, K, head_dim], and returns the attention's output, of q's shape, and the state.
        on_cpu: Whether CPUs multiply few tokens by their kernel.
        implementation: That of norms, RoPE and activations.
    """
    tables = position_tables(config, positions)
    x = jnp.take(params["embedding"], tokens, axis=0, mode="clip")
    how: Any = {"implementation": implementation}
    norm = partial(rms_norm, eps=config.eps, **how)
    # The matrices of all layers, from which the kernel reads a layer's where they are.
    matrices = (
        {} if are_packed_alone(params) else {name: params["layers"][name] for name in MATRICES}
    )
    vectors = {name: one for name, one in params["layers"].items() if name not in MATRICES}

    def layer(carry: Any, arrays: Any) -> tuple[Any, None]:
        branch, residual, state = carry
        index, weights = arrays

        def times(name: str, x: Array) -> Array:
            if matrices:
                return linear(x, matrices[name], index, by_kernel=on_cpu)
            matrix = kernel.unpack(params["packed"], config, index, name)
            return linear(x, matrix[None], 0, by_kernel=on_cpu)

        x, residual = norm(branch, weights["attention_norm"], residual=residual)
        o, state = attend(index, state, *_heads(config, weights, times("qkv", x), tables, how))
        branch = times("out", o.reshape(*x.shape[:2], -1))
        x, residual = norm(branch, weights["mlp_norm"], residual=residual)
        branch = times("down", swiglu(times("gate_up", x), **how))
        return (branch, residual, state), None

    arrays = (jnp.arange(config.layers, dtype=jnp.int32), vectors)
    (branch, residual, state), _ = jax.lax.scan(layer, (x, jnp.zeros_like(x), state), arrays)
    return norm(branch, params["norm"], residual=residual)[0], state


def position_tables(config: DecoderConfig, positions: Array) -> list[Array]:
    """Returns cosines and sines [.., head_dim / 2] of RoPE at positions."""
    angles = frequencies(config.rope_base, config.head_dim, config.rope_scaling)
    return rope_tables(positions, *angles)


def _heads(
    config: DecoderConfig, weights: Params, qkv: Array, tables: Any, how: Any
) -> tuple[Array, ...]:
    """Returns queries and keys after RoPE, and values, of the product for all of them."""
    if config.qkv_bias:
        qkv = qkv + match_rank(weights["qkv_bias"].astype(qkv.dtype), qkv)
    heads = qkv.reshape(*qkv.shape[:2], -1, config.head_dim)
    q, k, v = jnp.split(heads, (config.heads, config.heads + config.kv_heads), axis=2)
    if config.qk_norm:
        norms = weights["q_norm"], weights["k_norm"]
        return *qk_norm_rope(q, k, *norms, eps=config.eps, tables=tables, **how), v
    return *rope(q, k, tables=tables, **how), v


def _logits(params: Params, config: DecoderConfig, x: Array, on_cpu: bool) -> Array:
    is_unpacked = are_packed_alone(params) and not config.tied_head
    matrix = (
        kernel.unpack_head(params["packed"], config)
        if is_unpacked
        else output_matrix(params, config)
    )
    return linear(x, matrix[None], 0, jnp.float32, by_kernel=on_cpu)


def _window(config: DecoderConfig) -> tuple[int, int] | None:
    return None if config.window is None else (config.window - 1, 0)


def _is_token(tokens: Array, config: DecoderConfig) -> Array:
    return (tokens >= 0) & (tokens < config.vocab_size)


def check_tokens(name: str, tokens: Any, config: DecoderConfig, axes: int) -> Array:
    """Returns token ids in int32, with so many axes.

    Raises:
        TypeError: they are no integers.
        ValueError: they have another number of axes, or one on the host is outside its range.
    """
    shape = np.shape(tokens)
    if len(shape) != axes:
        right = "one axis" if axes == 1 else "two axes, [B, T]"
        raise ValueError(f"{name} has shape {shape}; it must have {right}")
    if axes == 2 and 0 in shape:
        raise ValueError(f"{name} has shape {shape}; it must be [B, T] with both at least 1")
    return check_integers(name, tokens, shape, 0, config.vocab_size - 1, "the vocabulary's last")


def check_lengths(name: str, lengths: Any, name_of_tokens: str, tokens: Array) -> Array:
    """Returns the number of tokens of each prompt [B] in int32: T of tokens [B, T] if None.

    Raises:
        TypeError: they are no integers.
        ValueError: they have another shape, or one on the host is not 1 to T.
    """
    batch, most = tokens.shape
    if lengths is None:
        # In an exported program B may be a symbol, of which NumPy makes no array.
        lengths = (np if isinstance(batch, int) else jnp).full(batch, most)
    return check_integers(name, lengths, (batch,), 1, most, f"the columns of {name_of_tokens}")


def check_integers(
    name: str, value: Any, shape: tuple[int, ...], least: int, most: int, last: str
) -> Array:
    """Returns integers in int32; those on the host are held to their range, and stay there."""
    array = as_operand(name, value, f"of integers, of shape {shape}")
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} has dtype {array.dtype}; it must be integers")
    if array.shape != shape:
        raise ValueError(f"{name} has shape {array.shape}; it must be {shape}")
    if not isinstance(value, jax.Array):
        wrong = array[(array < least) | (array > most)]
        if wrong.size:
            raise ValueError(f"{name} has {wrong[0]}; it must be {least} to {most}, {last}")
    # Where it changes nothing but how the dtype promotes, `astype` starts a program of its own.
    return array if array.dtype == jnp.int32 else array.astype(jnp.int32)


def _check_cache(cache: Cache, params: Params, config: DecoderConfig, batch: int) -> int:
    """Returns the cache's length, S.

    Raises:
        TypeError: another dtype than that of the embedding.
        ValueError: another shape, or a cache that was donated before.
    """
    if not isinstance(cache, Cache):
        raise TypeError(f"cache is of type {type(cache).__name__}; init_cache makes it")
    dtype = params["embedding"].dtype
    for name, array in zip(Cache._fields, cache, strict=True):
        if not is_traced(array) and array.is_deleted():
            raise ValueError("cache was donated to an earlier call; pass the one that it returned")
        if array.dtype != dtype:
            raise TypeError(
                f"cache.{name} has dtype {array.dtype}; it must be {dtype}, that of the embedding"
            )
        length = array.shape[2] if array.ndim == 5 else cache.keys.shape[-3]
        shape = (config.layers, batch, length, config.kv_heads, config.head_dim)
        if array.shape != shape or array.shape != cache.keys.shape:
            right = f"({config.layers}, {batch}, S, {config.kv_heads}, {config.head_dim})"
            raise ValueError(f"cache.{name} has shape {array.shape}; it must be {right}")
    return int(cache.keys.shape[2])
