"""Bad input: a clear exception before the program runs, and never a wrong answer."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_bridge import cross_entropy, cross_entropy_per_token

LOGITS = jax.ShapeDtypeStruct((2, 3, 5), jnp.float32)
LABELS = jax.ShapeDtypeStruct((2, 3), jnp.int32)


def array(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("f", [cross_entropy, cross_entropy_per_token])
@pytest.mark.parametrize(
    ("logits", "labels", "keywords", "error", "message"),
    [
        (LOGITS, array("int32", 2, 4), {}, ValueError, r"labels have shape \(2, 4\).*\(2, 3\)"),
        (LOGITS, array("int32", 6), {}, ValueError, r"labels have shape \(6,\)"),
        (LOGITS, array("int32", 2, 3, 5), {}, ValueError, r"labels have shape \(2, 3, 5\)"),
        (LOGITS, array("float32", 2, 3), {}, TypeError, "labels have dtype float32"),
        (LOGITS, array("bool", 2, 3), {}, TypeError, "labels have dtype bool"),
        (array("int32", 2, 3, 5), LABELS, {}, TypeError, "logits have dtype int32"),
        (array("complex64", 2, 3, 5), LABELS, {}, TypeError, "logits have dtype complex64"),
        (array("float8_e4m3fn", 2, 3, 5), LABELS, {}, TypeError, "logits have dtype float8_e4m3fn"),
        (array("float32"), LABELS, {}, ValueError, r"logits have shape \(\)"),
        (array("float32", 2, 3, 0), LABELS, {}, ValueError, r"logits have shape \(2, 3, 0\)"),
        (LOGITS, LABELS, {"block_size": 0}, ValueError, "block_size is 0; it must be at least 1"),
        (LOGITS, LABELS, {"time_block": -4}, ValueError, "time_block is -4; it must be at least 1"),
        (
            LOGITS,
            LABELS,
            {"block_size": 2.5},
            TypeError,
            "block_size is 2.5; it must be an integer",
        ),
        (
            LOGITS,
            LABELS,
            {"softcap": 0},
            ValueError,
            "softcap is 0.0; it must be finite and above 0",
        ),
        (LOGITS, LABELS, {"softcap": float("inf")}, ValueError, "softcap is inf"),
        (LOGITS, LABELS, {"temperature": 0}, ValueError, "temperature is 0.0; it must be above 0"),
        (LOGITS, LABELS, {"temperature": -0.5}, ValueError, "temperature is -0.5; it must be"),
        (LOGITS, LABELS, {"temperature": float("nan")}, ValueError, "temperature is nan"),
        (
            LOGITS,
            LABELS,
            {"columns": np.zeros((2, 4), int)},
            ValueError,
            "columns have shape (2, 4); it must be (2, 3, 'K')",
        ),
        (
            LOGITS,
            LABELS,
            {"columns": np.zeros((2, 3, 129), int)},
            ValueError,
            "their last axis must be in [1, 128]",
        ),
        (LOGITS, LABELS, {"columns": np.zeros((2, 3, 1))}, TypeError, "columns have dtype float"),
        (LOGITS, LABELS, {"softcap": "30"}, TypeError, "softcap is '30'; it must be a number"),
        (
            LOGITS,
            LABELS,
            {"label_smoothing": 1.5},
            ValueError,
            "label_smoothing is 1.5; it must be",
        ),
        (LOGITS, LABELS, {"label_smoothing": float("nan")}, ValueError, "label_smoothing is nan"),
        (LOGITS, LABELS, {"z_loss": -1e-4}, ValueError, "z_loss is -0.0001; it must be"),
        (LOGITS, LABELS, {"z_loss": None}, TypeError, "z_loss is None; it must be a number"),
        (LOGITS, LABELS, {"ignore_index": 0.5}, TypeError, "ignore_index is 0.5"),
        (
            LOGITS,
            LABELS,
            {"ignore_index": 2**63},
            ValueError,
            "ignore_index is 9223372036854775808",
        ),
        (LOGITS, LABELS, {"implementation": "cuda"}, ValueError, "implementation is 'cuda'"),
        (LOGITS, LABELS, {"smoothing": 0.1}, TypeError, "smoothing"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_arguments(
    f: Any, logits: Any, labels: Any, keywords: Any, error: type[Exception], message: str
) -> None:
    # Through eval_shape, so nothing can have been compiled when it is raised.
    pattern = message if "\\" in message else re.escape(message)
    with pytest.raises(error, match=pattern):
        jax.eval_shape(lambda x, y: f(x, y, **keywords), logits, labels)


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        (
            {"reduction": "avg"},
            ValueError,
            "reduction is 'avg'; it must be one of 'none', 'mean', 'sum'",
        ),
        ({"weights": np.ones((2, 4), np.float32)}, ValueError, "weights have shape (2, 4)"),
        ({"weights": np.ones((2, 3), np.complex64)}, TypeError, "weights have dtype complex64"),
    ],
    ids=str,
)
def test_arguments_of_reductions(keywords: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        jax.eval_shape(lambda x, y: cross_entropy(x, y, **keywords), LOGITS, LABELS)


def test_f64_needs_the_reference() -> None:
    with jax.enable_x64(True), pytest.raises(TypeError, match=r"float64; .*reference"):
        jax.eval_shape(cross_entropy, array("float64", 2, 3, 5), LABELS)


def test_traced_options_are_named() -> None:
    answers = {
        "label_smoothing": ", of shape .* and dtype int32; it must be a scalar of a float dtype",
        "z_loss": ", of shape .* and dtype int32; it must be a scalar of a float dtype",
        "softcap": ", of shape .* and dtype int32; it must be a scalar of a float dtype",
        "temperature": ", of shape .* and dtype int32; it must be a scalar of a float dtype",
        "block_size": "; it must be known when the program is",
        "ignore_index": "; it must be known when the program is",
    }
    for name, answer in answers.items():
        with pytest.raises(TypeError, match=f"{name} is traced{answer}"):
            jax.eval_shape(lambda x, y, o: cross_entropy(x, y, **{name: o}), LOGITS, LABELS, 1)  # noqa: B023


@pytest.mark.parametrize(
    ("implementation", "platform"), [("pallas", "cpu"), ("custom_call", "tpu")]
)
def test_an_implementation_for_another_platform(implementation: Any, platform: str) -> None:
    f = jax.jit(lambda x, y: cross_entropy(x, y, implementation=implementation))
    message = f'"{implementation}" is for .*, and the program for {platform}: .*"reference"'
    with pytest.raises(NotImplementedError, match=message):
        f.trace(LOGITS, LABELS).lower(lowering_platforms=(platform,))


ATTRIBUTES = {
    "ignore_index": np.int64(-100),
    "label_smoothing": np.float64(0),
    "z_loss": np.float64(0),
    "every_token": np.bool_(False),
}
X, Y = array("float32", 4, 5), array("int32", 4)
PER_TOKEN = [array("float32", 4)] * 4


@pytest.mark.parametrize(
    ("arguments", "results", "attributes", "message"),
    [
        ([X], PER_TOKEN, {}, "labels"),
        ([X, array("int32", 3)], PER_TOKEN, {}, "labels.*3"),
        ([X, Y], PER_TOKEN[:3], {}, "lse_low"),
        ([X, Y], [*PER_TOKEN[:3], array("float32", 5)], {}, "lse_low.*5"),
        ([X, array("float32", 4)], PER_TOKEN, {}, "labels.*f32"),
        ([array("int32", 4, 5), Y], PER_TOKEN, {}, "logits.*s32"),
        ([array("float32", 4, 0), Y], PER_TOKEN, {}, "vocabulary"),
        ([X, Y], PER_TOKEN, {"softcap": np.float64(0)}, "softcap is 0"),
        ([X, Y], PER_TOKEN, {"softcap": np.float32(1)}, "softcap.*f32"),
        ([X, Y], PER_TOKEN, {"block_size": np.int64(0)}, "block_size.* is 0"),
        ([X, Y], PER_TOKEN, {"surplus": np.int64(0)}, "surplus"),
        ([X, Y], PER_TOKEN, {"z_loss": None}, "z_loss"),
    ],
)
def test_hand_written_calls_that_do_not_fit(
    arguments: list[Any], results: list[Any], attributes: dict[str, Any], message: str
) -> None:
    given = {k: v for k, v in {**ATTRIBUTES, **attributes}.items() if v is not None}
    call = jax.ffi.ffi_call("xentile_cross_entropy_forward", results)
    inputs = [jnp.zeros(a.shape, a.dtype) for a in arguments]
    with pytest.raises(Exception, match=f"(?s)INVALID_ARGUMENT.*({message})"):
        jax.block_until_ready(jax.jit(lambda *x: call(*x, **given))(*inputs))
