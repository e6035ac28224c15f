"""Plans the library's call on CPUs, which makes a pass of all chunks of columns.

XLA's CPU widens whole operands of 16 bits to f32 before a GEMM. The library widens a block of the
weight at a time. It saves logits, or in 16 bits their unnormalised softmax, in the memory of
dweight until their gradient is computed, which saves a GEMM in f32 too where the budget is small.
Where gradients have to wait for the backward pass, the forward pass leaves it that memory, and the
scratch.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

from .. import library
from ..losses.options import Tile
from .plan import Plan, Problem

# The table of tuned tiles, whose columns of a block are the most that gain anything.
TUNED = "linear_cross_entropy.cpu"
# Narrower blocks, where there is no room for those; the fewest make a panel.
NARROWER = (1024, 768, 512, 384, 256, 128, 64)
# A column block takes as much longer than its columns alone as so many columns would: sums of
# dhidden are read and written, and hidden states and logits are put in order.
PER_BLOCK = 32
# The fewest columns of a block whose softmax is saved in 16 bits, if there are more; as in cut.rs.
FEWEST_KEPT = 16
# The most columns that a panel of a factor has.
PANEL = 64
# What the library allocates for a token.
PER_TOKEN = 128
# What a column's bias and its gradient take in f32.
PER_BIAS = 8


def choose(
    problem: Problem, usual: Plan, tile: Tile, dtype: Any, *, hands_over: bool
) -> Plan | None:
    """Returns the plan that may be fastest of those that fit; None where XLA runs `usual`.

    A `tile` that is named is taken if blocks fit that are no wider. `hands_over` is whether a
    forward pass may leave logits to the backward pass.
    """
    tuned = library.tuned_tile(TUNED, dtype, problem.vocab)
    return None if tuned is None else _choose(problem, usual, tile, tuned[1], hands_over)


@lru_cache
def _choose(problem: Problem, usual: Plan, tile: Tile, tuned: int, hands_over: bool) -> Plan | None:
    if 0 in (problem.tokens, problem.hidden, problem.vocab):
        return None
    limit = usual.max_scratch_bytes
    _, named = tile
    most = tuned if named is None else named
    plans = []
    for columns in (most, *(columns for columns in NARROWER if columns < most)):
        chunk = min(columns, problem.vocab)
        least = _call_scratch(problem, chunk, makes_gradients=True) + _beside_bytes(problem)
        if least <= limit:
            plans.append(_plan(problem, chunk, least, limit, hands_over and not problem.reduced))
    if not plans:
        return None
    if named is not None:
        return plans[0]
    plan = min(plans, key=lambda plan: plan.products * (1 + PER_BLOCK / plan.columns))
    # GEMMs of f32 operands are as fast in XLA: there must be fewer of them.
    is_short = problem.hidden_bytes < 4
    return plan if is_short or tile != (None, None) or plan.products < usual.products else None


def _plan(problem: Problem, columns: int, least: int, limit: int, hands_over: bool) -> Plan:
    plan = Plan("library", problem.tokens, columns, 4, least, limit)
    if not (problem.reduced or hands_over) or not _keeps_logits(problem, columns):
        return plan
    column_bytes = problem.tokens * problem.hidden_bytes
    room, recomputed = (limit - least) // column_bytes, 0
    kept = 0
    for is_in_place, count in _column_blocks(problem, columns):
        if is_in_place:
            continue
        if kept + count <= room:
            kept += count
        else:
            recomputed += count
    if recomputed == problem.vocab:
        return plan
    products, scratch = 3 + recomputed / problem.vocab, least + kept * column_bytes
    return replace(plan, products=products, scratch_bytes=scratch, hands_over=hands_over)


def _keeps_logits(problem: Problem, columns: int) -> bool:
    return problem.hidden_bytes == 4 or columns >= min(FEWEST_KEPT, problem.vocab)


def _column_blocks(problem: Problem, most: int) -> Iterator[tuple[bool, int]]:
    """Yields whether each block is saved in the memory of dweight, and its columns.

    As `keeping` in crates/xentile-cpu/src/linear_cross_entropy/cut.rs.
    """
    n, d, left = problem.tokens, problem.hidden, problem.vocab
    while left > 0:
        in_place = 0 if problem.vocab_is_last else min(most, left, left * d // n)
        taken = max(-(-in_place * n // d), in_place) if in_place else left
        if in_place:
            yield True, in_place
        for start in range(in_place, taken, most):
            yield False, min(most, taken - start)
        left -= taken


def _call_scratch(problem: Problem, columns: int, *, makes_gradients: bool) -> int:
    """Returns bytes of a call's scratch, as `Layout` in that file, but for saved logits."""
    n, d = problem.tokens, problem.hidden
    weight, logits = _panel_numbers(d, columns), n * columns
    if not makes_gradients:
        return 4 * (weight + logits + 1)
    hidden_numbers = _panel_numbers(n, d)
    if problem.hidden_bytes < 4:
        hidden_numbers += n * d
        if _keeps_logits(problem, columns):
            # Labels' logits, and shifts of each column block.
            hidden_numbers += n * (1 + sum(1 for _ in _column_blocks(problem, columns)))
    return 4 * (hidden_numbers + max(weight, _panel_numbers(columns, d)) + logits + 1)


def _panel_numbers(terms: int, columns: int) -> int:
    """Returns numbers in the panels of a matrix `[terms, columns]`, as in product.rs beside it."""
    return math.ceil(columns / PANEL) * PANEL * terms


def _beside_bytes(problem: Problem) -> int:
    """Returns bytes that are held beside a call's scratch."""
    return PER_TOKEN * problem.tokens + PER_BIAS * problem.bias * problem.vocab


def plan_call(name: str, vocab_axis: int, plan: Plan, operands: Any) -> tuple[dict[str, int], int]:
    """Returns the attributes and the bytes of scratch of the library's call `name`."""
    problem = Problem.of(operands, vocab_axis, reduced=False)
    scratch = _call_scratch(problem, plan.columns, makes_gradients=name != "forward")
    if name in ("fused", "keep", "resume"):
        scratch = plan.scratch_bytes - _beside_bytes(problem)
    return {"vocab_axis": vocab_axis, "chunk_columns": plan.columns}, scratch
