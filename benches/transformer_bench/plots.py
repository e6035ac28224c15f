"""Pictures of a page's tables, as SVG, each with a title."""

import io
from collections.abc import Callable, Sequence
from typing import Any

from . import kernels, layers, memory, tables
from .tables import Row

# The most bars that are legible.
MOST = 24
GREY = "0.75"
# What a program's label has of its case.
PROGRAM = ("size", "length", "policy", "mode")


def figure_of(command: str, rows: Sequence[Row]) -> str | None:
    """A picture of a command's rows; None if none has a measurement."""
    found = tables.finished(rows)
    if not found or command not in PICTURES:
        return None
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    # Text is not drawn as outlines, and the same rows give the same file.
    with pyplot.rc_context({"svg.fonttype": "none", "svg.hashsalt": command, "font.size": 9}):
        count, draw = PICTURES[command]
        bars_high = 8 if command in ("precision", "attention") else min(MOST, max(8, len(found)))
        size = (5.5 * count + 2, 1.5 + 0.28 * bars_high)
        figure, axes = pyplot.subplots(1, count, figsize=size, layout="constrained", squeeze=False)
        draw(found, *axes[0])
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
        pyplot.close(figure)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def label(case: Row, *names: str) -> str:
    """The label of a bar."""
    chosen = tables.kernels(case) if "norm" in case else "xla"
    texts = [str(case[name]) for name in names if name in case]
    # On a line of its own, as kernels can be many.
    return "\n".join([", ".join(texts), *([] if chosen == "xla" else [chosen])])


def bars(axes: Any, values: dict[str, float], title: str) -> None:
    """A bar for each value, the first on top."""
    shown = dict(list(values.items())[:MOST])
    axes.bar_label(axes.barh(list(shown), list(shown.values())), fmt=" %.3g")
    axes.margins(x=0.15)
    axes.invert_yaxis()
    axes.set_title(title)


def stacks(axes: Any, values: dict[str, dict[str, float]], title: str) -> None:
    """A bar of pieces for each value, the first on top, with a legend of the pieces."""
    shown = dict(list(values.items())[:MOST])
    pieces = list(dict.fromkeys(piece for of in shown.values() for piece in of))
    left = dict.fromkeys(shown, 0.0)
    # Colours of tab20 come in pairs, whose second are lighter.
    for at, piece in enumerate(pieces):
        widths = [of.get(piece, 0.0) for of in shown.values()]
        colour = GREY if piece == "other" else f"C{at}" if at < 10 else None
        hatch = None if at < 10 else "///"
        axes.barh(
            list(shown), widths, left=list(left.values()), label=piece, color=colour, hatch=hatch
        )
        for name, width in zip(shown, widths, strict=True):
            left[name] += width
    axes.invert_yaxis()
    axes.set_title(title)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=7, frameon=False)


def plot_time(rows: Sequence[Row], axes: Any) -> None:
    """Average of steps, after the most steps of warm-up."""
    most = max(row["case"]["warmup"] for row in rows)
    values = {
        label(row["case"], *PROGRAM): row["average"]
        for row in rows
        if row["case"]["warmup"] == most
    }
    bars(axes, values, f"average of a step (s), after {most} of warm-up")


def plot_compare(rows: Sequence[Row], axes: Any) -> None:
    """Time of ours over XLA's, steps in line."""
    values = {
        label(row["case"], *PROGRAM): row["in_line_ours"] / row["in_line_xla"] for row in rows
    }
    bars(axes, values, "ours in times of XLA's, in line")


def plot_jit(rows: Sequence[Row], axes: Any) -> None:
    """The median of each way to run a pass."""
    values = {label(row["case"], *PROGRAM, "how"): row["median"] for row in rows}
    bars(axes, values, "median of a pass (s)")


def plot_memory(rows: Sequence[Row], axes: Any, below: Any) -> None:
    """The peak by category, and temporaries over the largest programs' instructions."""
    values = {
        label(row["case"], *PROGRAM): {
            name: row[f"{name}_bytes"] / 2**20 for name in memory.CATEGORIES
        }
        for row in rows
    }
    stacks(axes, values, "peak by category (MiB)")
    ordered = sorted(rows, key=lambda row: row["peak_bytes"], reverse=True)
    for row in [row for row in ordered if row.get("timeline")][:4]:
        points = [count / 2**20 for count in row["timeline"]]
        places = [at / len(points) for at in range(len(points))]
        named = label(row["case"], *PROGRAM)
        below.plot(places, points, label=named, drawstyle="steps-post")
    below.set_title("temporaries in use (MiB)")
    below.set_xlabel("share of the program's instructions that have run")
    if below.lines:
        below.legend(fontsize=7)


def plot_layers(rows: Sequence[Row], axes: Any, below: Any) -> None:
    """Shares of the parts in a layer's sum, and of the other parts in the model's sum."""
    of_layer: dict[str, dict[str, float]] = {}
    of_model: dict[str, dict[str, float]] = {}
    for cell, found in layers.groups(rows):
        name = label(cell, "size", "length", "policy", "phase")
        took = {row["case"]["part"]: 1e3 * row["median"] for row in found}
        of_layer[name] = {
            part: one
            for part, one in took.items()
            if part != layers.WHOLE and not layers.around(part)
        }
        outside = {part: took[part] for part in took if layers.around(part)}
        outside.pop(layers.MODEL, None)
        if layers.WHOLE in took:
            of_model[name] = {"all layers": cell["layers"] * took[layers.WHOLE], **outside}
    for place, values, title in (
        (axes, of_layer, "parts of a layer (share of their sum)"),
        (below, of_model, "the model (share of the sum)"),
    ):
        shares = {
            name: {part: one / sum(of.values()) for part, one in of.items()}
            for name, of in values.items()
            if of
        }
        stacks(place, shares, title)


def plot_kernels(rows: Sequence[Row], axes: Any, below: Any) -> None:
    """Shares of parts and kinds in the time of all kernels, at the longest lengths if many."""
    rows = rows if len(rows) <= MOST else kernels.longest(rows)
    for place, key, title in (
        (axes, "by_part", "kernels by part (share of time)"),
        (below, "by_kind", "kernels by kind (share of time)"),
    ):
        shares = {
            label(row["case"], "size", "length", "policy", "phase", "part"): {
                part: one / row["kernels"] for part, one in row[key].items()
            }
            for row in rows
        }
        stacks(place, shares, title)


def plot_precision(rows: Sequence[Row], axes: Any, below: Any) -> None:
    """Errors of gradients by layer, and of sums of many small numbers."""
    for row in rows:
        if row["case"]["what"] == "pass":
            errors = row["gradient_errors"]
            named = f"{row['case']['size']}, {row['case']['policy']}"
            axes.plot(list(errors), list(errors.values()), "o-", label=named)
    axes.set_yscale("log")
    axes.tick_params(axis="x", rotation=60)
    axes.set_title("error of gradients beside float64 (share of their norm)")
    if axes.lines:
        axes.legend(fontsize=7)
    sums = {
        f"{row['case']['of']} in {row['case']['sum_in']}": abs(row["sum"] - row["right"])
        for row in rows
        if row["case"]["what"] == "sum"
    }
    bars(below, sums, "error of a sum of 1000 numbers, by what it is added in")


def plot_attention(rows: Sequence[Row], axes: Any, below: Any) -> None:
    """Time of each pass by length."""
    for place, mode in ((axes, "forward"), (below, "backward")):
        lines: dict[str, dict[int, float]] = {}
        for row in rows:
            case = row["case"]
            if case["mode"] == mode:
                named = f"{case['implementation']}, heads of {case['head_size']}, {case['policy']}"
                lines.setdefault(named, {})[case["length"]] = 1e3 * row["median"]
        for name, of in lines.items():
            place.plot(list(of), list(of.values()), "o-", label=name)
        place.set_xscale("log", base=2)
        lengths = sorted({length for of in lines.values() for length in of})
        place.set_xticks(lengths, labels=[str(length) for length in lengths])
        place.set_yscale("log")
        place.set_xlabel("length")
        place.set_title(f"attention, {mode} (ms)")
        if place.lines:
            place.legend(fontsize=7)


# The number of axes of a command's picture, and the function that draws on them.
PICTURES: dict[str, tuple[int, Callable[..., None]]] = {
    "time": (1, plot_time),
    "compare": (1, plot_compare),
    "memory": (2, plot_memory),
    "layers": (2, plot_layers),
    "kernels": (2, plot_kernels),
    "precision": (2, plot_precision),
    "attention": (2, plot_attention),
    "jit": (1, plot_jit),
}
