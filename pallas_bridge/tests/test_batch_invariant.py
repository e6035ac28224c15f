"""Tokens of a linear cross-entropy have the same bits in any batch, where that is asked for."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from oracle import Oracle
from pallas_bridge._src.linear_cross_entropy.plan import INVARIANT_TOKENS

from pallas_bridge import (
    explain,
    linear_cross_entropy,
    linear_cross_entropy_per_token,
    linear_cross_entropy_value_and_grad,
)

TOKENS, HIDDEN, VOCAB = INVARIANT_TOKENS + 190, 72, 331
run = partial(linear_cross_entropy_per_token, batch_invariant=True)


@pytest.fixture(params=[("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")])
def arrays(rng: np.random.Generator, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Arrays of hidden states and a weight in two dtypes, and a cotangent a token."""
    of_hidden, of_weight = request.param
    labels = rng.integers(0, VOCAB, TOKENS)
    labels[rng.random(TOKENS) < 0.1] = -100
    return {
        "hidden": jnp.asarray(rng.normal(size=(TOKENS, HIDDEN)), of_hidden),
        "weight": jnp.asarray(rng.normal(0, 0.3, (VOCAB, HIDDEN)), of_weight),
        "labels": jnp.asarray(labels, jnp.int32),
        "cotangents": jnp.asarray(rng.normal(size=TOKENS), jnp.float32),
    }


def batches(rng: np.random.Generator) -> list[np.ndarray]:
    """Tokens by their number: one, a few, a whole chunk, and more than that in another order."""
    return [
        rng.permutation(TOKENS)[:count] for count in (1, 7, INVARIANT_TOKENS, INVARIANT_TOKENS + 31)
    ]


def of_each(
    given: dict[str, Any], rows: np.ndarray, columns: Any = None, **more: Any
) -> dict[str, np.ndarray]:
    """What a batch's tokens get: outputs and dhidden, of per-token losses and of a sum."""

    # Compiled, as op by op XLA divides by a temperature, and not where it is a constant.
    @jax.jit
    def of(x: Any, w: Any, y: Any, g: Any, columns: Any) -> dict[str, Any]:
        known = {**more, "columns": columns, "return_lse": True}
        outputs, pull = jax.vjp(lambda x: run(x, w, y, **known), x)
        dhidden = pull((g, -g, 0.5 * g, *(jnp.zeros_like(one) for one in outputs[3:])))[0]
        weighted = partial(linear_cross_entropy, reduction="sum", weights=g, batch_invariant=True)
        of_sum = jax.grad(lambda x: weighted(x, w, y))(x)
        loss, logps, lse, *others = outputs
        found = {"loss": loss, "logps": logps, "lse": lse, "dhidden": dhidden, "of sum": of_sum}
        return found | {f"more {index}": one for index, one in enumerate(others)}

    x, w, y, g = (given[name] for name in ("hidden", "weight", "labels", "cotangents"))
    columns = None if columns is None else columns[rows]
    return {
        name: np.asarray(one) for name, one in of(x[rows], w, y[rows], g[rows], columns).items()
    }


def assert_alike(whole: dict[str, np.ndarray], found: dict[str, np.ndarray], rows: Any) -> None:
    for name, one in found.items():
        assert one.tobytes() == whole[name][rows].tobytes(), f"{name} of {len(rows)} tokens"


def test_any_batch_has_the_same_bits(rng: np.random.Generator, arrays: dict[str, Any]) -> None:
    every = np.arange(TOKENS)
    whole = of_each(arrays, every)
    for rows in batches(rng):
        assert_alike(whole, of_each(arrays, rows), rows)
    # And they are right.
    logits = np.asarray(arrays["hidden"], np.float64) @ np.asarray(arrays["weight"], np.float64).T
    narrow = arrays["hidden"].dtype != jnp.float32
    rtol = 1e-2 if narrow else 1e-5
    expected = Oracle(logits, np.asarray(arrays["labels"]))
    np.testing.assert_allclose(whole["loss"], expected.__dict__["loss"], rtol=rtol, atol=rtol)
    dlogits = expected.gradient(np.asarray(arrays["cotangents"], np.float64))
    dhidden = dlogits @ np.asarray(arrays["weight"], np.float64)
    np.testing.assert_allclose(whole["of sum"], dhidden, rtol=rtol, atol=3 * rtol)


def test_what_is_known_of_a_token(rng: np.random.Generator, arrays: dict[str, Any]) -> None:
    columns = jnp.asarray(rng.integers(0, VOCAB, (TOKENS, 3)), jnp.int32)
    every = np.arange(TOKENS)
    more = {"return_entropy": True, "temperature": 0.8}
    whole = of_each(arrays, every, columns, **more)
    assert len(whole) == 7
    for rows in batches(rng)[1:3]:
        assert_alike(whole, of_each(arrays, rows, columns, **more), rows)


def test_sums_of_microbatches(rng: np.random.Generator, arrays: dict[str, Any]) -> None:
    x, w, y = arrays["hidden"], arrays["weight"], arrays["labels"]

    def dhidden(rows: Any) -> np.ndarray:
        sums = jnp.zeros(w.shape, jnp.float32)
        given = {"dweight_sums": sums, "reduction": "sum", "batch_invariant": True}
        _, (found, _) = linear_cross_entropy_value_and_grad(x[rows], w, y[rows], **given)
        return np.asarray(found)

    whole = dhidden(np.arange(TOKENS))
    rows = batches(rng)[1]
    assert dhidden(rows).tobytes() == whole[rows].tobytes()


@pytest.mark.devices(4)
def test_a_vocabulary_over_devices(rng: np.random.Generator) -> None:
    weight = jnp.asarray(rng.normal(0, 0.3, (320, HIDDEN)), jnp.float32)
    hidden = jnp.asarray(rng.normal(size=(40, HIDDEN)), jnp.float32)
    labels = jnp.asarray(rng.integers(0, 320, 40), jnp.int32)
    mesh = jax.make_mesh((4,), ("vocab",), axis_types=(jax.sharding.AxisType.Auto,))

    def of(hidden: Any, weight: Any, labels: Any) -> Any:
        return run(hidden, weight, labels, axis_name="vocab")[1]

    specs = P(), P("vocab"), P()
    parts = jax.jit(jax.shard_map(of, mesh=mesh, in_specs=specs, out_specs=P()))
    whole = np.asarray(parts(hidden, weight, labels))
    few = np.asarray(parts(hidden[5:8], weight, labels[5:8]))
    assert few.tobytes() == whole[5:8].tobytes()
    np.testing.assert_allclose(whole, run(hidden, weight, labels)[1], rtol=1e-5, atol=1e-5)

    @jax.jit
    def dhidden(hidden: Any, labels: Any) -> Any:
        named = partial(linear_cross_entropy, reduction="sum", batch_invariant=True)
        return jax.grad(lambda x: named(x, weight, labels, axis_name="vocab"))(hidden)

    # Other axes are left to XLA.
    with jax.set_mesh(jax.make_mesh((1, 4), ("data", "vocab"), axis_types=mesh.axis_types * 2)):
        whole, few = (
            np.asarray(dhidden(hidden[of], labels[of])) for of in (slice(40), slice(5, 6))
        )
        program = dhidden.lower(hidden[:1], labels[:1]).compile().as_text()
    assert few.tobytes() == whole[5:6].tobytes()
    assert f"f32[{INVARIANT_TOKENS},80]" in program


def test_what_explain_says() -> None:
    hidden, weight = (jax.ShapeDtypeStruct((n, 64), jnp.bfloat16) for n in (5, 1000))
    plan = explain(hidden, weight, batch_invariant=True)
    assert plan.tokens == INVARIANT_TOKENS and "the last chunk padded" in str(plan)
    with pytest.raises(ValueError, match="max_scratch_bytes is 1000; batch_invariant takes chunks"):
        explain(hidden, weight, batch_invariant=True, max_scratch_bytes=1000)


def test_the_dense_program_has_no_such_thing() -> None:
    given = jnp.ones((3, 4)), jnp.ones((5, 4)), jnp.zeros(3, jnp.int32)
    with pytest.raises(ValueError, match="'reference', whose products have as many rows"):
        linear_cross_entropy(*given, batch_invariant=True, implementation="reference")
