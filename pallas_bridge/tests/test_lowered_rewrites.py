"""What `lowered_rewrites` takes for granted of JAX and MLIR, on every version that is supported."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir
from pallas_bridge._src import lowered_rewrites as rewrites
from placement import PLATFORM

from pallas_bridge import cross_entropy, cross_entropy_per_token

X = np.linspace(-1, 1, 6, dtype=np.float32)


def operation(lower: Callable[..., Sequence[Any]]) -> Callable[..., jax.Array]:
    """Returns an operation, of the type of its first operand, that `lower` lowers."""
    primitive = Primitive("test_lowered_rewrites")
    primitive.def_abstract_eval(lambda *avals: avals[0])
    mlir.register_lowering(primitive, lower, cacheable=False)
    return primitive.bind


def negate(_: Any, x: Any) -> Sequence[Any]:
    """Lowers to -x, behind a handle."""
    return rewrites.give_handles(lambda _, x: [stablehlo.negate(x)], None, x)


def made_by(handle: Any) -> Any:
    """Returns the operation whose result a handle has."""
    return handle.owner.operation.operands[0].owner.operation


def test_rules_run_once_an_equation_in_order_at_the_end_of_a_block() -> None:
    seen = []

    def lower(_: Any, x: Any) -> Sequence[Any]:
        point, owner = ir.InsertionPoint.current, x.owner
        block = owner if isinstance(owner, ir.Block) else owner.operation.block
        seen.append((point.ref_operation, block == point.block))
        return [stablehlo.sine(x)]

    apply = operation(lower)
    jax.jit(lambda x: apply(apply(apply(x)) * 2)).lower(X)
    assert seen == [(None, True)] * 3


@pytest.mark.parametrize("depends", [False, True])
def test_operations_move_unless_they_depend_on_the_call(depends: bool) -> None:
    moved = []

    def lower(_: Any, first: Any, factor: Any) -> Sequence[Any]:
        call, made = made_by(first), factor.owner.operation
        moved.append(rewrites.hoist(factor, call))
        assert made.is_before_in_block(call) == moved[-1]
        return [stablehlo.multiply(first, factor)]

    earlier, later = operation(negate), operation(lower)

    def f(x: jax.Array, y: jax.Array) -> jax.Array:
        first = earlier(x)
        # A region is moved with what it uses.
        summed = jax.lax.reduce(first if depends else y, jnp.float32(0), jax.lax.add, (0,))
        return later(first, jnp.broadcast_to(jnp.cos(summed) * 2, x.shape))

    found = jax.jit(f)(X, X + 1)
    total = (-X if depends else X + 1).sum()
    np.testing.assert_allclose(found, -X * np.cos(total) * 2, rtol=1e-5)
    assert moved == [not depends]


def test_results_behind_handles_can_be_replaced() -> None:
    def lower(ctx: Any, first: Any, x: Any) -> Sequence[Any]:
        call = made_by(first)
        make = mlir.lower_fun(lambda x: jnp.exp(x) + 1, multiple_results=False)
        (other,) = make(ctx.replace(avals_in=ctx.avals_in[1:]), x)
        assert rewrites.hoist(other, call)
        assert other.owner.operation.is_before_in_block(call)
        ir.Value(call.results[0]).replace_all_uses_with(other)
        return [x]

    earlier, later = operation(negate), operation(lower)

    def f(x: jax.Array) -> tuple[jax.Array, ...]:
        first = earlier(x)
        before = first * 2
        return before, later(first, x), first, first * 3

    lowered = jax.jit(f).lower(X)
    before, _, first, after = lowered.compile()(X)
    for one, factor in ((before, 2), (first, 1), (after, 3)):
        np.testing.assert_allclose(one, factor * (np.exp(X) + 1), rtol=1e-6)
    assert "stablehlo.convert" in lowered.as_text()
    assert "convert" not in lowered.compile().as_text()


@pytest.mark.parametrize(
    ("make", "number"),
    [
        (lambda x: jnp.ones_like(x) * 0.5, 0.5),
        (lambda x: -jnp.full(x.shape, 3, jnp.bfloat16).astype(x.dtype) / 2, -1.5),
        (lambda x: jnp.broadcast_to(jnp.float32(2).reshape(1), x.shape), 2),
        (lambda x: x * 0.5, None),
        (lambda x: jnp.arange(x.size, dtype=x.dtype), None),
    ],
)
def test_constants_are_found(make: Callable[[Any], Any], number: float | None) -> None:
    found = []

    def lower(_: Any, x: Any) -> Sequence[Any]:
        found.append(rewrites.find_constant(x))
        return [x]

    jax.jit(lambda x: operation(lower)(make(x))).lower(X)
    assert found == [number]


LOGITS = jax.ShapeDtypeStruct((6, 40), jnp.float32)
LABELS = jax.ShapeDtypeStruct((6,), jnp.int32)


@pytest.mark.parametrize(
    ("loss", "calls"),
    [
        (lambda x, y: cross_entropy(x, y), ["fused"]),
        (lambda x, y: 0.5 * cross_entropy(x, y), ["fused"]),
        (lambda x, y: cross_entropy(x, y) ** 2, ["backward", "forward"]),
        (lambda x, y: cross_entropy_per_token(x, y)[0].mean(), ["fused"]),
        (lambda x, y: cross_entropy_per_token(x, y)[1].mean(), ["backward", "forward"]),
        (lambda x, y: cross_entropy(x, y, return_entropy=True)[0], ["distribution_fused"]),
    ],
)
def test_calls_of_a_loss_and_its_gradient_are_joined(
    loss: Callable[..., Any], calls: list[str]
) -> None:
    program = jax.jit(jax.value_and_grad(loss)).lower(LOGITS, LABELS).compile().as_text()
    found = [
        part.split('"')[0].removeprefix("xentile_cross_entropy_")
        for part in program.split('custom_call_target="')[1:]
    ]
    assert sorted(found) == calls


@pytest.mark.parametrize("platforms", [("cpu",), ("cpu", "tpu"), ("cpu", "cuda", "tpu")], ids=str)
@pytest.mark.slow
def test_gradients_with_two_factors_are_lowered_for_any_platforms(
    rng: np.random.Generator, platforms: tuple[str, ...]
) -> None:
    """No fused call serves both factors, so that the product is a call of its own."""
    logits = jnp.asarray(rng.normal(size=(5, 33)), jnp.float32)
    labels = jnp.asarray(rng.integers(0, 33, 5))

    def gradients(x: jax.Array, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        _, vjp = jax.vjp(lambda x: cross_entropy(x, labels), x)
        return vjp(a)[0], vjp(b)[0]

    arguments = logits, jnp.float32(2), jnp.float32(-3)
    exported = jax.export.export(
        jax.jit(gradients),
        platforms=tuple(dict.fromkeys((*platforms, PLATFORM))),
        disabled_checks=[
            jax.export.DisabledSafetyCheck.custom_call(f"xentile_{name}")
            for name in (
                "scale",
                *(f"cross_entropy_{one}" for one in ("forward", "fused", "backward")),
            )
        ],
    )(*arguments)
    once = jax.grad(lambda x: cross_entropy(x, labels, implementation="reference"))(logits)
    for found, factor in zip(exported.call(*arguments), (2, -3), strict=True):
        np.testing.assert_allclose(found, factor * once, rtol=1e-5, atol=1e-6)
