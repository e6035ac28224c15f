"""What losses know of a token: entropy, whether its label is the likeliest, and given columns."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from on_mesh import NAMES, WAYS, exchanged, mesh_of
from oracle import Oracle, assert_gradient, assert_tokens
from pallas_bridge._src.linear_cross_entropy import plan
from pallas_bridge._src.losses.aux_outputs import sum_duplicates
from test_program import calls_of

from pallas_bridge import (
    cross_entropy,
    cross_entropy_per_token,
    linear_cross_entropy,
    linear_cross_entropy_per_token,
)

ASKED: dict[str, Any] = {"return_lse": True, "return_entropy": True, "return_correct": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.7, "z_loss": 1e-3},
    "all": {"temperature": 1.5, "softcap": 6.0, "label_smoothing": 0.1, "z_loss": 1e-3},
}


def problem(rng: np.random.Generator, dtype: Any, tokens: int, vocab: int) -> Any:
    """Logits with ties at the top, labels that often are there, and columns, two the same."""
    x = jnp.asarray(3 * rng.normal(size=(tokens, vocab)), dtype)
    x = x.at[0, 3 : vocab : vocab // 3].set(20)
    y = rng.integers(0, vocab, tokens).astype(np.int32)
    y[: tokens // 2] = np.argmax(np.asarray(x, np.float32), -1)[: tokens // 2]
    y[1] = 3 + vocab // 3 if tokens > 1 else y[0]
    y[-1] = -100
    x = x.at[1].set(x[0])
    columns = rng.integers(0, vocab, (tokens, 3))
    columns[:, 2] = columns[:, 0]
    return x, y, columns


@pytest.mark.numbers
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", OPTIONS)
def test_values_and_gradients(rng: np.random.Generator, dtype: str, name: str) -> None:
    options = OPTIONS[name]
    x, y, columns = problem(rng, dtype, 40, 1201)
    oracle: Any = Oracle(np.asarray(x), y, **options)
    f = partial(cross_entropy_per_token, columns=columns, **ASKED, **options)
    g, h, k, q = rng.normal(size=(4, 40)).astype(np.float32)
    of_columns = rng.normal(size=(40, 3)).astype(np.float32)

    def objective(x: jax.Array) -> Any:
        loss, logps, lse, entropy, correct, column_logps = f(x, y)
        total = sum(
            (a * b).sum() for a, b in zip((loss, logps, lse, entropy), (g, h, k, q), strict=True)
        )
        return total + (of_columns * column_logps).sum(), (
            loss,
            lse,
            entropy,
            correct,
            column_logps,
        )

    gradient, (loss, lse, entropy, correct, column_logps) = jax.jit(
        jax.grad(objective, has_aux=True)
    )(x)
    size = oracle.size + np.abs(oracle.loss)
    assert_tokens("loss", loss, oracle.loss, size)
    assert_tokens("lse", lse, oracle.lse, size)
    assert_tokens("entropy", entropy, oracle.entropy(), size)
    assert np.array_equal(correct, oracle.correct())
    assert correct[0] and not correct[1] and not correct[-1]  # of equals the first
    np.testing.assert_allclose(column_logps, oracle.column_logps(columns), rtol=0, atol=3e-5)

    # Log-probabilities of columns are K more tokens of the row.
    expected = oracle.gradient(g, h, k - of_columns.sum(-1), q)
    picked = np.take_along_axis(oracle.z, columns, -1)
    slope = 1 if oracle.softcap is None else 1 - (picked * oracle.temperature / oracle.softcap) ** 2
    d = np.where(oracle.ignored[:, None], 0, of_columns * slope / oracle.temperature)
    exact = dtype == "float32"
    np.add.at(expected, (np.arange(40)[:, None], columns), d)
    scale = 1 + np.abs(expected)
    error = np.abs(np.asarray(gradient, np.float64) - expected) / scale
    # A column's gradient is added to one that is rounded already.
    assert error.max() < (2e-5 if exact else 4 * float(jnp.finfo(dtype).eps))


@pytest.mark.numbers
@pytest.mark.slow
def test_special_tokens(rng: np.random.Generator) -> None:
    x = np.array(3 * rng.normal(size=(8, 77)), np.float32)
    y = rng.integers(1, 77, 8).astype(np.int32)
    x[0, ::2], y[0] = -np.inf, 1
    x[1, 5], x[2, 6], x[3] = np.nan, np.inf, -np.inf
    y[4], y[5] = 77, -100
    x[5, 2] = np.nan
    columns = np.full((8, 2), 4)
    columns[0] = 4, 77
    oracle: Any = Oracle(x, y, temperature=0.5)
    f = partial(cross_entropy_per_token, temperature=0.5, return_entropy=True, return_correct=True)
    q = rng.normal(size=8).astype(np.float32)
    q[6] = 0
    (entropy, correct), vjp = jax.vjp(lambda x: f(x, y)[2:], x)
    zero = np.zeros(8, jax.dtypes.float0)
    assert_tokens("entropy", entropy, oracle.entropy(), oracle.size)
    assert not np.asarray(correct)[1:6].any()
    assert_gradient(vjp((q, zero))[0], oracle.gradient(0, q=q), 4 * q, size=4096.0)
    *_, logps = cross_entropy(x, y, columns=columns)
    assert logps[0, 0] == -np.inf and np.isnan(logps[0, 1]) and (logps[5] == 0).all()
    # A masked column's gradient, and one's that there is not, are that of -lse.
    expected = oracle.gradient(0, k=-3)[:1]
    for implementation in (None, "reference"):
        g = partial(cross_entropy_per_token, temperature=0.5, implementation=implementation)
        _, vjp = jax.vjp(lambda x, g=g: g(x, y, columns=columns)[2][0], x)
        found = vjp(jnp.array([1, 2], jnp.float32))[0][:1]
        assert_gradient(found, expected, 3, size=4096.0)
        assert (found[0, ::2] == 0).all()


def valued(asked: dict[str, Any], **options: Any) -> Any:
    """Value and gradient of a reduced loss, with what else is asked for of it beside."""

    def f(x: jax.Array, y: jax.Array) -> Any:
        loss, *others = cross_entropy(x, y, **asked, **options)
        return loss, tuple(others)

    return jax.value_and_grad(f, has_aux=True)


@pytest.mark.numbers
@pytest.mark.parametrize(
    ("dtype", "vocab"),
    [
        *(("float32", vocab) for vocab in (77, 5003, 600_001)),
        *(("bfloat16", vocab) for vocab in (1200, 5003)),
        ("float16", 77),
    ],
)
@pytest.mark.parametrize("name", OPTIONS)
def test_what_is_looked_at_comes_with_the_gradient_in_one_pass(
    rng: np.random.Generator, dtype: str, vocab: int, name: str
) -> None:
    # The largest has rows that no GPU's clusters hold, in f32.
    tokens = 3 if vocab > 100_000 else 24
    x, y, columns = problem(rng, dtype, tokens, vocab)
    options = OPTIONS[name]
    weights = rng.random(tokens).astype(np.float32)
    if tokens > 3:
        weights[3] = 0  # has entropy, and no gradient
        x = x.at[4, ::2].set(-1e4 if "softcap" in options else -np.inf)
        x = x.at[-1, 7].set(np.nan)
        y[4] = 1
        if name == "plain":
            x = x.at[6, 2].set(np.inf).at[7, 3].set(np.nan)
            y[5] = vocab
    oracle: Any = Oracle(np.asarray(x), y, **options)
    asked = {"columns": columns, **ASKED}
    reduction = "mean" if name == "plain" else "sum"
    given = {"reduction": reduction, "weights": weights, **options}
    program = jax.jit(valued(asked, **given)).lower(x, y).compile()
    assert calls_of(program) == ["distribution_fused"]
    (loss, (lse, entropy, correct, column_logps)), gradient = program(x, y)
    factors = oracle.factors(reduction, weights)
    np.testing.assert_allclose(loss, oracle.reduced(factors), rtol=1e-5)
    assert_tokens("lse", lse[:-1], oracle.lse[:-1], oracle.size[:-1])
    assert_tokens("entropy", entropy, oracle.entropy(), oracle.size)
    assert np.array_equal(correct, oracle.correct())
    expected = oracle.column_logps(columns)
    np.testing.assert_allclose(column_logps, expected, rtol=1e-6, atol=3e-5)
    expected = oracle.gradient(factors)
    size = 4096 * (1 + oracle.size) if options else oracle.size
    # A low temperature scales p - 1, which has the digits of a sum, up.
    scaled = factors * max(1, 1 / options.get("temperature", 1))
    assert_gradient(gradient, expected, scaled, options.get("softcap"), size)


@pytest.mark.parametrize("vocab", [301, 20_011, 32_768])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.slow
def test_what_is_asked_for_alone_has_the_same_bits(
    rng: np.random.Generator, dtype: str, vocab: int
) -> None:
    x, y, _ = problem(rng, dtype, 24, vocab)
    x = x.at[4].set(-jnp.inf).at[5, ::3].set(-jnp.inf).at[6, vocab // 2 :].set(-jnp.inf)
    x = x.at[7, 0].set(40).at[8, -1].set(40).at[9, 5].set(jnp.nan)
    y[7:9] = 0, vocab - 1
    names = ("entropy", "correct")
    for each in (False, True):

        def run(asked: tuple[str, ...], each: bool = each) -> list[jax.Array]:
            more = {f"return_{name}": True for name in asked}
            if each:
                return list(cross_entropy_per_token(x, y, **more))
            (loss, others), gradient = jax.jit(valued(more))(x, y)
            return [loss, gradient, *others]

        *plain, entropy, correct = run(names)
        for name, other in zip(names, (entropy, correct), strict=True):
            for found, expected in zip(run((name,)), (*plain, other), strict=True):
                of = [np.asarray(one).astype(np.float32) for one in (found, expected)]
                np.testing.assert_array_equal(*of, name)
        likeliest = np.argmax(np.where(np.isnan(x), -np.inf, np.asarray(x, np.float32)), -1)
        known = ~np.isin(np.arange(24), (4, 9, 23))
        assert np.array_equal(correct[known], (likeliest == y)[known])
        assert not correct[~known].any()
        assert np.isnan(entropy[jnp.array([4, 9])]).all() and entropy[-1] == 0


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "asked", [("entropy",), ("correct", "lse"), ("columns",), ("columns", "entropy")]
)
def test_which_calls_a_reduced_loss_makes(rng: np.random.Generator, asked: tuple[str, ...]) -> None:
    x, y, columns = problem(rng, "bfloat16", 24, 301)
    more: dict[str, Any] = {f"return_{name}": True for name in asked if name != "columns"}
    if "columns" in asked:
        more["columns"] = columns
    has_distribution = asked != ("columns",)
    first, both = "forward", "fused"
    if has_distribution:
        first, both = "distribution", "distribution_fused"

    def loss(x: jax.Array, y: jax.Array, of: Any = lambda loss, *_: 3 * loss) -> Any:
        found = cross_entropy(x, y, **more)
        return of(*found), found

    def calls(loss: Any, over: Any = lambda f, *arrays: f(*arrays)) -> list[str]:
        f = jax.value_and_grad(loss, has_aux=True)
        return calls_of(jax.jit(partial(over, f)).lower(x, y).compile())

    def mapped(f: Any, x: jax.Array, y: jax.Array) -> Any:
        return jax.vmap(f)(jnp.stack([x, x]), jnp.stack([y, y]))

    def scanned(f: Any, x: jax.Array, y: jax.Array) -> Any:
        return jax.lax.scan(lambda _, xy: (None, f(*xy)), None, (x[None], y[None]))

    for over in (mapped, scanned):
        assert calls(loss, over) == [both]
    assert calls(loss) == [both]
    # A cotangent that is made of the loss comes after it.
    for of_loss in (lambda loss, *_: loss**2, lambda loss, *_: jnp.where(loss > 0, loss, 0)):
        assert calls(partial(loss, of=of_loss)) == ["backward", first]
    # So does what else is differentiated.
    if "entropy" in asked:
        with_entropy = partial(loss, of=lambda loss, entropy, *_: loss - entropy.mean())
        assert calls(with_entropy) == ["distribution", "distribution_backward"]
    if "columns" in asked:
        with_columns = partial(loss, of=lambda loss, *others: loss - others[-1].mean())
        assert calls(with_columns) == ["backward", first]
    # What makes the loss and its gradient is in two functions of the program.
    assert calls(jax.jit(loss)) == ["backward", first]


@pytest.mark.only("cpu", "not tried on others")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_bits_do_not_depend_on_how_many_tokens_there_are(
    rng: np.random.Generator, dtype: str
) -> None:
    x, y, columns = problem(rng, dtype, 70, 1201)
    cotangents = rng.normal(size=(70, 4)).astype(np.float32)
    of_columns = rng.normal(size=(70, 3)).astype(np.float32)

    @jax.jit
    def run(x: Any, y: Any, columns: Any, cotangents: Any, of_columns: Any) -> Any:
        def f(x: jax.Array) -> Any:
            found = cross_entropy_per_token(x, y, columns=columns, temperature=0.7, **ASKED)
            loss, logps, lse, entropy, correct, column_logps = found
            return (loss, logps, lse, entropy, column_logps), correct

        outputs, vjp, correct = jax.vjp(f, x, has_aux=True)
        return outputs, correct, vjp((*cotangents.T, of_columns))

    arrays = x, y, columns, cotangents, of_columns
    whole = jax.tree.leaves(run(*arrays))
    for tokens in (1, 7, 33):
        few = jax.tree.leaves(run(*(array[:tokens] for array in arrays)))
        for one, other in zip(few, whole, strict=True):
            one, other = np.asarray(one), np.asarray(other)[:tokens]
            assert np.array_equal(one.view(np.uint8), other.view(np.uint8)), tokens


def test_reductions_and_forward_mode(rng: np.random.Generator) -> None:
    x, y, columns = problem(rng, "float32", 6, 50)
    weights = rng.random(6).astype(np.float32)
    options = {"temperature": 0.8, "weights": weights}
    loss, entropy = cross_entropy(x, y, return_entropy=True, **options)
    np.testing.assert_allclose(loss, cross_entropy(x, y, **options), rtol=1e-6)
    assert entropy.shape == (6,)

    def f(x: jax.Array) -> jax.Array:
        loss, entropy, logps = cross_entropy(x, y, return_entropy=True, columns=columns, **options)
        return loss + (entropy * weights).sum() + logps.sum()

    direction = rng.normal(size=x.shape).astype(np.float32)
    _, along = jax.jit(lambda *along: jax.jvp(f, (x,), along))(direction)
    gradient = jax.jit(jax.grad(f))
    terms = np.asarray(gradient(x) * direction, np.float64)
    # Terms of both signs cancel: the sum is as exact as its terms.
    np.testing.assert_allclose(along, terms.sum(), rtol=0, atol=1e-6 * np.abs(terms).sum())
    mapped = jax.vmap(gradient)(jnp.stack([x, 2 * x]))
    np.testing.assert_allclose(mapped[1], gradient(2 * x), atol=1e-6)


def test_each_place_gets_one_number(rng: np.random.Generator) -> None:
    """On GPUs additions to one place have no order, so that there is one for each."""
    at, d = rng.integers(0, 5, (2, 6, 8)), rng.normal(size=(2, 6, 8)).astype(np.float32)
    found = np.asarray(sum_duplicates(jnp.asarray(at), jnp.asarray(d)))
    for place in range(5):
        here = at == place
        assert (np.count_nonzero(np.where(here, found, 0), axis=-1) == here.any(-1)).all()
        sums = [np.where(here, numbers, 0).sum(-1) for numbers in (found, d)]
        np.testing.assert_allclose(*sums, atol=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("bias", [False, True])
def test_of_hidden_states(rng: np.random.Generator, temperature: float, bias: bool) -> None:
    hidden = rng.normal(size=(2, 9, 16)).astype(np.float32)
    weight = rng.normal(size=(300, 16)).astype(np.float32) / 3
    b = rng.normal(size=300).astype(np.float32) if bias else np.zeros(300, np.float32)
    y = rng.integers(0, 300, (2, 9))
    y[0, 3] = -100
    columns = rng.integers(0, 300, (2, 9, 4))
    options = {"temperature": temperature, "softcap": 20.0 if bias else None}
    known = {**options, "columns": columns, **ASKED}

    def call_on_logits(hidden: Any, weight: Any, b: Any) -> Any:
        logits = hidden @ weight.T + b
        found = cross_entropy_per_token(logits, y, implementation="reference", **known)
        return (*found, cross_entropy(logits, y, implementation="reference", **options))

    def call_on_hidden(hidden: Any, weight: Any, b: Any) -> Any:
        b = b if bias else None
        # Chunks of a few tokens.
        found = linear_cross_entropy_per_token(
            hidden, weight, y, bias=b, max_scratch_bytes=None, **known
        )
        return (*found, linear_cross_entropy(hidden, weight, y, bias=b, **options))

    shapes = jax.eval_shape(call_on_logits, hidden, weight, b)
    cotangents = tuple(
        np.zeros(x.shape, jax.dtypes.float0) if x.dtype == bool
        else jnp.asarray(rng.normal(size=x.shape), jnp.float32)
        for x in shapes
    )  # fmt: skip

    # As one program: op by op each would be compiled by itself.
    def pulled(f: Any) -> Any:
        def both(*arrays: Any) -> Any:
            outputs, vjp = jax.vjp(f, *arrays)
            return outputs, vjp(cotangents)

        return jax.jit(both)(hidden, weight, b)

    (outputs, expected), (found, gradients) = pulled(call_on_logits), pulled(call_on_hidden)
    for one, other in zip(outputs, found, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)
    count = 3 if bias else 2
    for one, other in zip(expected[:count], gradients[:count], strict=True):
        np.testing.assert_allclose(one, other, atol=3e-5 * np.abs(one).max())


@pytest.mark.few(1)
@pytest.mark.devices(8)
@pytest.mark.only("cpu", "no kernel knows of the mesh")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.slow
def test_a_vocabulary_over_devices(rng: np.random.Generator, way: str) -> None:
    options = {"temperature": 0.7, "label_smoothing": 0.1, "softcap": 9.0} if way == "auto" else {}
    options = options or {"temperature": 1.3, "z_loss": 1e-2}
    x, y, columns = problem(rng, "float32", 8, 64)
    if "softcap" not in options:
        x = x.at[:, 48:].set(-np.inf)  # a part of padding
        y, columns = np.where(y >= 48, 5, y), columns % 48
    mesh = mesh_of((2, 4), way)
    f = partial(cross_entropy_per_token, **ASKED, **options)
    if way != "explicit":
        f = partial(f, axis_name="vocab")

    def run(x: jax.Array, y: jax.Array, columns: jax.Array) -> Any:
        if way in ("auto", "explicit"):
            return f(x, y, columns=columns)
        tokens, wide = P("data"), P("data", None)
        return jax.shard_map(
            lambda x, y, columns: f(x, y, columns=columns),
            mesh=mesh,
            in_specs=(P(*NAMES), tokens, wide),
            out_specs=(*(tokens,) * 5, wide),
            check_vma=way == "checked",
        )(x, y, columns)

    def pulled(run: Any, x: Any, *others: Any) -> Any:
        outputs, vjp = jax.vjp(lambda x: run(x, *others), x)
        cotangents = [
            np.zeros(one.shape, jax.dtypes.float0) if one.dtype == bool else jnp.cos(one)
            for one in outputs
        ]
        return outputs, vjp(tuple(cotangents))[0]

    whole = partial(cross_entropy_per_token, implementation="reference", **ASKED, **options)
    outputs, gradient = pulled(lambda x, y, columns: whole(x, y, columns=columns), x, y, columns)
    with jax.set_mesh(mesh):
        given = [
            jax.device_put(one, NamedSharding(mesh, spec))
            for one, spec in ((x, P(*NAMES)), (y, P("data")), (columns, P("data", None)))
        ]
        found, of_found = jax.jit(partial(pulled, run))(*given)
    for one, other in zip(outputs, found, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    np.testing.assert_allclose(gradient, of_found, atol=1e-5)


@pytest.mark.few(1)
@pytest.mark.devices(8)
@pytest.mark.only("cpu", "no kernel knows of the mesh")
@pytest.mark.parametrize(
    ("way", "asked"),
    [*((way, "all") for way in WAYS), ("checked", "columns"), ("unchecked", "dense")],
)
@pytest.mark.slow
def test_a_weight_over_devices(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, way: str, asked: str
) -> None:
    if way != "auto":  # where XLA shards tokens, it would move them from chunk to chunk
        monkeypatch.setattr(plan, "USUAL_TOKENS", 8)  # of 20 on a device
    vocab, real = 400, 270  # the last part of four is padding
    hidden = rng.normal(size=(40, 12)).astype(np.float32)
    weight = rng.normal(size=(vocab, 12)).astype(np.float32)
    bias = rng.normal(size=vocab).astype(np.float32)
    bias[real:] = -np.inf
    # The largest logit twice, in two parts, and once more in the second.
    weight[[7, 150, 151]], bias[[7, 150, 151]] = 2 * np.sign(hidden[0]), 9.0
    y = rng.integers(0, real, 40).astype(np.int32)
    y[:4], y[5] = (7, 150, 7, 151), -100
    columns = rng.integers(0, real, (40, 3)).astype(np.uint8)
    columns[:, 2] = columns[:, 0]
    options: dict[str, Any] = {"temperature": 1.3, "z_loss": 1e-2}
    if asked == "dense":
        options = {"temperature": 0.7, "label_smoothing": 0.1, "softcap": 9.0}
        bias[real:] = 0
    cotangents = rng.normal(size=(40, 7)).astype(np.float32)
    f = partial(linear_cross_entropy_per_token, vocab_axis=0, **options)
    if asked != "columns":
        f = partial(f, **ASKED)

    def outputs(f: Any, h: Any, w: Any, b: Any, y: Any, columns: Any) -> Any:
        return f(h, w, y, bias=b, columns=columns)

    def pulled(run: Any, c: Any, h: Any, w: Any, b: Any, *others: Any) -> Any:
        found, vjp = jax.vjp(lambda *moving: run(*moving, *others), h, w, b)
        c = [
            np.zeros(one.shape, jax.dtypes.float0)
            if one.dtype == bool
            else c[:, n] if one.ndim == 1
            else c[:, 4:]
            for n, one in enumerate(found)
        ]  # fmt: skip
        return found, vjp(tuple(c))

    arrays = hidden, weight, bias, y, columns
    whole = partial(outputs, partial(f, implementation="reference"))
    expected, gradients = pulled(whole, cotangents, *arrays)
    mesh = mesh_of((2, 4), way)
    g = partial(f, max_scratch_bytes=1 << 20)
    if asked == "dense":
        g = partial(f, implementation="reference")
    over = partial(outputs, g if way == "explicit" else partial(g, axis_name="vocab"))
    specs = P("data"), P("vocab"), P("vocab"), P("data"), P("data")
    run = over
    if way in ("checked", "unchecked"):
        results = (P("data"),) * len(expected)
        check = way == "checked"
        run = jax.shard_map(over, mesh=mesh, in_specs=specs, out_specs=results, check_vma=check)
    with jax.set_mesh(mesh):
        given = [
            jax.device_put(one, NamedSharding(mesh, spec))
            for one, spec in zip((cotangents, *arrays), (P("data"), *specs), strict=True)
        ]
        compiled = jax.jit(partial(pulled, run)).lower(*given).compile()
        found, of_found = compiled(*given)
        moved = exchanged(compiled.as_text())
    # dhidden where columns are sharded, and dweight where tokens are.
    assert {*moved} == {"all-reduce"} and moved["all-reduce"] <= 100 * 12
    if asked == "all":
        assert expected[4][0] and not expected[4][1]  # of equals the first
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=3e-5)
    for one, other in zip(gradients, of_found, strict=True):
        np.testing.assert_allclose(one, other, atol=3e-5 * np.abs(one).max())


@pytest.mark.devices(8)
@pytest.mark.only("cpu", "no kernel knows of the mesh")
@pytest.mark.slow
def test_a_weight_over_devices_under_transformations(rng: np.random.Generator) -> None:
    h = jnp.asarray(rng.normal(size=(2, 8, 12)), jnp.float32)
    w = jnp.asarray(rng.normal(size=(64, 12)), jnp.float32)
    y = jnp.asarray(rng.integers(0, 64, (2, 8)))

    def loss(w: Any, h: Any, y: Any, **more: Any) -> Any:
        mean, entropy, correct, logps = linear_cross_entropy(
            h, w, y, return_entropy=True, return_correct=True, columns=y[:, None], **more
        )
        return mean + jnp.cos(entropy).sum() + jnp.where(correct, logps[:, 0], 0).sum()

    def every(f: Any, w: Any) -> Any:
        mapped = jax.grad(lambda w: jax.vmap(lambda h, y: f(w, h, y))(h, y).sum())(w)

        def scanned(w: Any) -> Any:
            again = jax.checkpoint(f)
            return jax.lax.scan(lambda sum_, hy: (sum_ + again(w, *hy), None), 0.0, (h, y))[0]

        return (
            mapped,
            jax.value_and_grad(scanned)(w),
            jax.jvp(lambda w: f(w, h[0], y[0]), (w,), (w,)),
        )

    expected = jax.jit(partial(every, loss))(w)
    with jax.set_mesh(mesh_of((2, 4), "auto")):
        found = jax.jit(partial(every, partial(loss, axis_name="vocab")))(w)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), found, expected)


@pytest.mark.newest
def test_a_tpu_has_xlas_program() -> None:
    x, y = jax.ShapeDtypeStruct((8, 256), jnp.bfloat16), jax.ShapeDtypeStruct((8,), jnp.int32)

    def f(x: Any, y: Any) -> Any:
        return jax.grad(lambda x: cross_entropy(x, y, return_entropy=True)[1].sum())(x)

    program = jax.jit(f).trace(x, y).lower(lowering_platforms=("tpu",)).as_text()
    assert "distribution" not in program
