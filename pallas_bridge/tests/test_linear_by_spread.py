"""Linear cross-entropy for logits of any spread, two dtypes and bad input, in every schedule.

Held against float64 of the stored inputs, no logit rounded, in multiples of what XLA's dense
program is off by whose product is f32: it rounds its results alone.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import Oracle
from pallas_bridge._src.linear_cross_entropy import schedule as linear_schedule

from pallas_bridge import explain, linear_cross_entropy

pytestmark = [
    pytest.mark.numbers,
    pytest.mark.only("cpu", "schedules are chosen as CPUs have them"),
]

TOKENS, WIDTH, VOCAB = 520, 256, 2003
OPTIONS = {"label_smoothing": 0.1, "z_loss": 1e-4, "softcap": 30.0, "ignore_index": 7}
# "one" is all tokens and columns at a time, "library" the call for CPUs.
SCHEDULES = ["one", "tokens", "vocabulary", "both", "library", "reference"]
# What has a schedule chosen, in multiples of what "one" takes.
SHARES = {"tokens": 0.95, "vocabulary": 0.5, "both": 0.15}
# Errors of gradients in multiples of the dense program's: of hidden and weight.
BOUNDS_OF_16_BITS = (1.5, 1.85)

Arrays = tuple[Any, Any, Any, Any]


def chosen(monkeypatch: pytest.MonkeyPatch, schedule: str, arrays: Arrays) -> dict[str, Any]:
    """What has linear_cross_entropy take a schedule on CPUs."""
    monkeypatch.setattr(linear_schedule, "has_cpu_calls", lambda: schedule == "library")
    if schedule == "reference":
        return {"implementation": "reference"}
    hidden, weight, bias, _ = arrays
    plan_of = partial(explain, hidden, weight, bias=bias, platform="cpu")
    if schedule == "library":
        how = {"block_size": 256}  # in f32 too
        assert plan_of(**how).schedule == "library"
        return how
    limit = int(plan_of().scratch_bytes * SHARES.get(schedule, 1))
    plan = plan_of(max_scratch_bytes=limit)
    is_chunked = (plan.tokens < TOKENS, plan.columns < VOCAB)
    wanted = {"one": (False, False), "tokens": (True, False), "vocabulary": (False, True)}
    assert is_chunked == wanted.get(schedule, (True, True)), plan
    return {"max_scratch_bytes": limit}


def inputs(
    rng: np.random.Generator, dtypes: tuple[str, str], std: float, *, bias: bool, axis: int = 0
) -> Arrays:
    """Hidden states, weight, bias and labels; one column is far above others for some tokens."""
    hidden = rng.normal(size=(TOKENS, WIDTH))
    weight = rng.normal(size=(VOCAB, WIDTH)) * (std / WIDTH**0.5)
    labels = rng.integers(0, VOCAB, TOKENS)
    labels[rng.random(TOKENS) < 0.1] = 7
    of_bias = jnp.asarray(rng.normal(size=VOCAB) * std / 4, jnp.float32) if bias else None
    weight = weight.T if axis else weight
    x, w = (jnp.asarray(one, dtype) for one, dtype in zip((hidden, weight), dtypes, strict=True))
    return x, w, of_bias, jnp.asarray(labels, jnp.int32)


def with_a_column_far_above(arrays: Arrays) -> Arrays:
    """Has a column that is no token's label 38 nats above what the others have for every token."""
    hidden, weight, bias, labels = arrays
    hidden = hidden.at[:, 0].set(1)
    weight = weight.at[11].set(0).at[11, 0].set(48)
    return hidden, weight, bias, jnp.where(labels == 11, 12, labels)


def narrow(arrays: Arrays) -> Arrays:
    """The same with both matrices in the narrower dtype, as products take them."""
    hidden, weight, bias, labels = arrays
    dtype = min(hidden.dtype, weight.dtype, key=lambda one: one.itemsize)
    return hidden.astype(dtype), weight.astype(dtype), bias, labels


def rounded(values: Any, dtype: Any) -> Any:
    """Float64 as `dtype` has it."""
    return values.astype(np.float32).astype(dtype).astype(np.float64)


class Exact:
    """In float64."""

    def __init__(self, arrays: Arrays, factors: Any, axis: int, options: dict[str, Any]) -> None:
        """Computes losses of tokens, and gradients for factors."""
        hidden, weight, bias, labels = narrow(arrays)
        x, w = np.asarray(hidden, np.float64), np.asarray(weight, np.float64)
        w = w.T if axis else w
        logits = x @ w.T
        if bias is not None:
            logits += np.asarray(bias, np.float64)
        oracle = Oracle(logits, np.asarray(labels), **options)
        dlogits = oracle.gradient(np.asarray(factors, np.float64))
        self.losses = oracle.__dict__["loss"]
        of_weight = dlogits.T @ x
        self.gradients = [dlogits @ w, of_weight.T if axis else of_weight, dlogits.sum(0)]
        # The same where dlogits are rounded once, and a gradient once.
        once = rounded(dlogits, hidden.dtype)
        of_weight = once.T @ x
        made = [once @ w, of_weight.T if axis else of_weight]
        self.once = [rounded(one, like.dtype) for one, like in zip(made, arrays, strict=False)]


@jax.custom_vjp
def in_one_run(x: Any, w: Any) -> Any:
    """X @ w.T in f32, each sum from its first term to its last, as the call for CPUs adds."""

    def add(k: Any, total: Any) -> Any:
        return total + x[:, k, None].astype(jnp.float32) * w[None, :, k].astype(jnp.float32)

    return jax.lax.fori_loop(0, WIDTH, add, jnp.zeros((len(x), len(w)), jnp.float32))


def _in_one_run_vjp(residuals: Any, dz: Any) -> Any:
    x, w = residuals
    dz = dz.astype(x.dtype)
    return (dz @ w).astype(x.dtype), (dz.T @ x).astype(w.dtype)


in_one_run.defvjp(lambda x, w: (in_one_run(x, w), (x, w)), _in_one_run_vjp)


def dense(
    arrays: Arrays,
    factors: Any,
    axis: int,
    options: dict[str, Any],
    chunk: tuple[int, int],
    *,
    is_one_run: bool = False,
) -> tuple[Any, Any]:
    """Losses and gradients of the program that users write, differentiated by JAX.

    Logits come a chunk at a time: XLA's CPU adds in another order where a product is narrow. With
    `is_one_run` they are sums in one run.
    """
    hidden, weight, bias, labels = narrow(arrays)
    tokens, columns = chunk

    def product(x: Any, w: Any) -> Any:
        if is_one_run:
            return in_one_run(x, w.T if axis else w)
        blocks = [
            [
                jax.lax.dot_general(
                    x[n : n + tokens],
                    jax.lax.slice_in_dim(w, v, min(v + columns, VOCAB), axis=axis),
                    (((1,), (1 - axis,)), ((), ())),
                    preferred_element_type=jnp.float32,
                )
                for v in range(0, VOCAB, columns)
            ]
            for n in range(0, TOKENS, tokens)
        ]
        return jnp.block(blocks)

    def f(x: Any, w: Any, b: Any) -> Any:
        z = product(x, w)
        z = z if b is None else z + b
        cap, eps = options.get("softcap"), options.get("label_smoothing", 0)
        z = z if cap is None else cap * jnp.tanh(z / cap)
        lse = jax.nn.logsumexp(z, -1)
        picked = jnp.take_along_axis(z, labels[:, None], 1)[:, 0]
        if options:
            losses = (1 - eps) * (lse - picked) + eps * (lse - z.mean(-1))
            losses += options["z_loss"] * lse**2
        else:
            losses = -jnp.take_along_axis(jax.nn.log_softmax(z), labels[:, None], 1)[:, 0]
        losses = jnp.where(labels == options.get("ignore_index", -1), 0, losses)
        return (losses * factors).sum(), losses

    of = (0, 1) if bias is None else (0, 1, 2)
    (_, losses), gradients = jax.jit(jax.value_and_grad(f, of, has_aux=True))(hidden, weight, bias)
    return losses, gradients


def ours(
    arrays: Arrays, factors: Any, axis: int, options: dict[str, Any], **how: Any
) -> tuple[Any, Any]:
    """The same by linear_cross_entropy: gradients of a sum, and losses of tokens."""
    hidden, weight, bias, labels = arrays
    f = partial(linear_cross_entropy, labels=labels, vocab_axis=axis, **options, **how)

    @jax.jit
    def both(x: Any, w: Any, b: Any) -> Any:
        def total(of: Any) -> Any:
            return f(of[0], of[1], bias=of[2], reduction="sum", weights=factors)

        return f(x, w, bias=b, reduction="none"), jax.grad(total)((x, w, b))

    losses, gradients = both(hidden, weight, bias)
    return losses, [one for one in gradients if one is not None]


def error(actual: Any, want: Any) -> float:
    """The largest difference beside the largest value."""
    actual = np.asarray(actual, np.float64)
    assert actual.shape == want.shape
    return float(np.abs(actual - want).max() / np.abs(want).max())


def hold(arrays: Arrays, axis: int, options: dict[str, Any], schedule: str, how: Any) -> None:
    # In f16 the gradient of a mean is soon below the normal range, as in every program.
    is_half = narrow(arrays)[0].dtype == jnp.float16
    factors = jnp.full(TOKENS, 1 if is_half else 1 / 512, jnp.float32)
    exact = Exact(arrays, factors, axis, options)
    losses, gradients = ours(arrays, factors, axis, options, **how)
    chunk = (TOKENS, VOCAB)
    if how.get("max_scratch_bytes"):
        plan = explain(*arrays[:2], bias=arrays[2], vocab_axis=axis, platform="cpu", **how)
        chunk = plan.tokens, plan.columns
    # The call sums products of f32, which those of float16 are too, in one run. XLA sums them in
    # many, whose worst error is smaller.
    is_call = schedule == "library"
    is_one_run = is_call and narrow(arrays)[0].dtype != jnp.bfloat16
    other_losses, others = dense(arrays, factors, axis, options, chunk, is_one_run=is_one_run)
    off, other = (np.abs(np.asarray(one) - exact.losses) for one in (losses, other_losses))
    assert off.max() <= 1.2 * other.max() + 2e-5
    for actual, like in zip(gradients, arrays, strict=False):
        assert actual.dtype == like.dtype
    matrices = zip(gradients, others, exact.gradients, exact.once, arrays, strict=False)
    if narrow(arrays)[0].dtype == jnp.float32:
        # What the worst of many sums of as many terms as tokens is off by, in any order.
        of_a_sum = TOKENS**0.5 * float(jnp.finfo(jnp.float32).eps)
        for actual, dense_one, want, *_ in matrices:
            # Whose worst entry is worse is luck, and norms tell more.
            assert error(actual, want) <= 2 * error(dense_one, want) + of_a_sum
            norms = [np.linalg.norm(np.asarray(x, float) - want) for x in (actual, dense_one)]
            # Chunks, and the call, add in another order.
            of_sums = {"one": 1.1, "reference": 1.1, "library": 2}.get(schedule, 1.4)
            assert norms[0] <= of_sums * norms[1]
    else:
        for (actual, dense_one, want, once, like), bound in zip(
            matrices, BOUNDS_OF_16_BITS, strict=True
        ):
            # Sums in f32 move p by as much of itself as they move losses, and a tie may round to
            # its other side: that moves an entry by as much again as its rounding, and hardly a
            # norm. The dense program narrows both arrays itself, and its gradients with them.
            if schedule != "library":
                assert error(actual, want) <= 2 * error(once, want) + other.max() + 2e-6
                norms = [np.linalg.norm(np.asarray(x, float) - want) for x in (actual, once)]
                assert norms[0] <= 1.05 * norms[1]
            if like.dtype == dense_one.dtype:
                norms = [np.linalg.norm(np.asarray(x, float) - want) for x in (actual, dense_one)]
                assert norms[0] <= bound * norms[1]
    if arrays[2] is not None:
        # The call sums dbias of what is an operand, rounded as it is.
        eps = float(jnp.finfo(narrow(arrays)[0].dtype).eps)
        assert error(gradients[2], exact.gradients[2]) < (4e-6 + eps if is_call else 4e-6)


@pytest.mark.few(3)
@pytest.mark.parametrize("std", [0.5, 8.0, 64.0])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_any_spread(
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    schedule: str,
    dtype: str,
    std: float,
) -> None:
    arrays = inputs(rng, (dtype, dtype), std, bias=False)
    hold(arrays, 0, {}, schedule, chosen(monkeypatch, schedule, arrays))


@pytest.mark.few(2)
@pytest.mark.parametrize("std", [0.5, 64.0])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_any_spread_with_a_bias_and_options(
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    schedule: str,
    dtype: str,
    std: float,
) -> None:
    arrays = inputs(rng, (dtype, dtype), std, bias=True, axis=1)
    hold(arrays, 1, OPTIONS, schedule, chosen(monkeypatch, schedule, arrays))


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_column_far_above(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, schedule: str, dtype: str
) -> None:
    arrays = with_a_column_far_above(inputs(rng, (dtype, dtype), 1.0, bias=False))
    hold(arrays, 0, {}, schedule, chosen(monkeypatch, schedule, arrays))


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "dtypes",
    [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "float32")],
    ids=" ".join,
)
@pytest.mark.parametrize("schedule", [one for one in SCHEDULES if one != "library"])
def test_two_dtypes(
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    schedule: str,
    dtypes: tuple[str, str],
) -> None:
    arrays = inputs(rng, dtypes, 8.0, bias=True)
    hold(arrays, 0, OPTIONS, schedule, chosen(monkeypatch, schedule, arrays))


@pytest.mark.few(2)
@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bad_input_stays_where_it_is(
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    schedule: str,
    dtype: str,
    reduction: str,
) -> None:
    hidden, weight, bias, labels = inputs(rng, (dtype, dtype), 4.0, bias=False)
    how = chosen(monkeypatch, schedule, (hidden, weight, bias, labels))
    labels = labels.at[jnp.array([3, 140, 270])].set(9).at[jnp.array([200, 519])].set(7)
    # A token with a factor of 0 takes part in nothing either. The dense program knows of the
    # reduction's own alone.
    is_out = np.arange(TOKENS) == (140 if reduction == "sum" or schedule != "reference" else 200)
    factors = jnp.asarray(~is_out, jnp.float32)
    f = partial(linear_cross_entropy, labels=labels, ignore_index=7, weights=factors, **how)

    @jax.jit
    def of(x: Any, w: Any) -> Any:
        def total(arrays: Any) -> Any:
            return f(*arrays, reduction=reduction).sum()

        gradients = jax.grad(total)((x, w))
        losses = f(x, w, reduction="none")
        return losses, *(one.astype(jnp.float32) for one in gradients)

    numbers = jnp.array([jnp.nan, jnp.inf, jnp.nan], hidden.dtype)
    counts = (np.asarray(labels) != 7) & ~is_out
    masked = hidden.at[jnp.array([200, 519, 140 if is_out[140] else 519]), 5].set(numbers)
    for actual, want in zip(of(masked, weight), of(hidden, weight), strict=True):
        np.testing.assert_array_equal(actual, want)

    # A token that counts keeps its NaN, in whichever chunk it is.
    for token in (3, 270):
        is_it = np.arange(TOKENS) == token
        losses, dhidden, dweight = of(hidden.at[token, 5].set(jnp.nan), weight)
        np.testing.assert_array_equal(np.isnan(losses), is_it)
        np.testing.assert_array_equal(np.isnan(dhidden).any(1), is_it)
        assert np.isnan(dweight).all()

    # A row of the weight is every token's that counts.
    losses, dhidden, _ = of(hidden, weight.at[40, 5].set(jnp.nan))
    np.testing.assert_array_equal(np.isnan(losses), counts)
    np.testing.assert_array_equal(np.isnan(dhidden).all(1), counts)
    assert not np.asarray(dhidden)[~counts].any()

    # A row of logits beyond f32.
    large = hidden.at[3].set((jnp.sign(weight[4]) * 2.0**126).astype(hidden.dtype))
    losses, dhidden, _ = of(large, weight)
    np.testing.assert_array_equal(np.isnan(losses), np.arange(TOKENS) == 3)
    np.testing.assert_array_equal(np.isnan(dhidden).any(1), np.arange(TOKENS) == 3)
