"""What the backward pass runs again under `jax.checkpoint`, by policy and by name."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from operations import CASES, Case
from pallas_bridge._src.operations import OPERATIONS

import pallas_bridge
from pallas_bridge import checkpoint_policies

B, S, H, D = 2, 16, 4, 8
F = H * D
DOT = "stablehlo.dot_general"


def block(x: jax.Array, weights: Any) -> jax.Array:
    y = pallas_bridge.rms_norm(x, weights["norm"]) @ weights["qkv"]
    q, k, v = jnp.split(y.reshape(B, S, 3 * H, D), 3, axis=2)
    q, k = pallas_bridge.rope(q, k)
    o = pallas_bridge.flash_attention(q, k, v, causal=True)
    return x + pallas_bridge.swiglu(o.reshape(B, S, F) @ weights["up"]) @ weights["down"]


@pytest.fixture
def operands(rng: np.random.Generator) -> tuple[jax.Array, Any]:
    shapes = {"norm": (F,), "qkv": (F, 3 * F), "up": (F, 2 * F), "down": (F, F)}
    weights = {
        name: jnp.asarray(rng.normal(size=shape) / F**0.5, jnp.float32)
        for name, shape in shapes.items()
    }
    return jnp.asarray(rng.normal(size=(B, S, F)), jnp.float32), weights


def value_and_grad(policy: Any) -> Callable[..., Any]:
    run = block if policy is None else jax.checkpoint(block, policy=policy)
    return jax.value_and_grad(lambda *operands: (run(*operands) ** 2).sum(), (0, 1))


def calls(function: Callable[..., Any], *operands: Any) -> Counter[str]:
    """How often the program has each call, and products."""
    text = jax.jit(function).lower(*operands).as_text()
    return Counter(re.findall(r"(?<=@)xentile_\w+|stablehlo\.dot_general", text))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("policy", "attention", "norm", "products"),
    [
        # Forward 3 products, and 2 gradients of each.
        (jax.checkpoint_policies.everything_saveable, 1, 1, 9),
        (checkpoint_policies.save_products, 1, 2, 9),
        # What down gives is no operand of the backward pass.
        (checkpoint_policies.save_attention, 1, 2, 11),
        (jax.checkpoint_policies.nothing_saveable, 2, 2, 11),
    ],
)
def test_what_runs_again(
    operands: Any, policy: Any, attention: int, norm: int, products: int
) -> None:
    found = calls(value_and_grad(policy), *operands)
    assert found["xentile_flash_attention_forward"] == attention
    assert found["xentile_rms_norm_forward"] == norm
    assert found[DOT] == products
    expected = jax.jit(value_and_grad(None))(*operands)
    again = jax.jit(value_and_grad(policy))(*operands)
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


# Of losses nobody computes anything again.
NAMED = [
    one
    for one in CASES
    if one.has_gradient and "cross_entropy" not in one.name and one.name != "optax"
]


@pytest.mark.parametrize("case", NAMED, ids=lambda one: one.name)
def test_results_have_names(rng: np.random.Generator, case: Case) -> None:
    """With its results kept, less of an operation is computed again than with nothing kept."""
    arrays = case.arrays(rng)
    names = {"gated_mlp", "rms_norm_sum", *(one.name for one in OPERATIONS)}

    def run(*arrays: jax.Array) -> jax.Array:
        squares = [(one.astype(jnp.float32) ** 2).sum() for one in case.outputs(*arrays)]
        return jnp.stack(squares).sum()

    def count(*names: str) -> int:
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        if names and case.name == "rms_norm_linear":
            # Its results are products, which policies know without a name.
            policy = checkpoint_policies.save_products_and_sums
        run_again = jax.checkpoint(run, policy=policy)
        loss = jax.value_and_grad(run_again, case.differentiable)
        return jax.jit(loss).lower(*arrays).as_text().count(" = ")

    assert count(*names) < count()
