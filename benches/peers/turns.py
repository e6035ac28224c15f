"""Times programs of one device that take turns, each against a copy in the same round.

A program runs its operation on CALLS inputs, one after another, so that neither Python nor what was
read before counts, and PROGRAMS of them follow one another before anything waits, so that starting
one doesn't either. What is said is the median over the rounds of a program's time, and of its ratio
to that called "copy", which lies beside it.
"""

import datetime
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax

CALLS = 4
PROGRAMS = 8


def rounds_of(
    runs: dict[str, Callable[[], Any]], seconds: float, calls: int = CALLS
) -> dict[str, tuple[float, float]]:
    """Returns the median seconds of a call of each, and of their ratio to the copy's."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        jax.block_until_ready(run())
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["copy"]) < 7:
        for name, run in runs.items():
            start = time.perf_counter()
            for _ in range(PROGRAMS):
                found = run()
            jax.block_until_ready(found)
            times[name].append((time.perf_counter() - start) / calls / PROGRAMS)
    ratios = {
        name: [a / b for a, b in zip(of, times["copy"], strict=True)] for name, of in times.items()
    }
    return {
        name: (statistics.median(of), statistics.median(ratios[name])) for name, of in times.items()
    }


def about() -> dict[str, Any]:
    """What the figures are of."""
    found: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    for name in ("jax", "jaxlib", "torch", "triton"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    has_tool = shutil.which(query[0]) is not None
    found["device"] = (
        subprocess.run(query, capture_output=True, text=True).stdout.strip()
        if has_tool
        else jax.devices()[0].device_kind
    )
    return found
