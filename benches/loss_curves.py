"""Losses after some steps of training by each optimizer and dtype of parameters.

    PYTHONPATH=examples python benches/loss_curves.py [--json FILE] [--jobs N] [-- ARGUMENTS]

Each run is `examples/train` with ARGUMENTS in a process of its own, --jobs of them at a time. A row
has the mean of the last ten losses. AdamW in float32 has three seeds, of parameters and of the
data's order, whose spread is what other differences are to be held against. "nearest" rounds
bfloat16 parameters to nearest, which `examples/train` does not.
"""

import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import harness
from harness import Row

RUNS = {
    "adamw, seed 0": ["--seed", "0"],
    "adamw, seed 1": ["--seed", "1"],
    "adamw, seed 2": ["--seed", "2"],
    "adamw8bit": ["--optimizer", "adamw8bit"],
    "adamw, bfloat16": ["--param_dtype", "bfloat16"],
    "adamw, bfloat16, nearest": ["--param_dtype", "bfloat16"],
    "adamw8bit, bfloat16": ["--optimizer", "adamw8bit", "--param_dtype", "bfloat16"],
    "muon": ["--optimizer", "muon"],
}
LAST = 10


def train(name: str, arguments: list[str]) -> int:
    """Trains in this process, to nearest if the run's name says so."""
    from train.__main__ import main as run

    if "nearest" in name:
        from pallas_bridge import optax as ours

        make: Any = ours.adamw
        ours.adamw = lambda *of, **options: make(*of, **{**options, "rounding_seed": None})
    return int(run(arguments))


def measure(name: str, arguments: list[str], log: Path) -> Row:
    """Returns the losses of a run in a process of its own."""
    command = [sys.executable, __file__, "--train", name, *arguments, "--log", str(log)]
    # So that the last line has the error.
    environment = {**os.environ, "JAX_TRACEBACK_FILTERING": "off"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        raise RuntimeError((done.stderr.strip() or "no message").splitlines()[-1])
    records = map(json.loads, log.read_text(encoding="utf-8").splitlines())
    losses = [record["loss"] for record in records if record["record"] == "step"]
    return {"last_losses_mean": statistics.fmean(losses[-LAST:])}


def main() -> int:
    """Runs everything, prints a table and writes JSON after every run."""
    if sys.argv[1:2] == ["--train"]:
        return train(sys.argv[2], sys.argv[3:])
    parser = harness.parser(__doc__)
    parser.add_argument("--runs", nargs="+", default=RUNS, choices=RUNS, metavar="RUN")
    parser.add_argument("arguments", nargs="*", help="of examples/train, behind --")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    options = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{0.9 / options.jobs:.3f}")
    with TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        pending = {
            name: pool.submit(
                measure, name, [*options.arguments, *RUNS[name]], Path(folder, f"{number}.jsonl")
            )
            for number, name in enumerate(options.runs)
        }

        def cells() -> Iterator[tuple[Row, Callable[[], Row]]]:
            for name, future in pending.items():
                arguments = shlex.join(options.arguments)
                yield {"arguments": arguments, "run": name}, future.result

        def texts(row: Row) -> list[str]:
            mean = row.get("last_losses_mean")
            return [row["run"], f"{mean:.4f}" if mean is not None else ""]

        heads = ["run", f"mean of the last {LAST} losses"]
        return harness.measure_cells(cells(), harness.Results(options.json), heads, texts)


if __name__ == "__main__":
    sys.exit(main())
