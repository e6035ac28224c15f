"""Rotary position embedding against formulas in float64, under all that JAX does to functions."""

import math
import re
from functools import partial
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from oracle import Floats, ulp
from pallas_bridge._src.rope.scaling import frequencies
from pallas_bridge._src.rope.tables import tables as make_tables

from pallas_bridge import (
    LinearScaling,
    Llama3Scaling,
    NtkScaling,
    YarnScaling,
    rope,
)

DTYPES = ("float32", "bfloat16", "float16")
U = 2.0**-24


def draw(rng: np.random.Generator, *shape: int, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(rng.normal(size=shape) * 3, dtype)


def wide(array: Any) -> Floats:
    return np.asarray(array).astype(np.float64)


def angles(positions: Any, rotary: int, base: float = 10000.0) -> Floats:
    """Angles [.., S, R / 2]; positions of 24 bits times frequencies in 53."""
    return wide(positions)[..., None] * base ** (-2.0 * np.arange(rotary // 2) / rotary)


def rotated(
    x: Any, cos: Floats, sin: Floats, interleaved: bool = False, inverse: bool = False
) -> tuple[Floats, Floats]:
    """What x [.., S, H, D] becomes, and the sizes of the two terms of each entry."""
    x, pairs = wide(x), cos.shape[-1]
    cos, sin = cos[..., None, :], (-sin if inverse else sin)[..., None, :]
    y, size = x.copy(), np.zeros_like(x)
    first, second = slice(0, pairs), slice(pairs, 2 * pairs)
    if interleaved:
        first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    a, b = x[..., first], x[..., second]
    y[..., first], y[..., second] = a * cos - b * sin, b * cos + a * sin
    size[..., first] = size[..., second] = np.abs(a) + np.abs(b)
    return y, size


def close(found: Any, expected: tuple[Floats, Floats], scale: float = 1.0) -> None:
    """Within two roundings of each term, four of the tables, and the last."""
    right, size = expected
    bound = 6 * U * scale * size + 0.5 * ulp(right, str(found.dtype)) * (1 + 1e-6) + 1e-37
    error = np.abs(wide(found) - right)
    assert (error <= bound).all(), (error / np.maximum(bound, 1e-300)).max()


@pytest.mark.numbers
@pytest.mark.parametrize("implementation", ["custom_call", "reference"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients(
    rng: np.random.Generator, dtype: str, interleaved: bool, implementation: Any
) -> None:
    for shape, heads, rotary in [
        ((2, 5, 3, 64), 1, None),
        ((7, 2, 128), 5, None),
        ((1, 4, 2, 80), 2, 32),
        ((3, 1, 1, 7), 4, 6),
        ((2, 3, 2, 5), 1, 0),
        ((2, 0, 2, 8), 1, None),
    ]:
        *leading, _, width = shape
        q, dq = (draw(rng, *shape, dtype=dtype) for _ in range(2))
        k, dk = (draw(rng, *leading, heads, width, dtype=dtype) for _ in range(2))
        positions = rng.integers(-1_000_000, 1_000_000, leading[-1])
        angle = angles(positions, width if rotary is None else rotary)
        options = {"rotary_dim": rotary, "interleaved": interleaved}

        def f(q: Any, k: Any, dq: Any, dk: Any, positions: Any, options: Any = options) -> Any:
            f = partial(rope, positions=positions, **options, implementation=implementation)
            values, vjp = jax.vjp(f, q, k)
            return values, vjp((dq, dk))

        values, gradients = jax.jit(f)(q, k, dq, dk, positions)
        tables = np.cos(angle), np.sin(angle)
        for given, found in zip((q, k), values, strict=True):
            assert (found.shape, found.dtype) == (given.shape, given.dtype)
            close(found, rotated(given, *tables, interleaved))
        for given, found in zip((dq, dk), gradients, strict=True):
            close(found, rotated(given, *tables, interleaved, inverse=True))


def test_one_array_gives_one_and_columns_behind_are_copied(rng: np.random.Generator) -> None:
    q = draw(rng, 2, 5, 3, 16).at[0, 0, 0, 15].set(jnp.nan).at[0, 0, 0, 3].set(jnp.inf)
    y = rope(q, rotary_dim=8, offset=7)
    np.testing.assert_array_equal(y[..., 8:], q[..., 8:])
    odd = ~np.isfinite(np.asarray(y))
    assert {tuple(map(int, place)) for place in np.argwhere(odd)} == {
        (0, 0, 0, 3),
        (0, 0, 0, 7),
        (0, 0, 0, 15),
    }
    pair = rope(q, q[..., :1, :], rotary_dim=8, offset=7)
    np.testing.assert_array_equal(pair[0], y)
    np.testing.assert_array_equal(pair[1], y[..., :1, :])


@pytest.mark.parametrize("implementation", ["custom_call", "reference"])
def test_positions_offsets_and_tables_say_the_same(
    rng: np.random.Generator, implementation: Any
) -> None:
    q = draw(rng, 2, 6, 3, 16)
    run = jax.jit(partial(rope, q, implementation=implementation))
    expected = run(positions=jnp.arange(6) + 1000)
    np.testing.assert_array_equal(run(offset=1000), expected)
    np.testing.assert_array_equal(run(offset=jnp.int16(1000)), expected)
    of_batch = jnp.arange(6, dtype=jnp.uint16)[None] + jnp.uint16(1000)
    np.testing.assert_array_equal(run(positions=of_batch), expected)
    np.testing.assert_array_equal(run(positions=jnp.tile(of_batch, (2, 1))), expected)
    cos, sin = make_tables(jnp.arange(6) + 1000, *frequencies(10000.0, 16, None))
    for batch in ((), (1,), (2,)):
        tables = [jnp.broadcast_to(one, (*batch, 6, 8)) for one in (cos, sin)]
        np.testing.assert_array_equal(run(tables=tables), expected)
    one = jax.jit(partial(rope, implementation=implementation))(q[0], offset=1000)
    np.testing.assert_array_equal(one, expected[0])
    # Sequences of a batch with positions of their own.
    apart = jnp.asarray(rng.integers(0, 10**6, (2, 6)))
    alone = [run_one(q[i], apart[i], implementation) for i in range(2)]
    np.testing.assert_array_equal(run(positions=apart), jnp.stack(alone))


def run_one(q: jax.Array, positions: jax.Array, implementation: Any) -> jax.Array:
    return jax.jit(lambda q, p: rope(q, positions=p, implementation=implementation))(q, positions)


@pytest.mark.numbers
@pytest.mark.parametrize("limit", [2048, 10**6, 2**24])
def test_tables_are_right_to_a_few_roundings(rng: np.random.Generator, limit: int) -> None:
    positions = np.concatenate([rng.integers(-limit, limit + 1, 3000), [0, 1, -1, limit, -limit]])
    for base, rotary in ((10000.0, 128), (500000.0, 64), (1e6, 2)):
        found = jax.jit(lambda p, b=base, r=rotary: make_tables(p, *frequencies(b, r, None)))(
            positions
        )
        angle = angles(positions, rotary, base)
        for one, right in zip(found, (np.cos(angle), np.sin(angle)), strict=True):
            # Positions of 24 bits move the angles of float64 by less than 2^-27.
            assert np.abs(wide(one) - right).max() <= (3.5 if limit == 2**24 else 3) * U


def yarn(rotary: int, base: float, of: YarnScaling) -> tuple[Floats, float]:
    """Of the paper, with the rounded ends of its program, a pair at a time."""
    found = []
    for pair in range(rotary // 2):
        frequency = base ** (-2 * pair / rotary)
        ends = [
            rotary * math.log(of.original_length / (beta * 2 * math.pi)) / (2 * math.log(base))
            for beta in (of.beta_fast, of.beta_slow)
        ]
        low, high = max(math.floor(ends[0]), 0), min(math.ceil(ends[1]), rotary - 1)
        if pair <= low:
            found.append(frequency)
        elif pair >= high:
            found.append(frequency / of.factor)
        else:
            share = (pair - low) / (high - low)
            found.append(share * frequency / of.factor + (1 - share) * frequency)
    given = of.attention_factor
    return np.array(found), 0.1 * math.log(of.factor) + 1 if given is None else given


def llama3(rotary: int, base: float, of: Llama3Scaling) -> Floats:
    """Of the models' program, by wavelength."""
    found = []
    for pair in range(rotary // 2):
        frequency = base ** (-2 * pair / rotary)
        wavelength = 2 * math.pi / frequency
        if wavelength < of.original_length / of.high_freq_factor:
            found.append(frequency)
        elif wavelength > of.original_length / of.low_freq_factor:
            found.append(frequency / of.factor)
        else:
            smooth = of.original_length / wavelength - of.low_freq_factor
            smooth /= of.high_freq_factor - of.low_freq_factor
            found.append((1 - smooth) * frequency / of.factor + smooth * frequency)
    return np.array(found)


def test_scalings_are_those_of_the_models(rng: np.random.Generator) -> None:
    base, rotary = 500000.0, 128
    plain = base ** (-2.0 * np.arange(64) / rotary)
    of_llama = Llama3Scaling(8.0, 1.0, 4.0, 8192)
    of_yarn = YarnScaling(32.0, 4096)
    own = YarnScaling(4.0, 32768, beta_fast=16, beta_slow=2, attention_factor=0.75)
    short = YarnScaling(2.0, 8)
    cases: list[tuple[Any, Floats, float]] = [
        (None, plain, 1),
        (LinearScaling(4.0), plain / 4, 1),
        (NtkScaling(4.0), (base * 4 ** (128 / 126)) ** (-2.0 * np.arange(64) / rotary), 1),
        (of_yarn, *yarn(rotary, base, of_yarn)),
        (own, *yarn(rotary, base, own)),
        (short, *yarn(rotary, base, short)),
        (of_llama, llama3(rotary, base, of_llama), 1),
    ]
    assert all((one < plain * (1 - 1e-9)).sum() > 8 for _, one, _ in cases[3:6:2])
    q = draw(rng, 2, 3, 128)
    positions = rng.integers(0, 131072, 2)
    for scaling, right, factor in cases:
        found, of_tables = frequencies(base, rotary, scaling)
        np.testing.assert_allclose(found, right, rtol=1e-13)
        assert of_tables == pytest.approx(factor, rel=1e-15)
        angle = positions[:, None] * right
        expected = rotated(q, np.cos(angle) * factor, np.sin(angle) * factor)
        close(rope(q, positions=positions, base=base, scaling=scaling), expected, max(factor, 1))
    # The highest frequency of NTK stays, the lowest is that of interpolation.
    np.testing.assert_allclose(cases[2][1][[0, -1]], [1, plain[-1] / 4], rtol=1e-12)


@pytest.mark.parametrize("implementation", ["custom_call", "reference"])
def test_derivatives_of_both_modes_and_of_any_order(
    rng: np.random.Generator, implementation: Any
) -> None:
    q, k = draw(rng, 3, 2, 8), draw(rng, 3, 1, 8)
    f = partial(rope, offset=5, implementation=implementation)
    check_grads(f, (q, k), order=2, modes=("fwd", "rev"), atol=0.1, rtol=0.1)
    # The map is linear.
    _, tangent = jax.jvp(lambda q: f(q), (q,), (k + q,))
    np.testing.assert_allclose(tangent, f(k + q), rtol=1e-5, atol=1e-5)
    hessian = jax.jit(jax.hessian(lambda q: (f(q) ** 2).sum()))(q[:1])
    np.testing.assert_allclose(hessian.reshape(16, 16), 2 * np.eye(16), atol=1e-5)
    # Positions and tables have no gradient.
    cos, sin = jnp.ones((2, 3, 4))
    zero = jax.grad(lambda cos: rope(q, tables=(cos, sin), implementation=implementation).sum())
    np.testing.assert_array_equal(zero(cos), jnp.zeros((3, 4)))


def test_what_backward_keeps(rng: np.random.Generator) -> None:
    q = draw(rng, 2, 16, 4, 8, dtype="bfloat16")
    _, vjp = jax.vjp(lambda q: rope(q), q)
    shapes = sorted(x.shape for x in jax.tree.leaves(vjp) if hasattr(x, "shape") and x.size > 1)
    assert shapes == [(2, 16, 4), (16, 4), (16, 4)], shapes


@pytest.mark.parametrize("of_positions", [None, 0, 1])
@pytest.mark.parametrize("of_q", [None, 0, 1, 3])
def test_vmap(rng: np.random.Generator, of_q: int | None, of_positions: int | None) -> None:
    if of_q is None and of_positions is None:
        return
    q, positions = draw(rng, 2, 5, 3, 8), jnp.asarray(rng.integers(0, 10**6, 5))
    many = q if of_q is None else jnp.stack([q, 2 * q, -q], of_q)
    where = jnp.stack([positions, positions + 1, 2 * positions], of_positions or 0)
    where = positions if of_positions is None else where

    def f(q: Any, positions: Any) -> Any:
        def loss(q: Any) -> jax.Array:
            return (jnp.arange(8.0) * rope(q, positions=positions)).sum()

        return rope(q, positions=positions), jax.grad(loss)(q)

    mapped = jax.jit(jax.vmap(f, in_axes=(of_q, of_positions)))(many, where)
    for index in range(3):
        one = q if of_q is None else jnp.take(many, index, of_q)
        at = positions if of_positions is None else jnp.take(where, index, of_positions)
        for found, expected in zip(mapped, jax.jit(f)(one, at), strict=True):
            np.testing.assert_array_equal(found[index], expected)
    if of_positions is None:
        text = str(jax.make_jaxpr(jax.vmap(f, in_axes=(of_q, None)))(many, where))
        assert " transpose[" not in text or of_q != 0


def test_two_maps_and_a_scan(rng: np.random.Generator) -> None:
    q = draw(rng, 2, 3, 4, 5, 8)
    f = jax.jit(jax.vmap(jax.vmap(lambda q, o: rope(q, offset=o), (0, None)), (0, 0)))
    found = f(q, jnp.array([3, 9]))
    for index, offset in enumerate((3, 9)):
        np.testing.assert_array_equal(found[index], rope(q[index], offset=offset))

    def step(carry: Any, x: Any) -> Any:
        return carry + 1, rope(x, offset=carry)

    _, scanned = jax.lax.scan(step, jnp.int32(3), q[0])
    for index in range(3):
        np.testing.assert_array_equal(scanned[index], rope(q[0, index], offset=3 + index))


def array(dtype: str, *shape: int) -> jax.Array:
    return jnp.ones(shape, dtype)


Q = array("float32", 2, 5, 3, 8)


@pytest.mark.parametrize(
    ("q", "keywords", "error", "message"),
    [
        (array("int32", 5, 3, 8), {}, TypeError, "q has dtype int32; it must be bfloat16"),
        (array("float32", 3, 8), {}, ValueError, "q has shape (3, 8); it must be [.., S, H, D]"),
        (array("float32", 5, 3, 7), {}, ValueError, "q has heads of 7 columns, an odd number"),
        (Q, {"k": Q[:, :4]}, ValueError, "k has shape (2, 4, 3, 8) and q (2, 5, 3, 8); they may"),
        (Q, {"k": Q[..., :4]}, ValueError, "they may differ in heads"),
        (Q, {"rotary_dim": 3}, ValueError, "rotary_dim is 3; it must be even and at most the col"),
        (Q, {"rotary_dim": 10}, ValueError, "rotary_dim is 10; it must be even and at most"),
        (Q, {"rotary_dim": -2}, ValueError, "rotary_dim is -2; it must be even"),
        (Q, {"rotary_dim": 4.0}, TypeError, "rotary_dim is 4.0; it must be an integer"),
        (Q, {"positions": np.ones(5)}, TypeError, "positions has dtype float32; it must be integ"),
        (Q, {"positions": np.arange(4)}, ValueError, "positions has shape (4,); it must be (5,)"),
        (Q, {"positions": np.ones((3, 5), int)}, ValueError, "positions has shape (3, 5); it must"),
        (Q, {"positions": 3}, ValueError, "positions has shape (); it must be (5,), a number a"),
        (Q, {"positions": np.arange(5), "offset": 1}, ValueError, "positions and offset are both"),
        (Q, {"offset": 1.5}, TypeError, "offset has dtype float32; it must be an integer"),
        (Q, {"offset": np.arange(2)}, ValueError, "offset has shape (2,); it must be a scalar"),
        (Q, {"base": 0}, ValueError, "base is 0; it must be finite and above 0"),
        (Q, {"base": math.inf}, ValueError, "base is inf; it must be finite and above 0"),
        (Q, {"base": "1e4"}, TypeError, "base is '1e4'; it must be a number"),
        (Q, {"interleaved": "yes"}, TypeError, "interleaved is 'yes'; it must be True or False"),
        (Q, {"scaling": "yarn"}, TypeError, "scaling is 'yarn'; it must be None or one of Linear"),
        (
            Q,
            {"scaling": NtkScaling(2), "rotary_dim": 2},
            ValueError,
            "rotary_dim is 2; with NtkScaling it must be at least 4",
        ),
        (
            Q,
            {"scaling": YarnScaling(2, 64), "base": 1.0},
            ValueError,
            "base is 1; with YarnScaling it must be above 1",
        ),
        (Q, {"tables": Q}, TypeError, "tables is of type ArrayImpl; it must be a pair"),
        (
            Q,
            {"tables": (jnp.ones((5, 4)),) * 2, "offset": 3},
            ValueError,
            "tables are given, and positions, offset, base or scaling too",
        ),
        (
            Q,
            {"tables": (jnp.ones((5, 4)), jnp.ones((5, 3)))},
            ValueError,
            "cos has shape (5, 4) and sin (5, 3); both must be",
        ),
        (
            Q,
            {"tables": (jnp.ones((4, 4)),) * 2},
            ValueError,
            "cos has shape (4,) before its pairs; it must be (5,)",
        ),
        (Q, {"tables": (jnp.ones((5, 5)),) * 2}, ValueError, "rotary_dim is 10; it must be even"),
        (
            Q,
            {"tables": (jnp.ones((5, 2)),) * 2, "rotary_dim": 8},
            ValueError,
            "rotary_dim is 8 and tables are of 2 pairs",
        ),
        (Q, {"tables": (jnp.ones((5, 2), int),) * 2}, TypeError, "cos has dtype int32; it must"),
        (Q, {"implementation": "pallas"}, ValueError, "rope: implementation is 'pallas'; it must"),
    ],
    ids=str,
)
def test_what_is_refused(q: Any, keywords: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        rope(q, **keywords)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: LinearScaling(0.5), ValueError, "LinearScaling: factor is 0.5; it must be finite"),
        (lambda: NtkScaling(math.nan), ValueError, "NtkScaling: factor is nan; it must be finite"),
        (
            lambda: YarnScaling(2, 64, beta_fast=1, beta_slow=1),
            ValueError,
            "YarnScaling: beta_fast is 1; it must be finite and above 1",
        ),
        (
            lambda: YarnScaling(2, 64, attention_factor=0),
            ValueError,
            "YarnScaling: attention_factor is 0; it must be finite and above 0",
        ),
        (
            lambda: YarnScaling(2, 0),
            ValueError,
            "YarnScaling: original_length is 0; it must be finite and at least 1",
        ),
        (
            lambda: Llama3Scaling(8, 4, 4, 8192),
            ValueError,
            "Llama3Scaling: high_freq_factor is 4; it must be finite and above 4",
        ),
        (
            lambda: Llama3Scaling("8", 1, 4, 8192),  # type: ignore[arg-type]
            TypeError,
            "Llama3Scaling: factor is '8'; it must be a number",
        ),
    ],
    ids=str,
)
def test_scalings_that_are_refused(make: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        make()


def test_options_that_are_traced() -> None:
    for name, value in (("base", 1e4), ("rotary_dim", 4), ("interleaved", True)):
        with pytest.raises(TypeError, match=f"{name} is traced; it must be known"):
            jax.jit(lambda value, name=name: rope(Q, **{name: value}))(value)


def test_wider_dtypes_are_the_references(rng: np.random.Generator) -> None:
    with jax.enable_x64(True):
        q = jnp.asarray(rng.normal(size=(4, 2, 8)))
        with pytest.raises(TypeError, match=r'x has dtype float64.*implementation="reference"'):
            rope(q)
        found = rope(q, offset=jnp.int64(3), implementation="reference")
        assert found.dtype == jnp.float64
        angle = angles(np.arange(4) + 3, 8)
        right, size = rotated(q, np.cos(angle), np.sin(angle))
        assert (np.abs(found - right) <= 4 * U * size).all()
