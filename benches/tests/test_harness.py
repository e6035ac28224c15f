"""The harness of the benchmarks: turns, warm-up, medians, files and tables."""

import json
from pathlib import Path

import harness
import pytest


def test_programs_take_turns_after_warm_up() -> None:
    """Each round runs every program once; rounds of warm-up are dropped."""
    calls: list[str] = []

    def turn(name: str) -> int:
        calls.append(name)
        return len(calls)

    turns = {name: lambda name=name: turn(name) for name in ("a", "b")}
    assert harness.in_turns(turns, least=2, most=2) == {"a": [3, 5], "b": [4, 6]}
    assert calls == ["a", "b"] * 3
    assert harness.in_turns({}, seconds=60) == {}


def test_clocks_count_calls() -> None:
    started = 0

    def start() -> None:
        nonlocal started
        started += 1

    assert harness.wall_clock(start)(5) >= 0 and started == 5
    assert harness.difference_clock(start)(2) > 0 and started >= 5 + 2 + 4
    assert 1 <= harness.calls_for(lambda _: 0.01, 1.0) <= harness.MOST_CALLS
    assert harness.calls_for(lambda _: 60.0, 1.0) == 1


def test_medians_ratios_and_spread() -> None:
    """A ratio is the median of ratios within rounds, not the ratio of medians."""
    times = {"copy": [1.0, 2.0, 4.0], "ours": [3.0, 2.0, 8.0]}
    found = harness.compared_times(times, calls=2, baseline="copy")
    assert found["ours"] == {"ms": 1500.0, "spread": pytest.approx(1.0), "copies": 2.0}
    assert found["copy"]["copies"] == 1.0
    assert harness.spread([5.0]) == 0.0


def test_a_cell_that_fails_is_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its error is one line, in which a machine's folders, as of the made-up path here, are cut."""

    def fail() -> harness.Row:
        raise ValueError("no such shape in /home/me/file.py\nmore")

    file = tmp_path / "new" / "results.json"
    cells = [({"shape": "1x2"}, lambda: {"ms": 3}), ({"shape": "2x2"}, fail)]
    results = harness.Results(file, mode="time")
    texts = lambda row: [row["shape"], str(row.get("ms", ""))]  # noqa: E731
    assert harness.measure_cells(cells, results, ["shape", "ms"], texts) == 1
    shown = capsys.readouterr().out.splitlines()
    failed = "ValueError: no such shape in .../file.py"
    assert shown == ["| shape | ms |", "| --- | --- |", "| 1x2 | 3 |", f"| 2x2 |  | {failed}"]
    found = json.loads(file.read_text())
    assert found["results"] == [{"shape": "1x2", "ms": 3}, {"shape": "2x2", "error": failed}]
    assert found["mode"] == "time" and found["about"]["python"]
    resumed = harness.Results(file, is_resumed=True)
    assert resumed.rows == found["results"] and resumed.others["earlier"] == [found["about"]]


def test_numbers_are_aligned_to_the_right() -> None:
    text = harness.table(["name", "ms", "ratio"], [["a", "1.5", ""], ["b", "-2", "x"]])
    assert text.splitlines()[1:] == ["| --- | ---: | --- |", "| a | 1.5 |  |", "| b | -2 | x |"]
