"""FP8 quantisation against numpy's rounding, bit by bit, under what JAX does to functions."""

from functools import partial
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from placement import PLATFORM

from pallas_bridge import (
    delayed_scale,
    fp8_dequantize,
    fp8_quantize,
    rms_norm,
    rms_norm_fp8,
    swiglu,
    swiglu_fp8,
)

DTYPES = ("float32", "bfloat16", "float16")
LARGEST: dict[Any, float] = {jnp.float8_e4m3fn: 448.0, jnp.float8_e5m2: 57344.0}
FORMATS = tuple(LARGEST)
IMPLEMENTATIONS = ("custom_call", "reference")
TINY = np.finfo(np.float32).tiny
# What granularity "row" and the blocks are: rows and columns, the latter of the whole row if None.
BLOCKS = {"row": (1, None), "block_1d": (1, 128), "block_2d": (128, 128)}


def bits(array: Any) -> Any:
    """The bits of numbers. GPUs have one NaN for all: there every NaN of a format is the same."""
    found = np.atleast_1d(np.asarray(array))
    if PLATFORM == "cpu" or found.dtype.itemsize > 1:
        return found.view(np.uint8)
    return np.where(np.isnan(found.astype(np.float32)), np.uint8(0x7F), found.view(np.uint8))


def wide(x: Any) -> Any:
    """Numbers in f32, with 0 for those below the normal range."""
    x = np.asarray(x).astype(np.float32)
    return np.where(np.abs(x) < TINY, np.copysign(np.float32(0), x), x)


def scale_of(amax: Any, largest: float, power_of_two: bool) -> Any:
    if power_of_two:
        with np.errstate(divide="ignore"):
            exponent = np.ceil(np.log2(np.float64(amax)) - np.log2(largest))
        # The logarithms are rounded.
        lower = 2.0 ** (exponent - 1)
        found = np.where(amax <= lower * largest, lower, 2.0**exponent)
    else:
        found = np.float32(amax) * np.float32(1 / largest)
    return np.where(amax < TINY, np.float32(1), np.maximum(found, TINY).astype(np.float32))


def rounded(x: Any, scale: Any, form: Any) -> Any:
    """What numpy makes of the quotient, in bits."""
    with np.errstate(all="ignore"):
        quotient = wide(x) * (np.float32(1) / np.float32(scale))
        clipped = np.clip(quotient, -LARGEST[form], LARGEST[form])
        return bits(clipped.astype(np.dtype(form)))


def magnitudes_of(x: Any) -> Any:
    """Sizes of numbers, with 0 for those that are not finite."""
    found = np.abs(wide(x))
    return np.where(np.isfinite(found), found, 0)


def amax_of(x: Any) -> Any:
    return magnitudes_of(x).max(initial=0)


def oracle(x: Any, blocks: Any, form: Any, power_of_two: bool) -> tuple[Any, Any]:
    """Values in bits, and scales, of matrices."""
    *leading, rows, columns = x.shape
    of_rows, of_columns = blocks
    of_columns = of_columns or max(columns, 1)
    down, across = -(-rows // of_rows), -(-columns // of_columns)
    magnitudes = np.zeros((*leading, down * of_rows, across * of_columns), np.float32)
    magnitudes[..., :rows, :columns] = magnitudes_of(x)
    by_block = magnitudes.reshape(*leading, down, of_rows, across, of_columns)
    scales = scale_of(by_block.max((-3, -1), initial=0), LARGEST[form], power_of_two)
    each = scales.repeat(of_rows, -2).repeat(of_columns, -1)[..., :rows, :columns]
    values = rounded(x, each, form)
    return values, scales if blocks[1] else scales[..., 0] if columns else np.ones(x.shape[:-1])


def draw(rng: np.random.Generator, dtype: str, *shape: int) -> Any:
    """Rows of every size, from tiny to huge."""
    sizes = rng.choice([1e-39, 1e-30, 0.01, 1.0, 300.0, 1e30], size=(*shape[:-1], 1))
    with np.errstate(over="ignore"):
        return (rng.normal(size=shape) * sizes).astype(jnp.dtype(dtype))


def special(rng: np.random.Generator, x: Any) -> Any:
    """With NaN, infinities and zeros of both signs here and there."""
    x = x.copy()
    numbers = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0]).astype(x.dtype)
    for number in numbers:
        x.reshape(-1)[rng.integers(x.size, size=3)] = number
    return x


def hold(found: Any, wanted: Any, implementation: str, name: str) -> None:
    """Asserts the same bits; XLA's reciprocals on GPUs may be a unit off, and then values are."""
    if implementation == "reference" and PLATFORM == "cuda":
        off = found != wanted
        np.testing.assert_array_less(off.sum(), 2 + off.size / 100, err_msg=name)
        apart = np.abs(found.astype(np.int32) - wanted.astype(np.int32))
        np.testing.assert_array_less(apart, 2, err_msg=name)
    else:
        np.testing.assert_array_equal(found, wanted, err_msg=name)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("granularity", BLOCKS)
def test_bits_by_block(
    rng: np.random.Generator, granularity: Any, form: Any, implementation: Any
) -> None:
    blocks = BLOCKS[granularity]
    first = rng.integers(3)
    for index, shape in enumerate(((1, 1), (3, 37), (2, 130, 256), (5, 384), (0, 4), (3, 0))):
        dtype = DTYPES[(first + index) % 3]
        x = draw(rng, dtype, *shape)
        x = special(rng, x) if x.size > 100 else x
        power_of_two = bool(rng.integers(2))
        run = partial(
            fp8_quantize,
            dtype=form,
            granularity=granularity,
            power_of_two=power_of_two,
            implementation=implementation,
        )
        found, transposed, alone = jax.jit(lambda x, run=run: (*run(x, transposed=True), run(x)))(x)
        for what, got, of in (
            ("straight", found, x),
            ("alone", alone, x),
            ("transposed", transposed, np.swapaxes(x, -1, -2)),
        ):
            values, scales = oracle(of, blocks, form, power_of_two)
            name = f"{what} {dtype} {shape} {power_of_two}"
            assert got.values.dtype == form and got.values.shape == of.shape, name
            assert got.scales.dtype == jnp.float32, name
            np.testing.assert_array_equal(got.scales, scales, err_msg=name)
            hold(bits(got.values), values, implementation, name)


@pytest.mark.parametrize("first", range(3))
@pytest.mark.parametrize("form", FORMATS)
def test_bits_of_blocks_of_any_size(rng: np.random.Generator, form: Any, first: int) -> None:
    """Blocks within a tile and across several, of rows of vectors and others."""
    sizes, shapes = (1, 7, 64, 100, 200), ((130, 320), (17, 129), (2, 33, 48))
    for index, size in enumerate(sizes):
        shape, dtype = shapes[(first + index) % 3], DTYPES[index % 3]
        x = special(rng, draw(rng, dtype, *shape))
        for granularity, rows in (("block_1d", 1), ("block_2d", size)):
            run = partial(
                fp8_quantize,
                dtype=form,
                granularity=granularity,
                block_size=size,
                power_of_two=index % 2 == 0,
            )
            found, transposed, alone = jax.jit(
                lambda x, run=run: (*run(x, transposed=True), run(x))
            )(x)
            for what, got, of in (
                ("straight", found, x),
                ("alone", alone, x),
                ("transposed", transposed, np.swapaxes(x, -1, -2)),
            ):
                values, scales = oracle(of, (rows, size), form, index % 2 == 0)
                name = f"{what} {granularity} {size} {dtype} {shape}"
                np.testing.assert_array_equal(got.scales, scales, err_msg=name)
                np.testing.assert_array_equal(bits(got.values), values, err_msg=name)


@pytest.mark.parametrize("form", FORMATS)
def test_bits_of_rows_of_any_length(rng: np.random.Generator, form: Any) -> None:
    """Rows that some lanes hold, that a block of threads holds, and longer ones."""
    for index, columns in enumerate((8, 40, 256, 264, 1000, 4096, 14336, 33000, 70001)):
        dtype = DTYPES[index % 3]
        x = special(rng, draw(rng, dtype, 3, columns))
        got = fp8_quantize(x, dtype=form, granularity="row")
        values, scales = oracle(x, (1, None), form, False)
        np.testing.assert_array_equal(got.scales, scales, err_msg=f"{dtype} {columns}")
        np.testing.assert_array_equal(bits(got.values), values, err_msg=f"{dtype} {columns}")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("form", FORMATS)
def test_bits_by_tensor(rng: np.random.Generator, form: Any, implementation: Any) -> None:
    run = partial(fp8_quantize, dtype=form, implementation=implementation)
    first = rng.integers(3)
    for index, shape in enumerate(((), (1,), (3, 37), (2, 5, 256), (0, 4), (3, 0))):
        dtype = DTYPES[(first + index) % 3]
        x = draw(rng, dtype, *shape) if shape else np.asarray(-2.5, jnp.dtype(dtype))
        x = special(rng, x) if x.size > 100 else x
        (values, scale), amax = jax.jit(partial(run, return_amax=True))(x)
        assert amax == amax_of(x)
        assert scale.shape == () and scale == scale_of(amax_of(x), LARGEST[form], False)
        np.testing.assert_array_equal(bits(values), rounded(x, scale, form))
        # By a scale of another step, and by an amax: entries beyond are sharded.
        (values, scale), amax = run(x, scale=0.0625, return_amax=True)
        assert amax == amax_of(x) and scale == 0.0625
        np.testing.assert_array_equal(bits(values), rounded(x, 0.0625, form))
        values, scale = run(x, amax=1.5)
        np.testing.assert_array_equal(bits(values), rounded(x, scale, form))
        assert scale == scale_of(1.5, LARGEST[form], False)
        if x.ndim < 2:
            continue
        (values, scale), transposed, amax = run(x, transposed=True, return_amax=True)
        np.testing.assert_array_equal(bits(values), rounded(x, scale, form))
        np.testing.assert_array_equal(bits(transposed.values), np.swapaxes(bits(values), -1, -2))
        assert transposed.scales == scale and amax == amax_of(x)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("form", FORMATS)
def test_every_bfloat16_is_rounded_as_ml_dtypes_does(form: Any, implementation: Any) -> None:
    x = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    run = partial(fp8_quantize, dtype=form, implementation=implementation)
    values, _ = run(x, scale=1.0)
    with np.errstate(all="ignore"):
        clipped = np.clip(x.astype(np.float32), -LARGEST[form], LARGEST[form])
        expected = bits(clipped.astype(np.dtype(form)))
    np.testing.assert_array_equal(bits(values), expected)
    # And in blocks that each have an exponent of their own, by their scales.
    blocks = x.reshape(-1, 128)
    values, scales = run(blocks, granularity="block_1d")
    expected, of_blocks = oracle(blocks, (1, 128), form, False)
    np.testing.assert_array_equal(scales, of_blocks)
    np.testing.assert_array_equal(bits(values), expected)


def test_special_blocks_keep_the_contract() -> None:
    for implementation in IMPLEMENTATIONS:
        run = partial(fp8_quantize, granularity="row", implementation=implementation)
        x = np.array(
            [
                [np.nan, 1.0, -2.0, 0.0],
                [np.inf, 1.0, -2.0, -np.inf],
                [np.inf, np.nan, 0.0, -0.0],
                [0.0, -0.0, 0.0, 0.0],
                [1e-38, 1.2e-38, -1e-40, 0.0],
            ],
            np.float32,
        )
        values, scales = run(x)
        np.testing.assert_array_equal(scales, np.float32([2 / 448, 2 / 448, 1, 1, TINY]))
        assert np.all(np.isfinite(1 / np.asarray(scales)))
        back = np.asarray(values.astype(jnp.float32))
        assert np.isnan(back[0, 0]) and np.array_equal(back[0, 1:], [224, -448, 0])
        assert np.array_equal(back[1], [448, 224, -448, -448])
        assert back[2, 0] == 448 and np.isnan(back[2, 1]) and not back[2, 2:].any()
        assert not back[3].any() and np.array_equal(np.signbit(back[3]), [0, 1, 0, 0])
        np.testing.assert_array_equal(back[4], [0, 1, 0, 0])
        for wrong in (0.0, -1.0, np.inf, np.nan, 1e-40, 2e38):
            found = fp8_quantize(x[:1], scale=np.float32(wrong), implementation=implementation)
            assert np.isnan(np.asarray(found.values, np.float32)).all(), wrong


@pytest.mark.parametrize("form", FORMATS)
def test_what_comes_back_is_near(rng: np.random.Generator, form: Any) -> None:
    """Half a unit in the last place of the value, in float64, and a rounding of the quotient."""
    for granularity, shape in (("row", ()), ("block_1d", ()), ("block_2d", ()), ("tensor", ())):
        x = rng.normal(size=(150, 300)).astype(np.float32) * 10 ** rng.uniform(-5, 5, (150, 1))
        x = jnp.asarray(x, jnp.float32)
        quantized = fp8_quantize(x, dtype=form, granularity=granularity)
        back = fp8_dequantize(*quantized)
        values, scales = (np.asarray(part, np.float64) for part in quantized)
        ones = fp8_dequantize(jnp.ones_like(quantized.values), quantized.scales)
        scales = np.asarray(ones, np.float64)
        assert not shape and back.dtype == jnp.float32
        np.testing.assert_allclose(np.asarray(back), values * scales, rtol=2.0**-23)
        mantissa, least = (3, -6) if form is FORMATS[0] else (2, -14)
        exponents = np.maximum(np.floor(np.log2(np.maximum(np.abs(values), 1e-30))), least)
        allowed = scales * 2.0 ** (exponents - mantissa) * 0.5 + np.abs(x) * 2.0**-22
        error = np.abs(np.asarray(back, np.float64) - np.asarray(x, np.float64))
        assert (error <= allowed).all(), (granularity, np.max(error / allowed))
    half = fp8_dequantize(*quantized, jnp.bfloat16)
    assert half.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(half), np.asarray(back.astype(jnp.bfloat16)))


def test_feeds_a_scaled_product_of_xla(rng: np.random.Generator) -> None:
    """Scaled by row, by tensor and by block, the second factor through its transposed copy."""
    x, w = rng.normal(size=(64, 256)), rng.normal(size=(256, 48))
    x, w = jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.float32)
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    sizes = np.abs(np.asarray(x, np.float64)) @ np.abs(np.asarray(w, np.float64))

    def product(a: Any, b: Any) -> Any:
        # Both are contracted along their last axis.
        return jax.lax.dot_general(
            a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )

    @jax.jit
    def multiply_rows(x: Any, w: Any) -> Any:
        a = fp8_quantize(x, granularity="row")
        b = fp8_quantize(w.T, granularity="row")
        return product(a.values, b.values) * a.scales[:, None] * b.scales

    @jax.jit
    def multiply_tensors(x: Any, w: Any) -> Any:
        a = fp8_quantize(x)
        _, b = fp8_quantize(w, transposed=True)
        return product(a.values, b.values) * (a.scales * b.scales)

    @jax.jit
    def multiply_blocks(x: Any, w: Any) -> Any:
        a = fp8_quantize(x, granularity="block_1d")
        _, b = fp8_quantize(w, granularity="block_2d", transposed=True)
        parts = [
            product(a.values[:, k : k + 128], b.values[:, k : k + 128])
            * a.scales[:, k // 128, None]
            * jnp.repeat(b.scales[:, k // 128], 128)[: w.shape[1]]
            for k in range(0, 256, 128)
        ]
        return sum(parts)

    # Each factor is off by at most 2^-4 of itself, or by half the least number of its block.
    least = 2.0**-10 / 448 * 5 * 256 * 5 * 2
    for run in (multiply_rows, multiply_tensors, multiply_blocks):
        error = np.abs(np.asarray(run(x, w), np.float64) - exact)
        assert (error <= sizes * (2 * 2.0**-4 + 2.0**-8) + least).all(), run.__name__
        assert np.sqrt((error**2).mean() / (exact**2).mean()) < 0.05, run.__name__


def test_vmap_gives_the_same_bits(rng: np.random.Generator) -> None:
    x = jnp.asarray(draw(rng, "bfloat16", 3, 2, 130, 256))
    for granularity in BLOCKS:
        run = partial(fp8_quantize, granularity=granularity)
        for axis in (0, 1):
            found = jax.jit(jax.vmap(run, in_axes=axis))(x)
            moved = jnp.moveaxis(x, axis, 0)
            for index in range(moved.shape[0]):
                one = run(moved[index])
                np.testing.assert_array_equal(bits(found.values[index]), bits(one.values))
                np.testing.assert_array_equal(found.scales[index], one.scales)
    both = jax.jit(jax.vmap(partial(fp8_quantize, transposed=True, return_amax=True)))(x[0])
    scales = jnp.asarray([0.5, 2.0])
    given = jax.jit(jax.vmap(lambda x, scale: fp8_quantize(x, scale=scale)))(x[0], scales)
    for index in range(2):
        (one, transposed, amax) = fp8_quantize(x[0, index], transposed=True, return_amax=True)
        np.testing.assert_array_equal(bits(both[0].values[index]), bits(one.values))
        np.testing.assert_array_equal(bits(both[1].values[index]), bits(transposed.values))
        assert both[2][index] == amax and both[0].scales[index] == one.scales
        one = fp8_quantize(x[0, index], scale=scales[index])
        np.testing.assert_array_equal(bits(given.values[index]), bits(one.values))


def test_rows_do_not_depend_on_others(rng: np.random.Generator) -> None:
    x = jnp.asarray(draw(rng, "bfloat16", 70, 640))
    for granularity in ("row", "block_1d"):
        run = jax.jit(partial(fp8_quantize, granularity=granularity))
        whole, part = run(x), run(x[13:20])
        np.testing.assert_array_equal(bits(whole.values[13:20]), bits(part.values))
        np.testing.assert_array_equal(whole.scales[13:20], part.scales)


@pytest.mark.devices(2)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_on_a_mesh_nothing_is_gathered(rng: np.random.Generator, kind: Any) -> None:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))
    rows, columns = PartitionSpec("data", None), PartitionSpec(None, "data")
    x = jnp.asarray(draw(rng, "float32", 256, 512))
    cases: list[tuple[Any, dict[str, Any]]] = [
        (rows, {"granularity": "row"}),
        (columns, {"granularity": "row"}),
        (rows, {"granularity": "block_1d"}),
        (columns, {"granularity": "block_1d"}),
        (rows, {"granularity": "block_2d"}),
        (rows, {}),
        (columns, {}),
        (rows, {"scale": 0.25, "return_amax": True}),
        (columns, {"scale": 0.25, "return_amax": True}),
    ]
    with jax.set_mesh(mesh):
        for spec, options in cases:
            run = partial(fp8_quantize, **options)
            sharded = jax.device_put(x, NamedSharding(mesh, spec))
            compiled = jax.jit(run).lower(sharded).compile()
            found = compiled(sharded)
            text = compiled.as_text()
            # Of rows that are sharded, XLA's own program exchanges a number a row.
            has_kernel = (spec, options.get("granularity")) != (columns, "row")
            assert "all-gather" not in text, (spec, options)
            assert ('custom_call_target="xentile_fp8' in text) == has_kernel, (spec, options)
            pairs = zip(jax.tree.leaves(found), jax.tree.leaves(run(np.asarray(x))), strict=True)
            for got, one in pairs:
                np.testing.assert_array_equal(bits(got), bits(one), err_msg=f"{spec} {options}")
            assert not jax.tree.leaves(found)[0].sharding.is_fully_replicated
        if kind == AxisType.Explicit:
            with pytest.raises(ValueError, match=r"operand 0 of xentile_fp8_quantize_transposed, "):
                jax.jit(partial(fp8_quantize, granularity="row", transposed=True))(
                    jax.device_put(x, NamedSharding(mesh, columns))
                )
            with pytest.raises(ValueError, match=r"no whole blocks of 512 \(granularity"):
                jax.jit(partial(fp8_quantize, granularity="block_1d", block_size=512))(
                    jax.device_put(x, NamedSharding(mesh, columns))
                )
        else:
            # A transposed copy is XLA's own program, which knows how to shard both.
            run = partial(fp8_quantize, granularity="block_1d", transposed=True)
            sharded = jax.device_put(x, NamedSharding(mesh, rows))
            pairs = zip(
                jax.tree.leaves(jax.jit(run)(sharded)), jax.tree.leaves(run(x)), strict=True
            )
            for got, one in pairs:
                np.testing.assert_array_equal(bits(got), bits(one))


def test_derivatives_are_refused_and_a_recipe_has_them(rng: np.random.Generator) -> None:
    x = jnp.asarray(rng.normal(size=(4, 128)), jnp.float32)
    for implementation in IMPLEMENTATIONS:
        for options in ({"granularity": "row"}, {}, {"transposed": True}):

            def loss(x: Any, options: Any = options, implementation: Any = implementation) -> Any:
                found = fp8_quantize(x, implementation=implementation, **options)
                return sum(leaf.astype(jnp.float32).sum() for leaf in jax.tree.leaves(found))

            with pytest.raises(
                NotImplementedError, match=r"fp8_quantize has no derivative.*custom_vjp"
            ):
                jax.jit(jax.grad(loss))(x)
            assert jax.grad(lambda x, loss=loss: loss(jax.lax.stop_gradient(x)))(x).sum() == 0
    quantized = fp8_quantize(x)
    with pytest.raises(NotImplementedError, match="fp8_dequantize has no derivative"):
        jax.grad(lambda s: fp8_dequantize(quantized.values, s).sum())(quantized.scales)

    @jax.custom_vjp
    def straight_through(x: Any) -> Any:
        return fp8_dequantize(*fp8_quantize(x), x.dtype)

    straight_through.defvjp(lambda x: (straight_through(x), None), lambda _, dy: (dy,))
    y, dx = jax.jit(jax.value_and_grad(lambda x: (straight_through(x) ** 2).sum()))(x)
    back = fp8_dequantize(*fp8_quantize(x))
    np.testing.assert_allclose(dx, 2 * back, rtol=1e-6)
    np.testing.assert_allclose(y, (back**2).sum(), rtol=1e-5)


def test_delayed_scaling(rng: np.random.Generator) -> None:
    history = jnp.zeros(4)
    assert delayed_scale(history) == 1
    seen: list[float] = []
    for step in range(6):
        x = jnp.asarray(rng.normal(size=(3, 64)) * 4.0**-step, jnp.bfloat16)
        scale = delayed_scale(history, margin=1)
        largest = max(seen[-4:], default=0.0)
        assert scale == (np.float32(2 * largest) * np.float32(1 / 448) if seen else 1)
        (values, used), amax = jax.jit(partial(fp8_quantize, return_amax=True))(x, scale=scale)
        assert used == scale and amax == np.abs(np.asarray(x, np.float32)).max()
        np.testing.assert_array_equal(bits(values), rounded(x, scale, FORMATS[0]))
        history = jnp.roll(history, 1).at[0].set(amax)
        seen.append(float(amax))
    assert delayed_scale(history, amax_compute="most_recent") == np.float32(seen[-1]) * np.float32(
        1 / 448
    )
    odd = jnp.asarray([[np.nan, np.inf, 56.0], [0.0, 0.0, 0.0]])
    np.testing.assert_array_equal(delayed_scale(odd, power_of_two=True), [0.125, 1.0])
    assert np.isfinite(delayed_scale(jnp.asarray([3e38], jnp.float32), margin=200))


def test_fused_forms_are_the_two_by_themselves(rng: np.random.Generator) -> None:
    x = jnp.asarray(rng.normal(size=(5, 256)), jnp.bfloat16)
    weight = jnp.asarray(rng.normal(size=256), jnp.float32)
    options: dict[str, Any] = {"granularity": "block_1d", "transposed": True}
    found, total = jax.jit(partial(rms_norm_fp8, residual=x, **options))(x, weight)
    y, h = jax.jit(partial(rms_norm, residual=x))(x, weight)
    np.testing.assert_array_equal(total, h)
    pairs = [(found, fp8_quantize(y, **options))]
    pairs.append((rms_norm_fp8(x, weight), fp8_quantize(rms_norm(x, weight))))
    pairs.append((swiglu_fp8(x, granularity="row"), fp8_quantize(swiglu(x), granularity="row")))
    pairs.append((swiglu_fp8(x, x, alpha=1.5), fp8_quantize(swiglu(x, x, alpha=1.5))))
    for got, one in pairs:
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(one), strict=True):
            np.testing.assert_array_equal(bits(a), bits(b))


@pytest.mark.parametrize("packing", ["apart", "halves", "interleaved"])
@pytest.mark.parametrize("transposed", [False, True])
def test_swiglu_in_one_call(rng: np.random.Generator, packing: str, transposed: bool) -> None:
    """Tiles and batches that are not full, entries past the limit, and what is not finite."""

    def pairs(found: Any) -> list[Any]:
        return [*found] if transposed else [found]

    shape = (2, 83, 256)
    gate, up = rng.normal(0, 3, (2, *shape))
    gate[0, 3, 7], up[1, 80, 200] = np.nan, np.inf
    gate[:, :, 128:][:, 5] = 0
    together = np.concatenate if packing == "halves" else np.stack
    arrays = [gate, up]
    if packing != "apart":
        arrays = [together(arrays, -1).reshape(2, 83, 512)]
    given = [jnp.asarray(one, jnp.bfloat16) for one in arrays]
    gating: dict[str, Any] = {"alpha": 1.702, "limit": 7.0, "up_offset": 1.0}
    gating |= {"interleaved": packing == "interleaved"}
    for format, power_of_two in zip(FORMATS, (False, True), strict=True):
        options: dict[str, Any] = {"dtype": format, "power_of_two": power_of_two}
        options |= {"granularity": "block_1d", "transposed": transposed}
        found = jax.jit(partial(swiglu_fp8, **gating, **options))(*given)
        # The kernel's own y, where one array has both.
        kernel: Any = "custom_call" if packing != "apart" and PLATFORM == "cuda" else None
        y = jax.jit(partial(swiglu, **gating, implementation=kernel))(*given)
        right = fp8_quantize(y, **options)
        if packing == "apart" and PLATFORM == "cuda":
            # XLA's y may be a rounding of bfloat16 off, which moves a value by a step or a scale.
            found, right = ([fp8_dequantize(*one) for one in pairs(of)] for of in (found, right))
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True):
            a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
            if packing == "apart" and PLATFORM == "cuda":
                np.testing.assert_allclose(a, b, rtol=0.3, atol=0.02)
            else:
                np.testing.assert_array_equal(a, b)
        assert np.isnan(np.asarray(jax.tree.leaves(found)[0], np.float32)[0, 3, 7])
    with pytest.raises(NotImplementedError, match="swiglu_fp8 has no derivative"):
        jax.grad(lambda *x: swiglu_fp8(*x, granularity="block_1d", **gating).scales.sum())(*given)


# Tiles that have rows of two matrices, and on GPUs rows of four warps and of nine, in one launch.
@pytest.mark.parametrize("shape", [(2, 67, 896), (1, 300, 4096), (2, 256, 9216)])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_norm_in_one_call(
    rng: np.random.Generator, shape: tuple[int, int, int], residual: bool, transposed: bool
) -> None:
    """Tiles and batches that are not full, rows beyond f32's squares, and what is not finite."""
    x, other = rng.normal(size=(2, *shape))
    x[0, 3, 7], x[0, 9, -1], x[-1, 66], x[-1, 5] = np.nan, np.inf, 0, x[-1, 5] * 1e-25
    other[-1, 5] = 0
    x, other = (jnp.asarray(one, jnp.bfloat16) for one in (x, other))
    weight = jnp.asarray(rng.normal(0, 0.2, shape[-1]), jnp.float32)
    norm: dict[str, Any] = {"zero_centred": True, "eps": 1e-30}
    norm |= {"residual": other} if residual else {}
    for format, power_of_two in zip(FORMATS, (False, True), strict=True):
        options: dict[str, Any] = {"dtype": format, "power_of_two": power_of_two}
        options |= {"granularity": "block_1d", "transposed": transposed}
        found = jax.jit(partial(rms_norm_fp8, **norm, **options))(x, weight)
        y = jax.jit(partial(rms_norm, **norm))(x, weight)
        right = fp8_quantize(y[0] if residual else y, **options)
        pairs = [(found[0], right), (found[1], y[1])] if residual else [(found, right)]
        for got, one in pairs:
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(one), strict=True):
                np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
    with pytest.raises(NotImplementedError, match="rms_norm_fp8 has no derivative"):
        one = partial(rms_norm_fp8, granularity="block_1d")
        jax.grad(lambda x: one(x, weight).scales.sum())(x)


def test_wrong_arguments_are_named() -> None:
    x = jnp.ones((4, 256), jnp.bfloat16)
    values, scales = fp8_quantize(x, granularity="block_1d")
    block: dict[str, Any] = {"granularity": "block_1d"}
    cases: list[tuple[Any, type[Exception], str]] = [
        (
            lambda: fp8_quantize(x, dtype=jnp.float8_e4m3b11fnuz),
            TypeError,
            r"dtype is .*e4m3b11.*must be float8_e4m3fn or",
        ),
        (
            lambda: fp8_quantize(x, granularity="column"),
            ValueError,
            "granularity is 'column'; it must be one of 'tensor', 'row'",
        ),  # type: ignore[arg-type]
        (
            lambda: fp8_quantize(x, block_size=0, **block),
            ValueError,
            "block_size is 0; it must be at least 1",
        ),
        (
            lambda: fp8_quantize(x, block_size=1.5, **block),
            TypeError,
            "block_size is 1.5; it must be an integer",
        ),
        (
            lambda: fp8_quantize(x, power_of_two=2, **block),
            TypeError,
            "power_of_two is 2; it must be True or False",
        ),  # type: ignore[arg-type]
        (
            lambda: fp8_quantize(x, scale=1.0, **block),
            ValueError,
            "scale is given and granularity is 'block_1d'",
        ),
        (
            lambda: fp8_quantize(x, return_amax=True, **block),
            ValueError,
            "return_amax is set and granularity",
        ),
        (
            lambda: fp8_quantize(x, scale=1.0, amax=2.0),
            ValueError,
            "amax and scale are given; at most one",
        ),
        (
            lambda: fp8_quantize(x, scale=jnp.ones(4)),
            ValueError,
            r"scale has shape \(4,\); it must be a scalar",
        ),
        (
            lambda: fp8_quantize(x.astype(jnp.int32)),
            TypeError,
            "x has dtype int32; it must be bfloat16",
        ),
        (lambda: fp8_quantize(values), TypeError, "x has dtype float8_e4m3fn; it must be bfloat16"),
        (
            lambda: fp8_quantize(x[0], transposed=True),
            ValueError,
            r"must be \[.., M, D\] where transposed is set",
        ),
        (
            lambda: fp8_quantize(x[0], granularity="block_2d"),
            ValueError,
            r"must be \[.., M, D\] where granularity",
        ),
        (
            lambda: fp8_quantize(x[0, 0], granularity="row"),
            ValueError,
            r"x has shape \(\); it must be \[.., D\]",
        ),
        (
            lambda: fp8_quantize(x, implementation="pallas"),
            ValueError,
            "implementation is 'pallas'",
        ),
        (
            lambda: fp8_dequantize(values, scales[:3]),
            ValueError,
            r"scales has shape \(3, 2\).*one of the shapes \(\), \(4,\), \(4, 2\), \(1, 2\)",
        ),
        (
            lambda: fp8_dequantize(values, scales, block_size=64),
            ValueError,
            "where block_size is 64",
        ),
        (lambda: fp8_dequantize(x, scales), TypeError, "the dtype of values is .*must be float8"),
        (
            lambda: fp8_dequantize(values, scales.astype(jnp.bfloat16)),
            TypeError,
            "scales has dtype bfloat16",
        ),
        (
            lambda: fp8_dequantize(values, scales, jnp.int32),
            TypeError,
            "dtype is .*int32.*must be bfloat16",
        ),
        (lambda: delayed_scale(jnp.zeros((2, 0))), ValueError, r"history has shape \(2, 0\)"),
        (
            lambda: delayed_scale(jnp.zeros(2), amax_compute="mean"),
            ValueError,
            "amax_compute is 'mean'",
        ),  # type: ignore[arg-type]
        (
            lambda: delayed_scale(jnp.zeros(2), margin=0.5),
            TypeError,
            "margin is 0.5; it must be a whole number",
        ),  # type: ignore[arg-type]
    ]
    for run, error, message in cases:
        with pytest.raises(error, match=message):
            run()
