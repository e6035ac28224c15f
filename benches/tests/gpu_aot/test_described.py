"""`transformer_bench memory` for a GPU that is not there, beside what one that was counted."""

import os
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from transformer_bench import runner
from transformer_bench.__main__ import main

COUNTED = ROOT / "benches/results/nvidia-h200/transformer-bench.jsonl"


@pytest.fixture(autouse=True)
def only_where_cuda_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves other flags out, which are for programs that run on CPUs."""
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "cuda_data_dir" in flag]
    monkeypatch.setenv("XLA_FLAGS", " ".join(flags))


def memory(folder: Path, *values: str) -> list[dict[str, Any]]:
    """The rows of a run."""
    file = folder / "memory.jsonl"
    assert main(["memory", "--json", str(file), "--set", *values]) == 0
    return runner.read_rows(file)


@pytest.mark.parametrize("length", [128, 1024])
def test_what_a_step_holds_is_what_was_counted(length: int, tmp_path: Path) -> None:
    given = ["sizes=small", f"lengths={length}", "policies=float32", "modes=step"]
    (row,) = memory(tmp_path, "gpu=h200", *given)
    case = {name: value for name, value in row["case"].items() if name != "gpu"}
    of_memory = [one for one in runner.read_rows(COUNTED) if one["command"] == "memory"]
    (counted,) = [one for one in of_memory if one["case"] == case]
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
