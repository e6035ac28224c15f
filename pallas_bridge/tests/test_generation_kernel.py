"""The kernel that decodes a token on Hopper: packed weights, and its steps beside XLA's program."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pallas_bridge._src.generation import generate as program
from pallas_bridge._src.generation import kernel, model
from pallas_bridge.generation import (
    Cache,
    DecoderConfig,
    decode_step,
    generate,
    init_cache,
    init_params,
    pack,
)

CONFIG = DecoderConfig(
    layers=2,
    hidden_size=1024,
    heads=16,
    kv_heads=8,
    head_dim=128,
    mlp_size=3072,
    vocab_size=1003,
    qk_norm=True,
    tied_head=True,
    rope_base=1e6,
)
UNTIED = dataclasses.replace(CONFIG, tied_head=False, vocab_size=4096)
LENGTH = 2048

on_hopper = pytest.mark.only("cuda", "the kernel is for GPUs")


def draw_params(config: DecoderConfig, seed: int = 0) -> Any:
    """Parameters of a size at which every part of the decoder counts."""
    params = init_params(config, seed)
    keys = iter(jax.random.split(jax.random.key(seed + 1), 99))

    def scaled(path: Any, one: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path)
        if "norm" in name:
            noise = jax.random.normal(next(keys), one.shape, jnp.float32)
            return (1 + 0.1 * noise).astype(one.dtype)
        return (one * (5 if "embedding" in name or "head" in name else 1.5)).astype(one.dtype)

    return jax.tree_util.tree_map_with_path(scaled, params)


def draw_cache(config: DecoderConfig, seed: int = 2) -> Cache:
    shape = (config.layers, 1, LENGTH, config.kv_heads, config.head_dim)
    keys = jax.random.split(jax.random.key(seed))
    return Cache(*(jax.random.normal(one, shape, jnp.bfloat16) for one in keys))


def numbered(config: DecoderConfig) -> Any:
    """Parameters whose elements are all different: integers."""
    first = 0

    def fill(shape: jax.ShapeDtypeStruct) -> jax.Array:
        nonlocal first
        first += shape.size
        return jnp.arange(first - shape.size, first, dtype=jnp.int32).reshape(shape.shape)

    return jax.tree.map(fill, jax.eval_shape(lambda: init_params(config)))


@pytest.mark.parametrize("config", [CONFIG, UNTIED], ids=["tied", "untied"])
def test_packed_weights_are_the_matrices(config: DecoderConfig) -> None:
    params = numbered(config)
    packed = np.asarray(kernel.pack_weights(params, config))
    assert packed.shape == kernel.packed_shape(config)
    layers = params["layers"]
    head = params["embedding" if config.tied_head else "head"]
    matrices = [layers[name] for name in ("qkv", "out", "gate_up", "down")] + [head]
    right = np.sort(np.concatenate([np.asarray(one).ravel() for one in matrices]))
    padding = -config.vocab_size % 8 * config.hidden_size
    found = np.sort(packed.ravel())
    if padding:
        # An element of the embedding may be 0 too.
        assert (found[: padding + 1] == 0).all()
        found = found[padding:]
    np.testing.assert_array_equal(found, right)


def test_packed_weights_are_where_the_kernel_reads_them(rng: np.random.Generator) -> None:
    """By the kernel's own indices: stage, CTA, warp, tile of 32 columns, row, and 8 columns."""
    params = numbered(CONFIG)
    packed = np.asarray(kernel.pack_weights(params, CONFIG))
    layers = {name: np.asarray(one) for name, one in params["layers"].items()}
    # The first stage, stages of rows of a CTA, parts of columns, and the first row of each matrix.
    places = [
        (0, 4, 1, layers["qkv"], 0),
        (4, 1, 2, layers["out"], 0),
        (6, 3, 1, layers["gate_up"], 0),
        (9, 3, 1, layers["gate_up"], CONFIG.mlp_size),
        (12, 1, 3, layers["down"], 0),
    ]
    for _ in range(200):
        layer, cta, warp, g, t = (int(rng.integers(n)) for n in (CONFIG.layers, 128, 16, 8, 4))
        first, groups, parts, matrix, above = places[rng.integers(len(places))]
        group, part, tile = (int(rng.integers(n)) for n in (groups, parts, 2))
        stage = (layer * 15 + first + group * parts + part) * 128 + cta
        at = (((warp * 2 + tile) * 8 + g) * 4 + t) * 8
        row = above + (cta * groups + group) * 8 + g
        column = ((warp * parts + part) * 2 + tile) * 32 + t * 8
        right = matrix[layer, row, column : column + 8]
        np.testing.assert_array_equal(packed[stage, at : at + 8], right)
    head = np.asarray(params["embedding"])
    tile, g, k, t = 77, 3, 29, 2
    at = ((k * 8 + g) * 4 + t) * 8
    right = head[tile * 8 + g, k * 32 + t * 8 :][:8]
    np.testing.assert_array_equal(packed[CONFIG.layers * 15 * 128 + tile, at : at + 8], right)


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": 2048},
        {"kv_heads": 16},
        {"mlp_size": 4096},
        {"qk_norm": False},
        {"qkv_bias": True},
        {"window": 64},
    ],
    ids=str,
)
def test_other_configs_run_by_layers(change: Any) -> None:
    assert kernel.covers(CONFIG) and not kernel.covers(dataclasses.replace(CONFIG, **change))


def test_packed_weights_of_another_config_are_refused() -> None:
    shapes = jax.eval_shape(lambda: init_params(CONFIG))
    params = {**shapes, "packed": jax.ShapeDtypeStruct((3, 8192), jnp.bfloat16)}
    with pytest.raises(ValueError, match=r'"packed"\] has shape \(3, 8192\).*\(3966, 8192\)'):
        kernel.is_packed(params, CONFIG, 1)


@pytest.mark.only("cpu", "it says what runs without the kernel")
def test_pack_changes_nothing_where_there_is_no_kernel() -> None:
    params = init_params(CONFIG)
    assert pack(params, CONFIG) is params


def by_layers(params: Any, config: DecoderConfig, cache: Cache, token: int, position: int) -> Any:
    tokens, positions = jnp.array([token], jnp.int32), jnp.array([position], jnp.int32)
    copied = jax.tree.map(jnp.copy, cache)
    return model._decode_step(params, config, copied, tokens, positions, False)


def in_one_kernel(
    params: Any, config: DecoderConfig, cache: Cache, token: int, position: int
) -> Any:
    tokens, positions = jnp.array([token], jnp.int32), jnp.array([position], jnp.int32)
    assert kernel.is_packed(params, config, 1)
    return decode_step(params, config, jax.tree.map(jnp.copy, cache), tokens, positions)


def in_float32(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def differences(found: jax.Array, right: jax.Array) -> float:
    found, right = found.astype(jnp.float32), right.astype(jnp.float32)
    return float(jnp.linalg.norm(found - right) / jnp.linalg.norm(right))


@on_hopper
@pytest.mark.parametrize("config", [CONFIG, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("position", [0, 1, 5, 100, 1000, LENGTH - 1])
def test_a_step_is_that_of_layers(config: DecoderConfig, position: int) -> None:
    params, cache = pack(draw_params(config), config), draw_cache(config)
    token = 7 * position % config.vocab_size
    right, right_cache = by_layers(params, config, cache, token, position)
    found, found_cache = in_one_kernel(params, config, cache, token, position)
    assert differences(found, right) < 0.03
    with jax.default_matmul_precision("highest"):
        exact, _ = by_layers(in_float32(params), config, in_float32(cache), token, position)
    # XLA's program rounds residuals to bfloat16, and this one only what it multiplies.
    assert differences(found, exact) < 1.2 * differences(right, exact)
    for one, of, before in zip(found_cache, right_cache, cache, strict=True):
        assert differences(one[:, :, position], of[:, :, position]) < 0.03
        rest = one.at[:, :, position].set(before[:, :, position])
        assert bool((rest == before).all())
    again, again_cache = in_one_kernel(params, config, cache, token, position)
    assert bool((again == found).all())
    assert all(bool((x == y).all()) for x, y in zip(again_cache, found_cache, strict=True))


@on_hopper
@pytest.mark.parametrize(("token", "position"), [(-1, 3), (1003, 3), (5, -1), (5, LENGTH)])
def test_a_step_outside_its_range(token: int, position: int) -> None:
    params, cache = pack(draw_params(CONFIG), CONFIG), draw_cache(CONFIG)
    found, found_cache = in_one_kernel(params, CONFIG, cache, token, position)
    assert bool(jnp.isnan(found).all())
    assert all(bool((x == y).all()) for x, y in zip(found_cache, cache, strict=True))


@on_hopper
def test_values_that_are_not_seen_may_be_nan() -> None:
    params, cache = pack(draw_params(CONFIG), CONFIG), draw_cache(CONFIG)
    right, _ = in_one_kernel(params, CONFIG, cache, 5, 77)
    nan = Cache(*(one.at[:, :, 77:].set(jnp.nan) for one in cache))
    found, _ = in_one_kernel(params, CONFIG, nan, 5, 77)
    assert bool((found == right).all())
    bad = {**params, "norm": params["norm"].at[3].set(jnp.nan)}
    assert bool(jnp.isnan(in_one_kernel(bad, CONFIG, cache, 5, 77)[0]).all())


@on_hopper
@pytest.mark.parametrize("is_packed", [False, True])
def test_greedy_tokens_are_the_largest_logits(is_packed: bool) -> None:
    """64 steps of the loop, against steps by layers along the same tokens."""
    params = draw_params(UNTIED)
    packed = pack(params, UNTIED) if is_packed else params
    prompt = [[3, 99, 1, 4000, 17]]
    found = generate(packed, UNTIED, prompt, max_new_tokens=64)
    again = generate(packed, UNTIED, prompt, max_new_tokens=64)
    assert jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), found, again))
    assert found.lengths.tolist() == [64]
    tokens = [*prompt[0], *found.tokens[0].tolist()]
    cache = init_cache(UNTIED, 1, 128)
    exact_params, exact_cache = in_float32(params), in_float32(cache)
    ours, theirs = [], []
    for position, token in enumerate(tokens[:-1]):
        logits, cache = by_layers(params, UNTIED, cache, token, position)
        with jax.default_matmul_precision("highest"):
            exact, exact_cache = by_layers(exact_params, UNTIED, exact_cache, token, position)
        index = position + 1 - len(prompt[0])
        # The first token is prefill's.
        if index < 1:
            continue
        chosen = tokens[position + 1]
        assert float(exact[0, chosen]) > float(exact.max()) - 0.1
        right = float(jax.nn.log_softmax(exact[0])[chosen])
        ours.append(float(found.logps[0, index]) - right)
        theirs.append(float(jax.nn.log_softmax(logits[0])[chosen]) - right)
    assert np.std(ours) < 1.2 * np.std(theirs) < 0.1


@on_hopper
def test_stop_tokens_listeners_and_samplers() -> None:
    params, prompt = draw_params(UNTIED), [[3, 99, 1, 4000, 17]]
    seen: list[int] = []
    found = generate(
        params, UNTIED, prompt, max_new_tokens=16, on_tokens=lambda _, one: seen.append(int(one[0]))
    )
    assert seen == found.tokens[0].tolist()
    stop = seen[5]
    short = generate(params, UNTIED, prompt, max_new_tokens=16, stop_tokens=[stop])
    length = seen.index(stop) + 1
    assert short.tokens[0].tolist() == seen[:length] + [-1] * (16 - length)
    options = {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "seeds": 4}
    first, second = (
        generate(params, UNTIED, prompt, max_new_tokens=16, **options) for _ in range(2)
    )
    assert first.tokens.tolist() == second.tokens.tolist()
    assert first.lengths.tolist() == [16]


@on_hopper
def test_the_loop_runs_the_kernel() -> None:
    params = draw_params(CONFIG)
    assert kernel.is_usable(params, CONFIG, 1) and not kernel.is_usable(params, CONFIG, 2)
    assert not kernel.is_usable(in_float32(params), CONFIG, 1)
    lowered = program._generate.lower(
        (CONFIG, 16, True),
        params,
        jnp.zeros((1, 32), jnp.int32),
        jnp.array([5]),
        jnp.array([0]),
        program.check_sampling(0.0, None, None, None),
        jnp.zeros(0, jnp.int32),
        None,
    )
    assert kernel.TARGET in lowered.as_text()
