"""Builds examples/axpy.rs and calls it from JAX."""

import ctypes
import json
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

build = ["cargo", "build", "--release", "--example", "axpy", "--message-format", "json"]
messages = subprocess.check_output(build, text=True, cwd=Path(__file__).parent).splitlines()
(library,) = (
    m["filenames"][0]
    for m in map(json.loads, messages)
    if m.get("target", {}).get("name") == "axpy" and "filenames" in m
)

symbol = ctypes.CDLL(library).example_axpy
jax.ffi.register_ffi_target("example_axpy", jax.ffi.pycapsule(symbol), platform="cpu")


@jax.jit
def axpy(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns 2 * x + y."""
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    call = jax.ffi.ffi_call("example_axpy", shape, vmap_method="broadcast_all")
    return call(x, y, alpha=np.float32(2))


x, y = jnp.arange(100_000.0), jnp.ones(100_000)
np.testing.assert_allclose(axpy(x, y), 2 * x + y)
print(axpy(x, y))
