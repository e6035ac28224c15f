"""The process of a cell: the child, which measures, and the parent's handle of it.

It reads JSON from its standard input, once it has loaded what every cell needs, and writes a line
of JSON for each row to its standard output. So the next cell's can be started before it is needed.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .commands import module_of
from .tables import Row

Cell = dict[str, Any]
BENCHES = Path(__file__).resolve().parents[1]
FOLDERS = (BENCHES, BENCHES.parent / "examples")
UNITS = {"": 1, "B": 1} | {
    f"{letter}{i}B": (1024 if i else 1000) ** (power + 1)
    for power, letter in enumerate("KMGT")
    for i in ("", "i")
}


def child(read: Callable[[], str], write: Callable[[Row], None]) -> None:
    """Runs a cell.

    Args:
        read: Returns JSON of `command`, `cell` and `variants`; "" where there is nothing to do.
        write: Takes each row.
    """
    import jax

    from . import model, parts  # noqa: F401  they take seconds to load

    text = read()
    if not text:
        return
    task = json.loads(text)
    command, cell = task["command"], task["cell"]
    if cell.get("memory_limit") is not None:
        from train.__main__ import limit_gpu_memory

        # JAX reads it with its first array.
        limit_gpu_memory(cell["memory_limit"])
    from .compiled import OutOfMemory

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


def child_command() -> list[str]:
    """The command that runs a cell."""
    return [sys.executable, "-m", "transformer_bench", "cell"]


class Process:
    """A cell's process: imports, waits for its task, and measures."""

    def __init__(
        self, command: str, cell: Cell, variants: Sequence[Cell], shares_device: bool = False
    ) -> None:
        """Starts the process of these rows; others may use the device at the same time."""
        folders = [*map(str, FOLDERS), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders))}
        # The last line of a traceback is the error.
        environment["JAX_TRACEBACK_FILTERING"] = "off"
        if command == "kernels":
            from train.breakdown import show_kernels

            show_kernels(environment)
        if "gpu" in cell:
            # The GPU is only compiled for.
            environment["JAX_PLATFORMS"] = "cpu"
        if shares_device:
            # Alone a process preallocates, as a pool that grows fragments and has no room for
            # large arrays.
            environment.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        self.task: dict[str, Any] = {"command": command, "cell": cell, "variants": list(variants)}
        self.is_told = False
        self.errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self.process = subprocess.Popen(
            child_command(),
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )

    def begin(self) -> None:
        """Sends the task, once."""
        stdin = self.process.stdin
        if self.is_told or stdin is None:
            return
        self.is_told = True
        # The process has ended; `rows` reports how.
        with contextlib.suppress(BrokenPipeError):
            stdin.write(json.dumps(self.task))
            stdin.close()

    def rows(self) -> Iterator[Row]:
        """Yields rows as they are written, and last a row for each one that is missing."""
        stdout = self.process.stdout
        assert stdout is not None
        left = list(self.task["variants"])
        for line in stdout:
            if line.startswith('{"record": "row"'):
                left.pop(0)
                yield json.loads(line)
        code = self.process.wait()
        self.errors.seek(0)
        printed = self.errors.read()
        if code == 0 and left:
            printed, code = "it ended before its last row", 1
        for variant in left:
            yield {
                "record": "row",
                "command": self.task["command"],
                "case": {**self.task["cell"], **variant},
                **unfinished(code, printed),
            }

    def close(self) -> None:
        """Ends the process."""
        self.process.kill()
        # Closes the pipes; a process that has ended cannot take what is buffered.
        with contextlib.suppress(BrokenPipeError):
            self.process.__exit__(None, None, None)
        self.errors.close()


def unfinished(code: int, printed: str) -> Row:
    """Why a process ended early, by its exit code and what it printed."""
    if is_out_of_memory(printed):
        line = next(one for one in printed.splitlines() if is_out_of_memory(one))
        return {"status": "OOM", "asked_bytes": asked_bytes(line)}
    if code == -signal.SIGKILL:
        # Linux kills processes if memory runs out.
        return {"status": "OOM", "asked_bytes": None, "error": "killed"}
    lines = [line for line in printed.splitlines() if line.strip()]
    return {"status": "failed", "error": lines[-1] if lines else f"exit code {code}"}


def asked_bytes(text: str) -> int | None:
    """The requested bytes in a message of XLA's allocator; None if it has none."""
    found = re.search(r"allocat\w*\D{0,20}?(\d+(?:\.\d+)?)\s*(bytes|[KMGT]?i?B)?\b", text)
    if not found:
        return None
    unit = (found[2] or "bytes").replace("bytes", "")
    return int(float(found[1]) * UNITS.get(unit, 1))


def is_out_of_memory(text: str) -> bool:
    """Whether a message says that memory ran out."""
    return "RESOURCE_EXHAUSTED" in text or "Out of memory" in text or "MemoryError" in text
