"""Cross-entropy in JAX on the CPU, XLA's program, and the kernel called from Rust, in one run.

    cargo build --release --bin microbench
    python benches/jax_cross_entropy.py --json FILE

Needs pallas_bridge. All programs of a problem take turns; times are medians of single steps.

- fresh: every step allocates its results from the system, as JAX does, unless glibc is set to keep
  freed memory:

      export MALLOC_ARENA_MAX=1 MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=100000000000

- donated: the gradient overwrites the logits, so nothing is allocated.

Every --distribution gives logits: normal with each --std, peaked, trained.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent / "peers"))

import distributions
import harness
import jax
import jax.numpy as jnp
import numpy as np
from distributions import Distribution
from harness import Row
from in_jax import dense

import pallas_bridge
from pallas_bridge import cross_entropy, cross_entropy_per_token

SHAPES = [(512, 151643), (2048, 32000), (512, 50257)]
NATIVE = {"bfloat16": "bf16", "float32": "f32", "float16": "f16"}
SHOWN = ["native", "fused, donated", "dense, donated"]
SHOWN += ["fused, fresh", "recompute, fresh", "dense, fresh"]


def dense_mean(x: jax.Array, y: jax.Array) -> jax.Array:
    """The mean loss of plain JAX."""
    return dense(x, y).mean()


def per_token(x: jax.Array, y: jax.Array) -> jax.Array:
    """A function of per-token outputs, whose gradient has to be recomputed."""
    loss, logps = cross_entropy_per_token(x, y)
    return (loss - 0.1 * logps**2).sum()


def native(dtype: str, tokens: int, vocab: int, distribution: Distribution) -> Row:
    """The measurement by microbench of the kernel called from Rust, in preallocated memory."""
    command = [harness.ROOT / "target/release/microbench", "--dtype", NATIVE[dtype]]
    command += ["--iters", "20", "--time", str(tokens), "--vocab", str(vocab)]
    command += ["--json", "/dev/stdout"]
    for key, value in distribution.keys().items():
        command += ["--set", f"input.{key}={value}"]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    line = next(line for line in output.splitlines() if line.startswith("{"))
    found: Row = json.loads(line)
    return found


def import_ms() -> float:
    """Milliseconds to import pallas_bridge, which registers its calls, beyond jax."""
    code = (
        "import time, jax; t = time.perf_counter(); import pallas_bridge; "
        "print((time.perf_counter() - t) * 1e3); assert pallas_bridge.info().library"
    )
    command = [sys.executable, "-c", code]
    runs = [subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout for _ in range(7)]
    return statistics.median(map(float, runs))


def turn_of(program: Any, x: jax.Array, y: jax.Array, is_donating: bool) -> Callable[[], float]:
    """A turn of one step; a donated copy of the logits is made before it is timed."""

    def turn() -> float:
        given = jax.block_until_ready(jnp.array(x)) if is_donating else x
        return harness.wall_clock(lambda: program(given, y))(1)

    return turn


def measure(dtype: str, tokens: int, vocab: int, rounds: int, distribution: Distribution) -> Row:
    """Measures all programs on one problem."""
    rng = np.random.default_rng(0)
    targets = distribution.targets(rng, tokens, vocab)
    x = jnp.asarray(distribution.logits(rng, targets, vocab), dtype)
    y = jnp.asarray(targets.labels)
    in_place = partial(cross_entropy, donate_logits=True)
    grad = jax.value_and_grad
    programs = {
        "fused, fresh": jax.jit(grad(cross_entropy)),
        "recompute, fresh": jax.jit(grad(per_token)),
        "forward": jax.jit(cross_entropy),
        "dense, fresh": jax.jit(grad(dense_mean)),
        "XLA copy, fresh": jax.jit(lambda x, y: jnp.copy(x)),
        "fused, donated": jax.jit(grad(in_place), donate_argnums=0),
        "dense, donated": jax.jit(grad(dense_mean), donate_argnums=0),
    }
    compiled = {name: program.lower(x, y).compile() for name, program in programs.items()}
    turns = {
        name: turn_of(program, x, y, name.endswith("donated")) for name, program in compiled.items()
    }
    runs = [native(dtype, tokens, vocab, distribution)]
    times = harness.in_turns(turns, least=rounds, most=rounds)
    runs.append(native(dtype, tokens, vocab, distribution))
    return {
        "median_ms": {
            **{name: 1e3 * statistics.median(of) for name, of in times.items()},
            "native": min(run["median_step_ms"] for run in runs),
            "native copy": min(run["copy_ms"] for run in runs),
        },
        "temp_bytes": {
            name: program.memory_analysis().temp_size_in_bytes for name, program in compiled.items()
        },
        "machine": runs[0]["machine"],
    }


def texts_of(row: Row) -> list[str]:
    """The cells of a row's line."""
    texts = ["{} x {} {}".format(*row["shape"], NATIVE[row["dtype"]]), row["distribution"]]
    if "median_ms" not in row:
        return [*texts, *[""] * (len(SHOWN) + 2)]
    ms, fused = row["median_ms"], row["temp_bytes"]["fused, fresh"]
    ratios = [ms[f"dense, {how}"] / ms[f"fused, {how}"] for how in ("donated", "fresh")]
    texts += [f"{ms[name]:.1f} ms" for name in SHOWN]
    return [*texts, f"{ratios[0]:.1f}, {ratios[1]:.1f}", f"{fused / 2**10:.1f} KiB"]


class Lines(harness.Results):
    """Rows as JSON lines, which runs add to one file."""

    def write(self) -> None:
        """Adds the last row to the file, if there is one."""
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**harness.about(), **self.others, **self.rows[-1]}) + "\n")


def main() -> int:
    """Measures, prints a table and writes JSON after every problem."""
    parser = harness.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each program")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32", "float16"])
    distributions.add_arguments(parser)
    options = parser.parse_args()
    library = pallas_bridge.info().library
    assert library is not None
    malloc = {name: os.environ[name] for name in os.environ if name.startswith("MALLOC_")}
    results = Lines(options.json, isa=library.cpu_isa, malloc=malloc, import_ms=import_ms())
    print(f"import of pallas_bridge beyond jax: {results.others['import_ms']:.1f} ms\n")

    def cells() -> Iterator[tuple[Row, Callable[[], Row]]]:
        for (tokens, vocab), text, dtype in itertools.product(
            SHAPES, distributions.chosen(options), options.dtypes
        ):
            cell = {"dtype": dtype, "shape": [tokens, vocab], "distribution": text}
            of = Distribution.parse(text)
            yield cell, partial(measure, dtype, tokens, vocab, options.rounds, of)

    heads = ["logits", "distribution", *SHOWN, "dense / fused: donated, fresh"]
    return harness.measure_cells(cells(), results, [*heads, "fused temporaries"], texts_of)


if __name__ == "__main__":
    sys.exit(main())
