"""Tokens of a linear cross-entropy have the same bits in any batch, where that is asked for."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from oracle import Oracle
from pallas_bridge._src import library
from pallas_bridge._src.cross_entropy import calls, reference
from pallas_bridge._src.linear_cross_entropy.plan import INVARIANT_TOKENS
from pallas_bridge._src.losses.options import check_options

from pallas_bridge import (
    explain,
    linear_cross_entropy,
    linear_cross_entropy_per_token,
    linear_cross_entropy_value_and_grad,
)

TOKENS, HIDDEN = INVARIANT_TOKENS + 190, 72
# Rows of f32 that begin anywhere in lines of memory, and at lines.
RAGGED, WHOLE = 331, 352
run = partial(linear_cross_entropy_per_token, batch_invariant=True)


@pytest.fixture(
    params=[
        ("float32", "float32", RAGGED),
        ("bfloat16", "bfloat16", WHOLE),
        ("bfloat16", "float32", RAGGED),
    ]
)
def arrays(rng: np.random.Generator, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Arrays of hidden states and a weight in two dtypes, and a cotangent a token."""
    of_hidden, of_weight, vocab = request.param
    labels = rng.integers(0, vocab, TOKENS)
    labels[rng.random(TOKENS) < 0.1] = -100
    return {
        "hidden": jnp.asarray(rng.normal(size=(TOKENS, HIDDEN)), of_hidden),
        "weight": jnp.asarray(rng.normal(0, 0.3, (vocab, HIDDEN)), of_weight),
        "labels": jnp.asarray(labels, jnp.int32),
        "cotangents": jnp.asarray(rng.normal(size=TOKENS), jnp.float32),
    }


def batches(rng: np.random.Generator) -> list[np.ndarray]:
    """Tokens by their number: one, a few, a whole chunk, and more than that in another order."""
    return [
        rng.permutation(TOKENS)[:count] for count in (1, 7, INVARIANT_TOKENS, INVARIANT_TOKENS + 31)
    ]


def compute_outputs(
    given: dict[str, Any], rows: np.ndarray, columns: Any = None, **more: Any
) -> dict[str, np.ndarray]:
    """What a batch's tokens get: outputs and dhidden, of per-token losses and of a sum."""

    # Compiled, as op by op XLA divides by a temperature, and not where it is a constant.
    @jax.jit
    def of(x: Any, w: Any, y: Any, g: Any, columns: Any) -> dict[str, Any]:
        known = {**more, "columns": columns, "return_lse": True}
        outputs, vjp = jax.vjp(lambda x: run(x, w, y, **known), x)
        given = jnp.broadcast_to(g[:, None], (len(g), 3))
        others = [given if one.ndim > 1 else g for one in outputs[3:]]
        dhidden = vjp((g, -g, 0.5 * g, *others))[0]
        weighted = partial(linear_cross_entropy, reduction="sum", weights=g, batch_invariant=True)
        of_sum = jax.grad(lambda x: weighted(x, w, y))(x)
        loss, logps, lse, *more_of_it = outputs
        found = {"loss": loss, "logps": logps, "lse": lse, "dhidden": dhidden, "of sum": of_sum}
        return found | {f"more {index}": one for index, one in enumerate(more_of_it)}

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
    whole = compute_outputs(arrays, every)
    for rows in batches(rng):
        assert_alike(whole, compute_outputs(arrays, rows), rows)
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
    columns = rng.integers(0, len(arrays["weight"]), (TOKENS, 3))
    columns[::3, 2] = columns[::3, 0]  # more than one gradient for it
    columns = jnp.asarray(columns, jnp.int32)
    every = np.arange(TOKENS)
    more = {"return_entropy": True, "temperature": 0.8}
    whole = compute_outputs(arrays, every, columns, **more)
    assert len(whole) == 7
    for rows in batches(rng)[1:3]:
        assert_alike(whole, compute_outputs(arrays, rows, columns, **more), rows)


def test_sums_of_microbatches(rng: np.random.Generator, arrays: dict[str, Any]) -> None:
    x, w, y = arrays["hidden"], arrays["weight"], arrays["labels"]

    @jax.jit
    def gradients(x: Any, y: Any) -> Any:
        sums = jnp.zeros(w.shape, jnp.float32)
        given = {"dweight_sums": sums, "reduction": "sum", "batch_invariant": True}
        return linear_cross_entropy_value_and_grad(x, w, y, **given)[1]

    def dhidden(rows: Any) -> np.ndarray:
        return np.asarray(gradients(x[rows], y[rows])[0])

    whole = dhidden(np.arange(TOKENS))
    rows = batches(rng)[1]
    assert dhidden(rows).tobytes() == whole[rows].tobytes()


@pytest.mark.devices(4)
@pytest.mark.slow
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


def equations(jaxpr: Any) -> Iterator[tuple[Any, Any]]:
    """Returns all of a program's equations, each with the block that it stands in."""
    for equation in jaxpr.eqns:
        yield jaxpr, equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=callable):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


@pytest.mark.parametrize("tokens", [7, TOKENS])
def test_products_stand_alone(tokens: int) -> None:
    """XLA's GPU compiler makes others of products that it fuses with what stands around them."""
    x, w, y = jnp.ones((tokens, 16)), jnp.ones((40, 16)), jnp.zeros(tokens, jnp.int32)

    def known(x: Any, w: Any) -> Any:
        outputs = run(x, w, y, return_entropy=True, columns=y[:, None])
        return sum(one.sum() for one in outputs)

    def mean(x: Any, w: Any) -> Any:
        return linear_cross_entropy(x, w, y, batch_invariant=True)

    for function, least in ((known, 3), (mean, 2)):
        program = jax.make_jaxpr(jax.grad(function, (0, 1)))(x, w)
        found = 0
        of_tokens = 0
        for block, product in equations(program.jaxpr):
            if product.primitive.name != "dot_general":
                continue
            found += 1
            barriers = [one for one in block.eqns if one.primitive.name == "optimization_barrier"]
            before = {id(var) for one in barriers for var in one.outvars}
            after = [one for one in block.eqns if product.outvars[0] in [*one.invars]]
            assert all(id(var) in before for var in product.invars)
            # But for the weight's gradient, which is a sum over tokens.
            is_of_tokens = product.outvars[0].aval.shape[0] == INVARIANT_TOKENS
            assert not is_of_tokens or (len(after) == 1 and after[0] in barriers)
            of_tokens += is_of_tokens
        assert found > of_tokens >= least


@pytest.mark.parametrize("vocab", [RAGGED, WHOLE])
def test_rows_that_begin_anywhere_have_no_kernels_on_gpus(vocab: int) -> None:
    x, w, y = jnp.ones((3, 8)), jnp.ones((vocab, 8)), jnp.zeros(3, jnp.int32)
    more = {"implementation": "custom_call", "batch_invariant": True, "return_entropy": True}
    f = jax.jit(jax.grad(lambda x: linear_cross_entropy(x, w, y, **more)[0]))

    def calls_kernels(platform: str) -> bool:
        program = f.trace(x).lower(lowering_platforms=(platform,)).as_text()
        return "xentile_cross_entropy" in program

    assert calls_kernels("cpu")
    if vocab == RAGGED:
        assert not calls_kernels("cuda")
    elif "cuda" in library.require().platforms_of("xentile_cross_entropy_forward"):
        assert calls_kernels("cuda")
    else:
        with pytest.raises(library.LibraryError, match="no kernel for platform cuda"):
            calls_kernels("cuda")


@pytest.mark.parametrize(
    "given", [{}, {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 5.0, "temperature": 0.7}]
)
@pytest.mark.slow
def test_rows_by_xla(rng: np.random.Generator, given: dict[str, Any]) -> None:
    """What takes the place of kernels does as they do."""
    every = {"label_smoothing": 0.0, "z_loss": 0.0, "softcap": None, **given}
    tile = {"block_size": None, "time_block": None}
    options = check_options(
        ignore_index=-100, every_token=True, donate_logits=False, **every, **tile
    )
    z = jnp.asarray(rng.normal(0, 3, (6, RAGGED)), jnp.float32)
    y = jnp.asarray([5, -100, 330, 0, RAGGED, 7], jnp.int32)
    g, h, k = jnp.asarray(rng.normal(size=(3, 6)), jnp.float32)
    outputs = calls.forward(options, z, y)
    given_back = (*outputs[2:], g, h, k)
    pairs = [
        (outputs[:3], reference.forward(options, z, y)[:3]),
        (
            calls.backward(options, z, y, outputs[2:], (g, h, k)),
            reference.backward(options, z, y, *given_back)[0],
        ),
    ]
    loss, lse, _, dlogits = calls.fused(options, True, z, y, g)
    by_xla = reference.fused(options, z, y, g)
    pairs.append(((loss, lse, dlogits), (by_xla[0], by_xla[1], by_xla[3])))
    for kernels, xla in pairs:
        for one, other in zip(jax.tree.leaves(kernels), jax.tree.leaves(xla), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_what_explain_says() -> None:
    hidden, weight = (jax.ShapeDtypeStruct((n, 64), jnp.bfloat16) for n in (5, 1000))
    plan = explain(hidden, weight, batch_invariant=True)
    assert plan.tokens == INVARIANT_TOKENS and "the last chunk padded" in str(plan)
    assert "on GPUs rows of logits by XLA" in str(plan)
    aligned = jax.ShapeDtypeStruct((1024, 64), jnp.bfloat16)
    assert "on GPUs" not in str(explain(hidden, aligned, batch_invariant=True))
    with pytest.raises(ValueError, match="max_scratch_bytes is 1000; batch_invariant takes chunks"):
        explain(hidden, weight, batch_invariant=True, max_scratch_bytes=1000)


def test_the_dense_program_has_no_such_thing() -> None:
    given = jnp.ones((3, 4)), jnp.ones((5, 4)), jnp.zeros(3, jnp.int32)
    with pytest.raises(ValueError, match="'reference', whose products have as many rows"):
        linear_cross_entropy(*given, batch_invariant=True, implementation="reference")
