"""A step of a decoder and a prompt, by this package and by XLA, and reading the weights alone.

    python benches/decoding.py [--json FILE [--resume]] [--model NAME ..] [--batch B ..]
        [--prompt T ..] [--samplers [NAME ..]]

Weights are random, in bfloat16. `step` is `decode_step` at 1000 positions as users call it, packed
weights included, and `prompt` is `prefill` of one sequence; `xla` and `xla prompt` are the same
programs with XLA's products and its updates of the cache. `read` reads as many bytes as weights and
the cache's positions have and no more: on CPUs by a thread a core, elsewhere by XLA.
`--samplers` times a token of `generate` after a prompt of T instead, greedy and by all samplers, or
greedy and those named: the difference of 17 and 273 tokens, which take one block of steps and 17.
"""

import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
from harness import Row, Start
from pallas_bridge._src.generation import model as program

from pallas_bridge import generation

POSITIONS = 1000
# Options of `generate`, and how many tokens it makes.
SAMPLERS: dict[str, dict[str, float]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top-k": {"temperature": 0.8, "top_k": 50},
    "top-p": {"temperature": 0.8, "top_p": 0.9},
}
COUNTS = (17, 273)
# Calls of a step in a row on GPUs, which start them faster than they run.
CALLS = 8


def reader(moved: int) -> Start:
    """Returns a program that reads so many bytes."""
    if jax.default_backend() != "cpu":
        words = jnp.ones(moved // 4, jnp.int32)
        return partial(jax.jit(jnp.sum), words)
    count = os.cpu_count() or 1
    parts = np.array_split(np.ones(moved // 8), count)
    pool = ThreadPoolExecutor(count)
    return lambda: [*pool.map(np.sum, parts)]


def packed_params(config: Any) -> Any:
    """Returns random parameters, packed where there is a kernel."""
    init = partial(generation.init_params, config, dtype=jnp.bfloat16)
    return generation.pack(jax.jit(init)(), config)


def bytes_read(params: Any, config: Any, batch: int, positions: int) -> int:
    """Returns the bytes of what a step reads: weights once, and so many positions of the cache."""
    # Of an embedding that is not the head too, a step reads a row for each sequence.
    unread = ["packed"] if config.tied_head else ["packed", "embedding"]
    weights = {name: one for name, one in params.items() if name not in unread}
    cached = 2 * batch * positions * config.layers * config.kv_heads * config.head_dim * 2
    return sum(x.nbytes for x in jax.tree.leaves(weights)) + cached


def turn(start: Start) -> Callable[[], float]:
    """Returns what times a call: on CPUs one with its wait, as XLA's may take seconds."""
    if jax.default_backend() == "cpu":
        return partial(harness.wall_clock(start), 1)
    return partial(harness.difference_clock(start), CALLS)


def measure(config: Any, batch: int, prompt: int, seconds: float) -> Row:
    """Measures programs of so many sequences in turns."""
    params = packed_params(config)
    length = max(POSITIONS, prompt) + 24
    caches = {
        name: generation.init_cache(config, batch if "prompt" not in name else 1, length)
        for name in ("step", "xla", "prompt", "xla prompt")
    }
    tokens, positions = jnp.zeros(batch, jnp.int32), jnp.full(batch, POSITIONS)
    text, lengths = jnp.zeros((1, prompt), jnp.int32), jnp.full(1, prompt)
    moved = bytes_read(params, config, batch, POSITIONS)
    by_xla: dict[str, Callable[[Any], Any]] = {
        "xla": lambda cache: program._decode_step(
            params, config, cache, tokens, positions, False, False
        ),
        "xla prompt": lambda cache: program._prefill(params, config, cache, text, lengths, False),
    }
    ours: dict[str, Callable[[Any], Any]] = {
        "step": lambda cache: generation.decode_step(params, config, cache, tokens, positions),
        "prompt": lambda cache: generation.prefill(params, config, cache, text, lengths),
    }

    def start(name: str, run: Callable[[Any], Any]) -> Any:
        # Each donates its cache.
        found, caches[name] = run(caches[name])
        return found

    starts: dict[str, Start] = {
        name: partial(start, name, run) for name, run in (ours | by_xla).items()
    }
    starts["read"] = reader(moved)
    turns = {name: turn(one) for name, one in starts.items()}
    times = harness.in_turns(turns, least=5, seconds=seconds)
    row: Row = {**harness.compared_times(times, 1, "read", "reads")}
    return row | {"bytes": moved}


def measure_samplers(
    samplers: Iterable[str], config: Any, batch: int, prompt: int, seconds: float
) -> Row:
    """Measures a token of `generate` by each sampler in turns."""
    params = packed_params(config)
    text = jnp.zeros((batch, prompt), jnp.int32)
    moved = bytes_read(params, config, batch, prompt)

    def time_token(options: Any) -> float:
        short, long = (
            harness.timed_call(
                lambda n=n: generation.generate(params, config, text, max_new_tokens=n, **options)
            )[0]
            for n in COUNTS
        )
        return (long - short) / (COUNTS[1] - COUNTS[0])

    turns = {name: partial(time_token, SAMPLERS[name]) for name in samplers}
    turns["read"] = turn(reader(moved))
    times = harness.in_turns(turns, least=5, seconds=seconds)
    row: Row = {**harness.compared_times(times, 1, "greedy", "greedy")}
    return row | {"bytes": moved}


def main() -> int:
    """Measures, prints a table and writes JSON after every row."""
    parser = harness.parser(__doc__, seconds=10)
    parser.add_argument("--resume", action="store_true", help="keep the rows of the file")
    parser.add_argument("--model", nargs="+", default=["qwen3-0.6b"], metavar="NAME")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], metavar="B")
    parser.add_argument("--prompt", type=int, nargs="+", default=[512], metavar="T")
    parser.add_argument("--samplers", nargs="*", choices=SAMPLERS, metavar="NAME")
    options = parser.parse_args()
    is_tokens = options.samplers is not None
    samplers = [one for one in SAMPLERS if one in (options.samplers or SAMPLERS)]
    if "greedy" not in samplers:
        samplers.insert(0, "greedy")
    sys.path.append(str(harness.ROOT / "examples"))
    from generate.presets import PRESETS

    def cells() -> Iterator[tuple[Row, Callable[[], Row]]]:
        run = partial(measure_samplers, samplers) if is_tokens else measure
        for of in itertools.product(options.model, options.batch, options.prompt):
            row = dict(zip(("model", "batch", "prompt_tokens"), of, strict=True))
            yield row, partial(run, PRESETS[of[0]], *of[1:], options.seconds)

    names, compared, baseline, ratio = (
        ((*samplers, "read"), (*samplers[1:], "read"), "greedy", "greedy")
        if is_tokens
        else (("step", "xla", "read", "prompt", "xla prompt"), ("step", "xla"), "read", "reads")
    )

    def texts(row: Row) -> list[str]:
        times = [harness.milliseconds_of(row, name) for name in names]
        return [
            row["model"],
            str(row["batch"]),
            str(row["prompt_tokens"]),
            *times,
            *harness.ratios_of(row, compared, ratio),
        ]

    heads = ["model", "sequences", "prompt", *(f"{name} ms" for name in names)]
    heads += [f"{name} / {baseline}" for name in compared]
    return harness.measure_cells(
        cells(), harness.Results(options.json, is_resumed=options.resume), heads, texts
    )


if __name__ == "__main__":
    sys.exit(main())
