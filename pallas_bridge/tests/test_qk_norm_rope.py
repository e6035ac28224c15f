"""RMSNorm of heads and their rotation, against XLA's derivative of the formulas in float64."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import ulp

from pallas_bridge import qk_norm_rope


def plain(q: Any, k: Any, q_weight: Any, k_weight: Any, positions: Any) -> Any:
    """The formulas, of GPT-NeoX's pairs; in the dtype of what is given."""

    def one(x: Any, weight: Any) -> Any:
        x = x * weight / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
        half = x.shape[-1] // 2
        angle = positions[:, None, None] * 10000.0 ** (-np.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    return one(q, q_weight), one(k, k_weight)


@pytest.mark.parametrize("implementation", [None, "reference"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_and_gradients(rng: np.random.Generator, dtype: str, implementation: Any) -> None:
    q, dq = (jnp.asarray(rng.normal(size=(2, 6, 4, 16)), dtype) for _ in range(2))
    k, dk = (jnp.asarray(rng.normal(size=(2, 6, 2, 16)), dtype) for _ in range(2))
    weights = [jnp.asarray(rng.normal(1, 0.2, 16), jnp.float32) for _ in range(2)]
    positions = rng.integers(0, 10**6, 6)

    def f(*arrays: Any) -> Any:
        def both(*arrays: Any) -> Any:
            return qk_norm_rope(*arrays, positions=positions, implementation=implementation)

        values, pull = jax.vjp(both, *arrays)
        return *values, *pull((dq, dk))

    found = jax.jit(f)(q, k, *weights)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(one).astype(np.float64)) for one in (q, k, *weights)]
        values, pull = jax.vjp(lambda *arrays: plain(*arrays, np.float64(positions)), *wide)
        given = tuple(jnp.asarray(np.asarray(one).astype(np.float64)) for one in (dq, dk))
        expected = [np.asarray(one) for one in (*values, *pull(given))]
    for one, right in zip(found, expected, strict=True):
        # Two roundings to the dtype, each of numbers as large as the largest of a row, or summed.
        size = np.abs(right).max() * (1 if right.ndim > 1 else 3)
        assert np.abs(np.asarray(one).astype(np.float64) - right).max() <= 4 * ulp(size, dtype)
        assert one.dtype == (dtype if right.ndim > 1 else jnp.float32)


def test_what_is_wrong_is_said_by_its_name() -> None:
    q, weight = jnp.ones((5, 3, 8)), jnp.ones(8)
    for keywords, error, message in [
        ({"k": jnp.ones((5, 1, 6))}, ValueError, "k has shape (5, 1, 6) and q (5, 3, 8)"),
        ({"k_weight": jnp.ones(6)}, ValueError, "weight has shape (6,) and x (5, 1, 8)"),
        ({"eps": -1}, ValueError, "eps is -1.0; it must be finite and at least 0"),
        ({"rotary_dim": 5}, ValueError, "rotary_dim is 5; it must be even"),
        ({"implementation": "pallas"}, ValueError, "rope: implementation is 'pallas'"),
    ]:
        given: dict[str, Any] = {"k": q[:, :1], "q_weight": weight, "k_weight": weight}
        with pytest.raises(error, match=re.escape(message)):
            qk_norm_rope(q, **{**given, **keywords})
