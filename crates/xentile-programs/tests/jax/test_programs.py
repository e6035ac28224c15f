"""Every program through jaxlib: parsed, verified, compiled, run, and held against pallas_bridge.

pytest crates/xentile-programs/tests/jax, in a Python that has pallas_bridge
"""

# ruff: noqa: ANN401 (arrays, keys and fixtures are whatever JAX and pytest take)

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.mlir import ir
from jax.interpreters import mlir
from jaxlib import _jax, xla_client

from pallas_bridge import cross_entropy, cross_entropy_per_token

ROOT = Path(__file__).parents[4]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 20.0, "ignore_index": 3},
    "tile": {"block_size": 33, "time_block": 2},
}


@pytest.fixture(scope="module")
def programs() -> Iterator[Any]:
    # Of the workspace, whose features other tests were built with: alone it would have others.
    build = ["cargo", "build", "--workspace", "--example", "programs", "--message-format", "json"]
    build += ["--profile", os.environ.get("XENTILE_TEST_PROFILE", "dev")]
    lines = subprocess.run(build, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    made = [one["executable"] for one in map(json.loads, lines.splitlines()) if "executable" in one]
    (binary,) = filter(None, made)

    def text(*arguments: Any, **keys: Any) -> str:
        words = [*map(str, arguments), *(f"{key}={value}" for key, value in keys.items())]
        printed = subprocess.run([binary, *words], stdout=subprocess.PIPE, text=True, check=True)
        return printed.stdout

    yield text


def run(text: str, *arguments: Any) -> list[np.ndarray]:
    """Parses, verifies, compiles and runs a module on the CPU."""
    with mlir.make_ir_context():
        module = ir.Module.parse(text)
        assert module.operation.verify()
        # What was written is what was read.
        assert ir.Module.parse(str(module)).operation.verify()
    client = jax.devices("cpu")[0].client
    devices = _jax.DeviceList(tuple(client.devices()[:1]))
    loaded = client.compile_and_load(text, devices, xla_client.CompileOptions())
    buffers = [jax.device_put(argument) for argument in arguments]
    shards = loaded.execute_sharded(buffers)
    return [np.asarray(arrays[0]) for arrays in shards.disassemble_into_single_device_arrays()]


def problem(rng: np.random.Generator, dtype: str, tokens: int, vocab: int) -> tuple[Any, Any]:
    logits = jnp.asarray(rng.normal(0, 3, (tokens, vocab)), dtype)
    labels = rng.integers(0, vocab, tokens).astype(np.int32)
    labels[::5] = -100
    labels[2] = vocab
    return logits.at[1, ::3].set(-jnp.inf).at[3, 0].set(jnp.nan), labels


def close(actual: Any, expected: Any, dtype: str) -> None:
    tolerance = {"float32": 2e-5, "bfloat16": 2**-7, "float16": 2**-10}[dtype]
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=1e-6)


NAMES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


@pytest.mark.parametrize("implementation", ["dense", "kernel"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", NAMES)
def test_per_token(programs: Any, dtype: str, options: str, implementation: str) -> None:
    rng = np.random.default_rng()
    logits, labels = problem(rng, dtype, 12, 101)
    keys = OPTIONS[options]
    f = lambda x: cross_entropy_per_token(x, labels, return_lse=True, **keys)  # noqa: E731
    expected, vjp = jax.vjp(f, logits)
    text = programs("forward", implementation, 12, 101, NAMES[dtype], **keys)
    for actual, wanted in zip(run(text, logits, labels), expected, strict=True):
        close(actual, wanted, "float32")
    cotangents = rng.normal(size=(3, 12)).astype(np.float32)
    cotangents[:, 3] = 0
    text = programs("forward_and_backward", implementation, 12, 101, NAMES[dtype], **keys)
    *outputs, dlogits = run(text, logits, labels, *cotangents)
    for actual, wanted in zip(outputs, expected, strict=True):
        close(actual, wanted, "float32")
    close(dlogits, vjp(tuple(cotangents))[0], dtype)
    if implementation == "kernel":
        assert dlogits.tobytes() == np.asarray(vjp(tuple(cotangents))[0]).tobytes()


@pytest.mark.parametrize("implementation", ["dense", "kernel"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reduced(
    programs: Any, dtype: str, weighted: bool, reduction: Any, implementation: str
) -> None:
    rng = np.random.default_rng()
    logits, labels = problem(rng, dtype, 12, 101)
    labels[2] = 0
    weights = rng.uniform(0.5, 2, 12).astype(np.float32)
    weights[3] = 0
    more = [weights] if weighted else []
    logits = logits if weighted else logits.at[3, 0].set(1)
    f = jax.jit(
        lambda x: cross_entropy(
            x, labels, reduction=reduction, weights=weights if weighted else None
        )
    )
    keys = {"weights": "true"} if weighted else {}
    text = programs(reduction, implementation, 12, 101, NAMES[dtype], **keys)
    value, dlogits = run(text, logits, labels, *more)
    expected, vjp = jax.vjp(f, logits)
    close(value, expected, "float32")
    close(dlogits, vjp(jnp.float32(1))[0], dtype)
    text = programs(reduction, implementation, 12, 101, NAMES[dtype], cotangent="true", **keys)
    _, dlogits = run(text, logits, labels, *more, np.float32(0.3))
    close(dlogits, vjp(jnp.float32(0.3))[0], dtype)


@pytest.mark.parametrize("implementation", ["dense", "kernel"])
def test_labels_of_64_bits_and_no_token(programs: Any, implementation: str) -> None:
    rng = np.random.default_rng()
    with jax.enable_x64(True):
        logits = rng.normal(size=(4, 30)).astype(np.float32)
        labels = np.array([3, 2**40, -1, 29])
        keys = {"labels": "i64", "ignore_index": 2**40}
        loss, logps, lse = run(
            programs("forward", implementation, 4, 30, "f32", **keys), logits, labels
        )
        assert loss[1] == logps[1] == 0 and np.isnan(loss[2]) and np.isfinite(lse).all()
        empty = programs("mean", implementation, 0, 30, "f32")
        value, dlogits = run(empty, logits[:0], labels[:0].astype(np.int32))
        assert value == 0 and dlogits.shape == (0, 30)
