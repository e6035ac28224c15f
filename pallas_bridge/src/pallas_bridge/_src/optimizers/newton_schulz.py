"""The matrix of a Newton-Schulz step: XLA's program, or kernels for Hopper.

The kernels compute one triangle of X X' and of its square (crates/xentile-cuda/kernels/muon.cuh).
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import library
from . import call

Coefficients = tuple[float, float, float]

TARGET = "xentile_newton_schulz"
# Extents are multiples of it, as vectors of the copy engine ask for.
VECTOR = 8
# Smaller matrices do not fill the kernels' tiles.
LEAST_SIDE = 256
# Room for sums of splits of K: of two tiles in float32 for each of a GPU's 66 clusters.
SUMS_BYTES = 66 * 2 * 128 * 256 * 4


def product(left: str, right: str, result: str, a: Any, b: Any, dtype: Any) -> jax.Array:
    """Returns the GEMM of two batches of matrices, whose axes are named by letters."""
    return jnp.einsum(f"...{left},...{right}->...{result}", a, b, preferred_element_type=dtype)


def polynomial(x: jax.Array, coefficients: Coefficients) -> jax.Array:
    """Returns c0 I + c1 A + c2 A A [.., S, S] of matrices X [.., R, C], both bfloat16.

    A is X X', or X' X where R > C, so that S is the lesser extent.
    """
    if has_kernel(x.shape):
        return _by_platform(coefficients, x)
    return dense(coefficients, x)


def has_kernel(shape: tuple[Any, ...]) -> bool:
    """Returns whether programs for CUDA have kernels for matrices of a shape."""
    rows, columns = shape[-2:]
    if not (isinstance(rows, int) and isinstance(columns, int)):
        return False
    if rows % VECTOR or columns % VECTOR or min(rows, columns) < LEAST_SIDE:
        return False
    if not library.has("cuda", TARGET) or not call.is_single("cuda"):
        return False
    return getattr(jax.devices("cuda")[0], "compute_capability", None) == "9.0"


def dense(coefficients: Coefficients, x: jax.Array) -> jax.Array:
    """Returns `polynomial` by XLA's program."""
    c0, c1, c2 = coefficients
    letters = ("ki", "kj") if x.shape[-2] > x.shape[-1] else ("ik", "jk")
    gram = product(*letters, "ij", x, x, jnp.bfloat16)
    square = product("ik", "kj", "ij", gram, gram, jnp.float32)
    diagonal = np.float32(c0) * jnp.eye(gram.shape[-1], dtype=jnp.float32)
    # In bfloat16 the product would round c1.
    return (diagonal + c1 * gram.astype(jnp.float32) + c2 * square).astype(jnp.bfloat16)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _by_platform(coefficients: Coefficients, x: jax.Array) -> jax.Array:
    by_kernel, by_xla = (partial(one, coefficients) for one in (kernel, dense))
    found: jax.Array = jax.lax.platform_dependent(x, cuda=by_kernel, default=by_xla)
    return found


@_by_platform.defjvp
def _jvp(coefficients: Coefficients, primals: Any, tangents: Any) -> Any:
    """Differentiates XLA's program."""
    return jax.jvp(partial(dense, coefficients), primals, tangents)


def kernel(coefficients: Coefficients, x: jax.Array) -> jax.Array:
    """Returns `polynomial` by the kernels, with which it runs on CUDA alone."""
    *batch, rows, columns = x.shape
    side = min(rows, columns)
    square = jax.ShapeDtypeStruct((*batch, side, side), jnp.bfloat16)
    results = [square, square, jax.ShapeDtypeStruct((SUMS_BYTES,), jnp.uint8)]
    named = dict(zip(("c0", "c1", "c2"), map(np.float64, coefficients), strict=True))
    call_of = jax.ffi.ffi_call(TARGET, results, vmap_method="expand_dims")
    matrix, *_ = call_of(x, axis=np.int64(rows > columns), **named)
    return matrix
