"""Runs cells, each in a process of its own, and keeps their rows.

A cell is what shares a process, such as a size and a length; a variant is a row of it. The process
reads both from its standard input, and writes a line of JSON for each row.
"""

import dataclasses
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from train import log
from train.config import InputError, RunError

from .config import GIB, Spec
from .tables import Row, duration, size, status

# By the name of the command, the module that has `cells`, `prepare`, `table` and `words`.
MODULES = {
    "time": "timing",
    "memory": "memory",
    "layers": "layers",
    "kernels": "kernels",
    "precision": "precision",
    "attention": "attention",
    "jit": "jit",
}
Cell = dict[str, Any]
UNITS = {"": 1, "B": 1} | {
    f"{letter}{i}B": (1024 if i else 1000) ** (power + 1)
    for power, letter in enumerate("KMGT")
    for i in ("", "i")
}
FOLDER = Path(__file__).resolve().parents[1]


class OutOfMemory(Exception):
    """A program that has no room; `asked` are the bytes that it needs in all."""

    def __init__(self, asked: int) -> None:
        """Takes the bytes."""
        super().__init__(f"RESOURCE_EXHAUSTED: {asked} bytes")
        self.asked = asked


def module_of(command: str) -> Any:
    """The module of a command."""
    return importlib.import_module(f".{MODULES[command]}", __package__)


def child_command() -> list[str]:
    """What runs a cell."""
    return [sys.executable, "-m", "transformer_bench", "cell"]


def asked_bytes(text: str) -> int | None:
    """The bytes that a message of XLA's allocator says were asked for; None if it says none."""
    found = re.search(r"allocat\w*\D{0,20}?(\d+(?:\.\d+)?)\s*(bytes|[KMGT]?i?B)?\b", text)
    if not found:
        return None
    unit = (found[2] or "bytes").replace("bytes", "")
    return int(float(found[1]) * UNITS.get(unit, 1))


def is_out_of_memory(text: str) -> bool:
    """Whether a message is of memory that there is not."""
    return "RESOURCE_EXHAUSTED" in text or "Out of memory" in text or "MemoryError" in text


def device_limit(memory_limit: float | None) -> int | None:
    """The bytes that a program may take where the device's allocator enforces none.

    None on a GPU, whose allocator does. Else the limit given, or what the machine has available.
    """
    import jax

    if jax.default_backend() == "gpu":
        return None
    if memory_limit is not None:
        return int(memory_limit * GIB)
    info = Path("/proc/meminfo")
    if not info.is_file():
        return None
    found = re.search(r"MemAvailable:\s+(\d+) kB", info.read_text(encoding="utf-8"))
    return int(found[1]) * 1024 if found else None


class Compiling:
    """A function that is compiled as it is first called, and held to a limit of memory."""

    def __init__(self, function: Any, limit: int | None, **options: Any) -> None:
        """Takes the function, the most bytes that it may hold, and options of `jax.jit`."""
        self.function, self.limit, self.options = function, limit, options
        self.compiled: Any = None

    def start(self, *arguments: Any) -> Any:
        """The function's results, which may not be ready.

        Raises:
            OutOfMemory: The program holds more than the limit.
        """
        import jax
        from train.step import program_bytes

        if self.compiled is None:
            self.compiled = jax.jit(self.function, **self.options).lower(*arguments).compile()
            needed = program_bytes(self.compiled)
            if self.limit is not None and needed > self.limit:
                raise OutOfMemory(needed)
        return self.compiled(*arguments)

    def __call__(self, *arguments: Any) -> Any:
        """The function's results, ready; raises what `start` does."""
        import jax

        return jax.block_until_ready(self.start(*arguments))


def child(text: str, write: Callable[[Row], None]) -> None:
    """Runs a cell: `text` is JSON of `command`, `cell` and `variants`; writes each row."""
    task = json.loads(text)
    command, cell = task["command"], task["cell"]
    if cell.get("memory_limit") is not None:
        from train.__main__ import limit_gpu_memory

        limit_gpu_memory(cell["memory_limit"])
    import jax

    measure: Callable[[Cell], Row] | None = None
    for variant in task["variants"]:
        row: Row = {"record": "row", "command": command, "case": {**cell, **variant}}
        try:
            if measure is None:
                measure = module_of(command).prepare(cell)
            row |= {"status": "ok", **measure(variant)}
        except OutOfMemory as error:
            row |= {"status": "OOM", "asked_bytes": error.asked}
        except (MemoryError, jax.errors.JaxRuntimeError) as error:
            message = f"{type(error).__name__}: {error}"
            if not is_out_of_memory(message):
                raise
            row |= {"status": "OOM", "asked_bytes": asked_bytes(message)}
        write(row)


def run_cell(command: str, cell: Cell, variants: Sequence[Cell]) -> Iterator[Row]:
    """The rows of a cell as its process writes them; what it did not come to is told of as well."""
    task = json.dumps({"command": command, "cell": cell, "variants": list(variants)})
    folders = [str(FOLDER), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}
    # The last line of a traceback is then the error.
    environment["JAX_TRACEBACK_FILTERING"] = "off"
    if command == "kernels":
        from train.breakdown import show_kernels

        show_kernels(environment)
    left = list(variants)
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors,
        subprocess.Popen(
            child_command(),
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        try:
            try:
                process.stdin.write(task)
                process.stdin.close()
            except BrokenPipeError:
                # It ended before it read; how is told of below.
                pass
            for line in process.stdout:
                if line.startswith('{"record": "row"'):
                    left.pop(0)
                    yield json.loads(line)
            code = process.wait()
        finally:
            # Ctrl-C, or whoever reads the rows stopped.
            if process.poll() is None:
                process.kill()
        errors.seek(0)
        told = errors.read()
    if code == 0 and left:
        told, code = "it ended before its last row", 1
    for variant in left:
        yield {
            "record": "row",
            "command": command,
            "case": {**cell, **variant},
            **unfinished(code, told),
        }


def unfinished(code: int, told: str) -> Row:
    """Why a process ended early, by its exit code and what it printed."""
    if is_out_of_memory(told):
        line = next(one for one in told.splitlines() if is_out_of_memory(one))
        return {"status": "OOM", "asked_bytes": asked_bytes(line)}
    if code == -signal.SIGKILL:
        # Linux does so where memory is short.
        return {"status": "OOM", "asked_bytes": None, "error": "killed"}
    lines = [line for line in told.splitlines() if line.strip()]
    return {"status": "failed", "error": lines[-1] if lines else f"exit code {code}"}


def key(case: Cell) -> str:
    """A row's name: two rows of one name measured the same."""
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
        if row["record"] == "row" and row.get("command") in MODULES:
            found[row["command"] + key(row["case"])] = row
    return list(found.values())


def run(
    command: str,
    spec: Spec,
    json_file: Path | None,
    is_resumed: bool,
    say: Callable[[str], None],
) -> list[Row]:
    """Runs all cells of a command.

    Args:
        command: A name in `MODULES`.
        spec: What is measured.
        json_file: Takes a record of the machine, and each row as it comes; or None.
        is_resumed: Whether rows that the file has are left as they are; failed ones run again.
        say: Takes each line of progress.

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
    found: list[Row] = []
    count = 0
    lines = None if json_file is None else log.Lines(json_file, is_resumed)
    try:
        if lines is not None:
            begun = dataclasses.asdict(spec)
            malloc = {name: os.environ[name] for name in os.environ if name.startswith("MALLOC_")}
            about = {"command": command, "load": load(), "malloc": malloc}
            lines.write(log.start("transformer_bench", begun, **about))
        for cell, variants in cells:
            of_cell = {key({**cell, **one}): one for one in variants}
            new = [one for name, one in of_cell.items() if name not in done]
            count += len(of_cell) - len(new)
            for row in run_cell(command, cell, new) if new else ():
                done[key(row["case"])] = row
                if lines is not None:
                    lines.write(row)
                count += 1
                say(f"[{count}/{total}] {line_of(row)}")
            found += [done[name] for name in of_cell]
    finally:
        if lines is not None:
            lines.close()
    return found


def cut_to_whole_lines(path: Path) -> None:
    """Takes off a last line that a killed run left without its end."""
    try:
        text = path.read_bytes()
        if text and not text.endswith(b"\n"):
            with path.open("r+b") as file:
                file.truncate(text.rfind(b"\n") + 1)
    except OSError as error:
        raise RunError(f"file {path} cannot be written ({error}): name another") from None


def load() -> float | None:
    """The load of the machine over the last minute, where the system says it."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def line_of(row: Row) -> str:
    """A row's line of progress."""
    shown = {name: row["case"][name] for name in names(row["case"])}
    where = " ".join(f"{name}={value}" for name, value in shown.items())
    told = f" ({row['error']})" if row.get("error") else ""
    took = row.get("average", row.get("median", row.get("forward_backward")))
    figure = "" if took is None else f", {duration(took)}"
    if "peak_bytes" in row:
        figure += f", peak {size(row['peak_bytes'])}"
    return f"{row['command']} {where}: {status(row)}{told}{figure}"


def names(case: Cell) -> Iterable[str]:
    """What of a case tells rows apart."""
    known = ("size", "implementation", "head_size", "length", "policy", "phase", "part", "mode")
    return [one for one in (*known, "warmup", "how", "sum_in", "of") if one in case]
