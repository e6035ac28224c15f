"""RMSNorm and LayerNorm against their formulas in float64, under JAX's transformations."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from oracle import Floats, ulp

from pallas_bridge import layer_norm, rms_norm

KINDS = ("rms", "layer")
DTYPES = ("float32", "bfloat16", "float16")
EPS = {"rms": 1e-6, "layer": 1e-5}
each_kind = pytest.mark.parametrize("kind", KINDS)


def norm(kind: str, x: Any, weight: Any, extra: Any = None, **options: Any) -> Any:
    """Calls the function of a kind; `extra` is RMSNorm's residual or LayerNorm's bias."""
    if kind == "rms":
        return rms_norm(x, weight, residual=extra, **options)
    return layer_norm(x, weight, extra, **options)


def with_statistics(kind: str, *arrays: Any, **options: Any) -> Any:
    """The same, with rstd or mean and rstd after the other results."""
    name = "return_rstd" if kind == "rms" else "return_statistics"
    return norm(kind, *arrays, **{name: True}, **options)


def total(kind: str, *arrays: Any, **options: Any) -> jax.Array:
    """The sum of the sines of all results."""
    found = jax.tree.leaves(norm(kind, *arrays, **options))
    return sum(jnp.sin(one).sum() for one in found)  # type: ignore[return-value]


@dataclass(frozen=True)
class Problem:
    """Arrays, and cotangents of y and RMSNorm's sum."""

    kind: str
    x: jax.Array
    weight: jax.Array
    # RMSNorm's residual, or LayerNorm's bias.
    extra: jax.Array | None
    dy: jax.Array
    dsum: jax.Array | None
    options: dict[str, Any]

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        """The arrays that the function takes."""
        return (self.x, self.weight, *([] if self.extra is None else [self.extra]))

    def rows(self, index: Any) -> "Problem":
        """The problem of some rows alone."""
        if self.dsum is None:
            return replace(self, x=self.x[index], dy=self.dy[index])
        assert self.extra is not None
        extra, dsum = self.extra[index], self.dsum[index]
        return replace(self, x=self.x[index], extra=extra, dy=self.dy[index], dsum=dsum)

    def pulled(self, function: Any = jax.jit, **options: Any) -> tuple[Any, Any]:
        """Results with statistics, and gradients of x, weight and the residual or bias, if any."""
        outputs = 1 if self.dsum is None else 2

        def run(x: Any, weight: Any, extra: Any, dy: Any, dsum: Any) -> Any:
            def f(*arrays: Any) -> Any:
                found = with_statistics(self.kind, *arrays, **self.options, **options)
                return found[:outputs], found[outputs:]

            values, vjp, statistics = jax.vjp(f, x, weight, extra, has_aux=True)
            return (*values, *statistics), vjp(type(values)((dy, dsum)[:outputs]))

        found: tuple[Any, Any] = function(run)(self.x, self.weight, self.extra, self.dy, self.dsum)
        return found


def problem(
    kind: str,
    rng: np.random.Generator,
    *shape: int,
    dtype: str = "float32",
    of_weight: str | None = None,
    has_extra: bool | None = None,
    scale: float = 1.0,
    offset: float = 0.0,
    **options: Any,
) -> Problem:
    """A problem, by default without a residual, or with a bias."""
    if has_extra is None:
        has_extra = kind == "layer"

    def matrix(scale: float = 1.0, offset: float = 0.0) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) * scale + offset, dtype)

    def columns() -> jax.Array:
        return jnp.asarray(rng.normal(size=shape[-1:]), of_weight or dtype)

    x, weight, extra = matrix(scale, offset), columns(), None
    if has_extra:
        extra = matrix(scale, offset) if kind == "rms" else columns()
    dsum = matrix() if has_extra and kind == "rms" else None
    return Problem(kind, x, weight, extra, matrix(), dsum, options)


def exact(array: Any) -> Floats:
    return np.asarray(array).astype(np.float64)


def check(found: tuple[Any, Any], of: Problem) -> None:
    """Compares what `Problem.pulled` returns with the formulas, in units of the roundings."""
    (check_rms if of.kind == "rms" else check_layer)(found, of)


def check_rms(found: tuple[Any, Any], of: Problem) -> None:
    (y, *rest), (dx, dweight, dresidual) = found
    eps = of.options.get("eps", EPS["rms"])
    dtype, columns = of.x.dtype, of.x.shape[-1]
    x = exact(of.x)
    with np.errstate(all="ignore"):
        if of.extra is not None:
            # The sum is exact in f32, and then rounded once.
            h = (exact(of.x) + exact(of.extra)).astype(np.float32).astype(dtype)
            assert rest[0].dtype == dtype
            np.testing.assert_array_equal(np.asarray(rest[0]), h)
            x = h.astype(np.float64)
        scale = exact(of.weight) + bool(of.options.get("zero_centred"))
        mean = (x**2).mean(-1, keepdims=True)
        # Squares beyond f32 are infinite.
        mean[mean > np.finfo(np.float32).max] = np.inf
        rstd = 1 / np.sqrt(mean + eps)
        xhat = x * rstd
        g = exact(of.dy) * scale
        between = xhat * (xhat * g).mean(-1, keepdims=True)
        wanted_dx = rstd * (g - between)
        size_dx = rstd * (np.abs(g) + np.abs(xhat) * np.abs(xhat * g).mean(-1, keepdims=True))
        if of.dsum is not None:
            wanted_dx = wanted_dx + exact(of.dsum)
            size_dx = size_dx + np.abs(exact(of.dsum))
        terms = (exact(of.dy) * xhat).reshape(-1, columns)
    assert y.dtype == dtype and dx.dtype == dtype and dweight.dtype == of.weight.dtype
    step = 2.0**-21
    close("y", y, xhat * scale, step * np.abs(xhat * scale))
    close("dx", dx, wanted_dx, step * size_dx)
    more = 1 + len(terms) / 64
    close("dweight", dweight, terms.sum(0), step * more * np.abs(terms).sum(0))
    if of.extra is not None:
        np.testing.assert_array_equal(np.asarray(dresidual), np.asarray(dx))


def check_layer(found: tuple[Any, Any], of: Problem) -> None:
    (y, mean, rstd), (dx, dweight, dbias) = found
    dtype, columns = of.x.dtype, of.x.shape[-1]
    x, dy, weight = exact(of.x), exact(of.dy), exact(of.weight)
    bias = np.zeros(columns) if of.extra is None else exact(of.extra)
    with np.errstate(all="ignore"):
        m = x.mean(-1, keepdims=True)
        eps = of.options.get("eps", EPS["layer"])
        r = 1 / np.sqrt(((x - m) ** 2).mean(-1, keepdims=True) + eps)
        xhat, g = (x - m) * r, dy * weight
        # The mean is rounded to f32, and other statistics are those about the rounded mean.
        off = np.abs(m) * r
        size = np.abs(xhat) * (1 + 1e-5 * off) + off / 8 + np.abs(x - m).mean(-1, keepdims=True) * r
        along = np.abs(g * size).mean(-1, keepdims=True)
        wanted_dx = r * (g - g.mean(-1, keepdims=True) - xhat * (g * xhat).mean(-1, keepdims=True))
        size_dx = r * (np.abs(g) + np.abs(g).mean(-1, keepdims=True) + 2 * size * along)
        terms, sizes, dys = (one.reshape(-1, columns) for one in (dy * xhat, dy * size, dy))
    assert y.dtype == dtype and dx.dtype == dtype and dweight.dtype == of.weight.dtype
    assert mean.dtype == rstd.dtype == jnp.float32 and mean.shape == rstd.shape == of.x.shape[:-1]
    step, more = 2.0**-20, 1 + len(terms) / 64
    close("y", y, xhat * weight + bias, step * (np.abs(weight) * size + np.abs(bias)))
    close("mean", mean, m[..., 0], step * (np.abs(m[..., 0]) + np.abs(x - m).mean(-1)))
    close("rstd", rstd, r[..., 0], step * (r * (1 + 1e-5 * off))[..., 0])
    close("dx", dx, wanted_dx, step * size_dx)
    close("dweight", dweight, terms.sum(0), step * more * np.abs(sizes).sum(0))
    if of.extra is not None:
        assert dbias.dtype == of.extra.dtype
        close("dbias", dbias, dys.sum(0), step * more * np.abs(dys).sum(0))


def close(name: str, found: Any, wanted: Floats, error: Floats) -> None:
    """Compares within half a unit in the last place and an error of f32."""
    found = np.asarray(found)
    assert found.shape == wanted.shape, name
    with np.errstate(all="ignore"):
        rounded = wanted.astype(found.dtype).astype(np.float64)
        assert np.array_equal(np.isnan(exact(found)), np.isnan(rounded)), f"{name}: NaN elsewhere"
        difference = np.where(exact(found) == rounded, 0, np.abs(exact(found) - wanted))
        allowed = 0.51 * ulp(rounded, found.dtype) + error
        worst = np.nanmax(difference / allowed) if difference.size else 0
    assert not (difference > allowed).any(), f"{name}: {worst} times what is allowed"


def same(found: Any, expected: Any, rtol: float, atol: float) -> None:
    """Compares trees of arrays."""
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=atol)


def equal(found: Any, expected: Any) -> None:
    """Compares trees of arrays exactly."""
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(one, other)


@each_kind
@pytest.mark.parametrize("has_extra", [False, True])
@pytest.mark.parametrize("of_weight", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients(
    rng: np.random.Generator, dtype: str, of_weight: str, has_extra: bool, kind: str
) -> None:
    more: dict[str, Any] = {"dtype": dtype, "of_weight": of_weight, "has_extra": has_extra}
    for columns in (1, 7, 64, 517):
        if kind == "rms":
            more["zero_centred"] = columns % 2 == 1
        of = problem(kind, rng, 2, 37, columns, **more)
        check(of.pulled(), of)


@each_kind
@pytest.mark.parametrize("implementation", ["custom_call", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_awkward_values(
    rng: np.random.Generator, dtype: str, implementation: Any, kind: str
) -> None:
    shared: dict[str, Any] = {"dtype": dtype, "implementation": implementation}
    offset = 1e4 if kind == "rms" else 1e3
    for more in ({"offset": offset}, {"scale": 1e-4}, {"scale": 1e-4, "eps": 0.0}, {"eps": 10}):
        of = problem(kind, rng, 5, 96, **shared, **more)
        check(of.pulled(), of)
    of = problem(kind, rng, 6, 33, **shared)
    value = 0 if kind == "rms" else 3.5
    bad = of.x.at[1, 3].set(jnp.nan).at[2, 4].set(jnp.inf).at[3].set(value)
    of = replace(of, x=bad, dy=of.dy.at[4].set(0))
    (y, *_, rstd), (dx, dweight, dbias) = of.pulled()
    assert np.isnan(exact(y)[1]).all() and np.isnan(exact(dx)[1:3]).all()
    if kind == "rms":
        # Infinity over infinity, and 0 where that is a number.
        assert np.isnan(exact(y)[2, 4]) and np.isnan(exact(dweight)).any()
        assert not exact(y)[3].any()
    else:
        assert np.isnan(exact(y)[2]).all() and np.isnan(exact(dweight)).all()
        assert np.isnan(rstd[1:3]).all() and np.isfinite(exact(dbias)).all()
        np.testing.assert_array_equal(np.asarray(y)[3], np.asarray(of.extra))
    assert np.isfinite(exact(dx)[3]).all() and not exact(dx)[4].any()
    others = np.array([0, 3, 4, 5])
    (value, *_), (gradient, _, _) = of.rows(others).pulled()
    np.testing.assert_array_equal(np.asarray(y)[others], np.asarray(value))
    np.testing.assert_array_equal(np.asarray(dx)[others], np.asarray(gradient))


@pytest.mark.parametrize("implementation", ["custom_call", "reference"])
@pytest.mark.parametrize("columns", [100, 4096])
def test_layer_norm_of_a_mean_of_a_thousand_deviations(
    rng: np.random.Generator, columns: int, implementation: Any
) -> None:
    """Its error is that of rounding the mean to f32, as the values themselves are."""
    x = jnp.asarray(rng.normal(size=(8, columns)) + 1000, jnp.float32)
    dy = jnp.asarray(rng.normal(size=x.shape), jnp.float32)
    ones = jnp.ones(columns)
    f = partial(layer_norm, eps=0.0, implementation=implementation)
    y, vjp = jax.jit(lambda x, dy: (f(x, ones), jax.vjp(f, x, ones)[1](dy)))(x, dy)
    z, g = exact(x), exact(dy)
    centred = z - z.mean(-1, keepdims=True)
    r = 1 / np.sqrt((centred**2).mean(-1, keepdims=True))
    xhat = centred * r
    assert np.abs(exact(y) - xhat).max() < 1e-4
    dx = r * (g - g.mean(-1, keepdims=True) - xhat * (g * xhat).mean(-1, keepdims=True))
    assert np.abs(exact(vjp[0]) - dx).max() < 2e-4


@each_kind
@pytest.mark.parametrize("shape", [(1,), (5,), (1, 8), (0, 8), (3, 0, 8), (1, 1, 1), (2, 3, 2, 16)])
def test_shapes(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> None:
    for has_extra in (False, True):
        of = problem(kind, rng, *shape, has_extra=has_extra)
        check(of.pulled(), of)


# On GPUs: rows for a part of a warp, for one, for several, as long as registers hold or as shared
# memory does, longer, and rows that begin inside a vector.
LENGTHS = (8, 128, 512, 896, 1096, 4096, 12288, 20480, 65536, 65535)


@each_kind
@pytest.mark.parametrize("columns", LENGTHS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_every_length_are_the_same_among_others(
    rng: np.random.Generator, dtype: str, columns: int, kind: str
) -> None:
    more: dict[str, Any] = {"offset": 5.0}
    if kind == "rms":
        more = {"has_extra": columns % 3 != 0}
    of = problem(kind, rng, 67, columns, dtype=dtype, of_weight="bfloat16", **more)
    found = of.pulled()
    check(found, of)
    some = slice(5, 24, 3)
    (values, (dx, _, _)), (alone, (gradient, _, _)) = found, of.rows(some).pulled()
    for one, other in zip((*values, dx), (*alone, gradient), strict=True):
        np.testing.assert_array_equal(np.asarray(one)[some], np.asarray(other))


# GPUs copy a weight and a bias to shared memory ahead of rows if there are few rows.
@pytest.mark.parametrize(("kind", "has_extra"), [("rms", False), ("rms", True), ("layer", True)])
@pytest.mark.parametrize(("rows", "columns"), [(40_000, 512), (9_000, 1096), (1_500, 4096)])
def test_many_rows_have_the_bits_of_few(
    rng: np.random.Generator, rows: int, columns: int, kind: str, has_extra: bool
) -> None:
    more: dict[str, Any] = {"dtype": "bfloat16", "of_weight": "float32", "has_extra": has_extra}
    of = problem(kind, rng, rows, columns, offset=0.0 if kind == "rms" else 3.0, **more)
    some = slice(5, rows, rows // 20)
    run = jax.jit(partial(with_statistics, kind))
    for all_rows, few in zip(run(*of.arrays), run(*of.rows(some).arrays), strict=True):
        np.testing.assert_array_equal(all_rows[some], few)


@each_kind
def test_cotangents_that_are_strided_or_expanded(rng: np.random.Generator, kind: str) -> None:
    of = problem(kind, rng, 6, 5, 16, dtype="bfloat16", has_extra=False)
    f = partial(norm, kind)

    def gradients(dy: Any, into: Any) -> Any:
        return jax.jit(lambda x, w, dy: jax.vjp(f, x, w)[1](into(dy)))(of.x, of.weight, dy)

    transposed = jnp.moveaxis(of.dy, 0, 2)
    row = of.dy[:1, :, :1]
    for dy, into in (
        (transposed, lambda dy: jnp.moveaxis(dy, 2, 0)),
        (row, lambda dy: jnp.broadcast_to(dy, of.x.shape)),
        (of.dy[::-1], lambda dy: dy[::-1]),
    ):
        values = with_statistics(kind, of.x, of.weight)
        check((values, (*gradients(dy, into), None)), replace(of, dy=into(dy)))


@each_kind
def test_many_tokens_are_summed_in_a_fixed_order(rng: np.random.Generator, kind: str) -> None:
    of = problem(kind, rng, 5000, 40, dtype="bfloat16", of_weight="float32")
    first = of.pulled()
    check(first, of)
    for _ in range(3):
        equal(of.pulled()[1], first[1])


def test_rstd_is_returned(rng: np.random.Generator) -> None:
    of = problem("rms", rng, 4, 6, 24, has_extra=True)
    y, h, rstd = rms_norm(of.x, of.weight, residual=of.extra, return_rstd=True)
    assert rstd.dtype == jnp.float32 and rstd.shape == (4, 6)
    wanted = 1 / np.sqrt((exact(h) ** 2).mean(-1) + 1e-6)
    np.testing.assert_allclose(rstd, wanted, rtol=1e-6)
    alone, again = rms_norm(h, of.weight, return_rstd=True)
    np.testing.assert_array_equal(alone, y)
    np.testing.assert_array_equal(again, rstd)


@each_kind
def test_statistics_have_derivatives(rng: np.random.Generator, kind: str) -> None:
    offset = 0.0 if kind == "rms" else 2.0
    of = problem(kind, rng, 4, 6, 24, has_extra=True, offset=offset)

    def f(implementation: Any, *arrays: jax.Array) -> jax.Array:
        found = with_statistics(kind, *arrays, implementation=implementation)
        return sum(jnp.sin(one).sum() for one in found)  # type: ignore[return-value]

    gradients = (
        jax.jit(jax.grad(partial(f, name), (0, 1, 2)))(*of.arrays) for name in (None, "reference")
    )
    for found, expected in zip(*gradients, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    if kind == "layer":
        of_mean = jax.grad(lambda x: layer_norm(x, of.weight, return_statistics=True)[1].sum())
        np.testing.assert_allclose(of_mean(of.x), np.full(of.x.shape, 1 / 24), rtol=1e-6)


@each_kind
@pytest.mark.parametrize("has_extra", [False, True])
def test_both_modes_of_differentiation(
    rng: np.random.Generator, has_extra: bool, kind: str
) -> None:
    of = problem(kind, rng, 2, 3, 12, has_extra=has_extra)
    arrays, f = of.arrays, partial(with_statistics, kind)
    axes = (0, None, *[0 if kind == "rms" else None] * has_extra)
    for function in (f, jax.vmap(f, in_axes=axes), jax.checkpoint(f)):
        check_grads(jax.jit(function), arrays, 1, rtol=2e-2, atol=2e-2, eps=1e-2)
    for index in range(1, 2 if kind == "rms" else len(arrays)):

        def call_with(one: Any, index: int = index) -> Any:
            return f(*arrays[:index], one, *arrays[index + 1 :])

        check_grads(jax.jit(call_with), (arrays[index],), 1, rtol=2e-2, atol=2e-2, eps=1e-2)
    values, along = jax.linearize(lambda x: f(x, *arrays[1:]), of.x)
    np.testing.assert_array_equal(values[0], f(*arrays)[0])
    assert along(of.x)[0].shape == of.x.shape


@each_kind
def test_vmap_keeps_a_weight_that_all_share_as_it_is(rng: np.random.Generator, kind: str) -> None:
    of = problem(kind, rng, 3, 5, 8, dtype="bfloat16", of_weight="bfloat16")
    f = partial(norm, kind)

    def loss(x: Any, weight: Any) -> jax.Array:
        return (jax.vmap(f, in_axes=(1, None), out_axes=1)(x, weight) * of.dy).sum()

    program = jax.jit(jax.grad(loss, (0, 1))).lower(of.x, of.weight).as_text()
    calls = [line for line in program.splitlines() if "custom_call @xentile" in line]
    assert all("tensor<8xbf16>" in line and "transpose" not in line for line in calls)
    assert "stablehlo.while" not in program and "stablehlo.transpose" not in program
    # Rounded once, after the sum over all tokens.
    of = problem(kind, rng, 300, 4, 8, dtype="float32", of_weight="bfloat16")
    gradients = (
        jax.jit(jax.grad(loss, 1)),
        jax.jit(jax.grad(lambda x, w: (f(x, w) * of.dy).sum(), 1)),
    )
    found, expected = (f(of.x, of.weight) for f in gradients)
    wanted = exact(expected)
    assert (np.abs(exact(found) - wanted) <= ulp(wanted, found.dtype)).all()


@each_kind
def test_backward_twice_and_eagerly(rng: np.random.Generator, kind: str) -> None:
    of = problem(kind, rng, 7, 9)
    jitted, eager = of.pulled(), of.pulled(lambda f: f)
    check(eager, of)
    same(jitted, eager, 1e-6, 1e-6)
    _, vjp = jax.vjp(partial(norm, kind), *of.arrays)
    equal(vjp(of.dy), vjp(of.dy))


@each_kind
def test_residuals_of_the_backward_pass(rng: np.random.Generator, kind: str) -> None:
    of = problem(kind, rng, 64, 128, dtype="bfloat16", of_weight="float32", has_extra=True)
    _, vjp = jax.vjp(partial(norm, kind), *of.arrays)
    shapes = sorted(x.shape for x in jax.tree.leaves(vjp) if hasattr(x, "shape") and x.size > 1)
    statistics = [(64,)] * (1 if kind == "rms" else 2)
    assert shapes == [*statistics, (64, 128), (128,)], shapes


def array(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


ROWS, COLUMNS = array("float32", 2, 3, 5), array("float32", 5)


@each_kind
@pytest.mark.parametrize(
    ("x", "weight", "options", "error", "message"),
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
        (
            ROWS,
            COLUMNS,
            {"implementation": "pallas"},
            ValueError,
            "_norm: implementation is 'pallas'; it must be one of 'reference', 'custom_call'",
        ),
    ],
    ids=str,
)
def test_what_is_refused(
    x: Any, weight: Any, options: Any, error: Any, message: str, kind: str
) -> None:
    prefix = kind if message.startswith("_norm") else ""
    with pytest.raises(error, match=prefix + message):
        jax.eval_shape(partial(norm, kind, **options), x, weight)


@pytest.mark.parametrize(
    ("kind", "extra", "error", "message"),
    [
        (
            "rms",
            array("float32", 3, 5),
            ValueError,
            r"residual has shape \(3, 5\); it must be that of x",
        ),
        ("rms", array("int8", 2, 3, 5), TypeError, "residual has dtype int8"),
        ("layer", array("int8", 5), TypeError, "bias has dtype int8"),
        (
            "layer",
            array("float32", 4),
            ValueError,
            r"bias has shape \(4,\); it must be that of weight, \(5,\)",
        ),
    ],
    ids=str,
)
def test_residuals_and_biases_that_are_refused(
    kind: str, extra: Any, error: Any, message: str
) -> None:
    with pytest.raises(error, match=message):
        jax.eval_shape(partial(norm, kind), ROWS, COLUMNS, extra)


def test_zero_centred_is_a_flag() -> None:
    with pytest.raises(TypeError, match="zero_centred is 2; it must be True or"):
        jax.eval_shape(partial(rms_norm, zero_centred=2), ROWS, COLUMNS)  # type: ignore[arg-type]


@each_kind
def test_options_that_are_traced(kind: str) -> None:
    x, weight = jnp.ones((2, 4)), jnp.ones(4)
    with pytest.raises(TypeError, match="eps is traced; it must be known"):
        jax.jit(lambda eps: norm(kind, x, weight, eps=eps))(1e-6)


@each_kind
def test_wider_dtypes_are_the_references(rng: np.random.Generator, kind: str) -> None:
    with jax.enable_x64(True):
        x, weight = jnp.asarray(rng.normal(size=(3, 7))), jnp.asarray(rng.normal(size=7))
        with pytest.raises(TypeError, match=r"x has dtype float64; .*reference"):
            norm(kind, x, weight)
        y = norm(kind, x, weight, implementation="reference")
        z = exact(x) - (exact(x).mean(-1, keepdims=True) if kind == "layer" else 0)
        wanted = z / np.sqrt((z**2).mean(-1, keepdims=True) + EPS[kind]) * exact(weight)
        rtol, atol = (1e-14, 0) if kind == "rms" else (1e-12, 1e-13)
        np.testing.assert_allclose(y, wanted, rtol=rtol, atol=atol)
