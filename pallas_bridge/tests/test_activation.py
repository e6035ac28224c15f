"""Activations against their formulas in float64, under everything that JAX does to functions."""

import math
from functools import partial
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from oracle import Floats, ulp

import pallas_bridge
from pallas_bridge import geglu, gelu, reglu, squared_relu, swiglu

DTYPES = ("float32", "bfloat16", "float16")
# What is below the normal range of f32 may be lost, with what multiplies it.
LOST = 1e-33
GPT_OSS: dict[str, Any] = {"alpha": 1.702, "limit": 7.0, "up_offset": 1.0}

# Functions of one array, with their names in float64; and of gate and up.
SINGLE = {
    "gelu_tanh": gelu,
    "gelu_erf": partial(gelu, approximate=False),
    "gelu_quick": partial(gelu, approximate="quick"),
    "squared_relu": squared_relu,
}
GATED: dict[str, tuple[Any, dict[str, Any]]] = {
    "silu": (swiglu, {}),
    "gpt_oss": (swiglu, GPT_OSS),
    "gelu_tanh": (geglu, {}),
    "gelu_erf": (partial(geglu, approximate=False), {"limit": 2.0}),
    "gelu_quick": (partial(geglu, approximate="quick"), {"up_offset": -0.5}),
    "relu": (reglu, {}),
}


def sigmoid(z: Floats) -> Floats:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-z))


def at(name: str, x: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Returns f, f', and what each may be wrong in proportion to."""
    if name == "gelu_erf":
        below = np.vectorize(math.erfc, otypes=[float])(-x * math.sqrt(0.5)) / 2
        tail = np.vectorize(math.erfc, otypes=[float])(np.abs(x) * math.sqrt(0.5)) / 2
        density, exponent = np.exp(-x * x / 2) / math.sqrt(2 * math.pi), x * x / 2
        scale = below + tail * exponent
        more = np.abs(x) * density * (1 + exponent)
        return x * below, below + x * density, np.abs(x) * scale, scale + more
    if name in ("relu", "squared_relu"):
        above, slope = np.maximum(x, 0), (x > 0).astype(float)
        if name == "squared_relu":
            above, slope = above**2, 2 * above
        return above, slope, above, slope
    if name == "gelu_tanh":
        first = 2 * math.sqrt(2 / math.pi)
        z, dz = first * (x + 0.044715 * x**3), first * (1 + 3 * 0.044715 * x * x)
    else:
        alpha = {"silu": 1.0}.get(name, float(np.float32(1.702)))
        z, dz = alpha * x, np.full_like(x, alpha)
    s, rest = sigmoid(z), sigmoid(-z)
    scale = s * (1 + rest * np.abs(z))
    slope = s + x * dz * s * rest
    return x * s, slope, np.abs(x) * scale, scale * (1 + np.abs(x * dz))


def exact(array: Any) -> Floats:
    return np.asarray(array).astype(np.float64)


def close(name: str, found: Any, wanted: Floats, scale: Floats) -> None:
    """Compares with half a unit in the last place, and the contract's bound."""
    found = np.asarray(found)
    assert found.shape == wanted.shape, f"{name}: {found.shape}"
    rounded = wanted.astype(found.dtype).astype(np.float64)
    error = np.where(exact(found) == rounded, 0, np.abs(exact(found) - wanted))
    allowed = 0.51 * ulp(rounded, found.dtype) + 32 * 2.0**-24 * scale + LOST
    worst = np.nanmax(error / allowed) if error.size else 0
    assert not (error > allowed).any(), f"{name}: {worst} times what is allowed"
    assert not np.isnan(exact(found)).any(), name


def check_gated(
    name: str, found: Any, gate: Floats, up: Floats, dy: Floats, options: dict[str, Any]
) -> None:
    """Compares y and gradients of gate and up."""
    y, dgate, dup = found
    limit, offset = options.get("limit") or np.inf, options.get("up_offset", 0.0)
    within = (gate <= limit, np.abs(up) <= limit)
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit) + offset
    value, slope, value_scale, slope_scale = at(name, gate)
    close("y", y, value * up, value_scale * np.abs(up))
    of_gate = np.where(within[0], dy * up * slope, 0)
    close("dgate", dgate, of_gate, slope_scale * np.abs(dy * up))
    close("dup", dup, np.where(within[1], dy * value, 0), value_scale * np.abs(dy))


def pulled(function: Any, arrays: Any, dy: Any) -> tuple[Any, Any]:
    """What a function gives, and its gradients."""

    def run(arrays: Any, dy: Any) -> Any:
        y, vjp = jax.vjp(function, *arrays)
        return y, vjp(dy)

    found: tuple[Any, Any] = jax.jit(run)(arrays, dy)
    return found


def draw(rng: np.random.Generator, dtype: str, *shape: int, scale: float = 3.0) -> jax.Array:
    return jnp.asarray(rng.normal(size=shape) * scale, dtype)


# Most of the time is XLA's, a compilation a shape: every dtype and implementation has one that is
# odd in every extent, and shapes with next to nothing in them go by a dtype that is drawn.
def check_of_one_array(
    rng: np.random.Generator, name: str, dtype: str, *shape: int, **more: Any
) -> None:
    # Of either size, so that some are far out.
    size = rng.choice([3.0, 30.0], size=shape)
    x, dy = jnp.asarray(rng.normal(size=shape) * size, dtype), draw(rng, dtype, *shape)
    y, (dx,) = pulled(partial(SINGLE[name], **more), (x,), dy)
    assert y.dtype == dx.dtype == dtype
    value, slope, value_scale, slope_scale = at(name, exact(x))
    close("y", y, value, value_scale)
    close("dx", dx, exact(dy) * slope, slope_scale * np.abs(exact(dy)))


@pytest.mark.parametrize("implementation", ["custom_call", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SINGLE)
def test_of_one_array(rng: np.random.Generator, name: str, dtype: str, implementation: Any) -> None:
    check_of_one_array(rng, name, dtype, 2, 5, 1031, implementation=implementation)


@pytest.mark.parametrize("shape", [(), (0, 4), (1,), (3, 37)], ids=str)
def test_of_one_array_that_is_small(rng: np.random.Generator, shape: tuple[int, ...]) -> None:
    for name in SINGLE:
        check_of_one_array(rng, name, rng.choice(DTYPES), *shape, implementation="custom_call")


def parts(array: Any, interleaved: bool) -> Any:
    """Gate and up of what packs them."""
    if interleaved:
        return array[..., ::2], array[..., 1::2]
    half = array.shape[-1] // 2
    return array[..., :half], array[..., half:]


def check_packed(rng: np.random.Generator, case: str, dtype: str, *shape: int, **more: Any) -> None:
    function, options = GATED[case]
    name = "gelu_quick" if case == "gpt_oss" else case
    x, dy = draw(rng, dtype, *shape), draw(rng, dtype, *shape[:-1], shape[-1] // 2)
    y, (dx,) = pulled(partial(function, **options, **more), (x,), dy)
    assert y.dtype == dx.dtype == dtype and dx.shape == x.shape
    interleaved = more["interleaved"]
    gate, up = parts(x, interleaved)
    found = (y, *parts(dx, interleaved))
    check_gated(name, found, exact(gate), exact(up), exact(dy), options)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("implementation", ["custom_call", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", GATED)
def test_gated(
    rng: np.random.Generator, case: str, dtype: str, implementation: Any, interleaved: bool
) -> None:
    more = {"implementation": implementation, "interleaved": interleaved}
    check_packed(rng, case, dtype, 3, 7, 2062, **more)


@pytest.mark.parametrize("shape", [(2,), (3, 0), (40, 512)], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_gated_of_other_shapes(
    rng: np.random.Generator, interleaved: bool, shape: tuple[int, ...]
) -> None:
    more = {"implementation": "custom_call", "interleaved": interleaved}
    for case in rng.choice([*GATED], 3, replace=False):
        check_packed(rng, case, rng.choice(DTYPES), *shape, **more)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", GATED)
def test_gated_of_two_arrays(rng: np.random.Generator, case: str, dtype: str) -> None:
    function, options = GATED[case]
    name = "gelu_quick" if case == "gpt_oss" else case
    gate, up, dy = (draw(rng, dtype, 3, 7, 1031) for _ in range(3))
    y, of_both = pulled(partial(function, **options), (gate, up), dy)
    assert y.dtype == dtype
    check_gated(name, (y, *of_both), exact(gate), exact(up), exact(dy), options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_numbers_stay_where_they_are(rng: np.random.Generator, dtype: str) -> None:
    for interleaved in (False, True):
        x, dy = draw(rng, dtype, 3, 64), draw(rng, dtype, 3, 32)
        f = partial(swiglu, interleaved=interleaved, implementation="custom_call", **GPT_OSS)
        # Within the limit, or its gradient is 0 whatever the gate is.
        x = x.at[1, 3 if interleaved else 33].set(0.5)
        y, (dx,) = pulled(f, (x,), dy)
        bad = x.at[1, 2 if interleaved else 1].set(jnp.nan)
        other, (gradient,) = pulled(f, (bad,), dy)
        assert np.argwhere(np.isnan(exact(other))).tolist() == [[1, 1]]
        assert np.isnan(exact(gradient)).sum() == 2
        kept = ~np.isnan(exact(other))
        np.testing.assert_array_equal(np.asarray(other)[kept], np.asarray(y)[kept])
        kept = ~np.isnan(exact(gradient))
        np.testing.assert_array_equal(np.asarray(gradient)[kept], np.asarray(dx)[kept])
        # A gate of infinity is the limit; an entry at the limit has a gradient.
        edge = x.at[0, 0].set(jnp.inf).at[2, 0].set(7.0)
        y, (dx,) = pulled(f, (edge,), jnp.ones_like(dy))
        assert np.isfinite(exact(y)).all() and exact(dx)[0, 0] == 0 and exact(dx)[2, 0] != 0
    for name, function in SINGLE.items():
        x = jnp.asarray([jnp.inf, -jnp.inf, jnp.nan, 0.0], dtype)
        y, (dx,) = pulled(function, (x,), jnp.ones_like(x))
        assert exact(y)[0] == np.inf and np.isnan(exact(y)[2]) and exact(y)[3] == 0, name


def test_rows_do_not_depend_on_how_many_there_are(rng: np.random.Generator) -> None:
    x, dy = draw(rng, "bfloat16", 37, 2 * 331), draw(rng, "bfloat16", 37, 331)
    for given, of in ((swiglu, dy), (partial(swiglu, interleaved=True), dy), (gelu, x)):
        function = partial(given, implementation="custom_call")
        y, (dx,) = pulled(function, (x,), of)
        for rows in (slice(0, 1), slice(5, 24)):
            value, (gradient,) = pulled(function, (x[rows],), of[rows])
            np.testing.assert_array_equal(np.asarray(value), np.asarray(y)[rows])
            np.testing.assert_array_equal(np.asarray(gradient), np.asarray(dx)[rows])


@pytest.mark.parametrize("under", [jax.jit, jax.vmap, jax.checkpoint], ids=lambda one: one.__name__)
@pytest.mark.parametrize("of", ["one", "halves", "interleaved", "two"])
def test_both_modes_of_differentiation(rng: np.random.Generator, of: str, under: Any) -> None:
    x, up = draw(rng, "float32", 3, 8, scale=1.0), draw(rng, "float32", 3, 8, scale=1.0)
    function = {"one": gelu, "interleaved": partial(swiglu, interleaved=True)}.get(of, swiglu)
    arrays = (x, up) if of == "two" else (x,)
    # Compiled once, as differences call it again and again.
    check_grads(jax.jit(under(function)), arrays, 1, rtol=2e-2, atol=2e-2, eps=1e-2)


@pytest.mark.slow
def test_second_derivatives_of_two_arrays(rng: np.random.Generator) -> None:
    x, up = draw(rng, "float32", 3, 8, scale=1.0), draw(rng, "float32", 3, 8, scale=1.0)
    # It is XLA's program, which has them.
    check_grads(jax.jit(swiglu), (x, up), 2, rtol=2e-2, atol=2e-2, eps=1e-2)
    assert np.isfinite(jax.hessian(lambda x: gelu(x, implementation="reference").sum())(x)).all()


@pytest.mark.only("cpu", "what a program without kernels keeps is XLA's to say")
def test_what_backward_keeps(rng: np.random.Generator) -> None:
    x, up = draw(rng, "bfloat16", 6, 64), draw(rng, "bfloat16", 6, 64)
    for function, arrays in ((gelu, (x,)), (swiglu, (x,)), (swiglu, (x, up))):
        _, vjp = jax.vjp(function, *arrays)
        kept = [one for one in jax.tree.leaves(vjp) if getattr(one, "size", 0) > 1]
        assert sorted(one.shape for one in kept) == [(6, 64)] * len(arrays)
        assert all(one.dtype == jnp.bfloat16 for one in kept)


def test_info_says_what_runs_where() -> None:
    info = pallas_bridge.info().details()
    assert "activation on tpu: reference" in info
    assert "of gate and up in two arrays XLA's own program" in info
    loaded = pallas_bridge.info().library
    if loaded is not None and "cuda" in loaded.platforms:
        assert "XLA's own program for relu single, squared_relu single" in info


def test_the_faster_program_runs() -> None:
    # Of a gradient; nothing asks for y.
    def calls(function: Any, platform: str, *arrays: Any) -> int:
        text = jax.jit(jax.grad(lambda *x: function(*x).sum())).trace(*arrays)
        return text.lower(lowering_platforms=(platform,)).as_text().count("@xentile_activation")

    rows = array("float32", 2, 6)
    for function in (swiglu, squared_relu):
        assert calls(function, "cpu", rows) == 1 and calls(function, "tpu", rows) == 0
    # By the table, whether or not this library has kernels for GPUs.
    assert calls(squared_relu, "cuda", rows) == 0
    assert calls(gelu, "cpu", rows) == 1
    assert calls(partial(gelu, approximate=False), "tpu", rows) == 0
    assert calls(swiglu, "cpu", rows, rows) == 0
    loaded = pallas_bridge.info().library
    if loaded is not None and "cuda" in loaded.platforms:
        for function in (
            gelu,
            swiglu,
            partial(gelu, approximate=False),
            partial(squared_relu, implementation="custom_call"),
        ):
            assert calls(function, "cuda", rows) == 1


def array(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


ROWS = array("float32", 2, 6)


@pytest.mark.parametrize(
    ("function", "arrays", "keywords", "error", "message"),
    [
        (gelu, (array("int32", 2, 6),), {}, TypeError, "x has dtype int32; it must be bfloat16"),
        (gelu, (ROWS,), {"approximate": "none"}, ValueError, "approximate is 'none'; it must be T"),
        (gelu, (ROWS,), {"implementation": "triton"}, ValueError, "implementation is 'triton'"),
        (swiglu, (array("float32", 2, 7),), {}, ValueError, "it must be even and is 7"),
        (swiglu, (array("float32"),), {}, ValueError, r"x has shape \(\); it must be \[.., 2F\]"),
        (swiglu, (ROWS, array("float32", 6)), {}, ValueError, r"up has shape \(6,\); it must be"),
        (swiglu, (ROWS, array("int32", 2, 6)), {}, TypeError, "up has dtype int32; it must"),
        (swiglu, (ROWS, ROWS), {"interleaved": True}, ValueError, "interleaved is True and up is"),
        (swiglu, (ROWS, ROWS), {"implementation": "custom_call"}, ValueError, "of gate and up in"),
        (swiglu, (ROWS,), {"interleaved": 3}, TypeError, "interleaved is 3; it must be True or"),
        (swiglu, (ROWS,), {"limit": 0.0}, ValueError, "limit is 0.0; it must be finite and above"),
        (swiglu, (ROWS,), {"limit": -7}, ValueError, "limit is -7.0; it must be finite and above"),
        (swiglu, (ROWS,), {"alpha": float("nan")}, ValueError, "alpha is nan; it must be finite"),
        (swiglu, (ROWS,), {"alpha": "1"}, TypeError, "alpha is '1'; it must be a number"),
        (reglu, (ROWS,), {"up_offset": 1e39}, ValueError, r"up_offset is 1e\+39; it must be finit"),
    ],
    ids=str,
)
def test_what_is_refused(
    function: Any, arrays: Any, keywords: Any, error: Any, message: str
) -> None:
    with pytest.raises(error, match=message):
        jax.eval_shape(partial(function, **keywords), *arrays)


def test_options_that_are_traced() -> None:
    with pytest.raises(TypeError, match="limit is traced; it must be known"):
        jax.jit(lambda limit: swiglu(jnp.ones((2, 4)), limit=limit))(7.0)


def test_wider_dtypes_are_the_references(rng: np.random.Generator) -> None:
    with jax.enable_x64(True):
        x = jnp.asarray(rng.normal(size=(3, 8)))
        with pytest.raises(TypeError, match=r"x has dtype float64; .*reference"):
            gelu(x)
        wanted = at("gelu_erf", exact(x))[0]
        found = gelu(x, approximate=False, implementation="reference")
        np.testing.assert_allclose(found, wanted, rtol=1e-12)
