"""transformer_bench: parsing, rows out of memory, resuming, tables, a run of each command."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT
from flax import nnx
from train import breakdown
from train.config import InputError
from transformer_bench import (
    buffers,
    compare,
    compiled,
    config,
    kernels,
    layers,
    memory,
    model,
    parts,
    precision,
    process,
    runner,
    tables,
    timing,
)
from transformer_bench.__main__ import main

PROGRAMS = compare.PROGRAMS
CONFIGS = ROOT / "benches/transformer_bench/configs"
TEST = CONFIGS / "test.yaml"


def bench(*arguments: str) -> int:
    """The exit status of the command line."""
    try:
        return main(arguments)
    except SystemExit as exit_:
        return int(str(exit_.code))


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [row for row in map(json.loads, path.read_text().splitlines()) if row["record"] == "row"]


def instead(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Runs a program in place of a cell's process; `task` is its task."""
    monkeypatch.setattr(process, "child_command", lambda: [sys.executable, "-c", BEGIN + code])


BEGIN = """
import json, os, signal, sys
task = json.loads(sys.stdin.read() or sys.exit())
def row(**of):
    print(json.dumps({'record': 'row', 'command': task['command'], **of}))
"""


OK = """
for variant in task['variants']:
    figures = {'total': 2.0, 'warmup_total': 0.5, 'average': 1.0, 'deviation': 0.1}
    row(case={**task['cell'], **variant}, status='ok', **figures)
"""


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: str(path.name))
def test_configs_are_read(path: Path) -> None:
    assert config.load(path, ["steps=3"]).steps == 3


def test_settings_override() -> None:
    override = ["lengths=[128, 256]", "sizes=mine", "dims.mine=[64, 96, 3, 4]", "memory_limit=1"]
    spec = config.load(TEST, [*override, "loss=ours"])
    assert (spec.sizes, spec.lengths, spec.batch) == (("mine",), (128, 256), 2)
    assert spec.dims_of("mine") == (64, 96, 3, 4, 4, 16, 0, 0)
    assert (spec.loss, spec.memory_limit) == ("ours", 1)
    # As Qwen3-0.6B is published.
    assert spec.dims_of("qwen3-0.6b").parameters(151936) == 596_049_920
    assert spec.dims_of("test").heads == 4


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("time --set sizes=huge", "size huge is unknown: choose from test, tiny, small, medium"),
        (
            "time --set dims.a=[60,64,2,7] sizes=a",
            "size a has 7 heads, which do not divide its width 60: give a number that does",
        ),
        ("time --set dims.a=[36,64,2,3] sizes=a", "has heads of 12 columns: give a width and"),
        ("time --set dims.a=[64,64,2,4,3,16] sizes=a", "has 3 heads of keys, which do not divide"),
        ("time --set dims.a=[64,64,0,4] sizes=a", "give whole numbers of 1 or more"),
        ("time --set dims.a=[64,64,2,4,2,16,2,0] sizes=a", "give 0 or 1 for norms of heads"),
        ("time --set dims.a=[64,64] sizes=a", "give NAME: [width, ffn, layers, heads]"),
        (
            "time --set memory_limit=0.1 sizes=[small,medium]",
            "memory_limit 0.1 GiB is below the parameters of small in float32, 0.4",
        ),
        ("memory --set memory_limit=0", "memory_limit 0 is not a positive number of GiB"),
        ("memory --set memory_limit=.nan", "memory_limit nan is not a positive number of GiB"),
        ("time --set memory_limit=much", "memory_limit is much: give a number of GiB"),
        ("time --set batch=0", "batch 0 is too small: give 1 or more"),
        ("time --set batch=two", "batch is two: give a value of type int"),
        ("time --set lengths=[1]", "lengths has 1, which is too small: give 2 or more"),
        ("time --set lengths=[128,128]", "which has one twice: give each once"),
        ("time --set lengths=[]", "lengths is []: give a list of int"),
        ("time --set policies=int8", "policies has int8: choose from float32, bfloat16, mixed"),
        ("time --set norm=cudnn", "norm is cudnn: choose from xla, ours, auto"),
        ("jit --loss best", "loss is best: choose from xla, ours, auto"),
        ("attention --loss ours", "unrecognized arguments: --loss ours"),
        ("time --set colour=red", "key colour is unknown: choose from sizes"),
        ("compare", "compare sets kernels of ours beside XLA's: give --norm auto, say"),
        ("memory --set gpu=b1", "gpu is b1: choose from h100, h200"),
        ("memory --set gpu=2", "gpu is 2: choose from h100, h200"),
        ("time --set gpu=h200", "gpu is of memory alone: leave it out of time"),
        ("memory --set gpu=h200", "gpu h200 needs XLA's plug-in for CUDA: pip install"),
        ("time --set batch", "--set batch has no value: give KEY=VALUE"),
        ("time --set batch.a=1", "batch is {'a': 1}: give a value of type int"),
        ("time --config absent.yaml", "config absent.yaml cannot be read"),
        ("time --resume", "--resume has no file to go on with: give --json FILE"),
        ("time --report page.md", "--report is made of the rows in --json: name that file too"),
        ("time --json a --report a.html", "--report a.html is the page in Markdown: its HTML"),
        ("time --set attention=cudnn", "needs an NVIDIA GPU: choose xla or ours"),
        ("attention --set implementations=cudnn", "needs an NVIDIA GPU: choose xla or ours"),
        ("attention --set policies=mixed", "attention has no parameters: give bfloat16"),
        ("attention --set head_sizes=[12]", "head_sizes has 12: give multiples of 8"),
        ("report absent.jsonl", "file absent.jsonl cannot be read"),
        ("report /dev/null", "no row is in /dev/null: name files that --json made"),
        ("fly", "invalid choice: 'fly'"),
    ],
)
def test_bad_input_is_told_of_before_anything_runs(
    command: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a cell ran")

    monkeypatch.setattr(runner, "Process", refuse)
    monkeypatch.setenv("PATH", "")
    assert bench(*command.split()) == 2
    text = capsys.readouterr().err
    assert message in text and text.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "paths", "message"),
    [
        ("yaml", "benches:examples", "the package yaml is not installed: run pip install"),
        ("unused", "benches", "the package train is not found: set PYTHONPATH=benches:examples"),
    ],
)
def test_missing_packages_are_named(name: str, paths: str, message: str, tmp_path: Path) -> None:
    # As where it is not installed: `import` raises ModuleNotFoundError.
    program = f"import sys; sys.modules[{name!r}] = None; "
    program += "from transformer_bench.__main__ import main; sys.exit(main(sys.argv[1:]))"
    empty = tmp_path / "rows.jsonl"
    empty.touch()
    done = subprocess.run(
        [sys.executable, "-c", program, "report", empty, "--html", tmp_path / "page.html"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith(f"transformer_bench: error: {message}")


def test_a_limit_that_some_size_fits_is_no_error() -> None:
    spec = config.load(None, ["sizes=[test, 2.7B]", "memory_limit=1"])
    config.check_limit(spec)
    with pytest.raises(InputError, match=r"below the parameters of 2.7B in bfloat16, 6\.\d+ GiB"):
        config.check_limit(config.load(None, ["sizes=2.7B", "policies=bfloat16", "memory_limit=1"]))


def test_parameters_by_arithmetic_are_those_of_the_program() -> None:
    for size in (*config.SIZES,):
        spec = config.load(None, [f"sizes={size}", "vocab=1000"])
        for policy in config.POLICIES:
            program = model.program_of(config.cell_of(spec, size, 128, policy))
            params = program.abstract()["params"]
            assert model.tree_bytes(params) == spec.parameter_bytes(size, policy), (size, policy)


@pytest.mark.parametrize(
    ("message", "asked"),
    [
        ("RESOURCE_EXHAUSTED: Out of memory allocating 12345 bytes.", 12345),
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1.50GiB.", 3 * 2**29),
        ("Failed to allocate request for 2.0MiB (2097152B) on device", 2**21),
        ("RESOURCE_EXHAUSTED: something", None),
    ],
)
def test_bytes_asked_for_are_read_from_messages(message: str, asked: int | None) -> None:
    assert process.asked_bytes(message) == asked


def test_out_of_memory_is_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of processes that end: by an error of XLA, by Linux, after a row, and otherwise."""
    code = """
length, variant = task['cell']['length'], task['variants'][0]
figures = {'total': 2.0, 'warmup_total': 0.5, 'average': 1.0, 'deviation': 0.1}
row(case={**task['cell'], **variant}, status='ok', **figures)
sys.stdout.flush()
if length == 16:
    sys.exit('jax.errors.Error: RESOURCE_EXHAUSTED: Out of memory allocating 3145728 bytes.')
if length == 32:
    os.kill(os.getpid(), signal.SIGKILL)
if length == 48:
    sys.exit('Traceback\\nValueError: no such thing')
"""
    instead(monkeypatch, code)
    given = ["--config", str(TEST), "--json", str(tmp_path / "a.jsonl"), "--set", "modes=forward"]
    assert bench("time", *given, "lengths=[16, 32]") == 0
    found = rows_of(tmp_path / "a.jsonl")
    assert [row["status"] for row in found] == ["ok", "OOM", "ok", "OOM"]
    assert found[1]["asked_bytes"] == 3145728 and found[3]["asked_bytes"] is None
    shown = capsys.readouterr().out
    assert (
        "| test | 2 | 16 | float32 | xla | forward | 1 | OOM, 3.00 MiB asked for |  |  |  |  |"
        in shown
    )
    assert "2 of 4 rows ran out of memory." in shown
    assert bench("time", *given, "lengths=[48, 64]") == 1
    found = rows_of(tmp_path / "a.jsonl")
    assert found[1]["error"] == "ValueError: no such thing"
    assert found[3]["error"] == "it ended before its last row"


def test_ctrl_c_keeps_rows_and_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, child = tmp_path / "a.jsonl", tmp_path / "pid"
    code = f"""
open({str(child)!r}, 'w').write(str(os.getpid()))
row(case={{**task['cell'], **task['variants'][0]}}, status='OOM', asked_bytes=1)
sys.stdout.flush()
os.kill(os.getppid(), signal.SIGINT)
signal.alarm(60)
signal.pause()
"""
    instead(monkeypatch, code)
    # Whatever a shell runs in the background ignores it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert bench("time", "--config", str(TEST), "--json", str(file)) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert "go on with --resume" in capsys.readouterr().err
    # The signal may come before the row is read.
    assert len(rows_of(file)) <= 1
    with pytest.raises(ProcessLookupError):
        os.kill(int(child.read_text()), 0)


def test_a_full_disk_is_told_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    instead(monkeypatch, OK)
    assert bench("time", "--config", str(TEST), "--json", "/dev/full") == 1
    assert "/dev/full cannot be written (no space left on device)" in capsys.readouterr().err


def test_cudnn_takes_no_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").write_text("")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    config.check_cudnn(("bfloat16", "mixed"))
    with pytest.raises(InputError, match="is of 16 bits: leave float32 out of policies"):
        config.check_cudnn(("bfloat16", "float32"))


def test_resume_runs_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows out of memory are left, failed ones and one cut short run again; other files too."""
    file = tmp_path / "a.jsonl"
    given = ["time", "--config", str(TEST), "--json", str(file), "--set", "modes=forward"]
    instead(monkeypatch, OK + "sys.exit(0)")
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    assert bench(*given, "lengths=[16, 32]") == 0
    records = [json.loads(line) for line in file.read_text().splitlines()]
    begun = records[0]
    assert (begun["command"], begun["config"]["lengths"]) == ("time", [16, 32])
    assert begun["machine"]["cores"] and begun["malloc"]["MALLOC_ARENA_MAX"] == "1"
    records[2] |= {"status": "OOM", "asked_bytes": 1}
    records[3] |= {"status": "failed"}
    whole = "".join(json.dumps(record) + "\n" for record in records)
    file.write_text(whole[:-30])
    assert [row["status"] for row in runner.read_rows(file)] == ["ok", "OOM", "failed"]
    log = tmp_path / "ran"
    instead(monkeypatch, f"open({str(log)!r}, 'a').write(json.dumps(task) + '\\n')\n" + OK)
    assert bench(*given, "lengths=[16, 32, 48]", "--resume") == 0
    ran = [json.loads(line) for line in log.read_text().splitlines()]
    done = [(task["cell"]["length"], [v["warmup"] for v in task["variants"]]) for task in ran]
    assert done == [(32, [0, 1]), (48, [0, 1])]
    found = runner.read_rows(file)
    assert [row["status"] for row in found] == ["ok", "OOM", "ok", "ok", "ok", "ok"]
    assert bench(*given, "lengths=[16, 32, 48]", "--resume") == 0
    assert len(log.read_text().splitlines()) == 2
    # Without --resume the file is begun anew.
    assert bench(*given, "lengths=[16]") == 0
    assert len(rows_of(file)) == 2


def test_summary_of_steps(rng: np.random.Generator) -> None:
    found = rng.uniform(1, 2, 7).tolist()
    row = timing.summary([3.0, 0.5], found)
    assert row["warmup_total"] == 3.5
    assert row["total"] == pytest.approx(np.sum(found))
    assert row["average"] == pytest.approx(np.mean(found))
    assert row["deviation"] == pytest.approx(np.std(found, ddof=1))
    assert timing.summary([], [2.0])["deviation"] == 0


def test_words_of_times() -> None:
    def row(mode: str, warmup: int, average: float) -> dict[str, Any]:
        case = {"size": "a", "length": 128, "policy": "mixed", "mode": mode, "warmup": warmup}
        case |= dict.fromkeys(config.KERNELS, "xla")
        return {"case": case, "status": "ok", "average": average}

    rows = [row("forward", 0, 8.0), row("forward", 5, 2.0), row("forward_backward", 5, 6.0)]
    text = timing.words(rows)
    assert "Forward and backward take 3.00 times" in text
    assert "Without warm-up the average is 4.00 times" in text
    ours = {**rows[2], "case": {**rows[2]["case"], "norm": "ours", "mlp": "ours"}, "average": 3.0}
    text = timing.words([*rows, ours])
    assert text.endswith(
        "With kernels norm ours, mlp ours a warm forward_backward takes 0.50 of XLA's time (a at "
        "128 in mixed after 5); 0 of 1 rows take more than 1.03 of it."
    )
    slower = {**ours, "average": 6.3}
    text = timing.words([*rows, slower])
    assert "1.03 of it: a at 128 in mixed after 5 (1.050)." in text


def cases_beside(figure: str, **case: Any) -> list[dict[str, Any]]:
    """Rows of lengths 1 to 3 by XLA, with figure 1, and by ours, with 0.9, 0.5 and 1.1."""
    case |= dict.fromkeys(config.KERNELS, "xla")
    ours = dict.fromkeys(("norm", "mlp", "loss"), "ours")
    found = []
    for length, value in ((1, 0.9), (2, 0.5), (3, 1.1)):
        # That of another policy has none of XLA's beside it.
        for policy, kernels_of in (("mixed", {}), ("mixed", ours), ("float32", ours)):
            of = {"size": "a", "length": length, "policy": policy, **case, **kernels_of}
            found.append({"case": of, "status": "ok", figure: value if kernels_of else 1.0})
    return found


def test_words_of_ours_beside_xlas() -> None:
    """By pass, of rows that differ in kernels alone: the median, the best and the worst."""
    expected = (
        "0.90 of {} in the median, 0.50 (a at 2 in mixed{}) at best and 1.10 (a at 3 in mixed{})"
    )
    rows = [
        row
        for mode in ("forward", "forward_backward")
        for row in cases_beside("average", mode=mode, warmup=1)
    ]
    text = timing.words(rows)
    which = "With kernels norm ours, mlp ours, loss ours"
    after = expected.format("XLA's time", " after 1", " after 1")
    for mode in ("forward", "forward_backward"):
        assert f"{which} a warm {mode} takes {after} at worst; 1 of 3 rows" in text
    rows = cases_beside("peak_bytes", mode="step")
    for row in rows:
        row |= {f"{name}_bytes": 0 for name in memory.CATEGORIES}
    held = expected.format("XLA's", "", "")
    assert f"{which} the peak of step is {held} at worst." in memory.words(rows)
    # In a sequence of steps the first compiles: of another number is another average.
    other = cases_beside("average", mode="forward", warmup=1, steps=5)[1]
    beside = cases_beside("average", mode="forward", warmup=1, steps=10)[0]
    assert "XLA's time" not in timing.words([beside, other])
    # A row that ran out of memory has nothing beside it.
    rows[0] = {"case": rows[0]["case"], "status": "OOM", "asked_bytes": 1}
    assert "0.80 of XLA's in the median" in memory.words(rows)


def test_kernels_of_ours_beside_xlas() -> None:
    """By program and phase: time, launches and the share of matrix products of both."""
    rows = []
    for part in (layers.WHOLE, layers.MODEL):
        for row in cases_beside("median", phase="training", layers=2, batch=1, part=part):
            is_ours = row["case"]["norm"] == "ours"
            top = [{"name": "k", "kind": kernels.REST, "part": "norm 1", "count": 1, "seconds": 1}]
            rows.append(
                {
                    **row,
                    "kernels": row["median"] / (4 if is_ours else 2),
                    "launches": 30 if is_ours else 40,
                    "by_kind": {kernels.PRODUCT: row["median"] / 8},
                    "by_part": {},
                    "attention": {},
                    "distinct": 1,
                    "top": top,
                }
            )
    text = kernels.table(rows)
    assert text.count("Kernels norm ours, mlp ours, loss ours beside XLA's:") == 1
    for part in (layers.WHOLE, layers.MODEL):
        figures = "1000 | 500 | 0.50 | 500 | 125 | 40 | 30 | 25.0% | 50.0%"
        assert text.count(f"| a | 2 | mixed | training | {part} | {figures} |") == 1
    assert "| float32 | training | model | 1000 | 500" not in text
    text = kernels.words(rows)
    assert (
        "In training with kernels norm ours, mlp ours, loss ours the layer takes 0.90 of XLA's "
        "time in the median, 0.50 (a at 2 in mixed) at best and 1.10 (a at 3 in mixed) at worst; "
        "its kernels alone take 0.25 to 0.55 of the time of XLA's, and are 0.75 of their number."
    ) in text
    # How often they were measured may differ; a row of as many steps comes first.
    of_model = rows[-3:]
    theirs, ours = ({**row, "case": {**row["case"], "steps": 5}} for row in of_model[:2])
    others = {**theirs, "case": {**theirs["case"], "steps": 10}, "median": 4.0}
    for beside, ratio in (([others], "0.28"), ([theirs, others], "1.10")):
        assert f"the model takes {ratio} of XLA's time (a at 3 in mixed)" in kernels.words(
            [*beside, ours]
        )
    only = [row for row in rows if row["case"]["norm"] == "xla"]
    assert "beside XLA's" not in kernels.table(only)


def test_a_layer_adds_up() -> None:
    """The sum of parts, shares of it, all layers, and tokens a second."""
    cell: dict[str, Any] = {"size": "a", "layers": 5, "batch": 2, "length": 50, "policy": "mixed"}
    cell |= {"phase": "prefill", "norm": "xla", "attention": "xla", "mlp": "xla"}
    times = {part: 1e-3 * (i + 1) for i, part in enumerate(parts.names_of({}))}
    rows: list[dict[str, Any]] = [
        {"case": {**cell, "part": part}, "status": "ok", "median": took}
        for part, took in {**times, layers.WHOLE: 0.033}.items()
    ]
    text = layers.table(rows)
    assert "| QKV | ok | 2 | 3.0% |" in text
    assert "| sum of the parts | sum | 66 | 100.0% |" in text
    assert "| the layer as one program | ok | 33 | 50.0% |" in text
    # 2 x 50 tokens in 0.165 s. Files of old have no rows of the model.
    assert "| all 5 layers, by one as one program | sum | 165 |  | 606 |" in text
    assert "sum of layers, embedding" not in text
    text = layers.words(rows)
    assert "residual 2 17%, down 15%, activation 14%; as one program it takes 0.50" in text
    decode = [{**row, "case": {**row["case"], "phase": "decode"}} for row in rows]
    assert " | 165 |  | 12.1 |" in layers.table(decode)
    around = {"embedding": 0.001, "final norm": 0.004, "head": 0.03, "model": 0.4}
    for part, took in around.items():
        rows.append({"case": {**cell, "part": part}, "status": "ok", "median": took})
    text = layers.table(rows)
    assert "| head | ok | 30 | 15.0% | 3,333 |" in text
    assert "| sum of layers, embedding, norm and head | sum | 200 | 100.0% | 500 |" in text
    assert "| the model as one program | ok | 400 | 200.0% | 250 |" in text
    assert "takes 2.00 of its layers, embedding, norm and head, of which" in layers.words(rows)
    del rows[3]["median"]
    rows[3]["status"] = "OOM"
    sums = layers.Totals(cell, rows)
    assert (sums.parts, sums.whole) == (None, 0.033)
    assert sums.parts_of_model == pytest.approx(0.2)
    assert "1 of 16 rows ran out of memory" in layers.words(rows)


def cell_of(**more: Any) -> dict[str, Any]:
    spec = config.load(TEST, [])
    return {**config.cell_of(spec, "test", 16, "float32"), **more}


@pytest.mark.parametrize("qk_norm", [0, 1])
def test_parts_are_the_model(rng: np.random.Generator, qk_norm: int) -> None:
    """A layer of parts is train.model.Block, by each kernel; and a decoder's is its last token."""
    cell = cell_of(kv_heads=2, qk_norm=qk_norm)
    of = model.program_of(cell).config.model
    from train.model import Block, Kernels

    block = Block(of, Kernels(), nnx.Rngs(0))
    x = jnp.asarray(rng.standard_normal((2, 16, 32)), jnp.float32)
    weights = {
        name: jnp.asarray(0.3 * rng.standard_normal(shape), jnp.float32)
        for name, shape in parts.weight_shapes(cell).items()
    }
    block.norm1.weight[...], block.norm2.weight[...] = weights["norm1"], weights["norm2"]
    block.qkv[...], block.out[...] = weights["qkv"], weights["out"]
    block.up[...], block.down[...] = weights["up"], weights["down"]
    of_heads = [weights[name] for name in ("q_norm", "k_norm")] if qk_norm else []
    for one, weight in zip((block.q_norm, block.k_norm), of_heads, strict=False):
        assert one is not None
        one.weight[...] = weight
    turns = parts.tables_of(2, 0, 16, 8)
    branch, stream = block(x, jnp.zeros_like(x), turns, None)
    expected = branch + stream
    for kernel in ("xla", "ours"):
        chosen = {**cell, "norm": kernel, "attention": kernel, "mlp": kernel}
        y = parts.layer(parts.functions(chosen, jnp.float32), x, weights, turns)
        np.testing.assert_allclose(y, expected, rtol=2e-5, atol=2e-5)
    functions = parts.functions(cell, jnp.float32)
    _, k, v = functions["QKV"](functions["norm 1"](x, weights["norm1"]), weights["qkv"])
    _, k = functions[parts.turn_of(cell)](k, k, *of_heads, *turns)
    empty = k.at[:, -1].set(jnp.nan), v.at[:, -1].set(jnp.nan)
    last = parts.tables_of(2, 15, 1, 8)
    y, keys, values = parts.layer(functions, x[:, -1:], weights, last, empty)
    np.testing.assert_allclose(y[:, 0], expected[:, -1], rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(keys, k, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(values, v, rtol=1e-5, atol=1e-5)


def test_wide_attention_is_jaxs(rng: np.random.Generator) -> None:
    q, k, v = (jnp.asarray(rng.standard_normal((2, 9, 3, 8)), jnp.float32) for _ in range(3))
    expected = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    found = parts.softmax_attention(q, k, v, jnp.float32)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_sums_in_sixteen_bits() -> None:
    """Against NumPy's, rounded at each step."""
    for total, of in precision.SUMS:
        expected = jnp.zeros((), total)
        numpy_sum, one = np.asarray(expected), np.asarray(jnp.asarray(precision.ADDEND, of))
        for _ in range(precision.COUNT):
            numpy_sum = np.asarray(numpy_sum + one.astype(total)).astype(total)
        assert precision.add(total, of) == float(numpy_sum), (total, of)


def measured(
    command: str, tmp_path: Path, settings: Sequence[str], *flags: str
) -> list[dict[str, Any]]:
    """The rows of a real run."""
    file = tmp_path / f"{command}.jsonl"
    given = ["--config", str(TEST), "--json", str(file), "--set", *settings, *flags]
    assert bench(command, *given) == 0
    return rows_of(file)


def test_time_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = [
        "modes=[forward]",
        "steps=2",
        "norm=xla",
        "mlp=ours",
        "attention=auto",
    ]
    page = tmp_path / "text.md"
    flags = ["--norm", "auto", "--loss", "ours", "--report", str(page)]
    cold, warm = measured("time", tmp_path, settings, *flags)
    assert cold["average"] > warm["average"] > 0
    assert cold["warmup_total"] == 0 < warm["warmup_total"]
    shown = capsys.readouterr()
    assert "| test | 2 | 16 | float32 | ours | forward | 1 | ok |" in shown.out
    assert shown.err.startswith(
        "[1/2] time size=test length=16 policy=float32 mode=forward warmup=0"
    )
    out = tmp_path / "page.md"
    html = tmp_path / "page.html"
    assert (
        bench("report", str(tmp_path / "time.jsonl"), "--out", str(out), "--html", str(html)) == 0
    )
    # What --report wrote is the same, but for the name of its pictures.
    pages = [one.with_suffix(".html").read_text() for one in (page, out)]
    assert pages[0] == pages[1]
    assert page.read_text().replace("text-time.svg", "page-time.svg") == out.read_text()
    text = out.read_text()
    assert "## Time of a step\n\n| size |" in text and "jax " in text
    assert "![Time of a step](page-time.svg)" in text
    assert "average of a step (s), after 1 of warm-up" in (tmp_path / "page-time.svg").read_text()
    assert "<table>" in html.read_text() and '<img src="data:image/svg+xml;' in html.read_text()


def test_compare_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["modes=[forward, step]", "steps=2"]
    rows = measured("compare", tmp_path, settings, "--norm", "auto", "--loss", "ours")
    assert [row["case"]["mode"] for row in rows] == ["forward", "step"]
    for row in rows:
        of = [row[f"{figure}_{name}"] for figure in ("median", "in_line") for name in PROGRAMS]
        assert len(of) == 6 and min(of) > 0
    shown = capsys.readouterr()
    assert shown.out.count("| test | 2 | 16 | float32 | norm ours, loss ours |") == 2
    assert shown.err.startswith("[1/2] compare size=test length=16 policy=float32 mode=forward: ok")
    page, html = tmp_path / "page.md", tmp_path / "page.html"
    file = str(tmp_path / "compare.jsonl")
    assert bench("report", file, "--out", str(page), "--html", str(html)) == 0
    assert "## XLA's kernels and ours in turns\n\n| size |" in page.read_text()
    assert "ours in times of XLA" in (tmp_path / "page-compare.svg").read_text()


def test_steps_in_turns() -> None:
    """A short step is waited for, and then several follow one another; a long one runs once."""
    calls: list[str] = []
    result = jax.block_until_ready(jnp.zeros(()))

    def starts(name: str, seconds: float) -> Any:
        def start() -> Any:
            calls.append(name)
            time.sleep(seconds)
            return result

        return start

    found = compare.turns({"xla": starts("xla", 0.0), "ours": starts("ours", 0.06)}, 2)
    turn = ["xla"] * (1 + compare.IN_LINE) + ["ours"]
    assert calls == turn * 3
    assert [len(of) for both in found.values() for of in both] == [2] * 4
    waited, in_line = found["ours"]
    assert waited == in_line and min(waited) >= 0.06


def test_words_of_turns() -> None:
    case = {"size": "a", "length": 128, "policy": "mixed", "batch": 2, "mode": "forward"}
    case |= dict.fromkeys(config.KERNELS, "xla") | {"norm": "ours"}
    given = {
        "xla": ([2.0, 3.0, 2.0], [1.0, 1.0, 5.0]),
        "ours": ([2.1, 2.1, 9.0], [0.9, 0.9, 0.1]),
        "again": ([2.0], [0.99]),
    }
    row = {"case": case, "status": "ok", **compare.summary(given)}
    without = {"case": case, "status": "OOM", "asked_bytes": 1}
    text = compare.words([row, without])
    which = "With kernels norm ours forward"
    assert f"{which}, waited for, takes 1.05 of XLA's time (a at 128 in mixed)" in text
    assert "1 of 1 rows take more than 1.03 of it: a at 128 in mixed (1.050)." in text
    assert f"{which}, in line, takes 0.90 of XLA's time (a at 128 in mixed); 0 of 1 rows" in text
    assert text.startswith("1 of 2 rows ran out of memory.")
    assert text.endswith("XLA's program in line takes 0.99 of its own time.")
    *_, line, last = compare.table([row, without]).splitlines()
    assert line.endswith("| ok | 2 | 2.1 | 1.050 | 1 | 0.9 | 0.900 | 0.990 |")
    assert last.endswith("| forward | OOM, 1 B asked for |  |  |  |  |  |  |  |")


def test_a_real_run_is_out_of_memory(tmp_path: Path) -> None:
    """The parameters fit and the pass does not; then a size whose parameters do not fit either."""
    spec = config.load(TEST, ["vocab=64"])
    limit = 1.5 * spec.parameter_bytes("test", "float32") / 2**30
    given = [
        f"memory_limit={limit}",
        "sizes=[test, tiny]",
        "modes=[forward_backward]",
        "warmups=[0]",
    ]
    of_pass, of_size = measured("time", tmp_path, given)
    assert (of_pass["status"], of_size["status"]) == ("OOM", "OOM")
    assert of_pass["asked_bytes"] > limit * 2**30
    assert tables.status(of_pass).endswith(f" asked for of {tables.size(int(limit * 2**30))}")
    assert of_size["asked_bytes"] == spec.parameter_bytes("tiny", "float32")


def test_memory_runs(tmp_path: Path) -> None:
    """Categories add up to the peak, and are what arithmetic says."""
    settings = ["modes=[forward_backward, step]", "policies=[bfloat16]"]
    both, step = measured("memory", tmp_path, settings)
    bytes_ = config.load(TEST, []).parameter_bytes("test", "bfloat16")
    for row in (both, step):
        assert row["parameters_bytes"] == bytes_
        assert sum(row[f"{name}_bytes"] for name in memory.CATEGORIES) == row["peak_bytes"]
        # Layers x B x T x D, twice, in 16 bits.
        assert row["stream_bytes"] == row["stream_expected_bytes"] == 2 * 2 * 2 * 16 * 32 * 2
        assert row["kept_bytes"] > row["stream_bytes"]
        assert row["of_logits_bytes"] == 2 * 16 * 64 * 4
    assert (both["optimizer_bytes"], both["gradients_bytes"]) == (0, bytes_)
    assert step["optimizer_bytes"] >= 2 * bytes_ and step["gradients_bytes"] == 0
    assert "2 x layers x batch x length x width, in all" in memory.words([both, step])
    for row in (both, step):
        # Of a program that XLA packed well; more than the temporaries would be wrong.
        assert 0.9 * row["temporaries_bytes"] < max(row["timeline"]) <= row["temporaries_bytes"]
        sizes = [of["bytes"] for of in row["buffers"]]
        assert len(sizes) == buffers.LARGEST and sizes == sorted(sizes, reverse=True)
    # Gate and up of both layers; its gradients are made where it is used.
    up = 2 * 32 * 128 * 2
    found = {(of["bytes"], of["what"], of["scope"]): of["line"] for of in both["buffers"]}
    assert found[up, "argument", "params['blocks']['up']"] == ""
    (line,) = {line for (size, what, _), line in found.items() if (size, what) == (up, "result")}
    file, _, number = line.partition(":")
    source = (ROOT / "examples" / file).read_text().splitlines()[int(number) - 1]
    assert "multiply(shards.gather_rows(x), up)" in source
    text = memory.table([both, step])
    assert "| 16.0 KiB | argument | params['blocks']['up'] |  |" in text


def test_layers_runs(tmp_path: Path) -> None:
    rows = measured("layers", tmp_path, ["phases=[decode]", "policies=[mixed]", "steps=1"])
    of_layer = parts.names_of(rows[0]["case"])
    expected = [*of_layer, layers.WHOLE, *parts.OUTSIDE, layers.MODEL]
    assert [row["case"]["part"] for row in rows] == expected
    assert all(row["median"] > 0 for row in rows)


class Counting:
    """In place of `compiled.Compiling`."""

    def __init__(self, function: Any, *_: object, **options: Any) -> None:
        """Takes the function, and options of `jax.jit`."""
        self.jitted = jax.jit(function, **options)

    def start(self, *arguments: Any) -> float:
        """The operations that XLA counts in the program, which does not run."""
        cost: Any = self.jitted.lower(*arguments).cost_analysis()
        return float(cost["flops"])


def test_parts_add_up_to_the_layer_and_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """By operations that XLA counts, forward and backward: no part is left out or counted twice."""
    # One layer, as XLA counts the body of a loop once.
    changes = {"layers": 1, "qk_norm": 1, "tied": 1, "phase": "training", "steps": 1}
    cell = cell_of(**changes, width=64, ffn=128, head_width=16, vocab=256)
    monkeypatch.setattr(compiled, "Compiling", Counting)
    found = {
        part: layers.call_of(cell, part, None)[0]()
        for part in (*parts.names_of(cell), layers.WHOLE, *parts.OUTSIDE, layers.MODEL)
    }
    of_layer = sum(found[part] for part in parts.names_of(cell))
    assert found[layers.WHOLE] == pytest.approx(of_layer, rel=0.03)
    outside = sum(found[part] for part in parts.OUTSIDE)
    assert found[layers.MODEL] == pytest.approx(found[layers.WHOLE] + outside, rel=0.03)
    assert outside > 0.2 * of_layer
    needed = config.parameter_bytes(cell, "float32")
    with pytest.raises(compiled.OutOfMemory, match=str(needed)):
        layers.call_of(cell, layers.MODEL, needed - 1)


def test_calls_in_turn_are_of_the_same_time() -> None:
    """What takes a millisecond is timed as that, however many follow one another."""
    started = 0

    def start() -> None:
        nonlocal started
        started += 1
        time.sleep(1e-3)

    found = harness.steady_seconds(start, 3, 1)
    assert len(found) == 3 and 1e-3 <= min(found) < 5e-3
    assert started * 2e-3 > harness.LEAST_SECONDS / 2


def test_kernels_are_profiled_by_name() -> None:
    """Other flags of XLA's stay."""
    flags = {"XLA_FLAGS": "--xla_dump_to=x"}
    breakdown.show_kernels(flags)
    assert flags["XLA_FLAGS"] == "--xla_dump_to=x --xla_gpu_enable_command_buffer="


@pytest.mark.parametrize(("jobs", "count"), [(1, 1), (3, 2)])
def test_what_had_no_room_beside_others_runs_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int, count: int
) -> None:
    code = """
place = os.path.join(FOLDER, str(task['cell']['length']))
with open(place, 'a') as file:
    file.write('1')
is_first = os.path.getsize(place) == 1
for variant in task['variants']:
    no_room = variant['warmup'] == 1 and task['cell']['length'] == 2 and is_first
    row(case={**task['cell'], **variant}, status='OOM' if no_room else 'ok')
"""
    instead(monkeypatch, f"FOLDER = {str(tmp_path)!r}" + code)
    tasks = [({"length": length}, [{"warmup": 0}, {"warmup": 1}]) for length in (1, 2, 3)]
    found = [
        (row["case"]["length"], row["case"]["warmup"], row["status"])
        for row in runner.run_alone_again("time", tasks, jobs)
    ]
    begun = [(1, 0, "ok"), (1, 1, "ok"), (2, 0, "ok")]
    last = [(3, 0, "ok"), (3, 1, "ok")]
    # By itself there was no room: it is so.
    expected = [(2, 1, "OOM"), *last] if jobs == 1 else [*last, (2, 1, "ok")]
    assert found == begun + expected
    assert (tmp_path / "2").stat().st_size == count


def test_words_of_the_peak() -> None:
    row = {"case": cell_of(mode="step"), "status": "ok", "peak_bytes": 1000}
    row |= {f"{name}_bytes": 0 for name in memory.CATEGORIES}
    text = memory.words([{**row, "measured_bytes": near} for near in (1010, 1050)])
    assert "counts is 1.01 to 1.05 of XLA's by category, and within 3% of it in 1 of 2" in text


def test_the_peak_that_a_device_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report has the peak without other memory in use, and the compiled peak."""
    counts = iter([100, 5000, 100, 900])

    class Device:
        def memory_stats(self) -> dict[str, int]:
            now = next(counts)
            return {"peak_bytes_in_use": now, "bytes_in_use": now}

    cell = cell_of(layers=1, width=8, ffn=8, head_width=4, vocab=8)
    program = model.program_of(cell)
    batch = program.abstract_batch()
    run: Any = jax.jit(program.loss).lower(program.abstract()["params"], batch).compile()
    arguments = run.memory_analysis().argument_size_in_bytes
    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    found = memory.measured_peak(cell, program, "forward", run)
    besides = 5000 - arguments
    assert found == {"measured_bytes": 900 - besides, "besides_bytes": besides}


def test_sums_of_a_layer_and_its_model(tmp_path: Path) -> None:
    """Sums in the table are of the rows above, and speeds of what was measured."""
    dims = "dims.a=[256,1024,2,4,2,64,1,1]"
    settings = [dims, "sizes=a", "lengths=[128]", "phases=[prefill]", "vocab=1000", "steps=5"]
    rows = measured("layers", tmp_path, settings)
    took = {row["case"]["part"]: row["median"] for row in rows}
    sums = layers.Totals(rows[0]["case"], rows)
    assert sums.parts == pytest.approx(sum(list(took.values())[:11]))
    outside = took["embedding"] + took["final norm"] + took["head"]
    assert sums.parts_of_model == pytest.approx(2 * took["layer"] + outside)
    speed = f"{2 * 128 / took['model']:,.0f}"
    assert f"| {speed} |" in layers.table(rows) and f"{speed} tokens a second" in layers.words(rows)


PROGRAM = """HloModule jit_f, is_scheduled=true

%fused (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %dot.1 = f32[4]{0} dot(%p, %p), metadata={op_name="jit(f)/jvp(attention)/dot_general"}
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %product = f32[4]{0} fusion(%x), kind=kOutput, calls=%fused
  %library = f32[4]{0} custom-call(%x), custom_call_target="__cublas$gemm", METADATA/gate and up/d"}
  %own = f32[4]{0} custom-call(%x), custom_call_target="xentile_rms_norm", METADATA/jvp(norm 1)/x"}
  ROOT %add = f32[4]{0} add(%own, %library), METADATA/residual 1/attention_like/add"}
}
""".replace("METADATA", 'metadata={op_name="jit(f)')


def test_kernels_of_a_program_by_kind_and_part() -> None:
    kinds = kernels.kinds_of_program(PROGRAM)
    expected = {"product": kernels.PRODUCT, "library": kernels.PRODUCT, "own": kernels.FUSED}
    assert {name: kinds[name] for name in (*expected, "add")} == {**expected, "add": kernels.REST}
    scopes = kernels.scope_of(parts.names_of({}))
    found, _ = breakdown.parts_of_program(PROGRAM, scopes)
    assert {name: found[name] for name in ("product", "library", "own", "add")} == {
        "product": "attention",
        "library": "gate and up",
        "own": "norm 1",
        "add": "residual 1",
    }
    assert scopes("jit(f)/norm 12/mul") == ""


def test_a_profile_without_kernels_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no profile: name one that JAX wrote"):
        kernels.measure_profile(tmp_path, PROGRAM, cell_of(part=layers.MODEL), 1)
    with jax.profiler.trace(tmp_path):
        pass
    with pytest.raises(ValueError, match="has no instruction of the step"):
        kernels.measure_profile(tmp_path, PROGRAM, cell_of(part=layers.MODEL), 1)


def test_the_time_between_kernels() -> None:
    """It is what no stream is busy in; what two do at once counts once."""
    spans = [(30.0, 40.0), (0.0, 10.0), (5.0, 8.0), (12.0, 20.0), (18.0, 25.0)]
    assert breakdown.between(spans) == 2 + 5
    assert breakdown.between([(3.0, 4.0)]) == 0


def test_the_time_between_kernels_is_told(tmp_path: Path) -> None:
    settings = ["phases=[prefill]", "steps=1"]
    of_layer = measured("kernels", tmp_path, settings)[0]
    assert of_layer["idle"] is None and "no kernel runs" not in kernels.table([of_layer])
    row = {**of_layer, "kernels": 0.75, "idle": 0.125, "median": 1.0, "by_part": {}}
    assert "| no kernel runs | 125 | 16.7% |" in kernels.table([row])
    text = "the kernels of a layer add up to 0.75 of what it takes, and to 0.88 with the time"
    assert text in kernels.words([row])
    # A profile has more of it than there is.
    assert "| both | 1000 |" in kernels.table([{**row, "idle": 0.5}])
    assert kernels.between_kernels({**row, "kernels": 1.5}) == 0


def test_many_profiles_are_told_of_together() -> None:
    """Products' share from the least to the most, and sums of layers apart where they wait."""
    case = cell_of(part=layers.MODEL, phase="prefill")
    found = []
    for length in range(1, 6):
        took = {kernels.PRODUCT: 0.1 * length, kernels.REST: 1 - 0.1 * length}
        top = [{"kind": kernels.REST, "part": "norm 1", "seconds": 0.2}]
        row: dict[str, Any] = {
            "status": "ok",
            "kernels": 1.0,
            "by_kind": took,
            "top": top,
            "launches": 9 * length,
        }
        row |= {"idle": 0.25, "median": 1.25 if length > 2 else 2.0}
        found.append({**row, "case": {**case, "length": length, "size": "a"}})
    text = kernels.words([*found, *({**r, "case": {**r["case"], "part": "layer"}} for r in found)])
    assert text == (
        "In prefill matrix products take 10% (a at length 1) to 50% (a at length 5) of the "
        "kernels' time in 5 models, which launch 9 to 45 kernels a step; the largest kernel that "
        "is no product is of norm 1 in 5. In prefill the kernels of a layer add up to 0.50 to 0.80 "
        "of what it takes, and to 0.62 to 1.00 with the time between them."
    )
    assert [row["case"]["length"] for row in kernels.longest(found)] == [5]
    assert kernels.largest(found[0]) == ["norm 1 20%", "norm 1 20%"]


def test_kernels_runs(tmp_path: Path) -> None:
    """Each time of a profile is counted once, by part and by kind."""
    settings = ["phases=[prefill]", "norm=ours", "attention=ours", "mlp=ours", "steps=2"]
    of_layer, row = measured("kernels", tmp_path, settings)
    assert [one["case"]["part"] for one in (of_layer, row)] == [layers.WHOLE, layers.MODEL]
    for one in (of_layer, row):
        assert one["kernels"] > 0
        for key in ("by_part", "by_kind"):
            assert sum(one[key].values()) == pytest.approx(one["kernels"])
        assert one["by_kind"][kernels.FUSED] > 0 and one["by_kind"][kernels.PRODUCT] > 0
        assert one["attention"].keys() <= {kernels.FUSED, kernels.REST}
        assert sum(one["attention"].values()) == pytest.approx(one["by_part"]["attention"])
        top = one["top"][0]
        assert top["seconds"] == max(each["seconds"] for each in one["top"])
        assert f"| {top['name']} | {top['kind']} | {top['part']} |" in kernels.table([one])
    assert row["by_part"].keys() - of_layer["by_part"].keys() == set(parts.OUTSIDE)
    # Two layers have two norms, attention and an activation each, and there is one norm more.
    assert row["launches"] >= 2 * 4 + 1
    assert 4 <= of_layer["launches"] < row["launches"]
    assert "Prefill of test at length 16 in float32 launches" in kernels.words([row])
    text = kernels.words([of_layer])
    share = of_layer["kernels"] / of_layer["median"]
    assert text == f"In prefill the kernels of a layer add up to {share:.2f} of what it takes."
    assert "launches" not in text


def test_precision_runs(tmp_path: Path) -> None:
    rows = measured("precision", tmp_path, ["policies=[float32, bfloat16, mixed]", "steps=1"])
    wide, narrow, mixed = rows[:3]
    assert wide["loss_error"] < 1e-6 and wide["gradient_error"] < 1e-5
    for row in (narrow, mixed):
        assert 1e-4 < row["gradient_error"] < 0.1
        assert set(row["gradient_errors"]) == {"layer 0", "layer 1", "embedding", "norm", "head"}
    assert mixed["loss_error"] < 5e-3
    assert mixed["dtypes"] == {
        "parameters": "float32",
        "output of the layers": "bfloat16",
        "output of the norm": "bfloat16",
        "logits": "bfloat16",
        "loss": "float32",
        "gradients": "float32",
    }
    assert set(narrow["dtypes"].values()) == {"bfloat16"}
    assert len(rows) == 3 + len(precision.SUMS)
    text = precision.table(rows)
    assert "| bfloat16 | bfloat16 | ok | 4.000000 |" in text and "| layer 1 |" in text


def test_attention_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["head_sizes=[8]", "lengths=[64]", "implementations=[xla, ours]"]
    rows = measured("attention", tmp_path, settings)
    assert [row["case"]["mode"] for row in rows] == ["forward", "backward"] * 2
    theirs, mine = rows[1], rows[3]
    # XLA keeps weights [B, T, T]; ours q, k, v, o and lse.
    assert theirs["kept_bytes"] > 2 * 64 * 64 * 4 > mine["kept_bytes"]
    assert "Backward, ours takes" in capsys.readouterr().out


def test_jit_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = measured("jit", tmp_path, ["modes=[forward]", "steps=1"])
    assert [row["case"]["how"] for row in rows] == ["jit, our kernels", "jit", "op by op"]
    assert all(row["first"] > row["median"] > 0 for row in rows)
    assert "times as fast compiled as op by op" in capsys.readouterr().out
