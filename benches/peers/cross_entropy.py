"""Times our cross-entropy beside that of other projects on one device, in one run.

    python benches/peers/cross_entropy.py --json FILE --plot FILE.svg

Run it with a Python that has pallas_bridge; peers that it lacks are rows that say so. Every peer on
every problem is a process of its own, and right before each the logits' bytes are copied: ratios
are to that copy. Times are the device's, medians, without first calls; many steps are enqueued for
each wait. Memory is what the process held at most beyond the logits.

What is measured:

- value_and_grad: the mean and its gradient. QuACK's is the gradient of a sum, which is what it has
  in two passes over the logits. Its floor is the copy: one reading and one writing.
- pair: losses of tokens, then the gradient for given cotangents. Its floor is 1.5 copies.
- forward: the mean alone. Its floor is half a copy.
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
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from shared import MARK, MEASURES, PASSES, Problem

HERE = Path(__file__).resolve().parent
# The worker of each peer.
PEERS = {
    "xentile": "in_jax.py",
    "xentile, logits dead": "in_jax.py",
    "JAX dense": "in_jax.py",
    "optax": "in_jax.py",
    "torch eager": "in_torch.py",
    "torch.compile": "in_torch.py",
    "Liger": "in_torch.py",
    "QuACK": "in_torch.py",
}
SHAPES = "2048x151643,4096x128256,8192x32000,8192x50257,4096x262144,32768x151936"
PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "optax",
    "torch",
    "triton",
    "liger-kernel",
    "quack-kernels",
    "nvidia-cutlass-dsl",
)


Report = Callable[[Problem, float | None, dict[str, Any]], None]


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
            stderr=subprocess.PIPE if mode != "copy" else subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def ask(self, line: str = "go") -> None:
        """Sends a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def result(self, seconds: float) -> dict[str, Any]:
        """Lets it measure, and waits for it to end."""
        try:
            output, errors = self.process.communicate("go\n", timeout=seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            return {"error": f"not done after {seconds:.0f} s"}
        for line in output.splitlines():
            if line.startswith(MARK):
                found: dict[str, Any] = json.loads(without_folders(line.removeprefix(MARK)))
                return found
        said = (errors.strip().splitlines() or ["nothing"])[-1]
        said = f"ended with exit code {self.process.returncode}: {said}"
        return {"error": without_folders(said)[:160]}

    def next_answer(self) -> dict[str, Any]:
        """The next answer of a process that goes on; an error where it has ended."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                found: dict[str, Any] = json.loads(line.removeprefix(MARK))
                return found
        return {"error": "the process that copies has ended"}

    def end(self) -> None:
        """Ends it."""
        self.process.kill()
        self.process.communicate()


def start_copier(problem: Problem) -> Worker:
    """A process that copies: PyTorch's copy, or XLA's where there is no PyTorch."""
    worker = Worker("in_torch.py", "copy", problem)
    worker.ask()
    worker.ask(problem.to_json())
    if "error" in worker.next_answer():
        worker.end()
        print("copies are XLA's: PyTorch cannot be used here", file=sys.stderr)
        worker = Worker("in_jax.py", "copy", problem)
        worker.ask()
    return worker


def measure(problems: list[Problem], deadline: float, report: Report) -> None:
    """Measures all problems, one after the other, while the next one's process imports."""
    copier = start_copier(problems[0])
    ahead = 3
    waiting: list[Worker] = []
    for index, problem in enumerate(problems):
        if time.monotonic() > deadline:
            report(problem, None, {"error": "not run: no time was left"})
            continue
        while len(waiting) < min(ahead, len(problems) - index):
            following = problems[index + len(waiting)]
            waiting.append(Worker(PEERS[following.peer], "measure", following))
        copier.ask(problem.to_json())
        copied = copier.next_answer()
        report(problem, copied.get("copy_ms"), waiting.pop(0).result(120))
    for worker in [*waiting, copier]:
        worker.end()


def describe_device() -> dict[str, Any]:
    """The GPU and its driver, as nvidia-smi tells, and the versions of what is compared."""
    versions = {}
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


def command_line() -> str:
    """The command, with files to write by their names alone."""
    words = [word if not Path(word).is_absolute() else Path(word).name for word in sys.argv[1:]]
    return shlex.join(["python", "benches/peers/cross_entropy.py", *words])


def without_folders(text: str) -> str:
    """A message without the folders of this machine, and without colours."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return re.sub(r"(/[^\s/'\":]+)+/", ".../", text)


def mebibytes(peak: int | None, beyond: int) -> str:
    """Memory beyond so many bytes, in MiB."""
    return "" if peak is None else f"{(peak - beyond) / 2**20:.1f}"


def rows_of(result: dict[str, Any], measured: str) -> list[str]:
    """The cells of one measure of one result."""
    found = result["found"]
    row = found if "error" in found else found.get(measured, {})
    if "error" in row:
        return [without_folders(row["error"]).replace("|", "/"), "", "", "", ""]
    if not row:
        return ["does not apply", "", "", "", ""]
    size, copied = result["logits_bytes"], result["copy_ms"]
    outputs = 1 if measured == "forward" else 2
    beyond = 1 if result["peer"].endswith("dead") else outputs
    ratio = f"{row['median_ms'] / copied:.3f}" if copied else ""
    floor = f"{row['median_ms'] / copied * 2 / PASSES[measured]:.3f}" if copied else ""
    return [
        f"{row['median_ms']:.4f}",
        ratio,
        floor,
        mebibytes(row.get("peak_bytes"), beyond * size),
        mebibytes(row.get("temp_bytes"), 0),
    ]


def to_markdown(results: list[dict[str, Any]]) -> str:
    """The table of all results, by measure and shape."""
    lines = []
    for measured in MEASURES:
        lines += [
            f"### {measured}",
            "",
            "| T x V | peer | ms | in copies | over its floor | extra MiB | compiled temp MiB |",
            "| --- " * 7 + "|",
        ]
        for result in results:
            shape = f"{result['tokens']} x {result['vocab']} {result['dtype']}"
            lines.append(
                f"| {shape} | {result['peer']} | {' | '.join(rows_of(result, measured))} |"
            )
        lines.append("")
    lines += [
        "Extra: the process's peak beyond logits and dlogits (forward, and logits dead: beyond",
        "logits alone), labels and per-token values included; empty where the peak is that of",
        "another measure.",
        "Liger writes dlogits over the logits, so that its extra is below 0.",
    ]
    return "\n".join(lines)


def plot(results: list[dict[str, Any]], path: Path, title: str) -> None:
    """Bars of value_and_grad, in copies, a group a shape; says so where it cannot be drawn."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        print(f"no plot: {error}", file=sys.stderr)
        return
    shapes = list(dict.fromkeys((r["tokens"], r["vocab"]) for r in results))
    figure, axes = pyplot.subplots(figsize=(2 + 1.8 * len(shapes), 4.5))
    width = 0.85 / len(PEERS)
    for index, peer in enumerate(PEERS):
        heights = []
        for shape in shapes:
            found = [
                r["found"]["value_and_grad"]["median_ms"] / r["copy_ms"]
                for r in results
                if (r["tokens"], r["vocab"]) == shape
                and r["peer"] == peer
                and r["copy_ms"]
                and "median_ms" in r["found"].get("value_and_grad", {})
            ]
            heights.append(found[0] if found else 0)
        places = [place + index * width for place in range(len(shapes))]
        axes.bar(places, heights, width, label=peer)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks([n + 0.4 for n in range(len(shapes))], [f"{t} x {v}" for t, v in shapes])
    axes.set_ylabel("copies of the logits")
    axes.set_title(title)
    axes.legend(fontsize="small", ncols=2)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default=SHAPES, help="TxV, separated by commas")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--peers", default=";".join(PEERS), help="names, separated by semicolons")
    parser.add_argument("--seconds", type=float, default=1e9, help="start nothing after so many")
    parser.add_argument("--measure-seconds", type=float, default=0.4, help="of each measure")
    parser.add_argument("--platform", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--no-first-call", action="store_true", help="leave out first calls")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    parser.add_argument("--markdown", type=Path, help="write the table to this file too")
    parser.add_argument("--plot", type=Path, help="draw value_and_grad to this SVG or PNG file")
    return parser.parse_args(arguments)


def main() -> int:
    """Measures, prints, writes; the exit code is 1 where ours failed."""
    options = parse(sys.argv[1:])
    deadline = time.monotonic() + options.seconds
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes.split(",")]
    peers = options.peers.split(";")
    if unknown := set(peers) - set(PEERS):
        print(f"error: no peer {unknown.pop()}: choose from {'; '.join(PEERS)}", file=sys.stderr)
        return 2
    problems = [
        Problem(peer, tokens, vocab, options.dtype, options.platform, options.measure_seconds)
        for tokens, vocab in shapes
        for peer in peers
    ]
    results: list[dict[str, Any]] = []

    def report(problem: Problem, copied: float | None, found: dict[str, Any]) -> None:
        results.append(
            {
                "peer": problem.peer,
                "tokens": problem.tokens,
                "vocab": problem.vocab,
                "dtype": problem.dtype,
                "logits_bytes": problem.bytes,
                "copy_ms": copied,
                "found": found,
            }
        )
        cells = {measured: rows_of(results[-1], measured)[:3] for measured in MEASURES}
        print(problem.peer, problem.tokens, problem.vocab, cells, file=sys.stderr, flush=True)

    about = {
        "command": command_line(),
        "commit": os.environ.get("XENTILE_COMMIT"),
        "unix_time": int(time.time()),
        **describe_device(),
    }
    first: dict[str, dict[str, Any]] = {}
    if not options.no_first_call:
        for peer in ("xentile", "JAX dense"):
            problem = replace(problems[0], peer=peer)
            first[peer] = Worker(PEERS[peer], "first_call", problem).result(120)
    measure(problems, deadline, report)
    text = to_markdown(results)
    for peer, found in first.items():
        text += f"\n\nfirst call, {peer}: {found}"
    print(text)
    if options.markdown:
        options.markdown.write_text(text + "\n")
    if options.json:
        everything = {"about": about, "first_call": first, "results": results}
        options.json.write_text(json.dumps(everything, indent=1) + "\n")
    if options.plot:
        plot(results, options.plot, f"value_and_grad, {options.dtype}, {about['gpu']}")
    ours = [row["found"] for row in results if row["peer"].startswith("xentile")]
    wrong = any("error" in found or any("error" in m for m in found.values()) for found in ours)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
