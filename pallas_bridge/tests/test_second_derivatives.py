"""Second derivatives: dropped ones cost nothing, those that are used are right or refused."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from operations import CASES, Case, one_an_implementation, one_an_operation

# Rotations are linear in all but their tables.
CELLS = [pytest.param(one, id=one.name) for one in CASES if one.has_gradient]
CURVED = one_an_operation(one for one in CELLS if not one.values[0].name.startswith("rope"))
# What an error names, by how names of cases begin.
OPERATIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("cross_entropy", "optax"), ("cross_entropy",)),
    **dict.fromkeys(("gelu", "squared_relu", "swiglu", "geglu", "reglu"), ("activation",)),
    **{name: (name,) for name in ("linear_cross_entropy", "flash_attention")},
    **{name: (name,) for name in ("rms_norm", "layer_norm")},
    "gated_mlp": ("activation", "rms_norm"),
    # Composed of both.
    "qk_norm_rope": ("rms_norm", "rope"),
}


def problem(case: Case, rng: np.random.Generator) -> tuple[Callable[[jax.Array], jax.Array], Any]:
    """A scalar function of the first array."""
    first, *others = case.arrays(rng)
    return lambda x: case.value(x, *others), first


@pytest.mark.parametrize("case", one_an_implementation(CELLS))
def test_an_inner_gradient_that_is_held_constant(rng: np.random.Generator, case: Case) -> None:
    function, x = problem(case, rng)

    def first_order(x: jax.Array) -> jax.Array:
        return function(x) + jax.lax.stop_gradient(jax.grad(function)(x)).sum()

    def along(x: jax.Array) -> jax.Array:
        tangent: jax.Array = jax.jvp(first_order, (x,), (jax.numpy.ones_like(x),))[1]
        return tangent

    expected, found, tangent = jax.jit(
        lambda x: (jax.grad(function)(x), jax.grad(first_order)(x), along(x))
    )(x)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    total = np.asarray(expected, np.float64).sum()
    scale = np.abs(np.asarray(expected)).sum()
    np.testing.assert_allclose(tangent, total, atol=1e-4 * max(scale, 1))


@pytest.mark.parametrize("case", CURVED)
def test_those_that_are_used_are_right_or_refused(rng: np.random.Generator, case: Case) -> None:
    first, *others = case.arrays(rng)
    ones = jax.numpy.ones_like(first)

    def seconds(**options: Any) -> list[Callable[[jax.Array], jax.Array]]:
        def function(x: jax.Array) -> jax.Array:
            return case.value(x, *others, **options)

        gradient = jax.grad(function)
        return [
            lambda x: jax.grad(lambda x: (gradient(x) ** 2).sum())(x),
            lambda x: jax.jvp(gradient, (x,), (ones,))[1],
            lambda x: jax.jvp(lambda x: jax.jvp(function, (x,), (ones,))[1], (x,), (ones,))[1],
        ]

    # Gate and up in two arrays are XLA's own program already.
    plain = {} if case.name == "swiglu of two arrays" else {"implementation": "reference"}
    for second, right in zip(seconds(), seconds(**plain), strict=True):
        for run in (second, jax.jit(second)):
            try:
                found = run(first)
            except NotImplementedError as error:
                of_case = [OPERATIONS[one] for one in OPERATIONS if case.name.startswith(one)]
                (names,) = of_case or [(case.name.split()[0],)]
                assert str(error).startswith(tuple(f"{one}: second derivatives " for one in names))
                assert "reference" in str(error)
            else:
                expected = np.asarray(jax.jit(right)(first), np.float64)
                scale = max(np.abs(expected).max(), 1)
                np.testing.assert_allclose(np.asarray(found), expected, atol=2e-4 * scale)
