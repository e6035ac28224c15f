"""What drivers have in common: processes that measure one after the other, and what is written.

Right before each peer a yardstick is timed in a process that lives on, so that a ratio is of two
times that are seconds apart.
"""

import argparse
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import distributions
from shared import MARK, P, Problem

HERE = Path(__file__).resolve().parent
PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "optax",
    "tokamax",
    "torch",
    "triton",
    "liger-kernel",
    "quack-kernels",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "cut-cross-entropy",
)
# Seconds after which a peer is given up; tuners take most of them.
PATIENCE = 150
# Workers that import while another measures.
AHEAD = 3

Result = dict[str, Any]


class Worker:
    """A process that measures when it is told to; until then it imports."""

    def __init__(self, script: str, mode: str, problem: Problem) -> None:
        """Starts it."""
        environment = {
            **os.environ,
            # One piece, of which every array gets what it asks for: a pool that grows hands out
            # larger ones, and the peak would tell of that.
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
        """Lets it measure, and waits for it to end."""
        try:
            output, errors = self.process.communicate("go\n", timeout=seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            return {"error": f"not done after {seconds:.0f} s"}
        for line in output.splitlines():
            if line.startswith(MARK):
                found: Result = json.loads(without_folders(line.removeprefix(MARK)))
                return found
        said = (errors.strip().splitlines() or ["nothing"])[-1]
        said = f"ended with exit code {self.process.returncode}: {said}"
        return {"error": without_folders(said)[:160]}

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
    """A process that times the yardstick: PyTorch's, or XLA's where there is no PyTorch."""
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
    """Measures all problems, one after the other, while the next ones' processes import.

    `report` takes a problem, its yardstick in milliseconds where there is one, and what was found.
    `before` is called with each problem before anything is asked of its process.
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


class Results:
    """What is written to the files that were asked for, again after each result.

    With --resume, results of the JSON file that are no errors are kept.
    """

    def __init__(
        self, options: argparse.Namespace, to_markdown: Callable[[list[Result]], str]
    ) -> None:
        """Collects what is known beforehand."""
        words = [w if not Path(w).is_absolute() else Path(w).name for w in sys.argv[1:]]
        script = f"benches/peers/{Path(sys.argv[0]).name}"
        self.about = {
            "command": shlex.join(["python", script, *words]),
            "commit": os.environ.get("XENTILE_COMMIT"),
            "unix_time": int(time.time()),
            **describe_device(),
        }
        self.options = options
        self.to_markdown = to_markdown
        # What else the JSON and the last lines of the table tell, by name.
        self.others: dict[str, Any] = {}
        self.rows: list[Result] = []
        # What was known of the runs whose results are kept.
        self.earlier: list[Result] = []
        if options.resume and options.json and options.json.exists():
            kept = json.loads(options.json.read_text())
            self.rows = [row for row in kept["results"] if "error" not in row["found"]]
            self.earlier = [*kept.get("earlier", []), kept["about"]]

    def lacking(self, problems: list[P]) -> list[P]:
        """Those problems of which there is no result."""

        def has(row: Result, problem: Problem) -> bool:
            return all(row[name] == of for name, of in asdict(problem).items() if name in row)

        return [one for one in problems if not any(has(row, one) for row in self.rows)]

    def text(self) -> str:
        """The table, and what else there is."""
        lines = [self.to_markdown(self.rows)]
        for title, found in self.others.items():
            lines += [f"{title}, {of}: {what}" for of, what in found.items()]
        return "\n\n".join(lines)

    def add(self, row: Result) -> None:
        """Writes one more."""
        self.rows.append(row)
        if self.options.markdown:
            self.options.markdown.write_text(self.text() + "\n")
        if self.options.json:
            others = {title.replace(" ", "_"): found for title, found in self.others.items()}
            if self.earlier:
                others["earlier"] = self.earlier
            everything = {"about": self.about, **others, "results": self.rows}
            self.options.json.write_text(json.dumps(everything, indent=1) + "\n")


def describe_device() -> dict[str, Any]:
    """The GPU and its driver, as nvidia-smi tells, and the versions of what is compared."""
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        gpu, driver = (text.strip() for text in lines.splitlines()[0].split(","))
    except (OSError, subprocess.CalledProcessError):
        gpu, driver = None, None
    return {"gpu": gpu, "driver": driver, "python": platform.python_version(), **versions}


def without_folders(text: str) -> str:
    """A message without the folders of this machine, and without colours."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return re.sub(r"(/[^\s/'\":]+)+/", ".../", text)


def error_cells(row: Result, cells: int) -> list[str]:
    """So many cells of a row that has an error."""
    return [without_folders(row["error"]).replace("|", "/")] + [""] * (cells - 1)


def table(columns: list[str], rows: list[list[str]]) -> list[str]:
    """The lines of a table in Markdown."""
    head = [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    return head + [f"| {' | '.join(row)} |" for row in rows]


def mebibytes(peak: int | None, beyond: int) -> str:
    """Memory beyond so many bytes, in MiB."""
    return "" if peak is None else f"{(peak - beyond) / 2**20:.1f}"


def draw(
    path: Path, title: str, unit: str, bars: Mapping[tuple[str, str], float], peers: list[str]
) -> None:
    """Draws bars of a shape and a peer each, a group a shape; says so where it cannot."""
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
        places = [place + index * width for place in range(len(shapes))]
        colour = colours[index % len(colours)]
        axes.bar(places, heights, width, label=peer, color=colour)
    if bars and max(bars.values()) > 8:
        axes.set_yscale("log")  # one that is far off would leave the others no height
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
    """The options that every driver has; distributions are those called `named`."""
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
    options.add_argument("--markdown", type=Path, help="write the table to this file too")
    options.add_argument("--plot", type=Path, help="draw value_and_grad to this SVG or PNG file")
    return options


def refuse(what: str) -> int:
    """Says why nothing runs; the exit code."""
    print(f"error: {what}", file=sys.stderr)
    return 2
