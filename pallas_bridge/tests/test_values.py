"""Values and gradients against float64, through jit, on fresh random inputs."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import Oracle, assert_gradient, assert_tokens

from pallas_bridge import cross_entropy, cross_entropy_per_token, linear_cross_entropy

DTYPES = ["float32", "bfloat16", "float16"]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 1e-3},
    "softcap": {"softcap": 30.0},
    "all": {"label_smoothing": 0.2, "z_loss": 1e-2, "softcap": 15.0, "ignore_index": 3},
    "tile": {"block_size": 37, "time_block": 3},
}
IMPLEMENTATIONS = [
    "custom_call",
    pytest.param(
        "reference", marks=pytest.mark.only("cpu", "the limits are the kernels', not XLA's on GPUs")
    ),
]


def problem(
    rng: np.random.Generator, dtype: str, tokens: int, vocab: int, scale: float = 3.0
) -> tuple[jax.Array, jax.Array]:
    """Random logits [T, V] and labels [T], a few of them ignored."""
    logits = jnp.asarray(rng.normal(0, scale, (tokens, vocab)), dtype)
    labels = rng.integers(0, vocab, tokens)
    labels[rng.random(tokens) < 0.2] = -100
    return logits, jnp.asarray(labels, jnp.int32)


def oracle(logits: jax.Array, labels: jax.Array, **options: Any) -> Oracle:
    options.pop("block_size", None), options.pop("time_block", None)
    return Oracle(np.asarray(logits), np.asarray(labels), **options)


def check(
    rng: np.random.Generator,
    logits: jax.Array,
    labels: jax.Array,
    implementation: str = "custom_call",
    **options: Any,
) -> None:
    """Everything that can be asked for, of logits [T, V]."""
    expected = oracle(logits, labels, **options)
    v = expected.__dict__
    keywords = {"implementation": implementation, "return_lse": True, **options}

    # Per token, with random cotangents of all three outputs.
    @jax.jit
    def per_token(x: jax.Array, *cotangents: jax.Array) -> Any:
        outputs, vjp = jax.vjp(lambda x: cross_entropy_per_token(x, labels, **keywords), x)
        return outputs, *vjp(cotangents)

    def reduced(reduction: Any, w: Any, x: jax.Array, cotangent: jax.Array) -> Any:
        def f(x: jax.Array) -> jax.Array:
            return cross_entropy(x, labels, reduction=reduction, weights=w, **keywords)[0]

        value, vjp = jax.vjp(f, x)
        return value, *vjp(cotangent)

    cotangents = rng.normal(size=(3, len(labels))).astype(np.float32)
    weights = rng.uniform(0.5, 2, len(labels)).astype(np.float32)
    weights[rng.random(len(labels)) < 0.2] = 0
    cases: list[tuple[Any, Any, float]] = [
        (reduction, w, cotangent)
        for reduction in ("mean", "sum")
        for w, cotangent in ((None, 1.0), (weights, 0.75))
    ]

    # Functions of their own in one program, which is compiled once.
    @jax.jit
    def everything(x: jax.Array, cotangents: jax.Array, factors: list[jax.Array]) -> Any:
        each = [jax.jit(partial(reduced, reduction, w)) for reduction, w, _ in cases]
        found = [one(x, factor) for one, factor in zip(each, factors, strict=True)]
        return per_token(x, *cotangents), found

    of_tokens, of_cases = everything(logits, cotangents, [jnp.float32(c) for *_, c in cases])
    (loss, logps, lse), dlogits = of_tokens
    for name, actual in (("loss", loss), ("logps", logps), ("lse", lse)):
        assert_tokens(name, actual, v[name], v["size"])
    largest = np.abs(cotangents).max(0) * (
        1 + np.abs(2 * expected.z_loss * np.nan_to_num(v["lse"]))
    )
    assert_gradient(dlogits, expected.gradient(*cotangents), largest, expected.softcap, v["size"])

    # Reduced, with weights of which some are 0, and a cotangent other than 1.
    for (reduction, w, cotangent), (value, dlogits) in zip(cases, of_cases, strict=True):
        factors = expected.factors(reduction, w)
        terms = np.where(factors == 0, 0, np.abs(factors) * v["size"])
        assert_tokens("reduced", value[None], np.array([expected.reduced(factors)]), terms.sum())
        # The cotangent is applied to what was rounded already: another rounding.
        once_more = 1.0 if cotangent == 1.0 else 2.0
        bound = (
            np.abs(factors)
            * once_more
            * (1 + np.abs(2 * expected.z_loss * np.nan_to_num(v["lse"])))
        )
        want = expected.gradient(cotangent * factors)
        if cotangent == 1.0 or logits.dtype != jnp.bfloat16:
            assert_gradient(dlogits, want, bound, expected.softcap, v["size"])
        else:
            np.testing.assert_allclose(
                np.asarray(dlogits, np.float64),
                want,
                rtol=2**-7,
                atol=float(bound.max()) * 2**-23,
            )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_output_and_gradient(
    rng: np.random.Generator, dtype: str, options: str, implementation: str
) -> None:
    logits, labels = problem(rng, dtype, 37, 1031)
    check(rng, logits, labels, implementation, **OPTIONS[options])


@pytest.mark.parametrize("vocab", [1, 2, 7, 127, 50257, 151643])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_vocabulary(rng: np.random.Generator, dtype: str, vocab: int) -> None:
    check(rng, *problem(rng, dtype, 5, vocab))


@pytest.mark.parametrize("vocab", [3, 10, 257, 2048, 4096])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_small_vocabularies(rng: np.random.Generator, dtype: str, vocab: int) -> None:
    # A last tile that is not full, and one row alone.
    tokens = int(rng.choice([1, 7, 67, 131]))
    # At 45 many entries are below all that f32 has, and not equal.
    check(rng, *problem(rng, dtype, tokens, vocab, scale=float(rng.choice([1, 8]))))


@pytest.mark.only("cuda", "on CPUs test_kernels.py holds what XLA makes of it")
@pytest.mark.parametrize("vocab", [2, 257, 2048, 4095, 32000, 50257, 151936])
@pytest.mark.parametrize("options", ["plain", "all"])
def test_the_number_of_tokens_decides_no_bit(
    rng: np.random.Generator, vocab: int, options: str
) -> None:
    most = 4096 if vocab <= 4096 else 400
    dtype = DTYPES[int(rng.integers(3))]
    logits, labels = problem(rng, dtype, most, vocab, scale=8.0)
    cotangents = jnp.asarray(rng.uniform(0.5, 1, most), jnp.float32)

    @jax.jit
    def run(x: jax.Array, y: jax.Array, g: jax.Array) -> Any:
        keywords: Any = {"implementation": "custom_call", **OPTIONS[options]}
        losses, vjp = jax.vjp(lambda x: cross_entropy_per_token(x, y, **keywords)[0], x)
        fused = jax.grad(lambda x: cross_entropy(x, y, reduction="sum", **keywords))(x)
        return losses, *vjp(g), fused

    def bits(tokens: int) -> list[Any]:
        outputs = run(logits[:tokens], labels[:tokens], cotangents[:tokens])
        return [np.asarray(output).view(np.uint8) for output in jax.tree.leaves(outputs)]

    whole = bits(most)
    for tokens in (1, 7, 20, 64):
        for few, many in zip(bits(tokens), whole, strict=True):
            assert np.array_equal(few, many[: len(few)]), f"{tokens} tokens, {dtype}"


@pytest.mark.parametrize("tokens", [0, 1, 2, 300])
def test_every_number_of_tokens(rng: np.random.Generator, tokens: int) -> None:
    check(rng, *problem(rng, "float32", tokens, 300))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("offset", [1e4, -1e4, 640])
def test_large_logits(rng: np.random.Generator, offset: float, implementation: str) -> None:
    logits, labels = problem(rng, "float32", 20, 500)
    check(rng, logits + offset, labels, implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_special_tokens(rng: np.random.Generator, dtype: str, implementation: str) -> None:
    logits, labels = problem(rng, dtype, 12, 211)
    x, y = np.array(logits), np.array(labels)
    y[:12] = rng.integers(1, 211, 12)
    x[0, 5] = np.nan
    x[1, 7] = np.inf
    x[2] = -np.inf
    x[3, ::2], y[3] = -np.inf, 1
    x[4, 17], y[4] = -np.inf, 17
    y[5], y[6], y[7] = 211, -1, 2**31 - 1
    y[8], x[8, 3] = -100, np.nan
    y[9] = -100
    check(rng, jnp.asarray(x), jnp.asarray(y), implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_nothing_counted(rng: np.random.Generator, reduction: Any, implementation: Any) -> None:
    logits, _ = problem(rng, "bfloat16", 6, 50)
    labels = jnp.full(6, -100)
    f = jax.value_and_grad(
        lambda x: cross_entropy(x, labels, reduction=reduction, implementation=implementation)
    )
    value, dlogits = jax.jit(f)(logits)
    assert value == 0 and not np.asarray(dlogits).any()


@pytest.mark.parametrize(
    "dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_labels_of_every_width(rng: np.random.Generator, dtype: str, implementation: Any) -> None:
    with jax.enable_x64(True):
        logits = jnp.asarray(rng.normal(size=(8, 100)), jnp.float32)
        highest = np.iinfo(dtype).max
        y = rng.integers(0, 100, 8).astype(dtype)
        y[0], y[1] = highest, highest - 1
        for ignored in (int(highest), int(highest) - 1, -100, 2**40):
            if ignored >= 2**63:
                continue  # ignore_index is an int64
            expected = Oracle(np.asarray(logits), y, ignore_index=ignored)
            loss, _ = cross_entropy_per_token(
                logits, jnp.asarray(y), ignore_index=ignored, implementation=implementation
            )
            v = expected.__dict__
            assert_tokens("loss", loss, v["loss"], v["size"])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_gradient_of_weights(rng: np.random.Generator, reduction: Any, implementation: Any) -> None:
    logits, labels = problem(rng, "float32", 9, 64)
    weights = rng.uniform(0.5, 2, 9).astype(np.float32)
    weights[4] = 0

    def f(w: jax.Array) -> jax.Array:
        keywords = {"reduction": reduction, "implementation": implementation}
        return cross_entropy(logits, labels, weights=w, **keywords).sum()

    expected = oracle(logits, labels).__dict__
    loss, counted = expected["loss"], ~expected["ignored"]
    total = weights[counted].sum(dtype=np.float64)
    mean = (weights * loss).sum() / total
    want = np.where(counted, (loss - mean) / total, 0) if reduction == "mean" else loss
    np.testing.assert_allclose(jax.jit(jax.grad(f))(weights), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint32", "bfloat16", "float32"])
def test_masks_are_weights(rng: np.random.Generator, dtype: str) -> None:
    logits, labels = problem(rng, "bfloat16", 9, 64)
    mask = rng.random(9) < 0.5
    mask[0] = True
    f = jax.jit(jax.value_and_grad(cross_entropy))
    kept = jnp.where(mask, labels, -100)
    value, gradient = jax.value_and_grad(
        lambda x: cross_entropy(x, labels, weights=jnp.asarray(mask, dtype))
    )(logits)
    expected = f(logits, kept)
    np.testing.assert_allclose(value, expected[0], rtol=1e-6)
    # A unit in the last place: XLA may divide by the number of tokens or multiply by its inverse.
    actual, wanted = (np.asarray(x, np.float32) for x in (gradient, expected[1]))
    np.testing.assert_allclose(actual, wanted, rtol=2**-7)
    assert not actual[~mask].any()


def test_a_mask_over_losses_keeps_nan_out_of_the_gradient(rng: np.random.Generator) -> None:
    logits, labels = problem(rng, "float32", 6, 64)
    mask = np.array([True, False, True, True, False, True])
    poisoned = logits.at[1].set(jnp.nan).at[4, 3].set(jnp.inf)

    def f(x: jax.Array) -> jax.Array:
        return jnp.where(mask, cross_entropy_per_token(x, labels)[0], 0).sum()

    clean, dirty = jax.jit(jax.grad(f))(logits), jax.jit(jax.grad(f))(poisoned)
    np.testing.assert_array_equal(dirty, clean)
    assert not np.asarray(dirty)[[1, 4]].any()


@pytest.mark.parametrize("requests", [{}, {"return_lse": True, "return_entropy": True}])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("implementation", ["reference", None])
@pytest.mark.parametrize("is_linear", [False, True])
def test_tokens_of_weight_0_keep_nan_out_of_the_gradient(
    rng: np.random.Generator,
    is_linear: bool,
    implementation: Any,
    reduction: Any,
    requests: dict[str, Any],
) -> None:
    tokens, width, vocab = 6, 8, 16
    rows = jnp.asarray(rng.normal(size=(tokens, width if is_linear else vocab)), jnp.float32)
    weight = jnp.asarray(rng.normal(size=(vocab, width)), jnp.float32)
    labels = jnp.asarray(rng.integers(0, vocab, tokens))
    mask = np.array([True, False, True, True, False, True])
    poisoned = rows.at[1].set(jnp.nan).at[4, 3].set(jnp.inf)
    options = {"weights": mask, "reduction": reduction, "implementation": implementation}

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        if is_linear:
            found = linear_cross_entropy(x, w, labels, vocab_axis=0, **options, **requests)
        else:
            found = cross_entropy(x, labels, **options, **requests)
        # Outputs of tokens that do not count have a cotangent of 0, and so has their row.
        kept = (jnp.where(mask, one, 0).sum() for one in jax.tree.leaves(found))
        return sum(kept, jnp.float32(0))

    gradients = jax.jit(jax.grad(f, (0, 1)))
    clean, dirty = gradients(rows, weight), gradients(poisoned, weight)
    for one, expected in zip(dirty, clean, strict=True):
        np.testing.assert_allclose(one, expected, rtol=1e-5, atol=1e-6)
    assert not np.asarray(dirty[0])[~mask].any()


def test_a_loss_scale_saves_small_gradients_of_f16(rng: np.random.Generator) -> None:
    logits, labels = problem(rng, "float16", 64, 5000, scale=6.0)
    scale = 2.0**15
    gradient = jax.jit(jax.grad(lambda x: scale * cross_entropy(x, labels)))(logits)
    expected = oracle(logits, labels)
    want = expected.gradient(scale * expected.factors("mean"))
    # Without the scale they are smaller than the least f16.
    assert np.median(np.abs(want)) / scale < 2.0**-24
    assert_gradient(gradient, want, scale / 64)


def test_ignored_tokens_are_not_read_unless_lse_is_asked_for(rng: np.random.Generator) -> None:
    logits, _ = problem(rng, "float32", 4, 50)
    labels = jnp.asarray([1, -100, 2, -100])
    _, lse = cross_entropy(logits, labels, return_lse=True)
    v = oracle(logits, labels).__dict__
    assert_tokens("lse", lse, v["lse"], v["size"])
    poisoned = logits.at[1].set(jnp.nan)
    assert np.isfinite(cross_entropy(poisoned, labels))


def test_the_reference_takes_f64(rng: np.random.Generator) -> None:
    with jax.enable_x64(True):
        logits, labels = jnp.asarray(rng.normal(size=(5, 60))), jnp.asarray(rng.integers(0, 60, 5))
        loss, logps = cross_entropy_per_token(logits, labels, implementation="reference")
        expected = oracle(logits, labels).__dict__
        np.testing.assert_allclose(loss, expected["loss"], rtol=1e-14)
        np.testing.assert_allclose(logps, expected["logps"], rtol=1e-14)
