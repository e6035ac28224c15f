"""RMSNorm of heads and their rotation, against XLA's derivative of the formulas in float64."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import ulp

import pallas_bridge
from pallas_bridge import qk_norm_rope


def plain(
    q: Any, k: Any, q_weight: Any, k_weight: Any, positions: Any, pairs: int, interleaved: bool
) -> Any:
    """The formulas; in the dtype of what is given."""

    def one(x: Any, weight: Any) -> Any:
        x = x * weight / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
        angle = positions[..., None, None] * 10000.0 ** (-np.arange(pairs) / pairs)
        columns = np.arange(2 * pairs).reshape(*((pairs, 2) if interleaved else (2, pairs)))
        first, second = columns.T if interleaved else columns
        a, b = x[..., first], x[..., second]
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        x = x.at[..., first].set(a * cos - b * sin)
        return x.at[..., second].set(b * cos + a * sin)

    return one(q, q_weight), one(k, k_weight)


def arrays(
    rng: np.random.Generator, dtype: str, heads: tuple[int, int], columns: int
) -> tuple[list[jax.Array], tuple[jax.Array, jax.Array]]:
    """q, k and weights, and cotangents."""
    shapes = [(2, 6, count, columns) for count in heads]
    q, k, dq, dk = (jnp.asarray(rng.normal(size=shape), dtype) for shape in (*shapes, *shapes))
    weights = [jnp.asarray(rng.normal(1, 0.2, columns), jnp.float32) for _ in range(2)]
    return [q, k, *weights], (dq, dk)


# Heads of q and k, columns, pairs and whether these are interleaved: what kernels take, several
# turns of a warp, columns that are copied, lanes that have none, and what they don't take.
FORMS = [
    ((4, 2), 16, 8, False),
    ((14, 2), 64, 32, False),
    ((5, 3), 96, 16, True),
    ((3, 1), 96, 24, False),
    ((9, 1), 128, 64, True),
    ((2, 2), 256, 128, False),
    ((2, 1), 20, 6, True),
]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_and_gradients(rng: np.random.Generator, dtype: str, form: Any) -> None:
    heads, columns, pairs, interleaved = form
    given, cotangents = arrays(rng, dtype, heads, columns)
    # A row for all of a batch, or one each.
    positions = rng.integers(0, 10**6, (2, 6) if pairs % 16 == 0 else 6)
    options: dict[str, Any] = {"rotary_dim": 2 * pairs, "interleaved": interleaved}

    def f(implementation: Any) -> Any:
        def both(*arrays: Any) -> Any:
            return qk_norm_rope(
                *arrays, positions=positions, implementation=implementation, **options
            )

        def run(*arrays: Any) -> Any:
            values, vjp = jax.vjp(both, *arrays)
            return *values, *vjp(cotangents)

        return jax.jit(run)(*given)

    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(one).astype(np.float64)) for one in given]
        of_y = tuple(jnp.asarray(np.asarray(one).astype(np.float64)) for one in cotangents)

        # As one program: op by op each would be compiled by itself.
        @jax.jit
        def exact(*arrays: Any) -> Any:
            values, vjp = jax.vjp(
                lambda *arrays: plain(*arrays, np.float64(positions), pairs, interleaved), *arrays
            )
            return *values, *vjp(of_y)

        expected = [np.asarray(one) for one in exact(*wide)]
    for implementation in (None, "reference"):
        for one, right in zip(f(implementation), expected, strict=True):
            # Two roundings to the dtype, of numbers as large as the largest of a row, or summed.
            size = np.abs(right).max() * (1 if right.ndim > 1 else 3)
            assert np.abs(np.asarray(one).astype(np.float64) - right).max() <= 4 * ulp(size, dtype)
            assert one.dtype == (dtype if right.ndim > 1 else jnp.float32)


def test_a_head_has_the_same_bits_wherever_it_is(rng: np.random.Generator) -> None:
    given, cotangents = arrays(rng, "bfloat16", (14, 2), 64)
    positions = jnp.zeros((2, 6), jnp.int32)

    @jax.jit
    def f(q: Any, k: Any, weights: Any, dy: Any, positions: Any) -> Any:
        values, vjp = jax.vjp(lambda q, k: qk_norm_rope(q, k, *weights, positions=positions), q, k)
        return *values, *vjp(dy)

    q, k, *weights = given
    whole = f(q, k, weights, cotangents, positions)
    part = f(
        q[1:, 3:5], k[1:, 3:5], weights, tuple(x[1:, 3:5] for x in cotangents), positions[1:, :2]
    )
    for one, of_part in zip(whole, part, strict=True):
        assert (np.asarray(one[1:, 3:5]) == np.asarray(of_part)).all()
    # Heads of q, too, among fewer and in another place.
    fewer = f(q[:, :, 7:9], k, weights, (cotangents[0][:, :, 7:9], cotangents[1]), positions)
    for index in (0, 2):
        assert (np.asarray(whole[index][:, :, 7:9]) == np.asarray(fewer[index])).all()


def test_heads_beyond_f32_are_normalised(rng: np.random.Generator) -> None:
    """Squares that f32 cannot hold, and one row that is not finite."""
    given, _ = arrays(rng, "bfloat16", (4, 2), 64)
    q, k, *weights = given
    scale = jnp.asarray([1e-25, 1e25, 1.0, 1.0], jnp.float32)[:, None]
    found, of_k = qk_norm_rope((q * scale).astype(q.dtype), k, *weights, eps=0.0)
    right, _ = qk_norm_rope(q, k, *weights, eps=0.0)
    error = np.abs(np.asarray(found, np.float64) - np.asarray(right, np.float64)).max()
    assert error <= 0.05 and np.isfinite(np.asarray(of_k, np.float64)).all()
    spoiled = q.at[1, 2, 3, 5].set(jnp.nan)
    found, _ = qk_norm_rope(spoiled, k, *weights, eps=0.0)
    is_nan = np.isnan(np.asarray(found, np.float64))
    assert is_nan[1, 2, 3].all() and is_nan.sum() == 64


def test_modes_and_transformations(rng: np.random.Generator) -> None:
    given, (dq, dk) = arrays(rng, "float32", (4, 2), 64)
    q, k, q_weight, k_weight = given

    def f(implementation: Any) -> Any:
        def run(q: Any, k: Any, q_weight: Any, k_weight: Any) -> Any:
            def both(*arrays: Any) -> Any:
                return qk_norm_rope(*arrays, implementation=implementation)

            def sum_k(*arrays: Any) -> Any:
                return (both(*arrays)[1] * dk).sum()

            def loss(q: Any, q_weight: Any) -> Any:
                return (both(q, k, q_weight, k_weight)[0] * dq).sum()

            one = jax.grad(sum_k, (0, 1, 3))(q, k, q_weight, k_weight)
            moved = jax.jvp(both, (q, k, q_weight, k_weight), (dq, dk, k_weight, q_weight))
            mapped = jax.vmap(jax.grad(lambda q, w: (both(q, k[0], w, k_weight)[0] ** 3).sum(), 1))
            several = jnp.stack([q_weight, k_weight])
            return one, moved, mapped(q, several), jax.grad(loss, 1)(q, q_weight)

        return jax.jit(run)(q, k, q_weight, k_weight)

    found, right = f(None), f("reference")
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-4 * np.abs(other).max() + 1e-6)


@pytest.mark.only("cpu", "asks nothing of a platform but its name")
@pytest.mark.parametrize("implementation", [None, "custom_call"])
def test_a_program_has_one_call_where_there_is_a_kernel(implementation: Any) -> None:
    library = pallas_bridge.info().library
    assert library is not None
    q, k, weight = jnp.ones((2, 6, 4, 64)), jnp.ones((2, 6, 2, 64)), jnp.ones(64)

    def f(q: Any, k: Any) -> Any:
        return qk_norm_rope(q, k, weight, weight, implementation=implementation)

    def targets(*platforms: str) -> set[str]:
        program = jax.jit(f).trace(q, k).lower(lowering_platforms=platforms).as_text()
        return set(re.findall(r"xentile_\w+", program))

    one, two = {"xentile_qk_norm_rope_forward"}, {"xentile_rms_norm_forward", "xentile_rope"}
    assert targets("cpu") == two
    if "cuda" in library.platforms:
        assert targets("cuda") == one and targets("cpu", "cuda") == one | two


def test_what_is_wrong_is_said_by_its_name() -> None:
    q, weight = jnp.ones((5, 3, 8)), jnp.ones(8)
    for keywords, error, message in [
        ({"k": jnp.ones((5, 1, 6))}, ValueError, "k has shape (5, 1, 6) and q (5, 3, 8)"),
        ({"k_weight": jnp.ones(6)}, ValueError, "k_weight has shape (6,) and k (5, 1, 8)"),
        ({"eps": -1}, ValueError, "eps is -1.0; it must be finite and at least 0"),
        ({"rotary_dim": 5}, ValueError, "rotary_dim is 5; it must be even"),
        ({"implementation": "pallas"}, ValueError, "rope: implementation is 'pallas'"),
    ]:
        given: dict[str, Any] = {"k": q[:, :1], "q_weight": weight, "k_weight": weight}
        with pytest.raises(error, match=re.escape(message)):
            qk_norm_rope(q, **{**given, **keywords})
