"""What the tiles, row alignments and schedules of a kernel could get wrong, on either platform."""

import itertools
import json
import os
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import Oracle, assert_gradient, assert_tokens
from placement import PLATFORM
from test_transformations import same_bits
from test_values import check, problem

from pallas_bridge import cross_entropy, cross_entropy_per_token

pytestmark = pytest.mark.numbers

DTYPES = ["float32", "bfloat16", "float16"]
BOTH = {"smoothing": 0.1, "z_loss": 1e-3, "softcap": 30.0}


def fused(x: jax.Array, y: jax.Array, **options: Any) -> tuple[jax.Array, jax.Array]:
    """Loss and gradient of the fused schedule, or op by op of the recomputing one in f16."""
    return jax.value_and_grad(partial(cross_entropy, **options))(x, y)


def recompute(x: jax.Array, y: jax.Array, c: jax.Array, **options: Any) -> Any:
    """Outputs and gradient of the recomputing schedule, for cotangents [3, T]."""
    f = partial(cross_entropy_per_token, return_lse=True, **options)
    outputs, vjp = jax.vjp(lambda x: f(x, y), x)
    return *outputs, *vjp(tuple(c))


@pytest.mark.parametrize(
    "tile", [(1, 1), (3, 2), (37, 3), (129, 5), (1000, 7), (4097, 2), (1 << 20, 1 << 10)], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_odd_tiles(rng: np.random.Generator, dtype: str, tile: tuple[int, int]) -> None:
    block_size, time_block = tile
    check(rng, *problem(rng, dtype, 13, 2053), block_size=block_size, time_block=time_block)


@pytest.mark.parametrize("extra", range(9))
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_start_anywhere(rng: np.random.Generator, dtype: str, extra: int) -> None:
    check(rng, *problem(rng, dtype, 11, 4096 + extra))


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("vocab", [1, 5, 8191, 32000, 50257, 128256, 151643, 262144, 300001])
@pytest.mark.parametrize("dtype", DTYPES)
def test_few_tokens_of_any_vocabulary(
    rng: np.random.Generator, dtype: str, vocab: int, tokens: int
) -> None:
    check(rng, *problem(rng, dtype, tokens, vocab))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("vocab", [32000, 50257, 151643])
def test_the_share_of_equal_entries(rng: np.random.Generator, dtype: str, vocab: int) -> None:
    logits, labels = problem(rng, dtype, 48, vocab)
    expected = Oracle(np.asarray(logits), np.asarray(labels))
    factors = expected.factors("sum")
    _, gradient = jax.jit(partial(fused, reduction="sum"))(logits, labels)
    assert_gradient(gradient, expected.gradient(factors), factors)
    c = rng.normal(size=(3, 48)).astype(np.float32)
    *_, gradient = jax.jit(recompute)(logits, labels, c)
    assert_gradient(gradient, expected.gradient(*c), np.abs(c).max(0))


@pytest.mark.parametrize(
    "chosen",
    [c for n in range(4) for c in itertools.combinations(("smoothing", "z_loss", "softcap"), n)],
    ids=lambda names: "+".join(names) or "none",
)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("labels_dtype", ["int32", "int64"])
def test_every_combination_of_options(
    rng: np.random.Generator, chosen: tuple[str, ...], dtype: str, labels_dtype: str
) -> None:
    names = {"smoothing": "label_smoothing"}
    options: dict[str, Any] = {names.get(name, name): BOTH[name] for name in chosen}
    with jax.enable_x64(True):
        logits, labels = problem(rng, dtype, 9, 3001)
        labels = labels.astype(labels_dtype)
        check(rng, logits, labels, ignore_index=-100, **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_labels_of_either_width_give_the_same_bits(rng: np.random.Generator, dtype: str) -> None:
    with jax.enable_x64(True):
        logits, labels = problem(rng, dtype, 17, 5003)
        narrow, wide = (jax.jit(fused)(logits, labels.astype(d)) for d in ("int32", "int64"))
        # The sum over tokens is XLA's, which may order it otherwise in another program.
        np.testing.assert_allclose(narrow[0], wide[0], rtol=1e-6)
        same_bits(narrow[1], wide[1])
        narrow, wide = (
            jax.jit(cross_entropy_per_token)(logits, labels.astype(d)) for d in ("int32", "int64")
        )
        for a, b in zip(narrow, wide, strict=True):
            same_bits(a, b)


@pytest.mark.parametrize("offset", [0.0, 1e4, -1e4, 640.0, -640.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_logits_of_every_dtype(rng: np.random.Generator, dtype: str, offset: float) -> None:
    logits, labels = problem(rng, "float32", 12, 5003)
    check(rng, (logits + offset).astype(dtype), labels)
    spread = jnp.where(jnp.asarray(rng.random(logits.shape) < 0.5), 640, -640).astype(dtype)
    check(rng, spread, labels)


@pytest.mark.parametrize("vocab", [7, 50257, 151643])
@pytest.mark.parametrize("dtype", DTYPES)
def test_special_tokens_of_a_large_vocabulary(
    rng: np.random.Generator, dtype: str, vocab: int
) -> None:
    logits, _ = problem(rng, dtype, 16, vocab)
    x, y = np.array(logits), rng.integers(0, vocab, 16)
    x[0, vocab // 2], x[1, -1], x[2, 0] = np.nan, np.nan, np.inf
    x[3] = -np.inf
    x[4, : vocab // 2], y[4] = -np.inf, vocab - 1
    x[5, 1:], y[5] = -np.inf, 0
    x[6, y[6]] = -np.inf
    y[7], y[8], y[9], y[10], y[11] = vocab, -1, 2**31 - 1, -(2**31), vocab + 10**6
    y[12] = -100
    y[13], x[13] = -100, np.nan
    check(rng, jnp.asarray(x), jnp.asarray(y, jnp.int32))


@pytest.mark.parametrize("ignored", ["all", "one", "all but one"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_ignored_tokens(rng: np.random.Generator, dtype: str, ignored: str) -> None:
    logits, _ = problem(rng, dtype, 6, 50257)
    labels = rng.integers(0, 50257, 6)
    chosen = {"all": slice(None), "one": slice(2, 3), "all but one": slice(1, None)}[ignored]
    labels[chosen] = -100
    check(rng, logits, jnp.asarray(labels, jnp.int32))
    value, gradient = jax.jit(fused)(logits, jnp.asarray(labels, jnp.int32))
    assert np.isfinite(value) and not np.asarray(gradient, np.float32)[chosen].any()


@pytest.mark.parametrize("vocab", [129, 50257, 151643])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("cotangent", [1.0, -0.75, 0.0])
def test_in_place_and_apart_give_the_same_bits(
    rng: np.random.Generator, reduction: Any, dtype: str, vocab: int, cotangent: float
) -> None:
    logits, labels = problem(rng, dtype, 10, vocab)

    def run(x: jax.Array, c: jax.Array, donate: bool) -> Any:
        def f(x: jax.Array) -> jax.Array:
            options: dict[str, Any] = {"donate_logits": donate, "z_loss": 1e-3}
            return cross_entropy(x, labels, reduction=reduction, **options).sum()

        value, vjp = jax.vjp(f, x)
        return value, *vjp(c)

    c = jnp.float32(cotangent)
    apart = jax.jit(partial(run, donate=False))(logits, c)
    in_place = jax.jit(partial(run, donate=True), donate_argnums=0)(jnp.array(logits), c)
    for a, b in zip(apart, in_place, strict=True):
        same_bits(a, b)


@pytest.mark.parametrize("vocab", [1001, 50257, 151643])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_from_run_to_run(rng: np.random.Generator, dtype: str, vocab: int) -> None:
    logits, labels = problem(rng, dtype, 40, vocab)
    c = jnp.asarray(rng.normal(size=(3, 40)), jnp.float32)
    one, other = jax.jit(fused), jax.jit(recompute)
    first = [*one(logits, labels), *other(logits, labels, c)]
    for _ in range(20 if PLATFORM == "cuda" else 3):
        for a, b in zip(first, [*one(logits, labels), *other(logits, labels, c)], strict=True):
            same_bits(a, b)
    # In another program, beside other work, and within a loop.
    eager = [*fused(logits, labels), *recompute(logits, labels, c)]

    # Labels are an argument: XLA folds what it computes of constants, by the host's division.
    @jax.jit
    def looped(x: jax.Array, y: jax.Array) -> Any:
        def step(_: Any, carry: Any) -> Any:
            return fused(x + 0 * carry[0].astype(x.dtype), y)

        return jax.lax.fori_loop(0, 3, step, fused(x, y))

    @jax.jit
    def scanned(x: jax.Array) -> Any:
        return jax.lax.scan(lambda _, x: (None, recompute(x, labels, c)), None, jnp.stack([x] * 3))

    for a, b in zip(first[2:], eager[2:], strict=True):
        same_bits(a, b)
    # Op by op nothing tells f16's fused pass the factor; the pair that recomputes rounds elsewhere.
    if PLATFORM == "cpu" or dtype != "float16":
        same_bits(first[1], eager[1])
    same_bits(looped(logits, labels)[1], first[1])
    for a, b in zip(scanned(logits)[1], first[2:], strict=True):
        for each in np.asarray(a):
            same_bits(each, b)


@pytest.mark.only("cuda", "a CPU has no streams")
def test_the_same_bits_on_another_stream(rng: np.random.Generator) -> None:
    from jax.experimental import compute_on

    logits, labels = problem(rng, "bfloat16", 64, 50257)
    factors = jnp.asarray(rng.normal(size=64), jnp.float32)

    # One call alone: XLA puts no program of several on a stream of its own.
    def kernel(x: jax.Array, y: jax.Array, g: jax.Array) -> Any:
        per_token = jax.ShapeDtypeStruct(y.shape, jnp.float32)
        call = jax.ffi.ffi_call("xentile_cross_entropy_fused", [per_token] * 3 + [x])
        zero = np.float64(0)
        options = {"ignore_index": np.int64(-100), "label_smoothing": zero, "z_loss": zero}
        return call(x, y, g, every_token=np.bool_(True), **options)

    # Until JAX 0.11 the decorator had this name, and the other was a context.
    on = getattr(compute_on, "compute_on2", compute_on.compute_on)
    place = {"compute_type": "gpu_stream:1", "out_memory_spaces": jax.memory.Space.Device}
    aside = on(kernel, **place)

    @jax.jit
    def beside(x: jax.Array, y: jax.Array, g: jax.Array) -> Any:
        return aside(x, y, g), kernel(x * 2, y, g), x @ x.T

    compiled = beside.lower(logits, labels, factors).compile()
    assert '_xla_stream_annotation="1"' in compiled.as_text()
    expected = jax.jit(kernel)(logits, labels, factors)
    doubled = jax.jit(kernel)(logits * 2, labels, factors)
    for _ in range(5):
        here, there, _ = compiled(logits, labels, factors)
        for a, b in zip([*here, *there], [*expected, *doubled], strict=True):
            same_bits(a, b)


COMMAND_BUFFERS = """
import hashlib, json, sys
import jax, jax.numpy as jnp
from pallas_bridge import cross_entropy, cross_entropy_per_token, linear_cross_entropy

y = jax.random.randint(jax.random.key(1), (64,), 0, 50257).at[::5].set(-100)
x = (3 * jax.random.normal(jax.random.key(0), (64, 50257))).astype(jnp.bfloat16)
hidden = jax.random.normal(jax.random.key(2), (64, 128)).astype(jnp.bfloat16)
weight = (jax.random.normal(jax.random.key(3), (50257, 128)) / 6).astype(jnp.bfloat16)
bias = jax.random.normal(jax.random.key(4), (50257,))

@jax.jit
def logits(x):
    def f(x):
        loss, logps = cross_entropy_per_token(x, y)
        return (loss - 0.1 * logps**2).sum()
    results = [jax.grad(f)(x)]
    for scale in (1, 2, 3):
        results.append(jax.grad(lambda x: scale * cross_entropy(x, y))(x))
    results.append(jax.lax.scan(lambda c, s: (c, jax.grad(f)(x * s)), 0, jnp.arange(3.0)
        .astype(x.dtype))[1])
    results.append(jax.lax.fori_loop(0, 3, lambda _, x: x - jax.grad(f)(x), x))
    return results

@jax.jit
def linear(hidden):
    def f(*given):
        return linear_cross_entropy(*given, y)
    results = [f(hidden, weight), *jax.grad(f, (0, 1))(hidden, weight)]
    for scale in (2, 3):
        results += jax.grad(lambda *given: scale * f(*given), (0, 1))(hidden, weight)
    results += jax.grad(lambda *given: linear_cross_entropy(*given[:2], y, bias=given[2]),
        (0, 1, 2))(hidden, weight, bias)
    # Of an untaken branch nothing has run when it is recorded.
    def taken(hidden):
        return jax.grad(f)(hidden, weight[:5003])
    results.append(jax.lax.cond(hidden[0, 0] > 100, taken, lambda x: x, hidden))
    results.append(jax.lax.cond(hidden[0, 0] < 100, taken, lambda x: x, hidden))
    results.append(jax.lax.fori_loop(0, 3, lambda _, x: x - jax.grad(f)(x, weight), hidden))
    return results

many, given = (linear, hidden) if sys.argv[1] == "linear" else (logits, x)
digests = []
for _ in range(6):
    results = jax.block_until_ready(many(given))
    digests.append([hashlib.sha256(jax.device_get(r).tobytes()).hexdigest() for r in results])
    # Elsewhere in memory, so that a graph has to be brought up to date.
    given = given + 0
assert all(d == digests[0] for d in digests), "other bits in another run"
print(json.dumps(digests[0]))
"""


@pytest.mark.only("cuda", "command buffers are CUDA graphs")
@pytest.mark.parametrize("losses_of", ["logits", "linear"])
def test_the_same_bits_under_command_buffers(losses_of: str, tmp_path: Path) -> None:
    outcomes = []
    # Loops and branches within graphs, too, where the version can.
    everything = "+CUSTOM_CALL,+CUBLAS,+CUBLASLT,+WHILE,+CONDITIONAL"
    for name, flags in (
        ("without", "--xla_gpu_enable_command_buffer="),
        ("with", f"--xla_gpu_enable_command_buffer={everything} --xla_gpu_graph_min_graph_size=1"),
        ("default", ""),
    ):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(COMMAND_BUFFERS), losses_of],
            env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cuda"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{name}: {done.stderr[-4000:]}"
        outcomes.append(json.loads(done.stdout.splitlines()[-1]))
    assert outcomes[0] == outcomes[1] == outcomes[2]


@pytest.mark.only("cuda", "it takes as many GiB as a machine has")
@pytest.mark.parametrize("tokens", [16384 + 3, 28400])
def test_more_elements_than_32_bits_count(rng: np.random.Generator, tokens: int) -> None:
    """T * V beyond 2^31 and 2^32, in bf16; rows of both ends and some between are compared."""
    vocab = 151643
    base = jnp.asarray(rng.normal(0, 2, (256, vocab)), jnp.bfloat16)
    shift = jnp.asarray(rng.normal(size=tokens), jnp.bfloat16)

    @jax.jit
    def make(base: jax.Array) -> jax.Array:
        return base[jnp.arange(tokens) % 256] + shift[:, None]

    logits = make(base)
    y = rng.integers(0, vocab, tokens)
    y[rng.random(tokens) < 0.1] = -100
    labels = jnp.asarray(y, jnp.int32)
    c = jnp.asarray(rng.normal(size=(3, tokens)), jnp.float32)
    boundary = [2**31 // vocab, 2**32 // vocab, tokens - 1, 0]
    rows = np.unique([r for b in boundary for r in (b - 1, b, b + 1) if 0 <= r < tokens])
    rows = np.union1d(rows, rng.integers(0, tokens, 20))
    expected = Oracle(np.asarray(logits[rows]), y[rows])
    v = expected.__dict__
    _, gradient = jax.jit(partial(fused, reduction="sum"))(logits, labels)
    factors = expected.factors("sum")
    assert_gradient(gradient[rows], expected.gradient(factors), factors)
    # Every other row is looked at on the device: rows of a gradient of softmax sum to 0.
    sums = jax.jit(lambda g: jnp.abs(g.astype(jnp.float32).sum(-1)).max())(gradient)
    assert float(sums) < 0.05
    del gradient
    *outputs, gradient = jax.jit(recompute)(logits, labels, c)
    for name, actual in zip(("loss", "logps", "lse"), outputs, strict=True):
        assert_tokens(name, np.asarray(actual)[rows], v[name], v["size"])
    given = np.asarray(c)[:, rows]
    assert_gradient(gradient[rows], expected.gradient(*given), np.abs(given).max(0))
    del gradient
    f = partial(fused, reduction="sum", donate_logits=True)
    _, gradient = jax.jit(f, donate_argnums=0)(logits, labels)
    assert_gradient(gradient[rows], expected.gradient(factors), factors)
