"""`jit`: the same passes op by op, compiled, and compiled with our kernels."""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import harness

from . import tables
from .config import KERNELS, Spec, models
from .tables import Row

Cell = dict[str, Any]
WAYS = ("op by op", "jit", "jit, our kernels")


def cells(spec: Spec) -> Iterator[tuple[Cell, list[Cell]]]:
    """A cell for each size, length and policy; a row for each mode and way to run it."""
    modes = [mode for mode in spec.modes if mode != "step"]
    # The slowest comes last.
    rows = [{"mode": mode, "how": how} for how in reversed(WAYS) for mode in modes]
    return (({**cell, "steps": spec.steps}, rows) for cell in models(spec))


def prepare(cell: Cell) -> Callable[[Cell], Row]:
    """Makes parameters and data, and returns a function that measures a row.

    The kernels of the cell are those of the first two ways.
    """
    from . import model
    from .compiled import Compiling, device_limit

    limit = device_limit(cell["memory_limit"])
    program = model.program_of(cell)
    params = Compiling(lambda: model.parameters(program), limit)()
    batch = model.random_batch(cell)

    def measure(variant: Cell) -> Row:
        how, mode = variant["how"], variant["mode"]
        kernels = dict.fromkeys(KERNELS, "ours") if how == WAYS[2] else {}
        chosen = {**cell, **kernels}
        chosen_program = model.program_of(chosen)
        if how == WAYS[0]:
            start = partial(model.op_by_op(chosen_program, params, mode), batch)
        else:
            run = Compiling(model.pass_of(chosen_program, mode), limit)
            start = partial(run.start, params, batch)
        with model.attention_by(chosen["attention"]):
            first, *found = harness.seconds_of_each(start, 1 + cell["steps"])
        return {"first": first, "median": statistics.median(found)}

    return measure


def table(rows: Sequence[Row]) -> str:
    """A line for each row."""
    return tables.listing(
        rows,
        [
            *tables.make_case_columns("size", "length", "policy", "mode", "how"),
            ("status", tables.status),
            ("first (s)", tables.make_figure_column("first", tables.seconds)),
            ("median (s)", tables.make_figure_column("median", tables.seconds)),
        ],
    )


def words(rows: Sequence[Row]) -> str:
    """Sentences on the gain of compiling, when it pays, and the gain of kernels."""
    sentences = [tables.ends(rows)]
    by: dict[str, dict[str, Row]] = {}
    for row in tables.finished(rows):
        by.setdefault(repr({**row["case"], "how": None}), {})[row["case"]["how"]] = row
    for of in by.values():
        if not set(WAYS[:2]) <= of.keys():
            continue
        eager, jit = of[WAYS[0]], of[WAYS[1]]
        case, times = jit["case"], eager["median"] / jit["median"]
        line = (
            f"{case['mode']} of {case['size']} at length {case['length']} in {case['policy']} runs "
            f"{times:.2f} times as fast compiled as op by op"
        )
        saved = eager["median"] - jit["median"]
        if saved > 0:
            more = max(jit["first"] - eager["first"], 0) / saved
            line += f", which has made up for compiling by step {1 + math.ceil(more)}"
        if WAYS[2] in of:
            line += f"; our kernels take {of[WAYS[2]]['median'] / jit['median']:.2f} of its time"
        sentences.append(f"{line}.")
    return " ".join(filter(None, sentences))
