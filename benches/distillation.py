"""`linear_kl_divergence`, loss and gradients: beside its four GEMMs, and plain JAX.

    python benches/distillation.py [--json FILE] [--shapes NxDxExV ...] [--seconds S]

N tokens, hidden sizes D of the student and E of the teacher, a vocabulary of V; bfloat16 of normal
inputs. "gemms" are the logits of both models and the student's two gradients, each written once in
bfloat16; "dense" is the program that XLA makes of the formula, with all logits in memory.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import harness
import jax
import jax.numpy as jnp
from harness import Row
from pallas_bridge.losses import linear_kl_divergence

SHAPES = {"cpu": ("128x64x64x2000",), "gpu": ("8192x2048x2048x128256", "8192x1024x4096x151936")}


def dense(hidden: Any, weight: Any, teacher_hidden: Any, teacher_weight: Any) -> jax.Array:
    """Returns the mean divergence, with all logits in memory."""

    def log_softmax(rows: jax.Array, head: jax.Array) -> jax.Array:
        logits = jnp.matmul(rows, head.T, preferred_element_type=jnp.float32)
        return jax.nn.log_softmax(logits)

    student, teacher = log_softmax(hidden, weight), log_softmax(teacher_hidden, teacher_weight)
    return (jnp.exp(teacher) * (teacher - student)).sum(-1).mean()


def gemms(hidden: Any, weight: Any, teacher_hidden: Any, teacher_weight: Any) -> Any:
    """Returns the results of the four products."""
    logits = hidden @ weight.T
    return logits, teacher_hidden @ teacher_weight.T, logits @ weight, logits.T @ hidden


def measure(shape: str, seconds: float) -> Row:
    """Measures the programs in turns, with the temporary memory of each."""
    tokens, width, teacher_width, vocab = harness.extents(shape)
    sizes = ((tokens, width), (vocab, width), (tokens, teacher_width), (vocab, teacher_width))
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = [
        jax.random.normal(key, size, jnp.bfloat16) * jnp.bfloat16(size[1] ** -0.25)
        for key, size in zip(keys, sizes, strict=True)
    ]
    functions: dict[str, Callable[..., Any]] = {
        "gemms": gemms,
        "ours": jax.value_and_grad(linear_kl_divergence, (0, 1)),
        "dense": jax.value_and_grad(dense, (0, 1)),
    }
    programs = {name: jax.jit(one).lower(*arrays).compile() for name, one in functions.items()}
    memory = {name: one.memory_analysis().temp_size_in_bytes for name, one in programs.items()}
    starts = {name: partial(one, *arrays) for name, one in programs.items()}
    found: Row = dict(
        harness.compared(starts, seconds, calls=1, baseline="gemms", ratio="relative")
    )
    return found | {"temp_bytes": memory}


def main() -> int:
    """Measures, prints a table and writes JSON after every cell."""

    def texts(row: Row) -> list[str]:
        ratios = harness.ratios_of(row, ("ours", "dense"), "relative")
        memory = [f"{row['temp_bytes'][name] / 2**20:.0f}" for name in ("ours", "dense")]
        return [row["shape"], harness.milliseconds_of(row, "gemms"), *ratios, *memory]

    heads = ["N x D x E x V", "GEMMs ms", "ours / GEMMs", "dense / GEMMs", "ours MiB", "dense MiB"]
    return harness.measure_shapes(__doc__, SHAPES, measure, heads, texts)


if __name__ == "__main__":
    sys.exit(main())
