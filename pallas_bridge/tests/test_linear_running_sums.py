"""Microbatches: value and gradients with dweight added to running sums, against float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import Oracle

from pallas_bridge import linear_cross_entropy_value_and_grad

SEED = int(np.random.SeedSequence().generate_state(1)[0])
print(f"seed {SEED}")
# How far gradients' norms may be off: what is an operand is rounded once.
LIMITS = {"float32": 2e-6, "bfloat16": 4e-3, "float16": 1e-3}


def _microbatches(rng: np.random.Generator, shape: tuple[int, int, int], dtypes: Any) -> Any:
    tokens, width, vocab = shape
    hidden, weight = (
        jnp.asarray(rng.standard_normal(size), dtype)
        for size, dtype in zip(((3, tokens, width), (vocab, width)), dtypes, strict=True)
    )
    labels = jnp.asarray(rng.integers(0, vocab, (3, tokens)), jnp.int32).at[:, 0].set(-100)
    return hidden, weight, labels


@pytest.mark.parametrize(("vocab_axis", "temperature"), [(0, 1.0), (1, 1.0), (0, 0.7)])
@pytest.mark.parametrize(
    "dtypes",
    [
        ("float32", "float32"),
        ("bfloat16", "bfloat16"),
        ("bfloat16", "float32"),
        ("float32", "bfloat16"),
        ("float16", "float32"),
    ],
)
def test_sums_are_those_of_all_microbatches(
    dtypes: tuple[str, str], vocab_axis: int, temperature: float
) -> None:
    rng = np.random.default_rng(SEED)
    hidden, weight, labels = _microbatches(rng, (40, 24, 320), dtypes)
    bias = jnp.asarray(rng.standard_normal(320), jnp.float32)

    def step(sums: jax.Array, batch: tuple[jax.Array, jax.Array]) -> Any:
        matrix = weight if vocab_axis == 0 else weight.T
        loss, (dhidden, sums, dbias) = linear_cross_entropy_value_and_grad(
            batch[0],
            matrix,
            batch[1],
            dweight_sums=sums,
            bias=bias,
            vocab_axis=vocab_axis,
            temperature=temperature,
            reduction="sum",
        )
        return sums, (loss, dhidden, dbias)

    start = jnp.full((320, 24) if vocab_axis == 0 else (24, 320), 0.5, jnp.float32)
    sums, (losses, dhidden, _) = jax.jit(lambda x: jax.lax.scan(step, x, (hidden, labels)))(start)
    assert sums.dtype == jnp.float32 and dhidden.dtype == hidden.dtype

    # Products take the narrower dtype.
    narrow = min(hidden.dtype, weight.dtype, key=lambda dtype: dtype.itemsize)
    h, w = (np.asarray(x.astype(narrow), np.float64) for x in (hidden, weight))
    expected = np.zeros((320, 24))
    for batch in range(3):
        logits = h[batch] @ w.T + np.asarray(bias, np.float64)
        oracle = Oracle(logits, np.asarray(labels[batch]), temperature=temperature)
        dz = oracle.gradient(np.ones(40))
        expected += dz.T @ h[batch]
        assert losses[batch] == pytest.approx(oracle.reduced(np.ones(40) * (dz.any(1))), rel=1e-5)
        _assert_near(dhidden[batch], dz @ w, str(narrow))
    found = np.asarray(sums, np.float64) - 0.5
    _assert_near(found if vocab_axis == 0 else found.T, expected, str(narrow))


def _assert_near(found: Any, expected: Any, dtype: str) -> None:
    error = np.linalg.norm(np.asarray(found, np.float64) - expected) / np.linalg.norm(expected)
    assert error < LIMITS[dtype], error


def test_sums_of_another_dtype_or_shape_are_refused() -> None:
    hidden, weight, labels = _microbatches(np.random.default_rng(1), (4, 8, 16), ("float32",) * 2)
    arrays = (hidden[0], weight, labels[0])
    with pytest.raises(TypeError, match="dweight_sums has dtype bfloat16; it must be float32"):
        linear_cross_entropy_value_and_grad(*arrays, dweight_sums=weight.astype(jnp.bfloat16))
    with pytest.raises(ValueError, match=r"shape \(8, 16\); it must be the shape of weight, which"):
        linear_cross_entropy_value_and_grad(*arrays, dweight_sums=weight.T)
    with pytest.raises(ValueError, match="reduction is 'none'"):
        linear_cross_entropy_value_and_grad(*arrays, dweight_sums=weight, reduction="none")
