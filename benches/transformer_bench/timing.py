"""`time`: seconds of a step by size, length and steps of warm-up."""

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import harness

from . import tables
from .config import Spec, models
from .tables import Row

Cell = dict[str, Any]


def cells(spec: Spec) -> Iterator[tuple[Cell, list[Cell]]]:
    """A cell for each size, length and policy; a row for each mode and number of warm-ups."""
    rows = [
        {"mode": mode, "warmup": warmup, "steps": spec.steps}
        for mode, warmup in itertools.product(spec.modes, spec.warmups)
    ]
    return ((cell, rows) for cell in models(spec))


def prepare(cell: Cell) -> Callable[[Cell], Row]:
    """Makes parameters and data, and returns a function that measures a row.

    Raises:
        OutOfMemory: The parameters do not fit.
    """
    from . import model
    from .compiled import Compiling, OutOfMemory, device_limit

    limit = device_limit(cell["memory_limit"])
    program = model.program_of(cell)
    needed = model.tree_bytes(program.abstract()["params"])
    if limit is not None and needed > limit:
        raise OutOfMemory(needed)
    params = Compiling(lambda: model.parameters(program), limit)()
    batch = model.random_batch(cell)

    def start_of(mode: str) -> Callable[[], Any]:
        if mode == "step":
            # The parameters of the other modes stay in memory.
            left = None if limit is None else limit - needed
            start = starter(program, mode, left, [Compiling(program._initial, left)()], batch)
        else:
            start = starter(program, mode, limit, [params], batch)
        return start

    sequences: dict[str, Steps] = {}

    def measure(variant: Cell) -> Row:
        mode, warmup, steps = (variant[name] for name in ("mode", "warmup", "steps"))
        if mode not in sequences:
            sequences[mode] = Steps(start_of(mode))
        with model.attention_by(cell["attention"]):
            found = sequences[mode].first(warmup + steps)
        return {**summary(found[:warmup], found[warmup:]), "limit_bytes": limit}

    return measure


def starter(
    program: Any, mode: str, limit: int | None, held: list[Any], batch: Any
) -> Callable[[], Any]:
    """Returns what starts a step of a mode and returns its results; the first call compiles.

    `held` has parameters, or for `step` the state, in whose place each step leaves the next one.
    """
    from .compiled import Compiling
    from .model import pass_of

    if mode != "step":
        run = Compiling(pass_of(program, mode), limit)
        return lambda: run.start(held[0], batch)
    step = Compiling(program.step, limit, donate_argnums=0)

    def start() -> Any:
        found = step.start(held[0], batch)
        held[0] = found[0]
        return found

    return start


class Steps:
    """The seconds of a mode's steps, one after another; the first one compiles.

    All rows of a mode take their steps from this sequence, so that a mode compiles once.
    """

    def __init__(self, start: Callable[[], Any]) -> None:
        """Takes what starts a step."""
        self.start = start
        self.seconds: list[float] = []

    def first(self, count: int) -> list[float]:
        """The seconds of the first `count` steps; runs those that are missing."""
        self.seconds += harness.seconds_of_each(self.start, count - len(self.seconds))
        return self.seconds[:count]


def summary(warm: Sequence[float], found: Sequence[float]) -> Row:
    """The columns of a row: seconds of warm-up and steps, average and deviation (of a sample)."""
    return {
        "total": sum(found),
        "warmup_total": sum(warm),
        "average": statistics.fmean(found),
        "deviation": statistics.stdev(found) if len(found) > 1 else 0.0,
    }


def table(rows: Sequence[Row]) -> str:
    """A line for each row."""
    names = ("total", "warmup_total", "average", "deviation")
    heads = ("total (s)", "warm-up (s)", "average (s)", "standard deviation (s)")
    warmup = ("warm-up steps", lambda row: str(row["case"]["warmup"]))
    return tables.listing(
        rows,
        [
            *tables.make_case_columns("size", "batch", "length", "policy", "kernels", "mode"),
            warmup,
            ("status", tables.status),
            *(
                (head, tables.make_figure_column(name, tables.seconds))
                for head, name in zip(heads, names, strict=True)
            ),
        ],
    )


def words(rows: Sequence[Row]) -> str:
    """Sentences on backward and forward, warm-up, and ours and XLA's by pass."""
    sentences = [tables.ends(rows)]
    by: dict[tuple[Any, ...], dict[tuple[str, int], Row]] = {}
    for row in tables.finished(rows):
        case = row["case"]
        rest = tuple(value for name, value in case.items() if name not in ("mode", "warmup"))
        by.setdefault(rest, {})[case["mode"], case["warmup"]] = row
    backward, cold = [], []
    for of in by.values():
        most = max(warmup for _, warmup in of)
        forward, both = of.get(("forward", most)), of.get(("forward_backward", most))
        if forward and both:
            backward.append(both["average"] / forward["average"])
        for (mode, warmup), row in of.items():
            if warmup == 0 and most > 0 and (mode, most) in of:
                cold.append(row["average"] / of[mode, most]["average"])
    if backward:
        sentences.append(
            f"Forward and backward take {tables.span(backward)} times as long as forward alone, "
            "after the most steps of warm-up."
        )
    if cold:
        sentences.append(
            f"Without warm-up the average is {tables.span(cold)} times as long, as the first of "
            "its steps traces and compiles; its standard deviation is that step's, too."
        )
    warm = [row for row in tables.finished(rows) if row["case"]["warmup"] > 0]
    for name, pairs in tables.pairs_with_xla(warm).items():
        for mode, of_mode in tables.by(pairs, "mode").items():
            took = tables.compared_times(of_mode, "average")
            sentences.append(f"With kernels {name} a warm {mode} takes {took}")
    return " ".join(filter(None, sentences))
