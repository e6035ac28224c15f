"""Runs every CUDA kernel once or more on small shapes, for compute-sanitizer to look at.

    compute-sanitizer --tool memcheck --kernel-name kns=cross_entropy --kernel-name kns=scale \
        python scripts/gpu/sanitize.py

Each custom call is a program of its own, and everything it reads was copied from the host: with a
filter on kernels, initcheck takes what other kernels wrote for memory that nobody wrote. Values are
looked at too: finite where they should be and NaN where a label is out of range.

Most calls of linear cross-entropy read what cuBLASLt has written, which initcheck would not know
of; under racecheck its products fail (--no-products leaves out calls that have one).
"""

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

# An allocation of the driver's for every array, so that its ends are known.
os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax
import ml_dtypes
import numpy as np

import pallas_bridge

DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}
# The kernels' variants, by the options that choose them.
VARIANTS: dict[str, dict[str, Any]] = {
    "basic": {},
    "smooth": {"label_smoothing": np.float64(0.1), "z_loss": np.float64(1e-3)},
    "capped": {"softcap": np.float64(30)},
}
# Rows: several of them off 16 bytes, one shorter than any vector, one longer than a tile; whole
# vectors of a small vocabulary, and its last tile not full; few rows in wide clusters.
SHAPES = [(3, 5), (7, 1031), (2, 50257), (67, 48), (3, 151936)]
SMALL = 4096


@dataclass(frozen=True)
class Case:
    """A custom call on one problem."""

    target: str
    dtype: str
    variant: str
    shape: tuple[int, int]
    in_place: bool
    wide_labels: bool
    tile: dict[str, Any]

    @property
    def is_in_bulk(self) -> bool:
        """Whether its gradient is stored by bulk copies, as that of a small vocabulary is."""
        return self.target.endswith(("backward", "fused")) and self.shape[1] <= SMALL

    def __str__(self) -> str:
        """What a failure is found again by."""
        place = "in place" if self.in_place else "apart"
        labels = "s64" if self.wide_labels else "s32"
        tile = "".join(f" {name}={value}" for name, value in self.tile.items())
        return f"{self.target} {self.dtype} {self.variant} {self.shape} {place} {labels}{tile}"


def cases(quick: bool) -> Iterator[Case]:
    """Every pass, dtype, variant and shape; places, labels and tiles take turns."""
    turn = 0
    for target in ("forward", "backward", "fused"):
        for dtype in DTYPES:
            for variant in VARIANTS:
                for shape in SHAPES[1:2] if quick else SHAPES:
                    turn += 1
                    in_place = target != "forward" and turn % 2 == 0
                    tile = (
                        {} if turn % 4 else {"block_size": np.int64(513), "time_block": np.int64(3)}
                    )
                    wide, name = turn % 3 == 0, f"cross_entropy_{target}"
                    yield Case(name, dtype, variant, shape, in_place, wide, tile)
    for target in ("distribution", "distribution_backward"):
        for dtype in DTYPES:
            for variant in VARIANTS:
                for shape in SHAPES[1:2] if quick else SHAPES:
                    in_place = target.endswith("backward") and dtype != "f32"
                    name = f"cross_entropy_{target}"
                    yield Case(name, dtype, variant, shape, in_place, False, {})
    for dtype in DTYPES:
        for in_place in (False, True):
            yield Case("scale", dtype, "basic", SHAPES[1], in_place, False, {})


def run(case: Case, rng: np.random.Generator) -> None:
    """Runs one case and looks at what it gave.

    Raises:
        AssertionError: values that cannot be right.
    """
    tokens, vocab = case.shape
    x = rng.normal(0, 3, case.shape).astype(DTYPES[case.dtype])
    width = np.int64 if case.wide_labels else np.int32
    y = rng.integers(0, vocab, tokens).astype(width)
    highest = 2**63 - 1 if case.wide_labels else 2**31 - 1
    # The last two: out of range, far enough to be another allocation's, and ignored.
    y[-1], y[-2] = highest if tokens % 2 else -1, -100
    per_token = [jax.ShapeDtypeStruct((tokens,), np.float32)]
    like = jax.ShapeDtypeStruct(case.shape, x.dtype)
    given = [rng.uniform(0.5, 1, tokens).astype(np.float32) for _ in range(3)]
    operands: list[Any]
    if case.target == "scale":
        operands, results, attributes = [x, given[0]], [like], {}
    else:
        attributes = {
            "ignore_index": np.int64(-100),
            "label_smoothing": np.float64(0),
            "z_loss": np.float64(0),
            **VARIANTS[case.variant],
            "temperature": np.float64(1 if case.variant == "basic" else 0.7),
            **case.tile,
        }
        if not case.target.endswith("backward"):
            attributes["every_token"] = np.bool_(True)
        if case.target.endswith("forward"):
            operands, results = [x, y], per_token * 4
        elif case.target.endswith("distribution"):
            argmax = jax.ShapeDtypeStruct((tokens,), np.int32)
            operands, results = [x, y], [*per_token * 6, argmax]
        elif case.target.endswith("fused"):
            operands, results = [x, y, given[0]], [*per_token * 3, like]
        else:
            z = x.astype(np.float64)
            lse = np.log(np.exp(z).sum(-1)).astype(np.float32)
            saved = [lse, np.zeros_like(lse)]
            if "distribution" in case.target:
                saved.append(lse / 2)
                given.append(given[0])
            operands, results = [x, y, *saved, *given], [like]
    aliases = {0: len(results) - 1} if case.in_place else {}
    call = jax.ffi.ffi_call(
        f"xentile_{case.target}", results, input_output_aliases=aliases, vmap_method=None
    )
    program = jax.jit(
        lambda *arrays: call(*arrays, **attributes), donate_argnums=0 if case.in_place else ()
    )
    arrays = [jax.device_put(array) for array in operands]
    outputs = [
        np.asarray(out).astype(np.float64) for out in jax.block_until_ready(program(*arrays))
    ]
    if case.target == "scale":
        wanted = x.astype(np.float64) * given[0][:, None].astype(np.float64)
        np.testing.assert_allclose(outputs[0], wanted, rtol=2**-7, atol=1e-6)
        return
    if not case.target.endswith("backward"):
        loss = outputs[0]
        assert np.isnan(loss[-1]) and loss[-2] == 0 and np.isfinite(loss[:-1]).all(), loss
    if not case.target.endswith(("forward", "distribution")):
        gradient = outputs[-1]
        assert np.isnan(gradient[-1]).all() and not gradient[-2].any()
        assert np.isfinite(gradient[:-1]).all()


@dataclass(frozen=True)
class Linear:
    """A call of linear cross-entropy, cut along both axes where it can be."""

    target: str
    dtype: str
    vocab_axis: int
    # "apart": dhidden and dweight come from a sweep each; "columns": the fused pass goes over
    # columns twice; "kept": it has logits of some of them still; "once": it makes those of some
    # once, by chunks of tokens; "whole": there is one chunk.
    way: Literal["chunks", "apart", "columns", "kept", "once", "whole"] = "chunks"
    has_bias: bool = False
    # N, D and V: more than one block of each in products of their own, and no whole number of any.
    shape: tuple[int, int, int] = (300, 200, 1031)

    def __str__(self) -> str:
        """What a failure is found again by."""
        bias = " bias" if self.has_bias else ""
        shape = "x".join(map(str, self.shape))
        return f"{self.target} {self.dtype} vocab_axis={self.vocab_axis} {self.way}{bias} {shape}"

    @property
    def has_products(self) -> bool:
        """Whether it calls cuBLASLt: all do but forward passes that have a kernel of their own."""
        own = self.target.endswith("forward") and self.dtype != "f32" and self.vocab_axis == 0
        return not own or jax.devices()[0].compute_capability != "9.0"


DISTRIBUTION = "linear_cross_entropy_distribution_fused"
# Tiles enough for sums and scaled products of the library's own.
MANY_COLUMNS, MANY_TOKENS = (300, 72, 15872), (15872, 72, 1032)


def linear_cases() -> Iterator[Linear]:
    """Every pass and dtype, with the weight either way."""
    for axis in (0, 1):
        yield Linear("linear_cross_entropy_fused", "bf16", axis, "chunks", shape=MANY_COLUMNS)
        yield Linear("linear_cross_entropy_backward", "f16", axis, "chunks", shape=MANY_COLUMNS)
        yield Linear("linear_cross_entropy_fused", "bf16", axis, "whole", shape=MANY_TOKENS)
    yield Linear("linear_cross_entropy_fused", "bf16", 0, "once", shape=MANY_COLUMNS)
    # Of GPUs alone; logits in f32 say it of other dtypes.
    if jax.default_backend() == "gpu":
        for axis in (0, 1):
            yield Linear(DISTRIBUTION, "bf16", axis, "chunks", shape=MANY_COLUMNS)
            yield Linear(DISTRIBUTION, "bf16", axis, "whole", shape=MANY_TOKENS)
        yield Linear(DISTRIBUTION, "bf16", 0, "once", shape=MANY_COLUMNS)
        yield Linear(DISTRIBUTION, "bf16", 0, "whole", has_bias=True)
        yield Linear(DISTRIBUTION, "f32", 0, "whole")
    for dtype in DTYPES:
        for axis in (0, 1):
            for target in ("forward", "backward", "fused"):
                yield Linear(f"linear_cross_entropy_{target}", dtype, axis)
            yield Linear("linear_cross_entropy_backward", dtype, axis, "apart")
            yield Linear("linear_cross_entropy_fused", dtype, axis, "columns")
        yield Linear("linear_cross_entropy_fused", dtype, 0, "kept")
        yield Linear("linear_cross_entropy_fused", dtype, 0, "once")
        # Logits get a bias in products of their own or, with V last, which is odd, by way of f32.
        for axis in (0, 1):
            yield Linear("linear_cross_entropy_forward", dtype, axis, has_bias=True)
            yield Linear("linear_cross_entropy_backward", dtype, axis, "apart", has_bias=True)
            yield Linear("linear_cross_entropy_fused", dtype, axis, has_bias=True)
            yield Linear("linear_cross_entropy_fused", dtype, axis, "columns", has_bias=True)
        yield Linear("linear_cross_entropy_fused", dtype, 0, "kept", has_bias=True)


def run_linear(case: Linear, rng: np.random.Generator) -> None:
    """Runs one case and holds it against float64.

    Raises:
        AssertionError: values that are further off than rounding explains.
    """
    tokens, width, vocab = case.shape
    dtype = DTYPES[case.dtype]
    hidden = rng.normal(size=(tokens, width)).astype(dtype)
    weight = rng.normal(0, 0.1, (vocab, width)).astype(dtype)
    y = rng.integers(0, vocab, tokens).astype(np.int32)
    y[3] = -100
    x, w = hidden.astype(np.float64), weight.astype(np.float64)
    bias = rng.normal(size=vocab).astype(np.float32)
    z = x @ w.T + case.has_bias * bias.astype(np.float64)
    lse = np.log(np.exp(z).sum(-1))
    g = rng.uniform(0.5, 1, tokens).astype(np.float32)
    p = np.exp(z - lse[:, None])
    dz = p.copy()
    dz[np.arange(tokens), np.maximum(y, 0)] -= 1
    dz *= np.where(y < 0, 0, g)[:, None]
    loss = np.where(y < 0, 0, lse - z[np.arange(tokens), np.maximum(y, 0)])
    gradients = [dz @ w, (dz.T @ x).T if case.vocab_axis else dz.T @ x]
    laid = np.ascontiguousarray(weight.T) if case.vocab_axis else weight
    operands: list[Any] = [hidden, laid, y]
    wanted: list[Any]
    per_token = jax.ShapeDtypeStruct((tokens,), np.float32)
    like = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in (hidden, laid)]
    name = case.target.rpartition("_")[2]
    attributes: dict[str, Any] = {
        "ignore_index": np.int64(-100),
        "label_smoothing": np.float64(0),
        "z_loss": np.float64(0),
        "vocab_axis": np.int64(case.vocab_axis),
        "workspace_bytes": np.int64(2**20),
    }
    cut = {"chunk_tokens": 128, "chunk_columns": vocab if name == "fused" else 384}
    if case.way == "apart":
        cut |= {"apart_tokens": 200, "apart_columns": 256}
    elif case.way != "chunks":
        columns = vocab if case.way == "whole" else 256
        cut = {"chunk_tokens": tokens, "chunk_columns": columns}
    if case.way == "kept":
        cut |= {"kept_columns": 500, "kept_slot": 128}
    if case.way == "once":
        cut |= {"once_tokens": 128, "once_columns": vocab * 3 // 5}
    attributes |= {key: np.int64(value) for key, value in cut.items()}
    if name != "backward":
        attributes["every_token"] = np.bool_(True)
    if name == "forward":
        results, wanted = [per_token] * 4, [loss]
    elif name == "fused":
        operands.append(g)
        results, wanted = [*[per_token] * 3, *like], [loss, None, None, *gradients]
        if case.target == DISTRIBUTION:
            attributes["correct"] = np.bool_(True)
            entropy = np.where(y < 0, 0, lse - (p * z).sum(-1))
            results[3:3] = [per_token, jax.ShapeDtypeStruct((tokens,), np.int32)]
            wanted[3:3] = [entropy, None]
    else:
        zeros = np.zeros(tokens, np.float32)
        operands += [lse.astype(np.float32), zeros, g, zeros, zeros]
        results, wanted = like, gradients
    results, wanted = [*results, jax.ShapeDtypeStruct((2**26,), np.uint8)], [*wanted, None]
    if case.has_bias:
        operands.append(bias)
        if name != "forward":
            results.append(jax.ShapeDtypeStruct((vocab,), np.float32))
            wanted.append(dz.sum(0))
    call = jax.ffi.ffi_call(f"xentile_{case.target}", results, vmap_method=None)
    outputs = jax.jit(lambda *arrays: call(*arrays, **attributes))(*operands)
    for output, expected in zip(jax.block_until_ready(outputs), wanted, strict=False):
        if expected is not None:
            found = np.asarray(output).astype(np.float64)
            error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
            assert error < {"f32": 1e-5, "f16": 2e-3, "bf16": 1e-2}[case.dtype], error


Numbers = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Norm:
    """A call of RMSNorm or LayerNorm."""

    target: str
    dtype: str
    of_weight: str
    shape: tuple[int, int]
    in_place: bool

    def __str__(self) -> str:
        """What a failure is found again by."""
        place = "in place" if self.in_place else "apart"
        return f"{self.target} {self.dtype} weight {self.of_weight} {self.shape} {place}"


# Rows for a part of a warp, two vectors a thread, for a warp, for several, longer than registers
# hold in either pass, and off 16 bytes, longer and shorter than a vector.
NORM_SHAPES = [(37, 40), (9, 512), (37, 896), (9, 2056), (3, 20480), (2, 65536), (5, 3), (7, 1031)]


def norm_cases(quick: bool) -> Iterator[Norm]:
    """Every pass, dtype and way of taking rows; weights' dtypes and places take turns."""
    turn = 0
    for name in ("forward", "add_forward", "backward", "add_backward"):
        for dtype in DTYPES:
            for shape in NORM_SHAPES[2:3] if quick else NORM_SHAPES:
                turn += 1
                yield Norm(f"rms_norm_{name}", dtype, [*DTYPES][turn % 3], shape, turn % 2 == 0)
                if "add" not in name:
                    of_weight = [*DTYPES][turn % 3]
                    yield Norm(f"layer_norm_{name}", dtype, of_weight, shape, turn % 2 == 0)


def run_norm(case: Norm, rng: np.random.Generator) -> None:
    """Runs one case and holds it against float64.

    Raises:
        AssertionError: values that are further off than rounding explains.
    """
    dtype, (rows, columns) = DTYPES[case.dtype], case.shape
    x, dy, more = (rng.normal(size=case.shape).astype(dtype) for _ in range(3))
    weight = rng.normal(size=columns).astype(DTYPES[case.of_weight])
    backward, adds = case.target.endswith("backward"), "add" in case.target
    row, number = jax.ShapeDtypeStruct(case.shape, dtype), jax.ShapeDtypeStruct((rows,), np.float32)
    if case.target.startswith("layer"):
        layer_norm(case, x, dy, weight, rng.normal(size=columns).astype(weight.dtype))
        return
    h = (x + more).astype(dtype) if adds and not backward else x
    z, w = h.astype(np.float64), 1 + weight.astype(np.float64)
    rstd = 1 / np.sqrt((z**2).mean(-1, keepdims=True) + 1e-6)
    operands: list[Any]
    wanted: list[Any]
    if backward:
        # Two blocks, or one more than there are rows.
        blocks = 2 if rows > 2 else 3
        operands = [x, weight, rstd[:, 0].astype(np.float32), dy, *([more] if adds else [])]
        g, normalised = dy.astype(np.float64) * w, z * rstd
        dx = rstd * (g - normalised * (g * normalised).mean(-1, keepdims=True))
        dx = dx + more.astype(np.float64) if adds else dx
        sums = (dy.astype(np.float64) * normalised).sum(0)
        results, wanted = [row, jax.ShapeDtypeStruct((blocks, columns), np.float32)], [dx, sums]
    elif adds:
        operands, results = [x, more, weight], [row, row, number]
        wanted = [z * rstd * w, z, rstd[:, 0]]
    else:
        operands, results, wanted = [x, weight], [row, number], [z * rstd * w, rstd[:, 0]]
    attributes = {"eps": np.float64(1e-6), "zero_centred": np.bool_(True)}
    hold_norm(case, operands, attributes, results, wanted)


def layer_norm(case: Norm, x: Numbers, dy: Numbers, weight: Numbers, bias: Numbers) -> None:
    """Runs one case of LayerNorm and holds it against float64.

    Raises:
        AssertionError: values that are further off than rounding explains.
    """
    rows, columns = case.shape
    row, number = jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((rows,), np.float32)
    z, w, d = (array.astype(np.float64) for array in (x, weight, dy))
    mean = z.mean(-1, keepdims=True)
    rstd = 1 / np.sqrt(((z - mean) ** 2).mean(-1, keepdims=True) + 1e-6)
    xhat, g = (z - mean) * rstd, d * w
    statistics = [one[:, 0].astype(np.float32) for one in (mean, rstd)]
    results: list[Any] = [row, number, number]
    wanted: list[Any] = [xhat * w + bias.astype(np.float64), *statistics]
    operands = [x, weight, bias]
    if case.target.endswith("backward"):
        # Two blocks, or one more than there are rows.
        sums = jax.ShapeDtypeStruct((2 if rows > 2 else 3, columns), np.float32)
        along = (g * xhat).mean(-1, keepdims=True)
        dx = rstd * (g - g.mean(-1, keepdims=True) - xhat * along)
        operands, results = [x, weight, *statistics, dy], [row, sums, sums]
        wanted = [dx, (d * xhat).sum(0), d.sum(0)]
    hold_norm(case, operands, {"eps": np.float64(1e-6)}, results, wanted, mean_of=np.abs(z).mean())


def hold_norm(
    case: Norm,
    operands: list[Numbers],
    attributes: dict[str, Any],
    results: list[Any],
    wanted: list[Numbers],
    mean_of: float = 0.0,
) -> None:
    """Runs one call of a norm and holds what it gives, relative to the largest number of a result.

    Results may be means of numbers of the size `mean_of`, which cancel: they are held relative to
    that.

    Raises:
        AssertionError: values that are further off than rounding explains.
    """
    call = jax.ffi.ffi_call(
        f"xentile_{case.target}",
        results,
        input_output_aliases={0: 0} if case.in_place else {},
        vmap_method=None,
    )
    program = jax.jit(
        lambda *arrays: call(*arrays, **attributes), donate_argnums=0 if case.in_place else ()
    )
    outputs = jax.block_until_ready(program(*[jax.device_put(array) for array in operands]))
    for output, expected in zip(outputs, wanted, strict=True):
        found, right = np.asarray(output).astype(np.float64), np.asarray(expected)
        # Of blocks the sum alone is the same wherever they come from.
        found = found.sum(0) if found.ndim > right.ndim else found
        error = np.abs(found - right).max() / max(np.abs(right).max(), mean_of)
        assert error < {"f32": 1e-5, "f16": 2e-3, "bf16": 1e-2}[case.dtype], error


@dataclass(frozen=True)
class Rotation:
    """A call of rotary position embedding."""

    dtype: str
    # Tokens, heads, columns and pairs.
    shape: tuple[int, int, int, int]
    interleaved: bool
    inverse: bool
    in_place: bool

    def __str__(self) -> str:
        """What a failure is found again by."""
        layout = "interleaved" if self.interleaved else "halves"
        way = "back" if self.inverse else "forth"
        place = "in place" if self.in_place else "apart"
        return f"rope {self.dtype} {self.shape} {layout} {way} {place}"


# Whole vectors, with columns that are copied, and rows and halves off 16 bytes.
ROTATIONS = [(9, 3, 128, 64), (37, 5, 80, 16), (5, 2, 64, 12), (7, 3, 33, 15)]


def rotation_cases(quick: bool) -> Iterator[Rotation]:
    """Every kernel; ways and places take turns."""
    turn = 0
    for dtype in DTYPES:
        for interleaved in (False, True):
            for shape in ROTATIONS[:1] if quick else ROTATIONS:
                turn += 1
                yield Rotation(dtype, shape, interleaved, turn % 2 == 0, turn % 4 < 2)


def run_rotation(case: Rotation, rng: np.random.Generator) -> None:
    """Runs one case and holds it against float64.

    Raises:
        AssertionError: values that are further off than rounding explains.
    """
    tokens, heads, columns, pairs = case.shape
    x = rng.normal(size=(tokens, heads, columns)).astype(DTYPES[case.dtype])
    cos, sin = rng.normal(size=(2, tokens, pairs)).astype(np.float32)
    rows = rng.permutation(tokens).astype(np.int32)
    indices = np.repeat(rows[:, None], heads, 1)
    first, second = slice(pairs), slice(pairs, 2 * pairs)
    if case.interleaved:
        first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    right = x.astype(np.float64)
    a, b = right[..., first].copy(), right[..., second].copy()
    c, s = cos[rows][:, None].astype(np.float64), sin[rows][:, None].astype(np.float64)
    s = -s if case.inverse else s
    right[..., first], right[..., second] = a * c - b * s, b * c + a * s
    call = jax.ffi.ffi_call(
        "xentile_rope",
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        input_output_aliases={0: 0} if case.in_place else {},
        vmap_method=None,
    )
    attributes = {"interleaved": np.bool_(case.interleaved), "inverse": np.bool_(case.inverse)}
    program = jax.jit(
        lambda *arrays: call(*arrays, **attributes), donate_argnums=0 if case.in_place else ()
    )
    operands = [jax.device_put(array) for array in (x, indices, cos, sin)]
    found = np.asarray(jax.block_until_ready(program(*operands))).astype(np.float64)
    error = np.abs(found - right).max() / np.abs(right).max()
    assert error < {"f32": 1e-6, "f16": 1e-3, "bf16": 8e-3}[case.dtype], error


@dataclass(frozen=True)
class Heads:
    """A call of heads that are normalised and rotated."""

    dtype: str
    # Tokens, heads of q and of k, columns and pairs.
    shape: tuple[int, int, int, int, int]
    interleaved: bool
    backward: bool
    in_place: bool

    def __str__(self) -> str:
        """What a failure is found again by."""
        layout = "interleaved" if self.interleaved else "halves"
        which = "backward" if self.backward else "forward"
        place = "in place" if self.in_place else "apart"
        return f"qk_norm_rope {which} {self.dtype} {self.shape} {layout} {place}"


# Whole turns of a warp, and heads and lanes that are left over, with columns that are copied.
HEADS = [(9, 4, 2, 128, 64), (37, 7, 3, 96, 16)]


def heads_cases(quick: bool) -> Iterator[Heads]:
    """Every kernel; places take turns."""
    turn = 0
    for dtype in DTYPES:
        for interleaved in (False, True):
            for backward in (False, True):
                for shape in HEADS[:1] if quick else HEADS:
                    turn += 1
                    yield Heads(dtype, shape, interleaved, backward, turn % 3 == 0)


def run_heads(case: Heads, rng: np.random.Generator) -> None:
    """Runs one case and holds it against float64.

    Raises:
        AssertionError: values that are further off than rounding explains.
    """
    tokens, *heads, columns, pairs = case.shape
    dtype = DTYPES[case.dtype]
    x, dy = ([rng.normal(size=(tokens, n, columns)).astype(dtype) for n in heads] for _ in "12")
    weights = [rng.normal(1, 0.2, columns).astype(of) for of in (np.float32, dtype)]
    turns = rng.uniform(0, 2 * np.pi, (tokens, pairs))
    tables = [np.cos(turns).astype(np.float32), np.sin(turns).astype(np.float32)]
    rows = rng.permutation(tokens).astype(np.int32)
    first, second = slice(pairs), slice(pairs, 2 * pairs)
    if case.interleaved:
        first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)

    def turned(of: np.ndarray, way: int) -> np.ndarray:
        c, s = (one[rows][:, None].astype(np.float64) for one in tables)
        a, b, found = of[..., first], of[..., second], of.copy()
        found[..., first], found[..., second] = a * c - way * b * s, b * c + way * a * s
        return found

    wide = [one.astype(np.float64) for one in x]
    by = [1 / np.sqrt((one**2).mean(-1, keepdims=True) + 1e-6) for one in wide]
    scales = [1 + one.astype(np.float64) for one in weights]
    like = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in x]
    rstd = [one[..., 0].astype(np.float32) for one in by]
    if case.backward:
        operands = [*x, *weights, *rstd, rows, *tables, *dy]
        results = [*like, *[jax.ShapeDtypeStruct((3, columns), np.float32)] * 2]
        gs = [turned(one.astype(np.float64), -1) for one in dy]
        parts = [*zip(wide, by, scales, gs, strict=True)]
        wanted = [
            r * (g * w - z * r * (g * w * z * r).mean(-1, keepdims=True)) for z, r, w, g in parts
        ]
        wanted += [(g * z * r).sum((0, 1)) for z, r, _, g in parts]
    else:
        operands = [*x, *weights, rows, *tables]
        results = [*like, *[jax.ShapeDtypeStruct(one.shape, np.float32) for one in rstd]]
        wanted = [turned(z * r * w, 1) for z, r, w in zip(wide, by, scales, strict=True)] + rstd
    call = jax.ffi.ffi_call(
        f"xentile_qk_norm_rope_{'backward' if case.backward else 'forward'}",
        results,
        input_output_aliases={0: 0, 1: 1} if case.in_place else {},
        vmap_method=None,
    )
    attributes = {
        "eps": np.float64(1e-6),
        "zero_centred": np.bool_(True),
        "interleaved": np.bool_(case.interleaved),
    }
    program = jax.jit(
        lambda *arrays: call(*arrays, **attributes), donate_argnums=(0, 1) if case.in_place else ()
    )
    outputs = jax.block_until_ready(program(*[jax.device_put(array) for array in operands]))
    for output, right in zip(outputs, wanted, strict=True):
        found = np.asarray(output).astype(np.float64)
        # Of blocks the sum alone is the same wherever they come from.
        found = found.sum(0) if found.ndim > right.ndim else found
        error = np.abs(found - right).max() / np.abs(right).max()
        assert error < {"f32": 1e-5, "f16": 2e-3, "bf16": 1e-2}[case.dtype], error


@dataclass(frozen=True)
class Quantization:
    """A call of FP8 quantisation."""

    target: str
    dtype: str
    form: str
    shape: tuple[int, int, int]
    # Rows and columns of a block, all columns where there are none.
    block: tuple[int, int | None]

    def __str__(self) -> str:
        """What a failure is found again by."""
        return f"{self.target} {self.form} {self.dtype} {self.shape} blocks {self.block}"


FORMATS = {"f8e4m3fn": ml_dtypes.float8_e4m3fn, "f8e5m2": ml_dtypes.float8_e5m2}
# Whole vectors, blocks that a row's end cuts, and rows off 16 bytes, in more than one tile.
QUANTIZED = [(1, 160, 256), (2, 17, 320), (1, 131, 37)]
# A scale by which nothing is past the largest number of a format.
GIVEN = np.float32(0.03)
BLOCKS: list[tuple[int, int | None]] = [(1, 128), (1, None), (128, 128), (48, 48), (1, 20)]


def quantization_cases(quick: bool) -> Iterator[Quantization]:
    """Every kernel and dtype; shapes take turns."""
    turn = 0
    for form in FORMATS:
        for dtype in DTYPES:
            for name in ("", "_transposed", "_amax", "_scaled", "_scaled_transposed"):
                blocks = BLOCKS if name in ("", "_transposed") else BLOCKS[1:2]
                for block in blocks:
                    turn += 1
                    shape = QUANTIZED[0 if quick else turn % 3]
                    yield Quantization(f"xentile_fp8_quantize{name}", dtype, form, shape, block)


def run_quantization(case: Quantization, rng: np.random.Generator) -> None:
    """Runs one case; values times their scales are what was quantised, but for their rounding.

    Raises:
        AssertionError: a value that is further off, or an amax that is wrong.
    """
    x = rng.normal(size=case.shape).astype(DTYPES[case.dtype])
    wide = x.astype(np.float32)
    values = jax.ShapeDtypeStruct(x.shape, FORMATS[case.form])
    rows = jax.ShapeDtypeStruct(x.shape[:-1], np.float32)
    turned = jax.ShapeDtypeStruct(np.swapaxes(x, 1, 2).shape, values.dtype)
    attributes: dict[str, Any] = {}
    operands = [jax.device_put(x)]

    def scales(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        down, across = case.block
        found = (*shape[:-1], *([] if across is None else [-(-shape[-1] // across)]))
        if down > 1:
            found = (*shape[:-2], -(-shape[-2] // down), found[-1])
        return jax.ShapeDtypeStruct(found, np.float32)

    if case.target.endswith("_amax"):
        results = [rows]
    elif "_scaled" in case.target:
        results = [values, rows]
        operands.append(jax.device_put(GIVEN))
    else:
        results = [values, scales(x.shape)]
        across = case.block[1]
        attributes = {"block_rows": np.int64(case.block[0]), "power_of_two": np.bool_(False)}
        attributes |= {} if across is None else {"block_columns": np.int64(across)}
    if case.target.endswith("_transposed"):
        results += [turned] if "_scaled" in case.target else [turned, scales(turned.shape)]
    call = jax.ffi.ffi_call(case.target, results, vmap_method=None)
    found = [np.asarray(one) for one in jax.jit(lambda *of: call(*of, **attributes))(*operands)]
    if "_amax" in case.target or "_scaled" in case.target:
        amax = found[0] if "_amax" in case.target else found[1]
        assert (amax == np.abs(wide).max(-1)).all(), "amax"
    if "_scaled" in case.target:
        pairs: list[tuple[Any, Any, Any]] = [(found[0], GIVEN, wide)]
        pairs += [(found[2], GIVEN, np.swapaxes(wide, 1, 2))] if len(found) > 2 else []
    elif case.target.endswith("_amax"):
        pairs = []
    else:
        pairs = [(found[0], spread(found[1], case.block, x.shape), wide)]
        if len(found) > 2:
            of = spread(found[3], case.block, turned.shape)
            pairs.append((found[2], of, np.swapaxes(wide, 1, 2)))
    for value, by, right in pairs:
        error = np.abs(value.astype(np.float32) * by - right)
        # Half a unit in the last place, of the least normal number at least.
        bits, least = (3, -6) if case.form == "f8e4m3fn" else (2, -14)
        allowed = np.maximum(np.abs(right) * 1.01, by * 2.0**least) * 2.0 ** -(bits + 1)
        assert (error <= allowed).all(), (error / allowed).max()


@dataclass(frozen=True)
class Fused:
    """A call that quantises what it makes of two arrays or of rows that it normalises."""

    form: str
    # How gate and up are packed, or "norm", or "add" of a sum with a residual.
    of: str
    transposed: bool
    columns: int = 640

    def __str__(self) -> str:
        """What a failure is found again by."""
        turned = " transposed" if self.transposed else ""
        return f"fp8_quantize of {self.of} {self.form}{turned}, {self.columns} columns"


def fused_cases() -> Iterator[Fused]:
    """Every kernel, and every way that arrays are packed."""
    for form in FORMATS:
        for of in ("apart", "halves", "interleaved", "norm", "add"):
            for transposed in (False, True):
                yield Fused(form, of, transposed)
                if transposed and of in ("norm", "add"):
                    # Statistics and tiles in one launch.
                    yield Fused(form, of, transposed, 2176)


def run_fused(case: Fused, rng: np.random.Generator) -> None:
    """Runs one case on tiles that are not full.

    Raises:
        AssertionError: values that are further off than rounding explains.
    """
    shape = (131, case.columns)
    first, second = rng.normal(size=(2, *shape)).astype(DTYPES["bf16"])
    a, b = (one.astype(np.float64) for one in (first, second))
    values, turned = jax.ShapeDtypeStruct(shape, FORMATS[case.form]), shape[::-1]
    results = [values, jax.ShapeDtypeStruct((131, case.columns // 128), np.float32)]
    if case.transposed:
        results += [jax.ShapeDtypeStruct(turned, values.dtype)]
        results += [jax.ShapeDtypeStruct((case.columns, 2), np.float32)]
    attributes: dict[str, Any] = {"power_of_two": np.bool_(False)}
    if case.of in ("norm", "add"):
        weight = rng.normal(1, 0.2, shape[1]).astype(np.float32)
        name = "rms_norm_add" if case.of == "add" else "rms_norm"
        operands = [first, *([second] if case.of == "add" else []), weight]
        like = jax.ShapeDtypeStruct(shape, first.dtype)
        results += [like] if case.of == "add" else []
        results += [jax.ShapeDtypeStruct(shape[:1], np.float32)]
        attributes |= {"eps": np.float64(1e-6), "zero_centred": np.bool_(False)}
        a = (a + b).astype(first.dtype).astype(np.float64) if case.of == "add" else a
        y = a / np.sqrt((a**2).mean(-1, keepdims=True) + 1e-6) * weight.astype(np.float64)
    else:
        name = "swiglu"
        axis = {"apart": None, "halves": 1, "interleaved": 2}[case.of]
        packed = None if axis is None else np.stack([first, second], axis)
        operands = [first, second] if packed is None else [packed, packed]
        attributes |= {"packing": case.of, "alpha": np.float64(1), "up_offset": np.float64(0)}
        y = a / (1 + np.exp(-a)) * b
    call = jax.ffi.ffi_call(
        f"xentile_fp8_quantize_{name}{'_transposed' if case.transposed else ''}",
        results,
        vmap_method=None,
    )
    program = jax.jit(lambda *of: call(*of, **attributes))
    found = [np.asarray(one) for one in program(*[jax.device_put(one) for one in operands])]
    pairs = [(found[0], found[1], y)]
    pairs += [(found[2], found[3], y.T)] if case.transposed else []
    for value, scales, right in pairs:
        by = spread(scales, (1, 128), right.shape)
        error = np.abs(value.astype(np.float64) * by - right)
        bits, least = (3, -6) if case.form == "f8e4m3fn" else (2, -14)
        # Rounded to bfloat16 before.
        allowed = np.maximum(np.abs(right) * 1.01, by * 2.0**least) * 2.0 ** -(bits + 1)
        allowed += np.abs(right) * 2.0**-8
        assert (error <= allowed).all(), (error / allowed).max()


def spread(scales: np.ndarray, block: tuple[int, int | None], shape: tuple[int, ...]) -> np.ndarray:
    """Returns the scale of each entry of an array, or what broadcasts to it."""
    rows, columns = block
    if columns is None:
        return scales[..., None]
    scales = np.repeat(scales, columns, -1)[..., : shape[-1]]
    return np.repeat(scales, rows, -2)[..., : shape[-2], :] if rows > 1 else scales


@dataclass(frozen=True)
class Attention:
    """Both calls of attention."""

    dtype: str
    # Heads of keys, queries a head of keys, queries, keys, and columns of keys and values.
    shape: tuple[int, int, int, int, int, int]
    options: tuple[str, ...]

    def __str__(self) -> str:
        """What a failure is found again by."""
        return f"flash_attention {self.dtype} {self.shape} {' '.join(self.options)}"


# One for each width that heads are padded to, of more than a tile and of a few columns.
ATTENTION = [(2, 2, 150, 170, 64, 40), (1, 2, 140, 133, 128, 72), (1, 2, 70, 90, 200, 256)]
ATTENTION_OPTIONS = [("segments", "sinks"), ("softcap",), ("blanks", "sinks")]


def attention_cases(quick: bool) -> Iterator[Attention]:
    """Every kernel; options take turns."""
    for turn, dtype in enumerate(DTYPES):
        for index, shape in enumerate(ATTENTION):
            options = ATTENTION_OPTIONS[(index + turn) % 3]
            yield Attention(dtype, shape, ("sinks",) if quick else options)


def run_attention(case: Attention, rng: np.random.Generator) -> None:
    """Runs one case, causal of queries and keys that end together, and holds it against float64.

    Raises:
        AssertionError: values that are further off than rounding explains.
    """
    heads, group, queries, keys, width, value_width = case.shape
    shapes = [(heads, group, queries, width), (heads, keys, width), (heads, keys, value_width)]
    q, k, v = (rng.normal(size=shape).astype(DTYPES[case.dtype]) for shape in shapes)
    dout = rng.normal(size=(*shapes[0][:-1], value_width)).astype(DTYPES[case.dtype])
    dlse = rng.normal(size=shapes[0][:-1]).astype(np.float32)
    place = np.arange(queries) + keys - queries
    ends = np.clip(place + 1, 0, keys)
    if "blanks" in case.options:
        ends[::7] = 0
    ranges = np.broadcast_to(np.stack([0 * ends, ends], -1), (heads, queries, 2)).astype(np.int32)
    seen = np.broadcast_to(np.arange(keys) < ends[:, None], (heads, queries, keys))
    operands: list[Any] = [q, k, v, ranges]
    if "segments" in case.options:
        both = [
            np.sort(rng.integers(0, 3, (heads, n)), -1).astype(np.int32) for n in case.shape[2:4]
        ]
        operands += both
        seen = seen & (both[0][:, :, None] == both[1][:, None])
    scale, cap = 1 / np.sqrt(width), 2.0 if "softcap" in case.options else None
    sinks = np.full((heads, group), -np.inf, np.float32)
    if "sinks" in case.options:
        sinks = rng.normal(size=(heads, group)).astype(np.float32)
        operands.append(sinks)

    wide_q, wide_k, wide_v, wide_dout = (x.astype(np.float64) for x in (q, k, v, dout))
    t = scale * np.einsum("ngsd,nkd->ngsk", wide_q, wide_k)
    slope = np.ones_like(t)
    if cap is not None:
        slope = 1 - np.tanh(t / cap) ** 2
        t = cap * np.tanh(t / cap)
    mask = seen[:, None]
    total = np.where(mask, np.exp(t), 0).sum(-1) + np.exp(sinks.astype(np.float64))[..., None]
    with np.errstate(divide="ignore"):
        lse = np.log(total)
    p = np.where(
        mask & (total > 0)[..., None], np.exp(t) / np.where(total > 0, total, 1)[..., None], 0
    )
    o = np.einsum("ngsk,nke->ngse", p, wide_v)
    delta = np.where(total > 0, (wide_dout * o).sum(-1) - dlse, 0)
    ds = p * slope * (np.einsum("ngse,nke->ngsk", wide_dout, wide_v) - delta[..., None])
    right = [
        scale * np.einsum("ngsk,nkd->ngsd", ds, wide_k),
        scale * np.einsum("ngsk,ngsd->nkd", ds, wide_q),
        np.einsum("ngsk,ngse->nke", p, wide_dout),
    ]
    if "sinks" in case.options:
        right.append(-(np.exp(sinks[..., None] - lse) * delta).sum(-1))

    attributes: dict[str, Any] = {"scale": np.float64(scale)}
    attributes |= {} if cap is None else {"softcap": np.float64(cap)}
    attributes |= {name: np.bool_(name in case.options) for name in ("segments", "sinks")}

    def call(name: str, results: list[Any], arrays: list[Any]) -> list[Any]:
        shapes = [jax.ShapeDtypeStruct(like.shape, like.dtype) for like in results]
        made = jax.ffi.ffi_call(f"xentile_flash_attention_{name}", shapes, vmap_method=None)
        program = jax.jit(lambda *of: made(*of, **attributes))
        return [np.asarray(one) for one in program(*map(jax.device_put, arrays))]

    found = call("forward", [dout, dlse], operands)
    results = [q, k, v, *([sinks] if "sinks" in case.options else [])]
    found += call("backward", results, [*operands, *found, dout, dlse])
    off = {"f32": 2e-5, "f16": 4e-3, "bf16": 3e-2}[case.dtype]
    for name, one, of in zip(
        ("o", "lse", "dq", "dk", "dv", "dsinks"), found, [o, lse, *right], strict=False
    ):
        assert (np.isneginf(one) == np.isneginf(of)).all(), name
        finite = np.isfinite(of)
        error = np.abs(one.astype(np.float64)[finite] - of[finite]).max() / np.abs(of[finite]).max()
        assert error < off, f"{name}: {error}"


def main() -> int:
    """Runs all cases; the exit code is 1 where one gave what cannot be right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--platform", default="cuda", help="cuda, or cpu to try the script itself")
    parser.add_argument("--quick", action="store_true", help="one shape instead of all")
    parser.add_argument(
        "--no-products", action="store_true", help="no calls that have products of cuBLASLt"
    )
    parser.add_argument(
        "--no-bulk-stores",
        action="store_true",
        help="no gradients of small vocabularies, which initcheck does not see written",
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name has this")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", arguments.platform)
    jax.config.update("jax_enable_x64", True)
    library = pallas_bridge.info().library
    if library is None or arguments.platform not in library.platforms:
        print(f"sanitize: error: no kernels for {arguments.platform}:\n{pallas_bridge.info()}")
        return 2
    print(f"seed: --seed {arguments.seed} repeats")
    rng = np.random.default_rng(arguments.seed)
    passed = 0
    linear = [case for case in linear_cases() if not (arguments.no_products and case.has_products)]
    known: list[Case | Linear | Norm | Rotation | Heads | Quantization | Fused | Attention] = [
        *cases(arguments.quick),
        *norm_cases(arguments.quick),
        *rotation_cases(arguments.quick),
        *heads_cases(arguments.quick),
        *quantization_cases(arguments.quick),
        *fused_cases(),
        *attention_cases(arguments.quick),
        *linear,
    ]
    if arguments.no_bulk_stores:
        known = [case for case in known if not (isinstance(case, Case) and case.is_in_bulk)]
    ran = [case for case in known if arguments.only in str(case)]
    if not ran:
        print(f"sanitize: error: no case has {arguments.only!r} in its name")
        return 2
    for case in ran:
        try:
            if isinstance(case, Linear):
                run_linear(case, rng)
            elif isinstance(case, Norm):
                run_norm(case, rng)
            elif isinstance(case, Rotation):
                run_rotation(case, rng)
            elif isinstance(case, Heads):
                run_heads(case, rng)
            elif isinstance(case, Fused):
                run_fused(case, rng)
            elif isinstance(case, Quantization):
                run_quantization(case, rng)
            elif isinstance(case, Attention):
                run_attention(case, rng)
            else:
                run(case, rng)
            passed += 1
        except AssertionError as error:
            print(f"wrong: {case}: {error}")
        except jax.errors.JaxRuntimeError as error:
            print(f"wrong: {case}, and none after it can run: {error}")
            break
    print(f"sanitize: {passed} passed, {len(ran) - passed} failed")
    return int(passed < len(ran))


if __name__ == "__main__":
    sys.exit(main())
