"""Parts of the drivers: processes that measure one after another, and their results.

Right before each peer a yardstick is timed in a process that lives on, so that a ratio is of two
times that are seconds apart. Programs import this module before `harness`, which it makes visible.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import distributions
import harness
from shared import MARK, P, Problem

HERE = Path(__file__).resolve().parent
# The most seconds of a peer; tuners take most of them.
PATIENCE = 150
# Workers that import while another measures.
AHEAD = 3

Result = dict[str, Any]


class Worker:
    """A process that imports, waits for a line, and then measures."""

    def __init__(self, script: str, mode: str, problem: Problem) -> None:
        """Starts it."""
        path = os.environ.get("PYTHONPATH")
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE.parent), path])),
            # One piece of memory: a pool that grows hands out larger pieces than arrays need, and
            # the peak would count these.
            "XLA_PYTHON_CLIENT_PREALLOCATE": "true",
            "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.6",
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        self.process = subprocess.Popen(
            [sys.executable, HERE / script, mode, problem.to_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if mode != "yardstick" else subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def ask(self, line: str = "go") -> None:
        """Sends a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def result(self, seconds: float = PATIENCE) -> Result:
        """Starts its measurement and waits for its end."""
        try:
            output, errors = self.process.communicate("go\n", timeout=seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            return {"error": f"not done after {seconds:.0f} s"}
        for line in output.splitlines():
            if line.startswith(MARK):
                found: Result = json.loads(line.removeprefix(MARK))
                return found
        last = (errors.strip().splitlines() or ["nothing"])[-1]
        message = f"ended with exit code {self.process.returncode}: {last}"
        return {"error": harness.without_folders(message)[:160]}

    def next_answer(self) -> Result:
        """The next answer of a process that goes on; an error where it has ended."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                found: Result = json.loads(line.removeprefix(MARK))
                return found
        return {"error": "the process of the yardstick has ended"}

    def end(self) -> None:
        """Ends it."""
        self.process.kill()
        self.process.communicate()


def start_yardstick(scripts: tuple[str, str], problem: Problem) -> Worker:
    """A process that times the yardstick: PyTorch's, or XLA's without PyTorch."""
    worker = Worker(scripts[0], "yardstick", problem)
    worker.ask()
    worker.ask(problem.to_json())
    if "error" in worker.next_answer():
        worker.end()
        print("the yardstick is XLA's: PyTorch cannot be used here", file=sys.stderr)
        worker = Worker(scripts[1], "yardstick", problem)
        worker.ask()
    return worker


def measure(
    problems: list[P],
    script_of: Callable[[P], str],
    report: Callable[[P, float | None, Result], None],
    *,
    deadline: float,
    yardstick: tuple[str, str] | None = None,
    mode: str = "measure",
    before: Callable[[P], object] = lambda _: None,
) -> None:
    """Measures all problems, one after another, while the next ones' processes import.

    Args:
        problems: What is measured.
        script_of: The worker of a problem.
        report: Takes a problem, the yardstick in milliseconds if there is one, and the result.
        deadline: Starts nothing after this time of `time.monotonic`.
        yardstick: The workers that time the yardstick, PyTorch's and XLA's.
        mode: The workers' mode.
        before: Called with each problem before its process measures.
    """
    rod = start_yardstick(yardstick, problems[0]) if yardstick and problems else None
    waiting: list[Worker] = []
    for index, problem in enumerate(problems):
        if time.monotonic() > deadline:
            report(problem, None, {"error": "not run: no time was left"})
            continue
        while len(waiting) < min(AHEAD, len(problems) - index):
            following = problems[index + len(waiting)]
            waiting.append(Worker(script_of(following), mode, following))
        before(problem)
        taken = None
        if rod:
            rod.ask(problem.to_json())
            taken = rod.next_answer().get("yardstick_ms")
        report(problem, taken, waiting.pop(0).result())
    for worker in [*waiting, *([rod] if rod else [])]:
        worker.end()


def keep_inputs(write: Callable[[P], object], remove: Callable[[P], object]) -> Callable[[P], bool]:
    """Returns what writes the inputs of a problem and removes other problems' inputs.

    It returns whether it wrote any: inputs are gigabytes, and problems in a row may share them.
    """
    last: list[P] = []

    def before(problem: P) -> bool:
        if last and last[0].inputs == problem.inputs:
            return False
        for other in last:
            remove(other)
        write(problem)
        last[:] = [problem]
        return True

    return before


class Results(harness.Results):
    """The results of peers; with --resume those of the JSON file without an error are kept."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Reads the results that are kept."""
        super().__init__(options.json, is_resumed=options.resume)
        self.rows = [row for row in self.rows if "error" not in row["found"]]

    def lacking(self, problems: list[P]) -> list[P]:
        """The problems without a result."""

        def has(row: Result, problem: Problem) -> bool:
            return all(row[name] == of for name, of in asdict(problem).items() if name in row)

        return [one for one in problems if not any(has(row, one) for row in self.rows)]


def error_cells(row: Result, cells: int) -> list[str]:
    """The cells of a row that has an error: its message and empty ones."""
    return [row["error"].replace("|", "/")] + [""] * (cells - 1)


def mebibytes(peak: int | None, beyond: int) -> str:
    """Memory beyond so many bytes, in MiB."""
    return "" if peak is None else f"{(peak - beyond) / 2**20:.1f}"


def draw(
    path: Path, title: str, unit: str, bars: Mapping[tuple[str, str], float], peers: list[str]
) -> None:
    """Draws a bar for each shape and peer, grouped by shape; needs matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        print(f"no plot: {error}", file=sys.stderr)
        return
    shapes = list(dict.fromkeys(shape for shape, _ in bars))
    figure, axes = pyplot.subplots(figsize=(4 + 0.225 * len(peers) * len(shapes), 4.5))
    width = 0.85 / len(peers)
    colours = pyplot.get_cmap("tab20").colors
    for index, peer in enumerate(peers):
        heights = [bars.get((shape, peer), 0) for shape in shapes]
        positions = [group + index * width for group in range(len(shapes))]
        colour = colours[index % len(colours)]
        axes.bar(positions, heights, width, label=peer, color=colour)
    if bars and max(bars.values()) > 8:
        axes.set_yscale("log")  # a bar far above the others would leave these no height
    axes.axhline(1, color="black", linewidth=0.8)
    names = [" x ".join(shape.split("x")) for shape in shapes]
    axes.set_xticks([n + 0.4 for n in range(len(shapes))], names)
    axes.set_ylabel(unit)
    axes.set_title(title)
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def parser(
    about: str,
    shapes: str,
    form: str,
    peers: list[str],
    named: tuple[str, ...] = distributions.OF_PRODUCTS,
) -> argparse.ArgumentParser:
    """The options of every driver.

    Args:
        about: The driver's docstring.
        shapes: The default of --shapes.
        form: How a shape is written.
        peers: The default of --peers.
        named: The distributions to choose from.
    """
    options = argparse.ArgumentParser(description=about.splitlines()[0])
    options.add_argument("--shapes", default=shapes, help=f"{form}, separated by commas")
    options.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    options.add_argument("--peers", default=";".join(peers), help="names, separated by semicolons")
    distributions.add_arguments(options, names=named)
    options.add_argument("--seconds", type=float, default=1e9, help="start nothing after so many")
    options.add_argument("--measure-seconds", type=float, default=0.8, help="of each measure")
    options.add_argument("--platform", default="cuda", choices=["cuda", "cpu"])
    options.add_argument("--json", type=Path, help="write everything to this file")
    options.add_argument("--resume", action="store_true", help="keep the results in that file")
    options.add_argument("--plot", type=Path, help="draw value_and_grad to this SVG or PNG file")
    return options


def refuse(what: str) -> int:
    """Prints why nothing runs and returns the exit status."""
    print(f"error: {what}", file=sys.stderr)
    return 2
