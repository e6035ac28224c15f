"""Distillation against the divergence of whole distributions in float64."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from pallas_bridge._src import distillation
from pallas_bridge.losses import linear_kl_divergence
from test_symbolic_shapes import checks

VOCAB, WIDTH, TEACHER_WIDTH = 52, 8, 12
NAMES = ("hidden", "weight", "teacher_hidden", "teacher_weight")
# What an entry may be off by, relative to the largest.
OFF = {"float32": 2e-6, "bfloat16": 2e-2, "float16": 2e-3}


def arrays_of(rng: np.random.Generator, dtype: str, *batch: int) -> list[jax.Array]:
    shapes = [(*batch, WIDTH), (VOCAB, WIDTH), (*batch, TEACHER_WIDTH), (VOCAB, TEACHER_WIDTH)]
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def log_softmax(z: Any) -> Any:
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def wanted(arrays: Any, factors: Any, temperature: float) -> tuple[Any, Any, Any, Any]:
    """Returns the loss and the gradients of hidden, weight and factors, for factors as they are."""
    hidden, weight, teacher_hidden, teacher_weight = (
        np.asarray(x).astype(np.float64) for x in arrays
    )
    student = log_softmax(hidden @ weight.T / temperature)
    teacher = log_softmax(teacher_hidden @ teacher_weight.T / temperature)
    losses = (np.exp(teacher) * (teacher - student)).sum(-1)
    dlogits = (np.exp(student) - np.exp(teacher)) * factors[..., None] / temperature
    dweight = np.tensordot(dlogits, hidden, (range(hidden.ndim - 1),) * 2)
    return (losses * factors).sum(), dlogits @ weight, dweight, losses


def close(found: Any, right: Any, dtype: str) -> None:
    off = np.abs(np.asarray(found).astype(np.float64) - right).max()
    assert off <= OFF[dtype] * max(np.abs(right).max(), 1e-3), off


@pytest.mark.parametrize("chunk_tokens", [None, 1, 5, 100])
@pytest.mark.parametrize("dtype", OFF)
def test_loss_and_gradients(rng: np.random.Generator, dtype: str, chunk_tokens: Any) -> None:
    arrays = arrays_of(rng, dtype, 2, 13)
    factors = jnp.asarray(rng.integers(0, 3, (2, 13)), "float32")

    def loss(hidden: Any, weight: Any, factors: Any) -> Any:
        return linear_kl_divergence(
            hidden,
            weight,
            *arrays[2:],
            temperature=1.5,
            weights=factors,
            reduction="sum",
            chunk_tokens=chunk_tokens,
        )

    right = wanted(arrays, np.asarray(factors), 1.5)
    close(jax.jit(loss)(*arrays[:2], factors), right[0], dtype)
    value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*arrays[:2], factors)
    for one, other in zip((value, *gradients), right, strict=True):
        close(one, other, dtype)


@pytest.mark.parametrize("chunk_tokens", [None, 5])
@pytest.mark.parametrize("dtype", OFF)
def test_any_number_of_tokens(rng: np.random.Generator, dtype: str, chunk_tokens: Any) -> None:
    arrays = arrays_of(rng, dtype, 2, 13)
    batch, length = jax.export.symbolic_shape("b, s")
    shapes = [jax.ShapeDtypeStruct(one.shape, dtype) for one in arrays]
    for index in (0, 2):
        shapes[index] = jax.ShapeDtypeStruct((batch, length, arrays[index].shape[-1]), dtype)

    def loss(*arrays: Any) -> Any:
        return linear_kl_divergence(*arrays, chunk_tokens=chunk_tokens)

    right = wanted(arrays, np.full((2, 13), 1 / 26), 1.0)
    run = jax.jit(jax.value_and_grad(loss, (0, 1)))
    exported = jax.export.export(run, disabled_checks=checks())(*shapes)
    value, gradients = jax.export.deserialize(exported.serialize()).call(*arrays)
    for one, other in zip((value, *gradients), right[:3], strict=True):
        close(one, other, dtype)
    columns = jax.ShapeDtypeStruct((batch, WIDTH), dtype)
    with pytest.raises(ValueError, match=r"weight has shape \(b, 8\); its extents must be numbers"):
        jax.export.export(run)(arrays[0], columns, arrays[2], columns)


def test_second_derivatives_are_refused(rng: np.random.Generator) -> None:
    """A gradient that is held constant is no use of one."""
    arrays = arrays_of(rng, "float32", 6)

    def loss(hidden: Any) -> Any:
        return linear_kl_divergence(hidden, *arrays[1:])

    gradient, hidden = jax.grad(loss), arrays[0]
    for second in (
        lambda x: jax.grad(lambda x: (gradient(x) ** 2).sum())(x),
        lambda x: jax.jvp(gradient, (x,), (x,))[1],
    ):
        for run in (second, jax.jit(second)):
            with pytest.raises(NotImplementedError, match=r"linear_kl_divergence: second deriv"):
                run(hidden)
    held = jax.grad(lambda x: loss(x) + jax.lax.stop_gradient(gradient(x)).sum())(hidden)
    np.testing.assert_allclose(held, gradient(hidden), rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_mean_and_vmap(rng: np.random.Generator) -> None:
    arrays = arrays_of(rng, "float32", 3, 7)
    factors = np.asarray(rng.integers(1, 3, (3, 7)), "float32")
    hidden, weight, teacher_hidden, teacher_weight = arrays

    def compute_loss(hidden: Any, teacher_hidden: Any, factors: Any) -> Any:
        return linear_kl_divergence(hidden, weight, teacher_hidden, teacher_weight, weights=factors)

    found = jax.vmap(jax.value_and_grad(compute_loss))(hidden, teacher_hidden, factors)
    for entry in range(3):
        of_entry_alone = (hidden[entry], weight, teacher_hidden[entry], teacher_weight)
        right = wanted(of_entry_alone, factors[entry] / factors[entry].sum(), 1.0)
        close(found[0][entry], right[0], "float32")
        close(found[1][entry], right[1], "float32")


@pytest.mark.slow
def test_tokens_of_weight_0_change_nothing(rng: np.random.Generator) -> None:
    arrays = arrays_of(rng, "float32", 6)
    factors = jnp.asarray([1, 0, 1, 1, 0, 1], "float32")
    lost = [arrays[0].at[1].set(jnp.nan), arrays[1], arrays[2].at[4].set(jnp.inf), arrays[3]]

    def run(hidden: Any, weight: Any, *teacher: Any) -> Any:
        function = jax.value_and_grad(linear_kl_divergence, (0, 1))
        return function(hidden, weight, *teacher, weights=factors)

    for one, other in zip(jax.tree.leaves(run(*arrays)), jax.tree.leaves(run(*lost)), strict=True):
        np.testing.assert_array_equal(one, other)
    nothing = linear_kl_divergence(*arrays, weights=jnp.zeros(6))
    assert nothing == 0
    # A weight that is 0 has a loss beside it, unless that is not finite.
    by_weights = jax.grad(lambda factors: linear_kl_divergence(*lost, weights=factors))(factors)
    assert np.isfinite(by_weights).all()


def test_float16_waits_for_the_cotangent(rng: np.random.Generator) -> None:
    arrays = arrays_of(rng, "float16", 6)
    run = jax.jit(
        jax.grad(lambda s, *x: linear_kl_divergence(*x, weights=s, reduction="sum") / s[0], (1, 2))
    )
    tiny, ones = (run(jnp.full(6, size), *arrays) for size in (2.0**-40, 1.0))
    for one, other in zip(tiny, ones, strict=True):
        assert one.dtype == jnp.float16
        np.testing.assert_array_equal(one, other)


def test_the_same_model_teaches_nothing(rng: np.random.Generator) -> None:
    hidden, weight, *_ = arrays_of(rng, "float32", 6)
    loss, gradient = jax.value_and_grad(linear_kl_divergence)(hidden, weight, hidden, weight)
    assert loss == 0
    assert not np.asarray(gradient).any()


def test_no_array_has_the_size_of_all_logits(rng: np.random.Generator) -> None:
    arrays = arrays_of(rng, "float32", 64)
    function = jax.jit(jax.grad(lambda *x: linear_kl_divergence(*x, chunk_tokens=8), (0, 1)))
    text = function.lower(*arrays).compile().as_text()
    assert f"[8,{VOCAB}]" in text
    assert f"[64,{VOCAB}]" not in text


@pytest.mark.parametrize("is_sharded", [False, True])
def test_programs_for_hopper_call_the_kernel(
    is_sharded: bool, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distillation, "_has_kernel", lambda vocab: vocab == VOCAB)
    arrays = arrays_of(rng, "bfloat16", 64)
    function: Any = jax.value_and_grad(partial(linear_kl_divergence, chunk_tokens=8), (0, 1))
    if is_sharded:
        alone = function

        def function(*arrays: Any) -> Any:
            loss, gradients = alone(*arrays)
            return jax.lax.pmean(loss, "data"), gradients

        mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
        tokens, whole = PartitionSpec("data"), PartitionSpec()
        specs = {"in_specs": (tokens, whole) * 2, "out_specs": (whole, (tokens, whole))}
        function = jax.shard_map(function, mesh=mesh, **specs)
    text = jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    (call,) = (line for line in text.splitlines() if distillation.TARGET in line)
    # The gradient of logits of 32 tokens is kept, and of 8 is written.
    assert "tensor<8x52xf32>" in call
    assert "-> (tensor<8xf32>, tensor<32x52xbf16>)" in call
    assert "output_operand_alias" in call


def test_what_is_wrong_is_named(rng: np.random.Generator) -> None:
    arrays = dict(zip(NAMES, arrays_of(rng, "float32", 6), strict=True))
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"weight": arrays["weight"].T}, ValueError, "weight has shape .* with the D of hidden"),
        ({"teacher_weight": arrays["teacher_weight"][:9]}, ValueError, "has 9 rows; .* 52"),
        ({"teacher_hidden": arrays["teacher_hidden"][:5]}, ValueError, "the tokens of hidden"),
        ({"weights": jnp.ones(5)}, ValueError, r"weights has shape \(5,\); it must be \(6,\)"),
        ({"temperature": 0.0}, ValueError, "temperature is 0"),
        ({"reduction": "none"}, ValueError, "it must be one of 'mean', 'sum'"),
        ({"hidden": jnp.ones((6, 8), int)}, TypeError, "hidden has dtype int32"),
        ({"chunk_tokens": -1}, ValueError, "chunk_tokens is -1"),
        ({"chunk_tokens": 0}, ValueError, "chunk_tokens is 0"),
    ]
    for wrong, error, message in cases:
        with pytest.raises(error, match=message):
            linear_kl_divergence(**{**arrays, **wrong})
