"""Every function of the package, for tests that go over all of them.

An operation may have its cases in its own test file, as `CASES`.
"""

import importlib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from cases import EXTENTS, Case, Options, case

import pallas_bridge as pb

__all__ = [
    "CASES",
    "EXTENTS",
    "SHARED",
    "Case",
    "Options",
    "one_a_further_way",
    "one_an_implementation",
    "one_an_operation",
]


def _everything(z: Any, y: Any, c: Any, **options: Any) -> Any:
    asked = {"return_lse": True, "return_entropy": True, "return_correct": True}
    return pb.cross_entropy(z, y, columns=c, **asked, **options)


def _linear_everything(h: Any, w: Any, y: Any, c: Any, **options: Any) -> Any:
    asked = {"return_lse": True, "return_entropy": True, "return_correct": True}
    return pb.linear_cross_entropy(h, w, y, columns=c, vocab_axis=0, **asked, **options)


def _rope(q: Any, k: Any, positions: Any = None, **options: Any) -> Any:
    return pb.rope(q, k, positions=positions, **options)


def _rope_tables(q: Any, cos: Any, sin: Any, **options: Any) -> Any:
    return pb.rope(q, tables=(cos, sin), **options)


def _qk(q: Any, k: Any, q_weight: Any, k_weight: Any, positions: Any, **options: Any) -> Any:
    return pb.qk_norm_rope(q, k, q_weight, k_weight, positions=positions, **options)


def _attention(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return pb.flash_attention(q, k, v, **options)


def _attention_of_segments(q: Any, k: Any, v: Any, ids: Any, **options: Any) -> Any:
    return pb.flash_attention(q, k, v, segment_ids=ids, **options)


def _attention_with_sinks(q: Any, k: Any, v: Any, sinks: Any, **options: Any) -> Any:
    return pb.flash_attention(q, k, v, sinks=sinks, return_lse=True, **options)


def _attention_packed(q: Any, k: Any, v: Any, **options: Any) -> Any:
    ends = jnp.array([0, q.shape[0] // 2, q.shape[0]], jnp.int32)
    return pb.flash_attention(q, k, v, q_cumulative=ends, **options)


def _optax(z: Any, y: Any, **options: Any) -> Any:
    return pb.optax.softmax_cross_entropy_with_integer_labels(z, y, **options)


def _fp8(function: Callable[..., Any], *arrays: Any, **options: Any) -> Any:
    return jax.tree.map(_decode, jax.tree.leaves(function(*arrays, **options)))


def _decode(x: jax.Array) -> jax.Array:
    """Returns x in float32, from the bits of what is float8.

    XLA's programs for GPUs drop a conversion to float8 that one to float32 follows.
    """
    if x.dtype != jnp.float8_e4m3fn:
        return x.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint8).astype(jnp.int32)
    exponent, fraction = bits >> 3 & 15, bits & 7
    normal = jax.lax.bitcast_convert_type((exponent + 120) << 23 | fraction << 20, jnp.float32)
    magnitude = jnp.where(exponent == 0, fraction.astype(jnp.float32) / 512, normal)
    magnitude = jnp.where(bits & 127 == 127, jnp.nan, magnitude)
    return jnp.where(bits >= 128, -magnitude, magnitude)


LOSS: tuple[Options, ...] = (
    {},
    {"label_smoothing": 0.1},
    {"z_loss": 0.01},
    {"softcap": 3.0},
    {"temperature": 2.0},
    {"ignore_index": 3},
)
GATES: tuple[Options, ...] = ({}, {"alpha": 1.5}, {"limit": 0.5}, {"up_offset": 1.0})
TURNS: tuple[Options, ...] = ({}, {"interleaved": True}, {"base": 100.0}, {"rotary_dim": 8})
NORM: tuple[Options, ...] = ({}, {"eps": 0.1}, {"zero_centred": True})
HEADS = ("q: B S H D", "k: B S K D", "v: B S K E")
MASKS: tuple[Options, ...] = (
    {},
    {"causal": True},
    {"window": (2, 0)},
    {"softcap": 1.0},
    {"scale": 0.5},
)
QK = ("q: B S H D", "k: B S K D", "q_weight: D", "k_weight: D")
BLOCKS: dict[str, Any] = {"granularity": "block_1d", "block_size": 8}

OWN: tuple[Case, ...] = (
    case(
        "cross_entropy",
        pb.cross_entropy,
        "logits: B S V",
        "labels: B S < V",
        variants=(*LOSS, {"reduction": "sum"}),
    ),
    case(
        "cross_entropy_per_token",
        pb.cross_entropy_per_token,
        "logits: B S V",
        "labels: B S < V",
        variants=LOSS,
    ),
    case(
        "cross_entropy with auxiliary outputs",
        _everything,
        "logits: B S V",
        "labels: B S < V",
        "columns: B S C < V",
        variants=LOSS,
    ),
    case("optax", _optax, "logits: B S V", "labels: B S < V"),
    case(
        "linear_cross_entropy",
        partial(pb.linear_cross_entropy, vocab_axis=0),
        "hidden: B S D",
        "weight: V D",
        "labels: B S < V",
        variants=(*LOSS, {"reduction": "sum"}),
    ),
    case(
        "linear_cross_entropy_per_token",
        partial(pb.linear_cross_entropy_per_token, vocab_axis=0),
        "hidden: B S D",
        "weight: V D",
        "labels: B S < V",
        variants=LOSS,
    ),
    case(
        "linear_cross_entropy with auxiliary outputs",
        _linear_everything,
        "hidden: B S D",
        "weight: V D",
        "labels: B S < V",
        "columns: B S C < V",
        variants=LOSS,
    ),
    case("gelu", pb.gelu, "x: B S F", variants=({}, {"approximate": False})),
    case("squared_relu", pb.squared_relu, "x: B S F"),
    case("swiglu", pb.swiglu, "x: B S 2F", variants=GATES),
    case("swiglu interleaved", partial(pb.swiglu, interleaved=True), "x: B S 2F", variants=GATES),
    case("swiglu of two arrays", pb.swiglu, "x: B S F", "up: B S F", variants=GATES),
    case("geglu", pb.geglu, "x: B S 2F", variants=({}, {"approximate": False})),
    case("reglu", pb.reglu, "x: B S 2F", variants=({}, {"limit": 0.5})),
    case("rms_norm", pb.rms_norm, "x: B S D", "weight: D", variants=NORM),
    case(
        "rms_norm with a residual",
        lambda x, weight, residual, **options: pb.rms_norm(
            x, weight, residual=residual, return_rstd=True, **options
        ),
        "x: B S D",
        "weight: D",
        "residual: B S D",
        variants=NORM,
    ),
    case(
        "layer_norm",
        partial(pb.layer_norm, return_statistics=True),
        "x: B S D",
        "weight: D",
        "bias: D",
        variants=({}, {"eps": 0.1}),
    ),
    case("rope", _rope, "q: B S H D", "k: B S K D", variants=(*TURNS, {"offset": 7})),
    case(
        "rope by positions", _rope, "q: B S H D", "k: B S K D", "positions: S < V", variants=TURNS
    ),
    case(
        "rope by positions of a batch",
        _rope,
        "q: B S H D",
        "k: B S K D",
        "positions: B S < V",
        variants=TURNS,
    ),
    case(
        "rope by tables",
        _rope_tables,
        "q: B S H D",
        "cos: S R, fixed",
        "sin: S R, fixed",
        variants=({}, {"interleaved": True}),
    ),
    case(
        "rope by tables of a batch",
        _rope_tables,
        "q: B S H D",
        "cos: B S R, fixed",
        "sin: B S R, fixed",
        variants=({}, {"interleaved": True}),
    ),
    case("qk_norm_rope", _qk, *QK, "positions: S < V", variants=(*TURNS, *NORM[1:])),
    case(
        "qk_norm_rope by positions of a batch",
        _qk,
        *QK,
        "positions: B S < V",
        variants=(*TURNS, *NORM[1:]),
    ),
    case("flash_attention", _attention, *HEADS, variants=MASKS),
    case(
        "flash_attention of segments",
        _attention_of_segments,
        *HEADS,
        "ids: B S < C",
        variants=MASKS,
    ),
    case("flash_attention with sinks", _attention_with_sinks, *HEADS, "sinks: H", variants=MASKS),
    case(
        "flash_attention of packed texts",
        _attention_packed,
        "q: S H D",
        "k: S K D",
        "v: S K E",
        variants=MASKS,
    ),
    case(
        "paged_attention",
        pb.paged_attention,
        "q: B S H D",
        "k_pages: P T K D",
        "v_pages: P T K E",
        "block_tables: B N < P",
        "kv_lengths: B < L",
        has_gradient=False,
        variants=({"causal": False}, {"softcap": 0.5}, {"window": (2, 0)}),
        extents={"P": 8, "T": 4, "N": 4, "L": 17},
    ),
    case(
        "fp8_quantize",
        partial(_fp8, pb.fp8_quantize),
        "x: B M D",
        has_gradient=False,
        variants=({}, {"power_of_two": True}),
    ),
    case(
        "fp8_quantize by blocks",
        partial(_fp8, pb.fp8_quantize, transposed=True, **BLOCKS),
        "x: B M D",
        has_gradient=False,
        variants=({}, {"power_of_two": True}),
    ),
    case(
        "rms_norm_fp8",
        partial(_fp8, pb.rms_norm_fp8, **BLOCKS),
        "x: B S D",
        "weight: D",
        has_gradient=False,
        variants=NORM,
    ),
    case(
        "swiglu_fp8",
        partial(_fp8, pb.swiglu_fp8, **BLOCKS),
        "x: B S 2F",
        has_gradient=False,
        variants=GATES,
    ),
)


def _of_files() -> tuple[Case, ...]:
    """Returns the cases in test files."""
    found: list[Case] = []
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        if "\nCASES = (" in path.read_text(encoding="utf-8"):
            found += importlib.import_module(path.stem).CASES
    return tuple(found)


CASES = (*OWN, *_of_files())


# Operations by the implementation of another one in Python, whatever kernels they have.
SHARED = {
    *("cross_entropy_per_token", "optax", "linear_cross_entropy_per_token"),
    *("gelu", "squared_relu", "geglu", "reglu", "layer_norm", "gated_delta_rule"),
    *("rms_norm_linear", "rms_norm_fp8", "swiglu_fp8"),
}


def one_an_operation(parameters: Iterable[Any], but: Iterable[str] = ()) -> list[Any]:
    """Returns parameters, cases or their names; further ways to call an operation are nightly.

    So are all of operations in `but`.
    """
    found, seen = [], {*but}
    for one in parameters:
        name, values = (one, (one,)) if isinstance(one, str) else (one.id, one.values)
        operation = name.split(" ")[0]
        marks = (pytest.mark.nightly,) if operation in seen else ()
        seen.add(operation)
        found.append(pytest.param(*values, id=name, marks=marks))
    return found


def one_an_implementation(parameters: Iterable[Any]) -> list[Any]:
    """Returns parameters; all but one of an implementation are nightly."""
    return one_an_operation(parameters, SHARED)


def one_a_further_way(parameters: Iterable[Any]) -> list[Any]:
    """Returns parameters with a case; but the first of each further way to call are nightly."""
    found, usual, seen = [], dict[str, str](), set[str]()
    for one in parameters:
        (name,) = (value.name for value in one.values if isinstance(value, Case))
        is_usual = usual.setdefault(name.split(" ")[0], name) == name
        marks = () if is_usual or name not in seen else (pytest.mark.nightly,)
        seen.add(name)
        found.append(pytest.param(*one.values, id=one.id, marks=(*one.marks, *marks)))
    return found
