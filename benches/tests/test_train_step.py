"""The benchmark of training steps, at the smallest preset on the CPU."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import train_step

Rows = list[dict[str, Any]]


def rows_of(monkeypatch: pytest.MonkeyPatch, file: Path, *arguments: str) -> Rows:
    command = ["train_step.py", "--models", "test", *arguments, "--json", str(file)]
    monkeypatch.setattr(sys, "argv", command)
    assert train_step.main() == 0
    found: Rows = json.loads(file.read_text())["results"]
    return found


def test_programs_of_a_model_step_from_one_state(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    programs = ["baseline/none", "ours-attention/full"]
    rows = rows_of(monkeypatch, tmp_path / "steps.json", "--programs", *programs)
    assert [row["program"] for row in rows] == programs
    for row in rows:
        assert row["parameters"] == 35_008 and row["tokens_per_second"] > 0, row
        # The losses of random tokens are near log(512).
        assert row["first_loss"] == pytest.approx(6.24, abs=0.3)
    assert rows[0]["speed"] == 1.0


def test_parts_of_a_step_have_their_least_beside_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "parts.json"
    (row,) = rows_of(monkeypatch, file, "--programs", "--parts", "baseline/none")
    parts, least = row["parts_ms"], row["least_ms"]
    assert isinstance(parts, dict) and isinstance(least, dict)
    assert {"projections, forward", "projections, backward", "attention, backward"} <= set(parts)
    assert all(least[part] > 0 for part in parts if part in least)


def test_a_program_that_there_is_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="program theirs/none is unknown: begin with ours"):
        rows_of(monkeypatch, tmp_path / "steps.json", "--programs", "theirs/none")
