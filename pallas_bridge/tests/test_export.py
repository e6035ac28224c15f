"""`python -m pallas_bridge.export`: programs, manifests, and the errors of bad configs."""

import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

import jax
import pytest
from pallas_bridge._src import library

from pallas_bridge import export

CELL: dict[str, Any] = {
    "backend": "xla:tpu",
    "topology": "v6e:2x2",
    "time": 32,
    "vocab": 300,
    "dtype": "bf16",
}

# What the targets of custom calls begin with.
CALL = b"xentile_cross_entropy_"
# An attribute of the library's linear calls alone: kernels for TPUs are called as they are.
LINEAR_CALL = b"chunk_columns"
LINEAR: dict[str, Any] = {
    **CELL,
    "op": "linear_cross_entropy",
    "backend": "xla:cpu",
    "topology": None,
    "hidden": 24,
}


def run(folder: Path, config: Any) -> int:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return export.main(["--config", str(path), "--out", str(folder / "out")])


@pytest.mark.parametrize("factor", [0.5, "nan"])
@pytest.mark.parametrize("form", ["constant", "argument"])
def test_a_factor_is_in_the_program_or_its_argument(tmp_path: Path, form: str, factor: Any) -> None:
    cell = {"backend": "xla:cpu", "time": 8, "vocab": 30, "dtype": "f16"}
    options = {"factor": factor, "factor_form": form, "weights": "random"}
    assert run(tmp_path, {**cell, "options": options}) == 0
    manifest = json.loads((tmp_path / "out" / "cpu_default_default.json").read_text())
    given = manifest["arguments"][2:]
    scalar = {"dtype": "f32", "shape": []}
    assert given == [{"dtype": "f32", "shape": [8]}] + ([scalar] if form == "argument" else [])
    assert manifest["options"] == options
    program = (tmp_path / "out" / manifest["file"]).read_bytes()
    # The factor is found before the pass of the loss, which then makes the gradient too.
    assert CALL + b"fused" in program and b"xentile_scale" not in program


@pytest.mark.slow
def test_a_sweep_is_exported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid = {"time_blocks": [16, 32], "block_sizes": [128], "cell": CELL}
    for outcome in ("written", "there already"):
        assert run(tmp_path, grid) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 2 and all(line.endswith(f": {outcome}") for line in lines)
    for rows in (16, 32):
        manifest = json.loads((tmp_path / "out" / f"tpu_{rows}_128.json").read_text())
        program = (tmp_path / "out" / manifest["file"]).read_bytes()
        assert manifest["sha256"] == hashlib.sha256(program).hexdigest()
        assert manifest["tile"] == {"time_block": rows, "block_size": 128}
        assert manifest["jax_version"] == jax.__version__ and manifest["platforms"] == ["tpu"]
        assert manifest["arguments"] == [
            {"dtype": "bf16", "shape": [32, 300]},
            {"dtype": "i32", "shape": [32]},
        ]
        assert b"{1,0}" in program, "the layout that logits have in a program"
    # Another config, and a program that was lost, are made anew.
    (tmp_path / "out" / "tpu_16_128.mlirbc").unlink()
    assert run(tmp_path, {**grid, "cell": {**CELL, "options": {"z_loss": 0.1}}}) == 0
    assert capsys.readouterr().out.count("written") == 2


def test_a_sweep_of_budgets_is_the_sweeps_to_export(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, {"max_scratch_bytes": [None, 10**6], "cell": LINEAR}) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: max_scratch_bytes is [None, 1000000], a sweep of budgets"), (
        error
    )


def test_an_open_tile_is_the_kernels_own(tmp_path: Path) -> None:
    options = {"reduction": "none", "softcap": 30.0}
    assert run(tmp_path, {**CELL, "time": 100, "options": options}) == 0
    manifest = json.loads((tmp_path / "out" / "tpu_default_default.json").read_text())
    assert manifest["tile"] == {"time_block": 64, "block_size": 384}
    assert manifest["program"] == "forward_and_backward" and manifest["options"] == options


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_hidden_states_have_a_plan_and_a_program_a_platform(
    tmp_path: Path, platform: str, reduction: str
) -> None:
    kind = "v6e:2x2" if platform == "tpu" else None
    options = {"reduction": reduction}
    more = {"bias": True, "vocab_axis": 1, "options": options, "topology": kind}
    assert run(tmp_path, {**LINEAR, "backend": f"xla:{platform}", **more}) == 0
    manifest = json.loads((tmp_path / "out" / f"{platform}_default_default.json").read_text())
    arrays = [{"dtype": "bf16", "shape": shape} for shape in ([32, 24], [24, 300], [300])]
    labels, numbers = ({"dtype": dtype, "shape": [32]} for dtype in ("i32", "f32"))
    if reduction == "none":
        assert manifest["arguments"] == [*arrays, labels, *[numbers] * 3]
        assert manifest["results"] == [*[numbers] * 3, *arrays]
    else:
        assert manifest["arguments"] == [*arrays, labels]
        assert manifest["results"] == [{"dtype": "f32", "shape": []}, *arrays]
    # In the memory of dweight [D, V] no logits are kept, so that some are made again.
    how = "3.15 products, "
    if reduction == "none":
        saves_logits = jax.default_backend() == "cpu"
        how = f"logits saved for the backward pass, {how}" if saves_logits else "4 products, "
    expected = f"library: 32 tokens x 64 columns at a time, {how}"
    assert manifest["plan"].startswith(expected) == (platform == "cpu"), manifest["plan"]
    assert manifest["linear"] == {
        "hidden": 24,
        "bias": True,
        "vocab_axis": 1,
        "max_scratch_bytes": None,
    }
    assert manifest["platforms"] == [platform] and manifest["op"] == "linear_cross_entropy"
    program = (tmp_path / "out" / manifest["file"]).read_bytes()
    assert (LINEAR_CALL in program) == (platform == "cpu")
    assert (b"tpu_custom_call" in program) == (platform == "tpu")


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_a_sweep_of_tiles_of_hidden_states(tmp_path: Path, platform: str) -> None:
    cell = {**LINEAR, "backend": f"xla:{platform}", "max_scratch_bytes": 10**6}
    grid = {"time_blocks": [128, 4096], "block_sizes": [128, 256], "cell": cell}
    assert run(tmp_path, grid) == 0
    for rows, columns in itertools.product(grid["time_blocks"], grid["block_sizes"]):
        path = tmp_path / "out" / f"{platform}_{rows}_{columns}.json"
        manifest = json.loads(path.read_text())
        assert manifest["tile"] == {"time_block": rows, "block_size": columns}
        schedule = "library: 32 tokens" if platform == "cpu" else "kernels: 128 tokens"
        assert manifest["plan"].startswith(f"{schedule} x {columns} columns"), manifest["plan"]
        assert len(manifest.get("moved", ())) == (2 if platform == "tpu" else 0)


def test_the_dense_program_of_hidden_states(tmp_path: Path) -> None:
    tile = {"time_block": 8, "block_size": 64}
    assert run(tmp_path, {**LINEAR, "impl": "reference", "dtype": "f16", "tile": tile}) == 0
    manifest = json.loads((tmp_path / "out" / "cpu_8_64.json").read_text())
    assert "moved" not in manifest and manifest["plan"] is None
    assert manifest["arguments"][0]["dtype"] == "f16"
    program = (tmp_path / "out" / manifest["file"]).read_bytes()
    assert CALL not in program and LINEAR_CALL not in program


Types = list[dict[str, Any]]


def types(text: str) -> Types:
    """Returns dtypes and shapes of a text such as "bf16 8 24, f32"."""
    each = [one.split() for one in text.split(", ")]
    return [{"dtype": dtype, "shape": [*map(int, shape)]} for dtype, *shape in each]


ROWS, HEADS = "bf16 8 24", "bf16 8 3 24"
NORMS = {"hidden": 24, "weight_dtype": "f32"}
# Keys, arguments and results of operations; their own keys are settings of the manifest.
PROGRAMS: list[tuple[str, dict[str, Any], dict[str, Any], str, str]] = [
    (
        "rms_norm",
        {"zero_centred": True},
        NORMS | {"residual": False},
        f"{ROWS}, f32 24, {ROWS}",
        f"{ROWS}, f32 8, {ROWS}, f32 24",
    ),
    (
        "rms_norm",
        {},
        NORMS | {"residual": True},
        f"{ROWS}, f32 24, {ROWS}, {ROWS}, {ROWS}",
        f"{ROWS}, {ROWS}, f32 8, {ROWS}, f32 24",
    ),
    (
        "layer_norm",
        {"eps": 1e-6},
        NORMS | {"bias": False},
        f"{ROWS}, f32 24, {ROWS}",
        f"{ROWS}, f32 8, f32 8, {ROWS}, f32 24",
    ),
    (
        "layer_norm",
        {},
        NORMS | {"bias": True},
        f"{ROWS}, f32 24, f32 24, {ROWS}",
        f"{ROWS}, f32 8, f32 8, {ROWS}, f32 24, f32 24",
    ),
    (
        "rope",
        {"rotary_dim": 8},
        {"heads": 3, "head_dim": 24},
        f"{HEADS}, i32 8, {HEADS}",
        f"{HEADS}, {HEADS}",
    ),
    (
        "gated_delta_rule",
        {"scale": 0.5},
        {"heads": 3, "value_heads": 6, "head_dim": 64, "value_dim": 128},
        "bf16 8 3 64, bf16 8 3 64, bf16 8 6 128, f32 8 6, f32 8 6, bf16 8 6 128",
        "bf16 8 6 128, bf16 8 3 64, bf16 8 3 64, bf16 8 6 128, f32 8 6, f32 8 6",
    ),
    ("activation", {}, {"mlp": 24, "layout": "single"}, f"{ROWS}, {ROWS}", f"{ROWS}, {ROWS}"),
    ("activation", {}, {"mlp": 12, "layout": "halves"}, f"{ROWS}, bf16 8 12", f"bf16 8 12, {ROWS}"),
    (
        "activation",
        {},
        {"mlp": 12, "layout": "interleaved"},
        f"{ROWS}, bf16 8 12",
        f"bf16 8 12, {ROWS}",
    ),
]


# config.json of a decoder that a kernel is for.
DECODER = {
    "model_type": "qwen3",
    "num_hidden_layers": 1,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 999,
    "tie_word_embeddings": False,
}
DECODE: dict[str, Any] = {"op": "decode", "model": DECODER, "batch": 2, "position": 10}


def test_steps_of_a_decoder(tmp_path: Path) -> None:
    options = {"temperature": 0.8, "top_p": 0.9}
    assert run(tmp_path, {**DECODE, "backend": "xla:cuda", "options": options}) == 0
    manifest = json.loads((tmp_path / "out" / "cuda_default_default.json").read_text())
    assert manifest["arguments"] == types("i32, i32")
    assert manifest["results"] == types("i32 2, f32 2, i32")
    heads, mlp = (2 * 2048 + 2 * 1024) * 1024, 3 * 3072 * 1024
    weights = heads + mlp + 2 * 1024 + 2 * 128 + 999 * 1024 + 1024
    settings = {"bytes": 2 * (weights + 2 * 2 * 10 * 1024), "is_one_kernel": True}
    assert manifest["settings"] == settings
    program = (tmp_path / "out" / manifest["file"]).read_bytes()
    for target in (b"xentile_decode_step", b"xentile_sample"):
        assert target in program
    assert run(tmp_path, {**DECODE, "backend": "xla:cuda", "impl": "reference"}) == 0
    assert b"xentile_" not in (tmp_path / "out" / manifest["file"]).read_bytes()


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
@pytest.mark.parametrize(("op", "options", "settings", "arguments", "results"), PROGRAMS, ids=str)
def test_arguments_and_results(
    tmp_path: Path,
    op: str,
    options: Any,
    settings: Any,
    arguments: str,
    results: str,
    platform: str,
) -> None:
    config = {"op": op, "backend": f"xla:{platform}", "dtype": "bf16", "time": 8}
    assert run(tmp_path, {**config, **settings, "options": options}) == 0
    manifest = json.loads((tmp_path / "out" / f"{platform}_default_default.json").read_text())
    assert manifest["arguments"] == types(arguments) and manifest["results"] == types(results)
    assert manifest["settings"] == settings
    calls = f"xentile_{op}".encode() in (tmp_path / "out" / manifest["file"]).read_bytes()
    # Activations and rotations on GPUs are what was measured to be faster.
    target = f"xentile_{op}" if op == "rope" else f"xentile_{op}_forward"
    if platform != "cuda" or "norm" in op:
        assert calls == (platform in library.require().platforms_of(target))


NORM, ROPE = {"hidden": 4, "time": 8}, {"op": "rope", "time": 8, "heads": 2, "head_dim": 4}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(
            ({**NORM, "op": op, "backend": "xla:cpu", "topology": None, **change}, message)
            for op in ("rms_norm", "layer_norm")
            for change, message in (
                ({"hidden": None}, "hidden is None; it must be an integer of at least 1"),
                ({"weight_dtype": "f64"}, "weight_dtype is 'f64'; it must be one of f32, bf16, f1"),
                (
                    {"options": {"epsilon": 1}},
                    "unknown key options.epsilon; the options are eps"
                    + ", zero_c" * (op == "rms_norm"),
                ),
                ({"options": {"eps": -1}}, "eps is -1.0; it must be finite and at least 0"),
            )
        ),
        ({**ROPE, "heads": None}, "heads is None; it must be an integer of at least 1"),
        (
            {**ROPE, "options": {"theta": 1}},
            "unknown key options.theta; the options are base, inter",
        ),
        ({**ROPE, "options": {"rotary_dim": 3}}, "rotary_dim is 3; it must be even and at most"),
        (
            {"topology": "v99:2x2"},
            "topology is v99:2x2; there are kernels for v5e, v5p, v6e, tpu7x",
        ),
        ({"dtype": "f16"}, "dtype is 'f16'; on TPU it must be one of f32, bf16"),
        ({"tile": {"time_block": 0}}, "time_block is 0; it must be an integer of at least 1"),
        ({"tile": {"time_block": 12}}, "must be a multiple of 16, such as 16"),
        (
            {"time": 2048, "vocab": 151643, "tile": {"time_block": 512, "block_size": 65536}},
            "128 MiB of VMEM of TPU v6 lite; with that time_block the largest block_size is",
        ),
        ({"options": {"zloss": 1}}, "unknown key options.zloss; the options are reduction"),
        (
            {"op": "swiglu"},
            "op is 'swiglu'; it must be one of cross_entropy, linear_cross_entropy",
        ),
        (
            {"backend": "xla:rocm"},
            "backend is 'xla:rocm'; cross_entropy is exported for xla:tpu, xla:cpu, xla:cuda",
        ),
        (
            {"options": {"factor": 2, "reduction": "none"}},
            "options.factor is 2.0, constant; reduction none has no part for it",
        ),
        (
            {"options": {"factor_form": "traced"}},
            "options.factor_form is 'traced'; it must be constant or argument",
        ),
        (
            {"options": {"columns": 4}},
            "options.columns is 4; options.reduction must be none then",
        ),
        (
            {**LINEAR, "options": {"columns": 129, "reduction": "none"}},
            "options.columns is 129; it must be in [1, 128]",
        ),
        (
            {"op": "linear_cross_entropy"},
            "hidden is None; it must be an integer of at least 1",
        ),
        (
            {**LINEAR, "max_scratch_bytes": 10},
            "max_scratch_bytes is 10; the least for 32 tokens, 24 hidden columns and a vocabulary "
            "of 300 is ",
        ),
        ({**LINEAR, "vocab_axis": 2}, "vocab_axis is 2; it must be 0 for a weight [V, D]"),
        (
            {**LINEAR, "time": 4096, "max_scratch_bytes": 2**22, "tile": {"block_size": 256}},
            "tile.block_size is 256, for which there is no room; the plan is library: 4096 tokens",
        ),
        (
            {**LINEAR, "backend": "xla:tpu", "tile": {"time_block": 100}},
            "time_block is 100; on TPU it must be a multiple of 128, such as 128",
        ),
        (
            {**DECODE, "backend": "xla:cpu", "model": {"model_type": "gpt2"}},
            "model: model_type is 'gpt2'; it must be one of llama, mistral, qwen2, qwen3",
        ),
        (
            {**DECODE, "backend": "xla:cpu", "options": {"temperature": 1.0, "top_p": 2.0}},
            "options: top_p is 2.0; it must be above 0 and at most 1",
        ),
        (
            {**DECODE, "backend": "xla:cpu", "options": {"top_p": 0.9}},
            "options: top_p needs a temperature; add one, such as 1.0",
        ),
        (
            {**LINEAR, "backend": "cpu:0"},
            "backend is 'cpu:0'; linear_cross_entropy is exported for xla:tpu, xla:cpu, xla:cuda",
        ),
    ],
    ids=str,
)
def test_configs_that_are_no_good(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any, message: str
) -> None:
    assert run(tmp_path, {**CELL, **change}) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error, error


def test_a_config_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert export.main(["--config", "/nowhere/config.json"]) == 2
    assert "cannot read config /nowhere/config.json: No such file" in capsys.readouterr().err
