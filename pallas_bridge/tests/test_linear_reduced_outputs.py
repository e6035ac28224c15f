"""What is known of tokens beside a reduced linear loss, which comes with its gradients."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import Oracle
from pallas_bridge._src.losses import aux_outputs
from pallas_bridge._src.losses.options import Options
from placement import PLATFORM
from test_program import calls_of

from pallas_bridge import linear_cross_entropy

ASKED: dict[str, Any] = {"return_lse": True, "return_entropy": True, "return_correct": True}
# Of N, D and V. On Hopper the cross-entropy of the second is in the product of its logits.
SMALL, IN_PRODUCT = (300, 64, 2008), (3000, 128, 5000)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smooth": {"label_smoothing": 0.1, "z_loss": 1e-4, "temperature": 0.7},
    "capped": {"softcap": 15.0, "z_loss": 1e-4, "temperature": 1.5},
    "both": {"label_smoothing": 0.1, "softcap": 15.0},
}


def valued(labels: Any, **options: Any) -> Any:
    """The loss of hidden states, weight and bias, and beside it what else is asked for."""

    def f(hidden: Any, weight: Any, bias: Any) -> Any:
        found = linear_cross_entropy(hidden, weight, labels, bias=bias, **options)
        return found[0], found[1:]

    return f


# Products of f32 have no cross-entropy in them, and XLA takes long to choose the dense program's.
@pytest.mark.few(2)
@pytest.mark.numbers
@pytest.mark.parametrize(
    ("dtype", "std"), [("bfloat16", 0.5), ("bfloat16", 4.0), ("bfloat16", 64.0), ("float32", 4.0)]
)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_any_spread(
    rng: np.random.Generator, dtype: str, options: dict[str, Any], std: float
) -> None:
    hold(rng, SMALL, dtype, options, std)


@pytest.mark.only("cuda", "elsewhere no product has the cross-entropy in it")
@pytest.mark.parametrize("std", [0.5, 4.0, 64.0])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_any_spread_in_the_product(
    rng: np.random.Generator, options: dict[str, Any], std: float
) -> None:
    hold(rng, IN_PRODUCT, "bfloat16", options, std)


def hold(
    rng: np.random.Generator,
    shape: tuple[int, int, int],
    dtype: str,
    options: dict[str, Any],
    std: float,
) -> None:
    """Holds a loss, what is known beside it, and gradients against float64."""
    tokens, width, vocab = shape
    axis, bias_of, reduction = rng.integers(2), rng.integers(3), rng.choice(["mean", "sum"])
    # Chunks of few tokens or columns, or one.
    budget = 4_000_000 if rng.integers(2) else None
    print(f"vocab_axis {axis}, bias {bias_of}, {reduction}, budget {budget}")
    hidden = rng.normal(size=(tokens, width))
    weight = rng.normal(size=(vocab, width)) * (std / width**0.5)
    labels = rng.integers(0, vocab, tokens)
    # As of a trained model: the likeliest column mostly is the label.
    likely = rng.random(tokens) < 0.6
    norms = (weight[labels] ** 2).sum(-1, keepdims=True)
    hidden += np.where(likely[:, None], weight[labels] * (6 * std + 8) / norms, 0)
    labels[rng.random(tokens) < 0.1] = 7
    weights = rng.uniform(0.5, 2, tokens) * (rng.random(tokens) < 0.8)
    columns = rng.integers(0, vocab, (tokens, 3))
    columns[:, 1] = columns[:, 0]
    x, w = (jnp.asarray(one, dtype) for one in (hidden, weight))
    bias = None
    if bias_of > 0:
        bias = rng.normal(size=vocab).astype(np.float32)
    if bias_of == 2 and "softcap" not in options:
        masked = np.setdiff1d(np.arange(vocab), labels)[::3]
        bias[masked] = -np.inf  # type: ignore[index]
        options = {**options, "label_smoothing": 0.0}
    options = {**options, "ignore_index": 7}

    wide, of_weight = np.asarray(x, np.float64), np.asarray(w, np.float64)
    logits = wide @ of_weight.T + (0 if bias is None else bias.astype(np.float64))
    oracle: Any = Oracle(logits, labels, **options)
    factors = oracle.factors(reduction, weights)
    more = {"reduction": reduction, "weights": jnp.asarray(weights, jnp.float32), **options}
    more["vocab_axis"] = int(axis)
    given = x, w.T if axis else w, bias

    def of(**how: Any) -> Any:
        f = valued(labels, **more, **how)
        return jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))(*given)

    (loss, (lse, entropy, correct, logps)), gradients = of(
        max_scratch_bytes=budget, columns=columns, **ASKED
    )
    (dense_loss, (_, dense, _)), of_dense = of(implementation="reference", **ASKED)
    # What both have of f32 grows with the logits over the temperature.
    unit = 2.0**-23 * max(1.0, np.abs(np.where(oracle.z > -np.inf, oracle.z, 0)).max())
    wanted = oracle.reduced(factors)
    off, other = (abs(float(one) - wanted) for one in (loss, dense_loss))
    assert off <= 1.5 * other + (4 * unit + 2e-6) * factors.sum()
    counted = labels != 7
    expected = oracle.column_logps(columns)
    np.testing.assert_allclose(logps, expected, rtol=1e-5, atol=16 * unit + 1e-5)
    np.testing.assert_allclose(lse[counted], oracle.lse[counted], rtol=1e-5, atol=8 * unit)
    off, other = (np.abs(one - oracle.entropy()).max() for one in (entropy, dense))
    assert off <= 1.5 * other + 8 * unit
    assert (np.asarray(entropy)[~counted] == 0).all()
    top = np.sort(logits, -1)
    is_clear = top[:, -1] - top[:, -2] > 16 * unit
    assert np.array_equal(np.asarray(correct)[is_clear], oracle.correct()[is_clear])
    assert correct.any() and not correct.all()

    dlogits = oracle.gradient(factors)
    expected = dlogits @ of_weight, dlogits.T @ wide
    bound = 1.5 if dtype == "bfloat16" else 3.0
    for one, other_one, want in zip(gradients, of_dense, expected, strict=True):
        found = (np.asarray(a, np.float64) for a in (one, other_one))
        want = want.T if want.shape != one.shape else want
        norms = [np.linalg.norm(a - want) for a in found]
        assert norms[0] <= bound * norms[1] + 2 * unit * np.linalg.norm(want)


@pytest.mark.numbers
def test_ties_and_special_tokens(rng: np.random.Generator) -> None:
    # A logit is a row of the weight: exact, in any order of sums.
    weight = rng.integers(-8, 8, (600, 8))
    labels = rng.integers(0, 600, 8)
    hidden = jnp.eye(8, dtype=jnp.bfloat16)
    columns = np.sort(rng.choice(600, (8, 3)))
    for token, row in enumerate(columns):
        weight[row, token] = 9
    # The first of the largest, and another of them, wherever they are; no column, and none at all.
    labels[:6] = columns[0, 0], columns[1, 2], columns[2, 0], columns[3, 1], 600, -100
    # A token that is ignored has any hidden state.
    hidden = hidden.at[5].set(jnp.nan)
    weights = jnp.asarray([1, 1, 0, 0, 0, 1, 1, 1], jnp.float32)
    f = valued(labels, weights=weights, reduction="sum", **ASKED)
    step = jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))
    (loss, (_, entropy, correct)), gradients = step(hidden, jnp.asarray(weight, jnp.bfloat16), None)
    z = weight.T.astype(np.float64)
    z[5] = 0
    oracle: Any = Oracle(z, labels)
    first = np.array([z[token].argmax() == label for token, label in enumerate(labels)])
    assert np.array_equal(correct, first & (labels >= 0) & (np.arange(8) != 5))
    assert correct[0] and correct[2]
    assert correct[1] == (columns[1, 0] == columns[1, 2])
    # Tokens without a weight have them too, and so has a label out of range, which is not counted.
    np.testing.assert_allclose(entropy, oracle.entropy(), rtol=2e-6, atol=2e-6)
    losses = np.where(np.asarray(weights) > 0, oracle.loss, 0)
    np.testing.assert_allclose(loss, losses.sum(), rtol=2e-6)
    # On GPUs so few logits lie in memory in f32, and dweight has what times 0 is a NaN.
    finite = gradients if PLATFORM == "cpu" else gradients[:1]
    assert all(np.isfinite(np.asarray(one, np.float32)).all() for one in finite)


@pytest.mark.few(2)
@pytest.mark.only("cpu", "where calls are those over logits")
@pytest.mark.parametrize(
    "asked", [("entropy",), ("correct", "lse"), ("columns",), ("columns", "entropy")]
)
def test_which_calls_a_program_makes(rng: np.random.Generator, asked: tuple[str, ...]) -> None:
    hidden = jnp.asarray(rng.normal(size=(24, 16)), jnp.bfloat16)
    weight = jnp.asarray(rng.normal(size=(301, 16)), jnp.bfloat16)
    labels = rng.integers(0, 301, 24)
    more: dict[str, Any] = {f"return_{name}": True for name in asked if name != "columns"}
    if "columns" in asked:
        more["columns"] = labels[:, None]
    f = valued(labels, **more)
    first, both = "distribution", "distribution_fused"
    if asked == ("columns",):
        first, both = "forward", "fused"

    def calls(of: Any, f: Any = f, differentiated: bool = True) -> list[str]:
        def loss(hidden: Any, weight: Any) -> Any:
            found, more = f(hidden, weight, None)
            return of(found, *more), more

        run = jax.value_and_grad(loss, (0, 1), has_aux=True) if differentiated else loss
        return calls_of(jax.jit(run).lower(hidden, weight).compile())

    assert calls(lambda loss, *_: loss) == [both]
    assert calls(lambda loss, *_: 3 * loss**2) == [both]
    assert calls(lambda loss, *_: loss, jax.jit(f)) == [both]
    # Nothing is made for gradients that nobody wants, be it that others take their place.
    assert calls(lambda loss, *_: loss, differentiated=False) == [first]
    if "entropy" in asked:
        with_entropy = calls(lambda loss, entropy, *_: loss - entropy.mean())
        assert with_entropy == ["distribution", "distribution_backward"]
    if "entropy" not in asked or "columns" in asked:
        # Lse, or the columns' log-probabilities.
        place = 0 if "lse" in asked else -1
        with_other = calls(lambda loss, *others: loss + (others[place] ** 2).mean())
        assert with_other == ["backward", first]


@pytest.mark.few(1)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.slow
def test_derivatives_under_transformations(rng: np.random.Generator, with_bias: bool) -> None:
    hidden = jnp.asarray(rng.normal(size=(2, 30, 16)), jnp.float32)
    weight = jnp.asarray(rng.normal(size=(301, 16)), jnp.float32)
    bias = jnp.asarray(rng.normal(size=301), jnp.float32) if with_bias else None
    labels = jnp.asarray(rng.integers(0, 301, (2, 30))).at[0, 3].set(-100)
    weights = jnp.asarray(rng.uniform(size=(2, 30)), jnp.float32)
    moving = hidden, weight, bias, weights

    def of(implementation: Any) -> Any:
        def f(h: Any, w: Any, b: Any, of_tokens: Any, y: Any, differentiates: bool = True) -> Any:
            loss, lse, entropy, correct, logps = linear_cross_entropy(
                h, w, y, bias=b, weights=of_tokens, columns=jnp.flip(jnp.abs(y))[..., None],
                implementation=implementation, **ASKED,
            )  # fmt: skip
            rest = jnp.cos(entropy).sum() + jnp.sin(lse).sum() + (logps**2).sum()
            return 1.5 * loss + (rest if differentiates else 0.0), (entropy, correct, logps)

        def every(*arrays: Any) -> Any:
            numbers = (0, 1, 2, 3) if with_bias else (0, 1, 3)
            only_loss = partial(f, differentiates=False)
            h, w, b, of_tokens = arrays

            def mapped(w: Any) -> Any:
                run = jax.vmap(lambda h, o, y: only_loss(h, w, b, o, y)[0])
                return run(h, of_tokens, labels).sum()

            def scanned(w: Any) -> Any:
                def step(total: Any, one: Any) -> Any:
                    h, o, y = one
                    return total + jax.checkpoint(only_loss)(h, w, b, o, y)[0], None

                return jax.lax.scan(step, 0.0, (h, of_tokens, labels))[0]

            along = jnp.sin(h), jnp.cos(w)
            return (
                jax.value_and_grad(only_loss, numbers, has_aux=True)(*arrays, labels),
                jax.value_and_grad(f, numbers, has_aux=True)(*arrays, labels),
                jax.grad(mapped)(w),
                jax.value_and_grad(scanned)(w),
                jax.jvp(lambda h, w: f(h, w, b, of_tokens, labels)[0], (h, w), along),
                jax.jvp(lambda o: f(h, w, b, o, labels)[0], (of_tokens,), (of_tokens**2,)),
            )

        return jax.jit(every)(*moving)

    dense, found = (jax.tree.leaves(of(one)) for one in ("reference", None))
    # Numbers are sums of as many terms of either sign as the largest of them, which has but one.
    of_sums = 3e-6 * max(abs(float(one)) for one in dense if one.ndim == 0)
    for one, other in zip(dense, found, strict=True):
        scale = max(1e-3, float(np.abs(one).max()))
        more = of_sums if one.ndim == 0 else 0.0
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=3e-5 * scale + more)


@pytest.mark.parametrize("with_bias", [False, True])
def test_columns_of_rows_of_the_weight(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, with_bias: bool
) -> None:
    hidden = jnp.asarray(rng.normal(size=(50, 16)), jnp.float32)
    weight = jnp.asarray(rng.normal(size=(301, 16)), jnp.bfloat16)
    bias = jnp.asarray(rng.normal(size=301), jnp.float32).at[7].set(-jnp.inf) if with_bias else None
    columns = rng.integers(0, 301, (50, 5))
    columns[0] = 7, 300, 301, -1, 7
    # Of the rows of seven tokens at a time.
    monkeypatch.setattr(aux_outputs, "GATHERED_BYTES", 7 * 5 * 16 * 2)
    options = Options(
        ignore_index=-100,
        label_smoothing=0.0,
        z_loss=0.0,
        softcap=None if with_bias else 5.0,
        block_size=None,
        time_block=None,
        every_token=True,
        donate_logits=False,
        temperature=0.7,
    )
    found = aux_outputs.gather_column_logits(options, hidden, weight, bias, jnp.asarray(columns))
    rows = np.asarray(hidden.astype(jnp.bfloat16), np.float64), np.asarray(weight, np.float64)
    z = rows[0] @ rows[1].T + (0 if bias is None else np.asarray(bias, np.float64))
    z = (z if with_bias else 5 * np.tanh(z / 5)) / 0.7
    expected = np.take_along_axis(z, np.clip(columns, 0, 300), -1)
    expected[(columns < 0) | (columns > 300)] = np.nan
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
