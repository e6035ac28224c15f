"""Times programs of one device that take turns, each against one of them in the same round.

A program runs its operation on CALLS inputs, one after another, so that neither Python nor what was
read before counts, and PROGRAMS of them follow one another before anything waits, so that starting
one doesn't either. What is said is the median over the rounds of a program's time, and of its ratio
to the time of the one that all are held against, most often a copy, which lies beside it.
"""

import datetime
import functools
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

CALLS = 4
PROGRAMS = 8


def rounds_of(
    runs: dict[str, Callable[[], Any]], seconds: float, calls: int = CALLS, against: str = "copy"
) -> dict[str, tuple[float, float]]:
    """Returns the median seconds of a call of each, and of their ratio to those of `against`."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        jax.block_until_ready(run())
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[against]) < 7:
        for name, run in runs.items():
            start = time.perf_counter()
            for _ in range(PROGRAMS):
                found = run()
            jax.block_until_ready(found)
            times[name].append((time.perf_counter() - start) / calls / PROGRAMS)
    ratios = {
        name: [a / b for a, b in zip(of, times[against], strict=True)] for name, of in times.items()
    }
    return {
        name: (statistics.median(of), statistics.median(ratios[name])) for name, of in times.items()
    }


@functools.cache
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


def save(path: Path | None, rows: list[dict[str, Any]]) -> None:
    """Writes what was measured so far, if there is a file for it."""
    if path:
        path.write_text(json.dumps({"about": about(), "results": rows}, indent=1) + "\n")
