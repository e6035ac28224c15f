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
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

# An allocation of the driver's for every array, so that its ends are known.
os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from pallas_bridge._src.arrays import Signature
from pallas_bridge._src.generation import kernel, model, sampling
from pallas_bridge._src.targets import declared, every

import pallas_bridge
from pallas_bridge import generation

DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}
# The kernels' variants, by the options that choose them.
VARIANTS: dict[str, dict[str, Any]] = {
    "basic": {},
    "smooth": {"label_smoothing": 0.1, "z_loss": 1e-3},
    "capped": {"softcap": 30},
}
# Rows: several of them off 16 bytes, one shorter than any vector, one longer than a tile; whole
# vectors of a small vocabulary, and its last tile not full; few rows in wide clusters.
SHAPES = [(3, 5), (7, 1031), (2, 50257), (67, 48), (3, 151936)]
SMALL = 4096
Numbers = np.ndarray[Any, np.dtype[Any]]
# What results may be off by, relative to the largest number.
OFF = {"f32": 1e-5, "f16": 2e-3, "bf16": 1e-2}


def call(
    target: str,
    operands: Sequence[Any],
    attributes: dict[str, Any] | None = None,
    *,
    results: Sequence[Any] | None = None,
    dtypes: dict[str, Any] | None = None,
    blocks: int = 0,
    aliases: dict[int, int] | None = None,
) -> list[Numbers]:
    """Returns the results of a declared call, a program of its own, of arrays from the host.

    They have the declared shapes unless `results` are given, and the declared dtypes, or those in
    `dtypes` by their names; sums over tokens come in `blocks`, if any. The results in `aliases`
    take the memory of operands.
    """
    one, values = declared(f"xentile_{target}"), attributes or {}
    if results is None:
        made = one.results(values, dtypes or {})
        signature = Signature.of(one.operands(values), made)
        found = signature.result_avals(made, [jax.typeof(array) for array in operands], 0)
        results = [
            jax.ShapeDtypeStruct((blocks, *aval.shape), aval.dtype)
            if blocks and not dims.has_tokens
            else jax.ShapeDtypeStruct(aval.shape, aval.dtype)
            for dims, aval in zip(signature.results, found, strict=True)
        ]
    aliases = aliases or {}
    made_call = jax.ffi.ffi_call(one.name, results, input_output_aliases=aliases, vmap_method=None)
    typed = dict(one.attributes(values))
    program = jax.jit(lambda *arrays: made_call(*arrays, **typed), donate_argnums=tuple(aliases))
    outputs = program(*[jax.device_put(array) for array in operands])
    return [np.asarray(output) for output in jax.block_until_ready(outputs)]


def hold(found: Sequence[Numbers], wanted: Sequence[Numbers], off: float, size: float = 0) -> None:
    """Compares results, relative to the largest number of each or to `size`.

    Raises:
        AssertionError: values that are further off than rounding explains.
    """
    for output, right in zip(found, wanted, strict=True):
        value = output.astype(np.float64)
        # Of blocks the sum alone is the same wherever they come from.
        value = value.sum(0) if value.ndim > right.ndim else value
        error = np.abs(value - right).max() / max(np.abs(right).max(), size)
        assert error < off, error


@dataclass(frozen=True)
class Case(ABC):
    """A custom call on one problem."""

    target: str

    def __str__(self) -> str:
        """What a failure is found again by: the values of fields, and names of those that hold."""
        words = []
        for name, value in vars(self).items():
            if isinstance(value, bool):
                words += [name] * value
            elif isinstance(value, tuple):
                words.append("x".join(map(str, value)))
            else:
                words.append(str(value))
        return " ".join(words)

    @property
    def is_in_bulk(self) -> bool:
        """Whether its gradient is stored by bulk copies."""
        return False

    @property
    def has_products(self) -> bool:
        """Whether it calls cuBLASLt."""
        return False

    @abstractmethod
    def run(self, rng: np.random.Generator) -> None:
        """Runs it and looks at what it gave.

        Raises:
            AssertionError: values that cannot be right.
        """


@dataclass(frozen=True)
class Loss(Case):
    """A call of cross-entropy, or of the scale of its gradient."""

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

    def run(self, rng: np.random.Generator) -> None:
        """Holds NaN where a label is out of range, and finite numbers elsewhere."""
        tokens, vocab = self.shape
        x = rng.normal(0, 3, self.shape).astype(DTYPES[self.dtype])
        width = np.int64 if self.wide_labels else np.int32
        y = rng.integers(0, vocab, tokens).astype(width)
        highest = 2**63 - 1 if self.wide_labels else 2**31 - 1
        # The last two: out of range, far enough to be another allocation's, and ignored.
        y[-1], y[-2] = highest if tokens % 2 else -1, -100
        given = [rng.uniform(0.5, 1, tokens).astype(np.float32) for _ in range(3)]
        operands: list[Any] = [x, y]
        attributes: dict[str, Any] = {"ignore_index": -100, "label_smoothing": 0, "z_loss": 0}
        attributes |= {**VARIANTS[self.variant], **self.tile}
        attributes["temperature"] = 1 if self.variant == "basic" else 0.7
        if not self.target.endswith("backward"):
            attributes["every_token"] = True
        if self.target == "scale":
            operands, attributes = [x, given[0]], {}
        elif self.target.endswith("fused"):
            operands.append(given[0])
        elif self.target.endswith("backward"):
            lse = np.log(np.exp(x.astype(np.float64)).sum(-1)).astype(np.float32)
            operands += [lse, np.zeros_like(lse)]
            if "distribution" in self.target:
                operands.append(lse / 2)
                given.append(given[0])
            operands += given
        last = 3 if self.target.endswith("fused") else 0
        aliases = {0: last} if self.in_place else {}
        found = call(self.target, operands, attributes, aliases=aliases)
        outputs = [one.astype(np.float64) for one in found]
        if self.target == "scale":
            wanted = x.astype(np.float64) * given[0][:, None].astype(np.float64)
            np.testing.assert_allclose(outputs[0], wanted, rtol=2**-7, atol=1e-6)
            return
        if not self.target.endswith("backward"):
            loss = outputs[0]
            assert np.isnan(loss[-1]) and loss[-2] == 0 and np.isfinite(loss[:-1]).all(), loss
        if not self.target.endswith(("forward", "distribution")):
            gradient = outputs[-1]
            assert np.isnan(gradient[-1]).all() and not gradient[-2].any()
            assert np.isfinite(gradient[:-1]).all()


def loss_cases(quick: bool) -> Iterator[Loss]:
    """Every pass, dtype, variant and shape; places, labels and tiles take turns."""
    turn = 0
    for target in ("forward", "backward", "fused"):
        for dtype in DTYPES:
            for variant in VARIANTS:
                for shape in SHAPES[1:2] if quick else SHAPES:
                    turn += 1
                    in_place = target != "forward" and turn % 2 == 0
                    tile = {} if turn % 4 else {"block_size": 513, "time_block": 3}
                    wide, name = turn % 3 == 0, f"cross_entropy_{target}"
                    yield Loss(name, dtype, variant, shape, in_place, wide, tile)
    for target in ("distribution", "distribution_backward"):
        for dtype in DTYPES:
            for variant in VARIANTS:
                for shape in SHAPES[1:2] if quick else SHAPES:
                    in_place = target.endswith("backward") and dtype != "f32"
                    name = f"cross_entropy_{target}"
                    yield Loss(name, dtype, variant, shape, in_place, False, {})
    for dtype in DTYPES:
        for in_place in (False, True):
            yield Loss("scale", dtype, "basic", SHAPES[1], in_place, False, {})


@dataclass(frozen=True)
class Linear(Case):
    """A call of linear cross-entropy, cut along both axes where it can be."""

    dtype: str
    vocab_axis: int
    # "separate": dhidden and dweight have separate sweeps; "columns": the fused pass recomputes
    # columns; "saved": it saves logits of some columns; "single": some columns have a single pass,
    # by chunks of tokens; "whole": there is one chunk.
    way: Literal["chunks", "separate", "columns", "saved", "single", "whole"] = "chunks"
    has_bias: bool = False
    # N, D and V: more than one block of each in products of their own, and no whole number of any.
    shape: tuple[int, int, int] = (300, 200, 1031)

    @property
    def has_products(self) -> bool:
        """Whether it calls cuBLASLt: all do but forward passes that have a kernel of their own."""
        own = self.target.endswith("forward") and self.dtype != "f32" and self.vocab_axis == 0
        return not own or jax.devices()[0].compute_capability != "9.0"

    def run(self, rng: np.random.Generator) -> None:
        """Holds results against float64."""
        tokens, width, vocab = self.shape
        dtype = DTYPES[self.dtype]
        hidden = rng.normal(size=(tokens, width)).astype(dtype)
        weight = rng.normal(0, 0.1, (vocab, width)).astype(dtype)
        y = rng.integers(0, vocab, tokens).astype(np.int32)
        y[3] = -100
        x, w = hidden.astype(np.float64), weight.astype(np.float64)
        bias = rng.normal(size=vocab).astype(np.float32)
        z = x @ w.T + self.has_bias * bias.astype(np.float64)
        lse = np.log(np.exp(z).sum(-1))
        g = rng.uniform(0.5, 1, tokens).astype(np.float32)
        p = np.exp(z - lse[:, None])
        dz = p.copy()
        dz[np.arange(tokens), np.maximum(y, 0)] -= 1
        dz *= np.where(y < 0, 0, g)[:, None]
        loss = np.where(y < 0, 0, lse - z[np.arange(tokens), np.maximum(y, 0)])
        gradients = [dz @ w, (dz.T @ x).T if self.vocab_axis else dz.T @ x]
        laid = np.ascontiguousarray(weight.T) if self.vocab_axis else weight
        operands: list[Any] = [hidden, laid, y]
        wanted: list[Any]
        per_token = jax.ShapeDtypeStruct((tokens,), np.float32)
        like = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in (hidden, laid)]
        name = self.target.rpartition("_")[2]
        attributes: dict[str, Any] = {
            "ignore_index": -100,
            "label_smoothing": 0,
            "z_loss": 0,
            "vocab_axis": self.vocab_axis,
            "workspace_bytes": 2**20,
        }
        cut = {"chunk_tokens": 128, "chunk_columns": vocab if name == "fused" else 384}
        if self.way == "separate":
            cut |= {"apart_tokens": 200, "apart_columns": 256}
        elif self.way != "chunks":
            columns = vocab if self.way == "whole" else 256
            cut = {"chunk_tokens": tokens, "chunk_columns": columns}
        if self.way == "saved":
            cut |= {"kept_columns": 500, "kept_slot": 128}
        if self.way == "single":
            cut |= {"once_tokens": 128, "once_columns": vocab * 3 // 5}
        attributes |= cut
        if name != "backward":
            attributes["every_token"] = True
        if name == "forward":
            results, wanted = [per_token] * 4, [loss]
        elif name == "fused":
            operands.append(g)
            results, wanted = [*[per_token] * 3, *like], [loss, None, None, *gradients]
            if self.target == DISTRIBUTION:
                attributes["correct"] = True
                entropy = np.where(y < 0, 0, lse - (p * z).sum(-1))
                results[3:3] = [per_token, jax.ShapeDtypeStruct((tokens,), np.int32)]
                wanted[3:3] = [entropy, None]
        else:
            zeros = np.zeros(tokens, np.float32)
            operands += [lse.astype(np.float32), zeros, g, zeros, zeros]
            results, wanted = like, gradients
        results, wanted = [*results, jax.ShapeDtypeStruct((2**26,), np.uint8)], [*wanted, None]
        if self.has_bias:
            operands.append(bias)
            if name != "forward":
                results.append(jax.ShapeDtypeStruct((vocab,), np.float32))
                wanted.append(dz.sum(0))
        outputs = call(self.target, operands, attributes, results=results)
        for output, expected in zip(outputs, wanted, strict=False):
            if expected is not None:
                found = np.asarray(output).astype(np.float64)
                error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
                assert error < OFF[self.dtype], error


DISTRIBUTION = "linear_cross_entropy_distribution_fused"
# Tiles enough for sums and scaled products of the library's own.
MANY_COLUMNS, MANY_TOKENS = (300, 72, 15872), (15872, 72, 1032)


def linear_cases() -> Iterator[Linear]:
    """Every pass and dtype, with the weight either way."""
    for axis in (0, 1):
        yield Linear("linear_cross_entropy_fused", "bf16", axis, "chunks", shape=MANY_COLUMNS)
        yield Linear("linear_cross_entropy_backward", "f16", axis, "chunks", shape=MANY_COLUMNS)
        yield Linear("linear_cross_entropy_fused", "bf16", axis, "whole", shape=MANY_TOKENS)
    yield Linear("linear_cross_entropy_fused", "bf16", 0, "single", shape=MANY_COLUMNS)
    # Of GPUs alone; logits in f32 say it of other dtypes.
    if jax.default_backend() == "gpu":
        for axis in (0, 1):
            yield Linear(DISTRIBUTION, "bf16", axis, "chunks", shape=MANY_COLUMNS)
            yield Linear(DISTRIBUTION, "bf16", axis, "whole", shape=MANY_TOKENS)
        yield Linear(DISTRIBUTION, "bf16", 0, "single", shape=MANY_COLUMNS)
        yield Linear(DISTRIBUTION, "bf16", 0, "whole", has_bias=True)
        yield Linear(DISTRIBUTION, "f32", 0, "whole")
    for dtype in DTYPES:
        for axis in (0, 1):
            for target in ("forward", "backward", "fused"):
                yield Linear(f"linear_cross_entropy_{target}", dtype, axis)
            yield Linear("linear_cross_entropy_backward", dtype, axis, "separate")
            yield Linear("linear_cross_entropy_fused", dtype, axis, "columns")
        yield Linear("linear_cross_entropy_fused", dtype, 0, "saved")
        yield Linear("linear_cross_entropy_fused", dtype, 0, "single")
        # Logits get a bias in products of their own or, with V last, which is odd, by way of f32.
        for axis in (0, 1):
            yield Linear("linear_cross_entropy_forward", dtype, axis, has_bias=True)
            yield Linear("linear_cross_entropy_backward", dtype, axis, "separate", has_bias=True)
            yield Linear("linear_cross_entropy_fused", dtype, axis, has_bias=True)
            yield Linear("linear_cross_entropy_fused", dtype, axis, "columns", has_bias=True)
        yield Linear("linear_cross_entropy_fused", dtype, 0, "saved", has_bias=True)


@dataclass(frozen=True)
class Norm(Case):
    """A call of RMSNorm or LayerNorm."""

    dtype: str
    of_weight: str
    shape: tuple[int, int]
    in_place: bool

    def run(self, rng: np.random.Generator) -> None:
        """Holds results against float64."""
        rows, columns = self.shape
        dtype, of_weight = DTYPES[self.dtype], DTYPES[self.of_weight]
        x, dy, more = (rng.normal(size=self.shape).astype(dtype) for _ in range(3))
        weight, bias = (rng.normal(size=columns).astype(of_weight) for _ in range(2))
        is_layer, adds = self.target.startswith("layer"), "add" in self.target
        backward = self.target.endswith("backward")
        h = (x + more).astype(dtype) if adds and not backward else x
        z, w, d = (one.astype(np.float64) for one in (h, weight, dy))
        w = w if is_layer else 1 + w
        mean = z.mean(-1, keepdims=True) * is_layer
        rstd = 1 / np.sqrt(((z - mean) ** 2).mean(-1, keepdims=True) + 1e-6)
        xhat, g = (z - mean) * rstd, d * w
        statistics = [one[:, 0].astype(np.float32) for one in [mean, rstd][1 - is_layer :]]
        operands: list[Any] = [x, *([more] if adds else []), weight]
        wanted: list[Any] = [xhat * w, *([z] if adds else []), *statistics]
        if backward:
            operands = [x, weight, *statistics, dy, *([more] if adds else [])]
            along = g.mean(-1, keepdims=True) * is_layer + xhat * (g * xhat).mean(-1, keepdims=True)
            dx = rstd * (g - along) + more.astype(np.float64) * adds
            wanted = [dx, (d * xhat).sum(0), *([d.sum(0)] if is_layer else [])]
        elif is_layer:
            operands.append(bias)
            wanted[0] = wanted[0] + bias.astype(np.float64)
        attributes = {"eps": 1e-6} if is_layer else {"eps": 1e-6, "zero_centred": True}
        # Sums in two blocks, or one more than there are rows.
        blocks, aliases = 2 if rows > 2 else 3, {0: 0} if self.in_place else {}
        found = call(self.target, operands, attributes, blocks=blocks, aliases=aliases)
        # A mean is of numbers that cancel.
        hold(found, wanted, OFF[self.dtype], np.abs(z).mean() * is_layer)


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


@dataclass(frozen=True)
class Rotation(Case):
    """A call of rotary position embedding."""

    dtype: str
    # Tokens, heads, columns and pairs.
    shape: tuple[int, int, int, int]
    interleaved: bool
    inverse: bool
    in_place: bool

    def run(self, rng: np.random.Generator) -> None:
        """Holds results against float64."""
        tokens, heads, columns, pairs = self.shape
        x = rng.normal(size=(tokens, heads, columns)).astype(DTYPES[self.dtype])
        cos, sin = rng.normal(size=(2, tokens, pairs)).astype(np.float32)
        rows = rng.permutation(tokens).astype(np.int32)
        indices = np.repeat(rows[:, None], heads, 1)
        first, second = slice(pairs), slice(pairs, 2 * pairs)
        if self.interleaved:
            first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
        right = x.astype(np.float64)
        a, b = right[..., first].copy(), right[..., second].copy()
        c, s = cos[rows][:, None].astype(np.float64), sin[rows][:, None].astype(np.float64)
        s = -s if self.inverse else s
        right[..., first], right[..., second] = a * c - b * s, b * c + a * s
        attributes = {"interleaved": self.interleaved, "inverse": self.inverse}
        aliases = {0: 0} if self.in_place else {}
        found = call(self.target, [x, indices, cos, sin], attributes, aliases=aliases)
        hold(found, [right], {"f32": 1e-6, "f16": 1e-3, "bf16": 8e-3}[self.dtype])


# Whole vectors, with columns that are copied, and rows and halves off 16 bytes.
ROTATIONS = [(9, 3, 128, 64), (37, 5, 80, 16), (5, 2, 64, 12), (7, 3, 33, 15)]


def rotation_cases(quick: bool) -> Iterator[Rotation]:
    """Every kernel; ways and places take turns."""
    turn = 0
    for dtype in DTYPES:
        for interleaved in (False, True):
            for shape in ROTATIONS[:1] if quick else ROTATIONS:
                turn += 1
                yield Rotation("rope", dtype, shape, interleaved, turn % 2 == 0, turn % 4 < 2)


@dataclass(frozen=True)
class Heads(Case):
    """A call of heads that are normalised and rotated."""

    dtype: str
    # Tokens, heads of q and of k, columns and pairs.
    shape: tuple[int, int, int, int, int]
    interleaved: bool
    in_place: bool

    def run(self, rng: np.random.Generator) -> None:
        """Holds results against float64."""
        tokens, *heads, columns, pairs = self.shape
        dtype = DTYPES[self.dtype]
        x, dy = ([rng.normal(size=(tokens, n, columns)).astype(dtype) for n in heads] for _ in "12")
        weights = [rng.normal(1, 0.2, columns).astype(of) for of in (np.float32, dtype)]
        turns = rng.uniform(0, 2 * np.pi, (tokens, pairs))
        tables = [np.cos(turns).astype(np.float32), np.sin(turns).astype(np.float32)]
        rows = rng.permutation(tokens).astype(np.int32)
        first, second = slice(pairs), slice(pairs, 2 * pairs)
        if self.interleaved:
            first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)

        def rotated(of: np.ndarray, way: int) -> np.ndarray:
            c, s = (one[rows][:, None].astype(np.float64) for one in tables)
            a, b, found = of[..., first], of[..., second], of.copy()
            found[..., first], found[..., second] = a * c - way * b * s, b * c + way * a * s
            return found

        wide = [one.astype(np.float64) for one in x]
        by = [1 / np.sqrt((one**2).mean(-1, keepdims=True) + 1e-6) for one in wide]
        scales = [1 + one.astype(np.float64) for one in weights]
        rstd = [one[..., 0].astype(np.float32) for one in by]
        if self.target.endswith("backward"):
            operands = [*x, *weights, *rstd, rows, *tables, *dy]
            gs = [rotated(one.astype(np.float64), -1) for one in dy]
            parts = [*zip(wide, by, scales, gs, strict=True)]
            wanted = [
                r * (g * w - z * r * (g * w * z * r).mean(-1, keepdims=True))
                for z, r, w, g in parts
            ]
            wanted += [(g * z * r).sum((0, 1)) for z, r, _, g in parts]
        else:
            operands = [*x, *weights, rows, *tables]
            wanted = [
                rotated(z * r * w, 1) for z, r, w in zip(wide, by, scales, strict=True)
            ] + rstd
        attributes = {"eps": 1e-6, "zero_centred": True, "interleaved": self.interleaved}
        aliases = {0: 0, 1: 1} if self.in_place else {}
        found = call(self.target, operands, attributes, blocks=3, aliases=aliases)
        hold(found, wanted, OFF[self.dtype])


# Whole turns of a warp, and heads and lanes that are left over, with columns that are copied.
HEADS = [(9, 4, 2, 128, 64), (37, 7, 3, 96, 16)]


def heads_cases(quick: bool) -> Iterator[Heads]:
    """Every kernel; places take turns."""
    turn = 0
    for dtype in DTYPES:
        for interleaved in (False, True):
            for name in ("forward", "backward"):
                for shape in HEADS[:1] if quick else HEADS:
                    turn += 1
                    target = f"qk_norm_rope_{name}"
                    yield Heads(target, dtype, shape, interleaved, turn % 3 == 0)


@dataclass(frozen=True)
class Quantization(Case):
    """A call of FP8 quantisation."""

    dtype: str
    form: str
    shape: tuple[int, int, int]
    # Rows and columns of a block, all columns where there are none.
    block: tuple[int, int | None]

    def run(self, rng: np.random.Generator) -> None:
        """Holds values times their scales against what was quantised, but for their rounding."""
        x = rng.normal(size=self.shape).astype(DTYPES[self.dtype])
        wide = x.astype(np.float32)
        operands: list[Any] = [x]
        attributes: dict[str, Any] = {}
        if "_scaled" in self.target:
            operands.append(GIVEN)
        elif not self.target.endswith("_amax"):
            rows, columns = self.block
            attributes = {"block_rows": rows, "block_columns": columns, "power_of_two": False}
        found = call(self.target, operands, attributes, dtypes={"values": FORMATS[self.form]})
        if "_amax" in self.target or "_scaled" in self.target:
            amax = found[0] if "_amax" in self.target else found[1]
            assert (amax == np.abs(wide).max(-1)).all(), "amax"
        if "_scaled" in self.target:
            pairs: list[tuple[Any, Any, Any]] = [(found[0], GIVEN, wide)]
            pairs += [(found[2], GIVEN, np.swapaxes(wide, 1, 2))] if len(found) > 2 else []
        elif self.target.endswith("_amax"):
            pairs = []
        else:
            pairs = [(found[0], spread(found[1], self.block, x.shape), wide)]
            if len(found) > 2:
                right = np.swapaxes(wide, 1, 2)
                pairs.append((found[2], spread(found[3], self.block, right.shape), right))
        for value, by, right in pairs:
            error = np.abs(value.astype(np.float32) * by - right)
            # Half a unit in the last place, of the least normal number at least.
            bits, least = (3, -6) if self.form == "f8e4m3fn" else (2, -14)
            allowed = np.maximum(np.abs(right) * 1.01, by * 2.0**least) * 2.0 ** -(bits + 1)
            assert (error <= allowed).all(), (error / allowed).max()


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
                    yield Quantization(f"fp8_quantize{name}", dtype, form, shape, block)


@dataclass(frozen=True)
class Fused(Case):
    """A call that quantises what it makes of two arrays or of rows that it normalises."""

    form: str
    # How gate and up are packed, or "norm", or "add" of a sum with a residual.
    of: str
    transposed: bool
    columns: int = 640

    def run(self, rng: np.random.Generator) -> None:
        """Holds results of tiles that are not full against float64."""
        shape = (131, self.columns)
        first, second = rng.normal(size=(2, *shape)).astype(DTYPES["bf16"])
        a, b = (one.astype(np.float64) for one in (first, second))
        values, transposed_shape = jax.ShapeDtypeStruct(shape, FORMATS[self.form]), shape[::-1]
        results = [values, jax.ShapeDtypeStruct((131, self.columns // 128), np.float32)]
        if self.transposed:
            results += [jax.ShapeDtypeStruct(transposed_shape, values.dtype)]
            results += [jax.ShapeDtypeStruct((self.columns, 2), np.float32)]
        attributes: dict[str, Any] = {"power_of_two": False}
        if self.of in ("norm", "add"):
            weight = rng.normal(1, 0.2, shape[1]).astype(np.float32)
            name = "rms_norm_add" if self.of == "add" else "rms_norm"
            operands = [first, *([second] if self.of == "add" else []), weight]
            like = jax.ShapeDtypeStruct(shape, first.dtype)
            results += [like] if self.of == "add" else []
            results += [jax.ShapeDtypeStruct(shape[:1], np.float32)]
            attributes |= {"eps": 1e-6, "zero_centred": False}
            a = (a + b).astype(first.dtype).astype(np.float64) if self.of == "add" else a
            y = a / np.sqrt((a**2).mean(-1, keepdims=True) + 1e-6) * weight.astype(np.float64)
        else:
            name = "swiglu"
            axis = {"apart": None, "halves": 1, "interleaved": 2}[self.of]
            packed = None if axis is None else np.stack([first, second], axis)
            operands = [first, second] if packed is None else [packed, packed]
            attributes |= {"packing": self.of, "alpha": 1, "up_offset": 0}
            y = a / (1 + np.exp(-a)) * b
        name += "_transposed" * self.transposed
        found = call(f"{self.target}_{name}", operands, attributes, results=results)
        pairs = [(found[0], found[1], y)]
        pairs += [(found[2], found[3], y.T)] if self.transposed else []
        for value, scales, right in pairs:
            by = spread(scales, (1, 128), right.shape)
            error = np.abs(value.astype(np.float64) * by - right)
            bits, least = (3, -6) if self.form == "f8e4m3fn" else (2, -14)
            # Rounded to bfloat16 before.
            allowed = np.maximum(np.abs(right) * 1.01, by * 2.0**least) * 2.0 ** -(bits + 1)
            allowed += np.abs(right) * 2.0**-8
            assert (error <= allowed).all(), (error / allowed).max()


def fused_cases() -> Iterator[Fused]:
    """Every kernel, and every way that arrays are packed."""
    for form in FORMATS:
        for of in ("apart", "halves", "interleaved", "norm", "add"):
            for transposed in (False, True):
                yield Fused("fp8_quantize", form, of, transposed)
                if transposed and of in ("norm", "add"):
                    # Statistics and tiles in one launch.
                    yield Fused("fp8_quantize", form, of, transposed, 2176)


def spread(scales: np.ndarray, block: tuple[int, int | None], shape: tuple[int, ...]) -> np.ndarray:
    """Returns the scale of each entry of an array, or what broadcasts to it."""
    rows, columns = block
    if columns is None:
        return scales[..., None]
    scales = np.repeat(scales, columns, -1)[..., : shape[-1]]
    return np.repeat(scales, rows, -2)[..., : shape[-2], :] if rows > 1 else scales


@dataclass(frozen=True)
class Attention(Case):
    """Both calls of attention."""

    dtype: str
    # Heads of keys, queries a head of keys, queries, keys, and columns of keys and values.
    shape: tuple[int, int, int, int, int, int]
    options: tuple[str, ...]

    def run(self, rng: np.random.Generator) -> None:
        """Holds results against float64, causal of queries and keys that end together."""
        heads, group, queries, keys, width, value_width = self.shape
        shapes = [(heads, group, queries, width), (heads, keys, width), (heads, keys, value_width)]
        q, k, v = (rng.normal(size=shape).astype(DTYPES[self.dtype]) for shape in shapes)
        dout = rng.normal(size=(*shapes[0][:-1], value_width)).astype(DTYPES[self.dtype])
        dlse = rng.normal(size=shapes[0][:-1]).astype(np.float32)
        place = np.arange(queries) + keys - queries
        ends = np.clip(place + 1, 0, keys)
        if "blanks" in self.options:
            ends[::7] = 0
        ranges = np.broadcast_to(np.stack([0 * ends, ends], -1), (heads, queries, 2)).astype(
            np.int32
        )
        seen = np.broadcast_to(np.arange(keys) < ends[:, None], (heads, queries, keys))
        operands: list[Any] = [q, k, v, ranges]
        if "segments" in self.options:
            both = [
                np.sort(rng.integers(0, 3, (heads, n)), -1).astype(np.int32)
                for n in self.shape[2:4]
            ]
            operands += both
            seen = seen & (both[0][:, :, None] == both[1][:, None])
        scale, cap = 1 / np.sqrt(width), 2.0 if "softcap" in self.options else None
        sinks = np.full((heads, group), -np.inf, np.float32)
        if "sinks" in self.options:
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
        if "sinks" in self.options:
            right.append(-(np.exp(sinks[..., None] - lse) * delta).sum(-1))

        attributes: dict[str, Any] = {"scale": scale, "softcap": cap}
        attributes |= {name: name in self.options for name in ("segments", "sinks")}
        found = call(f"{self.target}_forward", operands, attributes)
        if "segments" not in self.options and self.dtype != "f32":
            of_chunks = {"scale": scale, "softcap": cap, "chunk_keys": 64}
            of_chunks["sinks"] = attributes["sinks"]
            o_of_chunks, lse_of_chunks, *_ = call(f"{self.target}_decode", operands, of_chunks)
            hold([o_of_chunks], [o], {"f16": 4e-3, "bf16": 3e-2}[self.dtype])
            assert (np.isneginf(lse_of_chunks) == np.isneginf(lse)).all()
        operands += [*found, dout, dlse]
        found += call(f"{self.target}_backward", operands, attributes)
        off = {"f32": 2e-5, "f16": 4e-3, "bf16": 3e-2}[self.dtype]
        for name, one, of in zip(
            ("o", "lse", "dq", "dk", "dv", "dsinks"), found, [o, lse, *right], strict=False
        ):
            assert (np.isneginf(one) == np.isneginf(of)).all(), name
            finite = np.isfinite(of)
            error = (
                np.abs(one.astype(np.float64)[finite] - of[finite]).max() / np.abs(of[finite]).max()
            )
            assert error < off, f"{name}: {error}"


# One for each width that heads are padded to, of more than a tile and of a few columns.
ATTENTION = [(2, 2, 150, 170, 64, 40), (1, 2, 140, 133, 128, 72), (1, 2, 70, 90, 200, 256)]
ATTENTION_OPTIONS = [("segments", "sinks"), ("softcap",), ("blanks", "sinks")]


def attention_cases(quick: bool) -> Iterator[Attention]:
    """Every kernel; options take turns."""
    for turn, dtype in enumerate(DTYPES):
        for index, shape in enumerate(ATTENTION):
            options = ATTENTION_OPTIONS[(index + turn) % 3]
            yield Attention("flash_attention", dtype, shape, ("sinks",) if quick else options)


@dataclass(frozen=True)
class Step(Case):
    """A token of each sequence, by a decoder of one layer."""

    of: str
    batch: int
    length: int = 256

    def run(self, rng: np.random.Generator) -> None:
        """Holds logits against XLA's, of rows at positions of their own."""
        dims = kernel.DIMENSIONS[self.of]
        config = generation.DecoderConfig(
            layers=1, vocab_size=1003, tied_head=True, rope_base=1e4, **dims._asdict()
        )
        shape = (1, self.batch, self.length, config.kv_heads, config.head_dim)
        positions = np.array([self.length - 1, 0, 100, 17, 64])[: self.batch]
        tokens = rng.integers(0, config.vocab_size, self.batch)
        keys, values = rng.normal(size=(2, *shape)).astype(DTYPES["bf16"])
        with jax.enable_x64(False), jax.default_device(jax.devices("cpu")[0]):
            params = generation.init_params(config, int(rng.integers(2**31)))
            packed = kernel.pack_weights(params, config)
            tables = model.position_tables(config, jnp.arange(self.length, dtype=jnp.int32))
            state = kernel.init_state(config, self.batch)
            each = [jnp.asarray(one, jnp.int32) for one in (tokens, positions)]
            cache = generation.Cache(jnp.asarray(keys), jnp.asarray(values))
            operands, attributes = kernel.operands(
                params, config, packed, tables, cache, state, *each
            )
            arrays: list[Any] = [np.array(one) for one in operands]
            # Donates the cache.
            right, _ = model._decode_step(params, config, cache, *each, False, False)
        rows = (self.batch,)
        drawn = [((*rows, 1003), np.float32), (rows, np.int32), (rows, np.float32)]
        results = [jax.ShapeDtypeStruct(*one) for one in drawn]
        results += [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in arrays[-3:]]
        aliases = {12: 3, 13: 4, 14: 5}
        found = call(self.target, arrays, attributes, results=results, aliases=aliases)
        hold(found[:1], [np.asarray(right, np.float64)], 5e-2)
        assert (found[1] == found[0].argmax(1)).all(), found[1]


@dataclass(frozen=True)
class Draw(Case):
    """A draw of a token of each row."""

    options: tuple[float, float, float, float]
    vocab: int
    has_bounds: bool

    def run(self, rng: np.random.Generator) -> None:
        """Holds log-probabilities against those of the tokens, and tokens against XLA's."""
        logits = (2 * rng.normal(size=(3, self.vocab))).astype(np.float32)
        keys = rng.integers(0, 2**31, (3, 2)).astype(np.int32)
        steps = np.arange(3, dtype=np.int32)
        vector = np.array(self.options, np.float32)
        drawn = [((3,), np.int32), ((3,), np.float32)]
        drawn += [(logits.shape, np.float32)] * self.has_bounds
        results = [jax.ShapeDtypeStruct(*one) for one in drawn]
        operands = [logits, keys, steps - 1, np.ones_like(steps), vector]
        attributes = {"has_bounds": self.has_bounds}
        token, logp, *_ = call(self.target, operands, attributes, results=results)
        z = logits.astype(np.float64) / self.options[0]
        z -= np.log(np.exp(z).sum(1, keepdims=True))
        hold([logp], [z[np.arange(3), token]], 1e-4)
        with jax.enable_x64(False), jax.default_device(jax.devices("cpu")[0]):
            right, _ = sampling._draw(
                jnp.asarray(logits),
                jnp.asarray(keys.view(np.uint32)),
                jnp.asarray(steps),
                sampling.Sampling(*vector),
            )
        assert (token == np.asarray(right)).all(), (token, right)


def decoding_cases() -> Iterator[Case]:
    """Each kernel of a step, and draws with and without top-k and a kernel for noise."""
    for of, batch in (("Qwen3-0.6B", 1), ("Qwen3-0.6B", 5), ("Qwen2.5-0.5B", 2)):
        yield Step("decode_step", of, batch)
    for vocab in (37, 40_003):
        yield Draw("sample", (0.7, np.inf, 1.0, 0.0), vocab, True)
        yield Draw("sample", (0.7, np.inf, 0.9, 0.0), vocab, False)
        yield Draw("sample", (1.0, 20.0, 0.9, 0.01), vocab, False)


@dataclass(frozen=True)
class Divergence(Case):
    """Rows of logits beside a teacher's, with a gradient in rows of a larger array."""

    dtype: str
    vocab: int

    def run(self, rng: np.random.Generator) -> None:
        """Holds losses and gradients against those in float64."""
        student, teacher = (2 * rng.normal(size=(2, 3, self.vocab))).astype(np.float32)
        factors = np.array([0.5, 0, 2], np.float32)
        dlogits = np.ones((5, self.vocab), DTYPES[self.dtype])
        results = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in (factors, dlogits)]
        operands = [student, teacher, factors, np.array([1], np.int32), dlogits]
        attributes = {"temperature": np.float64(1.5)}
        found = call(self.target, operands, attributes, results=results, aliases={4: 1})
        logs = []
        for one in (student, teacher):
            z = one.astype(np.float64) / 1.5
            logs.append(z - np.log(np.exp(z).sum(1, keepdims=True)))
        p = np.exp(logs[1])
        right = dlogits.astype(np.float64)
        right[1:4] = (np.exp(logs[0]) - p) * (factors / 1.5)[:, None]
        hold(found, [(p * (logs[1] - logs[0])).sum(1), right], OFF[self.dtype])


def divergence_cases() -> Iterator[Divergence]:
    """Clusters of 1, 2 and 16 CTAs."""
    for dtype in DTYPES:
        for vocab in (52, 20_500, 163_900):
            yield Divergence("kl_divergence", dtype, vocab)


@dataclass(frozen=True)
class Recurrence(Case):
    """A jitted `linear_attention` or `gated_delta_rule` with all gradients."""

    dtype: str
    # B, T, heads of q and k, heads of v, K, V.
    shape: tuple[int, ...]

    def run(self, rng: np.random.Generator) -> None:
        """Compares results with those of XLA's program on the CPU."""
        batch, length, key_heads, heads, keys, values = self.shape
        dtype = DTYPES[self.dtype]
        each = [(key_heads, keys), (key_heads, keys), (heads, values)]
        arrays = [rng.normal(size=(batch, length, *one)) for one in each]
        arrays[1] /= np.linalg.norm(arrays[1], axis=-1, keepdims=True)
        operands = [array.astype(dtype) for array in arrays]
        if self.target == "gated_delta_rule":
            operands.append(rng.uniform(0, 1, (batch, length, heads)).astype(np.float32))
        operands.append(-rng.uniform(0, 0.2, (batch, length, heads)).astype(np.float32))
        cotangent = rng.normal(size=(batch, length, heads, values)).astype(dtype)

        def run(implementation: str) -> list[Numbers]:
            def step(cotangent: jax.Array, *operands: jax.Array) -> tuple[jax.Array, ...]:
                function = getattr(pallas_bridge, self.target)
                o, backward = jax.vjp(
                    lambda *all: function(*all, implementation=implementation), *operands
                )
                return o, *backward(cotangent)

            return [np.asarray(one) for one in jax.jit(step)(cotangent, *operands)]

        with jax.enable_x64(False):
            found = run("custom_call")
            with jax.default_device(jax.devices("cpu")[0]):
                wanted = run("reference")
        off = {"f32": 1e-4, "f16": 1e-2, "bf16": 3e-2}[self.dtype]
        hold(found, [one.astype(np.float64) for one in wanted], off)


@dataclass(frozen=True)
class EightBits(Case):
    """Two jitted steps of `adamw8bit` over arrays that fill no CTA, of blocks of each size."""

    dtype: str

    def run(self, rng: np.random.Generator) -> None:
        """Compares parameters with those of XLA's program on the CPU."""
        dtype = DTYPES[self.dtype]
        shapes = [(67, 256), (40, 128), (5, 3, 320), (4096,)]
        params = [rng.normal(size=shape).astype(dtype) for shape in shapes]
        grads = [rng.normal(size=shape).astype(dtype) for shape in shapes]

        def run(implementation: Literal["custom_call", "reference"]) -> list[Numbers]:
            optimizer: Any = pallas_bridge.optax.adamw8bit(
                1e-2, rounding_seed=3, implementation=implementation
            )
            with jax.default_device(jax.devices("cpu")[0]):
                state = jax.tree.map(np.asarray, jax.jit(optimizer.init)(params))
            step, found = jax.jit(optimizer.update_and_apply), params
            for _ in range(2):
                found, state = step(grads, state, found)
            return [np.asarray(one) for one in found]

        with jax.enable_x64(False):
            found = run("custom_call")
            with jax.default_device(jax.devices("cpu")[0]):
                wanted = run("reference")
        hold(found, [one.astype(np.float64) for one in wanted], max(OFF[self.dtype], 1e-4))


def program_cases() -> Iterator[Case]:
    """Recurrences whose last chunk is not full, with shared heads too, and optimizers."""
    for dtype in (one for one in DTYPES if one != "f16"):
        for shape in [(1, 150, 1, 8, 64, 64), (1, 300, 2, 2, 128, 128)]:
            # Linear attention has kernels for bf16 alone.
            names = ["linear_attention"] * (dtype == "bf16") + ["gated_delta_rule"]
            yield from (Recurrence(name, dtype, shape) for name in names)
        yield EightBits("adamw_8bit", dtype)


@dataclass(frozen=True)
class Plain(Case):
    """A call of a target that no case above has, compared with its kernel for CPUs."""

    dtype: str
    # The extent of every named axis.
    extent: int
    attributes: tuple[tuple[str, Any], ...]

    def run(self, rng: np.random.Generator) -> None:
        """Compares results with those of the CPU."""
        one, values = declared(f"xentile_{self.target}"), dict(self.attributes)
        arrays = {array["name"]: array for array in one.declared["operands"]}
        operands = []
        for array in arrays.values():
            given = array["given"]
            if given != "always" and not values[given["where"]]:
                continue
            (dims,) = one.dims(array["name"], **values)
            shape = [
                2 if axis == "*batch" else int(axis) if axis.isdigit() else self.extent
                for axis in dims.split()
            ]
            if array["dtype"] == ["s32"]:
                operands.append(np.sort(rng.integers(0, 4, shape)).astype(np.int32))
            else:
                operands.append(rng.normal(size=shape).astype(DTYPES[self.dtype]))
        found = call(self.target, operands, values)
        with jax.default_device(jax.devices("cpu")[0]):
            wanted = call(self.target, operands, values)
        hold(found, [one.astype(np.float64) for one in wanted], OFF[self.dtype])


def plain_cases(known: Sequence[Case]) -> Iterator[Plain]:
    """Every target for both platforms whose attributes are flags and lists of numbers.

    Each number has a call with all flags and one with none, rows of whole vectors and others.
    """
    own = tuple(f"xentile_{case.target}" for case in known)
    for name, one in every().items():
        attributes = one.declared["attributes"]
        flags = [each["name"] for each in attributes if each["type"] == "bool"]
        lists = {
            each["name"]: each["range"]
            for each in attributes
            if each["type"] == "s64" and isinstance(each["range"], list)
        }
        is_plain = len(lists) + len(flags) == len(attributes) and all(
            set(array["dtype"]) <= {*DTYPES, "s32"} for array in one.declared["operands"]
        )
        if not is_plain or name.startswith(own) or not all(one.declared["handlers"].values()):
            continue
        for dtype in DTYPES:
            for numbers in product(*lists.values()):
                for is_set in (False, True):
                    values = (*zip(lists, numbers, strict=True), *((key, is_set) for key in flags))
                    for extent in (152, 149):
                        yield Plain(name.removeprefix("xentile_"), dtype, extent, values)


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
    jax.config.update("jax_platforms", f"{arguments.platform},cpu")
    jax.config.update("jax_enable_x64", True)
    library = pallas_bridge.info().library
    if library is None or arguments.platform not in library.platforms:
        print(f"sanitize: error: no kernels for {arguments.platform}:\n{pallas_bridge.info()}")
        return 2
    print(f"seed: --seed {arguments.seed} repeats")
    rng = np.random.default_rng(arguments.seed)
    passed = 0
    known: list[Case] = [
        *loss_cases(arguments.quick),
        *norm_cases(arguments.quick),
        *rotation_cases(arguments.quick),
        *heads_cases(arguments.quick),
        *quantization_cases(arguments.quick),
        *fused_cases(),
        *attention_cases(arguments.quick),
        *linear_cases(),
    ]
    if arguments.platform == "cuda":
        known += decoding_cases()
        known += divergence_cases()
        known += program_cases()
    known += plain_cases(known)
    if arguments.no_products:
        known = [case for case in known if not case.has_products]
    if arguments.no_bulk_stores:
        known = [case for case in known if not case.is_in_bulk]
    ran = [case for case in known if arguments.only in str(case)]
    if not ran:
        print(f"sanitize: error: no case has {arguments.only!r} in its name")
        return 2
    for case in ran:
        try:
            case.run(rng)
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
