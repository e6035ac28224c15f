"""Kernels of a step for CPUs, against XLA's program of the same step."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pallas_bridge._src.generation import cpu_kernels, model
from pallas_bridge.generation import Cache, DecoderConfig, init_cache
from test_generation import CONFIGS, SMALL, draw_params

import pallas_bridge

pytestmark = pytest.mark.only("cpu", "the kernels are for CPUs")
DTYPES = ["float32", "bfloat16", "float16"]
LENGTH = 12


@pytest.mark.parametrize("dtype", DTYPES)
def test_products(rng: np.random.Generator, dtype: str) -> None:
    x = jnp.asarray(rng.normal(size=(3, 1, 40)), dtype)
    weights = jnp.asarray(rng.normal(size=(2, 50, 40)), dtype)
    for result in (None, "float32"):
        by_kernel, by_xla = (
            jax.jit(partial(cpu_kernels.linear, dtype=result, by_kernel=flag))(x, weights, 1)
            for flag in (True, False)
        )
        assert by_kernel.dtype == by_xla.dtype == (result or dtype)
        exact = np.asarray(x, np.float64) @ np.asarray(weights[1], np.float64).T
        error = np.abs(np.asarray(by_kernel, np.float64) - exact).max()
        assert error <= 20 * max(jnp.finfo(by_kernel.dtype).eps, 1e-6)


def test_a_layer_that_is_not_there_is_refused() -> None:
    x, weights = jnp.ones((1, 8)), jnp.ones((2, 4, 8))
    with pytest.raises(Exception, match="`layer` is 2; it must be below 2"):
        jax.jit(partial(cpu_kernels.linear, by_kernel=True))(x, weights, 2).block_until_ready()


def step(params: Any, config: DecoderConfig, cache: Cache, on_cpu: bool, *rows: Any) -> Any:
    cache = jax.tree.map(jnp.copy, cache)
    return model._decode_step(params, config, cache, *map(jnp.array, rows), False, on_cpu)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", CONFIGS)
def test_steps_are_those_of_xla(rng: np.random.Generator, name: str) -> None:
    config = CONFIGS[name]
    params = draw_params(rng, config)
    shape = init_cache(config, 3, LENGTH, dtype="float32").keys.shape
    cache = Cache(*(jnp.asarray(rng.normal(size=shape), "float32") for _ in range(2)))
    # The second sequence has no room, and the third no token.
    rows = [5, 7, -1], [LENGTH - 1, LENGTH, 3]
    found, expected = (step(params, config, cache, flag, *rows) for flag in (True, False))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-4)
    logits, appended = found
    assert np.isnan(logits[1:]).all() and not np.isnan(logits[0]).any()
    changed = np.argwhere((np.asarray(appended.keys) != np.asarray(cache.keys)).any((3, 4)))
    assert changed.tolist() == [[layer, 0, LENGTH - 1] for layer in range(config.layers)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_prompts_are_those_of_xla(rng: np.random.Generator, dtype: str) -> None:
    config = dataclasses.replace(SMALL, window=4)
    params = draw_params(rng, config, dtype)
    tokens, lengths = jnp.asarray(rng.integers(0, 61, (2, 7))), jnp.array([7, 4])
    (found, cache), (expected, other) = (
        model._prefill(
            params, config, init_cache(config, 2, LENGTH, dtype=dtype), tokens, lengths, flag
        )
        for flag in (True, False)
    )
    bound = {"float32": 1e-4, "bfloat16": 0.2, "float16": 0.02}[dtype]
    np.testing.assert_allclose(found, expected, atol=bound)
    for one, wanted in zip(cache, other, strict=True):
        np.testing.assert_allclose(
            np.asarray(one, np.float32), np.asarray(wanted, np.float32), atol=bound
        )


def test_a_step_neither_copies_nor_converts_its_cache() -> None:
    params = jax.eval_shape(lambda: model_params("bfloat16"))
    cache = jax.eval_shape(lambda: init_cache(SMALL, 1, LENGTH))
    rows = jax.ShapeDtypeStruct((1,), jnp.int32)
    lowered = model._decode_step.lower(params, SMALL, cache, rows, rows, False, True)
    text = lowered.compile().as_text()
    shape = ",".join(map(str, cache.keys.shape))
    lines = [line for line in text.splitlines() if f"[{shape}]" in line.split(" = ")[-1][:60]]
    assert any("xentile_kv_cache_append" in line for line in text.splitlines())
    assert lines and not any(" copy(" in line or " convert(" in line for line in lines)


def model_params(dtype: str) -> Any:
    return draw_params(np.random.default_rng(0), SMALL, dtype)


def test_info_says_how_a_step_runs() -> None:
    details = pallas_bridge.info().details()
    assert "generation on cpu: kernels that read the cache once, and weights of up to 8" in details
    assert "generation on cuda: XLA's products" in details or "Qwen3-0.6B" in details
