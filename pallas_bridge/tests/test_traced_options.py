"""Options of losses that are traced: as the numbers that they stand for.

With their derivatives, held against XLA's of the formula.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from pallas_bridge._src.linear_cross_entropy import call

from pallas_bridge import (
    cross_entropy,
    cross_entropy_per_token,
    linear_cross_entropy,
    linear_cross_entropy_per_token,
)

LABELS = jnp.array([[3, 0, -100], [40, 7, 2]])
WEIGHTS = jnp.array([[1.0, 0.5, 2.0], [0.0, 3.0, 0.25]])
NUMBERS = {"label_smoothing": 0.2, "z_loss": 0.03}
TRACED = [("label_smoothing",), ("z_loss",), ("label_smoothing", "z_loss")]


def draw(rng: np.random.Generator) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Hidden states [2, 3, 8], a weight [41, 8] and a bias [41]."""
    shapes = (2, 3, 8), (41, 8), (41,)
    return tuple(jnp.asarray(rng.normal(size=one), jnp.float32) for one in shapes)  # type: ignore[return-value]


def loss_of(z: jax.Array, e: Any, c: Any) -> jax.Array:
    """The losses of tokens [2, 3] by the formula, for logits."""
    lse = jax.nn.logsumexp(z, -1)
    label = jnp.take_along_axis(z, jnp.maximum(LABELS, 0)[..., None], -1)[..., 0]
    loss = (1 - e) * (lse - label) + e * (lse - z.mean(-1)) + c * lse**2
    return jnp.where(LABELS == -100, 0, loss)


def reduced(losses: jax.Array, reduction: str) -> jax.Array:
    counted = jnp.where(LABELS == -100, 0, WEIGHTS)
    total = {"mean": counted.sum(), "sum": 1.0}
    return losses * counted if reduction == "none" else (losses * counted).sum() / total[reduction]


def bent(x: jax.Array) -> jax.Array:
    """A function whose slope depends on the loss, and is near 1."""
    return x + jnp.sin(0.3 * x)


def check(found: Any, wanted: Any) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("implementation", "reduction"), [(None, "mean"), (None, "none"), ("reference", "sum")]
)
@pytest.mark.parametrize("names", TRACED, ids="-".join)
def test_coefficients(
    names: tuple[str, ...], reduction: Any, implementation: Any, rng: np.random.Generator
) -> None:
    hidden, weight, bias = draw(rng)
    given = {name: jnp.float32(NUMBERS[name]) for name in names}
    others = {name: NUMBERS[name] for name in NUMBERS.keys() - given.keys()}
    options = {**others, "weights": WEIGHTS, "reduction": reduction}
    options["implementation"] = implementation

    def call_on_logits(traced: Any, hidden: Any, weight: Any, bias: Any) -> jax.Array:
        logits = hidden @ weight.T + bias
        return bent(cross_entropy(logits, LABELS, **traced, **options)).sum()

    def call_on_hidden(traced: Any, hidden: Any, weight: Any, bias: Any) -> jax.Array:
        found = linear_cross_entropy(hidden, weight, LABELS, bias=bias, **traced, **options)
        return bent(found).sum()

    def formula(traced: Any, hidden: Any, weight: Any, bias: Any) -> jax.Array:
        numbers = {**others, **traced}
        losses = loss_of(hidden @ weight.T + bias, numbers["label_smoothing"], numbers["z_loss"])
        return bent(reduced(losses, reduction)).sum()

    arrays = given, hidden, weight, bias
    wanted = jax.jit(jax.value_and_grad(formula, (0, 1, 2, 3)))(*arrays)
    for one in (call_on_logits, call_on_hidden):
        check(jax.jit(jax.value_and_grad(one, (0, 1, 2, 3)))(*arrays), wanted)


@pytest.mark.parametrize("names", TRACED, ids="-".join)
def test_per_token_and_other_outputs(names: tuple[str, ...], rng: np.random.Generator) -> None:
    hidden, weight, bias = draw(rng)
    logits = hidden @ weight.T + bias
    given = {name: jnp.float32(NUMBERS[name]) for name in names}
    others = {name: NUMBERS[name] for name in NUMBERS.keys() - given.keys()}
    more = {
        "return_lse": True,
        "return_entropy": True,
        "columns": jnp.maximum(LABELS, 0)[..., None],
    }
    linear = partial(linear_cross_entropy, hidden, weight, bias=bias)
    linear_tokens = partial(linear_cross_entropy_per_token, hidden, weight, bias=bias)
    functions: list[Any] = [
        partial(cross_entropy, logits),
        partial(cross_entropy_per_token, logits),
        linear,
        linear_tokens,
    ]
    for function in functions:
        run = partial(function, labels=LABELS, **others, **more)
        traced, known = (lambda traced, run=run: run(**traced)), (lambda run=run: run(**given))
        check(jax.jit(traced)(given), jax.jit(known)())


@pytest.mark.parametrize("implementation", [None, "reference"])
def test_one_program_for_all_values(implementation: Any, rng: np.random.Generator) -> None:
    hidden, weight, _ = draw(rng)
    names = ("label_smoothing", "z_loss", "temperature")

    @jax.jit
    def step(traced: Any) -> Any:
        return linear_cross_entropy(hidden, weight, LABELS, implementation=implementation, **traced)

    for values in ((0.0, 0.0, 1.0), (1.0, 0.0, 0.5), (0.3, 0.1, 2.0)):
        options = dict(zip(names, values, strict=True))
        wanted = linear_cross_entropy(hidden, weight, LABELS, **options)
        check(step(options), wanted)
    assert step._cache_size() == 1
    run = lambda c: linear_cross_entropy(hidden, weight, LABELS, z_loss=c)  # noqa: E731
    coefficients = jnp.array([0.0, 0.1, 0.2])
    check(jax.vmap(run)(coefficients), jnp.stack([run(float(one)) for one in coefficients]))


@pytest.mark.slow
def test_tokens_that_add_nothing_have_no_gradient(rng: np.random.Generator) -> None:
    """Ignored ones, and those of weight 0, whatever their logits are; and masked columns."""
    z = jnp.asarray(rng.normal(size=(2, 3, 41)), jnp.float32)
    wild = z.at[0, 2].set(jnp.nan).at[1, 0].set(jnp.inf)
    masked = z.at[..., 20:25].set(-jnp.inf)

    @partial(jax.jit, static_argnames="reduction")
    def run(z: Any, traced: Any, reduction: Any) -> Any:
        def total(z: Any, traced: Any) -> jax.Array:
            options: Any = {"weights": WEIGHTS, "reduction": reduction}
            return cross_entropy(z, LABELS, **traced, **options).sum()

        return jax.value_and_grad(total, (0, 1))(z, traced)

    numbers = {**NUMBERS, "softcap": 3.0, "temperature": 0.7}
    given = {name: jnp.float32(value) for name, value in numbers.items()}
    for reduction in ("mean", "sum", "none"):
        found = run(wild, given, reduction)
        loss, (dz, dtraced) = run(z, given, reduction)
        dz = dz.at[0, 2].set(0).at[1, 0].set(0)
        check(found, (loss, (dz, dtraced)))

    @jax.jit
    @partial(jax.grad, argnums=(0, 1))
    def by_temperature(t: Any, hidden: Any, bias: Any) -> jax.Array:
        return linear_cross_entropy(hidden, weight, LABELS, bias=bias, temperature=t)

    hidden, weight, bias = draw(rng)
    bias = bias.at[20:25].set(-jnp.inf)
    found = by_temperature(0.7, hidden.at[0, 2].set(jnp.nan), bias)
    check(found, by_temperature(0.7, hidden, bias))
    assert np.isfinite(found[0])
    no_share = {"label_smoothing": jnp.float32(0), "z_loss": given["z_loss"]}
    loss, (dz, dtraced) = run(masked, no_share, "mean")
    wanted = partial(cross_entropy, labels=LABELS, weights=WEIGHTS, z_loss=NUMBERS["z_loss"])
    check((loss, dz), jax.value_and_grad(wanted)(masked))
    assert np.isfinite(dtraced["z_loss"])


@pytest.mark.parametrize("names", [("softcap", "temperature"), ("temperature",)], ids="-".join)
def test_softcap_and_temperature(names: tuple[str, ...], rng: np.random.Generator) -> None:
    hidden, weight, bias = draw(rng)
    # An integer beside a traced scalar, too.
    numbers: dict[str, float] = {"softcap": 3, "temperature": 0.7}
    given = {name: jnp.float32(numbers[name]) for name in names}
    others = {**NUMBERS, **{name: numbers[name] for name in numbers.keys() - given.keys()}}
    columns = jnp.maximum(LABELS, 0)[..., None]
    # Chunks of tokens, of which the last is shorter.
    more: Any = {"columns": columns, "max_scratch_bytes": 8 * 8 * 41}

    def outputs(found: Any) -> jax.Array:
        return bent(found[0]).sum() + found[1].sum()

    def call_on_logits(traced: Any, hidden: Any, weight: Any, bias: Any) -> jax.Array:
        logits = hidden @ weight.T + bias
        return outputs(cross_entropy(logits, LABELS, columns=columns, **traced, **others))

    def call_on_hidden(traced: Any, hidden: Any, weight: Any, bias: Any) -> jax.Array:
        options = {**traced, **others, **more, "bias": bias}
        return outputs(linear_cross_entropy(hidden, weight, LABELS, **options))

    def formula(traced: Any, hidden: Any, weight: Any, bias: Any) -> jax.Array:
        c, t = ({**numbers, **traced}[name] for name in numbers)
        z = c * jnp.tanh((hidden @ weight.T + bias) / c) / t
        is_token = LABELS != -100
        losses = loss_of(z, *NUMBERS.values()).sum() / is_token.sum()
        logps = jnp.take_along_axis(jax.nn.log_softmax(z), columns, -1)[..., 0]
        return bent(losses) + jnp.where(is_token, logps, 0).sum()

    arrays = given, hidden, weight, bias
    wanted = jax.value_and_grad(formula, (0, 1, 2, 3))(*arrays)
    for one in (call_on_logits, call_on_hidden):
        check(jax.jit(jax.value_and_grad(one, (0, 1, 2, 3)))(*arrays), wanted)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_temperature(reduction: Any, dtype: str, rng: np.random.Generator) -> None:
    hidden, weight, bias = draw(rng)
    hidden, weight = hidden.astype(dtype), weight.astype(dtype)

    def ours(t: Any, hidden: Any, weight: Any, bias: Any, traced: bool = True) -> jax.Array:
        t = t if traced else 0.5
        options: Any = {"temperature": t, "reduction": reduction, "bias": bias}
        return bent(linear_cross_entropy(hidden, weight, LABELS, **options)).sum()

    arrays = jnp.float32(0.5), hidden, weight, bias
    found = jax.jit(jax.value_and_grad(ours, (1, 2, 3)))(*arrays)
    # A power of two rounds nothing.
    wanted = jax.value_and_grad(partial(ours, traced=False), (1, 2, 3))(*arrays)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == other.dtype
        off = 2e-5 if one.dtype == jnp.float32 else 2e-2
        np.testing.assert_allclose(
            one.astype(jnp.float32), other.astype(jnp.float32), rtol=off, atol=off / 8
        )
    if dtype == "float32":

        def formula(t: Any, hidden: Any, weight: Any, bias: Any) -> jax.Array:
            losses = loss_of((hidden @ weight.T + bias) / t, 0.0, 0.0)
            count = (LABELS != -100).sum()
            return bent(losses if reduction == "none" else losses.sum() / count).sum()

        check(jax.jit(jax.grad(ours))(*arrays), jax.grad(formula)(*arrays))


def test_sums_of_chunks_are_rounded_once(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, weight = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((64, 8), (41, 8)))
    weight = weight.astype(jnp.bfloat16)
    labels = jnp.asarray(rng.integers(0, 41, 64))

    def run(softcap: Any, weight: Any) -> jax.Array:
        return linear_cross_entropy(hidden, weight, labels, softcap=softcap)

    found = []
    for tokens in (64, 4):
        monkeypatch.setattr(call, "plan_output_chunk", lambda *_, chunk=2 * tokens: chunk)
        # Another function, which is compiled anew.
        dweight = jax.jit(jax.grad(partial(run), 1))(3.0, weight)
        found.append(dweight.astype(jnp.float32))
    whole, summed = found
    # Sums in another order: few are rounded to a neighbour.
    assert jnp.linalg.norm(summed - whole) < 5e-4 * jnp.linalg.norm(whole)


@pytest.mark.few(1)
@pytest.mark.devices(8)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.slow
def test_on_a_mesh(kind: AxisType, rng: np.random.Generator) -> None:
    """Tokens over two devices, and the vocabulary over four."""
    hidden, weight = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((8, 16), (64, 16)))
    labels = jnp.asarray(rng.integers(0, 64, 8))

    def loss(arrays: Any, labels: Any, numbers: Any) -> jax.Array:
        return linear_cross_entropy(*arrays, labels, **numbers)

    mesh = jax.make_mesh((2, 4), ("data", "vocab"), axis_types=(kind,) * 2)
    tokens, columns = (NamedSharding(mesh, PartitionSpec(name)) for name in ("data", "vocab"))
    for more in ({}, {"softcap": 3.0}) if kind == AxisType.Explicit else ({},):
        numbers = {**NUMBERS, "temperature": 0.7, **more}
        wanted = jax.value_and_grad(loss, (0, 2))((hidden, weight), labels, numbers)
        with jax.set_mesh(mesh):
            arrays = jax.device_put((hidden, weight), (tokens, columns))
            placed = jax.device_put(labels, tokens)
            check(jax.jit(jax.value_and_grad(loss, (0, 2)))(arrays, placed, numbers), wanted)


@pytest.mark.parametrize("is_linear", [False, True])
def test_a_known_array_beside_a_traced_coefficient(
    rng: np.random.Generator, is_linear: bool
) -> None:
    x = jnp.asarray(rng.normal(size=(3, 8)), jnp.float32)
    weight, labels = jnp.asarray(rng.normal(size=(11, 8)), jnp.float32), jnp.array([0, 4, 10])

    def loss(smoothing: Any, z_loss: Any) -> jax.Array:
        options = {"label_smoothing": smoothing, "z_loss": z_loss}
        if is_linear:
            return linear_cross_entropy(x, weight, labels, **options)
        return cross_entropy(x @ weight.T, labels, **options)

    found = jax.jit(lambda one: loss(one, jnp.float32(0.5)))(0.25)
    np.testing.assert_allclose(found, loss(0.25, 0.5), rtol=1e-5)


def test_what_is_refused() -> None:
    hidden, weight = jnp.ones((2, 3, 8)), jnp.ones((41, 8))

    def run(t: Any, **options: Any) -> Any:
        return linear_cross_entropy(hidden, weight, LABELS, temperature=t, **options)

    with pytest.raises(TypeError, match="softcap or temperature is traced and batch_invariant"):
        jax.jit(partial(run, softcap=3.0, batch_invariant=True))(0.5)
    with pytest.raises(TypeError, match=r"temperature is traced, of shape \(2,\)"):
        jax.jit(run)(jnp.ones(2))
    with pytest.raises(TypeError, match=r"softcap is traced, of shape \(2,\)"):
        jax.jit(lambda c: run(1.0, softcap=c))(jnp.ones(2))
    with pytest.raises(TypeError, match=r"z_loss is traced, of shape \(2,\)"):
        jax.jit(lambda c: run(1.0, z_loss=c))(jnp.ones(2))
    with pytest.raises(ValueError, match="z_loss is -1"):
        jax.jit(lambda e: run(1.0, z_loss=-1, label_smoothing=e))(0.1)
