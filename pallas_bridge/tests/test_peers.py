"""The programs that time ours beside other projects, on small shapes, with peers that are here."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PEERS = Path(__file__).resolve().parents[2] / "benches" / "peers"
# Programs are compiled in a hurry: no time is looked at.
QUICKLY = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}

pytestmark = [
    pytest.mark.numbers,
    pytest.mark.only("cpu", "scripts/test_gpu.sh has them as sections of their own"),
]


def run(tmp_path: Path, script: str, *arguments: str) -> dict[str, Any]:
    """What a driver writes, by peer; the peers' results alone."""
    written = tmp_path / "results.json"
    done = subprocess.run(
        [sys.executable, PEERS / script, "--platform", "cpu", "--json", written, *arguments],
        env=QUICKLY,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return {row["peer"]: row["found"] for row in json.loads(written.read_text())["results"]}


@pytest.mark.few(0)
def test_peers_over_logits_are_timed(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        "cross_entropy.py",
        *("--shapes", "32x100", "--peers", "xentile;JAX dense"),
        *("--measure-seconds", "0.01"),
    )
    assert found.keys() == {"xentile", "JAX dense"}
    for measures in found.values():
        assert all("median_ms" in measure for measure in measures.values()), measures


@pytest.mark.few(0)
@pytest.mark.parametrize(
    ("more", "shapes", "distributions", "peers"),
    [
        # A process for each cell and peer.
        (["--factor", "2", "--traced-factor"], ["3x2"], ["masked"], ["xentile", "optax"]),
        (["--factor", "0.5"], ["3x2", "1x300"], ["uniform", "masked"], ["JAX dense"]),
    ],
)
@pytest.mark.slow
def test_factors_and_distributions_over_logits(
    tmp_path: Path, more: list[str], shapes: list[str], distributions: list[str], peers: list[str]
) -> None:
    written = tmp_path / "results.json"
    found = run(
        tmp_path,
        "cross_entropy.py",
        *("--shapes", ",".join(shapes), "--distribution", *distributions, "--std", "8"),
        *("--peers", ";".join(peers), *more, "--measure-seconds", "0.01"),
    )
    assert found.keys() == {*peers}
    rows = json.loads(written.read_text())["results"]
    cells = {(row["tokens"], row["distribution"]) for row in rows}
    assert len(cells) == len(shapes) * len(distributions)
    for row in rows:
        assert row["factor"] == float(more[1]) and row["is_traced"] == ("--traced-factor" in more)
        for measure in row["found"].values():
            assert "median_ms" in measure, row


@pytest.mark.slow
def test_peers_of_linear_are_timed_and_agree(tmp_path: Path) -> None:
    ours = ["xentile", "xentile as QuACK", "xentile 1 MiB"]
    found = run(
        tmp_path,
        "linear_cross_entropy.py",
        *("--shapes", "64x32x512@2", "--measure-seconds", "0.01"),
        *("--peers", ";".join(["products, XLA", *ours, "JAX dense"])),
    )
    assert all("median_ms" in row for row in found.values()), found
    losses = [found[peer]["loss"] for peer in [*ours, "JAX dense"]]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-2)
    assert all("tokens" in found[peer]["plan"] for peer in ours)


@pytest.mark.few(0)
@pytest.mark.slow
def test_errors_of_linear_are_told(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        "linear_cross_entropy.py",
        *("--check", "--shapes", "300x16x2000", "--dtype", "float32"),
        *("--peers", "xentile;xentile 1 MiB;JAX scan;JAX dense, f32 product"),
    )
    known = {"xentile", "xentile 1 MiB", "JAX dense, f32 product"}
    assert found.keys() == {"f64, rounded", "JAX scan", *known}
    # Peers with losses of tokens.
    assert {peer for peer, row in found.items() if "worst_loss" in row["errors"]} == known
    assert all(found[peer]["errors"]["worst_loss"] < 1e-4 for peer in known)
    for peer, row in found.items():
        for gradient in ("dhidden", "dweight"):
            assert row["errors"][gradient]["norm"] < 1e-4, peer
    assert "library" in found["xentile 1 MiB"]["plan"]


# The first is for each run, the others for the nightly set: each starts JAX anew.
TIMED = [
    ("peers/activations.py", "--shapes 16x128 --operations gelu_tanh", ["copy", "xla", "ours"]),
    ("peers/rope.py", "--shapes 1x8x2x16 --qk 1x8x2x1x16", ["copy", "xla", "ours"]),
    (
        "peers/causal_conv1d.py",
        "--shapes 1x16x8 --widths 3",
        ["copy", "convolution", "shifted", "ours"],
    ),
    ("peers/loss_options.py", "--shapes 8x100 --distribution trained", ["plain", "f16", "xla"]),
    (
        "peers/loss_outputs.py",
        "--logits 8x100 --linear 8x16x100 --distribution normal --columns 2",
        ["plain", "all", "plain again"],
    ),
    ("jax_fp8.py", "--shapes 16x128 --cases block_1d swiglu --tails heavy", ["copy", "ours"]),
    ("distillation.py", "--shapes 16x8x8x50", ["gemms", "ours", "dense"]),
    ("decoding.py", "--model test --batch 1 --prompt 9", ["step", "xla", "read", "prompt"]),
    ("decoding.py", "--model test --batch 1 --prompt 9 --samplers", ["greedy", "top-k", "top-p"]),
    ("ring_attention.py", "--shapes 64x4x2x64", ["one", "ordered", "zigzag"]),
]


@pytest.mark.parametrize(
    ("script", "arguments", "programs"),
    [TIMED[0], *(pytest.param(*one, marks=pytest.mark.nightly) for one in TIMED[1:])],
)
@pytest.mark.slow
def test_programs_are_timed_in_turns(
    tmp_path: Path, script: str, arguments: str, programs: list[str]
) -> None:
    written = tmp_path / "results.json"
    more = ["--json", written, "--seconds", "0", *arguments.split()]
    done = subprocess.run(
        [sys.executable, PEERS.parent / script, *more],
        env=QUICKLY,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(written.read_text())
    assert found["about"]["command"].startswith(f"python benches/{script} --json results.json")
    assert {"commit", "date", "device", "jax"} <= found["about"].keys()
    assert found["results"]
    for row in found["results"]:
        assert all(row[name]["ms"] > 0 and row[name]["spread"] >= 0 for name in programs), row
    # A head of two lines, and a line for each row.
    lines = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(found["results"])


def test_peers_that_are_not_there_are_refused() -> None:
    done = subprocess.run(
        [sys.executable, PEERS / "linear_cross_entropy.py", "--peers", "xentile;another"],
        env=QUICKLY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: no peer another: choose from products, torch; ")
