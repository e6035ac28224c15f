"""What JAX does to functions, done to ours: it may change nothing but what it is there for."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from oracle import Oracle, assert_gradient, assert_tokens
from placement import PLATFORM
from test_values import problem

from pallas_bridge import cross_entropy, cross_entropy_per_token


def same_bits(a: Any, b: Any) -> None:
    a, b = np.asarray(a), np.asarray(b)
    assert a.dtype == b.dtype and a.shape == b.shape
    assert a.tobytes() == b.tobytes()


def exact(array: Any) -> Any:
    return np.asarray(array).astype(np.float64)


def batch(rng: np.random.Generator, dtype: str, *shape: int) -> tuple[jax.Array, jax.Array]:
    """Logits of `shape` and their labels."""
    logits, labels = problem(rng, dtype, int(np.prod(shape[:-1])), shape[-1])
    return logits.reshape(shape), labels.reshape(shape[:-1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_vmap_batched_and_flat_agree_bitwise(rng: np.random.Generator, dtype: str) -> None:
    logits, labels = batch(rng, dtype, 3, 5, 257)
    cotangents = jnp.asarray(rng.normal(size=(3, 3, 5)), jnp.float32)
    f = partial(cross_entropy_per_token, return_lse=True, z_loss=1e-3)

    def run(logits: jax.Array, labels: jax.Array, *cotangents: jax.Array) -> Any:
        outputs, vjp = jax.vjp(lambda x: f(x, labels), logits)
        return *outputs, *vjp(cotangents)

    batched = jax.jit(run)(logits, labels, *cotangents)
    flat = jax.jit(run)(logits.reshape(15, 257), labels.reshape(15), *cotangents.reshape(3, 15))
    mapped = jax.jit(jax.vmap(run))(logits, labels, *cotangents)
    inner = jax.jit(jax.vmap(run, in_axes=1, out_axes=1))(logits, labels, *cotangents)
    twice = jax.jit(jax.vmap(jax.vmap(run)))(logits, labels, *cotangents)
    eager = run(logits, labels, *cotangents)
    for index, expected in enumerate(batched):
        for other in (flat, mapped, inner, twice, eager):
            same_bits(np.asarray(other[index]).reshape(expected.shape), expected)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("labels_axis", [0, 1, None])
def test_vmap_of_a_mean_over_any_axis(
    rng: np.random.Generator, axis: int, labels_axis: int | None
) -> None:
    logits, labels = batch(rng, "float32", 3, 5, 64)
    if labels_axis is None:
        labels = labels[:1].repeat(3, 0)
    f = jax.value_and_grad(cross_entropy)
    separate = [f(x, y) for x, y in zip(logits, labels, strict=True)]
    moved = jnp.moveaxis(logits, 0, axis)
    given = labels[0] if labels_axis is None else jnp.moveaxis(labels, 0, labels_axis)
    values, gradients = jax.jit(jax.vmap(f, in_axes=(axis, labels_axis), out_axes=(0, axis)))(
        moved, given
    )
    np.testing.assert_allclose(values, [value for value, _ in separate], rtol=1e-6)
    same_bits(jnp.moveaxis(gradients, axis, 0), jnp.stack([g for _, g in separate]))


@pytest.mark.slow
def test_vmap_over_labels_and_over_weights_alone(rng: np.random.Generator) -> None:
    logits, labels = batch(rng, "float32", 6, 50)
    many = jnp.stack([labels, jnp.roll(labels, 1)])
    losses = jax.vmap(cross_entropy, in_axes=(None, 0))(logits, many)
    np.testing.assert_allclose(losses, [cross_entropy(logits, y) for y in many], rtol=1e-6)
    weights = jnp.asarray(rng.uniform(0.5, 2, (2, 6)), jnp.float32)
    f = jax.grad(lambda x, w: cross_entropy(x, labels, weights=w))
    gradients = jax.vmap(f, in_axes=(None, 0))(logits, weights)
    for gradient, w in zip(gradients, weights, strict=True):
        if PLATFORM == "cpu":
            same_bits(gradient, f(logits, w))
        else:
            # XLA divides by the sum of weights in kernels that it fuses differently.
            np.testing.assert_allclose(gradient, f(logits, w), rtol=1e-5, atol=1e-7)


def test_vmap_of_the_cotangent(rng: np.random.Generator) -> None:
    logits, labels = batch(rng, "bfloat16", 6, 50)
    _, vjp = jax.vjp(lambda x: cross_entropy(x, labels), logits)
    cotangents = jnp.asarray([0.0, 1.0, 2.0, -0.5])
    (gradients,) = jax.vmap(vjp)(cotangents)
    same_bits(gradients[1], vjp(jnp.float32(1))[0])
    for gradient, cotangent in zip(gradients, cotangents, strict=True):
        # Equal, as -0 is to 0: the rows of tokens that take no part are left alone.
        scaled = (gradients[1].astype(jnp.float32) * cotangent).astype(jnp.bfloat16)
        np.testing.assert_array_equal(gradient, scaled)


def test_a_single_token_needs_no_axis(rng: np.random.Generator) -> None:
    logits, labels = batch(rng, "float32", 4, 33)
    f = jax.value_and_grad(lambda x, y: cross_entropy(x, y, reduction="sum"))
    values, gradients = jax.vmap(f)(logits, labels)
    losses, _ = cross_entropy_per_token(logits, labels)
    same_bits(values, losses)
    # Rows that begin elsewhere in memory may be added up in another order.
    np.testing.assert_allclose(gradients[2], f(logits[2], labels[2])[1], rtol=1e-6)


def test_backward_twice_and_forward_again(rng: np.random.Generator) -> None:
    logits, labels = batch(rng, "bfloat16", 7, 99)
    for f in (
        lambda x: cross_entropy(x, labels),
        lambda x: cross_entropy_per_token(x, labels)[0].sum(),
    ):
        value, vjp = jax.vjp(f, logits)
        first, other, again = (vjp(jnp.float32(c))[0] for c in (1, 3, 1))
        same_bits(first, again)
        assert not np.array_equal(first, other)
        same_bits(value, f(logits))
    # The arrays that went in are as they were.
    same_bits(logits, logits + 0)


@pytest.mark.parametrize("policy", ["nothing_saveable", "everything_saveable", "dots_saveable"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_checkpoint(rng: np.random.Generator, reduction: Any, policy: str) -> None:
    hidden = jnp.asarray(rng.normal(size=(9, 16)), jnp.float32)
    weight = jnp.asarray(rng.normal(size=(16, 77)), jnp.float32)
    labels = jnp.asarray(rng.integers(0, 77, 9))

    def f(w: jax.Array) -> jax.Array:
        return jnp.tanh(cross_entropy(hidden @ w, labels, reduction=reduction)).sum()

    rematerialised = jax.checkpoint(f, policy=getattr(jax.checkpoint_policies, policy))
    plain, again = (jax.jit(jax.value_and_grad(g))(weight) for g in (f, rematerialised))
    np.testing.assert_allclose(plain[0], again[0], rtol=1e-6)
    np.testing.assert_allclose(plain[1], again[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_scan(rng: np.random.Generator, reduction: Any) -> None:
    logits, labels = batch(rng, "float32", 4, 5, 60)

    def one(x: jax.Array, y: jax.Array) -> jax.Array:
        return cross_entropy(x, y, reduction=reduction).sum()

    def scanned(logits: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, xy: (c + one(*xy), None), 0.0, (logits, labels))[0]

    value, gradient = jax.jit(jax.value_and_grad(scanned))(logits)
    separate = [jax.value_and_grad(one)(x, y) for x, y in zip(logits, labels, strict=True)]
    np.testing.assert_allclose(value, sum(v for v, _ in separate), rtol=1e-6)
    same_bits(gradient, jnp.stack([g for _, g in separate]))


def test_inside_cond_and_while(rng: np.random.Generator) -> None:
    logits, labels = batch(rng, "float32", 5, 60)
    f = jax.grad(lambda x: cross_entropy(x, labels))

    @jax.jit
    def descend(x: jax.Array) -> jax.Array:
        step = lambda _, x: jax.lax.cond(x[0, 0] < 1e9, lambda x: x - f(x), lambda x: x, x)  # noqa: E731
        return jax.lax.fori_loop(0, 3, step, x)

    expected = logits
    for _ in range(3):
        expected = expected - f(expected)
    np.testing.assert_allclose(descend(logits), expected, rtol=1e-6, atol=1e-6)
    assert cross_entropy(descend(logits), labels) < cross_entropy(logits, labels)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_donation_reuses_memory_and_gives_the_same(
    rng: np.random.Generator, reduction: Any, dtype: str
) -> None:
    logits, labels = batch(rng, dtype, 64, 1000)

    def f(x: jax.Array, donate: bool) -> jax.Array:
        return 2 * cross_entropy(x, labels, reduction=reduction, donate_logits=donate).sum()

    value, gradient = jax.jit(jax.value_and_grad(partial(f, donate=False)))(logits)
    donating = jax.value_and_grad(partial(f, donate=True))
    program = jax.jit(donating, donate_argnums=0).lower(logits).compile()
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= logits.nbytes
    assert memory.temp_size_in_bytes < 16 * 1024
    donated = jnp.array(logits)
    value_in_place, gradient_in_place = program(donated)
    assert donated.is_deleted()
    same_bits(value_in_place, value)
    same_bits(gradient_in_place, gradient)


def test_abstract_shapes_need_no_memory() -> None:
    logits = jax.ShapeDtypeStruct((1 << 20, 151643), jnp.bfloat16)
    labels = jax.ShapeDtypeStruct((1 << 20,), jnp.int32)
    value, gradient = jax.eval_shape(jax.value_and_grad(cross_entropy), logits, labels)
    assert value.shape == () and value.dtype == jnp.float32
    assert gradient.shape == logits.shape and gradient.dtype == jnp.bfloat16
    jax.jit(jax.value_and_grad(cross_entropy)).lower(logits, labels)


def test_a_cotangent_of_lse_beside_a_mean(rng: np.random.Generator) -> None:
    logits, labels = batch(rng, "float32", 8, 70)

    def f(x: jax.Array) -> jax.Array:
        loss, lse = cross_entropy(x, labels, return_lse=True)
        return 2 * loss + (lse**2).sum()

    expected = Oracle(np.asarray(logits), np.asarray(labels))
    lse = expected.__dict__["lse"]
    want = expected.gradient(2 * expected.factors("mean"), 0, 2 * lse)
    assert_gradient(jax.jit(jax.grad(f))(logits), want, np.abs(2 * lse) + 1)
    # lse that is only looked at leaves the fused schedule as it is.
    looked_at = jax.value_and_grad(
        lambda x: cross_entropy(x, labels, return_lse=True), has_aux=True
    )
    assert "_backward" not in str(jax.make_jaxpr(looked_at)(logits))
    (_, aux), _ = jax.jit(looked_at)(logits)
    assert_tokens("lse", aux, lse, expected.__dict__["size"])


def test_the_schedule_follows_the_reduction_and_the_dtype(rng: np.random.Generator) -> None:
    logits, labels = batch(rng, "float32", 8, 70)

    def calls(dtype: str, reduction: Any) -> set[str]:
        f = jax.grad(lambda x: cross_entropy(x, labels, reduction=reduction).sum())
        text = str(jax.make_jaxpr(f)(logits.astype(dtype)))
        return {name for name in ("forward", "backward", "fused") if f"entropy_{name}" in text}

    for dtype in ("float32", "bfloat16"):
        assert calls(dtype, "mean") == calls(dtype, "sum") == {"fused"}
        assert calls(dtype, "none") == {"forward", "backward"}
    assert calls("float16", "mean") == {"forward", "backward"}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.slow
def test_forward_mode_and_reverse_mode(rng: np.random.Generator, reduction: Any) -> None:
    logits, labels = batch(rng, "float32", 2, 3, 30)
    # An ignored token has an lse, whose gradient is 0 nevertheless.
    labels = jnp.abs(labels) % 30
    weights = jnp.asarray(rng.uniform(0.5, 2, (2, 3)), jnp.float32)

    def f(x: jax.Array, y: jax.Array, w: jax.Array) -> Any:
        options: dict[str, Any] = {"z_loss": 1e-2, "softcap": 20.0, "return_lse": True}
        return cross_entropy(x, y, weights=w, reduction=reduction, **options)

    def of(x: jax.Array, w: jax.Array) -> Any:
        return f(x, labels, w)

    def mapped(x: jax.Array, w: jax.Array) -> Any:
        return jax.vmap(f)(x, labels, w)

    functions = (of, jax.jit(of), jax.jit(mapped)) if reduction == "mean" else (jax.jit(mapped),)
    for function in functions:
        check_grads(function, (logits, weights), 1, rtol=2e-2, atol=2e-2, eps=1e-2)


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_forward_mode_gives_what_the_reference_gives(rng: np.random.Generator, dtype: str) -> None:
    logits, labels = batch(rng, dtype, 9, 300)
    labels = labels.at[2].set(-100)
    tangent = jnp.asarray(rng.normal(size=logits.shape), dtype)
    oracle = Oracle(np.asarray(logits), np.asarray(labels))
    along = np.asarray(tangent, np.float64)

    def sizes(gradient: Any) -> Any:
        """The sums of magnitudes of tokens' terms, which say how far off sums of them may be."""
        return np.abs(gradient * along).sum(-1)

    # Terms are products in f32, of entries that are a few units in the last place off; p - 1 of a
    # label has no more digits than the sum that p comes of.
    of_f32, of_label = 1e-5, 2.0**-22 * np.abs(along).max(-1)
    # A gradient that was made beforehand was rounded: each entry by half a unit in the last place,
    # at most this share of it, or below the normal range by half of the least number.
    info = jnp.finfo(dtype)
    rounding = float(info.eps) / 2 * 1.01
    lost = float(info.smallest_subnormal) / 2 * np.abs(along).sum()
    factors = oracle.factors("mean")
    of_mean = sizes(oracle.gradient(factors)).sum()
    bound_of_mean = (rounding + of_f32) * of_mean + lost + (factors * of_label).sum()
    # What is of each token is never rounded to the dtype.
    per_token = [sizes(oracle.gradient(*one)) for one in ((1, 0, 0), (0, 1, 0), (0, 0, 1))]
    bounds = [bound_of_mean], [of_f32 * size + of_label for size in per_token]
    atol = 1e-5 * oracle.__dict__["size"].max()
    for f, allowed in zip(
        (cross_entropy, partial(cross_entropy_per_token, return_lse=True)), bounds, strict=True
    ):
        found, expected = (
            jax.jit(partial(jax.jvp, lambda x, g=g: g(x, labels)))((logits,), (tangent,))
            for g in (f, partial(f, implementation="reference"))
        )
        for actual, wanted in zip(*map(jax.tree.leaves, (found[0], expected[0])), strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=atol)
        moved = (jax.tree.leaves(one) for one in (found[1], expected[1]))
        for actual, wanted, bound in zip(*moved, allowed, strict=True):
            assert (np.abs(exact(actual) - exact(wanted)) <= bound).all(), (actual, wanted, bound)
    value, linear = jax.linearize(lambda x: cross_entropy(x, labels), logits)
    same_bits(value, cross_entropy(logits, labels))
    gradient = jax.grad(lambda x: cross_entropy(x, labels))(logits)
    wanted = np.vdot(exact(gradient), along)
    assert abs(linear(tangent) - wanted) <= bound_of_mean, (linear(tangent), wanted)


def test_forward_mode_alone_makes_no_gradient_of_every_token(rng: np.random.Generator) -> None:
    logits, labels = batch(rng, "float32", 4, 30)

    def along(x: jax.Array, t: jax.Array) -> Any:
        return jax.jvp(lambda x: cross_entropy_per_token(x, labels), (x,), (t,))

    program = jax.jit(along).lower(logits, logits).as_text()
    assert "cross_entropy_forward" in program and "cross_entropy_backward" not in program


def test_threads_may_call_at_once(rng: np.random.Generator) -> None:
    logits, labels = batch(rng, "bfloat16", 64, 3000)
    f = jax.jit(jax.value_and_grad(lambda x: cross_entropy(x, labels)))
    expected = f(logits)
    with ThreadPoolExecutor(8) as pool:
        for result in pool.map(lambda _: f(logits), range(40)):
            same_bits(result[0], expected[0])
            same_bits(result[1], expected[1])
