"""`fp8_linear` against products of quantised arrays in float64, under JAX's transformations."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from on_mesh import NAMES, mesh_of
from pallas_bridge.nn import fp8_dot_general
from placement import PLATFORM

from pallas_bridge import delayed_scale, fp8_dequantize, fp8_linear, fp8_quantize

ROWS, WIDTH, COLUMNS = 136, 144, 160
# What an entry may be off by, relative to the largest: the sum, which GPUs make in fewer bits than
# float32, and one rounding of the result.
OFF = {"float32": 1e-6 if PLATFORM == "cpu" else 1e-3, "bfloat16": 4e-3, "float16": 5e-4}


def arrays_of(rng: np.random.Generator, dtype: str = "bfloat16", *batch: int) -> list[jax.Array]:
    """Returns x, weight and dy."""
    shapes = [(*batch, ROWS, WIDTH), (WIDTH, COLUMNS), (*batch, ROWS, COLUMNS)]
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def quantised(x: Any, dtype: Any = jnp.float8_e4m3fn) -> Any:
    """Returns what stands for x, in float64."""
    found = fp8_quantize(x, dtype=dtype, power_of_two=True, implementation="reference")
    return np.asarray(fp8_dequantize(*found, dtype=jnp.float32)).astype(np.float64)


def wanted(x: Any, weight: Any, dy: Any, grad_dtype: Any = jnp.float8_e5m2) -> list[Any]:
    """Returns y, dx and dweight of [M, D], [D, N] and [M, N]."""
    x, weight, dy = quantised(x), quantised(weight), quantised(dy, grad_dtype)
    return [x @ weight, dy @ weight.T, x.T @ dy]


def with_gradients(x: Any, weight: Any, dy: Any, **options: Any) -> Any:
    y, transpose = jax.vjp(lambda *arrays: fp8_linear(*arrays, **options), x, weight)
    return y, *transpose(dy)


def close(found: Any, right: Any, dtype: str) -> None:
    off = np.abs(np.asarray(found).astype(np.float64) - right).max()
    assert off <= OFF[dtype] * np.abs(right).max(), off


@pytest.mark.parametrize("grad_dtype", [jnp.float8_e5m2, jnp.float8_e4m3fn])
@pytest.mark.parametrize("implementation", ["custom_call", "reference"])
@pytest.mark.parametrize("dtype", OFF)
def test_values_and_gradients(
    rng: np.random.Generator, dtype: str, implementation: Any, grad_dtype: Any
) -> None:
    options = {"implementation": implementation, "grad_dtype": grad_dtype}
    x, weight, dy = arrays_of(rng, dtype)
    # Of scales far from 1, which float16 holds no such power of two for.
    x = x * jnp.asarray(2.0**-13, dtype)
    found = jax.jit(lambda *arrays: with_gradients(*arrays, **options))(x, weight, dy)
    for one, right in zip(found, wanted(x, weight, dy, grad_dtype), strict=True):
        assert one.dtype == dtype
        close(one, right, dtype)
    close(jax.jit(lambda *pair: fp8_linear(*pair, **options))(x, weight), found[0], dtype)


def test_leading_axes_are_rows(rng: np.random.Generator) -> None:
    x, weight, dy = arrays_of(rng, "float32", 2, 3)
    right = wanted(x.reshape(-1, WIDTH), weight, dy.reshape(-1, COLUMNS))
    for one, other in zip(jax.jit(with_gradients)(x, weight, dy), right, strict=True):
        close(one.reshape(other.shape), other, "float32")
    assert fp8_linear(x[0, 0, 0], weight).shape == (COLUMNS,)
    assert fp8_linear(x[:0], weight).shape == (0, 3, ROWS, COLUMNS)


@pytest.mark.parametrize("weights", [None, 0])
def test_each_example_of_vmap_has_scales_of_its_own(
    rng: np.random.Generator, weights: int | None
) -> None:
    x, weight, dy = arrays_of(rng, "float32", 3)
    x = x * jnp.array([1.0, 64.0, 1e-3])[:, None, None]
    if weights is not None:
        weight = jnp.stack([weight, 100 * weight, -weight])
    found = jax.jit(jax.vmap(with_gradients, (0, weights, 0)))(x, weight, dy)
    for index in range(3):
        right = wanted(x[index], weight if weights is None else weight[index], dy[index])
        for one, other in zip(found, right, strict=True):
            close(one[index], other, "float32")

    def loss(weight: Any) -> Any:
        examples = jax.vmap(fp8_linear, (0, weights))(x, weight)
        return jnp.sum(examples * dy)

    gradient = jax.jit(jax.grad(loss))(weight)
    parts = found[2] if weights is not None else found[2].sum(0)
    np.testing.assert_allclose(
        gradient, parts, rtol=0, atol=10 * OFF["float32"] * np.abs(parts).max()
    )


@pytest.mark.parametrize("way", ["auto", "explicit"])
@pytest.mark.parametrize("axes", [("data", None), (None, "data"), ("data", "vocab")])
def test_scales_on_a_mesh_are_those_of_whole_arrays(
    rng: np.random.Generator, way: str, axes: tuple[str | None, ...]
) -> None:
    if jax.device_count() < 8:
        pytest.skip("needs eight devices")
    x, weight, dy = arrays_of(rng, "float32")
    x = x.at[0, 0].set(300.0)
    right = jax.jit(with_gradients)(x, weight, dy)
    mesh = mesh_of((4, 2), way)
    rows, columns = axes
    specs = [(rows, None), (None, columns), (rows, columns)]
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(one, NamedSharding(mesh, PartitionSpec(*spec)))
            for one, spec in zip((x, weight, dy), specs, strict=True)
        ]
        found = jax.jit(with_gradients)(*placed)
    assert mesh.axis_names == NAMES
    for one, other in zip(found, right, strict=True):
        close(one, np.asarray(other).astype(np.float64), "float32")


def test_what_is_kept_for_the_backward_pass_is_in_fp8(rng: np.random.Generator) -> None:
    x, weight, _ = arrays_of(rng)
    _, transpose = jax.vjp(fp8_linear, x, weight)
    kept = [leaf for leaf in jax.tree.leaves(transpose) if leaf.ndim]
    assert sorted(leaf.shape for leaf in kept) == [(WIDTH, ROWS), (WIDTH, COLUMNS)]
    assert {leaf.dtype for leaf in kept} == {np.dtype(jnp.float8_e4m3fn)}


def test_delayed_scales_and_the_next_history(rng: np.random.Generator) -> None:
    x, weight, dy = arrays_of(rng, "float32")
    history = jnp.array([[1.0, 8.0], [0.0, 0.0], [2.0, 0.5]])

    def quantised_by(x: Any, row: Any, dtype: Any) -> Any:
        scale = delayed_scale(row, dtype=dtype, power_of_two=True)
        return np.asarray(fp8_dequantize(*fp8_quantize(x, dtype=dtype, scale=scale))).astype(float)

    formats = (jnp.float8_e4m3fn, jnp.float8_e4m3fn, jnp.float8_e5m2)
    by = map(quantised_by, (x, weight, dy), history, formats)
    (x8, weight8, dy8) = by
    y, transpose = jax.vjp(
        lambda *arrays: fp8_linear(*arrays[:2], history=arrays[2]), x, weight, history
    )
    dx, dweight, following = transpose(dy)
    right = (x8 @ weight8, dy8 @ weight8.T, x8.T @ dy8)
    for one, other in zip((y, dx, dweight), right, strict=True):
        close(one, other, "float32")
    amax = [np.abs(one).max() for one in (x, weight, dy)]
    np.testing.assert_array_equal(following, np.stack([amax, history[:, 0]], 1))


def test_a_history_is_mapped_with_what_it_is_of(rng: np.random.Generator) -> None:
    x, weight, dy = arrays_of(rng, "float32", 2)
    history = jnp.ones((2, 3, 4))

    def loss(history: Any, x: Any, dy: Any) -> Any:
        return jnp.sum(fp8_linear(x, weight, history=history) * dy)

    gradient = jax.grad(loss)
    found, one = jax.jit(jax.vmap(gradient))(history, x, dy), jax.jit(gradient)
    for index in range(2):
        right = one(history[index], x[index], dy[index])
        np.testing.assert_array_equal(found[index], right)
    with pytest.raises(NotImplementedError, match="map a history for each example"):
        jax.grad(lambda one: jax.vmap(loss, (None, 0, 0))(one, x, dy).sum())(history[0])


def test_nan_reaches_what_it_is_a_term_of(rng: np.random.Generator) -> None:
    x, weight, dy = arrays_of(rng, "float32")
    y, dx, dweight = with_gradients(x.at[3, 5].set(jnp.nan), weight, dy)
    assert (np.isnan(y).any(1) == (np.arange(ROWS) == 3)).all()
    assert np.isfinite(dx).all()
    assert (np.isnan(dweight).any(1) == (np.arange(WIDTH) == 5)).all()


def test_dot_general_takes_axes_as_flax_passes_them(rng: np.random.Generator) -> None:
    x, weight, _ = arrays_of(rng, "float32")
    right = fp8_linear(x, weight)
    axes = (((1,), (0,)), ((), ()))
    np.testing.assert_array_equal(fp8_dot_general(x, weight, axes, precision=None), right)
    found = fp8_dot_general(x, weight, axes, preferred_element_type=jnp.bfloat16)
    np.testing.assert_array_equal(found, right.astype(jnp.bfloat16))
    split = x.reshape(ROWS, 4, 36), weight.T.reshape(5, 32, 4, 36)
    found = fp8_dot_general(*split, (((-2, -1), (2, 3)), ((), ())))
    np.testing.assert_array_equal(found.reshape(ROWS, COLUMNS), right)


def test_bad_input(rng: np.random.Generator) -> None:
    x, weight, _ = arrays_of(rng, "float32")
    with pytest.raises(ValueError, match=r"x has shape \(136, 144\) and weight \(160, 144\)"):
        fp8_linear(x, weight.T)
    with pytest.raises(TypeError, match="grad_dtype is 'int8'"):
        fp8_linear(x, weight, grad_dtype="int8")
    with pytest.raises(TypeError, match="int32"):
        fp8_linear(x.astype(int), weight)
    with pytest.raises(ValueError, match=r"history has shape \(3,\)"):
        fp8_linear(x, weight, history=jnp.ones(3))
    with pytest.raises(ValueError, match="implementation"):
        fp8_linear(x, weight, implementation="cutlass")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"axes \(0,\) of lhs"):
        fp8_dot_general(x, weight, (((0,), (0,)), ((), ())))
    axes = ((1,), (0,)), ((), ())
    for dtype in ("int32", "float8_e4m3fn", "complex64"):
        with pytest.raises(TypeError, match=f"lhs has dtype {dtype}; it must be bfloat16"):
            fp8_dot_general(x.astype(dtype), weight, axes)
        with pytest.raises(TypeError, match=f"rhs has dtype {dtype}; it must be bfloat16"):
            fp8_dot_general(x, weight.astype(dtype), axes)
    for wrong in ("int32", "text", x, 3):
        with pytest.raises(TypeError, match=r"(?s)preferred_element_type is .*; it must be bfloat"):
            fp8_dot_general(x, weight, axes, preferred_element_type=wrong)  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match="batch axes"):
        fp8_dot_general(x, x, (((1,), (1,)), ((0,), (0,))))
    with pytest.raises(NotImplementedError, match="out_sharding"):
        fp8_dot_general(x, weight, (((1,), (0,)), ((), ())), out_sharding=PartitionSpec())


def test_gpus_multiply_values_in_fp8(rng: np.random.Generator) -> None:
    arrays = arrays_of(rng)
    lowered = jax.jit(with_gradients).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    products = [line for line in lowered.splitlines() if "dot_general" in line]
    found = sorted(tuple(re.findall(r"x(f8E\w+|bf16)>", line)) for line in products)
    y, gradient = ("f8E4M3FN", "f8E4M3FN", "bf16"), ("f8E5M2", "f8E4M3FN", "bf16")
    assert found == sorted([y, gradient, ("f8E4M3FN", "f8E5M2", "bf16")])
