"""`transformer_bench memory` for a GPU that is not there, beside what one that was counted."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
COUNTED = ROOT / "benches/results/nvidia-h200/transformer-bench.jsonl"


def rows_of(file: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if row["record"] == "row" and row["command"] == "memory"]


def memory(folder: Path, *values: str) -> list[dict[str, Any]]:
    """The rows of a run."""
    file = folder / "memory.jsonl"
    command = [sys.executable, "-m", "transformer_bench", "memory", "--json", str(file), "--set"]
    # Flags of the other tests are for programs that run on CPUs.
    flags = os.environ["XLA_FLAGS"].split()
    flags = [flag for flag in flags if "cuda_data_dir" in flag]
    folders = [str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "XLA_FLAGS": " ".join(flags),
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
    }
    done = subprocess.run([*command, *values], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    return rows_of(file)


@pytest.mark.parametrize("length", [128, 1024])
def test_what_a_step_holds_is_what_was_counted(length: int, tmp_path: Path) -> None:
    given = ["sizes=small", f"lengths={length}", "policies=float32", "modes=step"]
    (row,) = memory(tmp_path, "gpu=h200", *given)
    case = {name: value for name, value in row["case"].items() if name != "gpu"}
    (counted,) = [one for one in rows_of(COUNTED) if one["case"] == case]
    assert row["status"] == "ok" and "measured_bytes" not in row
    ratio = row["peak_bytes"] / counted["measured_bytes"]
    print(f"{ratio:.3f} of what was counted")
    assert abs(ratio - 1) < 0.03


def test_ours_and_what_has_no_room(tmp_path: Path) -> None:
    given = ["gpu=h200", "sizes=small", "policies=mixed", "modes=step"]
    given += [f"{kernel}=ours" for kernel in ("norm", "attention", "mlp", "loss")]
    (fits,) = memory(tmp_path, *given, "lengths=128")
    assert fits["status"] == "ok" and fits["of_logits_bytes"] == 0
    # What JAX takes of an H200 is the limit where none is given.
    (does_not,) = memory(tmp_path, *given, "lengths=128", "batch=8192")
    assert does_not["status"] == "OOM" and does_not["asked_bytes"] > 105 * 2**30
