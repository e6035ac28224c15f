"""FP8 quantisation by the library's kernels beside XLA's own program, on the default device.

`python benches/jax_fp8.py [ROUNDS]`: programs take turns, in the memory that XLA gives them; a row
has the medians, the least times, and the median of the rounds' ratios.
"""

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_bridge import fp8_dequantize, fp8_quantize

SHAPES = ((2048, 4096), (1024, 14336))
CASES: dict[str, dict[str, Any]] = {
    "tensor": {},
    "tensor, scale given": {"scale": 0.01, "return_amax": True},
    "row": {"granularity": "row"},
    "block_1d": {"granularity": "block_1d"},
    "block_1d, powers of two": {"granularity": "block_1d", "power_of_two": True},
    "block_2d": {"granularity": "block_2d"},
    "tensor, transposed": {"transposed": True},
    "row, transposed": {"granularity": "row", "transposed": True},
    "block_1d, transposed": {"granularity": "block_1d", "transposed": True},
    "block_2d, transposed": {"granularity": "block_2d", "transposed": True},
}


def seconds(run: Callable[..., object], x: object) -> float:
    """Returns how long a program takes."""
    began = time.perf_counter()
    jax.block_until_ready(run(x))
    return time.perf_counter() - began


def main() -> None:
    """Prints the table."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, {rounds} rounds")
    print("| M x D | dtype | case | XLA ms | ours ms | least XLA | least ours | XLA / ours |")
    print("| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |")
    rng = np.random.default_rng(0)
    for shape in SHAPES:
        for dtype in (jnp.bfloat16, jnp.float32):
            x = jnp.asarray(rng.normal(size=shape), dtype)
            for name, options in CASES.items():
                runs = [
                    jax.jit(partial(fp8_quantize, implementation=implementation, **options))
                    for implementation in ("reference", "custom_call")
                ]
                report(shape, dtype, name, runs, x, rounds)
        quantized = fp8_quantize(x, granularity="block_1d")
        run = jax.jit(lambda q: fp8_dequantize(*q, jnp.bfloat16))
        report(shape, jnp.bfloat16, "dequantised from block_1d", [run], quantized, rounds)


def report(
    shape: tuple[int, int],
    dtype: object,
    name: str,
    runs: Sequence[Callable[..., object]],
    x: object,
    rounds: int,
) -> None:
    """Prints a row: of XLA's program and ours, or of XLA's alone."""
    for run in runs:
        seconds(run, x)
    times = [[1e3 * seconds(run, x) for run in runs] for _ in range(rounds)]
    columns = [*zip(*times, strict=True)]
    medians = [f"{median(column):.2f}" for column in columns]
    least = [f"{min(column):.2f}" for column in columns]
    if len(runs) == 1:
        medians, least, ratio = [*medians, ""], [*least, ""], ""
    else:
        ratio = f"{median(xla / ours for xla, ours in times):.1f}"
    cells = [f"{shape[0]} x {shape[1]}", jnp.dtype(dtype).name, name, *medians, *least, ratio]
    print(f"| {' | '.join(cells)} |", flush=True)


main()
