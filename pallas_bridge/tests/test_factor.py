"""A loss that something multiplies: the factor reaches the pass that writes the gradient.

Programs are read for the calls that are left in them, and values are held against float64.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from on_mesh import by_shardy
from oracle import assert_gradient
from test_program import calls_of, compiled
from test_values import oracle, problem

from pallas_bridge import cross_entropy, cross_entropy_per_token

DTYPES = ["bfloat16", "float16", "float32"]
T, V = 48, 1001
BATCHES = 4


def hold(
    gradient: Any, logits: jax.Array, labels: jax.Array, factor: float, reduction: str = "mean"
) -> None:
    """Holds the gradient [.., V] of factor * loss against float64."""
    expected = oracle(logits.reshape(-1, V), labels.reshape(-1))
    factors = factor * expected.factors(reduction)
    gradient = np.asarray(gradient).reshape(-1, V)
    assert_gradient(gradient, expected.gradient(factors), np.abs(factors))


def hold_loss(loss: Any, logits: jax.Array, labels: jax.Array, factor: float = 1.0) -> None:
    expected = oracle(logits.reshape(-1, V), labels.reshape(-1))
    want = factor * expected.reduced(expected.factors("mean"))
    np.testing.assert_allclose(loss, want, rtol=1e-5)


def run(f: Callable[..., Any], calls: list[str], *arguments: Any) -> Any:
    """What a function gives, whose compiled program has such calls."""
    program = compiled(f, *arguments)
    assert calls_of(program) == calls
    return program(*arguments)


def constant(x: jax.Array, y: jax.Array, g: jax.Array, loss: Any) -> Any:
    return jax.value_and_grad(lambda x: 0.37 * loss(x, y))(x)


def quotient(x: jax.Array, y: jax.Array, g: jax.Array, loss: Any) -> Any:
    return jax.value_and_grad(lambda x: -loss(x, y) / 3)(x)


def traced(x: jax.Array, y: jax.Array, g: jax.Array, loss: Any) -> Any:
    return jax.value_and_grad(lambda x: g * loss(x, y))(x)


def made_later(x: jax.Array, y: jax.Array, g: jax.Array, loss: Any) -> Any:
    """A factor that is made of other arrays, after the loss, with functions and loops."""

    def f(x: jax.Array) -> jax.Array:
        value = loss(x, y)
        half = jax.lax.fori_loop(0, 3, lambda _, n: jnp.where(n > 0, n + g / 8, n), g / 8)
        return value * jnp.clip(2 * half, 0, 1e9)

    return jax.value_and_grad(f)(x)


def weighted_sum(x: jax.Array, y: jax.Array, g: jax.Array, loss: Any) -> Any:
    def f(x: jax.Array, p: jax.Array) -> jax.Array:
        return 0.7 * loss(x, y) + jnp.exp(p) * (p**2 + 1)

    value, (gradient, _) = jax.value_and_grad(f, (0, 1))(x, g)
    return value - jnp.exp(g) * (g**2 + 1), gradient


def rematerialised(x: jax.Array, y: jax.Array, g: jax.Array, loss: Any) -> Any:
    again = jax.checkpoint(lambda x: loss(x, y))
    return jax.value_and_grad(lambda x: g * again(x))(x)


def accumulated(x: jax.Array, y: jax.Array, g: jax.Array, loss: Any) -> Any:
    """Microbatches one after another, gradient and factor inside, as sums of both."""

    def body(total: jax.Array, xy: Any) -> Any:
        value, gradient = jax.value_and_grad(lambda x: g / BATCHES * loss(x, xy[1]))(xy[0])
        return total + value, gradient

    batches = jax.tree.map(lambda a: a.reshape(BATCHES, -1, *a.shape[1:]), (x, y))
    total, gradients = jax.lax.scan(body, jnp.float32(0), batches)
    return total, gradients.reshape(x.shape)


FACTORS: list[tuple[Any, float, list[str]]] = [
    (constant, 0.37, ["fused"]),
    (quotient, -1 / 3, ["fused"]),
    (traced, 1.7, ["fused"]),
    (made_later, 1.7, ["fused"]),
    (weighted_sum, 0.7, ["fused"]),
    (rematerialised, 1.7, ["forward", "fused"]),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("f, factor, calls", FACTORS, ids=lambda one: getattr(one, "__name__", ""))
def test_a_factor_takes_no_pass(
    rng: np.random.Generator, dtype: str, f: Any, factor: float, calls: list[str]
) -> None:
    logits, labels = problem(rng, dtype, T, V)
    value, gradient = run(partial(f, loss=cross_entropy), calls, logits, labels, jnp.float32(1.7))
    hold(gradient, logits, labels, factor)
    hold_loss(value, logits, labels, factor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_microbatches_in_a_loop(rng: np.random.Generator, dtype: str) -> None:
    logits, labels = problem(rng, dtype, T, V)
    f = partial(accumulated, loss=partial(cross_entropy, reduction="sum"))
    _, gradient = run(f, ["fused"], logits, labels, jnp.float32(8))
    hold(gradient, logits, labels, 8 / BATCHES, "sum")


@pytest.mark.parametrize("dtype", DTYPES)
def test_vmap_with_a_factor_each(rng: np.random.Generator, dtype: str) -> None:
    logits, labels = problem(rng, dtype, T, V)
    x, y = logits.reshape(BATCHES, -1, V), labels.reshape(BATCHES, -1)
    factors = jnp.asarray([0.3, 1, 0, -7], jnp.float32)
    f = jax.vmap(partial(traced, loss=cross_entropy))
    values, gradients = run(f, ["fused"], x, y, factors)
    for index, factor in enumerate(factors):
        hold(gradients[index], x[index], y[index], float(factor))
        hold_loss(values[index], x[index], y[index], float(factor))


@pytest.mark.needs("optax")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_accumulation_by_optax(rng: np.random.Generator, dtype: str) -> None:
    import optax

    optimizer = optax.MultiSteps(optax.sgd(1.0), every_k_schedule=BATCHES)
    logits, labels = problem(rng, dtype, T, V)
    zeros = jnp.zeros((T, V), jnp.float32)

    def step(x: jax.Array, state: Any, y: jax.Array, g: jax.Array) -> Any:
        gradient = jax.grad(lambda x: g * cross_entropy(x.astype(dtype), y))(x)
        return optimizer.update(gradient, state, x)

    state, updates = optimizer.init(zeros), zeros
    x = logits.astype(jnp.float32)
    program = compiled(step, x, state, labels, jnp.float32(1))
    assert calls_of(program) == ["fused"]
    factors = rng.uniform(0.5, 2, BATCHES).astype(np.float32)
    for factor in factors:
        updates, state = program(x, state, labels, jnp.float32(factor))
    expected = oracle(logits, labels)
    per_token = factors.mean(dtype=np.float64) * expected.factors("mean")
    want = -expected.gradient(per_token)
    rtol = 1e-5 if dtype == "float32" else 2**-8
    np.testing.assert_allclose(updates, want, rtol=rtol, atol=per_token.max() * 2**-20)


def square_loss(loss: jax.Array) -> jax.Array:
    return 0.5 * loss**2


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_factor_made_of_the_loss_takes_a_second_reading(
    rng: np.random.Generator, dtype: str
) -> None:
    logits, labels = problem(rng, dtype, T, V)
    f = jax.value_and_grad(lambda x: square_loss(cross_entropy(x, labels)))
    value, gradient = run(f, ["backward", "forward"], logits)
    expected = oracle(logits, labels)
    loss = expected.reduced(expected.factors("mean"))
    np.testing.assert_allclose(value, loss**2 / 2, rtol=1e-5)
    # The factor, which is the loss in f32, is rounded beside what float64 makes of it.
    factor = float(jax.jit(cross_entropy)(logits, labels))
    hold(gradient, logits, labels, factor)

    # Two losses, of which one is the factor of the other.
    other = jnp.flip(logits, 1)
    product = jax.value_and_grad(
        lambda x: cross_entropy(x, labels) * jax.lax.stop_gradient(cross_entropy(other, labels))
    )
    _, gradient = run(product, ["forward", "fused"], logits)
    hold(gradient, logits, labels, float(cross_entropy(other, labels)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_losses_of_tokens_that_the_caller_reduces(rng: np.random.Generator, dtype: str) -> None:
    logits, labels = problem(rng, dtype, T, V)
    weights = jnp.asarray(rng.uniform(0, 2, T) * (rng.random(T) < 0.7), jnp.float32)

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return (cross_entropy(x, labels, reduction="none") * w).sum()

    value, gradient = run(jax.value_and_grad(f), ["fused"], logits, weights)
    expected = oracle(logits, labels)
    factors = np.asarray(weights, np.float64) * expected.factors("sum")
    np.testing.assert_allclose(value, expected.reduced(factors), rtol=1e-5)
    assert_gradient(gradient, expected.gradient(factors), np.abs(factors))

    def also_logps(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, logps = cross_entropy_per_token(x, labels)
        return loss.sum(), logps

    (_, logps), gradient = run(
        jax.value_and_grad(also_logps, has_aux=True), ["backward", "forward"], logits
    )
    np.testing.assert_allclose(logps, expected.__dict__["logps"], rtol=1e-5, atol=1e-5)
    hold(gradient, logits, labels, 1.0, "sum")


@pytest.mark.parametrize("dtype", DTYPES)
def test_where_the_passes_lie_apart(rng: np.random.Generator, dtype: str) -> None:
    """In two functions, or two loops: as far as possible."""
    logits, labels = problem(rng, dtype, T, V)
    in_function = jax.jit(cross_entropy)
    apart = ["backward", "forward"] if dtype == "float16" else ["fused", "scale"]
    f = partial(traced, loss=in_function)
    _, gradient = run(f, apart, logits, labels, jnp.float32(0.25))
    hold(gradient, logits, labels, 0.25)

    def in_loop(x: jax.Array, g: jax.Array) -> jax.Array:
        def body(total: jax.Array, xy: Any) -> Any:
            return total + cross_entropy(*xy, reduction="sum"), None

        batches = x.reshape(BATCHES, -1, V), labels.reshape(BATCHES, -1)
        return g * jax.lax.scan(body, jnp.float32(0), batches)[0]

    gradient = run(jax.grad(in_loop), apart, logits, jnp.float32(0.25))
    hold(gradient, logits, labels, 0.25, "sum")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gradient_pulled_twice(rng: np.random.Generator, dtype: str) -> None:
    logits, labels = problem(rng, dtype, T, V)

    @jax.jit
    def f(x: jax.Array, g: jax.Array) -> Any:
        value, vjp = jax.vjp(lambda x: cross_entropy(x, labels), x)
        return value, vjp(g), vjp(2 * g), vjp(value), vjp(jnp.float32(1)), vjp

    value, (half,), (one,), (by_loss,), (plain,), vjp = f(logits, jnp.float32(0.5))
    hold_loss(value, logits, labels)
    hold(half, logits, labels, 0.5)
    hold(one, logits, labels, 1.0)
    hold(plain, logits, labels, 1.0)
    expected = oracle(logits, labels)
    want = expected.gradient(float(value) * expected.factors("mean"))
    np.testing.assert_allclose(np.asarray(by_loss, np.float64), want, rtol=2**-7, atol=2**-23)
    # What is left in memory is the gradient for a factor of 1.
    hold(vjp(jnp.float32(1))[0], logits, labels, 1.0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("factor", [0.5, -4.0, 2.0**20])
def test_a_power_of_two_gives_the_scaled_bits(
    rng: np.random.Generator, dtype: str, factor: float
) -> None:
    logits, labels = problem(rng, dtype, T, V, scale=1.0)
    f = jax.jit(partial(traced, loss=cross_entropy))
    _, plain = f(logits, labels, jnp.float32(1))
    _, scaled = f(logits, labels, jnp.float32(factor))
    assert (np.asarray(scaled) == np.asarray(plain * jnp.asarray(factor, dtype))).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [0.0, -0.0, 1e-42, np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("form", ["traced", "constant", "eager", "function"])
def test_factors_that_leave_nothing_or_no_number(
    rng: np.random.Generator, dtype: str, factor: float, form: str
) -> None:
    logits, labels = problem(rng, dtype, T, V)
    logits = logits.at[:2].set(jnp.nan)
    labels = labels.at[:3].set(jnp.asarray([-100, 5, 7], jnp.int32))
    weights = jnp.ones(T).at[jnp.asarray([1, 4])].set(0)

    def f(x: jax.Array, g: Any) -> Any:
        mean = jax.jit(cross_entropy) if form == "function" else cross_entropy
        loss = mean(x, labels, weights=weights)
        return g * loss, loss

    both = jax.value_and_grad(f, has_aux=True)
    if form == "constant":
        (_, loss), gradient = jax.jit(lambda x: both(x, factor))(logits)
    else:
        (_, loss), gradient = (both if form == "eager" else jax.jit(both))(
            logits, jnp.float32(factor)
        )
    takes_part = np.asarray((labels != -100) & (weights != 0))
    gradient = np.asarray(gradient, np.float64)
    assert (gradient[~takes_part] == 0).all()
    if factor == 0:
        assert (gradient == 0).all()
    elif not np.isfinite(factor):
        assert not np.isfinite(gradient[takes_part]).any()
    # The factor leaves the loss itself alone.
    expected = oracle(logits, labels)
    want = expected.reduced(expected.factors("mean", np.asarray(weights)))
    np.testing.assert_allclose(loss, want, rtol=1e-5)


@pytest.mark.parametrize("factor", [1.0, 2.0**15, 2.0**-4])
@pytest.mark.parametrize("form", ["traced", "constant"])
def test_a_loss_scale_of_f16(rng: np.random.Generator, factor: float, form: str) -> None:
    """Small gradients of f16, subnormal ones included, are rounded once, behind the factor."""
    logits, labels = problem(rng, "float16", T, V, scale=6.0)
    loss = jax.value_and_grad(lambda x, g: g * cross_entropy(x, labels))
    f, given = (loss, (jnp.float32(factor),))
    if form == "constant":
        f, given = (lambda x: loss(x, factor), ())
    _, gradient = run(f, ["fused"], logits, *given)
    hold(gradient, logits, labels, factor)


def test_donated_logits_are_written_over(rng: np.random.Generator) -> None:
    for dtype in DTYPES:
        logits, labels = problem(rng, dtype, T, V)
        f = partial(traced, loss=partial(cross_entropy, donate_logits=True))
        program = compiled(f, logits, labels, jnp.float32(3), donate_argnums=0)
        assert calls_of(program) == ["fused"]
        assert program.memory_analysis().alias_size_in_bytes >= logits.nbytes
        assert program.memory_analysis().temp_size_in_bytes < logits.nbytes // 4
        copy = jnp.array(logits)
        _, gradient = program(copy, labels, jnp.float32(3))
        hold(gradient, logits, labels, 3.0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_forward_mode(rng: np.random.Generator, dtype: str) -> None:
    logits, labels = problem(rng, dtype, T, V)
    tangent = jnp.asarray(rng.normal(size=(T, V)), dtype)
    f = jax.jit(lambda x, t: jax.jvp(lambda x: 3 * cross_entropy(x, labels), (x,), (t,)))
    value, moved = f(logits, tangent)
    hold_loss(value, logits, labels, 3.0)
    expected = oracle(logits, labels)
    want = (expected.gradient(3 * expected.factors("mean")) * np.asarray(tangent, np.float64)).sum()
    np.testing.assert_allclose(moved, want, rtol=2**-6, atol=2**-8)


@pytest.mark.few(1)
@pytest.mark.only("cpu", "eight devices are the CPU's")
@pytest.mark.devices(8)
@pytest.mark.parametrize("is_shardy", [True, False], ids=["shardy", "gspmd"])
def test_a_mesh_of_eight_devices(rng: np.random.Generator, is_shardy: bool) -> None:
    mesh = jax.make_mesh((8,), ("tokens",), axis_types=(AxisType.Auto,), devices=jax.devices()[:8])
    with by_shardy(is_shardy):
        for dtype in DTYPES if is_shardy else DTYPES[:1]:
            check_over(mesh, dtype, *problem(rng, dtype, T, V))


def check_over(mesh: jax.sharding.Mesh, dtype: str, logits: jax.Array, labels: jax.Array) -> None:
    """Holds losses of tokens over a mesh that something multiplies."""
    x, y = (jax.device_put(a, NamedSharding(mesh, P("tokens"))) for a in (logits, labels))
    for f, factor, calls in FACTORS:
        given = x, y, jnp.float32(1.7)
        program = compiled(partial(f, loss=cross_entropy), *given)
        text = program.as_text()
        assert calls_of(program) == calls, (f, dtype)
        assert "all-gather" not in text and "all-to-all" not in text, (f, dtype)
        value, gradient = program(*given)
        hold_loss(value, logits, labels, factor)
        hold(gradient, logits, labels, factor)
    of_loss = jax.value_and_grad(lambda x, y: square_loss(cross_entropy(x, y)))
    assert calls_of(compiled(of_loss, x, y)) == ["backward", "forward"]

    def local(x: jax.Array, y: jax.Array, g: jax.Array) -> Any:
        total = jax.lax.psum((y != -100).sum(), "tokens")
        sum_ = jax.lax.psum(cross_entropy(x, y, reduction="sum"), "tokens")
        return g * sum_ / total

    over = partial(jax.shard_map, mesh=mesh, in_specs=(P("tokens"), P("tokens"), P()))
    inside = over(jax.value_and_grad(local), out_specs=(P(), P("tokens")))
    outside = jax.value_and_grad(over(local, out_specs=P()))
    apart = ["backward", "forward"] if dtype == "float16" else ["fused", "scale"]
    for each, calls in ((inside, ["fused"]), (outside, apart)):
        value, gradient = run(each, calls, x, y, jnp.float32(1.7))
        hold_loss(value, logits, labels, 1.7)
        # Of two roundings, where the passes lie apart.
        if calls != ["fused", "scale"] or dtype == "float32":
            hold(gradient, logits, labels, 1.7)
