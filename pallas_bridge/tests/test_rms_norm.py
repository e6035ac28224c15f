"""RMSNorm against its formulas in float64, under everything that JAX does to functions."""

import json
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from oracle import Floats, ulp
from pallas_bridge._src import library
from placement import PLATFORM

import pallas_bridge
from pallas_bridge import export, rms_norm

DTYPES = ("float32", "bfloat16", "float16")
TARGETS = [
    f"xentile_rms_norm_{name}" for name in ("forward", "add_forward", "backward", "add_backward")
]
CHECKS = [jax.export.DisabledSafetyCheck.custom_call(target) for target in TARGETS]


@dataclass(frozen=True)
class Problem:
    """Arrays, and cotangents of y and the sum."""

    x: jax.Array
    weight: jax.Array
    residual: jax.Array | None
    dy: jax.Array
    dsum: jax.Array | None
    options: dict[str, Any]

    def pulled(self, function: Any = jax.jit, **options: Any) -> tuple[Any, Any]:
        """What rms_norm gives, and gradients of x, weight and residual, if any."""
        given = {**self.options, **options}

        def run(x: Any, weight: Any, residual: Any, dy: Any, dsum: Any) -> Any:
            def f(x: Any, weight: Any, residual: Any) -> Any:
                return rms_norm(x, weight, residual=residual, **given)

            values, pull = jax.vjp(f, x, weight, residual)
            return values, pull(dy if residual is None else (dy, dsum))

        found: tuple[Any, Any] = function(run)(
            self.x, self.weight, self.residual, self.dy, self.dsum
        )
        return found


def problem(
    rng: np.random.Generator,
    *shape: int,
    dtype: str = "float32",
    of_weight: str | None = None,
    has_residual: bool = False,
    scale: float = 1.0,
    offset: float = 0.0,
    **options: Any,
) -> Problem:
    def draw(*shape: int, dtype: str = dtype) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) * scale + offset, dtype)

    return Problem(
        draw(*shape),
        jnp.asarray(rng.normal(size=shape[-1:]), of_weight or dtype),
        draw(*shape) if has_residual else None,
        jnp.asarray(rng.normal(size=shape), dtype),
        jnp.asarray(rng.normal(size=shape), dtype) if has_residual else None,
        options,
    )


def exact(array: Any) -> Floats:
    return np.asarray(array).astype(np.float64)


def check(found: tuple[Any, Any], of: Problem) -> None:
    """Compares what `Problem.pulled` gives with the formulas, in units of what is rounded."""
    values, (dx, dweight, dresidual) = found
    eps = of.options.get("eps", 1e-6)
    dtype, columns = of.x.dtype, of.x.shape[-1]
    x = exact(of.x)
    values = [values] if of.residual is None else [*values]
    with np.errstate(all="ignore"):
        if of.residual is not None:
            # The sum is exact to f32, and then rounded once.
            total = (exact(of.x) + exact(of.residual)).astype(np.float32).astype(dtype)
            assert values[1].dtype == dtype
            np.testing.assert_array_equal(np.asarray(values[1]), total)
            x = total.astype(np.float64)
        scale = exact(of.weight) + bool(of.options.get("zero_centred"))
        mean = (x**2).mean(-1, keepdims=True)
        # Squares beyond f32 are infinite.
        mean[mean > np.finfo(np.float32).max] = np.inf
        rstd = 1 / np.sqrt(mean + eps)
        normalised = x * rstd
        y, g = normalised * scale, exact(of.dy) * scale
        between = normalised * (normalised * g).mean(-1, keepdims=True)
        wanted_dx = rstd * (g - between)
        size_dx = rstd * (
            np.abs(g) + np.abs(normalised) * np.abs(normalised * g).mean(-1, keepdims=True)
        )
        if of.dsum is not None:
            wanted_dx = wanted_dx + exact(of.dsum)
            size_dx = size_dx + np.abs(exact(of.dsum))
        terms = (exact(of.dy) * normalised).reshape(-1, columns)
    assert values[0].dtype == dtype and dx.dtype == dtype and dweight.dtype == of.weight.dtype
    tokens = len(terms)
    close("y", values[0], y, np.abs(y))
    close("dx", dx, wanted_dx, size_dx)
    close("dweight", dweight, terms.sum(0), np.abs(terms).sum(0), 1 + tokens / 64)
    if of.residual is not None:
        np.testing.assert_array_equal(np.asarray(dresidual), np.asarray(dx))


def close(name: str, found: Any, wanted: Floats, size: Floats, more: float = 1.0) -> None:
    """Compares with half a unit in the last place, and what f32 loses of terms of that size."""
    found = np.asarray(found)
    assert found.shape == wanted.shape, name
    with np.errstate(all="ignore"):
        rounded = wanted.astype(found.dtype).astype(np.float64)
        assert np.array_equal(np.isnan(exact(found)), np.isnan(rounded)), f"{name}: NaN elsewhere"
        error = np.where(exact(found) == rounded, 0, np.abs(exact(found) - wanted))
        allowed = 0.51 * ulp(rounded, found.dtype) + size * more * 2.0**-21
        worst = np.nanmax(error / allowed) if error.size else 0
    assert not (error > allowed).any(), f"{name}: {worst} times what is allowed"


@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("of_weight", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients(
    rng: np.random.Generator, dtype: str, of_weight: str, has_residual: bool
) -> None:
    more: dict[str, Any] = {"dtype": dtype, "of_weight": of_weight, "has_residual": has_residual}
    for columns in (1, 7, 64, 517):
        of = problem(rng, 2, 37, columns, **more, zero_centred=columns % 2 == 1)
        check(of.pulled(), of)


@pytest.mark.parametrize("implementation", ["custom_call", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_awkward_numbers(rng: np.random.Generator, dtype: str, implementation: Any) -> None:
    for more in ({"offset": 1e4}, {"scale": 1e-4}, {"scale": 1e-4, "eps": 0.0}, {"eps": 10}):
        of = problem(rng, 5, 96, dtype=dtype, implementation=implementation, **more)
        check(of.pulled(), of)
    of = problem(rng, 6, 33, dtype=dtype, implementation=implementation)
    bad = of.x.at[1, 3].set(jnp.nan).at[2, 4].set(jnp.inf).at[3].set(0)
    of = Problem(bad, of.weight, None, of.dy.at[4].set(0), None, of.options)
    y, (dx, dweight, _) = of.pulled()
    assert np.isnan(exact(y)[1]).all() and np.isnan(exact(dx)[1]).all()
    # Infinity over infinity, and 0 where that is a number.
    assert np.isnan(exact(y)[2, 4]) and np.isnan(exact(dx)[2]).all()
    assert np.isnan(exact(dweight)).any()
    assert not exact(y)[3].any() and np.isfinite(exact(dx)[3]).all() and not exact(dx)[4].any()
    others = [0, 3, 4, 5]
    alone = Problem(
        of.x[jnp.array(others)], of.weight, None, of.dy[jnp.array(others)], None, of.options
    )
    value, (gradient, _, _) = alone.pulled()
    np.testing.assert_array_equal(np.asarray(y)[others], np.asarray(value))
    np.testing.assert_array_equal(np.asarray(dx)[others], np.asarray(gradient))


@pytest.mark.parametrize("shape", [(1,), (5,), (1, 8), (0, 8), (3, 0, 8), (1, 1, 1), (2, 3, 2, 16)])
def test_shapes(rng: np.random.Generator, shape: tuple[int, ...]) -> None:
    for has_residual in (False, True):
        of = problem(rng, *shape, has_residual=has_residual)
        check(of.pulled(), of)


# On GPUs: rows for a part of a warp, for one, for several, as long as registers hold or as shared
# memory does, longer, and rows that begin inside a vector.
LENGTHS = (8, 128, 512, 896, 1096, 4096, 12288, 20480, 65536, 65535)


@pytest.mark.parametrize("columns", LENGTHS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_every_length_are_the_same_among_others(
    rng: np.random.Generator, dtype: str, columns: int
) -> None:
    has_residual = columns % 3 != 0
    of = problem(rng, 67, columns, dtype=dtype, of_weight="bfloat16", has_residual=has_residual)
    found = of.pulled()
    check(found, of)
    some = slice(5, 24, 3)
    alone = Problem(
        of.x[some],
        of.weight,
        None if of.residual is None else of.residual[some],
        of.dy[some],
        None if of.dsum is None else of.dsum[some],
        of.options,
    )
    (values, (dx, _, _)), (those, (gradient, _, _)) = found, alone.pulled()
    for one, other in zip(
        jax.tree.leaves((values, dx)), jax.tree.leaves((those, gradient)), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(one)[some], np.asarray(other))


# GPUs copy a weight ahead of rows where these are few.
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(40_000, 512), (9_000, 1096), (1_500, 4096)])
def test_many_rows_have_the_bits_of_few(
    rng: np.random.Generator, rows: int, columns: int, has_residual: bool
) -> None:
    x, residual = (jnp.asarray(rng.normal(size=(rows, columns)), "bfloat16") for _ in range(2))
    weight = jnp.asarray(rng.normal(size=columns), "float32")
    some = slice(5, rows, rows // 20)

    @jax.jit
    def run(x: jax.Array, residual: jax.Array) -> Any:
        return rms_norm(x, weight, residual=residual if has_residual else None, return_rstd=True)

    for all_of_it, few in zip(run(x, residual), run(x[some], residual[some]), strict=True):
        np.testing.assert_array_equal(all_of_it[some], few)


def test_cotangents_that_are_strided_or_expanded(rng: np.random.Generator) -> None:
    of = problem(rng, 6, 5, 16, dtype="bfloat16")

    def pulled(dy: Any, into: Any) -> Any:
        return jax.jit(lambda x, w, dy: jax.vjp(rms_norm, x, w)[1](into(dy)))(of.x, of.weight, dy)

    turned = jnp.moveaxis(of.dy, 0, 2)
    row = of.dy[:1, :, :1]
    for dy, into in (
        (turned, lambda dy: jnp.moveaxis(dy, 2, 0)),
        (row, lambda dy: jnp.broadcast_to(dy, of.x.shape)),
        (of.dy[::-1], lambda dy: dy[::-1]),
    ):
        one = Problem(of.x, of.weight, None, into(dy), None, {})
        dx, dweight = pulled(dy, into)
        check((rms_norm(of.x, of.weight), (dx, dweight, None)), one)


def test_many_tokens_are_summed_in_a_fixed_order(rng: np.random.Generator) -> None:
    of = problem(rng, 5000, 40, dtype="bfloat16", of_weight="float32")
    _, (_, first, _) = of.pulled()
    check(of.pulled(), of)
    for _ in range(3):
        np.testing.assert_array_equal(of.pulled()[1][1], first)


def test_rstd_is_returned_and_has_a_derivative(rng: np.random.Generator) -> None:
    of = problem(rng, 4, 6, 24, has_residual=True)
    y, total, rstd = rms_norm(of.x, of.weight, residual=of.residual, return_rstd=True)
    assert rstd.dtype == jnp.float32 and rstd.shape == (4, 6)
    wanted = 1 / np.sqrt((exact(total) ** 2).mean(-1) + 1e-6)
    np.testing.assert_allclose(rstd, wanted, rtol=1e-6)
    alone, again = rms_norm(total, of.weight, return_rstd=True)
    np.testing.assert_array_equal(alone, y)
    np.testing.assert_array_equal(again, rstd)

    def f(implementation: Any, *arrays: jax.Array) -> jax.Array:
        x, weight, residual = arrays
        found = rms_norm(
            x, weight, residual=residual, return_rstd=True, implementation=implementation
        )
        return sum(jnp.sin(one).sum() for one in found)  # type: ignore[return-value]

    arrays = (of.x, of.weight, of.residual)
    gradients = (
        jax.jit(jax.grad(partial(f, name), (0, 1, 2)))(*arrays) for name in (None, "reference")
    )
    for found, expected in zip(*gradients, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("has_residual", [False, True])
def test_both_modes_of_differentiation(rng: np.random.Generator, has_residual: bool) -> None:
    of = problem(rng, 2, 3, 12, has_residual=has_residual)
    arrays = (of.x, of.weight, *([] if of.residual is None else [of.residual]))

    def f(x: Any, weight: Any, *residual: Any) -> Any:
        return rms_norm(x, weight, residual=residual[0] if residual else None, return_rstd=True)

    def of_weight(weight: Any) -> Any:
        return f(of.x, weight, *arrays[2:])

    axes = (0, None, *[0] * has_residual)
    for function in (f, jax.jit(f), jax.vmap(f, in_axes=axes), jax.checkpoint(f)):
        check_grads(function, arrays, 1, rtol=2e-2, atol=2e-2, eps=1e-2)
    check_grads(of_weight, (of.weight,), 1, rtol=2e-2, atol=2e-2, eps=1e-2)
    values, along = jax.linearize(lambda x: f(x, *arrays[1:]), of.x)
    np.testing.assert_array_equal(values[0], f(*arrays)[0])
    assert along(of.x)[0].shape == of.x.shape


def test_second_derivatives_are_refused() -> None:
    x, weight = jnp.ones(4), jnp.ones(4)

    def f(x: jax.Array, **options: Any) -> jax.Array:
        return rms_norm(x, weight, **options).sum()

    with pytest.raises(NotImplementedError, match=r"rms_norm: second derivatives .*reference"):
        jax.hessian(f)(x)
    assert np.isfinite(jax.hessian(partial(f, implementation="reference"))(x)).all()


# Which axis of x is mapped, and of weight.
MAPPED = [(0, None), (1, None), (2, None), (0, 0), (1, 1), (None, 0)]


@pytest.mark.parametrize(("of_x", "of_weight"), MAPPED)
def test_vmap(rng: np.random.Generator, of_x: int | None, of_weight: int | None) -> None:
    of = problem(rng, 3, 5, 8)
    size = of.x.shape[0]
    weights = jnp.asarray(rng.normal(size=(size, 8)), jnp.float32)

    def f(x: Any, weight: Any, dy: Any) -> Any:
        y, pull = jax.vjp(rms_norm, x, weight)
        return y, *pull(dy)

    def many(x: Any, weight: Any) -> jax.Array:
        rows = jax.vmap(rms_norm, in_axes=(of_x, of_weight))(x, weight)
        return (rows * of.dy).sum()

    x = of.x[0] if of_x is None else jnp.moveaxis(of.x, 0, of_x)
    weight = weights[0] if of_weight is None else jnp.moveaxis(weights, 0, of_weight)
    found = jax.jit(jax.vmap(f, in_axes=(of_x, of_weight, 0)))(x, weight, of.dy)
    each = [
        f(of.x[0 if of_x is None else n], weights[0 if of_weight is None else n], of.dy[n])
        for n in range(size)
    ]
    for index, one in enumerate(found):
        np.testing.assert_allclose(
            one, np.stack([row[index] for row in each]), rtol=1e-5, atol=1e-6
        )
    # Where the map is within, what is not mapped gets the sum of all gradients.
    gradients = jax.jit(jax.grad(many, (0, 1)))(x, weight)
    for index, (axis, gradient) in enumerate(zip((of_x, of_weight), gradients, strict=True)):
        parts = np.stack([row[index + 1] for row in each])
        wanted = parts.sum(0) if axis is None else np.moveaxis(parts, 0, axis)
        np.testing.assert_allclose(gradient, wanted, rtol=1e-4, atol=1e-5)


def test_vmap_keeps_a_weight_that_all_share_as_it_is(rng: np.random.Generator) -> None:
    of = problem(rng, 3, 5, 8, dtype="bfloat16", of_weight="bfloat16")

    def loss(x: Any, weight: Any) -> jax.Array:
        return (jax.vmap(rms_norm, in_axes=(1, None), out_axes=1)(x, weight) * of.dy).sum()

    program = jax.jit(jax.grad(loss, (0, 1))).lower(of.x, of.weight).as_text()
    calls = [line for line in program.splitlines() if "custom_call @xentile" in line]
    assert all("tensor<8xbf16>" in line and "transpose" not in line for line in calls)
    assert "stablehlo.while" not in program and "stablehlo.transpose" not in program
    # Rounded once, after the sum over all tokens.
    of = problem(rng, 300, 4, 8, dtype="float32", of_weight="bfloat16")
    gradients = (
        jax.jit(jax.grad(loss, 1)),
        jax.jit(jax.grad(lambda x, w: (rms_norm(x, w) * of.dy).sum(), 1)),
    )
    found, expected = (f(of.x, of.weight) for f in gradients)
    wanted = exact(expected)
    assert (np.abs(exact(found) - wanted) <= ulp(wanted, found.dtype)).all()


def test_two_maps_in_either_order(rng: np.random.Generator) -> None:
    of = problem(rng, 3, 4, 8)
    weights = jnp.asarray(rng.normal(size=(2, 8)), jnp.float32)

    def f(x: Any, weight: Any) -> Any:
        return jax.grad(lambda x, w: (rms_norm(x, w) ** 2).sum(), (0, 1))(x, weight)

    expected = [[f(x, weight) for x in of.x] for weight in weights]
    one = jax.vmap(jax.vmap(f, in_axes=(0, None)), in_axes=(None, 0))(of.x, weights)
    other = jax.vmap(jax.vmap(f, in_axes=(None, 0)), in_axes=(0, None))(of.x, weights)
    for index in (0, 1):
        wanted = np.stack([[pair[index] for pair in row] for row in expected])
        np.testing.assert_allclose(one[index], wanted, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(other[index], np.swapaxes(wanted, 0, 1), rtol=1e-4, atol=1e-5)


def test_scan_adds_gradients_of_the_weight_up(rng: np.random.Generator) -> None:
    of = problem(rng, 4, 5, 8)

    def loss(scanned: bool, x: Any, weight: Any) -> jax.Array:
        if not scanned:
            return jnp.sin(rms_norm(x, weight)).sum()
        body = lambda total, row: (total + jnp.sin(rms_norm(row, weight)).sum(), None)  # noqa: E731
        return jax.lax.scan(body, 0.0, x)[0]

    found, expected = (
        jax.jit(jax.value_and_grad(partial(loss, scanned), (0, 1)))(of.x, of.weight)
        for scanned in (True, False)
    )
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_backward_twice_and_eagerly(rng: np.random.Generator) -> None:
    of = problem(rng, 7, 9)
    jitted, eager = of.pulled(), of.pulled(lambda f: f)
    check(eager, of)
    for one, other in zip(jax.tree.leaves(jitted), jax.tree.leaves(eager), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
    _, pull = jax.vjp(rms_norm, of.x, of.weight)
    for one, other in zip(pull(of.dy), pull(of.dy), strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_backward_keeps(rng: np.random.Generator) -> None:
    of = problem(rng, 64, 128, dtype="bfloat16", of_weight="float32", has_residual=True)
    arrays = (of.x, of.weight, of.residual)
    _, pull = jax.vjp(lambda x, w, r: rms_norm(x, w, residual=r), *arrays)
    shapes = sorted(x.shape for x in jax.tree.leaves(pull) if hasattr(x, "shape") and x.size > 1)
    assert shapes == [(64,), (64, 128), (128,)], shapes


EIGHT = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
import re
import sys
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from pallas_bridge import rms_norm
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_use_shardy_partitioner", sys.argv[1] == "shardy")
rng = np.random.default_rng(int(sys.argv[2]))
x, residual = (jnp.asarray(rng.normal(size=(16, 24, 32)), jnp.float32) for _ in range(2))
weight = jnp.asarray(rng.normal(size=32), jnp.float32)

def gradients(implementation, first=16):
    def loss(x, weight, residual):
        x, residual = x[:first], residual[:first]
        found = rms_norm(x, weight, residual=residual, implementation=implementation)
        return sum(jnp.sin(one).sum() for one in found)
    return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))

def same(found, expected):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        # The loss is a sum of 24576 sines, in another order on each device.
        atol = 1e-4 if one.ndim else 24576 * 2e-7
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=atol)

def moved(program):
    return re.findall(r"all-gather|all-to-all|collective-permute", program)

mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
def put(array, *spec):
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))

expected = gradients("reference")(x, weight, residual)
for spec in (("a",), ("a", "b"), (None, "b"), (("a", "b"),), (None, ("a", "b"))):
    cut = put(x, *spec), put(weight), put(residual, *spec)
    program = gradients(None).lower(*cut).compile().as_text()
    assert not moved(program) and "all-reduce" in program, spec
    assert program.count('custom_call_target="xentile_rms_norm_add_') == 2
    found = gradients(None)(*cut)
    same(found, expected)
    assert found[1][0].sharding.is_equivalent_to(cut[0].sharding, 3)
# Of one axis of tokens; and of columns that are cut a number a row is exchanged, or GSPMD gathers.
flat = x.reshape(-1, 32), weight, residual.reshape(-1, 32)
expected = gradients("reference", 384)(*flat)
for spec in (("a",), (("a", "b"),), ("a", "b"), (None, "a")):
    cut = put(flat[0], *spec), put(weight), put(flat[2], *spec)
    program = gradients(None, 384).lower(*cut).compile().as_text()
    assert bool(moved(program)) == (len(spec) == 2 and sys.argv[1] == "gspmd"), spec
    same(gradients(None, 384)(*cut), expected)
# Tokens that do not divide evenly: what pads them is not summed.
cut = put(flat[0], "a"), put(weight), put(flat[2], "a")
same(gradients(None, 10)(*cut), gradients("reference", 10)(*flat))
# Weights that are mapped: XLA's program, which gathers nothing either.
weights = jnp.asarray(rng.normal(size=(16, 32)), jnp.float32)
def mapped(implementation):
    def loss(x, weight):
        f = lambda x, w: rms_norm(x, w, implementation=implementation)
        return jnp.sin(jax.vmap(f)(x, weight)).sum()
    return jax.jit(jax.value_and_grad(loss, (0, 1)))
cut = put(x, "a", "b"), put(weights, "a")
assert not moved(mapped(None).lower(*cut).compile().as_text())
same(mapped(None)(*cut), mapped("reference")(x, weights))
# Axes of both kinds within `shard_map`.
for names in ({"a"}, {"a", "b"}):
    def local(x, weight, residual):
        found = rms_norm(x, weight, residual=residual)
        return jax.lax.psum(sum(jnp.sin(one).sum() for one in found), "a")
    specs = P("a"), P(), P("a")
    f = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), axis_names=names)
    cut = put(x, "a"), put(weight), put(residual, "a")
    expected = gradients("reference")(x, weight, residual)
    same(jax.jit(jax.value_and_grad(f, (0, 1, 2)))(*cut), expected)
"""


@pytest.mark.only("cpu", "it makes eight devices of the CPU")
@pytest.mark.parametrize("partitioner", ["shardy", "gspmd"])
def test_a_mesh_of_eight_cuts_tokens_and_gathers_none(
    rng: np.random.Generator, tmp_path: Path, partitioner: str
) -> None:
    command = [sys.executable, "-c", textwrap.dedent(EIGHT), partitioner, str(rng.integers(2**31))]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.devices(2)
def test_explicit_axes(rng: np.random.Generator) -> None:
    devices = jax.devices()[:2]
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Explicit,), devices=devices)
    of = problem(rng, 4, 6, 8)

    def f(x: Any, weight: Any) -> Any:
        return jax.value_and_grad(lambda x, w: jnp.sin(rms_norm(x, w)).sum(), (0, 1))(x, weight)

    expected = f(of.x, of.weight)
    with jax.set_mesh(mesh):
        weight = jax.device_put(of.weight, NamedSharding(mesh, P()))
        for spec in (P("a"), P(None, "a"), P(None, None, "a")):
            cut = jax.device_put(of.x, NamedSharding(mesh, spec))
            value, (dx, dweight) = jax.jit(f)(cut, weight)
            assert "a" in jax.typeof(dx).sharding.spec
            assert "a" not in jax.typeof(dweight).sharding.spec
            found = (value, (dx, dweight))
            for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_export_for_every_platform(rng: np.random.Generator) -> None:
    of = problem(rng, 6, 16, dtype="bfloat16", of_weight="float32", has_residual=True)

    def f(*arrays: jax.Array) -> Any:
        def loss(x: Any, weight: Any, residual: Any) -> jax.Array:
            y, total = rms_norm(x, weight, residual=residual)
            return (y * total).astype(jnp.float32).sum()

        return jax.value_and_grad(loss, (0, 1, 2))(*arrays)

    arrays = (of.x, of.weight, of.residual)
    expected = jax.jit(f)(*arrays)
    for platforms in ((PLATFORM,), ("cpu", "cuda", "tpu")):
        exported = jax.export.export(jax.jit(f), platforms=platforms, disabled_checks=CHECKS)(
            *arrays
        )
        restored = jax.export.deserialize(exported.serialize())
        assert restored.platforms == platforms
        found = jax.jit(restored.call)(*arrays)
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(one, other)


def test_export_with_symbolic_shapes(rng: np.random.Generator) -> None:
    rows, columns = jax.export.symbolic_shape("t, d")
    f = jax.jit(jax.grad(lambda x, w: jnp.sin(rms_norm(x, w)).sum(), (0, 1)))
    exported = jax.export.export(f, platforms=[PLATFORM], disabled_checks=CHECKS)(
        jax.ShapeDtypeStruct((rows, columns), jnp.float32),
        jax.ShapeDtypeStruct((columns,), jnp.float32),
    )
    restored = jax.export.deserialize(exported.serialize())
    for shape in ((3, 40), (300, 17)):
        of = problem(rng, *shape)
        pairs = zip(restored.call(of.x, of.weight), f(of.x, of.weight), strict=True)
        for found, expected in pairs:
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def platforms_with_kernels() -> frozenset[str]:
    return library.require().platforms_of("xentile_rms_norm_forward")


def test_elsewhere_it_is_the_program_of_xla() -> None:
    row, weight = (
        jax.ShapeDtypeStruct((6, 8), jnp.bfloat16),
        jax.ShapeDtypeStruct((8,), jnp.float32),
    )

    def f(implementation: Any, x: Any, w: Any) -> Any:
        return rms_norm(x, w, implementation=implementation).astype(jnp.float32).sum()

    def lowered(implementation: Any, *platforms: str) -> list[str]:
        traced = jax.jit(jax.grad(partial(f, implementation), (0, 1))).trace(row, weight)
        return re.findall(r"@(xentile_\w+)", traced.lower(lowering_platforms=platforms).as_text())

    kernels = platforms_with_kernels()
    without = {"cuda", "tpu", "rocm"} - kernels
    for platform in without:
        assert not lowered(None, platform)
        refused = (NotImplementedError, library.LibraryError)
        with pytest.raises(refused, match=r"rms_norm: no kernel for platform \w+"):
            lowered("custom_call", platform)
    both = ["xentile_rms_norm_forward", "xentile_rms_norm_backward"]
    for platform in kernels:
        assert lowered(None, platform) == lowered("custom_call", platform) == both
    assert lowered(None, "cpu", "tpu") == both
    for row in pallas_bridge.info().operations["rms_norm"]:
        chosen = "custom_call" if row.platform in kernels else "reference"
        assert row.implementation == chosen, row


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
@pytest.mark.parametrize("residual", [False, True])
def test_programs_for_tools(tmp_path: Path, residual: bool, platform: str) -> None:
    config: dict[str, Any] = {"op": "rms_norm", "backend": f"xla:{platform}", "dtype": "bf16"}
    config |= {"time": 32, "hidden": 24, "residual": residual, "options": {"zero_centred": True}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config, "weight_dtype": "f32"}))
    assert export.main(["--config", str(path), "--out", str(tmp_path)]) == 0
    manifest = json.loads((tmp_path / f"{platform}_default_default.json").read_text())
    rows, columns = {"dtype": "bf16", "shape": [32, 24]}, {"dtype": "f32", "shape": [24]}
    more = [rows] if residual else []
    assert manifest["arguments"] == [rows, columns, *more, rows, *more]
    rstd = {"dtype": "f32", "shape": [32]}
    assert manifest["results"] == [rows, *more, rstd, rows, columns]
    assert manifest["settings"] == {"hidden": 24, "residual": residual, "weight_dtype": "f32"}
    calls = b"xentile_rms_norm" in (tmp_path / manifest["file"]).read_bytes()
    assert calls == (platform in platforms_with_kernels())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": None}, "hidden is None; it must be an integer of at least 1"),
        ({"weight_dtype": "f64"}, "weight_dtype is 'f64'; it must be one of f32, bf16, f16"),
        ({"options": {"epsilon": 1}}, "unknown key options.epsilon; the options are eps, zero_c"),
        ({"options": {"eps": -1}}, "eps is -1.0; it must be finite and at least 0"),
    ],
    ids=str,
)
def test_configs_that_are_no_good(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any, message: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"op": "rms_norm", "time": 8, "hidden": 4, **change}))
    assert export.main(["--config", str(path), "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error, error


def array(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


ROWS, COLUMNS = array("float32", 2, 3, 5), array("float32", 5)


@pytest.mark.parametrize(
    ("x", "weight", "keywords", "error", "message"),
    [
        (array("int32", 2, 5), COLUMNS, {}, TypeError, "x has dtype int32; it must be bfloat16"),
        (ROWS, array("int8", 5), {}, TypeError, "weight has dtype int8"),
        (array("complex64", 2, 5), COLUMNS, {}, TypeError, "x has dtype complex64"),
        (array("float8_e4m3fn", 2, 5), COLUMNS, {}, TypeError, "x has dtype float8_e4m3fn"),
        (array("float32"), COLUMNS, {}, ValueError, r"x has shape \(\); it must be \[.., D\]"),
        (array("float32", 2, 0), array("float32", 0), {}, ValueError, r"x has shape \(2, 0\)"),
        (ROWS, array("float32", 4), {}, ValueError, r"weight has shape \(4,\) and x \(2, 3, 5\)"),
        (ROWS, ROWS, {}, ValueError, r"weight must have shape \(5,\)"),
        (ROWS, COLUMNS, {"eps": -1.0}, ValueError, "eps is -1.0; it must be finite"),
        (ROWS, COLUMNS, {"eps": float("nan")}, ValueError, "eps is nan"),
        (ROWS, COLUMNS, {"eps": "1"}, TypeError, "eps is '1'; it must be a number"),
        (ROWS, COLUMNS, {"zero_centred": 2}, TypeError, "zero_centred is 2; it must be True or"),
        (
            ROWS,
            COLUMNS,
            {"implementation": "pallas"},
            ValueError,
            "rms_norm: implementation is 'pallas'; it must be one of 'reference', 'custom_call'",
        ),
    ],
    ids=str,
)
def test_what_is_refused(x: Any, weight: Any, keywords: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        jax.eval_shape(partial(rms_norm, **keywords), x, weight)


def test_residuals_that_are_refused() -> None:
    def f(residual: Any) -> Any:
        return jax.eval_shape(lambda x, w, r: rms_norm(x, w, residual=r), ROWS, COLUMNS, residual)

    with pytest.raises(ValueError, match=r"residual has shape \(3, 5\); it must be that of x"):
        f(array("float32", 3, 5))
    with pytest.raises(
        TypeError, match="residual has dtype bfloat16; it must be that of x, float32"
    ):
        f(array("bfloat16", 2, 3, 5))


def test_options_that_are_traced() -> None:
    x, weight = jnp.ones((2, 4)), jnp.ones(4)
    with pytest.raises(TypeError, match="eps is traced; it must be known"):
        jax.jit(lambda eps: rms_norm(x, weight, eps=eps))(1e-6)


def test_wider_dtypes_are_the_references(rng: np.random.Generator) -> None:
    with jax.enable_x64(True):
        x, weight = jnp.asarray(rng.normal(size=(3, 7))), jnp.asarray(rng.normal(size=7))
        with pytest.raises(TypeError, match=r"x has dtype float64; .*reference"):
            rms_norm(x, weight)
        y = rms_norm(x, weight, implementation="reference")
        wanted = exact(x) / np.sqrt((exact(x) ** 2).mean(-1, keepdims=True) + 1e-6) * exact(weight)
        np.testing.assert_allclose(y, wanted, rtol=1e-14)
