"""Losses of any axes of tokens: outputs and gradients are those of the tokens in a row."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_bridge import (
    cross_entropy,
    cross_entropy_per_token,
    linear_cross_entropy,
    linear_cross_entropy_per_token,
)

AXES = [(), (1,), (5, 1), (1, 4), (2, 3)]
WIDTH, VOCAB, COLUMNS = 8, 67, 3
OUTPUTS: dict[str, Any] = {"return_lse": True, "return_entropy": True, "return_correct": True}
PER_TOKEN: dict[str, Callable[..., Any]] = {
    "cross_entropy": lambda x, w, y, **more: cross_entropy_per_token(x @ w.T, y, **more),
    "linear_cross_entropy": linear_cross_entropy_per_token,
}
REDUCED: dict[str, Callable[..., Any]] = {
    "cross_entropy": lambda x, w, y, **more: cross_entropy(x @ w.T, y, **more),
    "linear_cross_entropy": linear_cross_entropy,
}


def draw(rng: np.random.Generator, axes: tuple[int, ...]) -> tuple[jax.Array, ...]:
    """Returns hidden [.., WIDTH], weight [VOCAB, WIDTH], labels [..] and columns [.., COLUMNS]."""
    hidden = jnp.asarray(rng.normal(size=(*axes, WIDTH)), jnp.float32)
    weight = jnp.asarray(rng.normal(size=(VOCAB, WIDTH)), jnp.float32)
    labels = jnp.asarray(rng.integers(0, VOCAB, axes), jnp.int32)
    return hidden, weight, labels, jnp.asarray(rng.integers(0, VOCAB, (*axes, COLUMNS)), jnp.int32)


@pytest.mark.parametrize("implementation", [None, "reference"])
@pytest.mark.parametrize("has_outputs", [False, True])
@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize("loss", PER_TOKEN)
def test_outputs_have_the_axes_of_tokens(
    rng: np.random.Generator,
    loss: str,
    axes: tuple[int, ...],
    has_outputs: bool,
    implementation: Any,
) -> None:
    hidden, weight, labels, columns = draw(rng, axes)
    in_a_row = hidden.reshape(-1, WIDTH), labels.reshape(-1), columns.reshape(-1, COLUMNS)

    def per_token(x: jax.Array, y: jax.Array, c: jax.Array) -> Any:
        more = {**OUTPUTS, "columns": c} if has_outputs else {}

        def outputs(x: jax.Array) -> Any:
            return PER_TOKEN[loss](x, weight, y, implementation=implementation, **more)

        found, vjp = jax.vjp(lambda x: [one for one in outputs(x) if one.dtype != bool], x)
        return outputs(x), vjp([one.astype(jnp.float32) for one in found])[0]

    def reduced(x: jax.Array, y: jax.Array, c: jax.Array) -> Any:
        more = {**OUTPUTS, "columns": c} if has_outputs else {"return_lse": True}

        def value(x: jax.Array) -> Any:
            total, *others = REDUCED[loss](x, weight, y, implementation=implementation, **more)
            return total, others

        (total, others), gradient = jax.value_and_grad(value, has_aux=True)(x)
        assert total.shape == ()
        return (*others, total), gradient

    for function in (per_token, reduced):
        found, gradient = jax.jit(function)(hidden, labels, columns)
        expected, expected_gradient = jax.jit(function)(*in_a_row)
        assert gradient.shape == hidden.shape
        np.testing.assert_allclose(
            gradient.reshape(-1, WIDTH), expected_gradient, rtol=1e-5, atol=1e-5
        )
        for one, other in zip(found, expected, strict=True):
            of_token = other.shape[1:]
            assert one.shape == ((*axes, *of_token) if other.ndim else ())
            np.testing.assert_allclose(one.reshape(other.shape), other, rtol=1e-5, atol=1e-5)


@pytest.mark.devices(8)
@pytest.mark.parametrize("loss", REDUCED)
def test_a_token_without_axes_on_a_mesh(rng: np.random.Generator, loss: str) -> None:
    hidden, weight, labels, _ = draw(rng, ())
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))

    def value(x: jax.Array, w: jax.Array, y: jax.Array) -> jax.Array:
        return REDUCED[loss](x, w, y)

    expected = jax.value_and_grad(value, (0, 1))(hidden, weight, labels)
    placed = jax.device_put((hidden, weight, labels), NamedSharding(mesh, P()))
    found = jax.jit(jax.value_and_grad(value, (0, 1)))(*placed)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    many = draw(rng, (8,))
    spread = [jax.device_put(one, NamedSharding(mesh, P("a"))) for one in (many[0], many[2])]
    mapped = jax.jit(jax.vmap(value, (0, None, 0)))(spread[0], placed[1], spread[1])
    each = [value(x, weight, y) for x, y in zip(many[0], many[2], strict=True)]
    np.testing.assert_allclose(mapped, jnp.stack(each), rtol=1e-5, atol=1e-5)
