"""`compare`: the same passes by XLA's kernels and by ours, in turns in one process.

Two processes differ by more than their kernels: in each XLA autotunes GEMMs, and may choose others,
and kernels may be started at another speed. In one process GEMMs of both programs are chosen once,
and steps of both take turns.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import harness
from train.config import InputError

from . import tables
from .config import KERNELS, Spec, models
from .tables import Row
from .timing import starter

Cell = dict[str, Any]
# Steps in a row without a wait, so that starting kernels is hidden if it can be.
IN_LINE = 5
# XLA's program runs a second time in each turn: the difference is the resolution of the times.
PROGRAMS = ("xla", "ours", "again")


def cells(spec: Spec) -> Iterator[tuple[Cell, list[Cell]]]:
    """A cell for each size, length and policy; a row for each mode.

    Raises:
        InputError: No kernel is ours.
    """
    if "ours" not in (getattr(spec, kernel) for kernel in KERNELS):
        raise InputError("compare sets kernels of ours beside XLA's: give --norm auto, say")
    rows = [{"mode": mode, "steps": spec.steps} for mode in spec.modes]
    return ((cell, rows) for cell in models(spec))


def prepare(cell: Cell) -> Callable[[Cell], Row]:
    """Makes data, and returns a function that makes parameters and measures a row."""
    from . import model
    from .compiled import Compiling, device_limit

    limit = device_limit(cell["memory_limit"])
    program = model.program_of(cell)
    batch = model.random_batch(cell)
    theirs = {**cell, **{kernel: "xla" for kernel in KERNELS if cell[kernel] == "ours"}}

    @cache
    def held_of(is_step: bool) -> list[Any]:
        initial = program._initial if is_step else lambda: model.parameters(program)
        return [Compiling(initial, limit)()]

    def measure(variant: Cell) -> Row:
        mode = variant["mode"]
        held = held_of(mode == "step")
        starts: dict[str, Callable[[], Any]] = {}
        for name, of in (("xla", theirs), ("ours", cell)):
            starts[name] = starter(model.program_of(of), mode, limit, held, batch)
            with model.attention_by(of["attention"]):
                starts[name]()
        starts["again"] = starts["xla"]
        return summary(turns(starts, variant["steps"]))

    return measure


def turns(
    starts: dict[str, Callable[[], Any]], count: int
) -> dict[str, tuple[list[float], list[float]]]:
    """Seconds of a step, waited for and in line, of each turn of programs.

    Args:
        starts: What starts a step of each program and does not wait for its results.
        count: How many turns each has, after one of warm-up.
    """

    def turn_of(start: Callable[[], Any]) -> Callable[[], tuple[float, float]]:
        clock = harness.wall_clock(start)

        def turn() -> tuple[float, float]:
            waited = clock(1)
            # In a long step the time to start it is hidden.
            return waited, clock(IN_LINE) if waited < harness.LEAST_SECONDS else waited

        return turn

    of_programs = {name: turn_of(start) for name, start in starts.items()}
    found = harness.in_turns(of_programs, least=count, most=count)
    return {name: ([w for w, _ in of], [line for _, line in of]) for name, of in found.items()}


def summary(found: dict[str, tuple[list[float], list[float]]]) -> Row:
    """The medians of each program, in seconds: `median_NAME` waited for, and `in_line_NAME`."""
    row: Row = {}
    for name in PROGRAMS:
        waited, in_line = found[name]
        row[f"median_{name}"] = statistics.median(waited)
        row[f"in_line_{name}"] = statistics.median(in_line)
    return row


def pair(row: Row, figure: str, one: str = "ours") -> tuple[Row, Row]:
    """The measurements of a program and of XLA's, as rows for `tables.ratio`."""
    ours, of_xla = ({"case": row["case"], figure: row[f"{figure}_{name}"]} for name in (one, "xla"))
    return ours, of_xla


def ratio(row: Row, figure: str, one: str) -> str:
    """A program's measurement over XLA's; "" if a row has none."""
    if row["status"] != "ok":
        return ""
    return f"{tables.ratio(pair(row, figure, one), figure):.3f}"


def table(rows: Sequence[Row]) -> str:
    """A line for each row."""
    columns = tables.make_case_columns("size", "batch", "length", "policy", "kernels", "mode")
    columns.append(("status", tables.status))
    for figure, head in (("median", ""), ("in_line", "in line, ")):
        columns += [
            (f"{head}XLA's (s)", tables.make_figure_column(f"{figure}_xla", tables.seconds)),
            ("ours (s)", tables.make_figure_column(f"{figure}_ours", tables.seconds)),
            ("ours of XLA's", partial(ratio, figure=figure, one="ours")),
        ]
    columns.append(("XLA's again", partial(ratio, figure="in_line", one="again")))
    return tables.listing(rows, columns)


def words(rows: Sequence[Row]) -> str:
    """Sentences by kernels and pass, and on the resolution of the times."""
    sentences = [tables.ends(rows)]
    found = tables.finished(rows)
    by: dict[tuple[str, str], list[Row]] = {}
    for row in found:
        by.setdefault((tables.kernels(row["case"]), row["case"]["mode"]), []).append(row)
    for (kernels, mode), of in by.items():
        for figure, what in (("median", "waited for"), ("in_line", "in line")):
            took = tables.compared_times([pair(row, figure) for row in of], figure)
            sentences.append(f"With kernels {kernels} {mode}, {what}, takes {took}")
    if found:
        again = [tables.ratio(pair(row, "in_line", "again"), "in_line") for row in found]
        sentences.append(f"XLA's program in line takes {tables.span(again)} of its own time.")
    return " ".join(filter(None, sentences))
