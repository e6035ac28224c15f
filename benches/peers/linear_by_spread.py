"""Linear cross-entropy by how logits are distributed, ours beside XLA's dense program.

    python benches/peers/linear_by_spread.py error --platform cpu
    python benches/peers/linear_by_spread.py time --shapes 8192x2048x128256,1024x4096x128256

Run it with a Python that has pallas_bridge. Operands are those of linear_cross_entropy.py for the
same shape and distribution. The dense program keeps the product's f32, with a bias or without, and
rounds its results alone.

- error: against f64 of the operands, no logit rounded. Of gradients of the mean the largest
  difference over the largest value, of the losses the worst token's in nats; in brackets multiples
  of what the dense program is off by. `ours N MiB` has a budget that leads it to another schedule.
- time: value and gradients of the mean, in multiples of XLA's three products alone, timed right
  before; in brackets MiB of compiled temporaries. Medians.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

# The dense program wants nearly all of a GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")

import distributions
import driver
import jax
import jax.numpy as jnp
import linear_in_jax
import numpy as np
from jax_worker import first_run
from linear_reference import errors_of, remove_files, worst_loss, write_operands
from shared import LinearProblem, first_line

DENSE = "dense, f32 product"
# The standard deviations of normal logits, shapes, dtypes and programs of each mode.
STDS = {"error": (0.5, 1.0, 4.0, 8.0, 32.0, 64.0), "time": (0.9, 8.0, 45.0)}
SHAPES = {
    "error": "256x1024x2048",
    "time": "8192x2048x128256,8192x1536x151936,4096x4096x128256,2048x4096x128256,"
    "1024x4096x128256,128x4096x128256,2048x2048x102400,4096x1024x4096",
}
DTYPES = {"error": ["bfloat16", "float16", "float32"], "time": ["bfloat16"]}
PROGRAMS = {
    "error": [DENSE, "xentile", "xentile 1 MiB"],
    "time": ["xentile", "xentile 1024 MiB", "xentile 256 MiB", DENSE],
}
Row = dict[str, Any]


def dense_losses(x: jax.Array, w: jax.Array, y: jax.Array) -> jax.Array:
    """The losses [N] of the dense program, whose logits are in f32."""
    z = jnp.matmul(x, w.T, preferred_element_type=jnp.float32)
    return -jnp.take_along_axis(jax.nn.log_softmax(z), y[:, None], 1)[:, 0]


def loss_of(problem: LinearProblem) -> linear_in_jax.Loss:
    """The mean of a program."""
    if problem.peer == DENSE:
        return lambda x, w, y: dense_losses(x, w, y).mean()
    return linear_in_jax.loss_of(problem)


def losses_of(problem: LinearProblem) -> linear_in_jax.Loss:
    """The losses [N] of a program."""
    if problem.peer == DENSE:
        return dense_losses
    from pallas_bridge import linear_cross_entropy_per_token

    options = linear_in_jax.options_of(problem)
    return lambda x, w, y: linear_cross_entropy_per_token(x, w, y, **options)[0]


def error(problem: LinearProblem) -> Row:
    """By how much a program is off."""
    arrays = linear_in_jax.operands(problem)
    loss, gradients = jax.jit(jax.value_and_grad(loss_of(problem), (0, 1)))(*arrays)
    for name, gradient in zip(("dhidden", "dweight"), gradients, strict=True):
        np.save(problem.file(name), np.asarray(gradient, np.float32))
    found = errors_of(problem, float(loss))
    losses = np.asarray(jax.jit(losses_of(problem))(*arrays))
    return {
        "dhidden": found["dhidden"]["max"],
        "dweight": found["dweight"]["max"],
        "worst loss": worst_loss(problem, losses),
    }


def take_time(problem: LinearProblem) -> Row:
    """Milliseconds of a program and of the products, and its temporaries."""
    base = linear_in_jax.yardstick(problem)["yardstick_ms"]
    arrays = linear_in_jax.operands(problem)
    program = jax.jit(jax.value_and_grad(loss_of(problem), (0, 1)))
    compiled, _, row = first_run(program, arrays)
    found = linear_in_jax.time_of(lambda: compiled(*arrays), problem.seconds)
    return {**row, **found, "products_ms": base}


def error_cells(found: Row, beside: Row) -> list[str]:
    """Errors, with what they are in those of the dense program."""
    if "error" in found:
        return driver.error_cells(found, 3)
    times = {
        name: f" ({value / beside[name]:.2f})" if beside.get(name) else ""
        for name, value in found.items()
    }
    return [f"{value:.1e}{times[name]}" for name, value in found.items()]


def time_cells(found: Row, _: Row) -> list[str]:
    """The products' time, and that of the program in multiples of it."""
    if "error" in found:
        return driver.error_cells(found, 2)
    ratio = f"{found['median_ms'] / found['products_ms']:.3f}"
    temporaries = driver.mebibytes(found["temp_bytes"], 0)
    return [f"{found['products_ms']:.2f}", f"{ratio} ({temporaries})"]


def problems_of(options: argparse.Namespace, folder: str) -> Iterator[LinearProblem]:
    """Every program on every problem."""
    for shape in (options.shapes or SHAPES[options.mode]).split(","):
        tokens, hidden, vocab = map(int, shape.split("x"))
        for distribution in distributions.chosen(options):
            for dtype in options.dtypes or DTYPES[options.mode]:
                for program in PROGRAMS[options.mode]:
                    words = program.split(" ")
                    yield LinearProblem(
                        peer=program,
                        tokens=tokens,
                        vocab=vocab,
                        dtype=dtype,
                        platform=options.platform,
                        seconds=options.measure_seconds,
                        distribution=distribution,
                        folder=folder,
                        hidden=hidden,
                        budget_mib=int(words[1]) if words[-1] == "MiB" else None,
                    )


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("mode", choices=["error", "time"])
    parser.add_argument("--shapes", help="NxDxV, separated by commas")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES["error"])
    parser.add_argument("--platform", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--measure-seconds", type=float, default=0.8, help="of each measure")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    distributions.add_arguments(parser)
    parser.set_defaults(distribution=["normal", "peaked", "trained"], std=None)
    options = parser.parse_args()
    options.std = options.std or STDS[options.mode]
    return options


def main() -> int:
    """Measures, prints, writes; the exit code is 1 where a program failed."""
    options = parse()
    jax.config.update("jax_platforms", options.platform)
    work: Callable[[LinearProblem], Row] = error if options.mode == "error" else take_time
    columns = ["N x D x V", "logits", "program"]
    columns += (
        ["dhidden", "dweight", "worst loss, nats"]
        if options.mode == "error"
        else ["three products, ms", "in products (MiB)"]
    )
    print("\n".join(driver.table(columns, [])))
    about = {"unix_time": int(time.time()), **driver.describe_device()}
    rows: list[Row] = []
    before: LinearProblem | None = None
    with tempfile.TemporaryDirectory() as folder:
        for problem in problems_of(options, folder):
            if before and (before.inputs, before.dtype) != (problem.inputs, problem.dtype):
                remove_files(before)
            write_operands(problem)
            before = problem
            try:
                found = work(problem)
            except Exception as failure:  # no memory, a budget below the least
                found = {"error": first_line(failure)}
            told = replace(problem, folder="")
            rows.append({"problem": json.loads(told.to_json()), "found": found})
            same = [row["found"] for row in rows if is_dense(row, problem)]
            cells = (error_cells if options.mode == "error" else time_cells)(
                found, same[0] if same else {}
            )
            shape = f"{problem.shape.replace('x', ' x ')} {problem.dtype}"
            print(
                f"| {' | '.join([shape, problem.distribution, problem.peer, *cells])} |", flush=True
            )
            if options.json:
                everything = {"about": about, "mode": options.mode, "results": rows}
                options.json.write_text(json.dumps(everything, indent=1) + "\n")
    return int(any("error" in row["found"] for row in rows))


def is_dense(row: Row, problem: LinearProblem) -> bool:
    """Whether a row is the dense program's on the same problem."""
    dense = replace(problem, peer=DENSE, budget_mib=None, folder="")
    return bool(row["problem"] == json.loads(dense.to_json()))


if __name__ == "__main__":
    sys.exit(main())
