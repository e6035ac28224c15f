"""What targets take and give, as the package carries it."""

import ctypes
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pallas_bridge._src import library, operations, targets
from pallas_bridge._src.arrays import Result
from pallas_bridge._src.linear_cross_entropy import library_plan, schedule
from pallas_bridge._src.linear_cross_entropy.plan import Problem
from pallas_bridge._src.logits_gemms import Operands
from pallas_bridge._src.losses.options import Options
from pallas_bridge._src.targets import declared


def test_the_package_carries_what_the_library_declares() -> None:
    """`targets.json` is the text of `xentile_declarations`."""
    handle, _ = library.load(library.find())
    handle.xentile_declarations.restype = ctypes.c_char_p
    carried = Path(targets.__file__).with_name("targets.json").read_text(encoding="utf-8")
    assert handle.xentile_declarations().decode() == carried


def test_every_operation_and_handler_is_declared() -> None:
    """The library has handlers for no other targets, and on no other platforms."""
    _, loaded = library.load(library.find())
    for row in loaded.targets:
        assert row.stage in declared(row.target).declared["handlers"][row.platform]
    for operation in operations.OPERATIONS:
        if operation.target is not None:
            assert declared(operation.target).name == operation.target


def test_dims_follow_attributes() -> None:
    """Packed arrays, blocks, and arrays that are not in every call."""
    activation = declared("xentile_activation_backward")
    assert activation.operands({"layout": "halves"}) == ("*batch 2.F", "*batch F")
    assert activation.results({"layout": "halves"}, {}) == (Result("*batch 2.F", like=0),)
    attention = declared("xentile_flash_attention_backward")
    assert len(attention.operands({"segments": False, "sinks": False})) == 8
    assert attention.operands({"segments": False, "sinks": True})[4] == "*batch G"
    assert len(attention.results({"segments": True, "sinks": True}, {})) == 4
    fp8 = declared("xentile_fp8_quantize_transposed")
    of_rows = {"block_rows": 1, "block_columns": None, "power_of_two": False}
    of_blocks = {**of_rows, "block_rows": 128, "block_columns": 128}
    values = np.dtype(np.int8)
    assert [one.dims for one in fp8.results(of_rows, {"values": values})] == [
        "*batch M D",
        "*batch M",
        "*batch D M",
        "*batch D",
    ]
    found = fp8.results(of_blocks, {"values": values})
    assert [one.dims for one in found][1::2] == ["*batch M/128 D/128", "*batch D/128 M/128"]
    assert [one.dtype for one in found] == [values, np.float32] * 2


def test_attributes_are_typed_and_asked_for() -> None:
    """None is absent; what is unknown or missing is named."""
    rope = declared("xentile_rope")
    given = rope.attributes({"interleaved": True, "inverse": False})
    assert [(name, type(value)) for name, value in given] == [
        ("interleaved", np.bool_),
        ("inverse", np.bool_),
    ]
    with pytest.raises(KeyError, match="xentile_rope needs the attribute inverse"):
        rope.attributes({"interleaved": True, "inverse": None})
    with pytest.raises(KeyError, match="xentile_rope has no attribute eps"):
        rope.attributes({"eps": 1e-6})


def test_what_a_result_always_lies_over() -> None:
    """`xentile_scale` works in the memory of its operand; others where the caller says."""
    assert declared("xentile_scale").reuses == (0, 0)
    assert declared("xentile_linear_cross_entropy_add").reuses == (4, 4)
    assert declared("xentile_rope").reuses is None


def test_planned_calls_have_attributes_of_the_declared_types() -> None:
    """The library answers a plan in integers, and `wide` is a Boolean to the handler."""
    shapes = ((4096, 256), jnp.bfloat16), ((32000, 256), jnp.bfloat16), ((4096,), jnp.int32)
    hidden, weight, labels = (jax.ShapeDtypeStruct(*one) for one in shapes)
    options = Options(-100, 0.0, 0.0, None, None, None, False, False)

    def run(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> object:
        operands = Operands(hidden, weight, None, labels)
        problem = Problem.of(operands, 0, reduced=True)
        tiling = {"chunk": [2048, 32000], "fused": True, "f32_logits": True}
        plan = library_plan.plan_cuda(problem, 1 << 30, tiling)
        assert plan is not None
        return schedule.call_library("cuda", "fused", options, 0, plan, operands, jnp.float32(1))

    program = jax.jit(run).trace(hidden, weight, labels).lower(lowering_platforms=("cuda",))
    text = program.as_text()
    assert "chunk_tokens = 2048 : i64" in text and "wide = true" in text


@pytest.mark.parametrize(
    ("tokens", "reduced", "limit", "is_xla"),
    [
        (512, True, 1 << 28, True),
        (513, True, 1 << 28, False),
        (512, False, 1 << 28, False),
        # Their logits do not fit.
        (512, True, 1 << 20, False),
    ],
)
def test_few_tokens_run_by_xla(
    tokens: int, reduced: bool, limit: int, is_xla: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library_plan, "FEW_TOKENS", 512)
    shapes = ((tokens, 256), jnp.bfloat16), ((32000, 256), jnp.bfloat16), ((tokens,), jnp.int32)
    hidden, weight, labels = (jax.ShapeDtypeStruct(*one) for one in shapes)

    def plan(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> None:
        problem = Problem.of(Operands(hidden, weight, None, labels), 0, reduced=reduced)
        assert (library_plan.plan_cuda(problem, limit) is None) == is_xla

    jax.eval_shape(plan, hidden, weight, labels)
