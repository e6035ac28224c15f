"""Whole runs: curves by kernel and mesh, resuming, Ctrl-C, full disks, bad input, profile, logs."""

import dataclasses
import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import wandb
from conftest import ROOT, TEXT, Runner, steps
from train import breakdown, log, validate
from train.__main__ import limit_gpu_memory, main
from train.checkpoint import Checkpoints
from train.config import InputError, Options, RunError, resolve
from train.step import Program, with_kernels

STEPS = 6
# Of losses near 6.2 in float32; the optimizer makes more of rounding than a sum does.
SPREAD = 2e-4
BASELINE: dict[str, Any] = {
    "ce_kernel_type": "baseline",
    "norm_kernel": "baseline",
    "mlp_kernel": "baseline",
    "attention_kernel": "baseline",
    "linear_attention_kernel": "baseline",
    "conv_kernel": "baseline",
}
KERNELS: dict[str, dict[str, Any]] = {
    "baseline": BASELINE,
    "fused": {**BASELINE, "ce_kernel_type": "fused"},
    "fused_linear": {**BASELINE, "ce_kernel_type": "fused_linear"},
    "norm": {**BASELINE, "norm_kernel": "ours"},
    "mlp": {**BASELINE, "mlp_kernel": "ours"},
    "attention": {**BASELINE, "attention_kernel": "ours"},
    "all": {},
}


@pytest.fixture(scope="module")
def one_device() -> list[float]:
    """The baseline's curve on one device, in float32."""
    from train.loop import train

    found = train(Options("test", num_train_steps=STEPS, text=TEXT, dtype="float32", **BASELINE))
    return list(found.losses.values())


def largest(losses: Any, expected: list[float]) -> float:
    return float(np.abs(np.array(list(losses.values())) - expected).max())


def test_loss_falls(train: Runner) -> None:
    losses = train(num_train_steps=40, learning_rate=3e-3).losses
    assert list(losses) == list(range(1, 41))
    assert abs(losses[1] - np.log(512)) < 0.05
    assert losses[40] < losses[1] - 0.8


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", ["adamw8bit", "muon"])
def test_optimizers_train_as_well(train: Runner, optimizer: str, param_dtype: str) -> None:
    of: Any = {"num_train_steps": 20, "learning_rate": 3e-3, "model_size": "test"}
    right = list(train(**of).losses.values())
    losses = list(train(optimizer=optimizer, param_dtype=param_dtype, **of).losses.values())
    assert losses[-1] < losses[0] - 0.3
    # Muon's steps have AdamW's size, and matrices this small gain little by them.
    assert np.mean(losses[-5:]) < np.mean(right[-5:]) + (0.4 if optimizer == "muon" else 0.1)


def test_fp8_trains_as_well(train: Runner) -> None:
    of: Any = {"num_train_steps": 20, "learning_rate": 3e-3}
    right = list(train(**of).losses.values())
    losses = list(train(matmul="fp8", **of).losses.values())
    assert losses != right
    assert abs(np.mean(losses[-5:]) - np.mean(right[-5:])) < 0.05


@pytest.mark.few(0)
def test_eight_bits_on_a_mesh_and_resumed(train: Runner, tmp_path: Path) -> None:
    """A device has whole blocks of 256 columns, as without a mesh."""
    of: Any = {"dtype": "float32", "optimizer": "adamw8bit", "model_size": "small"}
    of |= {"context_length": 16, "batch_size": 2, "vocab_size": 520}
    right = train(num_train_steps=2, checkpoint_dir=tmp_path, **of).losses
    resumed = train(num_train_steps=4, resume=tmp_path, mesh="fsdp=2", **of).losses
    assert list(resumed) == [3, 4]
    through = train(num_train_steps=4, **of).losses
    assert right[2] == through[2]
    assert abs(resumed[4] - through[4]) < 5e-3
    with pytest.raises(InputError, match="has optimizer adamw8bit and the run adamw: resume"):
        train(num_train_steps=5, resume=tmp_path, **{**of, "optimizer": "adamw"})


@pytest.mark.few(2)
@pytest.mark.parametrize("kernel", ["all", *list(KERNELS)[1:-1]])
def test_kernels_train_the_same(train: Runner, one_device: list[float], kernel: str) -> None:
    losses = train(num_train_steps=STEPS, dtype="float32", **KERNELS[kernel]).losses
    assert largest(losses, one_device) < SPREAD


def test_auto_takes_what_there_is() -> None:
    """Our kernels where the library has them, the baseline where there is none."""
    found = with_kernels(resolve(Options(norm_kernel="baseline"))).options
    kernels = found.ce_kernel_type, found.norm_kernel, found.mlp_kernel, found.attention_kernel
    assert kernels == ("fused_linear", "baseline", "ours", "ours")
    program = "from train.config import Options, resolve; from train.step import with_kernels; "
    program += "print(with_kernels(resolve(Options())).options)"
    path = f"{ROOT / 'examples'}:{os.environ['PYTHONPATH']}"
    without = {**os.environ, "PYTHONPATH": path, "XENTILE_XLA_LIBRARY": "absent.so"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=without, capture_output=True, text=True, check=True
    )
    # XLA's program of linear attention needs no library.
    names = BASELINE.keys() - {"linear_attention_kernel"}
    assert all(f"{name}='baseline'" in done.stdout for name in names), done.stdout


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_order_of_a_batch_changes_rounding_alone(
    train: Runner, one_device: list[float], dtype: str
) -> None:
    of = {"dtype": dtype, "permute_batch": True, "remat": "full", **BASELINE}
    losses = train(num_train_steps=STEPS, **of).losses
    assert largest(losses, one_device) < (SPREAD if dtype == "float32" else 2e-2)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("mesh", "kernel"),
    [
        ("data=8", "all"),
        ("fsdp=8", "all"),
        ("data=2,model=4", "fused_linear"),
        ("data=2,fsdp=2,model=2", "baseline"),
        ("data=2,fsdp=2,model=2", "fused"),
    ],
)
def test_meshes_train_the_same(
    train: Runner, one_device: list[float], mesh: str, kernel: str
) -> None:
    losses = train(num_train_steps=STEPS, dtype="float32", mesh=mesh, **KERNELS[kernel]).losses
    assert largest(losses, one_device) < SPREAD


def test_resumed_run_has_the_same_curve(train: Runner, tmp_path: Path) -> None:
    """Bit for bit on the same device; and the log goes on in the same file."""
    whole = train(num_train_steps=STEPS).losses
    of = {"checkpoint_dir": tmp_path / "made", "log": tmp_path / "run.jsonl"}
    first = train(num_train_steps=3, **of).losses
    del of["checkpoint_dir"]
    second = train(num_train_steps=STEPS, resume=tmp_path / "made", **of)
    assert {**first, **second.losses} == whole
    assert [record["step"] for record in steps(tmp_path / "run.jsonl")] == [*range(1, STEPS + 1)]
    # Nothing is left to do.
    again = train(num_train_steps=STEPS, resume=tmp_path / "made")
    assert (again.step, again.losses) == (STEPS, {})


def test_resumes_on_another_mesh(train: Runner, one_device: list[float], tmp_path: Path) -> None:
    of: dict[str, Any] = {"dtype": "float32", **KERNELS["all"]}
    first = train(num_train_steps=3, checkpoint_dir=tmp_path, mesh="fsdp=8", **of).losses
    second = train(num_train_steps=STEPS, resume=tmp_path, **of).losses
    assert largest({**first, **second}, one_device) < SPREAD


def test_checkpoints_are_kept_to_the_newest(train: Runner, tmp_path: Path) -> None:
    train(num_train_steps=5, checkpoint_dir=tmp_path, checkpoint_every=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["4", "5"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--model_size huge", "no preset: choose from test, tiny, small, qwen2.5-0.5b, qwen2"),
        ("--ce_kernel_type liger", "unknown: choose from auto, baseline, fused, fused_linear"),
        ("--norm_kernel apex", "--norm_kernel apex is unknown: choose from auto, baseline, ours"),
        ("--matmul int4", "--matmul int4 is unknown: choose from default, fp8"),
        ("--matmul fp8 --mesh model=2", "--matmul fp8 and --mesh model=2 do not go together"),
        ("--mlp_kernel apex", "--mlp_kernel apex is unknown: choose from auto, baseline, ours"),
        ("--attention_kernel apex", "apex is unknown: choose from auto, baseline, ours"),
        ("--linear_attention_kernel fla", "fla is unknown: choose from auto, baseline, ours"),
        ("--conv_kernel apex", "--conv_kernel apex is unknown: choose from auto, baseline, ours"),
        ("--block_pattern MDMA", "which --model_size test is not: choose from hybrid-test, hybrid"),
        ("--model_size hybrid-test --block_pattern MX", "'MX' is no pattern of 8 blocks: give let"),
        ("--model_size hybrid-test --block_pattern MDM", "of M, D, A, as many as divide 8"),
        ("--remat some", "--remat some is unknown: choose from none, selective, attention, full"),
        ("--remat selective:0", "attention, full, selective:N"),
        ("--remat selective:N", "selective:N with the letter N is unknown: choose from none, "),
        ("--dtype int8", "--dtype int8 is unknown: choose from bfloat16, float32"),
        ("--batch_size 0", "--batch_size 0 is too small: give 1 or more"),
        ("--context_length 1", "--context_length 1 is too small: give 2 or more"),
        ("--num_train_steps 0", "--num_train_steps 0 is too small"),
        ("--learning_rate nan", "--learning_rate nan is not a positive number"),
        ("--memory_budget -1", "--memory_budget -1.0 is not a positive number of GiB"),
        ("--mesh pipeline=2", "names the axis 'pipeline': choose from data, fsdp, model"),
        ("--mesh data=two", "has size 'two' for data: give a whole number"),
        ("--mesh data=2,data=4", "names data twice"),
        ("--mesh data=3", "splits --batch_size 8 over 3 devices (data), which do not divide it"),
        ("--mesh fsdp=5 --batch_size 5", "splits the hidden size 32 over 5 devices (fsdp)"),
        ("--mesh model=7", "splits --vocab_size 512 over 7 devices (model)"),
        (
            "--mesh model=4 --model_size hybrid-test",
            "splits the heads of the delta rule 2 over 4 devices (model)",
        ),
        ("--mesh data=16 --batch_size 16", "has 16 devices and this machine 8: name fewer"),
        ("--resume absent", "is no folder: name one with checkpoints"),
        ("--batch_size many", "invalid int value: 'many': see --help"),
        ("--colour red", "unrecognized arguments: --colour red: see --help"),
    ],
)
def test_bad_input_is_told_of_in_a_line(
    options: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--model_size", "test", *options.split(), "--text", str(TEXT[0])]
    jax.devices()  # from here on there are eight
    try:
        status = main(argv)
    except SystemExit as exit_:
        status = int(str(exit_.code))
    text = capsys.readouterr().err
    assert status == 2 and text.startswith("train: error: ") and text.count("\n") == 1
    assert message.removesuffix(" (data)") in text.replace(" (data x fsdp)", " (data)")


def test_missing_packages_are_named() -> None:
    for name, install in (
        ("tokenizers", "--no-deps -r scripts/requirements-jax.txt"),
        ("pallas_bridge", "./pallas_bridge"),
    ):
        # As where it is not installed: `import` raises ModuleNotFoundError.
        program = f"import sys; sys.modules[{name!r}] = None; from train.__main__ import main; "
        options = ["--model_size", "test", "--ce_kernel_type", "fused", "--text", str(TEXT[0])]
        program += f"sys.exit(main({options!r}))"
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'examples'}:{os.environ['PYTHONPATH']}"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 2
        expected = f"train: error: the package {name} is not installed: run pip install {install}"
        assert done.stderr.startswith(expected), done.stderr


def test_checkpoint_of_another_model(
    train: Runner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="has no checkpoint: name a folder that has"):
        train(resume=tmp_path / "empty")
    train(num_train_steps=1, checkpoint_dir=tmp_path / "made")
    with pytest.raises(InputError, match="has vocab 512 and the run 1024: resume with the options"):
        train(resume=tmp_path / "made", vocab_size=1024)
    (tmp_path / "made" / "1" / "config" / "metadata").unlink()
    with pytest.raises(InputError, match="is not whole or not of this program"):
        train(resume=tmp_path / "made")


def test_full_disk_of_the_log_loses_no_run(train: Runner, tmp_path: Path) -> None:
    """The system's own device that is always full; the message is that of a full disk."""
    with pytest.raises(RunError, match=r"log /dev/full cannot be written \(no space left on dev"):
        train(log=Path("/dev/full"))

    class Full(log.Lines):
        def write(self, record: log.Record) -> None:
            if record.get("step") == 3:
                self.file = Path("/dev/full").open("w")  # noqa: SIM115
            super().write(record)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log, "Lines", Full)
        with pytest.raises(RunError, match="no space left on device"):
            train(log=tmp_path / "run.jsonl", checkpoint_dir=tmp_path / "made")
    assert train(num_train_steps=4, resume=tmp_path / "made").losses.keys() == {4}


def test_full_disk_of_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint before the one that has no room stays whole."""
    config = resolve(Options(model_size="test"))
    checkpoints = Checkpoints(tmp_path, config)
    state = {"params": jnp.arange(2**18, dtype=jnp.float32)}
    checkpoints.save(1, state)
    # Numbers that no compression makes small.
    noise = np.random.default_rng(0).normal(size=2**18)
    # A write that fails half way: files may grow to 64 KiB and no further.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))
    try:
        with pytest.raises(RunError, match=r"cannot be written .*: free space, or name another"):
            checkpoints.save(2, {"params": jnp.asarray(noise)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    step, restored = checkpoints.restore(state)
    assert step == 1 and jnp.array_equal(restored["params"], state["params"])

    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(RunError, match="takes 1048576 bytes of the 1000 that are free"):
        checkpoints.save(3, state)


def test_interrupt_ends_in_good_order(train: Runner, tmp_path: Path) -> None:
    """Ctrl-C: a checkpoint, the log's last record, exit code 130, and the same curve after."""
    command = [sys.executable, "-m", "train", "--model_size", "test", "--num_train_steps", "100000"]
    command += ["--text", *map(str, TEXT), "--checkpoint_dir", str(tmp_path / "made")]
    command += ["--log", str(tmp_path / "run.jsonl")]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'examples'}:{os.environ['PYTHONPATH']}"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step     4"):
                process.send_signal(signal.SIGINT)
                break
        rest = process.stdout.read()
    assert process.returncode == 130 and "checkpoint of step" in rest
    records = log.read(tmp_path / "run.jsonl")
    last = records[-1]
    assert (last["record"], last["status"]) == ("end", "interrupted")
    done = steps(tmp_path / "run.jsonl")[-1]["step"]
    assert last["step"] == done >= 4
    resumed = train(num_train_steps=done + 2, resume=tmp_path / "made").losses
    whole = train(num_train_steps=done + 2).losses
    assert resumed.keys() == {done + 1, done + 2}
    assert all(resumed[step] == whole[step] for step in resumed)


def test_failure_is_the_last_record(train: Runner, tmp_path: Path) -> None:
    def fail(line: str) -> None:
        if line.startswith("step"):
            raise OSError("the terminal is gone")

    with pytest.raises(OSError):
        train(log=tmp_path / "run.jsonl", say=fail)
    last = log.read(tmp_path / "run.jsonl")[-1]
    assert (last["status"], last["error"]) == ("failed", "the terminal is gone")


def test_memory_budget_names_the_kernel_that_fits(
    train: Runner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Logits of 1024 tokens x 16384 are most of the memory; the kernel without them has room."""
    of: dict[str, Any] = {"vocab_size": 16384, "context_length": 128, "num_train_steps": 1}
    dense = {**of, "ce_kernel_type": "baseline"}
    message = r"with baseline takes \S+ GiB and has no room of 0.100 GiB: .*fused_linear \(0.0"
    with pytest.raises(RunError, match=message):
        train(memory_budget=0.1, log=tmp_path / "run.jsonl", **dense)
    assert "fused_linear" in log.read(tmp_path / "run.jsonl")[-1]["error"]
    found = train(memory_budget=0.1, **of)
    assert found.status == "finished"
    with pytest.raises(RunError, match="no other kernel fits: lower --batch_size"):
        train(memory_budget=0.001, dtype="float32")


def test_running_out_of_memory_names_the_kernel_that_fits(
    train: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where the allocator refuses a step that was compiled; here a stand-in does."""

    class Refusing:
        def __init__(self, compiled: Any) -> None:
            self.memory_analysis = compiled.memory_analysis

        def __call__(self, *_: object) -> None:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating")

    compile_ = Program.compile
    monkeypatch.setattr(Program, "compile", lambda self: Refusing(compile_(self)))
    message = r"step with baseline takes 0.00\d GiB and has no room of 1.000 GiB: .*fused_linear \("
    with pytest.raises(RunError, match=message):
        train(memory_budget=1.0, **BASELINE)


@pytest.mark.few(1)
@pytest.mark.parametrize("kernel", ["all", "baseline"])
def test_profile_says_what_took_the_time(train: Runner, tmp_path: Path, kernel: str) -> None:
    lines: list[str] = []
    train(profile=tmp_path / "p", log=tmp_path / "run.jsonl", say=lines.append, **KERNELS[kernel])
    (record,) = (one for one in log.read(tmp_path / "run.jsonl") if one["record"] == "breakdown")
    shares = record["share"]
    assert set(shares) == {*breakdown.PARTS, breakdown.OTHER}
    assert abs(sum(shares.values()) - 1) < 1e-9
    for part in ("attention", "projections", "norms", "activation", "loss", "optimizer"):
        assert shares[part] > 0, part
    table = next(line for line in lines if line.startswith("| part"))
    rows = [f"| {part} | {share:.1%} |" for part, share in shares.items() if share]
    assert all(row in table for row in rows) and "delta_rule" not in table
    assert record["logits_bytes"] == 8 * 32 * 512 * 2
    assert "MiB beyond operands and results" in table


def test_parts_of_scopes() -> None:
    """The innermost scope counts, and a fusion without one is what it calls is."""
    assert breakdown.part_of("jit(step)/transpose(jvp(loss))/while/body/dot_general") == "loss"
    assert breakdown.part_of("jit(step)/jvp()/while/body/norms/attention/dot") == "attention"
    assert breakdown.part_of("jit(step)/jvp()/add") == ""
    text = """
%fused_computation (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %mul = f32[4]{0} multiply(%p, %p), metadata={op_name="jit(f)/norms/mul"}
  ROOT %add = f32[4]{0} add(%mul, %mul), metadata={op_name="jit(f)/norms/add"}
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %fusion = f32[4]{0} fusion(%x), kind=kLoop, calls=%fused_computation
  %while.2 = (s32[], f32[4]{0}) while(%x), condition=%c, body=%b
  ROOT %copy = f32[4]{0} copy(%fusion)
}
"""
    parts, containers = breakdown.parts_of_program(text)
    assert (parts["fusion"], parts["copy"], parts["mul"]) == ("norms", "other", "norms")
    assert containers == {"while.2"}


def documented() -> dict[str, set[str]]:
    """The keys of each record, as docs/reference/run-log.md has them."""
    page = (ROOT / "docs/reference/run-log.md").read_text(encoding="utf-8")
    found: dict[str, set[str]] = {}
    for section in page.split("\n## ")[1:]:
        heading = re.match(r"`(\w+)`", section)
        if heading:
            found[heading[1]] = set(re.findall(r"^\| `(\w+)`", section, re.MULTILINE))
    return found


def test_log_is_as_documented(train: Runner, tmp_path: Path) -> None:
    train(num_train_steps=4, log=tmp_path / "run.jsonl", profile=tmp_path / "p")
    records = log.read(tmp_path / "run.jsonl")
    kinds = [record["record"] for record in records]
    assert kinds == ["start", "compiled", *["step"] * 4, "breakdown", "end"]
    pages = documented()
    for record in records:
        assert set(record) - {"record"} == pages[record["record"]], record["record"]
    # What reports of the tools have, besides.
    assert {*pages} == {*kinds, "result"}
    begun = records[0]
    assert begun["schema"] == log.SCHEMA and begun["tool"] == "train"
    fields = {field.name for field in dataclasses.fields(Options)}
    assert set(begun["config"]) == fields | {"model", "batch_size", "context_length"}
    assert begun["versions"]["jax"] and begun["machine"]["cores"]
    assert records[-1]["status"] == "finished"


def wandb_records(file: Path) -> list[Any]:
    """Reads a run of Weights & Biases: protobufs in the format of LevelDB's logs.

    https://github.com/google/leveldb/blob/main/doc/log_format.md: blocks of 32 KiB, records of a
    checksum (4 bytes), a length (2) and a type (1: full, 2: first, 3: middle, 4: last).
    """
    from wandb.proto import wandb_internal_pb2

    data, at, found, part = file.read_bytes(), 7, [], b""
    while at < len(data):
        left = 2**15 - at % 2**15
        if left < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(part)
            found.append(record)
            part = b""
    return found


def test_wandb_has_what_the_log_has(
    train: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package itself, offline: what it wrote is read back."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    train(num_train_steps=4, wandb=True, log=tmp_path / "run.jsonl")
    # What a process does as it ends: its writer ends before the file is read.
    wandb.teardown()
    (file,) = tmp_path.rglob("*.wandb")
    history, configs, exits, summary = [], {}, [], {}
    for record in wandb_records(file):
        kind = record.WhichOneof("record_type")
        if kind == "history":
            items = {
                "/".join(item.nested_key) or item.key: json.loads(item.value_json)
                for item in record.history.item
            }
            history.append({key: value for key, value in items.items() if key[0] != "_"})
        elif kind == "run":
            for item in record.run.config.update:
                configs[item.key] = json.loads(item.value_json)
        elif kind == "exit":
            exits.append(record.exit.exit_code)
        elif kind == "summary":
            for item in record.summary.update:
                key = "/".join(item.nested_key) or item.key
                summary[key] = json.loads(item.value_json)
    expected = [
        {key: value for key, value in record.items() if key != "record"}
        for record in steps(tmp_path / "run.jsonl")
    ]
    assert history == expected
    begun = log.read(tmp_path / "run.jsonl")[0]
    assert configs["config"] == begun["config"] and configs["versions"] == begun["versions"]
    assert exits == [0]
    assert "finished" in json.dumps(summary)


def test_gpu_memory_is_limited_by_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what nvidia-smi says, here a script in its place; without it nothing is set."""
    for old in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(old, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    limit_gpu_memory(31.36)
    assert "XLA_CLIENT_MEM_FRACTION" not in os.environ
    assert validate.gpu_memory_gib() is None
    script = tmp_path / "nvidia-smi"
    script.write_text("#!/bin/sh\necho 81559\necho 81559\n")
    script.chmod(0o755)
    assert validate.gpu_memory_gib() == pytest.approx(79.65, abs=0.01)
    for gib, share in ((31.36, "0.3937"), (1000.0, "1.0000")):
        limit_gpu_memory(gib)
        assert os.environ["XLA_CLIENT_MEM_FRACTION"] == share


def curve(losses: list[float], speeds: list[float]) -> validate.Curve:
    return validate.Curve(losses, speeds, 100, "compiled", {"text_sha256": "ab"})


def test_validation_compares_curves() -> None:
    losses = [3.0 - 0.01 * step for step in range(20)]
    speeds = [10.0] * 9 + [100.0, 50.0] * 5 + [100.0]
    curves = {name: curve(losses, speeds) for name in validate.RUNS}
    curves["baseline, permuted"] = curve([loss + 0.003 for loss in losses], speeds)
    # A step that is unstable in every run decides nothing.
    once = [loss + (1.0 if step == 7 else 0.0) for step, loss in enumerate(losses)]
    curves["fused_linear"] = curve(once, speeds)
    found = validate.compare(curves)
    assert found["passed"] and found["runs"]["fused_linear"]["largest_difference"] == 1
    assert found["allowed"]["median_difference"] == pytest.approx(0.012)
    assert found["allowed"]["late_difference"] == pytest.approx(0.012)
    assert found["std_between_kernels"] == 0
    row = found["runs"]["fused"]
    # 11 steps of equally many tokens: six at 100 tokens a second, five at 50.
    assert row["tokens_per_second"] == pytest.approx(11 / (6 / 100 + 5 / 50))
    assert row["tokens_per_second_step_5"] == 10
    late = [loss + (0.02 if step > 11 else 0.0) for step, loss in enumerate(losses)]
    for worse in ([loss + 0.02 for loss in losses], late):
        found = validate.compare({**curves, "fused_linear": curve(worse, speeds)})
        assert not found["passed"] and not found["runs"]["fused_linear"]["is_same"]
    text = validate.markdown(found, {"machine": "one"})
    assert "NOT the same" in text
    assert "| fused_linear | 2.8300 | 0.00000 | 0.01600 | 0.02000 | 10 | 69 | 0.0 MiB |" in text
    validate.check_text(curves)
    other = dataclasses.replace(curves["fused"], start={"text_sha256": "cd"})
    with pytest.raises(validate.ValidationError, match="run fused read another text than base"):
        validate.check_text({**curves, "fused": other})
    nan = curve([float("nan")] * 20, speeds)
    assert not validate.compare({**curves, "fused": nan})["passed"]


def test_validation_on_a_gpu_holds_both_to_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is asked of each run, and which ends are refused; what a GPU says is made up here."""
    asked: list[list[str]] = []

    def answering(code: int, printed: str) -> Callable[[list[str]], Any]:
        def start(options: list[str]) -> Any:
            asked.append(options)
            if "fused_linear" in options:
                log_file = options[options.index("--log") + 1]
                record = {"record": "step", "loss": 1.0, "tokens_per_second": 5.0}
                record |= {"peak_bytes": 10, "peak_source": "device"}
                Path(log_file).write_text('{"record": "start"}\n' + json.dumps(record) + "\n")
                return subprocess.CompletedProcess(options, 0, "")
            return subprocess.CompletedProcess(options, code, printed)

        return start

    text = (
        "train: error: out of memory: --ce_kernel_type fused (30) or fused_linear (20) would fit\n"
    )
    monkeypatch.setattr(validate, "start", answering(1, text))
    found = validate.within_budget(tmp_path)
    assert found["baseline"] == text.strip() and found["fused_linear_peak_bytes"] == 10
    for options in asked:
        assert options[options.index("--memory_budget") + 1] == "31.36"
    for code, printed in ((0, "trained"), (1, "out of memory"), (2, text)):
        monkeypatch.setattr(validate, "start", answering(code, printed))
        with pytest.raises(validate.ValidationError, match="should run out of memory"):
            validate.within_budget(tmp_path)
