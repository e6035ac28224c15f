"""Times cross-entropy in JAX on the CPU beside the dense program and the native kernel, in one run.

    cargo build --release --bin microbench
    python benches/jax_cross_entropy.py --json FILE

Run it with a Python that has pallas_bridge. Steps of all candidates take turns, so that whatever
else the machine does falls on each of them. Prints a Markdown table; figures are medians.

- fresh: every step takes the memory of its results from the system, as JAX does, unless glibc is
  told to keep what is freed:

      export MALLOC_ARENA_MAX=1 MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=100000000000

- donated: the gradient takes the place of the logits, so no memory is taken.

Logits are of every --distribution that is named: normal with each --std, peaked, trained.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_bridge
from pallas_bridge import cross_entropy, cross_entropy_per_token

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "benches/peers"))

import distributions  # noqa: E402
from distributions import Distribution  # noqa: E402

SHAPES = [(512, 151643), (2048, 32000), (512, 50257)]
NATIVE = {"bfloat16": "bf16", "float32": "f32", "float16": "f16"}


def dense(x: jax.Array, y: jax.Array) -> jax.Array:
    """The mean, as most training code writes it."""
    z = x.astype(jnp.float32)
    at_label = jnp.take_along_axis(z, y[:, None], axis=-1)[:, 0]
    return (jax.nn.logsumexp(z, axis=-1) - at_label).mean()


def per_token(x: jax.Array, y: jax.Array) -> jax.Array:
    """A loss of per-token outputs, so that the gradient has to be recomputed."""
    loss, logps = cross_entropy_per_token(x, y)
    return (loss - 0.1 * logps**2).sum()


def step_ms(program: Callable[..., Any], *arguments: jax.Array) -> tuple[float, Any]:
    """Milliseconds of one call, and what it returned."""
    started = time.perf_counter()
    results = jax.block_until_ready(program(*arguments))
    return (time.perf_counter() - started) * 1e3, results


def native(dtype: str, tokens: int, vocab: int, distribution: Distribution) -> dict[str, Any]:
    """What microbench says of the kernel called from Rust, into the same memory each time."""
    command = [ROOT / "target/release/microbench", "--dtype", NATIVE[dtype], "--iters", "20"]
    command += ["--time", str(tokens), "--vocab", str(vocab), "--json", "/dev/stdout"]
    for key, value in distribution.keys().items():
        command += ["--set", f"input.{key}={value}"]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    line = next(line for line in output.splitlines() if line.startswith("{"))
    figures: dict[str, Any] = json.loads(line)
    return figures


def import_ms() -> float:
    """What importing pallas_bridge, which registers its calls, costs beyond jax."""
    code = (
        "import time, jax; t = time.perf_counter(); import pallas_bridge; "
        "print((time.perf_counter() - t) * 1e3); assert pallas_bridge.info().library"
    )
    runs = [
        float(
            subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True).stdout
        )
        for _ in range(7)
    ]
    return statistics.median(runs)


def measure(
    dtype: str, tokens: int, vocab: int, rounds: int, distribution: Distribution
) -> dict[str, Any]:
    """All candidates on one problem."""
    rng = np.random.default_rng(0)
    targets = distribution.targets(rng, tokens, vocab)
    x = jnp.asarray(distribution.logits(rng, targets, vocab), dtype)
    y = jnp.asarray(targets.labels)
    programs = {
        "fused, fresh": jax.jit(jax.value_and_grad(cross_entropy)),
        "recompute, fresh": jax.jit(jax.value_and_grad(per_token)),
        "forward": jax.jit(cross_entropy),
        "dense, fresh": jax.jit(jax.value_and_grad(dense)),
        "XLA copy, fresh": jax.jit(lambda x, y: jnp.copy(x)),
    }
    in_place = partial(cross_entropy, donate_logits=True)
    donating = {
        "fused, donated": jax.jit(jax.value_and_grad(in_place), donate_argnums=0),
        "dense, donated": jax.jit(jax.value_and_grad(dense), donate_argnums=0),
    }
    memory = {
        name: program.lower(x, y).compile().memory_analysis().temp_size_in_bytes
        for name, program in (programs | donating).items()
    }
    before = native(dtype, tokens, vocab, distribution)
    times: dict[str, list[float]] = {name: [] for name in (*programs, *donating)}
    for round_ in range(-2, rounds):
        for name, program in programs.items():
            ms, _ = step_ms(program, x, y)
            if round_ >= 0:
                times[name].append(ms)
        for name, program in donating.items():
            ms, _ = step_ms(program, jnp.array(x), y)
            if round_ >= 0:
                times[name].append(ms)
    runs = [before, native(dtype, tokens, vocab, distribution)]
    return {
        "dtype": dtype,
        "shape": [tokens, vocab],
        "distribution": str(distribution),
        "median_ms": {
            **{name: statistics.median(ms) for name, ms in times.items()},
            "native": min(run["median_step_ms"] for run in runs),
            "native copy": min(run["copy_ms"] for run in runs),
        },
        "temp_bytes": memory,
        "machine": before["machine"],
    }


def main() -> None:
    """Measures, prints, and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="append the figures to this file")
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each candidate")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32", "float16"])
    distributions.add_arguments(parser)
    arguments = parser.parse_args()
    library = pallas_bridge.info().library
    assert library is not None
    about = {
        "unix_time": int(time.time()),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "isa": library.cpu_isa,
        # How glibc hands out memory, where it was told to.
        "malloc": {name: os.environ[name] for name in os.environ if name.startswith("MALLOC_")},
        "import_ms": import_ms(),
    }
    print(f"import of pallas_bridge beyond jax: {about['import_ms']:.1f} ms\n")
    names = ["native", "fused, donated", "dense, donated"]
    names += ["fused, fresh", "recompute, fresh", "dense, fresh"]
    print(
        "| logits | distribution |",
        " | ".join(names),
        "| dense / fused: donated, fresh | fused temporaries |",
    )
    print("| --- " * (len(names) + 4) + "|")
    asked = [Distribution.parse(text) for text in distributions.chosen(arguments)]
    for (tokens, vocab), distribution in itertools.product(SHAPES, asked):
        for dtype in arguments.dtypes:
            row = measure(dtype, tokens, vocab, arguments.rounds, distribution)
            ms, temp = row["median_ms"], row["temp_bytes"]
            print(
                f"| {tokens} x {vocab} {NATIVE[dtype]} | {distribution} |",
                " | ".join(f"{ms[name]:.1f} ms" for name in names),
                f"| {ms['dense, donated'] / ms['fused, donated']:.1f},",
                f"{ms['dense, fresh'] / ms['fused, fresh']:.1f} |",
                f"{temp['fused, fresh'] / 1024:.1f} KiB |",
                flush=True,
            )
            if arguments.json:
                with arguments.json.open("a") as file:
                    file.write(json.dumps({**about, **row}) + "\n")


if __name__ == "__main__":
    main()
