"""How a linear cross-entropy is cut into pieces that fit the memory it may take."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp

from ..cross_entropy.options import LINE
from .chunks import BLOCK, operand_dtype

MIB = 2**20
# Tokens of a chunk that keep matrix units busy: what is asked for by default, and the least that
# is worth an accumulator the size of the weight.
USUAL_TOKENS, LEAST_TOKENS = 4096, 256
# Tokens of every chunk of a loss that is to be batch-invariant, be there one: about as few as keep
# an H200 from waiting for the weight and the sums of its gradient.
INVARIANT_TOKENS = 512
# Chunks are multiples of this where they can be, which matrix units like.
STEP = 128
# Where no budget is given, calls of the library's may take this much of any GPU.
LEAST_BUDGET = 256 * MIB


@dataclass(frozen=True)
class Problem:
    """What is planned for; bytes are those of one element of an array as it is given."""

    tokens: int
    hidden: int
    vocab: int
    hidden_bytes: int
    weight_bytes: int
    bias: bool
    # Whether cotangents of tokens are known, but for one factor, before the backward pass.
    reduced: bool
    # Whether the weight is [D, V] rather than [V, D].
    vocab_is_last: bool = False
    # Whether the weight's gradient is added to sums in f32 that are there.
    running: bool = False

    @classmethod
    def of(
        cls, operands: Sequence[Any], vocab_axis: int, *, reduced: bool, running: bool = False
    ) -> "Problem":
        """For hidden [.., D], a weight whose axis `vocab_axis` is V, and a bias or None."""
        hidden, weight, bias, *_ = operands
        *leading, width = hidden.shape
        return cls(
            tokens=math.prod(leading),
            hidden=width,
            vocab=weight.shape[vocab_axis],
            hidden_bytes=hidden.dtype.itemsize,
            weight_bytes=weight.dtype.itemsize,
            bias=bias is not None,
            # The gradient of a mean is below what float16 holds: as for logits.
            reduced=reduced and operand_dtype(hidden, weight) != jnp.float16,
            vocab_is_last=vocab_axis == 1,
            running=running,
        )

    @property
    def operand_bytes(self) -> int:
        """Bytes of an element as products take it, which is that of the narrower array."""
        return min(self.hidden_bytes, self.weight_bytes)

    @property
    def narrowed_bytes(self) -> int:
        """What the wider array takes in the dtype of the other."""
        operand = self.hidden * self.operand_bytes
        if self.hidden_bytes > self.operand_bytes:
            return self.tokens * operand
        return self.vocab * operand if self.weight_bytes > self.operand_bytes else 0

    @property
    def row_bytes(self) -> int:
        """What a token's logits take in f32, and beside them their gradient as an operand.

        Where that is f32 too it lies in their place, but for a bias: then XLA's CPU has both.
        """
        beside = self.operand_bytes if self.operand_bytes < 4 or self.bias else 0
        return self.vocab * (4 + beside)


@dataclass(frozen=True)
class Plan:
    """A schedule and its chunks; as text, a line for a reader."""

    # "tokens": all columns of a chunk of tokens at a time; "vocabulary": all tokens of a chunk of
    # columns; "both": chunks of both, and every gradient in a sweep of its own; "kernels": tiles of
    # both in kernels, which on TPUs hold them outside of HBM; "library": chunks of either, all in
    # one call of the library's.
    schedule: Literal["tokens", "vocabulary", "both", "kernels", "library"]
    # Tokens and columns of a chunk.
    tokens: int
    columns: int
    # Products of the size of the logits' own, forward and backward: 3 is the least.
    products: float
    # What it holds beyond its operands and results, at most.
    scratch_bytes: int
    max_scratch_bytes: int
    # Tokens and columns of the library's second sweep, where it makes dhidden and dweight apart.
    apart: tuple[int, int] | None = None
    # Columns whose logits the library keeps in the memory of dweight, and those of a slot there.
    kept: tuple[int, int] | None = None
    # The first columns, whose logits the library makes once, and the tokens of their chunks.
    once: tuple[int, int] | None = None
    # Whether the library's logits of 16-bit operands go through memory, in f32.
    wide: bool = False
    # Whether it keeps logits for a backward pass in a call of its own, and its scratch meanwhile.
    hands_over: bool = False
    # Whether every chunk has so many tokens, the last of them padded.
    batch_invariant: bool = False
    # Bytes that each kernel on TPUs moves between HBM and VMEM, by its name.
    moved: tuple[tuple[str, int], ...] = ()
    # Whether it holds for any number of tokens, as of a symbolic shape: every chunk has so many,
    # the last of them padded, and scratch is what does not grow with them.
    any_count: bool = False

    def __str__(self) -> str:
        """The schedule, what it costs and what it takes."""
        second = "" if self.apart is None else f", {self.apart[0]} x {self.apart[1]} for dweight"
        kept = "" if self.kept is None else f", {self.kept[0]} columns kept in dweight's place"
        once = ""
        if self.once is not None:
            once = f" after {self.once[1]} columns made once, {self.once[0]} tokens at a time"
        wide = ", logits through memory in f32" if self.wide else ""
        over = ", logits handed to the backward pass" if self.hands_over else ""
        padded = ", the last chunk padded" if self.batch_invariant else ""
        if self.batch_invariant and self.columns % LINE:
            padded += ", on GPUs rows of logits by XLA"
        if self.any_count:
            padded = ", the last chunk padded, for any number of tokens"
        scratch, most = self.scratch_bytes / MIB, self.max_scratch_bytes / MIB
        return (
            f"{self.schedule}: {self.tokens} tokens x {self.columns} columns at a time"
            f"{once}{second}{kept}{wide}{over}{padded}, {self.products:.3g} products, "
            f"{scratch:.1f} MiB of scratch (at most {most:.1f})"
        )


def plan_chunks(problem: Problem, max_scratch_bytes: int | None) -> Plan:
    """Returns the plan of the fewest products that fits.

    `max_scratch_bytes` None stands for what chunks of 4096 tokens take.

    Raises:
        ValueError: nothing fits, and what would.
    """
    limit = max_scratch_bytes
    if limit is None:
        limit = by_tokens(problem, min(USUAL_TOKENS, problem.tokens))
    for fitting in (_tokens(problem, limit), _vocabulary(problem, limit), _both(problem, limit)):
        if fitting is not None:
            return fitting
    raise ValueError(
        f"max_scratch_bytes is {limit}; the least for {problem.tokens} tokens, {problem.hidden} "
        f"hidden columns and a vocabulary of {problem.vocab} is {_least(problem)}"
    )


def plan_equal_chunks(problem: Problem, max_scratch_bytes: int | None) -> Plan:
    """Returns the plan whose products have one shape, however many tokens there are.

    Raises:
        ValueError: a budget below what it takes.
    """
    tokens = INVARIANT_TOKENS
    is_known = isinstance(problem.tokens, int)
    if is_known:
        padded = dataclasses.replace(problem, tokens=-(-problem.tokens // tokens) * tokens)
        scratch = by_tokens(padded, tokens)
        if padded != problem:
            # Hidden states with rows that none of the tokens has, and their gradient.
            scratch += 2 * padded.tokens * problem.hidden * problem.hidden_bytes
    else:
        scratch = _constant(problem, tokens)
    limit = scratch if max_scratch_bytes is None else max_scratch_bytes
    if scratch > limit:
        raise ValueError(
            f"max_scratch_bytes is {limit}; batch_invariant takes chunks of {tokens} tokens, and "
            f"{scratch} for {problem.tokens} tokens, {problem.hidden} hidden columns and a "
            f"vocabulary of {problem.vocab}"
        )
    products = 3 if problem.reduced else 4
    plan = Plan("tokens", tokens, problem.vocab, products, scratch, limit, batch_invariant=True)
    return plan if is_known else dataclasses.replace(plan, any_count=True)


def plan_symbolic(problem: Problem, max_scratch_bytes: int | None) -> Plan:
    """Returns the plan of the fewest products that fits, for tokens whose number is not known.

    The budget is for what does not grow with it. A chunk has few tokens, as the last is padded.

    Raises:
        ValueError: nothing fits, and what would.
    """
    tokens = INVARIANT_TOKENS
    limit = _constant(problem, tokens) if max_scratch_bytes is None else max_scratch_bytes
    while tokens >= LEAST_TOKENS:
        scratch = _constant(problem, tokens)
        if scratch <= limit:
            products = 3 if problem.reduced else 4
            return Plan("tokens", tokens, problem.vocab, products, scratch, limit, any_count=True)
        tokens //= 2
    fitting = _both_of_any_count(problem, limit)
    if fitting.scratch_bytes <= limit:
        return fitting
    raise ValueError(
        f"max_scratch_bytes is {limit}; the least for any number of tokens, {problem.hidden} "
        f"hidden columns and a vocabulary of {problem.vocab} is {fitting.scratch_bytes}"
    )


def output_chunk_tokens(plan: Plan, tokens: Any, vocab: int) -> int:
    """Returns how many tokens a chunk has whose logits have auxiliary outputs."""
    if plan.batch_invariant:
        return plan.tokens
    chunk = max(min(plan.tokens, USUAL_TOKENS), 1)
    if plan.schedule != "tokens":
        # Too few bytes for sums of dweight, which are taken all the same.
        logit_bytes = 12 if plan.any_count else 8
        chunk = max(plan.max_scratch_bytes // (logit_bytes * vocab), 1)
    return min(chunk, plan.tokens if plan.any_count else max(tokens, 1))


def _constant(problem: Problem, tokens: int, columns: int | None = None) -> int:
    """Scratch of chunks of so many tokens and columns, but for what grows with all tokens.

    `columns` is None for chunks of the whole vocabulary, which have sums of the weight's gradient.
    """
    several = dataclasses.replace(problem, tokens=2 * tokens)
    if columns is None:
        # No kernel is there, and XLA holds logits in f32 twice beside their gradient, and of that
        # a block of columns.
        row = problem.vocab * (8 + problem.operand_bytes) + 4 * min(BLOCK, problem.vocab)
        beside = by_tokens(several, tokens) - _per_token(several) - tokens * problem.row_bytes
        return beside + tokens * row
    return _by_columns(several, tokens, columns) - _per_token(several)


def _both_of_any_count(problem: Problem, limit: int) -> Plan:
    """Returns the plan that takes no kernels over logits; where nothing fits, the least."""
    side = STEP, min(STEP, problem.vocab)
    while True:
        wider = min(2 * side[0], INVARIANT_TOKENS), min(2 * side[1], problem.vocab)
        if wider == side or _constant(problem, *wider) > limit:
            break
        side = wider
    return Plan("both", *side, 5, _constant(problem, *side), limit, any_count=True)


def usual_budget(problem: Problem) -> int:
    """What stands for no budget where a call of the library's holds logits of 16 bits.

    That is logits of 4096 tokens as operands with what is kept beside them, what is narrowed, and
    sums of the weight's gradient; and as much as nobody misses.
    """
    tokens = min(USUAL_TOKENS, problem.tokens)
    logits = tokens * problem.vocab * problem.operand_bytes
    beside = problem.tokens * problem.vocab // 128
    beside += problem.narrowed_bytes
    usual = logits + beside + _weight_sums(problem, tokens) + _per_token(problem)
    return max(usual, LEAST_BUDGET)


def plan_kernels(
    problem: Problem,
    plan: Plan,
    tile: tuple[int, int],
    products: int,
    sums: int,
    moved: dict[str, int],
) -> Plan:
    """Returns the plan of kernels with such a tile and bytes of sums, in the place of `plan`."""
    # Numbers of a token, in rows of as many as a register has, given and found.
    scratch = 2 * _per_token(problem) + sums + problem.narrowed_bytes
    most = plan.max_scratch_bytes
    return Plan("kernels", *tile, products, scratch, most, moved=tuple(moved.items()))


def without_kernels(problem: Problem, plan: Plan) -> Plan:
    """Returns `plan`, or one in its budget that takes no kernels over logits."""
    if plan.schedule != "tokens":
        return plan
    limit = plan.max_scratch_bytes
    if plan.any_count:
        return _both_of_any_count(problem, limit)
    fitting = _vocabulary(problem, limit) or _both(problem, limit)
    return fitting or Plan("both", *_least_side(problem), 5, _least(problem), limit)


def _per_token(problem: Problem) -> int:
    """Bytes of what is kept of each token: losses, logps, lse and its rest, cotangents."""
    return 32 * problem.tokens


def _held(total: int, chunk: int) -> int:
    """Rows or columns that have memory: XLA gives a chunk and a shorter last one each its own."""
    return chunk + total % chunk if 0 < chunk < total else chunk


def by_tokens(problem: Problem, tokens: int) -> int:
    """Scratch of chunks of so many tokens: logits, and sums of the weight's gradient in f32."""
    # Hidden states are narrowed by chunks.
    narrowed = problem.narrowed_bytes if problem.weight_bytes > problem.operand_bytes else 0
    held = _held(problem.tokens, tokens) * (problem.row_bytes + _hidden_row(problem, tokens))
    return held + narrowed + _weight_sums(problem, tokens) + _per_token(problem)


def _hidden_row(problem: Problem, tokens: int) -> int:
    """What chunks of so many tokens take beside a token's logits.

    A copy of its hidden state that is 0 where it is idle, and, unless one chunk holds all, one that
    is not, and its gradient.
    """
    operand = problem.hidden * problem.operand_bytes
    if tokens < problem.tokens:
        return 2 * operand + problem.hidden * problem.hidden_bytes
    return operand * (1 if problem.hidden_bytes == problem.operand_bytes else 2)


def _weight_sums(problem: Problem, tokens: int) -> int:
    if tokens >= problem.tokens:
        return 0
    sums = 4 * problem.vocab * problem.hidden if problem.weight_bytes < 4 else 0
    return sums + (4 * problem.vocab if problem.bias else 0)


def _by_columns(problem: Problem, tokens: int, columns: int) -> int:
    """Scratch of chunks of columns: logits in f32, their gradient, and sums of gradients in f32.

    And hidden states that are 0 where they are idle.
    """
    whole = tokens == problem.tokens and columns == problem.vocab
    sums = 0 if whole else 4 * tokens * problem.hidden
    if tokens < problem.tokens:
        sums = max(sums, 4 * columns * problem.hidden)
    held = _held(problem.tokens, tokens) * _held(problem.vocab, columns)
    held *= 4 + problem.operand_bytes
    return held + tokens * problem.hidden * problem.operand_bytes + sums + _per_token(problem)


def _even(total: int, most: int) -> int:
    """The largest of the chunks that cut `total` evenly and hold `most` at once, in steps."""
    if total <= most:
        return total
    count = -(-total // most)
    while True:
        chunk = -(-total // count)
        chunk = -(-chunk // STEP) * STEP
        if _held(total, chunk) <= most or chunk <= STEP:
            return chunk
        count += 1


def _tokens(problem: Problem, limit: int) -> Plan | None:
    products = 3 if problem.reduced else 4
    chunk = problem.tokens
    if by_tokens(problem, chunk) > limit:
        token_bytes = problem.row_bytes + _hidden_row(problem, 0)
        most = (limit - by_tokens(problem, 0)) // token_bytes
        if most < LEAST_TOKENS:
            return None
        chunk = _even(problem.tokens, most)
        if chunk < min(LEAST_TOKENS, problem.tokens) or by_tokens(problem, chunk) > limit:
            return None
    scratch = by_tokens(problem, chunk)
    return Plan("tokens", max(chunk, 1), problem.vocab, products, scratch, limit)


def _vocabulary(problem: Problem, limit: int) -> Plan | None:
    tokens = problem.tokens
    column = tokens * (4 + problem.operand_bytes)
    most = (limit - _by_columns(problem, tokens, 0)) // max(column, 1)
    columns = _even(problem.vocab, max(most, STEP))
    scratch = _by_columns(problem, tokens, columns)
    if scratch > limit:
        return None
    return Plan("vocabulary", max(tokens, 1), columns, 4, scratch, limit)


def _both(problem: Problem, limit: int) -> Plan | None:
    side = _least_side(problem)
    if _by_columns(problem, *side) > limit:
        return None
    # Squares give the most arithmetic for each byte of operands that is read again.
    while True:
        wider = min(side[0] * 2, problem.tokens), min(side[1] * 2, problem.vocab)
        if wider == side or _by_columns(problem, *wider) > limit:
            break
        side = wider
    return Plan("both", max(side[0], 1), side[1], 5, _by_columns(problem, *side), limit)


def _least_side(problem: Problem) -> tuple[int, int]:
    return min(STEP, problem.tokens), min(STEP, problem.vocab)


def _least(problem: Problem) -> int:
    return _by_columns(problem, *_least_side(problem))
