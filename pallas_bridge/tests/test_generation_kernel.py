"""The kernel that decodes a token on Hopper: packed weights, and its steps beside XLA's program."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pallas_bridge._src.generation import generate as program
from pallas_bridge._src.generation import kernel, model, sampling, sampling_kernel
from pallas_bridge._src.generation.parameters import output_matrix
from pallas_bridge.generation import (
    Cache,
    DecoderConfig,
    decode_step,
    generate,
    init_cache,
    init_params,
    pack,
    prefill,
)

from pallas_bridge import Llama3Scaling

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


def config_of(name: str, layers: int = 2) -> DecoderConfig:
    """A config with the dimensions that the kernel has of a model."""
    dims = kernel.DIMENSIONS[name]
    scaling = Llama3Scaling(32.0, 1.0, 4.0, 8192) if "Llama" in name else None
    return dataclasses.replace(CONFIG, layers=layers, rope_scaling=scaling, **dims._asdict())


LIBRARY_NAMES = {
    "Qwen3-0.6B": "QWEN3_SMALL",
    "Qwen3-1.7B": "QWEN3_MEDIUM",
    "Llama-3.2-1B": "LLAMA_SMALL",
    "Qwen3-8B": "QWEN3_LARGE",
    "Llama-3.1-8B, Mistral-7B": "LLAMA_LARGE",
    "Qwen2.5-0.5B": "QWEN2_SMALL",
}
LLAMA = config_of("Llama-3.2-1B", 1)
QWEN3 = config_of("Qwen3-1.7B", 1)
QWEN2 = config_of("Qwen2.5-0.5B", 1)

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


def draw_cache(config: DecoderConfig, batch: int = 1, seed: int = 2) -> Cache:
    shape = (config.layers, batch, LENGTH, config.kv_heads, config.head_dim)
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


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "config", [CONFIG, UNTIED, LLAMA, QWEN3], ids=["tied", "untied", "llama", "qwen3"]
)
@pytest.mark.slow
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


def whole_heads(matrix: np.ndarray, heads: list[int], axis: int) -> np.ndarray:
    """Heads of 64 rows or columns, -1 for zeros."""
    empty = np.zeros_like(np.take(matrix, range(64), axis))
    parts = [
        empty if head < 0 else np.take(matrix, range(64 * head, 64 * head + 64), axis)
        for head in heads
    ]
    return np.concatenate(parts, axis)


def filled_up(config: DecoderConfig, layers: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Matrices with the zeros and copies that the kernel for Qwen2.5-0.5B reads, written out."""
    if config != QWEN2:
        return layers
    first = [0, 4, 1, 5, 2, 6, 3, -1]
    queries = [*first, *(head if head < 0 else 7 + head for head in first)]
    keys_and_values = [14] * 4 + [15] * 4 + [16] * 4 + [17] * 4
    qkv = whole_heads(layers["qkv"], [*queries, *keys_and_values], 1)
    halves = layers["gate_up"].reshape(1, 2, 4864, 896)
    gate_up = np.pad(halves, ((0, 0), (0, 0), (0, 256), (0, 128)))
    return {
        "qkv": np.pad(qkv, ((0, 0), (0, 0), (0, 128))),
        "out": np.pad(whole_heads(layers["out"], queries, 2), ((0, 0), (0, 128), (0, 0))),
        "gate_up": gate_up.reshape(1, -1, 1024),
        "down": np.pad(layers["down"], ((0, 0), (0, 128), (0, 256))),
    }


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "config", [CONFIG, LLAMA, QWEN3, QWEN2], ids=["small", "llama", "qwen3", "qwen2"]
)
def test_packed_weights_are_where_the_kernel_reads_them(
    config: DecoderConfig, rng: np.random.Generator
) -> None:
    """By the kernel's own indices: stage, CTA, warp, tile of 32 columns, row, and 8 columns."""
    params = numbered(config)
    packed = np.asarray(kernel.pack_weights(params, config))
    layers = {name: np.asarray(one) for name, one in params["layers"].items()}
    layers = filled_up(config, layers)
    hidden_size, mlp = layers["qkv"].shape[2], layers["gate_up"].shape[1] // 2
    # Matrices [L, M, O, I] in their order, M of them by turns, and whether all rows of a CTA are
    # side by side.
    orders = [
        (layers["qkv"][:, None], False),
        (layers["out"][:, None], True),
        (layers["gate_up"].reshape(config.layers, 2, mlp, -1), False),
        (layers["down"][:, None], True),
    ]
    parts = [matrix.shape[3] // 1024 for matrix, _ in orders]
    groups = [matrix.shape[2] // 128 // 8 for matrix, _ in orders]
    stages = [
        matrix.shape[1] * group * part
        for (matrix, _), group, part in zip(orders, groups, parts, strict=True)
    ]
    for _ in range(300):
        layer, cta, warp, g, t = (int(rng.integers(n)) for n in (config.layers, 128, 16, 8, 4))
        which = int(rng.integers(4))
        matrix, by_columns = orders[which]
        turn, group, part, tile = (
            int(rng.integers(n)) for n in (matrix.shape[1], groups[which], parts[which], 2)
        )
        if by_columns:
            stage = part * groups[which] + group
        else:
            stage = (group * matrix.shape[1] + turn) * parts[which] + part
        stage = (layer * sum(stages) + sum(stages[:which]) + stage) * 128 + cta
        at = (((warp * 2 + tile) * 8 + g) * 4 + t) * 8
        row = (cta * groups[which] + group) * 8 + g
        column = ((warp * parts[which] + part) * 2 + tile) * 32 + t * 8
        right = matrix[layer, turn, row, column : column + 8]
        np.testing.assert_array_equal(packed[stage, at : at + 8], right)
    head, count = np.asarray(params["embedding"]), hidden_size // 1024
    head = np.pad(head, ((0, 0), (0, hidden_size - config.hidden_size)))
    tile, g, warp, t, part, half = 77, 3, 11, 2, count - 1, 1
    at = (((warp * 2 + half) * 8 + g) * 4 + t) * 8
    column = ((warp * count + part) * 2 + half) * 32 + t * 8
    right = head[tile * 8 + g, column:][:8]
    stage = config.layers * sum(stages) * 128 + tile * count + part
    np.testing.assert_array_equal(packed[stage, at : at + 8], right)


def test_unpacked_weights_are_the_matrices() -> None:
    config = dataclasses.replace(QWEN2, layers=2)
    params = numbered(config)
    packed = kernel.pack_weights(params, config)
    for name in kernel.MATRICES:
        matrix = kernel.unpack(packed, config, config.layers - 1, name)
        np.testing.assert_array_equal(matrix, params["layers"][name][-1])
    np.testing.assert_array_equal(kernel.unpack_head(packed, config), output_matrix(params, config))
    # Layer by layer, in place.
    again = jnp.zeros_like(packed)
    for index in range(config.layers):
        layer = {name: params["layers"][name][index] for name in kernel.MATRICES}
        again = kernel.put_layer(again, config, layer, index)
    again = kernel.put_head(again, config, output_matrix(params, config))
    np.testing.assert_array_equal(again, packed)


@pytest.mark.few(0)
def test_packed_weights_alone_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    config = dataclasses.replace(UNTIED, layers=1, vocab_size=64)
    params, prompts = draw_params(config), [[3, 14, 15, 9]]

    def run(params: Any) -> jax.Array:
        return prefill(params, config, init_cache(config, 1, 8), prompts)[0]

    right = run(params)
    with monkeypatch.context() as patch:
        patch.setattr(kernel, "is_there", lambda *_: True)
        alone = pack(params, config, donate=True)
    assert params["head"].is_deleted() and params["layers"]["down"].is_deleted()
    assert set(alone) == {"embedding", "norm", "layers", "packed"}
    np.testing.assert_allclose(run(alone), right, atol=1e-2)


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


@pytest.mark.parametrize("name", kernel.DIMENSIONS)
def test_configs_that_the_kernel_covers(name: str) -> None:
    config = config_of(name)
    assert kernel.covers(config)
    assert not kernel.covers(dataclasses.replace(config, qk_norm=not config.qk_norm))
    # A batch of 1 to 4, or to 8, has the words of a kernel.
    words = [kernel.state_words(config, batch) for batch in range(1, 9)]
    assert len(set(words[1:4])) == len(set(words[4:])) == 1 and words[1] < words[4]
    assert kernel.covers(config, 8) and not kernel.covers(config, 9)


@pytest.mark.parametrize("name", kernel.DIMENSIONS)
def test_a_state_has_the_words_of_the_library(name: str) -> None:
    """The library's numbers, which its build compares with the kernels."""
    path = "crates/xentile-cuda/src/decode_step/arguments.rs"
    source = (Path(__file__).parents[2] / path).read_text()
    found = dict(re.findall(r"(\w*STATE_WORDS\w*): usize = \w+, (\d+);", source))
    of = f"{LIBRARY_NAMES[name]}_STATE_WORDS_"
    single = "STATE_WORDS" if name == "Qwen3-0.6B" else of + "4"
    for batch in range(1, 9):
        words = found[single if batch == 1 else of + ("4" if batch <= 4 else "8")]
        assert kernel.state_words(config_of(name), batch) == 2 * int(words), batch


def by_layers(params: Any, config: DecoderConfig, cache: Cache, token: Any, position: Any) -> Any:
    tokens, positions = (jnp.atleast_1d(jnp.asarray(x, jnp.int32)) for x in (token, position))
    copied = jax.tree.map(jnp.copy, cache)
    return model._decode_step(params, config, copied, tokens, positions, False, False)


def in_one_kernel(
    params: Any, config: DecoderConfig, cache: Cache, token: Any, position: Any
) -> Any:
    tokens, positions = (jnp.atleast_1d(jnp.asarray(x, jnp.int32)) for x in (token, position))
    assert kernel.is_packed(params, config, tokens.size)
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
@pytest.mark.parametrize("name", kernel.DIMENSIONS)
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_a_step_of_sequences_is_that_of_layers(name: str, batch: int) -> None:
    """Rows at positions of their own, of which the last but one is not valid in a batch of 8."""
    config = config_of(name)
    params, cache = pack(draw_params(config), config), draw_cache(config, batch)
    positions = np.array([1000, 0, LENGTH - 1, 1, 130, 64, 5, 517])[:batch]
    tokens = 7 * positions % config.vocab_size
    if batch == 8:
        tokens[6] = config.vocab_size
    found, found_cache = in_one_kernel(params, config, cache, tokens, positions)
    with jax.default_matmul_precision("highest"):
        exact, exact_cache = by_layers(
            in_float32(params), config, in_float32(cache), tokens, positions
        )
    for b, position in enumerate(positions):
        rest = [one[:, b] for one in cache]
        if batch == 8 and b == 6:
            assert bool(jnp.isnan(found[b]).all())
        else:
            assert differences(found[b], exact[b]) < 0.02
            for i, (one, of) in enumerate(zip(found_cache, exact_cache, strict=True)):
                assert differences(one[:, b, position], of[:, b, position]) < 0.02
                rest[i] = rest[i].at[:, position].set(one[:, b, position])
        assert all(bool((one[:, b] == x).all()) for one, x in zip(found_cache, rest, strict=True))
    again, _ = in_one_kernel(params, config, cache, tokens, positions)
    assert bool(jnp.array_equal(again, found, equal_nan=True))


@on_hopper
@pytest.mark.parametrize("batch", [3, 8])
def test_a_row_does_not_depend_on_others(batch: int) -> None:
    """In another order rows have the same bits."""
    params, cache = pack(draw_params(LLAMA), LLAMA), draw_cache(LLAMA, batch)
    positions, tokens = 100 * np.arange(batch) + 7, 3 * np.arange(batch)
    found, found_cache = in_one_kernel(params, LLAMA, cache, tokens, positions)
    reversed_cache = Cache(*(one[:, ::-1] for one in cache))
    other, other_cache = in_one_kernel(params, LLAMA, reversed_cache, tokens[::-1], positions[::-1])
    assert bool((found == other[::-1]).all())
    assert all(bool((x == y[:, ::-1]).all()) for x, y in zip(found_cache, other_cache, strict=True))


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


@pytest.mark.parametrize("count", [1, 18])
def test_a_block_of_steps_may_be_longer_than_what_is_generated(count: int) -> None:
    params = jax.eval_shape(lambda: init_params(CONFIG))
    arrays = (jnp.zeros((2, 32), jnp.int32), jnp.array([5, 32]), jnp.array([0, 1]))
    found = jax.eval_shape(
        lambda params: program._generate(
            (CONFIG, count, True, True),
            params,
            *arrays,
            program.check_sampling(0.0, None, None, None),
            jnp.zeros(1, jnp.int32),
        ),
        params,
    )
    assert (found.tokens.shape, found.logps.shape, found.lengths.shape) == (*2 * [(2, count)], (2,))


@on_hopper
def test_the_loop_runs_the_kernel() -> None:
    params = draw_params(CONFIG)
    assert kernel.is_usable(params, CONFIG, 8) and not kernel.is_usable(params, CONFIG, 9)
    assert not kernel.is_usable(in_float32(params), CONFIG, 1)
    for temperature in (0.0, 1.0):
        lowered = program._generate.lower(
            (CONFIG, 16, True, True),
            params,
            jnp.zeros((1, 32), jnp.int32),
            jnp.array([5]),
            jnp.array([0]),
            program.check_sampling(temperature, None, None, None),
            jnp.zeros(0, jnp.int32),
        )
        assert kernel.TARGET in lowered.as_text()
        assert (sampling_kernel.TARGET in lowered.as_text()) == (temperature > 0)


def draw(logits: Any, seeds: Any, step: int, has_kernel: bool, **options: Any) -> tuple[Any, Any]:
    """A token of each row and its log-probability, by the kernel that draws or by XLA."""
    given = {"temperature": 1.0, "top_k": None, "top_p": None, "min_p": None, **options}

    def run(logits: Any, seeds: Any, given: Any) -> tuple[Any, Any]:
        starts = jnp.full(seeds.shape, 2)
        sampler = sampling.make_sampler(
            sampling.make_keys(seeds), sampling.Sampling(**given), has_kernel, starts
        )
        return sampler(logits, step - starts)

    found: tuple[Any, Any] = jax.jit(run)(logits, jnp.asarray(seeds), given)
    return found


@pytest.mark.fixed
@pytest.mark.parametrize(("rows", "bounds"), [(3, ""), (2, ", tensor<2x50xf32>")])
def test_the_call_that_draws_is_as_declared(rows: int, bounds: str) -> None:
    def run(logits: Any, seeds: Any) -> Any:
        options = sampling.Sampling(0.7, None, 0.9, None)
        return sampling.make_sampler(sampling.make_keys(seeds), options, True)(logits, seeds)

    traced = jax.jit(run).trace(jnp.zeros((rows, 50), jnp.bfloat16), jnp.zeros(rows, jnp.int32))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    (line,) = (line for line in text.splitlines() if sampling_kernel.TARGET in line)
    logits, keys, row = (f"tensor<{rows}x{one}>" for one in ("50xf32", "2xi32", "i32"))
    arrays = f"{logits}, {keys}, {row}, {row}, tensor<4xf32>"
    assert f"({arrays}) -> ({row}, tensor<{rows}xf32>{bounds})" in line


DRAWS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"top_k": 50},
    {"top_k": 400, "min_p": 1e-3},
    {"top_p": 0.9},
    {"temperature": 3.0, "top_p": 0.999, "min_p": 1e-4},
    {"temperature": 0.0},
    {"temperature": 0.0, "top_k": 3, "top_p": 0.5, "min_p": 0.1},
]


@on_hopper
@pytest.mark.parametrize("vocab", [20, 4099, 151_936, 2**18])
def test_the_kernel_draws_what_xla_draws(rng: np.random.Generator, vocab: int) -> None:
    logits = jnp.asarray(rng.normal(size=(24, vocab)), jnp.float32)
    logits *= jnp.repeat(jnp.asarray([0.02, 1.5, 6.0]), 8)[:, None]
    # Half of the rows have many equal logits.
    logits = logits.at[::2].set(jnp.round(4 * logits[::2]) / 4)
    # The largest ones are a CTA's.
    logits = logits.at[9].set(jnp.sort(logits[9]))
    seeds = rng.integers(-(2**31), 2**31, 24)
    same = 0
    for step, options in enumerate(DRAWS):
        tokens, logps = draw(logits, seeds, step, True, **options)
        right, right_logps = draw(logits, seeds, step, False, **options)
        # Two sums of a logit and noise may be as near to each other as rounding.
        is_same = np.asarray(tokens == right)
        same += is_same.sum()
        np.testing.assert_allclose(logps[is_same], right_logps[is_same], atol=1e-4)
        # A row depends on no other: in another order, with other rows, with other clusters.
        for rows in (slice(None, None, -1), slice(5, 8), slice(22, 24)):
            others, other_logps = draw(logits[rows], seeds[rows], step, True, **options)
            assert (others == tokens[rows]).all() and (other_logps == logps[rows]).all()
    assert same >= 24 * len(DRAWS) - 1


@on_hopper
def test_the_kernel_leaves_out_what_options_do(rng: np.random.Generator) -> None:
    """Tokens of 20,000 draws, whose noise is larger the lower the temperature of truncation."""
    vocab, count = 5003, 20_000
    logits = jnp.asarray(rng.permutation(vocab), jnp.float32) * 1e-3
    rows = jnp.broadcast_to(logits, (count, vocab))
    p = np.sort(np.exp(np.asarray(logits, np.float64)))[::-1]
    kept = {
        "top_k": (77, 77),
        "top_p": (0.1, int((np.cumsum(p) < 0.1 * p.sum()).sum()) + 1),
        "min_p": (float(p[60] / p[0]) * 0.9999, 61),
    }
    for name, (value, most) in kept.items():
        tokens, _ = draw(rows, rng.integers(0, 2**31, count), 3, True, **{name: value})
        ranks = vocab - 1 - np.round(np.asarray(logits[tokens]) * 1e3)
        # All that are kept are drawn, but for a few where many are.
        assert ranks.max() < most and np.unique(ranks).size > 0.95 * most
