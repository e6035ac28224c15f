"""Reports of the tools in Rust as run logs, with nothing lost."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT
from train import log, reports

RESULTS = ROOT / "benches" / "results"


def converted(tmp_path: Path, *files: Path) -> list[log.Record]:
    """The records of reports, by the command line."""
    out = tmp_path / "run.jsonl"
    assert reports.main([*map(str, files), "--log", str(out)]) == 0
    return log.read(out)


def test_gradcheck(tmp_path: Path) -> None:
    """A report that the program writes now: within tolerance, and outside it."""
    gradcheck = Path(os.environ["XENTILE_XLA_LIBRARY"]).parent / "gradcheck"
    command = [str(gradcheck), "--config", str(ROOT / "configs/gradcheck/z_loss.yaml")]
    command += ["--set", "shape.vocab=100", "shape.seq_len=3", "--json", str(tmp_path / "g.json")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    report = json.loads((tmp_path / "g.json").read_text())
    start, result, end = converted(tmp_path, tmp_path / "g.json")
    assert (start["tool"], start["config"]) == ("gradcheck", report["config"])
    assert start["machine"]["cpu"] == report["machine"]["processor"]
    assert {**result["figures"], "machine": report["machine"], "config": report["config"]} == report
    assert (end["status"], end["error"]) == ("finished", None)
    outside = reports.records({**report, "passed": False})[-1]
    assert (outside["status"], outside["error"]) == ("failed", "outside tolerance")


def test_microbench_has_a_run_a_line(tmp_path: Path) -> None:
    file = RESULTS / "amd-epyc-family-25-model-1" / "microbench.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    found = converted(tmp_path, file)
    assert [one["record"] for one in found] == ["start", "result", "end"] * len(lines)
    figures = [one["figures"]["median_step_ms"] for one in found if one["record"] == "result"]
    assert figures == [line["median_step_ms"] for line in lines]
    assert {one["tool"] for one in found[::3]} == {"microbench"}


def test_sweep_has_a_result_a_row(tmp_path: Path) -> None:
    file = RESULTS / "amd-epyc-family-26-model-2" / "cross_entropy_cpu_bf16" / "sweep.json"
    rows = json.loads(file.read_text())["rows"]
    start, *results, _ = converted(tmp_path, file)
    assert start["tool"] == "sweep"
    assert [one["figures"] for one in results] == rows and rows


def test_what_is_no_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("no json")
    (tmp_path / "other").write_text("{}")
    for name, message in (("text", "cannot be read"), ("other", "has no machine and config")):
        assert reports.main([str(tmp_path / name), "--log", str(tmp_path / "run.jsonl")]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "run.jsonl").exists()
