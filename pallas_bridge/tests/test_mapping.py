"""`vmap` of every operation, over every subset of its operands, against a loop.

Maps are as long as the batch, so that an axis that is taken for another changes values and no
shape.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import combinations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from operations import CASES, EXTENTS, SHARED, Case, one_an_implementation

LENGTH = EXTENTS["B"]
DIFFERENTIABLE = [pytest.param(one, id=one.name) for one in CASES if one.has_gradient]
Subset = tuple[int, ...]


def subsets(case: Case) -> Iterator[Subset]:
    """Every subset of a case's operands but the empty one."""
    every = range(len(case.arguments))
    for count in range(1, len(every) + 1):
        yield from combinations(every, count)


def product() -> Iterator[Any]:
    """Every case and subset; but all operands, and an implementation's first alone, are nightly."""
    seen = {*SHARED}
    for case in CASES:
        operation, every = case.name.split(" ")[0], tuple(range(len(case.arguments)))
        usual = {every} | (set() if operation in seen else {(0,)})
        seen.add(operation)
        for subset in subsets(case):
            marks = () if subset in usual else (pytest.mark.nightly,)
            names = "+".join(case.arguments[index].name for index in subset)
            yield pytest.param(case, subset, id=f"{case.name}-{names}", marks=marks)


def everything(case: Case, arrays: Any, tangents: Any, cotangents: Any) -> Any:
    """Results, gradients for cotangents of them, and tangents of them."""
    if not case.has_gradient:
        return case.outputs(*arrays)
    moving = case.differentiable

    def function(*given: jax.Array) -> list[jax.Array]:
        every = [*arrays]
        for index, one in zip(moving, given, strict=True):
            every[index] = one
        return [one for one in case.outputs(*every) if one.dtype == jnp.float32]

    given = [arrays[index] for index in moving]
    outputs, vjp = jax.vjp(function, *given)
    of_outputs = jax.jvp(function, given, [tangents[index] for index in moving])[1]
    return outputs, vjp([*cotangents]), of_outputs


def numbers(rng: np.random.Generator, like: Any, *leading: int) -> Any:
    """Random arrays of the shapes of others, with more leading axes."""
    return jax.tree.map(
        lambda one: jnp.asarray(rng.normal(size=(*leading, *one.shape)), jnp.float32), like
    )


def list_output_types(case: Case, arrays: Any) -> Any:
    """The types of a case's results that have cotangents."""
    found = jax.eval_shape(case.outputs, *arrays)
    return [one for one in found if one.dtype == jnp.float32]


def assert_same(found: Any, expected: Any) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        exact = np.asarray(other, np.float64)
        scale = max(np.abs(exact).max(initial=0), 1)
        np.testing.assert_allclose(np.asarray(one, np.float64), exact, atol=2e-5 * scale, rtol=1e-5)


def looped(function: Callable[..., Any], length: int, axes: Any, *trees: Any) -> Any:
    """Returns the results of a function of each part along mapped axes, stacked.

    NumPy takes the parts and stacks the results: XLA would compile a program for each shape.
    """
    flat, tree = jax.tree.flatten(trees)
    parts = []
    for number in range(length):
        of_one = [
            one if axis is None else np.take(np.asarray(one), number, axis)
            for one, axis in zip(flat, axes, strict=True)
        ]
        parts.append(function(*jax.tree.unflatten(tree, of_one)))
    return jax.tree.map(lambda *ones: np.stack(ones), *parts)


@cache
def compiled(case: Case) -> Callable[..., Any]:
    """Returns `everything` of a case, one program for every subset of its operands."""
    return jax.jit(partial(everything, case))


@cache
def differentiated(case: Case) -> Callable[..., Any]:
    """Returns the value of a case and its gradients, one program for all tests."""
    return jax.jit(jax.value_and_grad(case.value, case.differentiable))


@pytest.mark.fixed
@pytest.mark.parametrize(("case", "subset"), [*product()])
def test_operands(rng: np.random.Generator, case: Case, subset: Subset) -> None:
    plain = case.arrays(rng)
    axes: list[int | None] = [None] * len(plain)
    arrays = [*plain]
    for index in subset:
        # At the front, at the end, and between: each operand at another place.
        axes[index] = index % (plain[index].ndim + 1)
        stacked = np.stack([case.arrays(rng)[index] for _ in range(LENGTH)])
        arrays[index] = np.moveaxis(stacked, 0, axes[index])
    tangents = numbers(rng, [*plain], LENGTH)
    cotangents = numbers(rng, list_output_types(case, plain), LENGTH)
    every = (*axes, *[0] * (len(tangents) + len(cotangents)))
    run = jax.jit(jax.vmap(partial(everything, case), in_axes=([*axes], 0, 0)))
    expected = looped(compiled(case), LENGTH, every, arrays, tangents, cotangents)
    assert_same(run(arrays, tangents, cotangents), expected)


@pytest.mark.fixed
@pytest.mark.parametrize("case", one_an_implementation(DIFFERENTIABLE))
def test_pullbacks_and_tangents_alone(rng: np.random.Generator, case: Case) -> None:
    arrays = case.arrays(rng)
    tangents = numbers(rng, [*arrays], LENGTH)
    cotangents = numbers(rng, list_output_types(case, arrays), LENGTH)
    mapped = jax.jit(jax.vmap(partial(everything, case, arrays)))(tangents, cotangents)
    axes = [0] * (len(tangents) + len(cotangents))
    function = partial(compiled(case), arrays)
    assert_same(mapped, looped(function, LENGTH, axes, tangents, cotangents))


@pytest.mark.fixed
@pytest.mark.parametrize("case", one_an_implementation(DIFFERENTIABLE))
def test_gradient_of_a_mapped_function(rng: np.random.Generator, case: Case) -> None:
    """Of maps within maps: the first operand in both, the others in one or none."""
    plain = case.arrays(rng)
    outer = [0, *[None] * (len(plain) - 1)]
    inner = [1, *[None if index % 2 else -1 for index in range(1, len(plain))]]
    arrays = [np.stack([np.stack([case.arrays(rng)[0] for _ in range(3)], 1) for _ in range(2)])]
    arrays += [
        one if axis is None else np.stack([case.arrays(rng)[index] for _ in range(3)], -1)
        for index, (one, axis) in enumerate(zip(plain, inner, strict=True))
        if index
    ]

    def mapped(*given: jax.Array) -> jax.Array:
        values = jax.vmap(jax.vmap(case.value, in_axes=inner), in_axes=outer)(*given)
        return (values * jnp.arange(1, 7, dtype=values.dtype).reshape(2, 3)).sum()

    moving = case.differentiable
    found = jax.jit(jax.grad(mapped, moving))(*arrays)
    expected = [np.zeros_like(one) for one in found]
    for first, second in np.ndindex(2, 3):
        own = [np.take(arrays[0][first], second, inner[0])]
        own += [
            one if axis is None else np.take(one, second, axis)
            for one, axis in zip(arrays[1:], inner[1:], strict=True)
        ]
        _, gradients = differentiated(case)(*own)
        for index, total, one in zip(moving, expected, gradients, strict=True):
            axis = inner[index]
            part = total if index else total[first]
            part = part if axis is None else np.moveaxis(part, axis, 0)[second, ...]
            part += np.asarray(one) * np.float32(3 * first + second + 1)
    assert_same(found, tuple(expected))


@pytest.mark.parametrize("case", one_an_implementation(DIFFERENTIABLE))
def test_scan_adds_gradients_up(rng: np.random.Generator, case: Case) -> None:
    """Gradients of what every step shares are sums over the steps."""
    first, *shared = case.arrays(rng)
    steps = np.stack([first, case.arrays(rng)[0], -first])

    def scanned(steps: jax.Array, *shared: jax.Array) -> jax.Array:
        def body(total: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            return total + case.value(x, *shared), None

        return jax.lax.scan(body, jnp.float32(0), steps)[0]

    moving = case.differentiable
    found = jax.jit(jax.value_and_grad(scanned, moving))(steps, *shared)
    values, gradients = zip(*(differentiated(case)(x, *shared) for x in steps), strict=True)
    right = [
        np.sum(ones, 0) if index else np.stack(ones)
        for index, ones in zip(moving, zip(*gradients, strict=True), strict=True)
    ]
    assert_same(found, (np.sum(values, 0), right))
