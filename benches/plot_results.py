"""Draws the bar charts of README.md and docs/ from the figures in benches/results.

    python benches/plot_results.py [--out FOLDER] [--format svg|png]

Writes every chart anew, into docs/images as SVG by default. Needs matplotlib; the same version
writes the same bytes (scripts/requirements-train.txt pins the one that the test compares with).
"""

import argparse
import json
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benches" / "results"
OURS, OTHERS, BASELINE = "#1f77b4", "#b8bec6", "#8a929c"
MIB = 2**20
Record = dict[str, Any]
# A peer's name in the files, and in the charts.
NAMES = {
    "xentile": "xentile",
    "xentile as QuACK": "xentile",
    "xentile 1024 MiB": "xentile, 1 GiB",
    "xentile 256 MiB": "xentile, 256 MiB",
    "xentile 32 MiB": "xentile, 32 MiB",
    "xentile 8 MiB": "xentile, 8 MiB",
    "QuACK": "QuACK",
    "Liger CuTe": "Liger (CuTe)",
    "Liger": "Liger",
    "CCE, no filter": "CCE, no filter",
    "torch.compile": "torch.compile",
    "JAX dense": "dense JAX",
}


def load(file: str) -> tuple[Record, list[Record]]:
    """Returns what a file of results says of its run, and its measurements."""
    found = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    return found["about"], found["results"]


def where(about: Record, hardware: str | None = None) -> str:
    """The hardware, versions and date of a run, for a caption."""
    day = time.strftime("%Y-%m-%d", time.gmtime(about["unix_time"]))
    return f"{hardware or about['gpu']}, JAX {about['jax']}, {day}"


def colour(name: str) -> str:
    """Ours stands out, and the dense program is the baseline."""
    return OURS if name.startswith("xentile") else BASELINE if "dense" in name else OTHERS


def bars(axes: Axes, rows: Sequence[tuple[str, float | None]], label: str, form: str) -> None:
    """Horizontal bars, the first on top, each with its value; None is a peer that failed."""
    names = [name for name, _ in rows]
    values = [value or 0 for _, value in rows]
    drawn = axes.barh(names, values, color=[colour(name) for name in names], height=0.7)
    texts = ["fails" if value is None else form.format(value) for _, value in rows]
    axes.bar_label(drawn, texts, padding=3, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, max(values) * 1.22)
    axes.set_xlabel(label, fontsize=9)
    axes.tick_params(axis="y", length=0, labelsize=9)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)


def caption(figure: Figure, note: str) -> None:
    """Writes a note below all panels, in as many lines as its width takes."""
    width, height = figure.get_size_inches()
    lines = textwrap.wrap(note, width=int(width * 15))
    figure.text(0.5, 0.04 / height, "\n".join(lines), ha="center", fontsize=8.5, color="#444444")
    figure.tight_layout(rect=(0, (0.16 * len(lines) + 0.08) / height, 1, 1))


def one(results: Sequence[Record], peer: str, **of: object) -> Record:
    """The measurement of a peer with these properties."""
    (found,) = (r for r in results if r["peer"] == peer and all(r.get(k) == of[k] for k in of))
    return found


def copies(record: Record) -> float | None:
    """Value and gradient in multiples of the time to copy the logits once."""
    found = record["found"].get("value_and_grad", {})
    return found["median_ms"] / record["copy_ms"] if "median_ms" in found else None


def products(record: Record) -> float | None:
    """Value and gradients in multiples of the three matrix products alone."""
    found = record["found"]
    return found["median_ms"] / record["products_ms"] if "median_ms" in found else None


def extra_mib(record: Record) -> float | None:
    """Memory beyond operands and results: of the device's peak, else of the compiled program."""
    found = record["found"]
    if "peak_bytes" in found:
        return float(found["peak_bytes"] - record["bytes_of_all"]) / MIB
    return float(found["temp_bytes"]) / MIB if "temp_bytes" in found else None


def rows(
    results: Sequence[Record], peers: Sequence[str], of: Record, figure: Callable[..., Any]
) -> list[tuple[str, float | None]]:
    """A bar for each peer."""
    return [(NAMES[peer], figure(one(results, peer, **of))) for peer in peers]


def overview() -> Figure:
    """README's chart: both losses beside other projects, and what the linear one holds."""
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.3), width_ratios=(1, 1, 1))
    about, results = load("nvidia-h200/peers.json")
    of: Record = {"tokens": 4096, "vocab": 128256}
    peers = ["xentile", "QuACK", "Liger", "torch.compile", "JAX dense"]
    bars(axes[0], rows(results, peers, of, copies), "time / one copy of the logits", "{:.2f}")
    axes[0].set_title("cross_entropy\n4096 x 128256 logits", fontsize=10)
    linear_about, linear = load("nvidia-h100/linear-peers-by-spread.json")
    of = {"tokens": 8192, "vocab": 128256, "hidden": 2048, "distribution": "normal, std 1"}
    peers = ["xentile", "xentile 256 MiB", "QuACK", "Liger CuTe", "torch.compile", "JAX dense"]
    label = "time / its three matrix products"
    bars(axes[1], rows(linear, peers, of, products), label, "{:.2f}")
    axes[1].set_title("linear_cross_entropy\n8192 tokens, D 2048, V 128256", fontsize=10)
    label = "MiB beyond inputs and outputs"
    bars(axes[2], rows(linear, peers, of, extra_mib), label, "{:.0f}")
    axes[2].set_title("linear_cross_entropy\nmemory", fontsize=10)
    note = (
        f"Loss and gradients in bf16, shorter is better. Left: {where(about)}. "
        f"Middle and right: {where(linear_about)}."
    )
    caption(figure, note)
    return figure


def grid(
    panels: Sequence[tuple[str, list[tuple[str, float | None]]]],
    label: str,
    form: str,
    note: str,
    columns: int = 3,
) -> Figure:
    """Panels of bars, a shape each."""
    lines = -(-len(panels) // columns)
    most = max(len(bars_of) for _, bars_of in panels)
    size = (3.6 * columns, (0.85 + 0.27 * most) * lines + 0.3)
    figure, axes = plt.subplots(lines, columns, figsize=size, squeeze=False)
    for panel in axes.flat[len(panels) :]:
        panel.set_visible(False)
    for panel, (title, bars_of) in zip(axes.flat, panels, strict=False):
        bars(panel, bars_of, label, form)
        panel.set_title(title, fontsize=10)
    caption(figure, note)
    return figure


def logits_on_gpu() -> Figure:
    """Cross-entropy over logits beside other projects, a panel a shape."""
    about, results = load("nvidia-h200/peers.json")
    peers = ["xentile", "QuACK", "Liger", "torch.compile", "JAX dense"]
    shapes = dict.fromkeys((r["tokens"], r["vocab"]) for r in results)
    panels = [
        (f"{t} x {v}", rows(results, peers, {"tokens": t, "vocab": v}, copies)) for t, v in shapes
    ]
    note = f"cross_entropy, loss and gradient in bf16, shorter is better. {where(about)}."
    return grid(panels, "time / one copy of the logits", "{:.2f}", note)


def linear_on_gpu() -> Figure:
    """Linear cross-entropy beside other projects, a panel a shape."""
    about, results = load("nvidia-h200/linear-peers.json")
    peers = [
        "xentile as QuACK",
        "xentile 1024 MiB",
        "xentile 256 MiB",
        "xentile 32 MiB",
        "QuACK",
        "Liger",
        "CCE, no filter",
        "torch.compile",
        "JAX dense",
    ]
    shapes = dict.fromkeys((r["tokens"], r["hidden"], r["vocab"]) for r in results)
    known = {(r["peer"], r["tokens"], r["hidden"], r["vocab"]) for r in results}
    panels = []
    for t, d, v in shapes:
        of = {"tokens": t, "hidden": d, "vocab": v}
        ran = [peer for peer in peers if (peer, t, d, v) in known]
        panels.append((f"{t} x {d} x {v}", rows(results, ran, of, products)))
    note = (
        "linear_cross_entropy, loss and gradients in bf16, shorter is better. "
        f"{where(about)}. A peer without a bar did not run."
    )
    return grid(panels, "time / its three matrix products", "{:.2f}", note)


def linear_by_spread() -> Figure:
    """Linear cross-entropy by how logits are distributed, a panel a distribution."""
    about, results = load("nvidia-h100/linear-peers-by-spread.json")
    peers = ["xentile", "xentile 256 MiB", "QuACK", "Liger CuTe", "torch.compile", "JAX dense"]
    spreads = dict.fromkeys(r["distribution"] for r in results)
    panels = [
        (f"logits: {spread}", rows(results, peers, {"distribution": spread}, products))
        for spread in spreads
    ]
    note = (
        "linear_cross_entropy, 8192 tokens, D 2048, V 128256, loss and gradients in bf16, "
        f"shorter is better. {where(about)}."
    )
    return grid(panels, "time / its three matrix products", "{:.2f}", note, columns=2)


def linear_on_cpu() -> Figure:
    """Linear cross-entropy on a CPU: time and memory."""
    about, results = load("amd-epyc-family-25-model-17/linear-peers-bf16.json")
    peers = ["xentile", "xentile 8 MiB", "JAX dense"]
    panels = [
        (rows(results, peers, {}, lambda r: r["found"]["median_ms"]), "ms", "{:.0f}"),
        (rows(results, peers, {}, extra_mib), "MiB beyond inputs and outputs", "{:.0f}"),
    ]
    figure, axes = plt.subplots(1, 2, figsize=(8, 2.2))
    for panel, (bars_of, label, form) in zip(axes, panels, strict=True):
        bars(panel, bars_of, label, form)
    hardware = "AMD EPYC (family 25, model 17), 2 cores"
    note = (
        "linear_cross_entropy, 1024 tokens, D 768, V 50257, bf16, shorter is better. "
        f"{where(about, hardware)}."
    )
    caption(figure, note)
    return figure


CHARTS: dict[str, Callable[[], Figure]] = {
    "overview": overview,
    "cross-entropy-gpu": logits_on_gpu,
    "linear-cross-entropy-gpu": linear_on_gpu,
    "linear-cross-entropy-by-spread": linear_by_spread,
    "linear-cross-entropy-cpu": linear_on_cpu,
}


def main(arguments: list[str] | None = None) -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--format", choices=("svg", "png"), default="svg")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    # Ids in the file and its date would change with every run.
    plt.rcParams.update({"svg.hashsalt": "xentile", "figure.facecolor": "white"})
    for name, draw in CHARTS.items():
        figure = draw()
        metadata = {"Date": None} if given.format == "svg" else None
        figure.savefig(given.out / f"{name}.{given.format}", dpi=110, metadata=metadata)
        plt.close(figure)


if __name__ == "__main__":
    main()
