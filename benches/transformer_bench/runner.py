"""Runs cells, each in a process of its own, and saves their rows.

A cell is what shares a process, such as a size and a length; a variant is a row of it.
"""

import dataclasses
import itertools
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from train import log
from train.config import InputError, RunError

from .commands import COMMANDS, module_of
from .config import Spec
from .process import Process
from .tables import Row, duration, size, status

Cell = dict[str, Any]
# The measurement in a line of progress: the first that a row has.
FIGURES = ("average", "median", "median_ours", "forward_backward")


def key(case: Cell) -> str:
    """A row's name, the same for rows that measure the same."""
    return json.dumps(case, sort_keys=True)


def read_rows(path: Path) -> list[Row]:
    """The rows of a file, the newest of each name; a line cut short at the end is left out.

    Raises:
        InputError: It cannot be read, or a line is no record of this program.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise InputError(f"file {path} cannot be read ({error}): name JSON lines") from None
    found: dict[str, Row] = {}
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except ValueError:
            if number == len(lines):
                continue
            raise InputError(f"file {path} has no JSON in line {number}: mend it") from None
        if not isinstance(row, dict) or "record" not in row:
            raise InputError(f"file {path} has another record in line {number}: name one made here")
        if row["record"] == "row" and row.get("command") in COMMANDS:
            found[row["command"] + key(row["case"])] = row
    return list(found.values())


def run(
    command: str,
    spec: Spec,
    json_file: Path | None,
    is_resumed: bool,
    say: Callable[[str], None],
    jobs: int = 1,
) -> list[Row]:
    """Runs all cells of a command.

    Args:
        command: A name in `COMMANDS`.
        spec: What is measured.
        json_file: Takes a record of the machine, and each row as it comes; or None.
        is_resumed: Whether rows that the file has are left as they are; failed ones run again.
        say: Takes each line of progress.
        jobs: How many cells are measured at once.

    Returns:
        The rows of `spec`, in its order, those that the file had among them.

    Raises:
        InputError: The file to go on with cannot be read.
        RunError: The file cannot be written.
    """
    if is_resumed and json_file is None:
        raise InputError("--resume has no file to go on with: give --json FILE")
    done: dict[str, Row] = {}
    if is_resumed and json_file is not None and json_file.exists():
        cut_to_whole_lines(json_file)
        rows = [row for row in read_rows(json_file) if row["command"] == command]
        done = {key(row["case"]): row for row in rows if row["status"] != "failed"}
    cells = list(module_of(command).cells(spec))
    total = sum(len(variants) for _, variants in cells)
    lines = None if json_file is None else log.Lines(json_file, is_resumed)
    try:
        if lines is not None:
            begun = dataclasses.asdict(spec)
            malloc = {name: os.environ[name] for name in os.environ if name.startswith("MALLOC_")}
            about = {"command": command, "load": load(), "malloc": malloc}
            lines.write(log.start("transformer_bench", begun, **about))
        left = [
            (cell, [one for one in variants if key({**cell, **one}) not in done])
            for cell, variants in cells
        ]
        count = total - sum(len(variants) for _, variants in left)
        for row in run_alone_again(command, [task for task in left if task[1]], jobs):
            done[key(row["case"])] = row
            if lines is not None:
                lines.write(row)
            count += 1
            say(f"[{count}/{total}] {line_of(row)}")
    finally:
        if lines is not None:
            lines.close()
    return [done[key({**cell, **one})] for cell, variants in cells for one in variants]


def run_cells(
    command: str, tasks: Sequence[tuple[Cell, Sequence[Cell]]], jobs: int
) -> Iterator[Row]:
    """The rows of cells in their order, of which `jobs` are measured at once.

    One process more than these is started, so that it has loaded what it needs by its turn.
    """
    started: deque[Process] = deque()
    waiting = deque(tasks)
    try:
        while waiting or started:
            while waiting and len(started) <= jobs:
                started.append(Process(command, *waiting.popleft(), shares_device=jobs > 1))
            for process in itertools.islice(started, jobs):
                process.begin()
            yield from started[0].rows()
            started.popleft().close()
    finally:
        for process in started:
            process.close()


def run_alone_again(
    command: str, tasks: Sequence[tuple[Cell, Sequence[Cell]]], jobs: int
) -> Iterator[Row]:
    """Yields the rows of cells; rows out of memory beside others run again alone, at the end."""
    of = {key({**cell, **one}): (cell, [one]) for cell, variants in tasks for one in variants}
    again = []
    for row in run_cells(command, tasks, jobs):
        if jobs > 1 and row["status"] == "OOM":
            again.append(of[key(row["case"])])
        else:
            yield row
    yield from run_cells(command, again, 1)


def cut_to_whole_lines(path: Path) -> None:
    """Removes a last line that a killed run left incomplete."""
    try:
        text = path.read_bytes()
        if text and not text.endswith(b"\n"):
            with path.open("r+b") as file:
                file.truncate(text.rfind(b"\n") + 1)
    except OSError as error:
        raise RunError(f"file {path} cannot be written ({error}): name another") from None


def load() -> float | None:
    """The load average of the last minute, if the system has one."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def line_of(row: Row) -> str:
    """A row's line of progress."""
    shown = {name: row["case"][name] for name in names(row["case"])}
    where = " ".join(f"{name}={value}" for name, value in shown.items())
    error = f" ({row['error']})" if row.get("error") else ""
    took = next((row[name] for name in FIGURES if name in row), None)
    figure = "" if took is None else f", {duration(took)}"
    if "peak_bytes" in row:
        figure += f", peak {size(row['peak_bytes'])}"
    return f"{row['command']} {where}: {status(row)}{error}{figure}"


def names(case: Cell) -> Iterable[str]:
    """The keys of a case that a line of progress shows."""
    of_model = ("size", "implementation", "head_size", "length", "policy", "gpu")
    of_program = ("phase", "part", "mode", "warmup", "how", "sum_in", "of")
    return [one for one in (*of_model, *of_program) if one in case]
