"""The losses in optax's signatures, held against optax itself."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pallas_bridge.optax import softmax_cross_entropy_with_integer_labels as ours

theirs = optax.softmax_cross_entropy_with_integer_labels

# Logits' shape, axis, labels' shape.
SHAPES: list[tuple[tuple[int, ...], Any, tuple[int, ...]]] = [
    ((7,), -1, ()),
    ((7,), 0, ()),
    ((3, 7), -1, (3,)),
    ((7, 3), 0, (3,)),
    ((2, 7, 3), 1, (2, 3)),
    ((2, 3, 7), -1, (2, 3)),
    ((2, 3, 4, 5), (2, 3), (2, 3)),
    ((2, 3, 4, 5), (3, 0), (3, 4)),
    ((2, 3, 4), (-1, 0), (3,)),
    ((4, 5), (0, 1), ()),
    ((1, 3, 7), -1, (2, 3)),
    ((2, 3, 7), -1, (1, 3)),
]


def problem(
    rng: np.random.Generator, shape: tuple[int, ...], axis: Any, of_labels: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    axes = axis if isinstance(axis, tuple) else (axis,)
    vocab = int(np.prod([shape[one] for one in axes]))
    logits = rng.normal(scale=4, size=shape).astype(np.float32)
    # Some count from the end.
    return logits, rng.integers(-vocab, vocab, of_labels).astype(np.int32)


def both_modes(f: Any, logits: Any, rng: np.random.Generator) -> list[Any]:
    """The loss, its gradient under random cotangents, and a tangent, of one program each."""
    logits = jnp.asarray(logits)
    seed = np.random.default_rng(rng.integers(2**31))
    loss, pullback = jax.vjp(f, logits)
    (gradient,) = pullback(jnp.asarray(seed.normal(size=loss.shape), loss.dtype))
    along = jnp.asarray(seed.normal(size=logits.shape), logits.dtype)
    return [loss, gradient, jax.jvp(f, (logits,), (along,))[1]]


def compare(rng: np.random.Generator, logits: Any, labels: Any, axis: Any, where: Any) -> None:
    bits = rng.bit_generator.state
    results = []
    for f in (ours, theirs):
        rng.bit_generator.state = bits
        run = lambda x: f(x, jnp.asarray(labels), axis=axis, where=where)  # noqa: B023, E731
        results.append(both_modes(jax.jit(run), logits, rng))
    for got, right in zip(*results, strict=True):
        assert (got.shape, got.dtype) == (right.shape, right.dtype)
        wide = [np.asarray(one, np.float64) for one in (got, right)]
        tolerance = 2e-2 if got.dtype == jnp.bfloat16 else 2e-5
        np.testing.assert_allclose(*wide, rtol=tolerance, atol=tolerance)


@pytest.mark.few(2)
@pytest.mark.parametrize(("shape", "axis", "of_labels"), SHAPES, ids=str)
def test_any_axes(rng: np.random.Generator, shape: Any, axis: Any, of_labels: Any) -> None:
    compare(rng, *problem(rng, shape, axis, of_labels), axis, None)


@pytest.mark.few(1)
@pytest.mark.parametrize(("shape", "axis", "of_labels"), [SHAPES[i] for i in (2, 4, 5, 7)], ids=str)
def test_masks(rng: np.random.Generator, shape: Any, axis: Any, of_labels: Any) -> None:
    logits, labels = problem(rng, shape, axis, of_labels)
    of_tokens = jnp.asarray(rng.random(of_labels) < 0.5)
    compare(rng, logits, labels, axis, of_tokens)
    of_logits = rng.random(shape) < 0.6
    compare(rng, logits, labels, axis, jnp.asarray(of_logits))
    # One token has no logit at all.
    axes = tuple(one % len(shape) for one in (axis if isinstance(axis, tuple) else (axis,)))
    nothing = tuple(slice(None) if one in axes else 0 for one in range(len(shape)))
    of_logits[nothing] = False
    compare(rng, logits, labels, axis, jnp.asarray(of_logits))


def test_a_mask_that_is_broadcast(rng: np.random.Generator) -> None:
    logits, labels = problem(rng, (3, 7), -1, (3,))
    compare(rng, logits, labels, -1, jnp.asarray(rng.random((1, 7)) < 0.6).at[0, 0].set(True))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32"])
def test_dtypes_of_labels(rng: np.random.Generator, dtype: str) -> None:
    logits = rng.normal(size=(5, 300)).astype(np.float32)
    labels = np.array([0, 1, 100, 127, 5], dtype)
    right = theirs(jnp.asarray(logits), jnp.asarray(labels, jnp.int32))
    np.testing.assert_allclose(ours(logits, labels), right, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtypes_of_logits(rng: np.random.Generator, dtype: str) -> None:
    """The result has theirs, and is as close to float64 as one rounding of it."""
    logits, labels = problem(rng, (5, 67), -1, (5,))
    x = jnp.asarray(logits, dtype)
    got = ours(x, labels)
    assert got.dtype == theirs(x, jnp.asarray(labels)).dtype
    wide = np.asarray(x, np.float64)
    right = np.log(np.exp(wide).sum(-1)) - wide[np.arange(5), labels]
    np.testing.assert_allclose(
        np.asarray(got, np.float64), right, rtol=float(jnp.finfo(dtype).eps), atol=1e-5
    )


def test_a_label_out_of_range_is_not_a_number() -> None:
    logits = jnp.zeros((4, 3))
    loss = ours(logits, jnp.array([3, -4, -100, 2]))
    np.testing.assert_array_equal(np.isnan(loss), [True, True, True, False])


def test_vmap(rng: np.random.Generator) -> None:
    logits, labels = problem(rng, (2, 3, 7), -1, (2, 3))
    np.testing.assert_allclose(
        jax.vmap(ours)(logits, labels), theirs(jnp.asarray(logits), labels), rtol=1e-5, atol=1e-6
    )


def test_what_is_refused() -> None:
    logits, labels = jnp.zeros((2, 3)), jnp.zeros(2, int)
    for axis, message in (
        (2, "axis is 2; it must name different axes of logits, which have 2"),
        ((0, 0), "axis is .0, 0.; it must name"),
        ([0], "axis is .0.; it must be an int or a tuple"),
    ):
        with pytest.raises(ValueError, match=message):
            ours(logits, labels, axis=axis)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="labels have dtype float32"):
        ours(logits, jnp.zeros(2))
    with pytest.raises(TypeError, match="logits have dtype int32"):
        ours(jnp.zeros((2, 3), jnp.int32), labels)
    with pytest.raises(ValueError, match=r"labels have shape \(2, 3\); it must be \(2,\)"):
        ours(logits, jnp.zeros((2, 3), int))
