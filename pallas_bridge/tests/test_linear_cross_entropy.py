"""Linear cross-entropy: every schedule against float64, and what the plan promises."""

import dataclasses
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from on_mesh import by_shardy
from oracle import Oracle
from pallas_bridge._src import library
from pallas_bridge._src.linear_cross_entropy import library_plan, schedule

from pallas_bridge import explain, linear_cross_entropy, linear_cross_entropy_per_token

# Ragged in every direction: chunks of 256 or 128 tokens and of 128 columns leave a rest.
TOKENS, WIDTH, VOCAB = 600, 24, 2003
BUDGETS = {"tokens": 3_000_000, "vocabulary": 1_200_000, "both": 500_000}
# XLA on a CPU has logits with a bias and without at once.
BUDGETS_WITH_BIAS = BUDGETS | {"tokens": 6_500_000}
# The library may take the place of XLA's chunks in a budget that these have no 3 products in.
CHUNKS_OF_F32 = [
    *((budget, False) for budget in (None, *BUDGETS)),
    ("vocabulary", True),
    ("both", True),
]
BUDGETS_OF_16_BITS = {"tokens": 5_000_000, "vocabulary": 900_000, "both": 350_000}
BOTH = {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 5.0, "ignore_index": 7}


def problem(
    rng: np.random.Generator, dtype: Any, *, tokens: int = TOKENS, bias: bool = False, axis: int = 0
) -> tuple[Any, Any, Any, Any]:
    """Hidden states, weight, bias and labels, a tenth of them ignored by 7."""
    hidden = jnp.asarray(rng.normal(size=(tokens, WIDTH)), dtype)
    weight = jnp.asarray(rng.normal(size=(VOCAB, WIDTH)) / 2, dtype)
    labels = rng.integers(0, VOCAB, tokens)
    labels[rng.random(tokens) < 0.1] = 7
    of_bias = jnp.asarray(rng.normal(size=VOCAB), jnp.float32) if bias else None
    return hidden, weight.T if axis else weight, of_bias, jnp.asarray(labels, jnp.int32)


class Exact:
    """The same in float64, logits never rounded."""

    def __init__(self, hidden: Any, weight: Any, bias: Any, labels: Any, **options: Any) -> None:
        """Computes the logits."""
        self.hidden, self.weight = np.asarray(hidden, np.float64), np.asarray(weight, np.float64)
        if self.weight.shape[0] == WIDTH:
            self.weight = self.weight.T
        logits = self.hidden @ self.weight.T
        if bias is not None:
            logits = logits + np.asarray(bias, np.float64)
        names = ("ignore_index", "label_smoothing", "z_loss", "softcap", "temperature")
        known = {name: options[name] for name in names if name in options}
        self.oracle = Oracle(logits, np.asarray(labels), **known)

    def gradients(self, axis: int, *cotangents: Any) -> tuple[Any, Any, Any]:
        """Of hidden, weight and bias."""
        dlogits = self.oracle.gradient(*cotangents)
        of_weight = dlogits.T @ self.hidden
        return dlogits @ self.weight, of_weight.T if axis else of_weight, dlogits.sum(0)


def error(actual: Any, expected: Any) -> float:
    """The largest difference beside the largest value."""
    actual = np.asarray(actual, np.float64)
    assert actual.shape == expected.shape
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


@pytest.mark.few(2)
@pytest.mark.numbers
@pytest.mark.parametrize(
    ("axis", "bias", "options"),
    [(0, False, {}), (1, True, BOTH)],
    ids=["plain", "transposed with bias and options"],
)
@pytest.mark.parametrize(("budget", "has_library"), CHUNKS_OF_F32)
def test_a_mean_and_its_gradients(
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    budget: str | None,
    has_library: bool,
    axis: int,
    bias: bool,
    options: dict[str, Any],
) -> None:
    monkeypatch.setattr(schedule, "has_cpu_calls", lambda: has_library)
    hidden, weight, of_bias, labels = problem(rng, jnp.float32, bias=bias, axis=axis)
    budgets = BUDGETS_WITH_BIAS if bias else BUDGETS
    limit = None if budget is None else budgets[budget]
    plan = explain(hidden, weight, bias=of_bias, max_scratch_bytes=limit, platform="cpu")
    # Columns of [D, V] are not together, so that none are kept in the memory of dweight.
    saves_products = axis == 0 or budget == "both"
    assert plan.schedule == ("library" if has_library and saves_products else budget or "tokens")
    weights = jnp.asarray(rng.uniform(0.5, 2, TOKENS), jnp.float32)

    @jax.jit
    def f(x: Any, w: Any, b: Any, each: Any) -> Any:
        loss, lse = linear_cross_entropy(
            x, w, labels, bias=b, weights=each, max_scratch_bytes=limit, return_lse=True, **options
        )
        return 0.75 * loss, lse

    arguments = (0, 1, 2, 3) if bias else (0, 1, 3)
    (value, lse), gradients = jax.value_and_grad(f, arguments, has_aux=True)(
        hidden, weight, of_bias, weights
    )
    exact = Exact(hidden, weight, of_bias, labels, **options)
    factors = exact.oracle.factors("mean", np.asarray(weights))
    expected = list(exact.gradients(axis, 0.75 * factors))
    np.testing.assert_allclose(value, 0.75 * exact.oracle.reduced(factors), rtol=1e-5)
    np.testing.assert_allclose(lse, exact.oracle.__dict__["lse"], rtol=1e-5, atol=1e-5)
    for actual, want in zip(gradients[:-1], expected, strict=False):
        assert error(actual, want) < 2e-5
    dense = partial(f.__wrapped__, hidden, weight, of_bias)
    step = 1e-2 * jnp.asarray(rng.normal(size=TOKENS), jnp.float32)
    slope = (dense(weights + step)[0] - dense(weights - step)[0]) / 2
    np.testing.assert_allclose(gradients[-1] @ step, slope, rtol=2e-2, atol=1e-5)


@pytest.mark.few(2)
@pytest.mark.numbers
@pytest.mark.parametrize("options", [{}, BOTH], ids=["plain", "options"])
@pytest.mark.parametrize("budget", [None, *BUDGETS])
def test_tokens_with_cotangents_of_their_own(
    rng: np.random.Generator, budget: str | None, options: dict[str, Any]
) -> None:
    hidden, weight, bias, labels = problem(rng, jnp.float32, bias=True)
    limit = None if budget is None else BUDGETS_WITH_BIAS[budget]
    f = partial(linear_cross_entropy_per_token, return_lse=True, max_scratch_bytes=limit, **options)
    cotangents = tuple(jnp.asarray(rng.normal(size=(3, TOKENS)), jnp.float32))
    outputs, vjp = jax.vjp(lambda x, w, b: f(x, w, labels, bias=b), hidden, weight, bias)
    exact = Exact(hidden, weight, bias, labels, **options)
    for name, actual in zip(("loss", "logps", "lse"), outputs, strict=True):
        np.testing.assert_allclose(actual, exact.oracle.__dict__[name], rtol=1e-5, atol=2e-5)
    given = [np.asarray(one, np.float64) for one in cotangents]
    for actual, want in zip(vjp(cotangents), exact.gradients(0, *given), strict=True):
        assert error(actual, want) < 2e-5


def hold_against_the_dense_program(
    rng: np.random.Generator, arrays: tuple[Any, ...], limit: int | None, **options: Any
) -> None:
    """Holds gradients of what `problem` gives against float64, as near as the dense ones."""
    hidden, weight, bias, labels = arrays
    tokens, reduction = labels.shape[0], options["reduction"]
    of = (hidden, weight) if bias is None else (hidden, weight, bias)
    cotangent = jnp.asarray(rng.uniform(1, 2, tokens) / tokens, jnp.float32)

    def gradients(options_of_xla: dict[str, Any], **how: Any) -> Any:
        def f(x: Any, w: Any, b: Any = None) -> Any:
            loss = linear_cross_entropy(x, w, labels, bias=b, **options, **how)
            return loss if reduction == "mean" else (loss * cotangent).sum()

        program = jax.jit(jax.value_and_grad(f, tuple(range(len(of))))).lower(*of)
        return program.compile(compiler_options=options_of_xla)(*of)

    exact = Exact(hidden, weight, bias, labels, **options)
    given = exact.oracle.factors("mean") if reduction == "mean" else np.asarray(cotangent)
    axis = int(weight.shape[0] == WIDTH)
    factors = np.where(exact.oracle.__dict__["ignored"], 0, given)
    expected = exact.gradients(axis, factors)
    value, found = gradients({}, max_scratch_bytes=limit)
    # Else XLA leaves the dense program's logits unrounded on GPUs, where a bias is added to them.
    rounded = {"xla_allow_excess_precision": False}
    dense_value, dense = gradients(rounded, implementation="reference")
    np.testing.assert_allclose(value, dense_value, rtol=1e-4)
    for actual, other, want, like in zip(found, dense, expected, of, strict=False):
        assert actual.dtype == like.dtype
        distances = [np.linalg.norm(np.asarray(x, np.float64) - want) for x in (actual, other)]
        eps = float(jnp.finfo(hidden.dtype).eps)
        # Calls of the library sum dbias of what is an operand, rounded as it is; in float16 the
        # small ones to the steps of subnormals.
        of_terms = (eps if hidden.dtype == jnp.float16 else eps / 2) if like is bias else 0
        terms = np.linalg.norm(np.abs(exact.oracle.gradient(factors)).sum(0))
        assert distances[0] <= 1.25 * distances[1] + of_terms * terms
        # Which entry is the worst is luck, of both programs; and a unit in the last place.
        assert error(actual, want) <= 2 * error(other, want) + eps / 4 + of_terms


@pytest.mark.few(2)
@pytest.mark.numbers
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("budget", [None, *BUDGETS])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("has_library", [False, True])
def test_no_further_from_float64_than_the_dense_program(
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    has_library: bool,
    dtype: str,
    budget: str | None,
    reduction: str,
) -> None:
    monkeypatch.setattr(schedule, "has_cpu_calls", lambda: has_library)
    arrays = problem(rng, dtype)
    limit = None if budget is None else BUDGETS_OF_16_BITS[budget]
    plan = explain(*arrays[:2], max_scratch_bytes=limit, platform="cpu")
    one_call = has_library and budget != "both"
    assert plan.schedule == ("library" if one_call else budget or "tokens")
    options = {"reduction": reduction, "ignore_index": 7}
    hold_against_the_dense_program(rng, arrays, limit, **options)


@pytest.mark.numbers
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    ("dtype", "of_bias"),
    [("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float16", "float32")],
)
def test_a_bias_in_a_call_of_the_library(
    rng: np.random.Generator, dtype: str, of_bias: str, axis: int, reduction: str
) -> None:
    hidden, weight, bias, labels = problem(rng, dtype, bias=True, axis=axis)
    bias, limit = bias.astype(of_bias), 2_000_000
    for platform in ("cpu", "cuda"):
        plan = explain(hidden, weight, bias=bias, max_scratch_bytes=limit, platform=platform)
        assert plan.schedule == "library"
    options = {"reduction": reduction, "ignore_index": 7}
    hold_against_the_dense_program(rng, (hidden, weight, bias, labels), limit, **options)


@pytest.mark.few(2)
@pytest.mark.numbers
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("mib", [1, 2, 20])
def test_logits_that_a_cpu_keeps(rng: np.random.Generator, mib: int, axis: int) -> None:
    hidden, weight, _, labels = problem(rng, jnp.bfloat16, tokens=300)
    how: dict[str, Any] = {"vocab_axis": axis, "max_scratch_bytes": mib * 2**20}
    weight = weight.T if axis else weight
    plan = explain(hidden, weight, platform="cpu", **how)
    # In the memory of dweight 24 columns of a row, and in the scratch those of 300 as can be.
    assert plan.schedule == "library"
    assert (plan.products == 3) == (mib > 1), plan

    def f(x: Any, w: Any, **how: Any) -> Any:
        return linear_cross_entropy(x, w, labels, reduction="sum", vocab_axis=axis, **BOTH, **how)

    def of(**how: Any) -> Any:
        return jax.jit(jax.value_and_grad(partial(f, **how), (0, 1)))(hidden, weight)

    found = of(max_scratch_bytes=mib * 2**20)
    usual = of()
    for actual, expected in zip(jax.tree.leaves(found), jax.tree.leaves(usual), strict=True):
        assert error(actual, np.asarray(expected, np.float64)) < 2e-2
    dense = of(implementation="reference")
    for actual, expected in zip(jax.tree.leaves(found), jax.tree.leaves(dense), strict=True):
        assert error(actual, np.asarray(expected, np.float64)) < 3e-2


@pytest.mark.numbers
@pytest.mark.parametrize(
    ("reduction", "twelfths", "kept"),
    [("mean", 2, True), ("mean", 7, True), ("none", 5, False)],
)
@pytest.mark.parametrize("has_bias", [False, True])
# Without these there is an unnormalised softmax, where all logits are kept.
@pytest.mark.few(1)
@pytest.mark.parametrize("options", [BOTH, {"z_loss": 1e-3, "ignore_index": 7}])
@pytest.mark.slow
def test_logits_that_are_kept_and_products_of_many_blocks(
    rng: np.random.Generator,
    options: dict[str, Any],
    has_bias: bool,
    reduction: str,
    twelfths: int,
    kept: bool,
) -> None:
    tokens, width, vocab = 600, 648, 5003
    hidden = jnp.asarray(rng.normal(size=(tokens, width)), jnp.bfloat16)
    weight = jnp.asarray(rng.normal(size=(vocab, width)) / 10, jnp.bfloat16)
    bias = jnp.asarray(rng.normal(size=vocab), jnp.float32) if has_bias else None
    labels = rng.integers(0, vocab, tokens)
    labels[rng.random(tokens) < 0.1] = 7
    limit = tokens * vocab * 2 * twelfths // 12
    how: dict[str, Any] = {"reduction": reduction, "max_scratch_bytes": limit, "platform": "cuda"}
    plan = explain(hidden, weight, bias=bias, **how)
    assert (plan.saved_columns is not None) == kept and (plan.products == 3) == (twelfths == 7)
    options = {"reduction": reduction, **options}
    arrays = (hidden, weight, bias, jnp.asarray(labels, jnp.int32))
    hold_against_the_dense_program(rng, arrays, limit, **options)


@pytest.mark.numbers
@pytest.mark.parametrize(
    ("once", "chunk"),
    [((250, 2000), (600, 1024)), ((256, 3333), (300, 640)), ((600, 900), (600, 128))],
)
# Without these there is an unnormalised softmax.
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "options",
    [BOTH, {"z_loss": 1e-3, "ignore_index": 7}, {"temperature": 0.7, "ignore_index": 7}],
)
@pytest.mark.slow
def test_columns_that_a_gpu_makes_once(
    monkeypatch: pytest.MonkeyPatch,
    rng: np.random.Generator,
    options: dict[str, Any],
    once: tuple[int, int],
    chunk: tuple[int, int],
) -> None:
    tokens, width, vocab = 600, 200, 5003
    hidden = jnp.asarray(rng.normal(size=(tokens, width)), jnp.bfloat16)
    weight = jnp.asarray(rng.normal(size=(vocab, width)) / 5, jnp.bfloat16)
    labels = rng.integers(0, vocab, tokens)
    labels[rng.random(tokens) < 0.1] = 7
    limit = 4 * 2**20

    # It is for more tokens than tests have time for.
    tiling = {"chunk": chunk, "fused": True, "single_pass": once}
    plan_tiling = partial(library_plan.plan_cuda, tiling=tiling)
    monkeypatch.setattr(library_plan, "plan_cuda", plan_tiling)
    plan = explain(hidden, weight, max_scratch_bytes=limit, platform="cuda")
    assert plan.single_pass == once and plan.products == 4 - once[1] / vocab
    assert f"after {once[1]} columns in a single pass, {once[0]} tokens at a time" in str(plan)
    arrays = (hidden, weight, None, jnp.asarray(labels, jnp.int32))
    hold_against_the_dense_program(rng, arrays, limit, reduction="mean", **options)


@pytest.mark.few(2)
@pytest.mark.numbers
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("budget", [None, *BUDGETS])
def test_special_tokens(rng: np.random.Generator, budget: str | None, dtype: str) -> None:
    hidden, weight, _, labels = problem(rng, dtype)
    budgets = BUDGETS if dtype == "float32" else BUDGETS_OF_16_BITS
    limit = None if budget is None else budgets[budget]
    y = np.array(labels)
    y[0], y[1], y[2] = -1, VOCAB, 2**31 - 1
    x = np.array(hidden)
    x[3, 0], y[3], y[4], x[5], y[5] = np.nan, 9, 7, np.nan, 7
    f = partial(
        linear_cross_entropy_per_token, return_lse=True, ignore_index=7, max_scratch_bytes=limit
    )
    outputs, vjp = jax.vjp(lambda x: f(x, weight, jnp.asarray(y)), jnp.asarray(x))
    (gradient,) = vjp(tuple(jnp.ones((3, TOKENS))))
    loss, logps, lse = map(np.asarray, outputs)
    assert np.isnan(loss[:4]).all() and np.isnan(logps[:4]).all()
    assert np.isfinite(lse[:3]).all() and np.isnan(lse[3]) and np.isnan(lse[5])
    assert np.isnan(np.asarray(gradient)[:4]).any(-1).all()
    ignored = y == 7
    assert not loss[ignored].any() and not logps[ignored].any()
    assert not np.asarray(gradient)[ignored].any()
    assert np.isfinite(np.asarray(gradient)[6:]).all()

    whole = partial(linear_cross_entropy, ignore_index=7, max_scratch_bytes=limit)
    nothing = jnp.full_like(labels, 7)
    value, gradients = jax.value_and_grad(whole, (0, 1))(hidden, weight, nothing)
    assert value == 0 and not any(np.asarray(one).any() for one in gradients)


@pytest.mark.slow
def test_vmap_checkpoint_and_batches(rng: np.random.Generator) -> None:
    hidden, weight, _, labels = problem(rng, jnp.float32)
    x, y = hidden.reshape(3, 200, WIDTH), labels.reshape(3, 200)
    f = partial(linear_cross_entropy, ignore_index=7, reduction="sum")
    value, gradient = jax.value_and_grad(f)(x, weight, y)
    np.testing.assert_allclose(value, f(hidden, weight, labels), rtol=1e-6)
    each = jax.vmap(jax.grad(f), in_axes=(0, None, 0))(x, weight, y)
    np.testing.assert_allclose(each, gradient, rtol=1e-4, atol=1e-6)
    again = jax.grad(jax.checkpoint(f))(x, weight, y)
    np.testing.assert_allclose(again, gradient, rtol=1e-6)
    none = linear_cross_entropy(x, weight, y, ignore_index=7, reduction="none")
    assert none.shape == (3, 200)


@pytest.mark.few(2)
@pytest.mark.devices(2)
@pytest.mark.parametrize(("budget", "has_library"), CHUNKS_OF_F32)
def test_shard_map_sums_the_gradient_of_the_weight(
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    budget: str | None,
    has_library: bool,
) -> None:
    monkeypatch.setattr(schedule, "has_cpu_calls", lambda: has_library)
    # As many a device as elsewhere in all.
    hidden, weight, bias, labels = problem(rng, jnp.float32, bias=True, tokens=2 * TOKENS)
    limit = None if budget is None else BUDGETS_WITH_BIAS[budget]
    mine = explain(hidden[:TOKENS], weight, bias=bias, max_scratch_bytes=limit, platform="cpu")
    assert mine.schedule == ("library" if has_library else budget or "tokens")
    mesh = jax.make_mesh((2,), ("tokens",), axis_types=(jax.sharding.AxisType.Auto,))
    each = jnp.asarray(rng.normal(size=2 * TOKENS), jnp.float32)
    f = partial(linear_cross_entropy, ignore_index=7, max_scratch_bytes=limit)

    def sum_losses(x: Any, w: Any, b: Any, sums: Any) -> Any:
        dense = partial(f, x, w, labels, bias=b, implementation="reference")
        return dense(reduction="sum") + (dense(reduction="none") * sums).sum()

    def run_shard(x: Any, w: Any, b: Any, y: Any, sums: Any) -> Any:
        losses = f(x, w, y, bias=b, reduction="none")
        total = f(x, w, y, bias=b, reduction="sum") + (losses * sums).sum()
        return jax.lax.psum(total, "tokens")

    sharded, whole = P("tokens"), P()
    mapped = jax.shard_map(
        run_shard, mesh=mesh, in_specs=(sharded, whole, whole, sharded, sharded), out_specs=whole
    )
    found = jax.jit(jax.value_and_grad(mapped, (0, 1, 2)))(hidden, weight, bias, labels, each)
    expected = jax.jit(jax.value_and_grad(sum_losses, (0, 1, 2)))(hidden, weight, bias, each)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    for actual, want in zip(found[1], expected[1], strict=True):
        assert error(actual, np.asarray(want)) < 2e-5


@pytest.mark.devices(2)
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_calls_of_a_cpu_are_for_one_device_each(rng: np.random.Generator, reduction: str) -> None:
    hidden, weight, bias, labels = problem(rng, jnp.bfloat16, bias=True)
    mesh = jax.make_mesh((2,), ("tokens",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded, whole = P("tokens"), P()

    def f(x: Any, w: Any, b: Any, y: Any) -> Any:
        return linear_cross_entropy(x, w, y, bias=b, ignore_index=7, reduction=reduction).sum()

    def run_shard(*arrays: Any) -> Any:
        return jax.lax.psum(f(*arrays), "tokens")

    mapped = jax.shard_map(
        run_shard, mesh=mesh, in_specs=(sharded, whole, whole, sharded), out_specs=whole
    )
    placed = [
        jax.device_put(x, jax.NamedSharding(mesh, spec))
        for x, spec in ((hidden, sharded), (weight, whole), (bias, whole), (labels, sharded))
    ]
    expected = jax.value_and_grad(f, (0, 1, 2))(hidden, weight, bias, labels)
    # Each device has calls of its own, but with GSPMD, which would gather their operands.
    for function, has_shardy in ((f, True), (f, False), (mapped, True)):
        with by_shardy(has_shardy):
            compiled = jax.jit(jax.value_and_grad(function, (0, 1, 2))).lower(*placed).compile()
        text = compiled.as_text()
        calls = 'custom_call_target="xentile_linear_cross_entropy'
        assert (calls in text) == has_shardy and "all-gather" not in text
        for actual, want in zip(
            jax.tree.leaves(compiled(*placed)), jax.tree.leaves(expected), strict=True
        ):
            assert error(actual, np.asarray(want, np.float64)) < 2e-2


@pytest.mark.only("cpu", "it compiles for the devices that are there")
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("mib", [6, 12, 40, 100])
@pytest.mark.parametrize("of_bias", [None, "float32", "bfloat16"])
def test_calls_of_a_cpu_stay_within_the_budget(
    of_bias: str | None, mib: int, reduction: str
) -> None:
    x = jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((20011, 512), jnp.bfloat16)
    b = None if of_bias is None else jax.ShapeDtypeStruct((20011,), of_bias)
    how: dict[str, Any] = {"reduction": reduction, "max_scratch_bytes": mib * 2**20}
    plan = explain(x, w, bias=b, platform="cpu", **how)
    assert plan.schedule == "library" and plan.scratch_bytes <= mib * 2**20

    def f(x: Any, w: Any, b: Any) -> Any:
        return linear_cross_entropy(x, w, jnp.zeros(1024, jnp.int32), bias=b, **how).sum()

    of = (0, 1) if b is None else (0, 1, 2)
    compiled = jax.jit(jax.value_and_grad(f, of)).lower(x, w, b).compile()
    memory = compiled.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes <= plan.scratch_bytes + 2**16, plan
    assert calls(compiled) == (["fused"] if reduction == "mean" else ["keep", "resume"])


def calls(compiled: Any) -> list[str]:
    """The library's calls of linear cross-entropy in a program."""
    pattern = r"custom_call_target=\"xentile_linear_cross_entropy_(\w+)\""
    return re.findall(pattern, compiled.as_text())


@pytest.mark.few(2)
@pytest.mark.only("cpu", "others hand nothing over")
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("dtype", "mib", "axis", "handed_over"),
    [
        ("float16", 2, 0, True),
        ("bfloat16", 1, 0, True),
        ("float32", 4, 0, True),
        ("bfloat16", 2, 1, True),
        ("bfloat16", 0.6, 1, False),
    ],
)
@pytest.mark.slow
def test_logits_that_a_cpu_hands_over(
    rng: np.random.Generator, dtype: str, mib: float, axis: int, handed_over: bool, has_bias: bool
) -> None:
    arrays = problem(rng, dtype, tokens=300, axis=axis, bias=has_bias)
    hidden, weight, bias, labels = arrays
    how: dict[str, Any] = {"max_scratch_bytes": int(mib * 2**20), "reduction": "none"}
    plan = explain(hidden, weight, bias=bias, platform="cpu", **how)
    assert plan.schedule == "library" and plan.saves_logits == handed_over
    assert (plan.products < 4) == handed_over

    def f(x: Any, w: Any, b: Any, **how: Any) -> Any:
        return linear_cross_entropy(x, w, labels, bias=b, **BOTH, **how)

    one, other = (jnp.asarray(rng.normal(size=300), jnp.float32) for _ in range(2))

    def both(x: Any, w: Any, b: Any) -> Any:
        _, vjp = jax.vjp(partial(f, **how), x, w, b)
        return vjp(one), vjp(other)

    # A second backward pass finds what the first one found, though that wrote over it.
    compiled = jax.jit(both).lower(hidden, weight, bias).compile()
    passes = ["keep", "resume", "resume"] if handed_over else ["forward", "backward", "backward"]
    assert calls(compiled) == passes
    for found in (compiled(hidden, weight, bias), both(hidden, weight, bias)):
        for cotangent, gradients in zip((one, other), found, strict=True):
            dense = partial(f, reduction="none", implementation="reference")
            expected = jax.jit(jax.vjp(dense, hidden, weight, bias)[1])(cotangent)
            for actual, want in zip(
                jax.tree.leaves(gradients), jax.tree.leaves(expected), strict=True
            ):
                assert error(actual, np.asarray(want, np.float64)) < 3e-2


@pytest.mark.parametrize(("budget", "has_library"), CHUNKS_OF_F32)
def test_temporaries_stay_within_the_budget(
    monkeypatch: pytest.MonkeyPatch, budget: str | None, has_library: bool
) -> None:
    monkeypatch.setattr(schedule, "has_cpu_calls", lambda: has_library)
    tokens, width, vocab = 4096, 64, 20011
    x = jax.ShapeDtypeStruct((tokens, width), jnp.float32)
    w = jax.ShapeDtypeStruct((vocab, width), jnp.float32)
    y = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    limits = {"tokens": 64 * 2**20, "vocabulary": 16 * 2**20, "both": 3 * 2**20}
    limit = None if budget is None else limits[budget]
    usual = explain(x, w, max_scratch_bytes=limit, platform="cpu")
    assert usual.schedule == ("library" if has_library else budget or "tokens")
    assert usual.scratch_bytes <= usual.max_scratch_bytes
    plan = explain(x, w, max_scratch_bytes=limit)
    f = jax.jit(jax.value_and_grad(partial(linear_cross_entropy, max_scratch_bytes=limit), (0, 1)))
    memory = f.lower(x, w, y).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes <= plan.max_scratch_bytes + 16 * 2**20, plan


def test_plans_for_cpus_fit(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    schedules = set()
    for _ in range(60):
        tokens, width, vocab = (int(2 ** rng.uniform(0, most)) for most in (15, 11, 18))
        reduced, dtype = bool(rng.integers(2)), rng.choice([jnp.bfloat16, jnp.float16, jnp.float32])
        budget = int(2 ** rng.uniform(22, 33))
        axis = int(rng.integers(2))
        x = jax.ShapeDtypeStruct((tokens, width), dtype)
        w = jax.ShapeDtypeStruct((width, vocab) if axis else (vocab, width), dtype)
        b = jax.ShapeDtypeStruct((vocab,), jnp.float32) if rng.integers(2) else None
        how: dict[str, Any] = {
            "reduction": "mean" if reduced else "none",
            "max_scratch_bytes": budget,
        }
        try:
            plan = explain(x, w, bias=b, vocab_axis=axis, platform="cpu", **how)
        except ValueError as refusal:
            assert "the least" in str(refusal)
            continue
        assert plan.scratch_bytes <= budget, plan
        schedules.add(plan.schedule)
        if plan.schedule == "library":
            assert 3 <= plan.products <= 4 and plan.columns <= vocab
            if dtype == jnp.float32:
                with monkeypatch.context() as without:
                    without.setattr(schedule, "has_cpu_calls", lambda: False)
                    usual = explain(x, w, bias=b, vocab_axis=axis, platform="cpu", **how)
                assert plan.products < usual.products
            fused = reduced and dtype != jnp.float16
            assert plan.products == 4 or fused or plan.saves_logits
            assert not (fused and plan.saves_logits)
            if tokens <= width and axis == 0 and (fused or jax.default_backend() == "cpu"):
                assert plan.products == 3
    assert "library" in schedules


def test_a_column_block_is_as_wide_as_it_is_tuned_or_named() -> None:
    x, w = (jax.ShapeDtypeStruct((rows, 64), jnp.bfloat16) for rows in (512, 50257))
    plan_of = partial(explain, x, w, platform="cpu")
    _, tuned = library.tuned_tile("linear_cross_entropy.cpu", x.dtype, 50257) or (0, 0)
    assert plan_of().columns == tuned > 0
    assert library.tuned_tile("no_such.cpu", x.dtype, 50257) is None
    for columns in (4096, 1000, 1):
        plan = plan_of(block_size=columns, time_block=7)
        assert (plan.schedule, plan.columns) == ("library", columns)
    # No wider than the vocabulary, and than what there is room for.
    assert plan_of(block_size=2**40, max_scratch_bytes=2**40).columns == 50257
    plan = plan_of(block_size=4096, max_scratch_bytes=2**21)
    assert plan.scratch_bytes <= 2**21 and plan.columns < 4096
    # In f32 it is the call that has a tile.
    x, w = (jax.ShapeDtypeStruct(one.shape, jnp.float32) for one in (x, w))
    assert explain(x, w, platform="cpu").schedule == "tokens"
    for tile in ({"block_size": 512}, {"time_block": 64}):
        assert explain(x, w, platform="cpu", **tile).schedule == "library"


@pytest.mark.parametrize(
    ("tile", "kind", "message"),
    [
        ({"block_size": 0}, ValueError, "block_size is 0; it must be at least 1"),
        ({"time_block": -4}, ValueError, "time_block is -4; it must be at least 1"),
        ({"block_size": 2.5}, TypeError, "block_size is 2.5; it must be an integer"),
    ],
    ids=str,
)
def test_tiles_that_are_no_good(tile: Any, kind: Any, message: str) -> None:
    x, w, y = jnp.zeros((2, 3)), jnp.zeros((5, 3)), jnp.zeros(2, int)
    functions = (linear_cross_entropy, linear_cross_entropy_per_token)
    for call in (*(partial(one, x, w, y) for one in functions), partial(explain, x, w)):
        with pytest.raises(kind, match=re.escape(message)):
            call(**tile)


@pytest.mark.only("cpu", "others have other tiles")
@pytest.mark.numbers
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_tile_changes_next_to_nothing(rng: np.random.Generator, dtype: str) -> None:
    hidden, weight, bias, labels = problem(rng, dtype, tokens=300, bias=True)

    def found(**tile: int) -> Any:
        def f(x: Any, w: Any, b: Any) -> Any:
            loss = linear_cross_entropy(x, w, labels, bias=b, reduction="sum", **BOTH, **tile)
            return loss.astype(jnp.float32)

        step = jax.jit(jax.value_and_grad(f, (0, 1, 2)))
        assert calls(step.lower(hidden, weight, bias).compile())
        return step(hidden, weight, bias)

    exact = Exact(hidden, weight, bias, labels, **BOTH)
    factors = exact.oracle.factors("sum")
    expected = exact.gradients(0, factors)
    bound = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 3e-2}[dtype]
    for columns in (64, 1000, VOCAB):
        value, gradients = found(block_size=columns, time_block=300)
        np.testing.assert_allclose(value, exact.oracle.reduced(factors), rtol=bound)
        for actual, want in zip(gradients, expected, strict=True):
            assert error(actual, want) < bound
        # The tokens of a task change no bit.
        for actual, want in zip(
            jax.tree.leaves(found(block_size=columns, time_block=7)),
            jax.tree.leaves((value, gradients)),
            strict=True,
        ):
            np.testing.assert_array_equal(actual, want)


def test_plans_take_what_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "has_cpu_calls", lambda: False)
    plan_of = partial(explain, platform="cpu")
    x = jax.ShapeDtypeStruct((8192, 2048), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((128256, 2048), jnp.bfloat16)
    mib = 2**20
    found = {limit: plan_of(x, w, max_scratch_bytes=limit * mib) for limit in (2004, 1024, 256, 32)}
    names = [(plan.schedule, plan.products) for plan in found.values()]
    assert names == [("tokens", 3), ("vocabulary", 4), ("vocabulary", 4), ("both", 5)]
    # 6 bytes a logit: in f32, and its gradient as an operand.
    assert found[2004].tokens == 1024
    for limit, plan in found.items():
        assert plan.scratch_bytes <= limit * mib
    usual = plan_of(x, w)
    assert usual.products == 3 and usual.tokens == 4096
    w = jax.ShapeDtypeStruct((151936, 1536), jnp.bfloat16)
    usual = plan_of(jax.ShapeDtypeStruct((8192, 1536), jnp.bfloat16), w)
    assert usual.products == 3 and usual.tokens == 4096
    w = jax.ShapeDtypeStruct((128256, 2048), jnp.bfloat16)
    assert plan_of(x, w, reduction="none").products == 4
    assert "tokens: 4096 tokens x 151936 columns at a time, 3 products" in str(usual)


def test_plans_for_gpus_fit(rng: np.random.Generator) -> None:
    schedules = set()
    for _ in range(60):
        tokens, width, vocab = (int(2 ** rng.uniform(0, most)) for most in (15, 11, 18))
        reduced, dtype = bool(rng.integers(2)), rng.choice([jnp.bfloat16, jnp.float16, jnp.float32])
        budget = int(2 ** rng.uniform(22, 33))
        x = jax.ShapeDtypeStruct((tokens, width), dtype)
        w = jax.ShapeDtypeStruct((vocab, width), dtype)
        how: dict[str, Any] = {
            "vocab_axis": 0,
            "reduction": "mean" if reduced else "none",
            "platform": "cuda",
        }
        try:
            plan = explain(x, w, max_scratch_bytes=budget, **how)
        except ValueError as error:
            assert "the least" in str(error)
            continue
        schedules.add((plan.schedule, plan.products))
        if plan.schedule != "library":
            continue
        assert plan.scratch_bytes <= budget + 5 * 2**20, plan
        # A bias takes the same plan, and what it and its gradient are in f32.
        b = jax.ShapeDtypeStruct((vocab,), dtype)
        for limit in (budget, None):
            usual = explain(x, w, max_scratch_bytes=limit, **how)
            scratch = usual.scratch_bytes + 8 * vocab
            biased = explain(x, w, bias=b, max_scratch_bytes=limit, **how)
            assert biased == dataclasses.replace(usual, scratch_bytes=scratch)
        chunks = [
            (plan.tokens, plan.columns),
            *([plan.dweight_chunk] if plan.dweight_chunk else []),
        ]
        assert (plan.dweight_chunk is not None) == (plan.products == 5)
        for of_tokens, columns in chunks:
            assert 1 <= of_tokens <= tokens and 1 <= columns <= vocab, plan
            held = of_tokens * columns * np.dtype(dtype).itemsize
            assert held < plan.scratch_bytes, plan
        if plan.products < 4:
            assert reduced and dtype != jnp.float16
            assert plan.single_pass or tokens == plan.tokens or vocab == plan.columns
        if plan.single_pass is not None:
            assert plan.single_pass[0] <= tokens and plan.single_pass[1] + plan.columns <= vocab, (
                plan
            )
            assert plan.single_pass[0] * plan.single_pass[1] * 2 < plan.scratch_bytes, plan
        kept, slot = plan.saved_columns or (0, 0)
        # In the memory of dweight, the rows of a slot before all slots.
        assert slot * width + kept * tokens <= vocab * width
        assert plan.columns + kept <= vocab
        if plan.products == 3:
            assert plan.columns + kept == vocab
    assert {("library", 3), ("library", 4)} <= schedules


def test_plans_for_gpus_make_no_logits_again_that_they_have_room_for() -> None:
    def plan_of(tokens: int, width: int, vocab: int, mib: int, axis: int = 0) -> Any:
        x = jax.ShapeDtypeStruct((tokens, width), jnp.bfloat16)
        w = jax.ShapeDtypeStruct((width, vocab) if axis else (vocab, width), jnp.bfloat16)
        limit = mib * 2**20
        return explain(x, w, vocab_axis=axis, max_scratch_bytes=limit, platform="cuda")

    # Half of the sums of dweight are where it goes.
    by_tokens = plan_of(8192, 2048, 128256, 1024)
    assert (by_tokens.products, by_tokens.tokens, by_tokens.saved_columns) == (3, 2048, None)
    # As many logits as dweight has room for, and the last chunk's.
    by_columns = plan_of(8192, 2304, 256000, 256)
    assert by_columns.saved_columns[0] > 256000 / 4 and by_columns.products < 3.7
    assert "columns saved in dweight's memory, 3.69 products" in str(by_columns)
    # Where a token's logits take more than a column's sums, such sums: of up to half of the columns
    # at first.
    both = plan_of(32768, 1024, 151936, 256)
    assert both.single_pass[1] > 151936 / 4 and both.products == 4 - both.single_pass[1] / 151936
    assert both.columns < 151936 - both.single_pass[1] and both.saved_columns is None
    # Here that is all of them.
    assert plan_of(4096, 4096, 128256, 256).products == 3
    # Gradients of columns of [D, V] have gaps: nothing is kept.
    other = plan_of(8192, 2048, 128256, 256, axis=1)
    assert other.saved_columns is None and other.products == 4
    # Few logits go through memory, where long sums are sharded.
    assert (
        plan_of(256, 1024, 2048, 256).f32_logits and not plan_of(4096, 1024, 4096, 256).f32_logits
    )


@pytest.mark.parametrize(
    ("options", "passes"),
    [
        ({}, ["fused"]),
        ({"max_scratch_bytes": 2**24}, ["fused"]),
        ({"max_scratch_bytes": 2**20}, ["forward", "backward"]),
        ({"reduction": "none"}, ["forward", "backward"]),
        ({"vocab_axis": 1, "return_lse": True}, ["fused"]),
        ({"bias": "bfloat16"}, ["fused"]),
        ({"bias": "float32", "reduction": "none"}, ["forward", "backward"]),
        ({"temperature": 0.7}, ["fused"]),
        ({"temperature": 1.5, "softcap": 30.0, "return_lse": True}, ["fused"]),
        ({"temperature": 0.7, "reduction": "none"}, ["forward", "backward"]),
        ({"axis": "data"}, ["fused", "hidden"]),
        # Sums of dhidden do not fit.
        ({"axis": "data", "max_scratch_bytes": 42_000_000}, ["fused", "hidden"]),
    ],
)
def test_programs_for_gpus_are_calls_of_the_library(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], passes: list[str]
) -> None:
    monkeypatch.setattr(schedule, "has_cuda_call", lambda name="fused": True)
    x = jax.ShapeDtypeStruct((2048, 256), jnp.bfloat16)
    axis = options.get("vocab_axis", 0)
    w = jax.ShapeDtypeStruct((256, 20011) if axis else (20011, 256), jnp.bfloat16)
    y = jax.ShapeDtypeStruct((2048,), jnp.int32)
    options = dict(options)
    of_bias, over = options.pop("bias", None), options.pop("axis", None)
    b = None if of_bias is None else jax.ShapeDtypeStruct((20011,), of_bias)

    def f(x: Any, w: Any, b: Any, y: Any) -> Any:
        found = linear_cross_entropy(x, w, y, bias=b, **options)
        return (found[0] if options.get("return_lse") else found).sum()

    if over is not None:
        auto = (jax.sharding.AxisType.Auto,)
        tokens, mesh = P(over), jax.sharding.AbstractMesh((2,), (over,), auto)
        specs = tokens, P(), P(), tokens
        f = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    of = (0, 1) if b is None else (0, 1, 2)
    traced = jax.jit(jax.value_and_grad(f, of)).trace(x, w, b, y)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    found = re.findall(r"@xentile_(\w+)\(", text)
    assert found == [f"linear_cross_entropy_{name}" for name in passes]
    assert "stablehlo.while" not in text and "stablehlo.dot" not in text
    temperatures = [float(one) for one in re.findall(r"temperature = (\S+) : f64", text)]
    wanted = options.get("temperature")
    assert temperatures == ([] if wanted is None else [wanted] * len(passes))
    if over is not None:
        limit = options.get("max_scratch_bytes")
        own = jax.ShapeDtypeStruct((1024, 256), jnp.bfloat16)
        plan = explain(own, w, max_scratch_bytes=limit, platform="cuda")
        room = 4 * 1024 * 256 + 256 if limit is None else 0
        assert f"tensor<{plan.scratch_bytes + room}xui8>" in text


def test_what_is_refused(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "has_cpu_calls", lambda: False)
    hidden, weight, bias, labels = problem(rng, jnp.float32, bias=True)
    f = linear_cross_entropy

    def refused(error: type[Exception], match: str, *arrays: Any, **options: Any) -> None:
        with pytest.raises(error, match=match):
            f(*arrays, **options)

    refused(
        ValueError, r"weight has shape \(2003, 23\)", hidden, weight[:, 1:], labels, vocab_axis=0
    )
    refused(ValueError, r"set vocab_axis to 0", hidden, weight[:WIDTH], labels)
    refused(
        ValueError,
        r"vocab_axis is 2; it must be 0, 1 or None",
        hidden,
        weight,
        labels,
        vocab_axis=2,
    )
    refused(TypeError, r"weight has dtype int32", hidden, weight.astype(jnp.int32), labels)
    refused(ValueError, r"labels have shape \(599,\)", hidden, weight, labels[1:])
    refused(ValueError, r"bias has shape \(2002,\)", hidden, weight, labels, bias=bias[1:])
    refused(ValueError, r"weights have shape \(1,\)", hidden, weight, labels, weights=jnp.ones(1))
    refused(TypeError, r"labels have dtype float32", hidden, weight, labels.astype(jnp.float32))
    refused(TypeError, r"hidden has dtype int32", hidden.astype(jnp.int32), weight, labels)
    refused(TypeError, r"max_scratch_bytes is 1.5", hidden, weight, labels, max_scratch_bytes=1.5)
    refused(
        ValueError,
        r"max_scratch_bytes is 1000; the least .* is (\d+)",
        hidden,
        weight,
        labels,
        max_scratch_bytes=1000,
    )
    with pytest.raises(ValueError) as refusal:
        f(hidden, weight, labels, max_scratch_bytes=1000)
    least = int(str(refusal.value).rpartition(" ")[2])
    plan = explain(hidden, weight, max_scratch_bytes=least, platform="cpu")
    assert plan.schedule == "both"


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "implementation",
    [None, pytest.param("reference", marks=pytest.mark.only("cpu", "the dense program is XLA's"))],
)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_both_modes_of_differentiation(
    rng: np.random.Generator, reduction: Any, implementation: Any
) -> None:
    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / 2, jnp.float32)

    arrays = draw(6, 8), draw(33, 8), draw(33), jnp.abs(draw(6)) + 0.5
    labels = jnp.asarray(rng.integers(0, 33, 6))

    def f(hidden: Any, weight: Any, bias: Any, weights: Any) -> Any:
        options: dict[str, Any] = {"bias": bias, "weights": weights, "reduction": reduction}
        options |= {"return_lse": True, "implementation": implementation}
        return linear_cross_entropy(hidden, weight, labels, **options)

    def one(hidden: Any) -> Any:
        return jax.vmap(lambda x: f(x, *arrays[1:]))(jnp.stack([hidden, 2 * hidden]))

    check_grads(jax.jit(f), arrays, 1, rtol=2e-2, atol=2e-2, eps=1e-2)
    check_grads(jax.jit(one), arrays[:1], 1, rtol=2e-2, atol=2e-2, eps=1e-2)
