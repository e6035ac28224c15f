"""Exports of every operation with symbolic batches and lengths, held against programs of shapes."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from operations import CASES, EXTENTS, Case, one_an_implementation, one_an_operation
from pallas_bridge._src import library
from placement import PLATFORM

import pallas_bridge as pb

BY_NAME = {case.name: case for case in CASES}
# Extents of the axes that are symbolic. Of linear_cross_entropy one and more than one chunk.
SHAPES = {"B": 3, "S": 5, "M": 7}, {"B": 1, "S": 4, "M": 8}
CHUNKS = SHAPES[0], {"B": 2, "S": 300}
Shape = jax.ShapeDtypeStruct


def checks() -> list[Any]:
    """Returns what lets an exported program have the library's custom calls."""
    found = {row.target for row in library.require().targets}
    return [jax.export.DisabledSafetyCheck.custom_call(target) for target in sorted(found)]


# Whose columns may be symbolic too.
COLUMNS = {"cross_entropy": "V", "rms_norm": "D", "layer_norm": "D"}


def symbolic(case: Case, arrays: Sequence[jax.Array]) -> list[Shape]:
    """Returns the arrays' shapes with symbols for batches and lengths."""
    names = ("B", "S", "M", *COLUMNS.get(case.name, ""))
    symbols = jax.export.symbolic_shape("b, s, m, d")[: len(names)]
    sizes: dict[str, Any] = {**EXTENTS, **case.extents, **dict(zip(names, symbols, strict=True))}
    return [
        Shape(tuple(sizes[name] for name in argument.dims), x.dtype)
        for argument, x in zip(case.arguments, arrays, strict=True)
    ]


def close(actual: Any, expected: Any, tolerance: float = 2e-5) -> None:
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    for got, right in pairs:
        assert (got.shape, got.dtype) == (right.shape, right.dtype)
        wide = [np.asarray(one, np.float64) for one in (got, right)]
        scale = max(1, np.abs(wide[1]).max(initial=0))
        np.testing.assert_allclose(*wide, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("name", one_an_operation(BY_NAME))
def test_every_operation(rng: np.random.Generator, name: str, which: int) -> None:
    case = BY_NAME[name]

    @jax.jit
    def both(*arrays: Any) -> Any:
        return case.outputs(*arrays), case.gradients(*arrays) if case.differentiable else ()

    shapes = symbolic(case, case.arrays(rng))
    exported = jax.export.export(both, platforms=[PLATFORM], disabled_checks=checks())(*shapes)
    exported = jax.export.deserialize(exported.serialize())
    extents = (CHUNKS if name.startswith("linear") else SHAPES)[which]
    arrays = case.arrays(rng, **extents)
    close(exported.call(*arrays), both(*arrays))


@pytest.mark.only("cpu", "programs for platforms that are not there")
@pytest.mark.parametrize("name", one_an_implementation(BY_NAME))
def test_one_program_for_every_platform(rng: np.random.Generator, name: str) -> None:
    case = BY_NAME[name]
    arrays = case.arrays(rng, "bfloat16")
    f = jax.jit(case.gradients if case.has_gradient else case.outputs)
    platforms = ("cpu", "cuda", "tpu")
    exported = jax.export.export(f, platforms=platforms, disabled_checks=checks())(*arrays)
    restored = jax.export.deserialize(exported.serialize())
    assert restored.platforms == platforms
    for one, other in zip(jax.jit(restored.call)(*arrays), f(*arrays), strict=True):
        np.testing.assert_array_equal(one, other)


# Dtypes of hidden and weight, the axis of the vocabulary, and options.
LINEAR: list[tuple[str, str, int, dict[str, Any]]] = [
    ("bfloat16", "bfloat16", 1, {"bias": True}),
    ("float32", "bfloat16", 0, {}),
    ("bfloat16", "float32", 0, {"reduction": "sum"}),
    ("float16", "float16", 0, {"reduction": "sum"}),
    ("float32", "float32", 0, {"implementation": "custom_call", "z_loss": 0.01}),
    ("float32", "float32", 0, {"implementation": "reference"}),
    ("float32", "float32", 1, {"batch_invariant": True, "return_entropy": True}),
    ("float32", "float32", 0, {"max_scratch_bytes": 3 << 19, "label_smoothing": 0.1}),
    ("float32", "float32", 1, {"max_scratch_bytes": 1 << 18, "bias": True, "softcap": 3.0}),
    ("bfloat16", "bfloat16", 0, {"max_scratch_bytes": 1 << 18, "return_correct": True}),
]
HIDDEN, VOCAB = 16, 300


@pytest.mark.few(4)
@pytest.mark.parametrize(("dtype", "of_weight", "axis", "options"), LINEAR, ids=str)
def test_plans_for_any_number_of_tokens(
    rng: np.random.Generator, dtype: str, of_weight: str, axis: int, options: Any
) -> None:
    has_bias = "bias" in options
    kept = {key: value for key, value in options.items() if key != "bias"}

    def loss(arrays: Any, labels: Any, kept: Any = kept) -> jax.Array:
        hidden, weight, *bias = arrays
        more = {"bias": bias[0]} if bias else {}
        found = pb.linear_cross_entropy(hidden, weight, labels, vocab_axis=axis, **more, **kept)
        # Of what else is asked for, lse and entropy have a derivative too.
        return sum(one.sum() for one in jax.tree.leaves(found) if one.dtype == jnp.float32)

    batch, length = jax.export.symbolic_shape("b, s")
    shape = (VOCAB, HIDDEN) if axis == 0 else (HIDDEN, VOCAB)
    fixed = [Shape(shape, of_weight), *([Shape((VOCAB,), "float32")] if has_bias else [])]
    f = jax.jit(jax.value_and_grad(loss))
    labels = Shape((batch, length), "int32")
    exported = jax.export.export(f, platforms=[PLATFORM], disabled_checks=checks())(
        [Shape((batch, length, HIDDEN), dtype), *fixed], labels
    )
    has_calls = "@xentile_" in exported.mlir_module()
    assert has_calls == (options.get("implementation") == "custom_call")
    # The same budget holds other plans where tokens are known.
    with_shapes = {key: value for key, value in kept.items() if key != "max_scratch_bytes"}
    direct = jax.jit(jax.value_and_grad(lambda *given: loss(*given, kept=with_shapes)))
    tokens = (2, 300)
    arrays = [
        jnp.asarray(rng.normal(size=one.shape), one.dtype)
        for one in (Shape((*tokens, HIDDEN), dtype), *fixed)
    ]
    given = jnp.asarray(rng.integers(0, VOCAB, tokens), jnp.int32)
    is_wide = dtype == of_weight == "float32"
    close(exported.call(arrays, given), direct(arrays, given), 2e-5 if is_wide else 3e-2)


@pytest.mark.few(2)
@pytest.mark.only("cpu", "what XLA holds there")
@pytest.mark.parametrize("limit", [None, 6 << 20, 1 << 20])
def test_scratch_is_within_the_budget(limit: int | None) -> None:
    """Whatever the number of tokens, but for what the docstring says grows with them."""
    hidden, vocab = 32, 5003
    batch, length = jax.export.symbolic_shape("b, s")
    shapes = Shape((batch, length, hidden), "float32"), Shape((vocab, hidden), "float32")

    def loss(x: Any, w: Any, y: Any) -> Any:
        return pb.linear_cross_entropy(x, w, y, max_scratch_bytes=limit)

    plan = pb.explain(*shapes, max_scratch_bytes=limit)
    assert limit is None or plan.scratch_bytes <= limit
    assert "for any number of tokens" in str(plan)
    f = jax.jit(jax.value_and_grad(loss, (0, 1)))
    exported = jax.export.export(f)(*shapes, Shape((batch, length), "int32"))
    for tokens in ((1, 3), (5, 2000)):
        arrays = Shape((*tokens, hidden), "float32"), shapes[1], Shape(tokens, "int32")
        compiled = jax.jit(exported.call).lower(*arrays).compile()
        held = compiled.memory_analysis().temp_size_in_bytes
        count = tokens[0] * tokens[1]
        padded = -(-count // plan.tokens) * plan.tokens
        beside = 32 * padded + 2 * padded * hidden * 4
        assert held <= plan.max_scratch_bytes + beside, (held, plan)


def test_value_and_grad_of_any_number_of_tokens(rng: np.random.Generator) -> None:
    batch, length = jax.export.symbolic_shape("b, s")

    @jax.jit
    def f(x: Any, w: Any, y: Any, sums: Any) -> Any:
        return pb.linear_cross_entropy_value_and_grad(x, w, y, dweight_sums=sums, vocab_axis=0)

    exported = jax.export.export(f, platforms=[PLATFORM])(
        Shape((batch, length, HIDDEN), "float32"),
        Shape((VOCAB, HIDDEN), "float32"),
        Shape((batch, length), "int32"),
        Shape((VOCAB, HIDDEN), "float32"),
    )
    of_weight = [jnp.asarray(rng.normal(size=(VOCAB, HIDDEN)), jnp.float32) for _ in range(2)]
    x = jnp.asarray(rng.normal(size=(3, 7, HIDDEN)), jnp.float32)
    arrays = x, of_weight[0], jnp.asarray(rng.integers(0, VOCAB, (3, 7)), jnp.int32), of_weight[1]
    close(exported.call(*arrays), f(*arrays))


@pytest.mark.only("cpu", "programs for platforms that are not there")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_programs_for_every_platform(dtype: str) -> None:
    """No platform needs a custom call, so that JAX exports the program as it is."""
    batch, length = jax.export.symbolic_shape("b, s")
    f = jax.jit(jax.value_and_grad(lambda x, w, y: pb.linear_cross_entropy(x, w, y), (0, 1)))
    shapes = Shape((batch, length, HIDDEN), dtype), Shape((VOCAB, HIDDEN), dtype)
    for platforms in (["cpu", "cuda", "tpu"], ["tpu"], ["cuda"], ["rocm"]):
        exported = jax.export.export(f, platforms=platforms)(
            *shapes, Shape((batch, length), "int32")
        )
        assert "@xentile_" not in exported.mlir_module()


def test_budgets_and_shapes_that_are_refused() -> None:
    batch, width = jax.export.symbolic_shape("b, v")
    shapes = Shape((batch, HIDDEN), "float32"), Shape((VOCAB, HIDDEN), "float32")
    with pytest.raises(ValueError, match=r"max_scratch_bytes is 1000; the least for any number of"):
        pb.explain(*shapes, max_scratch_bytes=1000)
    with pytest.raises(ValueError, match=r"weight has shape \(v, 16\); its extents must be num"):
        pb.explain(shapes[0], Shape((width, HIDDEN), "float32"), vocab_axis=0)
