"""Causal convolution against NumPy in float64 and against the XLA reference."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import case

from pallas_bridge import causal_conv1d


def _of_segments(x: Any, weight: Any, bias: Any, state: Any, ids: Any, **options: Any) -> Any:
    return causal_conv1d(x, weight, bias, initial_state=state, segment_ids=ids, **options)


CASES = (
    case(
        "causal_conv1d",
        causal_conv1d,
        "x: B S F",
        "weight: F W",
        "bias: F",
        variants=({}, {"activation": "silu"}),
        extents={"W": 4},
        gathered="SF",
        whole="W",
    ),
    case(
        "causal_conv1d of segments with a state",
        _of_segments,
        "x: B S F",
        "weight: F W",
        "bias: F",
        "initial_state: B L F, optional",
        "segment_ids: B S < C, optional",
        variants=({}, {"activation": "silu"}),
        extents={"W": 3, "L": 2},
        gathered="SF",
        whole="WL",
    ),
)
ROUNDING = {"float32": 2e-5, "bfloat16": 4e-2, "float16": 5e-3}
FLAGS = [(False, False, False), (True, False, False), (True, True, False), (True, True, True)]


def draw(rng: np.random.Generator, *shape: int, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(rng.normal(size=shape), jnp.float32).astype(dtype)


def expected(x: Any, weight: Any, bias: Any, state: Any, ids: Any, silu: bool) -> np.ndarray:
    """The formula, token by token; arrays of one sequence."""
    (tokens, channels), width = x.shape, weight.shape[1]
    rows = np.concatenate([np.zeros((width - 1, channels)) if state is None else state, x])
    y = np.zeros((tokens, channels))
    for t in range(tokens):
        y[t] = 0 if bias is None else bias
        for k in range(width):
            if ids is not None and 0 < k <= t and ids[t - k] != ids[t - k + 1]:
                break
            y[t] += weight[:, width - 1 - k] * rows[t + width - 1 - k]
    return y / (1 + np.exp(-y)) if silu else y


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("flags", FLAGS)
def test_values_are_those_of_the_formula(activation: Any, width: int, flags: Any) -> None:
    rng = np.random.default_rng(width)
    has_bias, has_state, has_ids = flags
    x, weight = draw(rng, 21, 37), draw(rng, 37, width)
    bias = draw(rng, 37) if has_bias else None
    state = draw(rng, width - 1, 37) if has_state else None
    # An id that comes again is a segment of its own.
    ids = jnp.asarray(np.repeat([5, 2, 5, 3], [9, 1, 1, 10]), jnp.int32) if has_ids else None
    y = causal_conv1d(x, weight, bias, activation=activation, initial_state=state, segment_ids=ids)
    wide = [
        None if one is None else np.asarray(one, np.float64) for one in (x, weight, bias, state)
    ]
    right = expected(*wide, ids if ids is None else np.asarray(ids), activation == "silu")
    np.testing.assert_allclose(y, right, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [*ROUNDING])
@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("tokens", [0, 1, 2, 17, 130])
def test_kernels_agree_with_the_reference(tokens: int, flags: Any, dtype: str) -> None:
    rng = np.random.default_rng(tokens)
    has_bias, has_state, has_ids = flags
    arrays = [draw(rng, 2, tokens, 70, dtype=dtype), draw(rng, 70, 4, dtype=dtype)]
    arrays += [draw(rng, 70, dtype=dtype)] * has_bias
    arrays += [draw(rng, 2, 3, 70, dtype=dtype)] * has_state
    ids = np.sort(rng.integers(0, 4, (2, tokens)), -1) if has_ids else None
    dy = draw(rng, 2, tokens, 70, dtype=dtype)

    def run(implementation: Any, *given: jax.Array) -> Any:
        x, weight, *rest = given
        return causal_conv1d(
            x,
            weight,
            rest[0] if has_bias else None,
            activation="silu",
            initial_state=rest[-1] if has_state else None,
            segment_ids=None if ids is None else jnp.asarray(ids, jnp.int32),
            return_final_state=True,
            implementation=implementation,
        )

    @partial(jax.jit, static_argnums=0)
    def both(implementation: Any, *given: jax.Array) -> list[jax.Array]:
        results, vjp = jax.vjp(partial(run, implementation), *given)
        return [*results, *vjp((dy, jnp.ones_like(results[1])))]

    for one, other in zip(both(None, *arrays), both("reference", *arrays), strict=True):
        assert one.dtype == other.dtype
        close = {"rtol": ROUNDING[dtype], "atol": 3 * ROUNDING[dtype]}
        np.testing.assert_allclose(np.float32(one), np.float32(other), **close)


def test_a_state_continues_a_sequence() -> None:
    rng = np.random.default_rng(1)
    x, weight = draw(rng, 3, 40, 16), draw(rng, 16, 4)
    whole, last = causal_conv1d(x, weight, return_final_state=True)
    first, state = causal_conv1d(x[:, :2], weight, return_final_state=True)
    rest, end = causal_conv1d(x[:, 2:], weight, initial_state=state, return_final_state=True)
    np.testing.assert_array_equal(jnp.concatenate([first, rest], 1), whole)
    np.testing.assert_array_equal(end, last)


def test_vmap_of_weights_and_forward_mode() -> None:
    rng = np.random.default_rng(2)
    x, weights = draw(rng, 3, 40, 16), draw(rng, 3, 16, 4)

    def loss(x: Any, weight: Any) -> Any:
        return jnp.sin(causal_conv1d(x, weight, activation="silu")).sum()

    gradient = jax.jit(jax.grad(loss, (0, 1)))
    gradients = jax.vmap(gradient)(x, weights)
    for index in range(3):
        alone = gradient(x[index], weights[index])
        for one, other in zip(gradients, alone, strict=True):
            np.testing.assert_allclose(one[index], other, rtol=1e-5, atol=1e-5)
    _, slope = jax.jvp(jax.jit(loss), (x[0], weights[0]), (x[1], weights[1]))
    dx, dweight = gradient(x[0], weights[0])
    along = (dx * x[1]).sum() + (dweight * weights[1]).sum()
    np.testing.assert_allclose(slope, along, rtol=1e-4)


def test_wrong_arguments_are_named() -> None:
    x, weight = jnp.ones((2, 5, 8)), jnp.ones((8, 4))
    for word in (jnp.array(1), np.ones(2), ["silu"]):
        with pytest.raises(ValueError, match="it must be one of 'silu', or None"):
            causal_conv1d(x, weight, activation=word)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="activation is 'relu'"):
        causal_conv1d(x, weight, activation="relu")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="W from 2 to 4"):
        causal_conv1d(x, jnp.ones((8, 5)))
    with pytest.raises(ValueError, match="initial_state has shape"):
        causal_conv1d(x, weight, initial_state=jnp.ones((2, 2, 8)))
    with pytest.raises(TypeError, match="segment_ids has dtype"):
        causal_conv1d(x, weight, segment_ids=jnp.ones((2, 5)))
