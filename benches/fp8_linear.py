"""`fp8_linear` with its gradients, beside the same product in bfloat16.

    python benches/fp8_linear.py [--json FILE] [--shapes MxDxN ...] [--seconds S]

x [M, D] and weight [D, N] of normal numbers, and a given dy: y, dx and dweight in one program each.
"bf16" is `x @ weight` and its gradients, "ours" `fp8_linear`, quantisation counted, "products" the
three products alone, of arrays that are in FP8 already. `error` is the norm of the difference of
y, dx and dweight from those of "bf16", relative to these.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import harness
import jax
import jax.numpy as jnp
from harness import Row

from pallas_bridge import fp8_linear

SHAPES = {
    "cpu": ("128x256x384",),
    "gpu": (
        "8192x4096x14336",
        "8192x14336x4096",
        "8192x4096x4096",
        "32768x2048x8192",
        "32768x896x4864",
    ),
}


def with_gradients(function: Callable[..., Any], x: Any, weight: Any, dy: Any) -> Any:
    """Returns y, dx and dweight."""
    y, transpose = jax.vjp(function, x, weight)
    return y, *transpose(dy)


def products(x: Any, weight: Any, dy: Any) -> Any:
    """Returns the three products of arrays that are in FP8 already, in the layouts of each."""

    def multiply(a: Any, b: Any) -> jax.Array:
        axes = (((1,), (1,)), ((), ()))
        fast = jax.lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32_FAST_ACCUM
        return jax.lax.dot_general(a, b, axes, fast, preferred_element_type=jnp.bfloat16)

    return multiply(x[0], weight[1]), multiply(dy[0], weight[0]), multiply(x[1], dy[1])


def relative(found: jax.Array, right: jax.Array) -> float:
    """Returns the norm of the difference, relative to that of `right`."""
    return float(jnp.linalg.norm(found.astype(jnp.float32) - right) / jnp.linalg.norm(right))


def measure(shape: str, seconds: float) -> Row:
    """Measures the programs in turns, and their temporary memory and errors."""
    rows, inner, columns = harness.extents(shape)
    sizes = ((rows, inner), (inner, columns), (rows, columns))
    keys = jax.random.split(jax.random.key(0), 3)
    arrays = [
        jax.random.normal(key, size, jnp.bfloat16) for key, size in zip(keys, sizes, strict=True)
    ]
    in_fp8 = [
        (values, values.T.copy())
        for values, dtype in zip(
            arrays, (jnp.float8_e4m3fn, jnp.float8_e4m3fn, jnp.float8_e5m2), strict=True
        )
        for values in [values.astype(dtype)]
    ]
    functions = {
        "bf16": partial(with_gradients, jnp.matmul),
        "ours": partial(with_gradients, fp8_linear),
        "products": products,
    }
    operands = {name: in_fp8 if name == "products" else arrays for name in functions}
    programs = {
        name: jax.jit(one).lower(*operands[name]).compile() for name, one in functions.items()
    }
    right = [array.astype(jnp.float32) for array in programs["bf16"](*arrays)]
    errors = [relative(*pair) for pair in zip(programs["ours"](*arrays), right, strict=True)]
    del right
    starts = {name: partial(one, *operands[name]) for name, one in programs.items()}
    found: Row = dict(harness.compared(starts, seconds, calls=1, baseline="bf16", ratio="relative"))
    memory = {name: one.memory_analysis().temp_size_in_bytes for name, one in programs.items()}
    counts = {name: one.as_text().count("cublas$lt$matmul$f8") for name, one in programs.items()}
    return found | {"temp_bytes": memory, "fp8_products": counts, "off": errors}


def main() -> int:
    """Measures, prints a table and writes JSON after every cell."""

    def texts(row: Row) -> list[str]:
        errors = [f"{error:.4f}" for error in row.get("off", ())] or [""] * 3
        counts = [str(row.get("fp8_products", {}).get(name, "")) for name in ("ours", "products")]
        ratios = harness.ratios_of(row, ("ours", "products"), "relative")
        return [row["shape"], harness.milliseconds_of(row, "bf16"), *ratios, *errors, *counts]

    heads = ["M x D x N", "bf16 ms", "ours / bf16", "products / bf16", "y off", "dx", "dweight"]
    heads += ["FP8 products", "of products"]
    return harness.measure_shapes(__doc__, SHAPES, measure, heads, texts)


if __name__ == "__main__":
    sys.exit(main())
