"""Converts JSON reports of gradcheck, microbench and the sweep to run logs.

    python -m train.reports REPORT.json .. --log FILE.jsonl

A report becomes a `start`, a `result` for each thing that was measured, and an `end`.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from . import log
from .config import InputError, RunError


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The reports of a file: one JSON object, or one a line.

    Raises:
        InputError: It cannot be read, or is not of these tools.
    """
    try:
        text = path.read_text(encoding="utf-8")
        try:
            found = [json.loads(text)]
        except ValueError:
            found = [json.loads(line) for line in text.splitlines()]
    except (OSError, ValueError) as error:
        raise InputError(f"report {path} cannot be read ({error}): name a JSON report") from None
    for report in found:
        if not isinstance(report, dict) or not {"machine", "config"} <= report.keys():
            raise InputError(
                f"report {path} has no machine and config: name one of gradcheck, microbench or "
                "the sweep"
            )
        yield report


def records(report: dict[str, Any]) -> list[log.Record]:
    """A report's records."""
    machine = report["machine"]
    known = {"passed": "gradcheck", "rows": "sweep"}
    tool = next((name for key, name in known.items() if key in report), "microbench")
    begun = {
        "record": "start",
        "schema": log.SCHEMA,
        "tool": tool,
        "unix_time": machine["unix_time"],
        "config": report["config"],
        "machine": {
            "cpu": machine["processor"],
            "cores": machine["cores"],
            "system": machine["platform"],
        },
        "versions": {name: machine.get(name) for name in ("xentile", "commit", "rustc")},
    }
    rest = {key: value for key, value in report.items() if key not in ("machine", "config")}
    results = rest["rows"] if tool == "sweep" else [rest]
    is_outside = report.get("passed") is False
    ended = {
        "record": "end",
        "unix_time": machine["unix_time"],
        "status": "failed" if is_outside else "finished",
        "error": "outside tolerance" if is_outside else None,
    }
    return [begun, *({"record": "result", "figures": result} for result in results), ended]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status: 0, 1 for a full disk, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="train.reports", description=__doc__.split("\n")[0])
    parser.add_argument("report", nargs="+", type=Path)
    parser.add_argument("--log", required=True, type=Path, metavar="FILE.jsonl")
    arguments = parser.parse_args(argv)
    try:
        found = [one for path in arguments.report for one in read(path)]
        lines = log.Lines(arguments.log, is_resumed=False)
        for report in found:
            for record in records(report):
                lines.write(record)
        lines.close()
    except (InputError, RunError) as error:
        print(f"train.reports: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
