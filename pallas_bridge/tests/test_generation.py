"""Decoders and samplers: against float64 in numpy, distributions, rows of a batch, bad input."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pallas_bridge._src.generation import generate as program
from pallas_bridge._src.generation.model import attend_in_layer as in_layer
from pallas_bridge._src.generation.model import attend_in_pages as in_pages
from pallas_bridge._src.generation.model import hidden_states
from pallas_bridge._src.rope.scaling import frequencies
from pallas_bridge.generation import (
    Cache,
    DecoderConfig,
    decode_step,
    generate,
    init_cache,
    init_params,
    prefill,
    sample,
)
from test_strict_modes import wide_types
from test_symbolic_shapes import checks

from pallas_bridge import (
    Llama3Scaling,
    YarnScaling,
    flash_attention,
    linear_cross_entropy_per_token,
)

LENGTH = 12
SMALL = DecoderConfig(
    layers=2, hidden_size=32, heads=4, kv_heads=2, head_dim=8, mlp_size=48, vocab_size=61
)
CONFIGS = {
    "llama": dataclasses.replace(
        SMALL, rope_base=500000.0, rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 8)
    ),
    "mistral": dataclasses.replace(SMALL, window=4, kv_heads=1),
    "qwen2": dataclasses.replace(SMALL, qkv_bias=True, tied_head=True),
    "qwen3": dataclasses.replace(SMALL, qk_norm=True, head_dim=16, eps=1e-5),
}
QWEN3 = CONFIGS["qwen3"]


def draw_params(rng: np.random.Generator, config: DecoderConfig, dtype: Any = "float32") -> Any:
    """Parameters of a size at which every part of the decoder counts."""

    def draw(path: Any, one: Any) -> jax.Array:
        name = jax.tree_util.keystr(path)
        noise = rng.normal(size=one.shape)
        values = 1 + 0.3 * noise if "norm" in name else noise * max(one.shape[-1], 4) ** -0.5
        return jnp.asarray(5 * values if "head" in name else values, dtype)

    shapes = jax.eval_shape(lambda: init_params(config, dtype=dtype))
    return jax.tree_util.tree_map_with_path(draw, shapes)


def expected_logits(params: Any, config: DecoderConfig, tokens: Any) -> np.ndarray:
    """Logits [T, V] of one text in float64."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    size, count = config.head_dim, len(tokens)

    def norm(x: Any, weight: Any) -> Any:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.eps) * weight

    rates, factor = frequencies(config.rope_base, size, config.rope_scaling)
    angles = np.arange(count)[:, None, None] * rates
    cos, sin = factor * np.cos(angles), factor * np.sin(angles)

    def rotate(x: Any) -> Any:
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    distance = np.arange(count)[:, None] - np.arange(count)
    is_seen = (distance >= 0) & (distance < (config.window or count))
    x = params["embedding"][tokens]
    for index in range(config.layers):
        layer = {name: array[index] for name, array in params["layers"].items()}
        qkv = norm(x, layer["attention_norm"]) @ layer["qkv"].T + layer.get("qkv_bias", 0)
        heads = qkv.reshape(count, -1, size)
        q, k, v = np.split(heads, [config.heads, config.heads + config.kv_heads], axis=1)
        if config.qk_norm:
            q, k = norm(q, layer["q_norm"]), norm(k, layer["k_norm"])
        group = config.heads // config.kv_heads
        q, k, v = rotate(q), np.repeat(rotate(k), group, 1), np.repeat(v, group, 1)
        t = np.where(is_seen, np.einsum("qhd,khd->hqk", q, k) * size**-0.5, -np.inf)
        p = np.exp(t - t.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        x = x + np.einsum("hqk,khd->qhd", p, v).reshape(count, -1) @ layer["out"].T
        gate, up = np.split(norm(x, layer["mlp_norm"]) @ layer["gate_up"].T, 2, axis=-1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["down"].T
    head = params["embedding" if config.tied_head else "head"]
    return np.asarray(norm(x, params["norm"]) @ head.T)


def caches(config: DecoderConfig, batch: int, dtype: Any = jnp.float32) -> Cache:
    return init_cache(config, batch, LENGTH, dtype=dtype)


@pytest.fixture
def params(rng: np.random.Generator) -> Any:
    return draw_params(rng, QWEN3)


EACH = [*((name, "float32") for name in CONFIGS), ("qwen3", "bfloat16")]


@pytest.mark.parametrize(("name", "dtype"), EACH)
def test_logits_of_prefill_and_steps(rng: np.random.Generator, name: str, dtype: str) -> None:
    config = CONFIGS[name]
    params = draw_params(rng, config, dtype)
    texts = rng.integers(0, config.vocab_size, (2, LENGTH))
    right = np.stack([expected_logits(params, config, text) for text in texts])
    allowed = {"float32": 2e-5, "bfloat16": 0.06}[dtype] * np.abs(right).max()
    begun = np.array([3, 5])
    logits, cache = prefill(params, config, caches(config, 2, dtype), texts, begun)
    assert logits.dtype == jnp.float32
    for at in begun + np.arange(LENGTH - 5)[:, None]:
        assert np.abs(logits - right[[0, 1], at - 1]).max() <= allowed
        logits, cache = decode_step(params, config, cache, texts[[0, 1], at], at)
    # The last step and the last row of a prefill have the same logits, keys and values.
    whole, filled = prefill(params, config, caches(config, 2, dtype), texts)
    assert np.abs(whole - right[:, -1]).max() <= allowed
    assert np.abs(logits[1] - whole[1]).max() <= allowed
    for one, other in zip(cache, filled, strict=True):
        difference = np.abs(np.asarray(one - other, np.float32))
        assert difference.max() <= allowed


PROMPTS = [[3, 14, 15, 9], [2], [6, 5, 35, 8, 9, 7, 9]]


@pytest.mark.parametrize("name", ["mistral", "qwen3"])
def test_pages_are_those_of_the_layer(rng: np.random.Generator, name: str) -> None:
    config = CONFIGS[name]
    keys, values = (
        jnp.asarray(rng.normal(size=one.shape), "bfloat16") for one in caches(config, 3)
    )
    q = jnp.asarray(rng.normal(size=(3, 1, config.heads, config.head_dim)), "bfloat16")
    operands = (config, q, keys, values, jnp.int32(1), jnp.asarray([1, LENGTH, 5]))
    found, right = (np.asarray(one(*operands), np.float32) for one in (in_pages, in_layer))
    assert np.abs(found - right).max() <= 0.02 * np.abs(right).max()


def test_greedy_tokens(params: Any) -> None:
    found = generate(params, QWEN3, PROMPTS, max_new_tokens=5)
    assert (found.lengths == 5).all()
    for prompt, tokens, logps in zip(PROMPTS, found.tokens, found.logps, strict=True):
        right = expected_logits(params, QWEN3, [*prompt, *np.asarray(tokens)])
        right = right[len(prompt) - 1 : -1]
        chosen = right[np.arange(5), tokens]
        # Equal, unless the two best logits are nearer to each other than rounding.
        assert (chosen >= right.max(-1) - 1e-4 * np.abs(right).max()).all()
        lse = right.max(-1) + np.log(np.exp(right - right.max(-1, keepdims=True)).sum(-1))
        np.testing.assert_allclose(logps, chosen - lse, atol=1e-4)
    # Prompts as an array, padded with anything.
    array = jnp.asarray([one + [60] * (7 - len(one)) for one in PROMPTS])
    lengths = [len(one) for one in PROMPTS]
    again = generate(params, QWEN3, array, prompt_lengths=lengths, max_new_tokens=5)
    assert (again.tokens == found.tokens).all()


@pytest.mark.slow
def test_rows_do_not_depend_on_others(params: Any) -> None:
    options: Any = {"max_new_tokens": 6, "temperature": 0.8, "top_k": 40, "min_p": 0.001}
    together = generate(params, QWEN3, PROMPTS, seeds=[7, 8, 9], **options)
    for row in range(3):
        alone = generate(params, QWEN3, [PROMPTS[row]], seeds=[7 + row], **options)
        assert (alone.tokens[0] == together.tokens[row]).all()
        np.testing.assert_allclose(alone.logps[0], together.logps[row], atol=1e-4)
    others = generate(params, QWEN3, [PROMPTS[0], [1, 2], [4]], seeds=7, **options)
    assert (others.tokens[0] == together.tokens[0]).all()
    # Seeds of a scalar count up; another seed has other tokens.
    same = generate(params, QWEN3, [PROMPTS[0]] * 3, seeds=7, **options)
    assert (same.tokens[0] == together.tokens[0]).all()
    hot = generate(params, QWEN3, [PROMPTS[0]] * 3, seeds=7, **{**options, "temperature": 20.0})
    assert (hot.tokens[0] != hot.tokens[1]).any()


@pytest.mark.slow
def test_stop_tokens_end_their_sequence(params: Any) -> None:
    options: Any = {"max_new_tokens": 6, "temperature": 1.0, "seeds": 3}
    free = np.asarray(generate(params, QWEN3, PROMPTS, **options).tokens)
    stop = int(free[0, 2])
    found = generate(params, QWEN3, PROMPTS, stop_tokens=[stop, stop], **options)
    for row, tokens in enumerate(free):
        length = [*tokens, stop].index(stop) + 1
        assert found.lengths[row] == min(length, 6)
        assert (found.tokens[row, :length] == tokens[:length]).all()
        assert (found.tokens[row, length:] == -1).all() and (found.logps[row, length:] == 0).all()


def test_tokens_reach_the_host_as_they_are_made(params: Any) -> None:
    given: list[Any] = []
    run = program._next._cache_size
    found = generate(
        params, QWEN3, PROMPTS, max_new_tokens=4, on_tokens=lambda *one: given.append(one)
    )
    assert [step for step, _ in given] == [0, 1, 2, 3]
    assert (np.stack([tokens for _, tokens in given], 1) == found.tokens).all()
    compiled = run()

    def fail(step: int, tokens: np.ndarray) -> None:
        raise OSError(f"no room at step {step}")

    with pytest.raises(OSError, match="no room at step 0"):
        generate(params, QWEN3, PROMPTS, max_new_tokens=4, on_tokens=fail)
    assert run() == compiled


@pytest.mark.parametrize("count", [5, pytest.param(10_000, marks=pytest.mark.nightly)])
@pytest.mark.slow
def test_logps_are_those_of_a_trainer(rng: np.random.Generator, params: Any, count: int) -> None:
    prompts = rng.integers(0, 61, (2, 4))
    found = generate(params, QWEN3, prompts, max_new_tokens=count, temperature=0.7)
    text = jnp.concatenate([prompts, found.tokens], 1)

    def attend(layer: Any, state: Any, q: Any, k: Any, v: Any) -> Any:
        return flash_attention(q, k, v, causal=True), state

    hidden, _ = hidden_states(params, QWEN3, None, text, jnp.arange(count + 4), attend)
    _, logps = linear_cross_entropy_per_token(
        hidden[:, 3:-1], params["head"], found.tokens, temperature=0.7
    )
    np.testing.assert_allclose(found.logps, logps, atol=2e-4)


VOCABULARY = 20
SAMPLERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 1.7, "top_k": 6},
    {"top_p": 0.8},
    {"top_p": 0.01},
    {"min_p": 0.1},
    {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
]


def expected_probabilities(
    logits: Any,
    temperature: float = 1.0,
    top_k: int = VOCABULARY,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> np.ndarray:
    """Probabilities [V] of one row, by sorting."""
    p = np.exp(np.asarray(logits, np.float64) / temperature)
    p /= p.sum()
    best = np.argsort(-p)[:top_k]
    before = np.cumsum(p[best]) - p[best]
    best = best[before < top_p * p[best].sum()]
    best = best[p[best] >= min_p * p.max()]
    kept = np.zeros_like(p)
    kept[best] = p[best]
    return np.asarray(kept / kept.sum())


@pytest.mark.few(3)
@pytest.mark.parametrize("options", SAMPLERS, ids=str)
@pytest.mark.slow
def test_draws_have_the_stated_distribution(
    rng: np.random.Generator, options: dict[str, Any]
) -> None:
    count = 100_000
    logits = rng.normal(size=VOCABULARY) * 1.5
    seeds = rng.integers(-(2**31), 2**31, count)
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (count, VOCABULARY))
    tokens, logps = sample(rows, seeds, rng.integers(0, 9), **options)
    p = expected_probabilities(logits, **options)
    drawn = np.bincount(tokens, minlength=VOCABULARY)
    assert not drawn[p == 0].any()
    is_kept = p > 0
    chi_square = ((drawn - count * p)[is_kept] ** 2 / (count * p[is_kept])).sum()
    # Six standard deviations, by Wilson and Hilferty's approximation (1931).
    freedom = max(is_kept.sum() - 1, 1)
    assert chi_square <= freedom * (1 - 2 / (9 * freedom) + 6 * (2 / (9 * freedom)) ** 0.5) ** 3
    whole = expected_probabilities(logits, options.get("temperature", 1.0))
    np.testing.assert_allclose(logps, np.log(whole[np.asarray(tokens)]), atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"temperature": 0}, {"top_k": 3}], ids=str)
def test_nan_among_many_logits(rng: np.random.Generator, options: Any) -> None:
    logits = jnp.asarray(rng.normal(size=(4, 1000)), jnp.float32)
    logits = logits.at[1, rng.integers(1000)].set(jnp.nan).at[2].set(-jnp.inf)
    tokens, logps = sample(logits, range(4), **options)
    assert (tokens < 0).tolist() == np.isnan(logps).tolist() == [False, True, True, False]


@pytest.mark.slow
def test_samplers_keep_ties_and_refuse_nan() -> None:
    inf, nan = np.inf, np.nan
    logits = jnp.asarray([[1.0, 2, 2, 0], [0, nan, 1, 2], [-inf, -inf, -inf, -inf], [5, inf, 1, 2]])
    logits = jnp.concatenate([logits, jnp.asarray([[-inf, -inf, 3.0, -inf]])])
    tokens, logps = sample(logits, range(5), temperature=0)
    assert tokens.tolist() == [1, -1, -1, -1, 2]
    assert np.isnan(logps).tolist() == [False, True, True, True, False]
    options = {"top_k": 3, "top_p": 0.9, "min_p": 0.1}
    tokens, _ = sample(logits, range(5), **options)
    assert tokens[1:].tolist() == [-1, -1, -1, 2]
    # Seeds on the device give the same tokens.
    assert (tokens == sample(logits, jnp.arange(5), **options)[0]).all()
    many = jnp.broadcast_to(logits[0], (200, 4))
    assert set(sample(many, range(200), top_k=1)[0].tolist()) == {1, 2}
    # Options may be traced.
    traced = jax.jit(lambda k, t: sample(many, jnp.arange(200), temperature=t, top_k=k)[0])
    assert set(traced(1, 1.0).tolist()) == {1, 2}
    assert set(traced(4, 1e3).tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_p": 0.5, "min_p": 0.1}], ids=str)
def test_a_traced_temperature_of_0_is_greedy(rng: np.random.Generator, options: Any) -> None:
    # Most rows have several largest logits, the last two none that is finite.
    logits = jnp.asarray(rng.integers(0, 4, (40, 9)), jnp.float32)
    logits = logits.at[-2, 3].set(jnp.nan).at[-1].set(-jnp.inf)
    traced = jax.jit(lambda t: sample(logits, jnp.arange(40), temperature=t, **options))
    right = sample(logits, range(40), temperature=0, **options)
    for found, want in zip(traced(0.0), right, strict=True):
        np.testing.assert_array_equal(found, want)
    assert (traced(1.0)[0] != right[0]).any()


@pytest.mark.few(0)
@pytest.mark.slow
def test_strict_types(params: Any) -> None:
    options: Any = {"max_new_tokens": 2, "top_k": 9, "top_p": 0.9, "min_p": 0.1, "temperature": 1.0}
    right = generate(params, QWEN3, PROMPTS, **options)
    with wide_types():
        found = generate(params, QWEN3, PROMPTS, **options)
    assert (found.tokens == right.tokens).all()


@pytest.mark.slow
def test_bad_values_on_the_device_stay_in_their_row(rng: np.random.Generator, params: Any) -> None:
    texts = rng.integers(1, 60, (4, 4))
    texts[1, 2] = 60
    # A token that no row generates.
    params = {**params, "head": params["head"].at[60].set(0.0)}
    broken = {**params, "embedding": params["embedding"].at[60].set(jnp.nan)}
    wrong = jnp.asarray(texts).at[2, 1].set(61)
    found = generate(broken, QWEN3, wrong, max_new_tokens=3)
    right = generate(params, QWEN3, texts, max_new_tokens=3)
    assert found.lengths.tolist() == [3, 0, 0, 3]
    assert (found.tokens[1:3] == -1).all() and not found.logps[1:3].any()
    assert (found.tokens[::3] == right.tokens[::3]).all()
    _, cache = prefill(params, QWEN3, caches(QWEN3, 4), texts)
    before = [np.asarray(one) for one in cache]
    tokens, positions = jnp.asarray([1, -1, 61, 2]), jnp.asarray([4, 4, 4, LENGTH])
    logits, cache = decode_step(params, QWEN3, cache, tokens, positions)
    assert np.isnan(logits).any(1).tolist() == [False, True, True, True]
    for old, new in zip(before, cache, strict=True):
        assert (old[:, 1:] == new[:, 1:]).all()
        assert (old[:, 0] != new[:, 0]).any((0, 2, 3)).nonzero()[0].tolist() == [4]


@pytest.mark.parametrize("is_symbolic", [False, True])
def test_programs_are_exported(params: Any, is_symbolic: bool) -> None:
    """A stored program takes and gives back caches and what is generated, of any batch."""

    @jax.jit
    def run(params: Any, cache: Cache, tokens: jax.Array) -> Any:
        logits, cache = prefill(params, QWEN3, cache, tokens)
        last = jnp.full_like(tokens[:, 0], tokens.shape[1])
        found = decode_step(params, QWEN3, cache, logits.argmax(1), last)
        drawn = sample(logits, tokens[:, 0], top_k=3)
        return *found, drawn, generate(params, QWEN3, tokens, max_new_tokens=3, temperature=1)

    arrays = params, init_cache(QWEN3, 2, LENGTH, dtype="float32"), jnp.ones((2, 4), jnp.int32)
    given: Any = arrays
    if is_symbolic:
        (b,) = jax.export.symbolic_shape("b")
        keys = jax.ShapeDtypeStruct((2, b, *arrays[1].keys.shape[2:]), "float32")
        given = params, Cache(keys, keys), jax.ShapeDtypeStruct((b, 4), jnp.int32)
    stored = jax.export.export(run, disabled_checks=checks())(*given).serialize()
    found, wanted = jax.export.deserialize(stored).call(*arrays), run(*arrays)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_a_cache_is_updated_in_place(params: Any) -> None:
    cache = caches(QWEN3, 1)
    _, after = prefill(params, QWEN3, cache, [[1, 2]])
    assert cache.keys.is_deleted()
    with pytest.raises(ValueError, match="cache was donated to an earlier call"):
        decode_step(params, QWEN3, cache, [1], [2])
    step = jax.jit(
        lambda cache: decode_step(params, QWEN3, cache, jnp.ones(1, int), jnp.full(1, 2))[1],
        donate_argnums=0,
    )
    compiled = step.lower(after).compile()
    # Nothing in the program copies a cache.
    shape = ",".join(map(str, after.keys.shape))
    assert f"[{shape}]" in compiled.as_text()
    copies = [line for line in compiled.as_text().splitlines() if f"[{shape}]" in line]
    assert not [line for line in copies if " copy(" in line]


GIVEN: dict[str, Any] = {"max_new_tokens": 2}
ERRORS: list[tuple[Any, str]] = [
    (lambda p, c: prefill(p, QWEN3, c, [[1, 61]]), "tokens has 61; it must be 0 to 60, the voca"),
    (lambda p, c: prefill(p, QWEN3, c, [[1] * 13]), "tokens has 13 columns; it must be 1 to 12"),
    (lambda p, c: prefill(p, QWEN3, c, [1]), r"tokens has shape \(1,\); it must have two axes"),
    (lambda p, c: prefill(p, QWEN3, c, [[1.0]]), "tokens has dtype float32; it must be integers"),
    (lambda p, c: prefill(p, QWEN3, c, [[1, 2]], [3]), "lengths has 3; it must be 1 to 2"),
    (lambda p, c: decode_step(p, QWEN3, c, [-1], [0]), "tokens has -1; it must be 0 to 60"),
    (lambda p, c: decode_step(p, QWEN3, c, [1], [12]), "positions has 12; it must be 0 to 11"),
    (lambda p, c: decode_step(p, QWEN3, c, [1, 2], [0, 0]), r"cache.keys has shape .*\(2, 2, S"),
    (
        lambda p, c: decode_step(p, QWEN3, Cache(c.keys, c.values[:1]), [1], [0]),
        "cache.values has shape",
    ),
    (
        lambda p, c: decode_step(p, QWEN3, caches(QWEN3, 1, "bfloat16"), [1], [0]),
        "cache.keys has dtype bfloat16; it must be float32, that of the embedding",
    ),
    (lambda p, c: prefill({**p, "x": 1}, QWEN3, c, [[1]]), "params has .*, x; of this config"),
    (
        lambda p, c: prefill({**p, "norm": jnp.ones(3)}, QWEN3, c, [[1]]),
        r'params\["norm"\] has shape \(3,\); it must be \(32,\)',
    ),
    (lambda p, c: prefill(p, SMALL, c, [[1]]), r'params\["layers"\] has .*k_norm.* must have'),
    (
        lambda p, c: prefill(jax.tree.map(lambda x: x.astype(int), p), QWEN3, c, [[1]]),
        "has dtype int32; it must be bfloat16, float16 or float32",
    ),
    (lambda p, c: generate(p, QWEN3, [[1], []], **GIVEN), r"prompts\[1\] has shape \(0,\); it mus"),
    (lambda p, c: generate(p, QWEN3, ["a cat"], **GIVEN), r"prompts\[0\] has shape \(\); it must"),
    (lambda p, c: generate(p, QWEN3, [[1.5]], **GIVEN), r"prompts\[0\] has dtype float64; it must"),
    (lambda p, c: generate(p, QWEN3, [[1]], stop_tokens=2, **GIVEN), "stop_tokens has shape"),
    (lambda p, c: generate(p, QWEN3, [[1]], stop_tokens=[1.5], **GIVEN), "stop_tokens has dtype f"),
    (
        lambda p, c: generate(p, QWEN3, [[1]], stop_tokens=["cat"], **GIVEN),
        "stop_tokens is of type",
    ),
    (lambda p, c: generate(p, QWEN3, [], **GIVEN), "prompts is empty"),
    (
        lambda p, c: generate(p, QWEN3, np.zeros((0, 2), int), **GIVEN),
        r"prompts has shape \(0, 2\);",
    ),
    (
        lambda p, c: generate(p, QWEN3, [[1, [2]]], **GIVEN),
        "prompts has lists of other lists; it m",
    ),
    (lambda p, c: generate(None, QWEN3, [[1]], **GIVEN), "params is of type NoneType; it must be"),
    (lambda p, c: generate(p, {}, [[1]], **GIVEN), "config is of type dict; it must be a Decoder"),
    (lambda p, c: decode_step(p, QWEN3, None, [1], [0]), "cache is of type NoneType; init_cache"),
    (lambda p, c: generate(p, QWEN3, [[99]], **GIVEN), "prompts has 99; it must be 0 to 60"),
    (lambda p, c: generate(p, QWEN3, [[1]], max_new_tokens=0), "max_new_tokens is 0; it must be a"),
    (lambda p, c: generate(p, QWEN3, [[1]], max_new_tokens=1.5), "max_new_tokens is 1.5"),
    (lambda p, c: generate(p, QWEN3, [[1]], seeds=[1, 2], **GIVEN), "seeds has shape"),
    (lambda p, c: generate(p, QWEN3, [[1]], stop_tokens=[61], **GIVEN), "stop_tokens has 61"),
    (lambda p, c: generate(p, QWEN3, [[1]], prompt_lengths=[1], **GIVEN), "prompt_lengths is"),
    (
        lambda p, c: jax.jit(lambda t: generate(p, QWEN3, t, on_tokens=print, **GIVEN))(
            jnp.ones((1, 1), int)
        ),
        "prompts is traced and on_tokens is given",
    ),
    (lambda p, c: sample(jnp.ones(3), [0]), r"logits has shape \(3,\); it must be \[B, V\]"),
    (lambda p, c: sample(jnp.ones((1, 3)), [0, 1]), "seeds has shape"),
    (lambda p, c: sample(jnp.ones((1, 0)), [0]), r"logits has shape \(1, 0\); it must be \[B, V\]"),
    (lambda p, c: sample(jnp.ones((1, 3)), 0, [0]), r"seeds has shape \(\); it must be \(1,\)"),
    (
        lambda p, c: sample(jnp.ones((1, 3)), [0], [0, 1]),
        r"steps has shape \(2,\); it must be \(1,\)",
    ),
    (lambda p, c: sample(jnp.ones((1, 3)), [0.5]), "seeds has dtype float32; it must be integers"),
    (lambda p, c: sample(jnp.ones((1, 3)), [0], temperature=None), "temperature is None; it must"),
    (
        lambda p, c: jax.jit(lambda t: sample(jnp.ones((2, 3)), [0, 1], temperature=t))(
            jnp.ones(2)
        ),
        r"temperature is traced, of shape \(2,\) and dtype float32; it must be a scalar",
    ),
    (lambda p, c: sample(jnp.ones((1, 3)), [0], temperature=-1), "temperature is -1; it must be f"),
    (lambda p, c: sample(jnp.ones((1, 3)), [0], top_k=0), "top_k is 0; it must be a whole"),
    (lambda p, c: sample(jnp.ones((1, 3)), [0], top_k="a"), "top_k is 'a'; it must be a number"),
    (lambda p, c: sample(jnp.ones((1, 3)), [0], top_p=0.0), "top_p is 0.0; it must be above 0"),
    (lambda p, c: sample(jnp.ones((1, 3)), [0], min_p=1.5), "min_p is 1.5; it must be 0 to 1"),
    (lambda p, c: init_params(QWEN3, dtype="int8"), "dtype is 'int8'; it must be bfloat16"),
    (lambda p, c: init_params(QWEN3, dtype=jnp.ones(2)), "dtype is Array.*; it must be bfloat16"),
    (lambda p, c: init_cache(QWEN3, 1.5, 8), "batch is 1.5; it must be an integer"),
    (lambda p, c: init_cache(QWEN3, 0, 8), "batch is 0; it must be at least 1"),
    (lambda p, c: init_cache(QWEN3, 1, [8]), r"length is \[8\]; it must be an integer"),
    (lambda p, c: init_cache(QWEN3, 1, -8), "length is -8; it must be at least 1"),
    (lambda p, c: init_cache(QWEN3, 1, 8, dtype="int8"), "dtype is 'int8'; it must be bfloat16"),
    (lambda p, c: init_cache(None, 1, 8), "config is of type NoneType; it must be a DecoderConfig"),
    (lambda p, c: sample(jnp.ones((1, 3)), [2**40]), "seeds has an integer that int32 does not"),
]


@pytest.mark.parametrize(("call", "message"), ERRORS, ids=[message[:40] for _, message in ERRORS])
def test_errors(params: Any, call: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call(params, caches(QWEN3, 1))


HUGGING_FACE = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "attention_bias": False,
}
LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
WINDOWS = {"use_sliding_window": True, "sliding_window": 512}


def test_configs_of_hugging_face() -> None:
    def read(**changes: Any) -> DecoderConfig:
        return DecoderConfig.from_hugging_face(HUGGING_FACE | changes)

    right = DecoderConfig(
        28, 1024, 16, 8, 128, 3072, 151936, qk_norm=True, tied_head=True, rope_base=1e6
    )
    assert read() == right
    # As Transformers 5 writes it.
    parameters = {"rope_theta": 1e6, "rope_type": "default"}
    new = {**HUGGING_FACE, "rope_parameters": parameters}
    del new["rope_theta"], new["rope_scaling"]
    assert DecoderConfig.from_hugging_face(new) == right
    assert read(rope_scaling=YARN).rope_scaling == YarnScaling(4.0, 32768)
    assert read(head_dim=None, model_type="qwen2") == dataclasses.replace(
        right, qk_norm=False, qkv_bias=True, head_dim=64
    )
    llama = read(model_type="llama", rope_scaling=LLAMA3, max_position_embeddings=8192, **WINDOWS)
    assert llama.rope_scaling == Llama3Scaling(32.0, 1.0, 4.0, 8192)
    assert llama.window is None
    assert read(model_type="mistral", sliding_window=4096).window == 4096
    assert read(sliding_window=4096).window is None
    assert read(max_window_layers=0, **WINDOWS).window == 512
    assert read(max_window_layers=28, **WINDOWS).window is None
    assert read(layer_types=["sliding_attention"] * 28, **WINDOWS).window == 512


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma3"}, "model_type is 'gemma3'; it must be one of llama, mistral, qw"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; no value but 'silu' is supported"),
        ({"attention_bias": True}, "attention_bias is True; no value but False"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is"),
        ({"hidden_size": None}, "config lacks hidden_size; config.json of qwen3 must have it"),
        ({"num_attention_heads": 12}, "heads is 12; it must be a multiple of 8"),
        ({"head_dim": 264}, "head_dim is 264; it must be at most 256"),
        ({"num_hidden_layers": "2"}, "layers is '2'; it must be an integer"),
        ({"vocab_size": 0}, "config lacks vocab_size|vocab_size is 0; it must be at least 1"),
        ({"rope_scaling": {"type": "dynamic"}}, "rope_type is 'dynamic'; it must be default"),
        ({"rope_scaling": {**YARN, "mscale": 1}}, "or yarn without mscale"),
        ({"rope_scaling": {"rope_type": "linear"}}, "RoPE's parameters lack factor; linear must"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({**WINDOWS, "max_window_layers": 20}, "20 of 28 layers have full attention"),
    ],
    ids=str,
)
def test_configs_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        DecoderConfig.from_hugging_face(HUGGING_FACE | changes)
