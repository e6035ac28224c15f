"""The TPU kernels in Pallas' TPU interpreter, against float64.

Races between copies and arithmetic are errors, and memory that nobody wrote is NaN.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from oracle import Oracle, assert_gradient, assert_tokens
from pallas_bridge._src import pallas
from pallas_bridge._src.compat import abstract_tpu
from pallas_bridge._src.cross_entropy import derivative, pallas_tpu, tpu_plan
from pallas_bridge._src.losses.aux_outputs import Request
from pallas_bridge._src.losses.options import check_options
from pallas_bridge._src.losses.vocab_shards import OverAxis
from pallas_bridge._src.pallas import TARGETS

from pallas_bridge import cross_entropy, cross_entropy_per_token

# Beside a GPU it would run there, launch by launch.
pytestmark = pytest.mark.only("cpu", "Pallas' interpreter")

OPTIONS = {
    "label_smoothing": 0.2,
    "z_loss": 1e-2,
    "softcap": 15.0,
    "temperature": 1.25,
    "ignore_index": 3,
}
CASES: dict[str, tuple[int, int, str, dict[str, Any]]] = {
    "one tile": (16, 128, "bfloat16", {}),
    "one tile, f32": (8, 128, "float32", {}),
    "many tiles": (32, 1024, "bfloat16", {"time_block": 16, "block_size": 256}),
    "many tiles, f32": (24, 512, "float32", {"time_block": 8, "block_size": 128}),
    "ragged": (37, 1031, "bfloat16", {"time_block": 16, "block_size": 256}),
    "ragged, f32": (21, 391, "float32", {"time_block": 8, "block_size": 128}),
    "one token": (1, 131, "bfloat16", {}),
    "one column": (5, 1, "float32", {}),
    "wider than straight-line code": (3, 9001, "float32", {"block_size": 8192}),
    "default tile": (70, 257, "bfloat16", {}),
    "all options": (19, 300, "float32", {**OPTIONS, "time_block": 8, "block_size": 128}),
    "smoothing": (18, 200, "bfloat16", {"label_smoothing": 0.1, "block_size": 128}),
    "z-loss": (18, 200, "bfloat16", {"z_loss": 1e-3, "block_size": 128}),
    "softcap": (18, 200, "float32", {"softcap": 30.0, "block_size": 128}),
    "temperature": (18, 200, "bfloat16", {"temperature": 0.7, "block_size": 128}),
}


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    monkeypatch.setattr(pallas, "interpret_params", params)
    yield
    pltpu.reset_tpu_interpret_mode_state()


def no_races() -> None:
    # From 0.12 on a race raises; before, it is noted.
    races = pytest.importorskip("jax._src.pallas.mosaic.interpret.interpret_pallas_call").races
    if races is not None:
        assert not races.races_found


def problem(
    rng: np.random.Generator, dtype: str, tokens: int, vocab: int
) -> tuple[jax.Array, jax.Array]:
    labels = rng.integers(0, vocab, tokens)
    labels[rng.random(tokens) < 0.2] = -100
    return jnp.asarray(rng.normal(0, 3, (tokens, vocab)), dtype), jnp.asarray(labels, jnp.int32)


def gradient_bound(expected: Oracle) -> np.ndarray:
    """What the gradient of a token may have for a cotangent of 1."""
    bound: np.ndarray = 1 + np.abs(2 * expected.z_loss * np.nan_to_num(expected.__dict__["lse"]))
    return bound


def assert_reduced(
    name: str, expected: Oracle, factors: np.ndarray, value: jax.Array, dlogits: jax.Array
) -> None:
    """A weighted sum of losses, and its gradient."""
    terms = np.where(factors == 0, 0, np.abs(factors) * expected.__dict__["size"]).sum()
    assert_tokens(name, value[None], np.array([expected.reduced(factors)]), terms + 1e-30)
    bound = np.abs(factors) * gradient_bound(expected)
    assert_gradient(dlogits, expected.gradient(factors), bound, expected.softcap)


def check(rng: np.random.Generator, logits: jax.Array, labels: jax.Array, **options: Any) -> None:
    """Per-token outputs and their gradient, and a weighted sum and its."""
    formula = {k: v for k, v in options.items() if k not in ("time_block", "block_size")}
    expected = Oracle(np.asarray(logits), np.asarray(labels), **formula)
    v = expected.__dict__
    keywords: Any = {"implementation": "pallas", "return_lse": True, **options}
    bound = gradient_bound(expected)
    cotangents = rng.normal(size=(3, len(labels))).astype(np.float32)
    weights = rng.uniform(0.5, 2, len(labels)).astype(np.float32)
    weights[rng.random(len(labels)) < 0.2] = 0

    @jax.jit
    def everything(x: jax.Array, weights: jax.Array, *cotangents: jax.Array) -> Any:
        outputs, vjp = jax.vjp(lambda x: cross_entropy_per_token(x, labels, **keywords), x)
        reduced = jax.value_and_grad(
            lambda x: cross_entropy(x, labels, reduction="sum", weights=weights, **keywords)[0]
        )
        return outputs, *vjp(cotangents), *reduced(x)

    (loss, logps, lse), again, value, dlogits = everything(logits, weights, *cotangents)
    for name, actual in (("loss", loss), ("logps", logps), ("lse", lse)):
        assert_tokens(name, actual, v[name], v["size"])
    assert_gradient(
        again, expected.gradient(*cotangents), np.abs(cotangents).max(0) * bound, expected.softcap
    )
    factors = expected.factors("sum", weights)
    assert_reduced("sum", expected, factors, value, dlogits)
    no_races()


# What every supported version is tried with.
EVERYWHERE = {"ragged", "all options"}
ELSEWHERE = (pytest.mark.newest, pytest.mark.nightly)
EDGES = [case if case in EVERYWHERE else pytest.param(case, marks=ELSEWHERE) for case in CASES]


@pytest.mark.parametrize("case", EDGES)
def test_every_edge(rng: np.random.Generator, case: str) -> None:
    tokens, vocab, dtype, options = CASES[case]
    check(rng, *problem(rng, dtype, tokens, vocab), **options)


# Tokens, the vocabulary, dtype, options and the tile where tokens are lanes.
ACROSS: dict[str, tuple[tuple[int, ...], int, str, dict[str, Any], tuple[int, int]]] = {
    "one tile": ((128,), 300, "bfloat16", {}, (128, 8192)),
    "many tiles": ((128,), 2100, "bfloat16", {}, (128, 1024)),
    "many tiles, f32": ((128,), 1100, "float32", {}, (128, 512)),
    "two registers of tokens": ((1, 256), 519, "float32", {}, (256, 512)),
    "sequences": ((2, 128), 1031, "bfloat16", {"softcap": 20.0}, (128, 1024)),
    "all options": ((128,), 519, "float32", OPTIONS, (128, 512)),
    "smoothing": ((128,), 200, "bfloat16", {"label_smoothing": 0.1}, (128, 8192)),
}


@pytest.mark.few(1)
@pytest.mark.newest
@pytest.mark.parametrize("case", ACROSS)
def test_logits_that_lie_transposed(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    leading, vocab, dtype, options, tile = ACROSS[case]
    monkeypatch.setattr(tpu_plan, "ACROSS_TILE", tile)
    tokens = int(np.prod(leading))
    logits, labels = problem(rng, dtype, tokens, vocab)
    if case in ("all options", "many tiles"):
        check(rng, logits, labels, **options)
    expected = Oracle(np.asarray(logits), np.asarray(labels), **options)
    factors = expected.factors("mean")

    def loss(x: jax.Array) -> jax.Array:
        return cross_entropy(x, labels.reshape(leading), implementation="pallas", **options)

    function = jax.jit(jax.value_and_grad(loss))
    operand = logits.reshape(*leading, vocab)
    assert f"[{tokens // leading[-1]},{vocab},{leading[-1]}]" in str(
        jax.make_jaxpr(function)(operand)
    ).replace(" ", "")
    value, dlogits = function(operand)
    assert_reduced("mean", expected, factors, value, dlogits.reshape(tokens, vocab))
    no_races()


@pytest.mark.few(0)
@pytest.mark.newest
@pytest.mark.parametrize("target", TARGETS)
def test_registers_of_every_generation(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    monkeypatch.setattr(pallas, "INTERPRETER", TARGETS[target])
    options = {"label_smoothing": 0.1, "time_block": 16, "block_size": 384}
    check(rng, *problem(rng, "bfloat16", 35, 1000), **options)


@pytest.mark.few(1)
@pytest.mark.parametrize("tokens", [12, 128], ids=["rows", "tokens are lanes"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_special_tokens(rng: np.random.Generator, dtype: str, tokens: int) -> None:
    logits, _ = problem(rng, dtype, tokens, 211)
    x, y = np.array(logits), rng.integers(1, 211, tokens).astype(np.int32)
    x[0, 5] = np.nan
    x[1, 7] = np.inf
    x[2] = -np.inf
    x[3, ::2], y[3] = -np.inf, 1
    x[4, 17], y[4] = -np.inf, 17
    y[5], y[6], y[7] = 211, -1, 2**31 - 1
    y[8], x[8, 3] = -100, np.nan
    y[9] = -100
    check(rng, jnp.asarray(x), jnp.asarray(y), block_size=128 if tokens == 12 else None)


@pytest.mark.few(1)
@pytest.mark.newest
@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_large_logits(rng: np.random.Generator, offset: float) -> None:
    logits, labels = problem(rng, "float32", 9, 300)
    check(rng, logits + offset, labels, block_size=128)


@pytest.mark.few(0)
@pytest.mark.newest
def test_rows_too_long_to_stay_are_read_twice(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = []
    plan = pallas_tpu.plan_tiles

    def limited(target: Any, *arguments: Any, **keywords: Any) -> Any:
        plans.append(None if keywords["reduces"] and keywords["writes"] else plan)
        return plans[-1] and plan(target, *arguments, **keywords)

    monkeypatch.setattr(pallas_tpu, "plan_tiles", limited)
    check(rng, *problem(rng, "float32", 10, 300), block_size=128)
    assert None in plans


@pytest.mark.few(0)
@pytest.mark.newest
def test_several_leading_axes(rng: np.random.Generator) -> None:
    logits, labels = problem(rng, "float32", 12, 150)
    whole = jax.jit(
        jax.grad(lambda x: cross_entropy(x, labels, reduction="sum", implementation="reference"))
    )(logits)
    f = jax.grad(lambda x, y: cross_entropy(x, y, reduction="sum", implementation="pallas"))
    parts = logits.reshape(3, 4, 150), labels.reshape(3, 4)
    np.testing.assert_allclose(jax.jit(f)(*parts), whole.reshape(3, 4, 150), rtol=1e-5, atol=1e-6)


def test_no_tokens() -> None:
    f = jax.value_and_grad(lambda x: cross_entropy(x, jnp.zeros(0, int), implementation="pallas"))
    value, dlogits = jax.jit(f)(jnp.zeros((0, 50)))
    assert value == 0 and dlogits.shape == (0, 50)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"time_block": 3}, "time_block is 3; on TPU, with logits of float32, it must be a multi"),
        ({"block_size": 37}, "block_size is 37;.* it must be a multiple of 128, such as 128"),
    ],
)
def test_tiles_that_are_not_registers(options: Any, message: str) -> None:
    f = jax.jit(lambda x: cross_entropy(x, jnp.zeros(8, int), implementation="pallas", **options))
    with pytest.raises(ValueError, match=message):
        f(jnp.zeros((8, 500)))


def test_tiles_that_do_not_fit() -> None:
    f = jax.jit(
        lambda x: cross_entropy(
            x, jnp.zeros(512, int), implementation="pallas", block_size=65536, time_block=256
        )
    )
    with pytest.raises(ValueError, match=r"MiB of VMEM.*the largest block_size is") as error:
        f.lower(jax.ShapeDtypeStruct((512, 151643), jnp.float32))
    largest = int(str(error.value).split()[-1])
    assert largest % 128 == 0
    for extent, fits in ((largest, True), (largest + 128, False)):
        keywords: Any = {"time_block": 256, "block_size": extent, "reduces": True, "writes": False}
        try:
            pallas_tpu.plan_tiles(pallas.ANY, 512, 151643, np.dtype(np.float32), **keywords)
        except ValueError:
            assert not fits
        else:
            assert fits


def test_half_precision_is_refused() -> None:
    f = jax.jit(lambda x: cross_entropy(x, jnp.zeros(4, int), implementation="pallas"))
    with pytest.raises(TypeError, match="float16; on TPU it must be bfloat16 or float32"):
        f(jnp.zeros((4, 50), jnp.float16))


def test_targets_are_those_of_jax() -> None:
    for kind, target in TARGETS.items():
        with jax.sharding.use_abstract_mesh(abstract_tpu(kind)):
            tpu = pltpu.get_tpu_info()
        assert target.vmem_bytes == tpu.vmem_capacity_bytes


def test_a_vocabulary_in_parts(rng: np.random.Generator) -> None:
    """Kernels take a part for a whole, and give what an exchange makes the whole of."""
    logits = rng.normal(size=(10, 4 * 200)).astype(np.float32)
    logits[:, 550:] = -np.inf  # the last part has no other
    labels = rng.integers(0, 550, 10).astype(np.int32)
    labels[2:5] = -100, 800, -3
    cotangents = rng.normal(size=(3, 10)).astype(np.float32)
    cotangents[:, 6] = 0
    given = {"z_loss": 1e-2, "label_smoothing": 0.0, "softcap": None, "ignore_index": -100}
    more = {"time_block": 8, "block_size": 128, "every_token": True, "donate_logits": False}
    options = dataclasses.replace(check_options(**given, **more), implementation="pallas")

    def of(z: jax.Array) -> Any:
        given = z.reshape(10, 4, 200), jnp.asarray(labels)
        return derivative.per_token(options, OverAxis(4), Request(), *given)[:3]

    @jax.jit
    def both(z: jax.Array, cotangents: Any) -> Any:
        outputs, vjp = jax.vjp(of, z)
        return outputs, vjp(cotangents)[0]

    outputs, gradient = both(logits, tuple(cotangents))
    expected = Oracle(logits, labels, z_loss=1e-2)
    for name, one in zip(("loss", "logps", "lse"), outputs, strict=True):
        np.testing.assert_allclose(one, expected.__dict__[name], rtol=1e-5, atol=1e-6)
    wanted = expected.gradient(*cotangents)
    bound = 1 + np.abs(2 * expected.z_loss * np.nan_to_num(expected.__dict__["lse"]))
    assert_gradient(gradient, wanted, np.abs(cotangents).max(0) * bound)
    # A part without the label has all the digits of p in the column that stands for it, too.
    firsts = [[0, 200, 400]] * 10
    has_label = labels[:, None] // 200 == np.arange(3)
    stands_in = (wanted[np.arange(10)[:, None], firsts] != 0) & ~has_label
    found = np.asarray(gradient, np.float64)[:, firsts[0]][stands_in]
    np.testing.assert_allclose(found, wanted[:, firsts[0]][stands_in], rtol=5e-6, atol=1e-8)
