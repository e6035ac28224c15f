"""Trains with every kernel from one seed, and compares curves, speed and memory.

    scripts/validate_training.sh [--num_train_steps N] [--out DIR] [-- OPTIONS OF train]

Writes validation.md, validation.json, loss.svg and a run log of each run to the folder. Each run
is a process of its own, so that the peak of memory is its own. The reference for what a difference
means is the baseline's own spread: the same run with each batch summed in another order.

On a GPU two more runs get a budget of memory that is enforced, in which the baseline must run out,
saying which kernel fits, and fused_linear must train.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import log

ROOT = Path(__file__).resolve().parents[2]
# In blocks plain JAX alone.
RECURRENT = [f"--{part}_kernel=baseline" for part in ("linear_attention", "conv")]
BLOCK = [f"--{part}_kernel=baseline" for part in ("norm", "mlp", "attention")] + RECURRENT
# By the name in the table: what is asked for besides the options of all.
RUNS = {
    "baseline": ["--ce_kernel_type", "baseline", *BLOCK],
    "baseline, permuted": ["--ce_kernel_type", "baseline", *BLOCK, "--permute_batch"],
    "fused": ["--ce_kernel_type", "fused", *BLOCK],
    "fused_linear": ["--ce_kernel_type", "fused_linear", *BLOCK],
    "auto": [],
}
BASELINE, PERMUTED = list(RUNS)[:2]
# Of a hybrid too: what differs from `auto` is linear attention and convolutions alone.
HYBRID_RUNS = {"auto, plain recurrences": RECURRENT}
# Steps at which tokens a second are reported: warmed up, and steady.
WARM, STEADY = 5, 10
# What a card of 32 GB has for XLA where it takes 0.98 of it.
BUDGET_GIB = 31.36
BUDGETED = ["--model_size", "qwen2.5-0.5b", "--remat", "--num_train_steps", "5"]
# How many times the baseline's own spread a kernel's curve may be off it.
ALLOWED = 4.0
# What logits rounded to bfloat16 move a mean of some hundred tokens by, where that spread is less.
LEAST_SPREAD = 5e-4
# Steps at the end whose mean loss is compared.
LATE = 10


class ValidationError(RuntimeError):
    """A run that failed, or ended as it should not."""


@dataclass(frozen=True)
class Curve:
    """What one run's log says."""

    losses: list[float]
    tokens_per_second: list[float]
    peak_bytes: int
    peak_source: str
    start: log.Record

    @property
    def warm(self) -> float | None:
        """Tokens a second of step `WARM`."""
        return self.tokens_per_second[WARM - 1] if len(self.losses) >= WARM else None

    @property
    def steady(self) -> float | None:
        """Mean tokens a second of the steps from `STEADY` on: all tokens over all seconds."""
        rest = self.tokens_per_second[STEADY - 1 :]
        return statistics.harmonic_mean(rest) if rest else None


def run(name: str, options: Sequence[str], out: Path) -> Curve:
    """Trains in a process of its own, and reads its log.

    Raises:
        ValidationError: It failed.
    """
    file = out / f"{name.replace(', ', '-')}.jsonl"
    result = start([*options, "--log", str(file)])
    if result.returncode != 0:
        raise ValidationError(f"run {name} ended with {result.returncode}:\n{result.stdout}")
    return curve_of(log.read(file))


def start(options: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Runs `python -m train` in the root of the repository."""
    folders = [str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "-m", "train", *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def curve_of(records: Sequence[log.Record]) -> Curve:
    """What a log says of its run."""
    steps = [record for record in records if record["record"] == "step"]
    return Curve(
        [step["loss"] for step in steps],
        [step["tokens_per_second"] for step in steps],
        max(step["peak_bytes"] for step in steps),
        steps[-1]["peak_source"],
        records[0],
    )


def check_text(curves: dict[str, Curve]) -> None:
    """Checks that all runs had the same text, which by default is the repository's.

    Raises:
        ValidationError: It was changed meanwhile.
    """
    texts = {name: curve.start["text_sha256"] for name, curve in curves.items()}
    other = [name for name, text in texts.items() if text != texts[BASELINE]]
    if other:
        raise ValidationError(
            f"run {other[0]} read another text than {BASELINE}: leave the files alone while "
            "this runs, or name others with --text"
        )


def compare(curves: dict[str, Curve]) -> dict[str, Any]:
    """The figures of all runs, and whether the kernels' curves are the baseline's.

    A curve is the baseline's where two differences from it are each at most `ALLOWED` times the
    baseline's own, between its two orders of summing: the median over all steps, and that of the
    mean loss of the last `LATE` steps. The largest is reported and not judged: at a step that is
    unstable in every run, last bits alone make it large.
    """
    baseline = np.array(curves[BASELINE].losses)

    def differences(curve: Curve) -> dict[str, float]:
        # NaN makes all three NaN, which is within no bound.
        off = np.array(curve.losses) - baseline
        return {
            "median_difference": float(np.median(np.abs(off))),
            "late_difference": float(abs(off[-LATE:].mean())),
            "largest_difference": float(np.abs(off).max()),
        }

    own = differences(curves[PERMUTED])
    allowed = {name: ALLOWED * max(own[name], LEAST_SPREAD) for name in list(own)[:2]}
    rows: dict[str, dict[str, Any]] = {}
    for name, curve in curves.items():
        found = differences(curve)
        rows[name] = {
            "final_loss": curve.losses[-1],
            **found,
            f"tokens_per_second_step_{WARM}": curve.warm,
            "tokens_per_second": curve.steady,
            "peak_bytes": curve.peak_bytes,
            "peak_source": curve.peak_source,
            "is_same": all(found[one] <= most for one, most in allowed.items()),
        }
    kernels = [curve.losses[-1] for name, curve in curves.items() if name != PERMUTED]
    return {
        "steps": len(baseline),
        "runs": rows,
        "std_between_kernels": float(np.std(kernels)),
        "std_of_baseline": float(np.std([baseline[-1], curves[PERMUTED].losses[-1]])),
        "allowed": allowed,
        "passed": all(row["is_same"] for row in rows.values()),
    }


def markdown(found: dict[str, Any], about: dict[str, Any]) -> str:
    """The table, with what was run where."""
    last = found["steps"]
    sources = {row["peak_source"] for row in found["runs"].values()}
    memory = "compiled program" if sources == {"compiled"} else "device"
    heads = ["run", "final loss", "difference, median", f"of the last {LATE} steps", "largest"]
    heads += [f"tokens/s, step {WARM}", f"steps {STEADY} to {last}", f"peak memory ({memory})"]
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for name, row in found["runs"].items():
        differences = [row[f"{which}_difference"] for which in ("median", "late", "largest")]
        speeds = [row[f"tokens_per_second_step_{WARM}"], row["tokens_per_second"]]
        cells = [name, f"{row['final_loss']:.4f}", *(f"{one:.5f}" for one in differences)]
        cells += ["" if speed is None else f"{speed:.0f}" for speed in speeds]
        lines.append(f"| {' | '.join(cells)} | {row['peak_bytes'] / 2**20:.1f} MiB |")
    verdict = "the same" if found["passed"] else "NOT the same"
    median, late = found["allowed"].values()
    lines += [
        "",
        f"After {last} steps the standard deviation of the final loss between kernels is "
        f"{found['std_between_kernels']:.5f}, and between the baseline's two orders of summing "
        f"{found['std_of_baseline']:.5f}. The curves are {verdict}: allowed are {median:.5f} of "
        f"the median and {late:.5f} of the last {LATE} steps, {ALLOWED:g} times the baseline's "
        f"own or {LEAST_SPREAD:g}.",
        "",
        *(f"- {key}: {value}" for key, value in about.items()),
    ]
    if memory == "compiled program":
        lines.append(
            "- memory: what the compiled step holds (`memory_analysis`), as a CPU counts no peak"
        )
    return "\n".join(lines) + "\n"


def plot(curves: dict[str, Curve], file: Path) -> None:
    """Draws the curves of the loss, and below them their differences from the baseline's."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(
        2, 1, sharex=True, figsize=(7, 6), height_ratios=(2, 1), layout="constrained"
    )
    baseline = curves[BASELINE].losses
    styles = ("-", "--", "-.", ":", (0, (5, 1)))
    for (name, curve), style in zip(curves.items(), styles, strict=False):
        steps = range(1, len(curve.losses) + 1)
        above.plot(steps, curve.losses, linestyle=style, label=name)
        differences = [one - other for one, other in zip(curve.losses, baseline, strict=True)]
        below.plot(steps, differences, linestyle=style)
    above.set_ylabel("loss (nats a token)")
    above.legend()
    below.set_ylabel("less the baseline's")
    below.set_xlabel("step")
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)


def gpu_memory_gib() -> float | None:
    """Memory of the first NVIDIA GPU, or None where there is none."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return float(found.splitlines()[0]) / 1024


def within_budget(out: Path) -> dict[str, Any]:
    """Holds the baseline and fused_linear to a budget of GPU memory that XLA's allocator enforces.

    Raises:
        ValidationError: The baseline trained, or did not say what fits; or fused_linear failed.
    """
    budget = [*BUDGETED, "--memory_budget", str(BUDGET_GIB)]
    dense = start([*budget, "--ce_kernel_type", "baseline"])
    last_line = (dense.stdout.strip().splitlines() or [""])[-1]
    if dense.returncode != 1 or "fused_linear (" not in last_line:
        raise ValidationError(
            f"baseline in {BUDGET_GIB} GiB ended with {dense.returncode}; it should run out of "
            f"memory and name fused_linear:\n{dense.stdout}"
        )
    curve = run("budget", [*budget, "--ce_kernel_type", "fused_linear"], out)
    return {
        "budget_gib": BUDGET_GIB,
        "baseline": last_line,
        "fused_linear_peak_bytes": curve.peak_bytes,
        "fused_linear_losses": curve.losses,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all, and returns 0 where the curves are the same and 1 where not."""
    parser = argparse.ArgumentParser(prog="validate_training", description=__doc__.split("\n")[0])
    parser.add_argument("--num_train_steps", type=int, default=50)
    parser.add_argument("--out", type=Path, default=ROOT / "target" / "validation")
    parser.add_argument("options", nargs="*", help="options of `python -m train`, after --")
    arguments = parser.parse_args(argv)
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    common = ["--num_train_steps", str(arguments.num_train_steps), *arguments.options]
    try:
        curves: dict[str, Curve] = {}
        for name, options in (RUNS | HYBRID_RUNS).items():
            if name in HYBRID_RUNS and not curves[BASELINE].start["config"]["model"]["hybrid"]:
                continue
            curves[name] = run(name, [*common, *options], out)
            print(f"{name}: loss {curves[name].losses[-1]:.4f}", flush=True)
        check_text(curves)
        found = compare(curves)
        begun = curves[BASELINE].start
        machine = begun["machine"]
        versions = ", ".join(f"{name} {value}" for name, value in begun["versions"].items())
        about = {
            "command": shlex.join(["scripts/validate_training.sh", *(argv or sys.argv[1:])]),
            "machine": f"{begun['device']}, {machine['cores']} x {machine['cpu']}",
            "versions": versions,
            "date": f"{log.day(begun['unix_time'])}",
            "model": f"{begun['config']['model_size']}, {begun['parameters'] / 1e6:.2f} M "
            f"parameters, V = {begun['config']['model']['vocab']}, "
            f"{begun['config']['batch_size']} x {begun['config']['context_length']} tokens a step, "
            f"{begun['config']['dtype']}",
        }
        if gpu_memory_gib() is not None:
            found["within_budget"] = within_budget(out)
        else:
            missing = f"left out: training in {BUDGET_GIB} GiB, which takes an NVIDIA GPU"
            found["left_out"] = missing
            print(missing)
    except ValidationError as error:
        print(f"validate_training: error: {error}", file=sys.stderr)
        return 1
    text = markdown(found, about)
    (out / "validation.md").write_text(text, encoding="utf-8")
    report = json.dumps({"about": {**about, **begun["machine"]}, **found}, indent=1)
    (out / "validation.json").write_text(report + "\n", encoding="utf-8")
    plot(curves, out / "loss.svg")
    print(text)
    return 0 if found["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
