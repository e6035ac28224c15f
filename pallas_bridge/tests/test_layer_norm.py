"""LayerNorm against its formulas in float64, under everything that JAX does to functions."""

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
from pallas_bridge import export, layer_norm

DTYPES = ("float32", "bfloat16", "float16")
TARGETS = ["xentile_layer_norm_forward", "xentile_layer_norm_backward"]
CHECKS = [jax.export.DisabledSafetyCheck.custom_call(target) for target in TARGETS]


@dataclass(frozen=True)
class Problem:
    """Arrays, and the cotangent of y."""

    x: jax.Array
    weight: jax.Array
    bias: jax.Array | None
    dy: jax.Array
    options: dict[str, Any]

    def pulled(self, function: Any = jax.jit, **options: Any) -> tuple[Any, Any]:
        """What layer_norm gives, and gradients of x, weight and bias, if any."""
        given = {**self.options, **options, "return_statistics": True}

        def run(x: Any, weight: Any, bias: Any, dy: Any) -> Any:
            def f(x: Any, weight: Any, bias: Any) -> Any:
                y, *statistics = layer_norm(x, weight, bias, **given)
                return y, statistics

            y, pull, statistics = jax.vjp(f, x, weight, bias, has_aux=True)
            return (y, *statistics), pull(dy)

        found: tuple[Any, Any] = function(run)(self.x, self.weight, self.bias, self.dy)
        return found


def problem(
    rng: np.random.Generator,
    *shape: int,
    dtype: str = "float32",
    of_weight: str | None = None,
    has_bias: bool = True,
    scale: float = 1.0,
    offset: float = 0.0,
    **options: Any,
) -> Problem:
    def columns() -> jax.Array:
        return jnp.asarray(rng.normal(size=shape[-1:]), of_weight or dtype)

    return Problem(
        jnp.asarray(rng.normal(size=shape) * scale + offset, dtype),
        columns(),
        columns() if has_bias else None,
        jnp.asarray(rng.normal(size=shape), dtype),
        options,
    )


def exact(array: Any) -> Floats:
    return np.asarray(array).astype(np.float64)


def check(found: tuple[Any, Any], of: Problem) -> None:
    """Compares what `Problem.pulled` gives with the formulas, in units of what is rounded."""
    (y, mean, rstd), (dx, dweight, dbias) = found
    dtype, columns = of.x.dtype, of.x.shape[-1]
    x, dy, weight = exact(of.x), exact(of.dy), exact(of.weight)
    bias = np.zeros(columns) if of.bias is None else exact(of.bias)
    with np.errstate(all="ignore"):
        m = x.mean(-1, keepdims=True)
        r = 1 / np.sqrt(((x - m) ** 2).mean(-1, keepdims=True) + of.options.get("eps", 1e-5))
        xhat, g = (x - m) * r, dy * weight
        # The mean is rounded to f32, and statistics are of that.
        off = np.abs(m) * r
        size = np.abs(xhat) * (1 + 1e-5 * off) + off / 8 + np.abs(x - m).mean(-1, keepdims=True) * r
        along = np.abs(g * size).mean(-1, keepdims=True)
        wanted_dx = r * (g - g.mean(-1, keepdims=True) - xhat * (g * xhat).mean(-1, keepdims=True))
        size_dx = r * (np.abs(g) + np.abs(g).mean(-1, keepdims=True) + 2 * size * along)
        terms, sizes = ((dy * one).reshape(-1, columns) for one in (xhat, size))
    assert y.dtype == dtype and dx.dtype == dtype and dweight.dtype == of.weight.dtype
    assert mean.dtype == rstd.dtype == jnp.float32 and mean.shape == rstd.shape == of.x.shape[:-1]
    more = 1 + len(terms) / 64
    close("y", y, xhat * weight + bias, np.abs(weight) * size + np.abs(bias))
    close("mean", mean, m[..., 0], np.abs(m[..., 0]) + np.abs(x - m).mean(-1))
    close("rstd", rstd, r[..., 0], (r * (1 + 1e-5 * off))[..., 0])
    close("dx", dx, wanted_dx, size_dx)
    close("dweight", dweight, terms.sum(0), np.abs(sizes).sum(0), more)
    if of.bias is not None:
        assert dbias.dtype == of.bias.dtype
        each = dy.reshape(-1, columns)
        close("dbias", dbias, each.sum(0), np.abs(each).sum(0), more)


def close(name: str, found: Any, wanted: Floats, size: Floats, more: float = 1.0) -> None:
    """Compares with half a unit in the last place, and what f32 loses of terms of that size."""
    found = np.asarray(found)
    assert found.shape == wanted.shape, name
    with np.errstate(all="ignore"):
        rounded = wanted.astype(found.dtype).astype(np.float64)
        assert np.array_equal(np.isnan(exact(found)), np.isnan(rounded)), f"{name}: NaN elsewhere"
        error = np.where(exact(found) == rounded, 0, np.abs(exact(found) - wanted))
        allowed = 0.51 * ulp(rounded, found.dtype) + size * more * 2.0**-20
        worst = np.nanmax(error / allowed) if error.size else 0
    assert not (error > allowed).any(), f"{name}: {worst} times what is allowed"


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("of_weight", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients(
    rng: np.random.Generator, dtype: str, of_weight: str, has_bias: bool
) -> None:
    for columns in (1, 7, 64, 517):
        of = problem(rng, 2, 37, columns, dtype=dtype, of_weight=of_weight, has_bias=has_bias)
        check(of.pulled(), of)


@pytest.mark.parametrize("implementation", ["custom_call", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_awkward_numbers(rng: np.random.Generator, dtype: str, implementation: Any) -> None:
    for more in ({"offset": 1e3}, {"scale": 1e-4}, {"scale": 1e-4, "eps": 0.0}, {"eps": 10}):
        of = problem(rng, 5, 96, dtype=dtype, implementation=implementation, **more)
        check(of.pulled(), of)
    of = problem(rng, 6, 33, dtype=dtype, implementation=implementation)
    bad = of.x.at[1, 3].set(jnp.nan).at[2, 4].set(jnp.inf).at[3].set(3.5)
    of = Problem(bad, of.weight, of.bias, of.dy.at[4].set(0), of.options)
    (y, _, rstd), (dx, dweight, dbias) = of.pulled()
    assert np.isnan(exact(y)[1:3]).all() and np.isnan(exact(dx)[1:3]).all()
    assert np.isnan(rstd[1:3]).all() and np.isnan(exact(dweight)).all()
    assert np.isfinite(exact(dbias)).all()
    np.testing.assert_array_equal(np.asarray(y)[3], np.asarray(of.bias))
    assert np.isfinite(exact(dx)[3]).all() and not exact(dx)[4].any()
    others = jnp.array([0, 3, 4, 5])
    alone = Problem(of.x[others], of.weight, of.bias, of.dy[others], of.options)
    (value, _, _), (gradient, _, _) = alone.pulled()
    np.testing.assert_array_equal(np.asarray(y)[others], np.asarray(value))
    np.testing.assert_array_equal(np.asarray(dx)[others], np.asarray(gradient))


@pytest.mark.parametrize("implementation", ["custom_call", "reference"])
@pytest.mark.parametrize("columns", [100, 4096])
def test_a_mean_of_a_thousand_deviations(
    rng: np.random.Generator, columns: int, implementation: Any
) -> None:
    """It costs no more than that the mean is rounded to f32, as the numbers themselves are."""
    x = jnp.asarray(rng.normal(size=(8, columns)) + 1000, jnp.float32)
    dy = jnp.asarray(rng.normal(size=x.shape), jnp.float32)
    ones = jnp.ones(columns)
    f = partial(layer_norm, eps=0.0, implementation=implementation)
    y, pull = jax.jit(lambda x, dy: (f(x, ones), jax.vjp(f, x, ones)[1](dy)))(x, dy)
    z, g = exact(x), exact(dy)
    left = z - z.mean(-1, keepdims=True)
    r = 1 / np.sqrt((left**2).mean(-1, keepdims=True))
    xhat = left * r
    assert np.abs(exact(y) - xhat).max() < 1e-4
    dx = r * (g - g.mean(-1, keepdims=True) - xhat * (g * xhat).mean(-1, keepdims=True))
    assert np.abs(exact(pull[0]) - dx).max() < 2e-4


@pytest.mark.parametrize("shape", [(1,), (5,), (1, 8), (0, 8), (3, 0, 8), (1, 1, 1), (2, 3, 2, 16)])
def test_shapes(rng: np.random.Generator, shape: tuple[int, ...]) -> None:
    for has_bias in (False, True):
        of = problem(rng, *shape, has_bias=has_bias)
        check(of.pulled(), of)


# On GPUs: rows for a part of a warp, for one, for several, as long as registers hold or as shared
# memory does, longer, and rows that begin inside a vector.
LENGTHS = (8, 128, 512, 896, 1096, 4096, 12288, 20480, 65536, 65535)


@pytest.mark.parametrize("columns", LENGTHS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_every_length_are_the_same_among_others(
    rng: np.random.Generator, dtype: str, columns: int
) -> None:
    of = problem(rng, 67, columns, dtype=dtype, of_weight="bfloat16", offset=5.0)
    found = of.pulled()
    check(found, of)
    some = slice(5, 24, 3)
    alone = Problem(of.x[some], of.weight, of.bias, of.dy[some], of.options)
    (values, (dx, _, _)), (those, (gradient, _, _)) = found, alone.pulled()
    for one, other in zip((*values, dx), (*those, gradient), strict=True):
        np.testing.assert_array_equal(np.asarray(one)[some], np.asarray(other))


# GPUs copy a weight and a bias ahead of rows where these are few.
@pytest.mark.parametrize(("rows", "columns"), [(40_000, 512), (9_000, 1096), (1_500, 4096)])
def test_many_rows_have_the_bits_of_few(rng: np.random.Generator, rows: int, columns: int) -> None:
    x = jnp.asarray(rng.normal(3.0, size=(rows, columns)), "bfloat16")
    weight, bias = (jnp.asarray(rng.normal(size=columns), "float32") for _ in range(2))
    some = slice(5, rows, rows // 20)
    run = jax.jit(lambda x: layer_norm(x, weight, bias, return_statistics=True))
    for all_of_it, few in zip(run(x), run(x[some]), strict=True):
        np.testing.assert_array_equal(all_of_it[some], few)


def test_many_tokens_are_summed_in_a_fixed_order(rng: np.random.Generator) -> None:
    of = problem(rng, 5000, 40, dtype="bfloat16", of_weight="float32")
    first = of.pulled()
    check(first, of)
    for _ in range(3):
        for one, other in zip(of.pulled()[1], first[1], strict=True):
            np.testing.assert_array_equal(one, other)


def test_statistics_have_derivatives(rng: np.random.Generator) -> None:
    of = problem(rng, 4, 6, 24, offset=2.0)

    def f(implementation: Any, *arrays: jax.Array) -> jax.Array:
        found = layer_norm(*arrays, return_statistics=True, implementation=implementation)
        return sum(jnp.sin(one).sum() for one in found)  # type: ignore[return-value]

    arrays = (of.x, of.weight, of.bias)
    gradients = (
        jax.jit(jax.grad(partial(f, name), (0, 1, 2)))(*arrays) for name in (None, "reference")
    )
    for found, expected in zip(*gradients, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    of_mean = jax.grad(lambda x: layer_norm(x, of.weight, return_statistics=True)[1].sum())
    np.testing.assert_allclose(of_mean(of.x), np.full(of.x.shape, 1 / 24), rtol=1e-6)


@pytest.mark.parametrize("has_bias", [False, True])
def test_both_modes_of_differentiation(rng: np.random.Generator, has_bias: bool) -> None:
    of = problem(rng, 2, 3, 12, has_bias=has_bias)
    arrays = (of.x, of.weight, *([] if of.bias is None else [of.bias]))

    def f(x: Any, weight: Any, *bias: Any) -> Any:
        return layer_norm(x, weight, *bias, return_statistics=True)

    axes = (0, None, *[None] * has_bias)
    for function in (f, jax.jit(f), jax.vmap(f, in_axes=axes), jax.checkpoint(f)):
        check_grads(function, arrays, 1, rtol=2e-2, atol=2e-2, eps=1e-2)
    for index in range(1, len(arrays)):

        def of_one(one: Any, index: int = index) -> Any:
            return f(*arrays[:index], one, *arrays[index + 1 :])

        check_grads(of_one, (arrays[index],), 1, rtol=2e-2, atol=2e-2, eps=1e-2)
    values, along = jax.linearize(lambda x: f(x, *arrays[1:]), of.x)
    np.testing.assert_array_equal(values[0], f(*arrays)[0])
    assert along(of.x)[0].shape == of.x.shape


def test_second_derivatives_are_refused() -> None:
    x, weight = jnp.arange(4.0), jnp.ones(4)

    def f(x: jax.Array, **options: Any) -> jax.Array:
        return jnp.sin(layer_norm(x, weight, **options)).sum()

    with pytest.raises(NotImplementedError, match=r"layer_norm: second derivatives .*reference"):
        jax.hessian(f)(x)
    assert np.isfinite(jax.hessian(partial(f, implementation="reference"))(x)).all()


# Which axis of x is mapped, of weight, and of bias.
MAPPED = [(0, None, None), (1, None, None), (0, 0, 0), (1, 1, None), (None, 0, 1), (2, None, 0)]


@pytest.mark.parametrize("axes", MAPPED)
def test_vmap(rng: np.random.Generator, axes: tuple[int | None, ...]) -> None:
    of = problem(rng, 3, 5, 8)
    size = 3
    columns = [jnp.asarray(rng.normal(size=(size, 8)), jnp.float32) for _ in range(2)]
    every = (of.x, *columns)

    def f(x: Any, weight: Any, bias: Any, dy: Any) -> Any:
        y, pull = jax.vjp(layer_norm, x, weight, bias)
        return y, *pull(dy)

    def many(*arrays: Any) -> jax.Array:
        return (jax.vmap(layer_norm, in_axes=axes)(*arrays) * of.dy).sum()

    given = [
        one[0] if axis is None else jnp.moveaxis(one, 0, axis)
        for one, axis in zip(every, axes, strict=True)
    ]
    found = jax.jit(jax.vmap(f, in_axes=(*axes, 0)))(*given, of.dy)
    each = [
        f(*(one[0 if axis is None else n] for one, axis in zip(every, axes, strict=True)), of.dy[n])
        for n in range(size)
    ]
    for index, one in enumerate(found):
        np.testing.assert_allclose(
            one, np.stack([row[index] for row in each]), rtol=1e-5, atol=1e-5
        )
    # Where the map is within, what is not mapped gets the sum of all gradients.
    gradients = jax.jit(jax.grad(many, (0, 1, 2)))(*given)
    for index, (axis, gradient) in enumerate(zip(axes, gradients, strict=True)):
        parts = np.stack([row[index + 1] for row in each])
        wanted = parts.sum(0) if axis is None else np.moveaxis(parts, 0, axis)
        np.testing.assert_allclose(gradient, wanted, rtol=1e-4, atol=1e-5)


def test_scan_adds_gradients_up(rng: np.random.Generator) -> None:
    of = problem(rng, 4, 5, 8)

    def loss(scanned: bool, x: Any, weight: Any, bias: Any) -> jax.Array:
        if not scanned:
            return jnp.sin(layer_norm(x, weight, bias)).sum()

        def body(total: Any, row: Any) -> Any:
            return total + jnp.sin(layer_norm(row, weight, bias)).sum(), None

        return jax.lax.scan(body, 0.0, x)[0]

    found, expected = (
        jax.jit(jax.value_and_grad(partial(loss, scanned), (0, 1, 2)))(of.x, of.weight, of.bias)
        for scanned in (True, False)
    )
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_what_backward_keeps(rng: np.random.Generator) -> None:
    of = problem(rng, 64, 128, dtype="bfloat16", of_weight="float32")
    _, pull = jax.vjp(layer_norm, of.x, of.weight, of.bias)
    shapes = sorted(x.shape for x in jax.tree.leaves(pull) if hasattr(x, "shape") and x.size > 1)
    assert shapes == [(64,), (64,), (64, 128), (128,)], shapes


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
from pallas_bridge import layer_norm
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_use_shardy_partitioner", sys.argv[1] == "shardy")
rng = np.random.default_rng(int(sys.argv[2]))
x = jnp.asarray(rng.normal(size=(16, 24, 32)), jnp.float32)
weight, bias = (jnp.asarray(rng.normal(size=32), jnp.float32) for _ in range(2))

def gradients(implementation, first=16):
    def loss(x, weight, bias):
        return jnp.sin(layer_norm(x[:first], weight, bias, implementation=implementation)).sum()
    return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))

def same(found, expected):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        # The loss is a sum of 12288 sines, in another order on each device.
        atol = 1e-4 if one.ndim else 12288 * 2e-7
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=atol)

mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
def put(array, *spec):
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))

expected = gradients("reference")(x, weight, bias)
for spec in (("a",), ("a", "b"), (None, "b"), (("a", "b"),)):
    cut = put(x, *spec), put(weight), put(bias)
    program = gradients(None).lower(*cut).compile().as_text()
    moved = re.findall(r"all-gather|all-to-all|collective-permute", program)
    assert not moved and "all-reduce" in program, spec
    assert program.count('custom_call_target="xentile_layer_norm_') == 2
    # Devices exchange the sums, 32 numbers each, and the loss.
    sums = [line.split(" all-reduce(") for line in program.splitlines()]
    sums = " ".join(parts[0] for parts in sums if len(parts) > 1)
    sizes = re.findall(r"f32\\[([0-9,]*)\\]", sums)
    assert set(sizes) == {"32", ""}, sums
    found = gradients(None)(*cut)
    same(found, expected)
    assert found[1][0].sharding.is_equivalent_to(cut[0].sharding, 3)
# Tokens that do not divide evenly: what pads them is not summed.
flat = x.reshape(-1, 32)
cut = put(flat, "a"), put(weight), put(bias)
same(gradients(None, 10)(*cut), gradients("reference", 10)(flat, weight, bias))
# Axes of both kinds within `shard_map`.
for names in ({"a"}, {"a", "b"}):
    def local(x, weight, bias):
        return jax.lax.psum(jnp.sin(layer_norm(x, weight, bias)).sum(), "a")
    f = jax.shard_map(
        local, mesh=mesh, in_specs=(P("a"), P(), P()), out_specs=P(), axis_names=names
    )
    same(jax.jit(jax.value_and_grad(f, (0, 1, 2)))(put(x, "a"), put(weight), put(bias)), expected)
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

    def f(*arrays: Any) -> Any:
        return jax.value_and_grad(lambda *arrays: jnp.sin(layer_norm(*arrays)).sum(), (0, 1, 2))(
            *arrays
        )

    expected = f(of.x, of.weight, of.bias)
    with jax.set_mesh(mesh):
        shared = [jax.device_put(one, NamedSharding(mesh, P())) for one in (of.weight, of.bias)]
        for spec in (P("a"), P(None, "a"), P(None, None, "a")):
            cut = jax.device_put(of.x, NamedSharding(mesh, spec))
            found = jax.jit(f)(cut, *shared)
            assert "a" in jax.typeof(found[1][0]).sharding.spec
            for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_export_for_every_platform(rng: np.random.Generator) -> None:
    of = problem(rng, 6, 16, dtype="bfloat16", of_weight="float32")

    def f(*arrays: jax.Array) -> Any:
        def loss(*arrays: Any) -> jax.Array:
            return jnp.sin(layer_norm(*arrays).astype(jnp.float32)).sum()

        return jax.value_and_grad(loss, (0, 1, 2))(*arrays)

    arrays = (of.x, of.weight, of.bias)
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
    f = jax.jit(jax.grad(lambda *arrays: jnp.sin(layer_norm(*arrays)).sum(), (0, 1, 2)))
    column = jax.ShapeDtypeStruct((columns,), jnp.float32)
    exported = jax.export.export(f, platforms=[PLATFORM], disabled_checks=CHECKS)(
        jax.ShapeDtypeStruct((rows, columns), jnp.float32), column, column
    )
    restored = jax.export.deserialize(exported.serialize())
    for shape in ((3, 40), (300, 17)):
        of = problem(rng, *shape)
        arrays = (of.x, of.weight, of.bias)
        for found, expected in zip(restored.call(*arrays), f(*arrays), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def platforms_with_kernels() -> frozenset[str]:
    return library.require().platforms_of(TARGETS[0])


def test_elsewhere_it_is_the_program_of_xla() -> None:
    row, column = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((6, 8), (8,)))

    def f(implementation: Any, *arrays: Any) -> Any:
        return layer_norm(*arrays, implementation=implementation).sum()

    def lowered(implementation: Any, *platforms: str) -> list[str]:
        traced = jax.jit(jax.grad(partial(f, implementation), (0, 1, 2))).trace(row, column, column)
        return re.findall(r"@(xentile_\w+)", traced.lower(lowering_platforms=platforms).as_text())

    kernels = platforms_with_kernels()
    assert "cpu" in kernels
    for platform in {"cuda", "tpu", "rocm"} - kernels:
        assert not lowered(None, platform)
        refused = (NotImplementedError, library.LibraryError)
        with pytest.raises(refused, match=r"layer_norm: no kernel for platform \w+"):
            lowered("custom_call", platform)
    for platform in kernels:
        assert lowered(None, platform) == lowered("custom_call", platform) == TARGETS
    assert lowered(None, "cpu", "tpu") == TARGETS
    for one in pallas_bridge.info().operations["layer_norm"]:
        chosen = "custom_call" if one.platform in kernels else "reference"
        assert one.implementation == chosen, one


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
@pytest.mark.parametrize("bias", [False, True])
def test_programs_for_tools(tmp_path: Path, bias: bool, platform: str) -> None:
    config: dict[str, Any] = {"op": "layer_norm", "backend": f"xla:{platform}", "dtype": "bf16"}
    config |= {"time": 32, "hidden": 24, "bias": bias, "options": {"eps": 1e-6}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config, "weight_dtype": "f32"}))
    assert export.main(["--config", str(path), "--out", str(tmp_path)]) == 0
    manifest = json.loads((tmp_path / f"{platform}_default_default.json").read_text())
    rows, columns = {"dtype": "bf16", "shape": [32, 24]}, {"dtype": "f32", "shape": [24]}
    more = [columns] if bias else []
    assert manifest["arguments"] == [rows, columns, *more, rows]
    number = {"dtype": "f32", "shape": [32]}
    assert manifest["results"] == [rows, number, number, rows, columns, *more]
    assert manifest["settings"] == {"hidden": 24, "bias": bias, "weight_dtype": "f32"}
    calls = b"xentile_layer_norm" in (tmp_path / manifest["file"]).read_bytes()
    assert calls == (platform in platforms_with_kernels())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": None}, "hidden is None; it must be an integer of at least 1"),
        ({"weight_dtype": "f64"}, "weight_dtype is 'f64'; it must be one of f32, bf16, f16"),
        ({"options": {"epsilon": 1}}, "unknown key options.epsilon"),
        ({"options": {"eps": -1}}, "eps is -1.0; it must be finite and at least 0"),
    ],
    ids=str,
)
def test_configs_that_are_no_good(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any, message: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"op": "layer_norm", "time": 8, "hidden": 4, **change}))
    assert export.main(["--config", str(path), "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error, error


def array(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


ROWS, COLUMNS = array("float32", 2, 3, 5), array("float32", 5)


@pytest.mark.parametrize(
    ("arrays", "keywords", "error", "message"),
    [
        ((array("int32", 2, 5), COLUMNS), {}, TypeError, "x has dtype int32; it must be bfloat16"),
        ((ROWS, array("int8", 5)), {}, TypeError, "weight has dtype int8"),
        ((ROWS, COLUMNS, array("int8", 5)), {}, TypeError, "bias has dtype int8"),
        ((array("float32"), COLUMNS), {}, ValueError, r"x has shape \(\); it must be \[.., D\]"),
        ((ROWS, array("float32", 4)), {}, ValueError, r"weight has shape \(4,\) and x \(2, 3, 5\)"),
        (
            (ROWS, COLUMNS, array("float32", 4)),
            {},
            ValueError,
            r"bias has shape \(4,\); it must be that of weight, \(5,\)",
        ),
        (
            (ROWS, COLUMNS, array("bfloat16", 5)),
            {},
            TypeError,
            "bias has dtype bfloat16; it must be that of weight, float32",
        ),
        ((ROWS, COLUMNS), {"eps": -1.0}, ValueError, "eps is -1.0; it must be finite"),
        ((ROWS, COLUMNS), {"eps": "1"}, TypeError, "eps is '1'; it must be a number"),
        (
            (ROWS, COLUMNS),
            {"implementation": "pallas"},
            ValueError,
            "layer_norm: implementation is 'pallas'; it must be one of 'reference', 'custom_call'",
        ),
    ],
    ids=str,
)
def test_what_is_refused(arrays: Any, keywords: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        jax.eval_shape(partial(layer_norm, **keywords), *arrays)


def test_wider_dtypes_are_the_references(rng: np.random.Generator) -> None:
    with jax.enable_x64(True):
        x, weight = jnp.asarray(rng.normal(size=(3, 7))), jnp.asarray(rng.normal(size=7))
        with pytest.raises(TypeError, match=r"x has dtype float64; .*reference"):
            layer_norm(x, weight)
        y = layer_norm(x, weight, implementation="reference")
        left = exact(x) - exact(x).mean(-1, keepdims=True)
        wanted = left / np.sqrt((left**2).mean(-1, keepdims=True) + 1e-5) * exact(weight)
        np.testing.assert_allclose(y, wanted, rtol=1e-12, atol=1e-13)
