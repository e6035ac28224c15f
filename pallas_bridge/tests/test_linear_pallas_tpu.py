"""The TPU kernels of linear cross-entropy in Pallas' TPU interpreter, against float64.

Races between copies and arithmetic are errors, and memory that nobody wrote is NaN.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from oracle import Oracle
from pallas_bridge._src import pallas
from pallas_bridge._src.compat import abstract_tpu
from pallas_bridge._src.linear_cross_entropy import pallas_tpu
from pallas_bridge._src.pallas import ANY, TARGETS

from pallas_bridge import explain, linear_cross_entropy, linear_cross_entropy_per_token

# Beside a GPU it would run there, launch by launch.
pytestmark = pytest.mark.only("cpu", "Pallas' interpreter")

OPTIONS = {
    "label_smoothing": 0.1,
    "z_loss": 1e-3,
    "softcap": 5.0,
    "ignore_index": 7,
    "temperature": 1.25,
}
# Tokens, hidden columns, vocabulary, dtype or those of hidden and weight, the axis of the
# vocabulary, a bias, options.
Case = tuple[int, int, int, str, int, bool, dict[str, Any]]
CASES: dict[str, Case] = {
    "one tile": (128, 128, 128, "float32", 0, False, {}),
    "ragged": (300, 37, 391, "float32", 0, False, {}),
    "ragged, transposed, bias and options": (300, 37, 391, "float32", 1, True, OPTIONS),
    "ragged, bf16": (300, 37, 391, "bfloat16", 0, True, OPTIONS),
    "transposed, bf16": (200, 72, 300, "bfloat16", 1, False, {}),
    "fewer than a register": (5, 3, 11, "float32", 0, True, {}),
    "one of all": (1, 1, 1, "float32", 0, False, {}),
    "smoothing": (130, 16, 257, "float32", 0, False, {"label_smoothing": 0.2}),
    "z-loss": (130, 16, 257, "float32", 0, False, {"z_loss": 1e-2}),
    "softcap": (130, 16, 257, "float32", 1, False, {"softcap": 3.0}),
    "f32 weight": (300, 37, 391, "bfloat16 float32", 1, True, OPTIONS),
    "f32 hidden": (300, 37, 391, "float32 bfloat16", 0, True, {}),
    "a named tile": (300, 37, 391, "float32", 0, True, {"time_block": 256, "block_size": 128}),
}
# What every supported version is tried with.
EVERYWHERE = {"ragged, transposed, bias and options", "a named tile"}
ELSEWHERE = (pytest.mark.newest, pytest.mark.nightly)
EDGES = [case if case in EVERYWHERE else pytest.param(case, marks=ELSEWHERE) for case in CASES]


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    monkeypatch.setattr(pallas, "interpret_params", params)
    # More than one tile each way, of more than one part.
    small = ((128, 256),)
    monkeypatch.setattr(pallas_tpu, "PART", 128)
    monkeypatch.setattr(pallas_tpu, "LARGEST_FORWARD", small)
    monkeypatch.setattr(pallas_tpu, "LARGEST_BACKWARD", small)
    yield
    pltpu.reset_tpu_interpret_mode_state()


def no_races() -> None:
    # From 0.12 on a race raises; before, it is noted.
    races = pytest.importorskip("jax._src.pallas.mosaic.interpret.interpret_pallas_call").races
    if races is not None:
        assert not races.races_found


def problem(rng: np.random.Generator, case: Case) -> tuple[Any, Any, Any, Any]:
    """Hidden states, weight, bias and labels, some of them ignored by 7."""
    tokens, width, vocab, dtype, axis, bias, _ = case
    of_hidden, of_weight = dtype.split() if " " in dtype else (dtype, dtype)
    hidden = jnp.asarray(rng.normal(size=(tokens, width)), of_hidden)
    weight = jnp.asarray(rng.normal(size=(vocab, width)) / 2, of_weight)
    labels = rng.integers(0, vocab, tokens)
    labels[rng.random(tokens) < 0.1] = min(7, vocab - 1)
    of_bias = jnp.asarray(rng.normal(size=vocab), jnp.float32) if bias else None
    return hidden, weight.T if axis else weight, of_bias, jnp.asarray(labels, jnp.int32)


class Exact:
    """The same in float64."""

    def __init__(self, case: Case, hidden: Any, weight: Any, bias: Any, labels: Any) -> None:
        """Computes the logits, never rounded."""
        self.axis = case[4]
        if "bfloat16" in case[3]:
            hidden, weight = (one.astype(jnp.bfloat16) for one in (hidden, weight))
        self.hidden, self.weight = np.asarray(hidden, np.float64), np.asarray(weight, np.float64)
        logits = self.hidden @ (self.weight if self.axis else self.weight.T)
        if bias is not None:
            logits = logits + np.asarray(bias, np.float64)
        options = {k: v for k, v in case[6].items() if k not in ("time_block", "block_size")}
        self.oracle = Oracle(logits, labels, **options)
        self.values = self.oracle.__dict__

    def gradients(self, *cotangents: Any) -> list[Any]:
        """Of hidden, weight and bias."""
        dlogits = self.oracle.gradient(*cotangents)
        of_weight = dlogits.T @ self.hidden
        of_hidden = dlogits @ (self.weight.T if self.axis else self.weight)
        return [of_hidden, of_weight.T if self.axis else of_weight, dlogits.sum(0)]


def near(actual: Any, expected: Any, dtype: str) -> None:
    actual = np.asarray(actual, np.float64)
    assert actual.shape == expected.shape
    # Gradients of logits are rounded once, and those of operands once more.
    bound = 2e-5 if dtype == "float32" else 1e-2
    assert np.abs(actual - expected).max() <= bound * np.abs(expected).max() + 1e-30


def check(rng: np.random.Generator, case: Case) -> None:
    """Per-token outputs and their gradients, and a weighted mean and its."""
    hidden, weight, bias, labels = problem(rng, case)
    tokens, dtype, options = case[0], case[3], case[6]
    how: Any = {"implementation": "pallas", "vocab_axis": case[4], "return_lse": True, **options}
    exact = Exact(case, hidden, weight, bias, np.asarray(labels))
    cotangents = tuple(jnp.asarray(rng.normal(size=(3, tokens)), jnp.float32))
    weights = jnp.asarray(rng.uniform(0.5, 2, tokens), jnp.float32)

    @jax.jit
    def everything(x: Any, w: Any, b: Any) -> Any:
        per_token = partial(linear_cross_entropy_per_token, labels=labels, **how)
        outputs, vjp = jax.vjp(lambda *of: per_token(of[0], of[1], bias=of[2]), x, w, b)
        reduced = partial(linear_cross_entropy, labels=labels, weights=weights, **how)
        value, again = jax.value_and_grad(lambda of: 0.75 * reduced(of[0], of[1], bias=of[2])[0])(
            (x, w, b)
        )
        return outputs, vjp(cotangents), value, again

    outputs, gradients, value, of_mean = everything(hidden, weight, bias)
    for name, actual in zip(("loss", "logps", "lse"), outputs, strict=True):
        np.testing.assert_allclose(actual, exact.values[name], rtol=1e-5, atol=2e-5)
    given = [np.asarray(one, np.float64) for one in cotangents]
    factors = exact.oracle.factors("mean", np.asarray(weights))
    expected_value = 0.75 * exact.oracle.reduced(factors)
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    for found, expected in (
        (gradients, exact.gradients(*given)),
        (of_mean, exact.gradients(0.75 * factors)),
    ):
        for actual, want, like in zip(found, expected, (hidden, weight, bias), strict=True):
            if like is not None:
                assert actual.dtype == like.dtype
                near(actual, want, dtype)
    no_races()


@pytest.mark.parametrize("case", EDGES)
def test_every_edge(rng: np.random.Generator, case: str) -> None:
    check(rng, CASES[case])


@pytest.mark.few(1)
@pytest.mark.newest
@pytest.mark.parametrize("spills", [True, False], ids=["in HBM", "a kernel each"])
@pytest.mark.parametrize("case", ["ragged", "ragged, transposed, bias and options"])
def test_sums_of_dhidden_that_do_not_fit(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, case: str, spills: bool
) -> None:
    choose, found = pallas_tpu.choose_tiles, []

    def not_at_once(*of: Any, **how: Any) -> Any:
        both = how.get("makes_hidden") and how.get("makes_weight")
        if both and not (spills and how.get("spills")):
            return None
        found.append(choose(*of, **how))
        return found[-1]

    monkeypatch.setattr(pallas_tpu, "choose_tiles", not_at_once)
    check(rng, CASES[case])
    assert any(one.spills for one in found) == spills


@pytest.mark.newest
def test_special_tokens(rng: np.random.Generator) -> None:
    tokens, vocab = 150, 391
    case: Case = (tokens, 37, vocab, "float32", 0, True, {"ignore_index": 7})
    hidden, weight, bias, labels = problem(rng, case)
    y, x, b = np.array(labels), np.array(hidden), np.array(bias)
    y[0], y[1], y[2] = -1, vocab, 2**31 - 1
    x[3, 0], y[3], y[4], x[5], y[5] = np.nan, 9, 7, np.nan, 7
    # A column that a bias masks, which one token has for its label.
    b[11], y[6] = -np.inf, 11
    f = partial(
        linear_cross_entropy_per_token, return_lse=True, ignore_index=7, implementation="pallas"
    )
    outputs, vjp = jax.vjp(
        lambda x, w, b: f(x, w, jnp.asarray(y), bias=b), jnp.asarray(x), weight, jnp.asarray(b)
    )
    gradient, _, of_bias = map(np.asarray, vjp(tuple(jnp.ones((3, tokens)))))
    loss, logps, lse = map(np.asarray, outputs)
    assert np.isnan(loss[:4]).all() and np.isnan(logps[:4]).all()
    assert np.isfinite(lse[:3]).all() and np.isnan(lse[3]) and np.isnan(lse[5])
    assert np.isnan(gradient[:4]).any(-1).all()
    ignored = y == 7
    assert not loss[ignored].any() and not logps[ignored].any() and not gradient[ignored].any()
    assert loss[6] == np.inf and np.isfinite(gradient[6:]).all()
    assert np.isnan(of_bias).all()  # of the tokens that are not numbers

    whole = partial(linear_cross_entropy, ignore_index=7, implementation="pallas")
    nothing = jnp.full_like(labels, 7)
    value, gradients = jax.value_and_grad(whole, (0, 1))(hidden, weight, nothing)
    assert value == 0 and not any(np.asarray(one).any() for one in gradients)
    no_races()


@pytest.mark.few(1)
@pytest.mark.newest
@pytest.mark.parametrize("apart", [False, True])
def test_bad_input_stays_where_it_is(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    if apart:
        choose = pallas_tpu.choose_tiles
        monkeypatch.setattr(
            pallas_tpu,
            "choose_tiles",
            lambda *of, **how: (
                None if how.get("makes_hidden") and how.get("makes_weight") else choose(*of, **how)
            ),
        )
    case: Case = (300, 37, 391, "bfloat16", 0, True, {"ignore_index": 7})
    hidden, weight, bias, labels = problem(rng, case)
    factors = jnp.asarray(np.where(np.arange(300) == 140, 0, 1), jnp.float32)
    y = np.array(labels)
    y[[3, 11, 140]], y[[200, 290]] = 9, 7

    @jax.jit
    def f(x: Any, w: Any) -> Any:
        def loss(x: Any, w: Any) -> Any:
            how: Any = {"ignore_index": 7, "implementation": "pallas", "weights": factors}
            losses = linear_cross_entropy(x, w, y, bias=bias, reduction="none", **how)
            return losses.sum(), losses

        return jax.grad(loss, (0, 1), has_aux=True)(x, w)

    usual, losses = f(hidden, weight)
    # Tokens that take no part, two of them ignored and one with a factor of 0.
    masked = hidden.at[jnp.array([140, 200, 290]), 5].set(
        jnp.array([jnp.nan, jnp.inf, jnp.nan], hidden.dtype)
    )
    for actual, want in zip(
        jax.tree.leaves(f(masked, weight)), jax.tree.leaves((usual, losses)), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(actual), np.asarray(want))
    # One that does.
    (dhidden, dweight), found = f(hidden.at[3, 5].set(jnp.nan), weight)
    assert (np.isnan(found) == (np.arange(300) == 3)).all()
    assert (np.isnan(np.asarray(dhidden, np.float32)).any(1) == (np.arange(300) == 3)).all()
    assert np.isnan(np.asarray(dweight, np.float32)).all()
    # Every token that counts.
    (dhidden, _), found = f(hidden, weight.at[40, 5].set(jnp.nan))
    counts = (y != 7) & (np.asarray(factors) != 0)
    assert (np.isnan(found) == counts).all()
    assert (np.isnan(np.asarray(dhidden, np.float32)).all(1) == counts).all()
    assert not np.asarray(dhidden, np.float32)[~counts].any()
    # A row beyond f32.
    large = hidden.at[11].set(jnp.sign(weight[4]).astype(hidden.dtype) * 1e38)
    (dhidden, _), found = f(large, weight * 64)
    is_row = np.arange(300) == 11
    assert (np.isnan(found) == is_row).all()
    assert (np.isnan(np.asarray(dhidden, np.float32)).any(1) == is_row).all()
    no_races()


@pytest.mark.few(1)
@pytest.mark.newest
@pytest.mark.parametrize("offset", [1e4, 640.0])
def test_large_logits(rng: np.random.Generator, offset: float) -> None:
    case: Case = (40, 8, 300, "float32", 0, True, {})
    hidden, weight, bias, labels = problem(rng, case)
    bias = bias + offset
    f = partial(linear_cross_entropy, implementation="pallas")
    value, found = jax.value_and_grad(lambda x, b: f(x, weight, labels, bias=b), (0, 1))(
        hidden, bias
    )
    # Logits of that size have a unit in the last place of 1e-3.
    z = (hidden @ weight.T + bias).astype(jnp.float32)
    oracle = Oracle(np.asarray(z, np.float64), np.asarray(labels))
    factors = oracle.factors("mean")
    np.testing.assert_allclose(value, oracle.reduced(factors), rtol=1e-4)
    dlogits = oracle.gradient(factors)
    for actual, want in zip(
        found, (dlogits @ np.asarray(weight, np.float64), dlogits.sum(0)), strict=True
    ):
        assert np.abs(np.asarray(actual) - want).max() < 2e-3 * np.abs(want).max()


def lowered(kind: str | None, platforms: tuple[str, ...], function: Any, *arguments: Any) -> str:
    """The text of a program for a kind of TPU."""
    traced = jax.jit(function).trace(*arguments)
    with jax.sharding.use_abstract_mesh(abstract_tpu(kind)):
        return str(traced.lower(lowering_platforms=platforms).as_text())


@pytest.mark.parametrize("kind", [None, "TPU v6 lite"])
def test_lowers_for_tpus_where_there_is_none(kind: str | None) -> None:
    x = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((1000, 256), jnp.bfloat16)
    y = jax.ShapeDtypeStruct((512,), jnp.int32)
    name = "xentile_linear_cross_entropy_{}".format
    both = jax.value_and_grad(linear_cross_entropy, (0, 1))
    text = lowered(kind, ("tpu",), both, x, w, y)
    assert name("forward") in text and name("backward") in text
    # Nothing makes a gradient that nobody wants.
    text = lowered(kind, ("tpu",), jax.grad(linear_cross_entropy), x, w, y)
    assert name("backward_hidden") in text
    text = lowered(kind, ("tpu",), jax.grad(linear_cross_entropy, 1), x, w, y)
    assert name("backward_weight") in text
    assert name("backward") not in lowered(kind, ("tpu",), linear_cross_entropy, x, w, y)
    text = lowered(kind, ("tpu", "cpu"), both, x, w, y)
    assert name("backward") in text and name("fused") in text


def test_float16_takes_no_kernel() -> None:
    x = jax.ShapeDtypeStruct((512, 256), jnp.float16)
    w = jax.ShapeDtypeStruct((1000, 256), jnp.float16)
    y = jax.ShapeDtypeStruct((512,), jnp.int32)
    text = lowered(None, ("tpu",), jax.value_and_grad(linear_cross_entropy, (0, 1)), x, w, y)
    assert "custom_call" not in text


@pytest.mark.parametrize("width", [1, 200, 2048, 8192])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("axis", [0, 1])
def test_tiles_fit(monkeypatch: pytest.MonkeyPatch, axis: int, dtype: Any, width: int) -> None:
    monkeypatch.undo()
    x = jax.ShapeDtypeStruct((8192, width), dtype)
    w = jax.ShapeDtypeStruct((width, 50257) if axis else (50257, width), dtype)
    b = jax.ShapeDtypeStruct((50257,), jnp.float32)
    for target in (*TARGETS.values(), ANY):
        kernels = pallas_tpu.choose_kernels(target, (x, w, b), axis, 2**30)
        assert kernels is not None
        assert kernels.forward_tiles.vmem_bytes <= target.vmem_bytes
        for tiles in kernels.gradient_tiles:
            assert tiles.vmem_bytes <= target.vmem_bytes
            assert tiles.rows % 128 == tiles.columns % tiles.part == tiles.part % 128 == 0


def test_a_named_tile_is_made_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    x = jax.ShapeDtypeStruct((8192, 2048), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((128256, 2048), jnp.bfloat16)
    plan_of = partial(explain, x, w, platform="TPU v6 lite")
    for rows, columns in ((1024, 1024), (512, 384), (256, 1024), (2048, 128)):
        plan = plan_of(time_block=rows, block_size=columns)
        assert (plan.tokens, plan.columns) == (rows, columns)
    assert plan_of(block_size=512).columns == plan_of(time_block=256).tokens * 2 == 512
    plan = plan_of(time_block=8192, block_size=8192)
    assert plan.schedule == "kernels" and plan.columns < 8192
    for name in ("time_block", "block_size"):
        with pytest.raises(ValueError, match=rf"{name} is 37; on TPU it must be .* such as 128"):
            plan_of(**{name: 37})


def test_explain_tells_of_tpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    x = jax.ShapeDtypeStruct((8192, 2048), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((128256, 2048), jnp.bfloat16)
    plan = explain(x, w, platform="TPU v6 lite")
    assert (plan.schedule, plan.products) == ("kernels", 4)
    assert plan.scratch_bytes <= 2**20
    anywhere = explain(x, w, platform="tpu")
    assert anywhere.products == 4 and 2**26 <= anywhere.scratch_bytes < 2**26 + 2**20
    assert explain(x, w, platform="tpu", max_scratch_bytes=2**25).products == 5
    assert "kernels: 1024 tokens x 1024 columns at a time, 4 products" in str(plan)
    # In tiles of 2048 x 2048 forward and 1024 x 1024 backward: the weight comes for every block of
    # tokens, and hidden states for each of columns.
    name = "xentile_linear_cross_entropy"
    of_x, of_w = 2 * 8192 * 2048, 2 * 128256 * 2048
    assert dict(plan.moved) == {
        f"{name}_forward": of_x + 4 * of_w,
        f"{name}_backward": 126 * of_x + of_w + of_x + of_w,
    }
    # Sums of dhidden that come and go between all steps, and kernels of a gradient each.
    steps = -(-128256 // anywhere.columns)
    spilled = dict(anywhere.moved)[f"{name}_backward"]
    assert spilled == (steps + 1) * of_x + 2 * of_w + 2 * (steps - 1) * 2 * of_x
    apart = explain(x, w, platform="tpu", max_scratch_bytes=2**25)
    names = [f"{name}_{of}" for of in ("forward", "backward_hidden", "backward_weight")]
    assert [one for one, _ in apart.moved] == names
    assert explain(x, w, platform="cpu").moved == ()
    half = [jax.ShapeDtypeStruct(one.shape, jnp.float16) for one in (x, w)]
    assert explain(*half, platform="tpu").schedule == "vocabulary"
    assert explain(x, w, platform="cpu").schedule == "library"
    with pytest.raises(ValueError, match=r"platform is 'abacus'; it must be one of 'cpu', "):
        explain(x, w, platform="abacus")
