"""Every promise of the crate, through the JAX that is installed, on the CPU.

pytest crates/xla-ffi/tests/jax
"""

# ruff: noqa: ANN401 (attributes and results are whatever JAX takes)

import ctypes
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

CRATE = Path(__file__).parents[2]
NAMES = (
    "increment reverse sum attributes names fail panic panic_in_task threads scratch "
    "device_scratch stream about"
)


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    # Of the workspace, whose features other tests were built with: alone it would have others.
    command = ["cargo", "build", "--workspace", "--example", "jax_handlers"]
    command += ["--profile", os.environ.get("XENTILE_TEST_PROFILE", "dev")]
    command += ["--message-format", "json"]
    lines = subprocess.run(command, cwd=CRATE, stdout=subprocess.PIPE, text=True, check=True).stdout
    for message in map(json.loads, lines.splitlines()):
        if message.get("target", {}).get("name") == "jax_handlers" and "filenames" in message:
            return ctypes.CDLL(message["filenames"][0])
    raise AssertionError("cargo named no library")


@pytest.fixture(scope="module", autouse=True)
def targets(library: ctypes.CDLL) -> None:
    for name in NAMES.split():
        capsule = jax.ffi.pycapsule(getattr(library, f"test_{name}"))
        jax.ffi.register_ffi_target(f"test_{name}", capsule, platform="cpu")
    stages = {
        stage: jax.ffi.pycapsule(getattr(library, f"test_{stage}"))
        for stage in ("instantiate", "prepare", "initialize", "execute")
    }
    jax.ffi.register_ffi_target("test_staged", stages, platform="cpu")


def call(target: str, /, *arguments: jax.Array, result: Any, **attributes: Any) -> Any:
    """The handler within a jitted program; `result` is (shape, dtype) or a list of those."""
    shapes = jax.tree.map(
        lambda r: jax.ShapeDtypeStruct(*r), result, is_leaf=lambda r: isinstance(r, tuple)
    )

    @jax.jit
    def program(*arguments: jax.Array) -> Any:
        function = jax.ffi.ffi_call(f"test_{target}", shapes, vmap_method="sequential")
        return function(*arguments, **attributes)

    return jax.block_until_ready(program(*arguments))


FLOATS = ((3,), jnp.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool"])
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3, 4), (4, 0, 2)])
def test_buffers_of_every_shape(dtype: str, shape: tuple[int, ...]) -> None:
    x = jnp.asarray(np.random.default_rng().integers(0, 2, shape)).astype(dtype)
    y = call("reverse", x, result=(shape, x.dtype))
    np.testing.assert_array_equal(y, np.flip(x.reshape(-1)).reshape(shape))


def test_any_number_of_arguments() -> None:
    for count in (0, 1, 7):
        xs = [jnp.full(4, float(i)) for i in range(count)]
        y = call("sum", *xs, result=((4,), jnp.float32))
        np.testing.assert_array_equal(y, np.full(4, sum(range(count))))


@pytest.mark.parametrize("donate", [False, True])
def test_aliasing(donate: bool) -> None:
    shapes = [jax.ShapeDtypeStruct((1000,), jnp.float32), jax.ShapeDtypeStruct((), jnp.bool_)]
    aliases = {0: 0} if donate else None

    def program(x: jax.Array) -> Any:
        return jax.ffi.ffi_call("test_increment", shapes, input_output_aliases=aliases)(x)

    x = jnp.arange(1000.0)
    expected = np.asarray(x) + 1
    y, in_place = jax.jit(program, donate_argnums=(0,) if donate else ())(x)
    np.testing.assert_array_equal(y, expected)
    assert bool(in_place) == donate


ATTRIBUTES = dict(
    flag=True,
    small=np.int32(-3),
    large=np.int64(2**40),
    real=np.float64(0.5),
    name="naïve",
    list=np.array([1, -2, 3], np.int64),
    nested={"inner": np.int64(7)},
)


def test_attributes() -> None:
    line = call("attributes", result=((100,), jnp.uint8), **ATTRIBUTES)
    text = bytes(np.asarray(line)).decode().rstrip()
    assert text == "true -3 1099511627776 0.5 naïve [1, -2, 3] 7 None"
    line = call("attributes", result=((100,), jnp.uint8), **ATTRIBUTES, absent=np.float32(2.5))
    assert bytes(np.asarray(line)).decode().rstrip().endswith(" Some(2.5)")
    empty = ATTRIBUTES | {"list": np.array([], np.int64), "name": ""}
    assert b" [] 7" in bytes(np.asarray(call("attributes", result=((100,), jnp.uint8), **empty)))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"small": np.int64(1)}, "attribute `small` is s64; it must be s32"),
        ({"small": "1"}, "attribute `small` is a string; it must be s32"),
        ({"flag": np.float32(1)}, "attribute `flag` is f32; it must be pred"),
        ({"name": np.int32(1)}, "attribute `name` is s32; it must be a string"),
        (
            {"list": np.array([1.0], np.float32)},
            "`list` is an array of f32; it must be an array of s64",
        ),
        ({"nested": {}}, "attribute `inner` is missing; the call has none"),
        ({"nested": "x"}, "attribute `nested` is a string; it must be a dictionary"),
        ({"absent": np.int32(1)}, "attribute `absent` is s32; it must be f32"),
        ({"other": np.int32(1)}, "attribute `other` is unknown; the handler takes `flag`, `small`"),
        ({"real": None}, "attribute `real` is missing; the call has `flag`, `large`"),
    ],
)
def test_wrong_attributes(change: dict[str, Any], reason: str) -> None:
    attributes = {k: v for k, v in (ATTRIBUTES | change).items() if v is not None}
    with pytest.raises(Exception, match="INVALID_ARGUMENT: .*" + re.escape(reason)):
        call("attributes", result=((100,), jnp.uint8), **attributes)


@pytest.mark.parametrize(
    ("name", "arguments", "result", "reason"),
    [
        (
            "sum",
            [(3,), (3, 1)],
            FLOATS,
            "argument 1 (`x`) has shape [3, 1], of rank 2; its rank must be 1",
        ),
        ("sum", [(3,)], ((3,), jnp.int32), "result 0 (`y`) has dtype s32; it must be f32"),
        ("reverse", [], FLOATS, "argument 0 (`x`) is missing: the call has 0"),
        ("reverse", [(3,), (3,)], FLOATS, "the call has 2 arguments; the handler takes 1"),
        ("reverse", [(3,)], [FLOATS, FLOATS], "the call has 2 results; the handler takes 1"),
    ],
)
def test_wrong_buffers(
    name: str, arguments: list[tuple[int, ...]], result: Any, reason: str
) -> None:
    with pytest.raises(Exception, match="INVALID_ARGUMENT: .*" + re.escape(reason)):
        call(name, *map(jnp.ones, arguments), result=result)


CODES = (
    "CANCELLED UNKNOWN INVALID_ARGUMENT DEADLINE_EXCEEDED NOT_FOUND ALREADY_EXISTS "
    "PERMISSION_DENIED RESOURCE_EXHAUSTED FAILED_PRECONDITION ABORTED OUT_OF_RANGE UNIMPLEMENTED "
    "INTERNAL UNAVAILABLE DATA_LOSS UNAUTHENTICATED"
)


@pytest.mark.parametrize("code", range(1, 17))
def test_errors(code: int) -> None:
    name = CODES.split()[code - 1]
    with pytest.raises(Exception, match=f"{name}: .*failing with {name} as asked, of \\[3\\]"):
        call("fail", result=FLOATS, code=np.int64(code))


def test_panics() -> None:
    with pytest.raises(Exception, match=r"INTERNAL: .*test_panic panicked: as asked, of \[3\]"):
        call("panic", result=FLOATS)
    with pytest.raises(Exception, match=r"INTERNAL: .*panicked: task 50 of \[3\]"):
        call("panic_in_task", result=FLOATS)
    np.testing.assert_array_equal(call("sum", jnp.ones(3), result=FLOATS), np.ones(3))


def test_thread_pool() -> None:
    with jax.enable_x64(True):
        for tasks in (0, 1, 2, 1000):
            seen, once, threads = call("threads", result=((3,), jnp.int64), tasks=np.int64(tasks))
            assert once == tasks
            assert min(tasks, 1) <= seen <= threads + 1


def test_scratch() -> None:
    x = jnp.arange(1000.0)
    np.testing.assert_array_equal(call("scratch", x, result=((1000,), jnp.float32)), 2 * x)


def test_what_the_cpu_lacks() -> None:
    # The runtime's own words; from which version on it gives a code is its affair.
    with jax.enable_x64(True):
        for name, result in ("stream", FLOATS), ("device_scratch", ((), jnp.int64)):
            with pytest.raises(Exception, match="GPU context is not available"):
                call(name, result=result)


def test_context() -> None:
    with jax.enable_x64(True):
        major, minor, ordinal = call("about", result=((3,), jnp.int64))
        assert (major, ordinal) == (0, 0)
        assert minor >= 1
        assert call("names", result=((), jnp.int64), a=np.int32(1), b="two") == 2


def test_stages() -> None:
    with jax.enable_x64(True):
        counts = call("staged", result=((4,), jnp.int64), limit=np.int64(1))
        # The CPU calls no other stage than the first and the last.
        assert counts[0] >= 1
        assert counts[3] >= 1
    with pytest.raises(Exception, match=r"OUT_OF_RANGE: .*limit is -1 in instantiate"):
        call("staged", result=((4,), jnp.int32), limit=np.int64(-1))


def test_example() -> None:
    subprocess.run([sys.executable, CRATE / "examples/axpy.py"], check=True)
