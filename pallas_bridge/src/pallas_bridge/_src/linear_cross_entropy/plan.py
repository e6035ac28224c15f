"""Plans chunks: how many tokens and columns of the logits are computed at a time.

`plan_chunks` decides it for programs of XLA's, by the budget `max_scratch_bytes`; the library for
its own calls (`library_plan`).
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax.numpy as jnp

from ..chunk_loops import even_chunk, held_extent
from ..device_memory import DeviceMemory
from ..logits_gemms import BLOCK, operand_dtype
from ..losses.options import LINE

MIB = 2**20
# Tokens of a chunk that keep matrix units busy: the default, and the least that is worth an
# accumulator the size of the weight.
USUAL_TOKENS, LEAST_TOKENS = 4096, 256
# Tokens of every chunk of a batch-invariant loss: about as few as keep an H200 from waiting for the
# weight and the sums of its gradient.
INVARIANT_TOKENS = 512
# Chunks are multiples of this where they can be, for matrix units.
STEP = 128
# Where no budget is given, calls of the library's may take this much of any GPU.
LEAST_BUDGET = 256 * MIB
# Hidden states [N, D] whose gradient has too few tiles for a large GPU, and bytes of workspace that
# its GEMM then takes: 0.56 of the time of one that is not split at 1024 x 2048 x 128256 on an H200.
FEW_HIDDEN, SPLIT_WORKSPACE = 2**22, 32 * MIB


@dataclass(frozen=True)
class Problem:
    """The shapes and dtypes of a loss; bytes are of one element of an array as it is given."""

    tokens: int
    hidden: int
    vocab: int
    hidden_bytes: int
    weight_bytes: int
    bias: bool
    # Whether tokens' cotangents are known but for one factor, as of a mean: then the forward pass
    # computes the gradients, and the backward pass multiplies them by it.
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
            # In float16 gradients of a mean underflow: they wait for the cotangent.
            reduced=reduced and operand_dtype(hidden, weight) != jnp.float16,
            vocab_is_last=vocab_axis == 1,
            running=running,
        )

    @property
    def operand_bytes(self) -> int:
        """Bytes of an element of GEMM operands, which is that of the narrower array."""
        return min(self.hidden_bytes, self.weight_bytes)

    @property
    def narrowed_bytes(self) -> int:
        """Bytes of the wider array in the dtype of the other."""
        operand = self.hidden * self.operand_bytes
        if self.hidden_bytes > self.operand_bytes:
            return self.tokens * operand
        return self.vocab * operand if self.weight_bytes > self.operand_bytes else 0

    @property
    def products(self) -> int:
        """GEMMs of chunks of tokens."""
        return 3 if self.reduced else 4

    @property
    def row_bytes(self) -> int:
        """Bytes of a token's logits in f32, and of their gradient as an operand.

        A gradient in f32 takes the place of logits, except with a bias, where XLA's CPU has both.
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
    # GEMMs of the size of the logits' own, forward and backward: 3 is the least.
    products: float
    # Bytes beyond operands and results, at most.
    scratch_bytes: int
    max_scratch_bytes: int
    # Tokens and columns of a chunk of dweight, where the library has a separate sweep for dhidden.
    dweight_chunk: tuple[int, int] | None = None
    # Columns whose logits the library saves in the memory of dweight, and those of a slot there.
    saved_columns: tuple[int, int] | None = None
    # Tokens of a chunk, and columns: of so many first columns the library computes logits and their
    # gradient in a single pass, in chunks of these tokens. The others follow in chunks of `tokens`
    # and `columns`.
    single_pass: tuple[int, int] | None = None
    # Whether the library writes logits of 16-bit operands to memory in f32.
    f32_logits: bool = False
    # Whether the forward pass saves logits, and its scratch, for a backward pass in another call.
    saves_logits: bool = False
    # Whether every chunk has so many tokens, the last of them padded.
    batch_invariant: bool = False
    # Bytes that each kernel on TPUs moves between HBM and VMEM, by its name.
    moved: tuple[tuple[str, int], ...] = ()
    # Whether the number of tokens is symbolic: every chunk has so many, the last of them padded,
    # and scratch is what does not grow with them.
    any_count: bool = False
    # What each device of a mesh holds for loss and gradients, where arrays are placed on one.
    memory: DeviceMemory | None = None

    def __str__(self) -> str:
        """The schedule, what it costs and what it takes."""
        pairs = self.single_pass, self.dweight_chunk, self.saved_columns
        single, separate, saved = (one or (0, 0) for one in pairs)
        is_by_xla = self.batch_invariant and not self.any_count and self.columns % LINE != 0
        parts = {
            f" after {single[1]} columns in a single pass, {single[0]} tokens at a time": pairs[0],
            f", {separate[0]} x {separate[1]} for dweight": pairs[1],
            f", logits of {saved[0]} columns saved in dweight's memory": pairs[2],
            ", f32 logits in memory": self.f32_logits,
            ", logits saved for the backward pass": self.saves_logits,
            ", the last chunk padded": self.is_padded,
            ", on GPUs rows of logits by XLA": is_by_xla,
            ", for any number of tokens": self.any_count,
        }
        how = "".join(text for text, is_so in parts.items() if is_so)
        scratch, most = self.scratch_bytes / MIB, self.max_scratch_bytes / MIB
        return (
            f"{self.schedule}: {self.tokens} tokens x {self.columns} columns at a time{how}, "
            f"{self.products:.3g} products, {scratch:.1f} MiB of scratch (at most {most:.1f})"
            f"{self.memory or ''}"
        )

    @property
    def is_padded(self) -> bool:
        """Whether the last chunk is padded."""
        return self.batch_invariant or self.any_count


def plan_chunks(problem: Problem, max_scratch_bytes: int | None, *, isolated: bool) -> Plan:
    """Returns the plan of the fewest GEMMs that fits; `isolated` for a batch-invariant loss.

    `max_scratch_bytes` None stands for what chunks of 4096 tokens take.

    Raises:
        ValueError: nothing fits, and what would.
    """
    if isolated or not isinstance(problem.tokens, int):
        return plan_padded(problem, max_scratch_bytes, isolated=isolated)
    limit = max_scratch_bytes
    if limit is None:
        limit = token_chunk_scratch(problem, min(USUAL_TOKENS, problem.tokens))
    fitting = _plan_tokens(problem, limit) or _plan_columns(problem, limit)
    return fitting or _plan_fitting_tiles(problem, limit)


def plan_padded(problem: Problem, max_scratch_bytes: int | None, *, isolated: bool) -> Plan:
    """Returns the plan of the fewest GEMMs that fits, of chunks of one size, the last one padded.

    For a symbolic number of tokens, the budget is for what does not grow with it.

    Raises:
        ValueError: nothing fits, and what would.
    """
    any_count = not isinstance(problem.tokens, int)

    def scratch_bytes(tokens: int) -> int:
        if any_count:
            return _fixed_scratch(problem, tokens)
        padded = dataclasses.replace(problem, tokens=-(-problem.tokens // tokens) * tokens)
        # Hidden states with padding, and their gradient.
        rows = 0 if padded == problem else 2 * padded.tokens
        return token_chunk_scratch(padded, tokens) + rows * problem.hidden * problem.hidden_bytes

    usual = scratch_bytes(INVARIANT_TOKENS)
    limit = usual if max_scratch_bytes is None else max_scratch_bytes
    for tokens in (INVARIANT_TOKENS,) if isolated else (INVARIANT_TOKENS, LEAST_TOKENS):
        if (scratch := scratch_bytes(tokens)) <= limit:
            plan = Plan("tokens", tokens, problem.vocab, problem.products, scratch, limit)
            return dataclasses.replace(plan, batch_invariant=isolated, any_count=any_count)
    if not isolated:
        return _plan_fitting_tiles(problem, limit)
    raise ValueError(
        f"max_scratch_bytes is {limit}; batch_invariant takes chunks of {INVARIANT_TOKENS} tokens, "
        f"and {usual} for {problem.tokens} tokens, {problem.hidden} hidden columns and a "
        f"vocabulary of {problem.vocab}"
    )


def _fixed_scratch(problem: Problem, tokens: int, columns: int | None = None) -> int:
    """Returns bytes of chunks of so many tokens and columns, but for what grows with all tokens.

    `columns` is None for chunks of the whole vocabulary, which have sums of the weight's gradient.
    """
    several = dataclasses.replace(problem, tokens=2 * tokens)
    growing = token_bytes(several)
    if columns is not None:
        return _tile_scratch(several, tokens, columns) - growing
    # Without kernels XLA holds logits in f32 twice, and their gradient and a block of its columns.
    row = problem.vocab * (8 + problem.operand_bytes) + 4 * min(BLOCK, problem.vocab)
    return token_chunk_scratch(several, tokens) - growing + tokens * (row - problem.row_bytes)


def plan_output_chunk(plan: Plan, tokens: Any, vocab: int) -> int:
    """Returns the tokens of a chunk whose logits have auxiliary outputs, of `tokens` in all.

    `plan` is that of the loss alone.
    """
    if plan.batch_invariant:
        return plan.tokens
    chunk = max(min(plan.tokens, USUAL_TOKENS), 1)
    if plan.schedule != "tokens":
        # The budget is too small for sums of dweight, which are made nevertheless.
        row_bytes = (12 if plan.any_count else 8) * vocab
        chunk = max(plan.max_scratch_bytes // row_bytes, 1)
    return min(chunk, plan.tokens if plan.any_count else max(tokens, 1))


def usual_budget(problem: Problem) -> int:
    """Returns the default budget where a call of the library's holds logits of 16 bits.

    That is logits of 4096 tokens as operands with what lies beside them, what is narrowed, and
    sums of the weight's gradient; for few hidden states, whose gradient's GEMM is split along V,
    its sums and workspace; and at least `LEAST_BUDGET`.
    """
    tokens = min(USUAL_TOKENS, problem.tokens)
    logits = tokens * problem.vocab * problem.operand_bytes
    beside = problem.tokens * problem.vocab // 128 + problem.narrowed_bytes
    usual = logits + beside + _weight_sum_bytes(problem, tokens) + token_bytes(problem)
    if problem.tokens * problem.hidden < FEW_HIDDEN:
        usual += 4 * problem.tokens * problem.hidden + SPLIT_WORKSPACE
    return max(usual, LEAST_BUDGET)


def without_kernels(problem: Problem, plan: Plan) -> Plan:
    """Returns `plan`, or one in its budget that takes no kernels over logits."""
    if plan.schedule != "tokens":
        return plan
    limit = plan.max_scratch_bytes
    by_columns = None if plan.any_count else _plan_columns(problem, limit)
    return by_columns or _plan_tiles(problem, limit)


def token_bytes(problem: Problem) -> int:
    """Returns bytes of scalars of all tokens: losses, logps, lse, lse_low, cotangents."""
    return 32 * problem.tokens


def token_chunk_scratch(problem: Problem, tokens: int) -> int:
    """Returns bytes of chunks of so many tokens: logits, and sums of dweight in f32."""
    # Hidden states are narrowed by chunks.
    narrowed = problem.narrowed_bytes if problem.weight_bytes > problem.operand_bytes else 0
    held = held_extent(problem.tokens, tokens) * (
        problem.row_bytes + _hidden_row_bytes(problem, tokens)
    )
    return held + narrowed + _weight_sum_bytes(problem, tokens) + token_bytes(problem)


def _hidden_row_bytes(problem: Problem, tokens: int) -> int:
    """Returns bytes of a token beside its logits, in chunks of so many tokens.

    They are of its hidden state with masked tokens zeroed and, unless one chunk holds all, of its
    hidden state and dhidden.
    """
    operand = problem.hidden * problem.operand_bytes
    if tokens < problem.tokens:
        return 2 * operand + problem.hidden * problem.hidden_bytes
    return operand * (1 if problem.hidden_bytes == problem.operand_bytes else 2)


def _weight_sum_bytes(problem: Problem, tokens: int) -> int:
    if tokens >= problem.tokens:
        return 0
    sums = 4 * problem.vocab * problem.hidden if problem.weight_bytes < 4 else 0
    return sums + (4 * problem.vocab if problem.bias else 0)


def _tile_scratch(problem: Problem, tokens: int, columns: int) -> int:
    """Returns bytes of tiles: logits in f32, their gradient, and sums of gradients in f32.

    And hidden states with masked tokens zeroed.
    """
    whole = tokens == problem.tokens and columns == problem.vocab
    sums = 0 if whole else 4 * tokens * problem.hidden
    if tokens < problem.tokens:
        sums = max(sums, 4 * columns * problem.hidden)
    held = held_extent(problem.tokens, tokens) * held_extent(problem.vocab, columns)
    held *= 4 + problem.operand_bytes
    return held + tokens * problem.hidden * problem.operand_bytes + sums + token_bytes(problem)


def _plan_tokens(problem: Problem, limit: int) -> Plan | None:
    chunk = problem.tokens
    if token_chunk_scratch(problem, chunk) > limit:
        row_bytes = problem.row_bytes + _hidden_row_bytes(problem, 0)
        most = (limit - token_chunk_scratch(problem, 0)) // row_bytes
        if most < LEAST_TOKENS:
            return None
        chunk = even_chunk(problem.tokens, most, STEP)
        if chunk < min(LEAST_TOKENS, problem.tokens) or token_chunk_scratch(problem, chunk) > limit:
            return None
    scratch = token_chunk_scratch(problem, chunk)
    return Plan("tokens", max(chunk, 1), problem.vocab, problem.products, scratch, limit)


def _plan_columns(problem: Problem, limit: int) -> Plan | None:
    tokens = problem.tokens
    column = tokens * (4 + problem.operand_bytes)
    most = (limit - _tile_scratch(problem, tokens, 0)) // max(column, 1)
    columns = even_chunk(problem.vocab, max(most, STEP), STEP)
    scratch = _tile_scratch(problem, tokens, columns)
    if scratch > limit:
        return None
    return Plan("vocabulary", max(tokens, 1), columns, 4, scratch, limit)


def _plan_tiles(problem: Problem, limit: int) -> Plan:
    """Returns the plan of the largest tiles that fit, of the smallest where none do."""
    any_count = not isinstance(problem.tokens, int)
    scratch_bytes = partial(_fixed_scratch if any_count else _tile_scratch, problem)
    most = INVARIANT_TOKENS if any_count else problem.tokens, problem.vocab
    tile = min(STEP, most[0]), min(STEP, most[1])
    # Squares reread the fewest bytes for their arithmetic.
    while (wider := (min(tile[0] * 2, most[0]), min(tile[1] * 2, most[1]))) != tile:
        if scratch_bytes(*wider) > limit:
            break
        tile = wider
    fixed = max(tile[0], 1), tile[1], 5, scratch_bytes(*tile), limit
    return Plan("both", *fixed, any_count=any_count)


def _plan_fitting_tiles(problem: Problem, limit: int) -> Plan:
    plan = _plan_tiles(problem, limit)
    if plan.scratch_bytes > limit:
        tokens = "any number of" if plan.any_count else problem.tokens
        raise ValueError(
            f"max_scratch_bytes is {limit}; the least for {tokens} tokens, {problem.hidden} hidden "
            f"columns and a vocabulary of {problem.vocab} is {plan.scratch_bytes}"
        )
    return plan
