"""The benchmark of attention, with small cells on the CPU."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# A script of a folder that has no package.
attention: Any = importlib.import_module("peers.attention")
Rows = dict[tuple[str, str], dict[str, Any]]
CELLS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "texts": ((2, 32, 4, 2, 8), {"texts": (8, 16)}),
    "one text": ((1, 16, 2, 2, 8), {"texts": 16}),
    "sinks": ((1, 16, 2, 1, 8), {"sinks": True}),
    "window": ((1, 32, 2, 1, 8), {"window": (4, 0)}),
    "keys": ((2, 1, 4, 2, 8), {"keys": 24, "xla": True}),
}


def rows_of(monkeypatch: pytest.MonkeyPatch, file: Path, *arguments: str) -> Rows:
    monkeypatch.setattr(attention, "CELLS", CELLS)
    monkeypatch.setattr(attention, "TURN_SECONDS", 1e-5)
    command = ["attention.py", "--seconds", "0", "--json", str(file), *arguments]
    monkeypatch.setattr(sys, "argv", command)
    assert attention.main() == 0
    rows = json.loads(file.read_text())["results"]
    return {(row["cell"], row["pass"]): row for row in rows}


def test_cells_have_the_programs_of_their_options(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = rows_of(monkeypatch, tmp_path / "attention.json")
    assert {*rows} == {(cell, which) for cell in CELLS for which in ("forward", "both")} - {
        ("keys", "both")
    }
    orders = {"any order", "default any order"}
    wanted = {
        ("texts", "forward"): {"ours", "default"},
        ("one text", "forward"): {"ours", "default", "plain"},
        ("sinks", "both"): {"ours", "default", "plain", *orders},
        ("window", "both"): {"ours", "default", "mixed", *orders},
        ("keys", "forward"): {"ours", "default", "xla", "read"},
    }
    for cell, programs in wanted.items():
        row = rows[cell]
        timed = {name for name, one in row.items() if isinstance(one, dict) and "ms" in one}
        assert timed == programs, cell
        for name in timed:
            assert 0 < row[name]["min_ms"] <= row[name]["ms"], (cell, name)
    # A CPU has no cuDNN; the row says so.
    assert {*rows["window", "both"]["failed"]} == {"cudnn", "cudnn in order"}


def test_later_slices_keep_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "attention.json"
    more = ("--passes", "forward", "--programs", "ours", "--cells")
    first = rows_of(monkeypatch, file, *more, "window")
    both = rows_of(monkeypatch, file, *more, "window", "sinks", "--resume")
    assert {*both} == {("window", "forward"), ("sinks", "forward")}
    assert both["window", "forward"] == first["window", "forward"]


@pytest.mark.parametrize("cell", CELLS)
def test_pairs_are_those_that_the_mask_leaves(cell: str) -> None:
    (batch, tokens, *_), options = CELLS[cell]
    keys = options.get("keys", tokens)
    place, key = np.arange(tokens)[:, None] + keys - tokens, np.arange(keys)
    sees = np.broadcast_to(key <= place, (batch, tokens, keys))
    if "window" in options:
        sees = sees & (place - key <= options["window"][0])
    if "texts" in options:
        ids = attention.segment_ids(batch, tokens, options["texts"])
        assert (np.diff(ids) >= 0).all() and ids[:, 0].max() == 0
        sees = sees & (ids[:, :, None] == ids[:, None])
    assert attention.count_pairs(batch, tokens, options) == sees.sum()
