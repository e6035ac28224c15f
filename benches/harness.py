"""Times programs and records results: the harness of every benchmark in Python.

1. Programs that are compared are timed in turns within one process (`in_turns`): a round runs each
   of them once, so that a change of the machine's speed affects all of them alike.
2. Rounds before the timed ones warm up: the first compiles and tunes, and more follow until
   `warm_seconds` have passed, as a GPU under load slows down for some tenths of a second.
3. A turn starts a program several times in a row and blocks once, on the last result, so that the
   time to start a program is hidden; a time is the median over rounds, its spread is the
   interquartile range over the median, and a ratio is the median of the ratios within rounds.
4. `Results` rewrites a JSON file after each row: `about` has the command, commit, date, hardware
   and versions, and `results` the rows.
5. Tables are Markdown: `table` makes a whole one, and `measure_cells` prints a line per cell as
   soon as it is measured.
"""

import argparse
import datetime
import functools
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "optax",
    "tokamax",
    "torch",
    "torchao",
    "triton",
    "liger-kernel",
    "quack-kernels",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "cut-cross-entropy",
)
# Inputs of one program, one after another, so that an input is not in the caches when it is read.
CALLS = 4
# Programs that are started in a row before one wait.
PROGRAMS = 8
# The most calls in a row of a program that is timed alone.
MOST_CALLS = 30
# Calls that take microseconds are repeated for this long, so that a pause of the machine is not
# the median.
LEAST_SECONDS = 0.05

Row = dict[str, Any]
# Starts a program and returns its results, which need not be ready.
Start = Callable[[], Any]
# Seconds of a call, the mean over that many in a row.
Clock = Callable[[int], float]
T = TypeVar("T")


def block(results: Any) -> None:
    """Waits for results of JAX; others are ready, or have a clock of their own."""
    if "jax" in sys.modules:
        sys.modules["jax"].block_until_ready(results)


def wall_clock(start: Start) -> Clock:
    """Times calls in a row with one wait at the end."""

    def seconds(calls: int) -> float:
        begun = time.perf_counter()
        results = None
        for _ in range(calls):
            results = start()
        block(results)
        return (time.perf_counter() - begun) / calls

    return seconds


def difference_clock(start: Start) -> Clock:
    """Times calls in a row without the wait: the time of N calls less than that of 2 N.

    JAX has no events to read the device's clock with, and a wait takes 0.3 to 0.7 ms on GPUs.
    """
    clock = wall_clock(start)

    def seconds(calls: int) -> float:
        while True:
            # On a busy machine the fewer calls may have taken longer.
            if (found := 2 * clock(2 * calls) - clock(calls)) > 0:
                return found

    return seconds


def torch_clock(start: Start, platform: str = "cuda") -> Clock:
    """Times calls of PyTorch in a row: on GPUs by events, that is by the device's clock."""
    if platform != "cuda":
        return wall_clock(start)
    import torch

    def seconds(calls: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            start()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / calls

    return seconds


def in_turns(
    turns: Mapping[str, Callable[[], T]],
    *,
    least: int = 7,
    most: float = float("inf"),
    seconds: float = 0.0,
    warm_seconds: float = 0.0,
) -> dict[str, list[T]]:
    """Returns what each program's turns measured, by round.

    Args:
        turns: By name, what runs a program and returns a measurement.
        least: The fewest rounds.
        most: The most rounds, unless `least` is more.
        seconds: Rounds go on for this long.
        warm_seconds: Rounds before these, whose measurements are dropped; one at the least.
    """
    begun = time.perf_counter()
    is_warm = not turns
    while not is_warm:
        for turn in turns.values():
            turn()
        is_warm = time.perf_counter() - begun >= warm_seconds
    found: dict[str, list[T]] = {name: [] for name in turns}
    begun = time.perf_counter()
    count = 0
    while turns and (count < least or (count < most and time.perf_counter() - begun < seconds)):
        for name, turn in turns.items():
            found[name].append(turn())
        count += 1
    return found


def spread(times: Sequence[float]) -> float:
    """Returns the interquartile range over the median; 0 of a single time."""
    if len(times) < 2:
        return 0.0
    first, median, third = statistics.quantiles(times, n=4, method="inclusive")
    return (third - first) / median


def median_ratio(times: Sequence[float], baseline: Sequence[float]) -> float:
    """Returns the median of the ratios within rounds."""
    return statistics.median(a / b for a, b in zip(times, baseline, strict=True))


def compared_times(
    times: Mapping[str, Sequence[float]], calls: int, baseline: str, ratio: str = "copies"
) -> dict[str, dict[str, float]]:
    """Returns what `compared` does, of seconds by name and round of programs of so many calls."""
    return {
        name: {
            "ms": 1e3 * statistics.median(of) / calls,
            "spread": spread(of),
            ratio: median_ratio(of, times[baseline]),
        }
        for name, of in times.items()
    }


def compared(
    starts: Mapping[str, Start],
    seconds: float,
    *,
    calls: int = CALLS,
    baseline: str = "copy",
    ratio: str = "copies",
) -> dict[str, dict[str, float]]:
    """Times programs of JAX in turns, `PROGRAMS` in a row each.

    Args:
        starts: By name, what starts a program of `calls` calls.
        seconds: How long rounds go on.
        calls: Calls of an operation in a program.
        baseline: The program that others are compared with.
        ratio: The key of the ratio to the baseline's time.

    Returns:
        By name, the milliseconds of a call (`ms`), their `spread`, and the ratio.
    """
    turns = {name: partial(wall_clock(start), PROGRAMS) for name, start in starts.items()}
    return compared_times(in_turns(turns, seconds=seconds), calls, baseline, ratio)


def calls_for(clock: Clock, seconds: float) -> int:
    """Returns how many calls in a row fill a tenth of the time."""
    return max(1, min(MOST_CALLS, int(seconds / 10 / clock(1))))


def median_ms(clock: Clock, seconds: float, calls: int = MOST_CALLS, least: int = 5) -> Row:
    """Times one program alone, the first half of the time to warm up."""
    turns = {"": partial(clock, calls)}
    half = seconds / 2
    times = in_turns(turns, least=least, most=50, seconds=half, warm_seconds=half)[""]
    return {
        "median_ms": 1e3 * statistics.median(times),
        "min_ms": 1e3 * min(times),
        "spread": spread(times),
        "rounds": len(times),
    }


def timed_call(start: Start) -> tuple[float, Any]:
    """Returns the seconds of one call, and its results when they are ready."""
    begun = time.perf_counter()
    results = start()
    block(results)
    return time.perf_counter() - begun, results


def seconds_of_each(start: Start, count: int) -> list[float]:
    """Returns the seconds of so many calls, each waited for; the first may compile."""
    return [timed_call(start)[0] for _ in range(count)]


def steady_seconds(start: Start, steps: int, warmups: int = 2) -> list[float]:
    """Returns the seconds of a call, `steps` times after calls of warm-up.

    Each is the mean over as many calls as take their share of `LEAST_SECONDS`. On a GPU these are
    started in a row without a wait between them, `PROGRAMS` at the least. A call that takes longer
    than `LEAST_SECONDS` is timed alone, after one call of warm-up.
    """
    import jax

    one = seconds_of_each(start, 2)[1]
    if one > LEAST_SECONDS:
        return [one, *seconds_of_each(start, steps - 1)]
    one = min(seconds_of_each(start, max(warmups - 1, 0) + 2)[-2:])
    on_gpu = jax.default_backend() == "gpu"
    calls = max(round(LEAST_SECONDS / steps / one), PROGRAMS if on_gpu else 1)
    clock = wall_clock(start)
    if on_gpu:
        return [clock(calls) for _ in range(steps)]
    return [statistics.fmean(seconds_of_each(start, calls)) for _ in range(steps)]


def compile_calls(function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> Start:
    """Compiles a program of JAX that calls a function with each tuple of arrays; what starts it."""
    import jax

    def run(calls: Any) -> Any:
        return [function(*arrays) for arrays in calls]

    program = jax.jit(run).lower(calls).compile()
    return lambda: program(calls)


def device_copy(moved: int, calls: int = CALLS) -> Start:
    """Starts a kernel that negates, reading and writing so many bytes together in each call."""
    import jax.numpy as jnp

    # Inputs of their own, or XLA reads one for all.
    sources = [(jnp.full(moved // 4, call, jnp.bfloat16),) for call in range(calls)]
    return compile_calls(jnp.negative, sources)


def device_bytes(name: str = "peak_bytes_in_use") -> int | None:
    """A count of JAX's allocator on the first device; None where it keeps none."""
    import jax

    stats = jax.devices()[0].memory_stats()
    return None if stats is None else stats.get(name)


def first_run(
    program: Any, arrays: tuple[Any, ...], is_consuming: bool = False
) -> tuple[Any, Any, Row]:
    """Compiles a jitted function and runs it once.

    Args:
        program: The jitted function.
        arrays: Its arguments.
        is_consuming: Whether it takes the memory of an argument.

    Returns:
        The compiled function, its outputs, and `temp_bytes` with, if known, `peak_bytes`.
    """
    compiled = program.lower(*arrays).compile()
    memory = compiled.memory_analysis()
    before = device_bytes()
    outputs = compiled(*arrays)
    block(outputs)
    after = device_bytes()
    row = {"temp_bytes": memory.temp_size_in_bytes if memory else None}
    # The peak is that of the process: it is this program's only if it has risen.
    if before is not None and after is not None and (after > before or is_consuming):
        row["peak_bytes"] = after
    return compiled, outputs, row


def first_run_of_torch(call: Start, platform: str) -> tuple[Any, Row]:
    """Runs a call of PyTorch after two that compile and tune; its outputs and `peak_bytes`."""
    import torch

    call()
    call()
    if platform != "cuda":
        return call(), {}
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    outputs = call()
    torch.cuda.synchronize()
    return outputs, {"peak_bytes": torch.cuda.max_memory_allocated()}


def output_of(*command: str) -> str | None:
    """What a command prints; None where it cannot run."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def installed(package: str) -> str | None:
    """The version of a package; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def processor() -> str:
    """The processor, as Linux names it."""
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return platform.processor() or platform.machine()
    lines = info.read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    found = {name.strip(): text.strip() for name, _, text in (one.partition(":") for one in lines)}
    numbers = f"family {found.get('cpu family', '?')}, model {found.get('model', '?')}"
    return f"{found.get('model name', platform.machine())} ({numbers})"


def hardware() -> Row:
    """The GPUs with their driver, as nvidia-smi names them, and the processor."""
    query = ("--query-gpu=name,driver_version", "--format=csv,noheader")
    gpus = (output_of("nvidia-smi", *query) or "").splitlines()
    gpu, driver = gpus[0].split(", ") if gpus else (None, None)
    cpu = processor()
    return {
        "device": gpu or cpu,
        "gpu": gpu,
        "gpus": len(gpus),
        "driver": driver,
        "cpu": cpu,
        "cores": os.cpu_count(),
    }


@functools.cache
def about() -> Row:
    """Command, commit, date, hardware and versions of this run; no folder of the machine."""
    script = Path(sys.argv[0]).resolve()
    is_here = script.is_relative_to(ROOT)
    words = [word if not Path(word).is_absolute() else Path(word).name for word in sys.argv[1:]]
    now = datetime.datetime.now(datetime.UTC)
    return {
        "command": shlex.join(
            ["python", str(script.relative_to(ROOT)) if is_here else script.name, *words]
        ),
        "commit": os.environ.get("XENTILE_COMMIT") or output_of("git", "rev-parse", "HEAD"),
        "date": now.isoformat(timespec="seconds"),
        "unix_time": int(now.timestamp()),
        **hardware(),
        "python": platform.python_version(),
        **{package: installed(package) for package in PACKAGES},
    }


class Results:
    """The rows of a run, and the JSON file that is rewritten after each of them."""

    def __init__(self, path: Path | None, *, is_resumed: bool = False, **others: Any) -> None:
        """Reads the rows of an earlier run where the run goes on with its file.

        Args:
            path: The file, if there is one.
            is_resumed: Whether the file's rows are kept; `earlier` then has what they are of.
            others: What else the file has at its top.
        """
        self.path, self.others = path, others
        self.rows: list[Row] = []
        if is_resumed and path is not None and path.exists():
            kept = json.loads(path.read_text(encoding="utf-8"))
            self.rows = kept["results"]
            self.others["earlier"] = [*kept.get("earlier", []), kept["about"]]

    def add(self, row: Row) -> None:
        """Adds a row and writes the file."""
        self.rows.append(row)
        self.write()

    def write(self) -> None:
        """Writes the file, if there is one."""
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            found = {"about": about(), **self.others, "results": self.rows}
            self.path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def without_folders(text: str) -> str:
    """A message without folders of this machine and without colours."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return re.sub(r"(/[^\s/'\":]+)+/", ".../", text)


def first_line(error: BaseException) -> str:
    """An error in one line of a table."""
    text = without_folders(str(error)).strip().splitlines()
    return ": ".join([type(error).__name__, *text[:1]])[:160]


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown, text aligned to the left and numbers to the right."""
    body = [list(row) for row in rows]
    numeric = [
        bool(body) and all(not row[i] or row[i].lstrip("-")[:1].isdigit() for row in body)
        for i in range(len(heads))
    ]
    rules = ["---:" if one else "---" for one in numeric]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, rules, *body))


def measure_cells(
    cells: Iterable[tuple[Row, Callable[[], Row]]],
    results: Results,
    heads: Sequence[str],
    texts_of: Callable[[Row], Sequence[str]],
) -> int:
    """Measures cells one after another, each of which becomes a row and a printed line.

    A cell that fails is a row with an `error`, and the others go on.

    Args:
        cells: What a row says of each cell, and what measures it.
        results: Takes the rows.
        heads: The table's columns.
        texts_of: The cells of a row's line.

    Returns:
        The exit status: 1 where a cell failed.
    """
    print(table(heads, []), flush=True)
    failed = 0
    for cell, measure in cells:
        row = dict(cell)
        try:
            row |= measure()
        except Exception as error:
            row["error"] = first_line(error)
            failed = 1
        results.add(row)
        print(f"| {' | '.join(texts_of(row))} | {row.get('error', '')}".rstrip(), flush=True)
    return failed


def measure_shapes(
    doc: str,
    shapes: Mapping[str, Sequence[str]],
    measure: Callable[[str, float], Row],
    heads: Sequence[str],
    texts_of: Callable[[Row], Sequence[str]],
) -> int:
    """Runs `measure_cells` of a benchmark all of whose options are those of `parser`."""
    options = parser(doc, 0.5, shapes).parse_args()
    cells = [({"shape": one}, partial(measure, one, options.seconds)) for one in options.shapes]
    return measure_cells(cells, Results(options.json), heads, texts_of)


def ratios_of(row: Row, names: Iterable[str], ratio: str = "copies") -> list[str]:
    """The ratios of the programs of a row, "" for one that it does not have."""
    return [f"{row[name][ratio]:.3f}" if name in row else "" for name in names]


def milliseconds_of(row: Row, name: str = "copy") -> str:
    """The milliseconds of a program of a row; "" where it does not have them."""
    return f"{row[name]['ms']:.4f}" if name in row else ""


def extents(shape: str) -> tuple[int, ...]:
    """The extents of a shape such as 8192x4096."""
    return tuple(map(int, shape.split("x")))


def parser(
    doc: str, seconds: float | None = None, shapes: Mapping[str, Sequence[str]] | None = None
) -> argparse.ArgumentParser:
    """The options of every benchmark; --seconds and --shapes with defaults for one that has them.

    Default shapes are those of the platform, of a CPU where it has none.
    """
    options = argparse.ArgumentParser(description=doc.splitlines()[0])
    options.add_argument("--json", type=Path, help="write everything to this file")
    if seconds is not None:
        options.add_argument("--seconds", type=float, default=seconds, help="of each cell")
    if shapes is not None:
        import jax

        default = shapes.get(jax.default_backend(), shapes["cpu"])
        options.add_argument("--shapes", nargs="+", default=default)
    return options
