"""Where a program is for NVIDIA's GPUs: one call of the library's for all chunks.

Its products are cuBLASLt's, which add to what is there, read a slice of the weight where it lies
and write one of its gradient in its place; under a loop of XLA's each of those is a copy.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import library
from ..compat import varying_like
from ..cross_entropy.custom_call import attributes
from ..cross_entropy.options import Options
from . import two_passes
from .plan import MIB, STEP, Plan, Problem

# What products have to work in: so much beyond the budget, as numbers of a token are, and up to so
# much of what a plan leaves of it.
WORKSPACE, MOST_WORKSPACE = 4 * MIB, 32 * MIB
SLACK = WORKSPACE + MIB
# A second's products and bytes, tiles that run at a time and their extents, and seconds from a
# product's end to the next: of an H200, and only to weigh one plan against another.
FLOPS, FLOPS_F32, BYTES = 8e14, 5e13, 4e12
TILES, TILE, SPLIT, LAUNCH = 132, (128, 256), 0.8, 3e-6
LEAST = 128

# The calls, by the name of the pass that follows.
TARGET = "xentile_linear_cross_entropy"

Extents = tuple[int, int]


@dataclass(frozen=True)
class Cut:
    """A way to cut a problem: chunks of tokens and columns."""

    chunk: Extents
    products: int
    # Where dhidden and dweight are swept for one after the other: the chunks of the second sweep.
    apart: Extents | None = None

    def scratch(self, problem: Problem) -> int:
        """What it holds, as crates/xentile-cuda/src/linear_cross_entropy.rs divides it."""
        numbers = WORKSPACE + 32 * problem.tokens + 4096
        if self.apart is None:
            of_hidden = self._sums(problem, problem.tokens, self.chunk[1] < problem.vocab)
            of_weight = self._sums(problem, self.chunk[1], self.chunk[0] < problem.tokens)
            of_hidden = 0 if self.products == 3 else of_hidden
            return numbers + _logits(problem, self.chunk) + of_hidden + of_weight
        first = _logits(problem, self.chunk) + self._sums(problem, self.chunk[0], True)
        second = _logits(problem, self.apart) + self._sums(problem, self.apart[1], True)
        return numbers + max(first, second)

    @staticmethod
    def _sums(problem: Problem, rows: int, are_needed: bool) -> int:
        return 4 * problem.hidden * rows if are_needed and problem.hidden_bytes < 4 else 0

    def seconds(self, problem: Problem) -> float:
        """What it may take."""
        if self.products == 3:
            return _sweep(problem, self.chunk, 2, (True, True))
        forward = _sweep(problem, self.chunk, 1, (False, False))
        if self.apart is None:
            return forward + _sweep(problem, self.chunk, 2, (True, True))
        hidden = _sweep(problem, self.chunk, 2, (True, False))
        return forward + hidden + _sweep(problem, self.apart, 2, (False, True))


def _logits(problem: Problem, chunk: Extents) -> int:
    """Bytes of a chunk of logits, whose rows are whole lines."""
    tokens, columns = chunk
    line = 128 // problem.hidden_bytes
    return tokens * math.ceil(columns / line) * line * problem.hidden_bytes


def _sweep(problem: Problem, chunk: Extents, passes: int, gradients: tuple[bool, bool]) -> float:
    """Seconds of logits, so many passes over them, and the gradients of hidden and weight."""
    # Parts of sums need a place; beside small chunks there is little.
    splits = _logits(problem, chunk) > 2 * MOST_WORKSPACE
    n, d, v = problem.tokens, problem.hidden, problem.vocab
    tokens, columns = chunk
    of_hidden, of_weight = gradients
    rows, parts = math.ceil(n / tokens), math.ceil(v / columns)
    flops = FLOPS if problem.hidden_bytes < 4 else FLOPS_F32

    def product(m: int, n: int, k: int) -> float:
        waves = math.ceil(m / TILE[0]) * math.ceil(n / TILE[1]) / TILES
        # Where tiles are few, long sums are cut among what they leave idle, at some loss.
        few = min(1.0, waves / SPLIT) if splits else 1.0
        waves = math.ceil(waves) if waves > 1 else few
        return waves * TILES * TILE[0] * TILE[1] * 2 * k / flops + LAUNCH

    each = product(tokens, columns, d)
    each += of_hidden * product(tokens, d, columns) + of_weight * product(columns, d, tokens)
    moved = passes * problem.hidden_bytes * n * v
    moved += 8 * n * d * parts * (of_hidden and parts > 1)
    moved += 8 * v * d * rows * (of_weight and rows > 1)
    return rows * parts * each + moved / BYTES


@lru_cache
def choose(problem: Problem, limit: int) -> Plan | None:
    """Returns the plan that may be fastest of those that fit; None where the library has none."""
    if problem.bias or 0 in (problem.tokens, problem.hidden, problem.vocab):
        return None
    fitting = [cut for cut in _cuts(problem) if cut.scratch(problem) <= limit + SLACK]
    fitting += _two_sweeps(problem, limit)
    if not fitting:
        return None
    cut = min(fitting, key=lambda cut: cut.seconds(problem))
    scratch = cut.scratch(problem)
    scratch += min(max(limit - scratch, 0), MOST_WORKSPACE - WORKSPACE) // 256 * 256
    return Plan("library", *cut.chunk, cut.products, scratch, limit, cut.apart)


def _cuts(problem: Problem) -> Iterator[Cut]:
    for tokens in _extents(problem.tokens):
        if problem.reduced:
            yield Cut((tokens, problem.vocab), 3)
        for columns in _extents(problem.vocab):
            yield Cut((tokens, columns), 4)


def _two_sweeps(problem: Problem, limit: int) -> Iterator[Cut]:
    """The best chunks of either sweep, which know nothing of each other."""

    def best(gradients: tuple[bool, bool]) -> Extents | None:
        both = [(n, v) for n in _extents(problem.tokens) for v in _extents(problem.vocab)]
        side = 0 if gradients[0] else 1

        def fits(chunk: Extents) -> bool:
            sums = 4 * problem.hidden * chunk[side]
            return _logits(problem, chunk) + sums + 32 * problem.tokens + 4096 <= limit + MIB

        fitting = [chunk for chunk in both if fits(chunk)]
        return min(fitting, key=lambda chunk: _sweep(problem, chunk, 2, gradients), default=None)

    hidden, weight = best((True, False)), best((False, True))
    if hidden is None or weight is None:
        return
    cut = Cut(hidden, 5, weight)
    if cut.scratch(problem) <= limit + SLACK:
        yield cut


@lru_cache
def _extents(total: int) -> tuple[int, ...]:
    """Chunks that cut `total` evenly, but for steps."""
    found, count = [total], 2
    while found[-1] > LEAST:
        chunk = math.ceil(math.ceil(total / count) / STEP) * STEP
        if chunk < found[-1]:
            found.append(chunk)
        count += max(1, count // 8)
    return tuple(found)


def has_library() -> bool:
    """Whether the library is there and has the calls; where not, lowering the others says why."""
    outcome = library.attempt()
    if isinstance(outcome, library.LibraryError):
        return False
    return any(target.target == f"{TARGET}_fused" for target in outcome[1].targets)


def run(name: str, options: Options, vocab_axis: int, plan: Plan, *operands: Any) -> Any:
    """Makes the pass `name` of `schedules.Schedule` of hidden, weight, no bias, labels and more."""
    call = partial(_call, options, vocab_axis, plan)
    if name != "fused" or plan.products == 3:
        return call(name, *operands)
    return two_passes.fused(partial(call, "forward"), partial(call, "backward"), *operands)


def _call(options: Options, vocab_axis: int, plan: Plan, name: str, *operands: Any) -> Any:
    hidden, weight, _, labels, *others = operands
    flat = [hidden, weight, labels, *jax.tree.leaves(others)]
    per_token = varying_like(hidden, labels.shape, jnp.dtype(jnp.float32))
    gradients = [varying_like(hidden, x.shape, x.dtype) for x in (hidden, weight)]
    results = {
        "forward": [per_token] * 4,
        "backward": gradients,
        "fused": [per_token] * 3 + gradients,
    }[name]
    scratch = varying_like(hidden, (plan.scratch_bytes,), jnp.dtype(jnp.uint8))
    call = jax.ffi.ffi_call(f"{TARGET}_{name}", [*results, scratch], vmap_method="sequential")
    every_token = None if name == "backward" else options.every_token
    cut = {
        "vocab_axis": np.int64(vocab_axis),
        "chunk_tokens": np.int64(plan.tokens),
        "chunk_columns": np.int64(plan.columns),
    }
    problem = Problem.of(hidden, weight, vocab_axis, bias=False, reduced=False)
    chosen = Cut((plan.tokens, plan.columns), plan.products, plan.apart)
    workspace = WORKSPACE + plan.scratch_bytes - chosen.scratch(problem)
    cut["workspace_bytes"] = np.int64(workspace)
    if plan.apart is not None:
        tokens, columns = plan.apart
        cut |= {"apart_tokens": np.int64(tokens), "apart_columns": np.int64(columns)}
    *found, _ = call(*flat, **dict(attributes(options, every_token)), **cut)
    if name == "forward":
        return tuple(found)
    *numbers, of_hidden, of_weight = found
    made = (of_hidden, of_weight, None)
    return made if name == "backward" else (*numbers, made)
