"""Arrays of several dtypes: promoted as by `jnp`, with gradients in the dtypes that were given."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_bridge import (
    explain,
    flash_attention,
    layer_norm,
    linear_cross_entropy,
    linear_cross_entropy_value_and_grad,
    reglu,
    rms_norm,
    swiglu,
)

LABELS = jnp.array([1, 0, 4])
ONES = jnp.ones((3, 4, 8), jnp.bfloat16)
FIRST, SECOND = (3, 4, 8), (3, 4, 8)
# What is called with two arrays of dtypes that differ, and their shapes.
CALLS: dict[str, tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...]]] = {
    "attention, k": (lambda q, k: flash_attention(q, k, ONES, causal=True), FIRST, SECOND),
    "attention, v": (lambda q, v: flash_attention(q, ONES, v, return_lse=True), FIRST, SECOND),
    "residual": (lambda x, r: rms_norm(x, None, residual=r), FIRST, SECOND),
    "bias": (lambda w, b: layer_norm(jnp.linspace(-1, 1, 24).reshape(3, 8), w, b), (8,), (8,)),
    "swiglu": (swiglu, FIRST, SECOND),
    "reglu": (reglu, FIRST, SECOND),
    "linear": (lambda x, w: linear_cross_entropy(x, w, LABELS), (3, 8), (5, 8)),
}
# Dtypes of both arrays, where they are promoted.
DTYPES = [("bfloat16", "float32"), ("float32", "float16"), ("float16", "bfloat16")]


@pytest.mark.parametrize("dtypes", DTYPES, ids="-".join)
@pytest.mark.parametrize("name", CALLS)
def test_promoted_as_by_jnp(name: str, dtypes: tuple[str, str], rng: np.random.Generator) -> None:
    call, *shapes = CALLS[name]
    if name == "linear" and "float32" in dtypes:
        pytest.skip("GEMMs of f32 beside 16 bits take 16")
    given = [jnp.asarray(rng.normal(size=s), d) for s, d in zip(shapes, dtypes, strict=True)]
    promoted = [one.astype(jnp.result_type(*given)) for one in given]

    def total(*arrays: jax.Array) -> jax.Array:
        return sum((jnp.sin(one).sum() for one in jax.tree.leaves(call(*arrays))), start=0.0)

    run = jax.jit(lambda *arrays: (call(*arrays), jax.grad(total, (0, 1))(*arrays)))
    (outputs, of_given), (wanted, of_promoted) = run(*given), run(*promoted)
    jax.tree.map(np.testing.assert_array_equal, outputs, wanted)
    kinds = [one.dtype for one in jax.tree.leaves(outputs)]
    assert kinds == [one.dtype for one in jax.tree.leaves(wanted)]
    for found, wanted, array in zip(of_given, of_promoted, given, strict=True):
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, wanted.astype(array.dtype))


def test_plans_and_running_sums(rng: np.random.Generator) -> None:
    hidden, weight = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((3, 8), (5, 8)))
    half = hidden.astype(jnp.float16)
    assert explain(half, weight) == explain(half.astype("float32"), weight.astype("float32"))
    sums = jnp.zeros(weight.shape)
    loss, (dhidden, _) = linear_cross_entropy_value_and_grad(
        half, weight, LABELS, dweight_sums=sums
    )
    wanted, dwanted = jax.value_and_grad(linear_cross_entropy)(half, weight, LABELS)
    assert dhidden.dtype == jnp.float16
    np.testing.assert_array_equal(dhidden, dwanted)
    np.testing.assert_array_equal(loss, wanted)


def test_strict_promotion_is_kept() -> None:
    x = jnp.ones((3, 8))
    with (
        jax.numpy_dtype_promotion("strict"),
        pytest.raises(ValueError, match="strict"),
    ):
        swiglu(x, x.astype(jnp.bfloat16))


# Gate and up in two arrays are XLA's program, which takes it.
@pytest.mark.parametrize("name", sorted(CALLS.keys() - {"swiglu", "reglu"}))
def test_float64_says_what_to_do(name: str) -> None:
    call, *shapes = CALLS[name]
    with (
        jax.enable_x64(True),
        pytest.raises(TypeError, match=r"has dtype float64; .*cast it, .astype\(jnp.float32\)"),
    ):
        call(*(jnp.ones(shape, jnp.float64) for shape in shapes))
