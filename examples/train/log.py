"""Run logs: one JSON object a line, in the schema of docs/reference/run-log.md."""

import json
import os
import platform
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol, TextIO

from .config import RunError

SCHEMA = 1
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "pallas_bridge")

Record = dict[str, Any]


class Log(Protocol):
    """What takes a run's records."""

    def write(self, record: Record) -> None:
        """Takes one record."""

    def close(self) -> None:
        """Ends the log."""


def start(tool: str, config: Record, **more: Any) -> Record:
    """The record that begins a log: the run's configuration, machine and versions."""
    return {
        "record": "start",
        "schema": SCHEMA,
        "tool": tool,
        "unix_time": time.time(),
        "config": config,
        "machine": {
            "cpu": cpu_name(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
            "system": f"{platform.system()} {platform.machine()}",
        },
        "versions": {"python": platform.python_version(), **versions()},
        **more,
    }


def end(status: str, error: str | None = None, **more: Any) -> Record:
    """The record that ends a log: "finished", "interrupted" or "failed"."""
    return {"record": "end", "unix_time": time.time(), "status": status, "error": error, **more}


def versions() -> dict[str, str]:
    """Versions of what computes, where it is installed as a package."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def cpu_name() -> str:
    """The processor, as the system names it."""
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return platform.processor() or "unknown"
    fields: dict[str, str] = {}
    for line in info.read_text(encoding="utf-8").split("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    numbers = f"family {fields.get('cpu family', '?')}, model {fields.get('model', '?')}"
    return f"{fields.get('model name', 'unknown')} ({numbers})"


class Lines:
    """A file of JSON lines, each written out at once."""

    def __init__(self, path: Path, is_resumed: bool) -> None:
        """Opens the file: a run that is resumed adds to it, another one replaces it.

        Raises:
            RunError: It cannot be opened.
        """
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file: TextIO = path.open("a" if is_resumed else "w", encoding="utf-8")
        except OSError as error:
            raise self.failed(error) from None

    def write(self, record: Record) -> None:
        """Writes a line.

        Raises:
            RunError: The disk is full, or the like.
        """
        try:
            self.file.write(json.dumps(record, allow_nan=True) + "\n")
            self.file.flush()
        except OSError as error:
            raise self.failed(error) from None

    def close(self) -> None:
        """Closes the file; failures to write were reported before."""
        try:
            self.file.close()
        except OSError:
            return

    def failed(self, error: OSError) -> RunError:
        """What to tell of an error."""
        reason = (error.strerror or type(error).__name__).lower()
        return RunError(
            f"log {self.path} cannot be written ({reason}): free space, or name another file"
        )


class WandB:
    """Sends records to Weights & Biases: `start` as the run's config, steps as its history.

    What WANDB_MODE, WANDB_PROJECT and the like say holds; WANDB_MODE=offline needs no account.
    """

    def __init__(self) -> None:
        """Loads the package, which a run without --wandb need not have."""
        import wandb

        self.wandb: Any = wandb
        self.run: Any = None

    def write(self, record: Record) -> None:
        """Sends one record."""
        more = {key: value for key, value in record.items() if key != "record"}
        if record["record"] == "start":
            self.run = self.wandb.init(
                project=os.environ.get("WANDB_PROJECT", "xentile"), config=more
            )
        elif self.run is None:
            raise ValueError(f"record is {record['record']!r}; the first must be 'start'")
        elif record["record"] == "step":
            self.run.log(more, step=record["step"])
        else:
            self.run.summary.update({record["record"]: more})
            if record["record"] == "end":
                self.run.finish(exit_code=int(record["status"] == "failed"))

    def close(self) -> None:
        """Nothing is left to do: the end was sent."""


class Tee:
    """Several logs as one."""

    def __init__(self, logs: Sequence[Log]) -> None:
        """Takes the logs, which may be none."""
        self.logs = logs

    def write(self, record: Record) -> None:
        """Gives each log the record."""
        for log in self.logs:
            log.write(record)

    def close(self) -> None:
        """Closes each log."""
        for log in self.logs:
            log.close()


def read(path: Path) -> list[Record]:
    """The records of a log."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def day(unix_time: float) -> str:
    """The day, as 2026-11-25, in UTC."""
    return time.strftime("%Y-%m-%d", time.gmtime(unix_time))
