"""Plans the library's call on NVIDIA GPUs, which makes a pass of all chunks.

Its GEMMs are cuBLASLt's, which add to their result, and read and write slices of the weight and of
dweight in place (in a loop of XLA's each of those is a copy). On Hopper, with a weight in 16 bits,
they are the library's own, with the cross-entropy as their epilogue.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from .plan import MIB, STEP, Plan, Problem, token_chunk_scratch

# The workspace of GEMMs: so much beyond the budget, and up to so much of what a plan leaves of it.
WORKSPACE, MOST_WORKSPACE = 4 * MIB, 32 * MIB
SLACK = WORKSPACE + MIB
# A budget below this includes the workspace, unless that takes more GEMMs: beside it the workspace
# would be large, and XLA's allocator gives a free block whole that is less than twice as large.
SMALL_BUDGET = 64 * MIB
# Bytes of a column's bias and its gradient in f32, beyond the budget too.
BIAS_BYTES = 8
# Bytes of the partial results of a token's distribution, and the most of them in a row: as `layout`
# in crates/xentile-cuda/src/fused_product.rs.
PART_BYTES, MOST_PARTS = 12, 66
# FLOP and bytes a second of an H200, only to compare plans.
FLOPS, FLOPS_F32, BYTES = 7e14, 5e13, 4e12
# Bytes of a sum in f32 that is read and written, of which a GEMM hides some.
SUM_BYTES = 5
# Cost of the softmax and dlogits epilogues, in passes over the logits; and passes over logits in
# f32 of a forward, a backward and a fused pass.
SOFTMAX_PASSES, DLOGITS_PASSES = 0.5, 1
FLOAT32_PASSES = (4, 9, 9)
# Streaming multiprocessors, a tile's extents, how full a wave of split sums is, and seconds between
# two GEMMs.
NUM_SMS, TILE, SPLIT, LAUNCH = 132, (128, 256), 0.8, 3e-6
# Kernels beside the GEMMs of a chunk, and of each slot of kept logits.
CHUNK_KERNELS, PLACE_KERNELS = 8, 3
# So few logits are left to XLA, where they fit: its programs are launched as one, and its GEMMs
# split long sums of few tiles. 1024 x 1024 x 4096 takes 0.082 ms there and 0.096 in the library,
# 2048 x 1024 x 8192 0.248 and 0.203 (NVIDIA H200, 2026-11-24).
FEW_LOGITS = 1 << 22
# Kernels of logits that pass through the workspace, forward and backward.
BLOCK_KERNELS = 5
# The least time of a GEMM, in waves.
LEAST_WAVE = 0.05
LEAST_EXTENT = 128
# Slots that logits may be kept in.
SLOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)

Extents = tuple[int, int]


@dataclass(frozen=True)
class Tiling:
    """A tiling of a problem: its chunks of tokens and columns."""

    chunk: Extents
    # Whether gradients come with the loss, in one call: then a chunk has all tokens or all columns.
    fused: bool
    # The chunks of dweight's sweep, where dhidden and dweight have separate passes.
    apart: Extents | None = None
    # Where chunks are of columns: those whose logits are saved in the memory of dweight, and of one
    # slot there.
    kept: Extents | None = None
    # Where the first columns have a single pass before the others: tokens of its chunks, and how
    # many columns there are.
    once: Extents | None = None
    # Whether logits of 16-bit operands go through memory, in f32.
    wide: bool = False

    @classmethod
    def of(cls, plan: Plan) -> "Tiling":
        """Returns the tiling of a plan that was made here."""
        chunk = (plan.tokens, plan.columns)
        return cls(chunk, plan.products < 4, plan.apart, plan.kept, plan.once, plan.wide)

    def by_tokens(self, problem: Problem) -> bool:
        """Whether gradients come with the loss, of whole rows."""
        return self.fused and self.chunk[1] == problem.vocab

    def products(self, problem: Problem) -> float:
        """Returns the number of GEMMs, in those of the logits."""
        if self.wide:
            return 3 if self.fused else 4
        if self.apart is not None:
            return 5
        if self.once is not None:
            return 4 - self.once[1] / problem.vocab
        single_pass = self.chunk[1] + (self.kept or (0, 0))[0] if self.fused else 0
        return 4 - single_pass / problem.vocab

    def scratch(self, problem: Problem) -> int:
        """Returns bytes of scratch, as crates/xentile-cuda/src/linear_cross_entropy/cut.rs has."""
        total = self.workspace(problem) + _token_bytes(problem)
        tokens, columns = self.chunk
        if self.wide:
            total += math.ceil(4 * tokens * columns / 256) * 256 + 16 * tokens
        elif self.fused:
            total += _scaled_hidden_bytes(problem, tokens)
            total += _shift_bytes(problem, self.once or self.chunk, self.kept)
        if self.once is not None:
            sums = _chunk_sum_bytes(problem, _scratch_rows(problem.tokens))
            first = _single_pass_bytes(problem, self.once)
            return total + sums + max(first, _recomputed_bytes(problem, self.chunk))
        if self.apart is None:
            has_sums = columns < problem.vocab and not self.by_tokens(problem)
            total += _hidden_sum_bytes(problem, tokens) if has_sums else 0
            total += _weight_sum_bytes(problem, columns) if tokens < problem.tokens else 0
            return total + _logit_bytes(problem, self.chunk)
        first = _logit_bytes(problem, self.chunk) + _chunk_sum_bytes(problem, self.chunk[0])
        second = _logit_bytes(problem, self.apart) + _weight_sum_bytes(problem, self.apart[1])
        return total + max(first, second)

    def workspace(self, problem: Problem) -> int:
        """Returns bytes of the workspace of GEMMs."""
        if self.once is None:
            return WORKSPACE
        # Partial sums of few tokens' dhidden, which nothing else has room for.
        tokens = self.once[0]
        parts = NUM_SMS // (math.ceil(tokens / TILE[0]) * math.ceil(problem.hidden / TILE[1]))
        return max(WORKSPACE, 4 * tokens * problem.hidden * parts if parts > 1 else 0)

    def seconds(self, problem: Problem) -> float:
        """Returns an estimate of the time of a call."""
        if self.once is not None:
            rest = replace(problem, vocab=problem.vocab - self.once[1])
            return _single_pass_seconds(problem, self.once) + _sweep_seconds(
                rest, self.chunk, DLOGITS_PASSES, (True, True)
            )
        if self.wide:
            forward, backward, fused = FLOAT32_PASSES
            wide = partial(_sweep_seconds, problem, self.chunk, has_epilogue=False)
            if self.fused:
                return wide(fused, (True, True))
            return wide(forward, (False, False)) + wide(backward, (True, True))
        if self.by_tokens(problem):
            if not _has_epilogue(problem):
                return _sweep_seconds(problem, self.chunk, 2, (True, True), has_epilogue=False)
            # The GEMM writes the unnormalised softmax, which takes it a little longer.
            small = math.ceil(problem.tokens / self.chunk[0]) * CHUNK_KERNELS * LAUNCH
            return _sweep_seconds(problem, self.chunk, SOFTMAX_PASSES, (True, True)) + small
        if self.fused:
            return self._column_seconds(problem)
        forward, backward = _logit_passes(problem)
        total = _block_seconds(problem) + _sweep_seconds(
            problem, self.chunk, forward, (False, False)
        )
        if self.apart is None:
            return total + _sweep_seconds(problem, self.chunk, backward, (True, True))
        total += _sweep_seconds(problem, self.chunk, backward, (True, False))
        return total + _sweep_seconds(problem, self.apart, backward, (False, True))

    def _column_seconds(self, problem: Problem) -> float:
        """Returns seconds of a call that recomputes the columns whose logits are not kept."""
        n, d, v = problem.tokens, problem.hidden, problem.vocab
        last = self.chunk[1]
        in_place, slot = self.kept or (0, 1)
        kept, rest = _even_chunks(in_place, slot), _even_chunks(v - last - in_place, last)
        splits = _logit_bytes(problem, self.chunk) > 2 * MOST_WORKSPACE
        gemm = partial(_gemm_seconds, problem, splits)
        # Each slot has its own kernels.
        total = (CHUNK_KERNELS + PLACE_KERNELS * len(kept)) * LAUNCH
        kept_passes, last_passes = (SOFTMAX_PASSES,) * 2 if _has_epilogue(problem) else (3, 2)
        for columns, logits, passes in (
            (kept, 1, kept_passes),
            (rest, 2, sum(_logit_passes(problem))),
            ([last], 1, last_passes),
        ):
            for count in columns:
                total += logits * gemm(n, count, d) + gemm(n, d, count) + gemm(count, d, n)
                total += (passes * problem.operand_bytes * n * count + SUM_BYTES * n * d) / BYTES
        return total


def _block_seconds(problem: Problem) -> float:
    """Returns launch time of kernels over logits of 16-bit operands, by blocks of a workspace."""
    if _has_epilogue(problem) or problem.operand_bytes == 4:
        return 0.0
    return 4 * problem.tokens * problem.vocab / WORKSPACE * BLOCK_KERNELS * LAUNCH


def _single_pass_bytes(problem: Problem, once: Extents) -> int:
    """Returns bytes of a chunk of the single pass, and of its sums that dweight has no room for."""
    tokens, _ = once
    scaled = tokens * problem.hidden * problem.operand_bytes
    return (
        _logit_bytes(problem, once) + scaled + 4 * problem.hidden * _scratch_columns(problem, once)
    )


def _scratch_columns(problem: Problem, once: Extents) -> int:
    """Returns the columns with sums in the scratch: dweight has room for half of the vocabulary."""
    tokens, columns = once
    return max(columns - problem.vocab // 2, 0) if tokens < problem.tokens else 0


def _recomputed_bytes(problem: Problem, chunk: Extents) -> int:
    """Returns bytes of a chunk of recomputed columns, and of sums of their dweight."""
    tokens, columns = chunk
    sums = _weight_sum_bytes(problem, columns) if tokens < problem.tokens else 0
    return _logit_bytes(problem, chunk) + sums


def _single_pass_seconds(problem: Problem, once: Extents) -> float:
    """Returns seconds of the single pass over the first columns, and of sums over the others."""
    n, d, v = problem.tokens, problem.hidden, problem.vocab
    tokens, columns = once
    gemm = partial(_gemm_seconds, problem, True)
    each = gemm(tokens, v, d) + gemm(tokens, d, columns) + CHUNK_KERNELS * LAUNCH
    chunks = math.ceil(n / tokens)
    beyond = _scratch_columns(problem, once)
    each += sum(gemm(part, d, tokens) for part in (columns - beyond, beyond) if part)
    moved = SOFTMAX_PASSES * problem.operand_bytes * n * columns + SUM_BYTES * n * d
    moved += SUM_BYTES * columns * d * chunks * (chunks > 1)
    return chunks * each + moved / BYTES


def _token_bytes(problem: Problem) -> int:
    """Returns bytes of scalars of all tokens, and of a bit for each column that is a label."""
    return 32 * problem.tokens + problem.vocab // 8 + 4096


def _scaled_hidden_bytes(problem: Problem, tokens: int) -> int:
    """Returns bytes of scaled hidden states, where dhidden is not of their dtype."""
    if problem.hidden_bytes == problem.operand_bytes:
        return 0
    return math.ceil(tokens * problem.hidden * problem.operand_bytes / 256) * 256


def _is_alike(problem: Problem) -> bool:
    """Whether every gradient is of the dtype of GEMM operands."""
    return problem.hidden_bytes == problem.weight_bytes and not problem.running


def _shift_bytes(problem: Problem, chunk: Extents, kept: Extents | None) -> int:
    """Returns bytes of the running maxima of the unnormalised softmax: two a token and tile."""
    if problem.operand_bytes == 4:
        return 0
    tokens, columns = chunk
    in_place, slot = kept or (0, 1)
    places = [min(slot, in_place - first) for first in range(0, in_place, slot)] + [columns]
    tiles = sum(math.ceil(columns / TILE[1]) for columns in places)
    return math.ceil(2 * tokens * tiles / 256) * 256


def _logit_passes(problem: Problem) -> tuple[int, int]:
    """Returns the passes over logits, forward and backward, that are no GEMM's epilogue."""
    return (0, DLOGITS_PASSES) if _has_epilogue(problem) else (1, 2)


def _has_epilogue(problem: Problem) -> bool:
    """Whether the GEMM of the logits has the cross-entropy as its epilogue."""
    row = problem.vocab if problem.vocab_is_last else problem.hidden
    return problem.operand_bytes == 2 and problem.hidden % 8 == 0 and row % 8 == 0


def _even_chunks(total: int, chunk: int) -> list[int]:
    """Returns even chunks of `total`."""
    if total <= 0:
        return []
    count = math.ceil(total / chunk)
    return [math.ceil(total / count)] * count


def _logit_bytes(problem: Problem, chunk: Extents) -> int:
    """Returns bytes of a chunk of logits, whose rows are whole cache lines."""
    tokens, columns = chunk
    return tokens * _row_stride(problem, columns) * problem.operand_bytes


def _row_stride(problem: Problem, columns: int) -> int:
    line = 128 // problem.operand_bytes
    return math.ceil(columns / line) * line


def _scratch_rows(rows: int) -> int:
    """Returns the rows of sums that are not in the memory of their gradient."""
    return rows - rows // 128 * 64


def _hidden_sum_bytes(problem: Problem, tokens: int) -> int:
    """Returns bytes of sums of all tokens' dhidden, where chunks have so many."""
    n = problem.tokens
    return _chunk_sum_bytes(problem, _scratch_rows(n) if tokens < n else n)


def _chunk_sum_bytes(problem: Problem, rows: int) -> int:
    """Returns bytes of sums of so many rows of dhidden."""
    return 4 * problem.hidden * rows if problem.hidden_bytes < 4 else 0


def _weight_sum_bytes(problem: Problem, columns: int) -> int:
    """Returns bytes of sums of so many columns' dweight."""
    if problem.weight_bytes == 4 or problem.running:
        return 0
    rows, row = columns, problem.hidden
    if problem.vocab_is_last:
        rows, row = row, rows
    shares = not problem.vocab_is_last or columns == problem.vocab
    return 4 * row * (_scratch_rows(rows) if shares else rows)


def _gemm_seconds(problem: Problem, splits: bool, m: int, n: int, k: int) -> float:
    """Returns seconds of a GEMM; `splits` is whether there is a workspace for partial sums."""
    flops = FLOPS if problem.operand_bytes < 4 else FLOPS_F32
    waves = math.ceil(m / TILE[0]) * math.ceil(n / TILE[1]) / NUM_SMS
    # Where tiles are few, their sums are split over the other multiprocessors, at some loss.
    few = min(1.0, waves / SPLIT) if splits else 1.0
    waves = math.ceil(waves) if waves > 1 else max(few, LEAST_WAVE)
    return waves * NUM_SMS * TILE[0] * TILE[1] * 2 * k / flops + LAUNCH


def _sweep_seconds(
    problem: Problem,
    chunk: Extents,
    passes: float,
    gradients: tuple[bool, bool],
    *,
    has_epilogue: bool | None = None,
) -> float:
    """Returns seconds of logits, `passes` over them, and the gradients of hidden and weight.

    The library's own GEMM of logits, its default where there is one, splits no sums.
    """
    has_epilogue = _has_epilogue(problem) if has_epilogue is None else has_epilogue
    # Partial sums need a workspace; beside small chunks there is little.
    gemm = partial(_gemm_seconds, problem, _logit_bytes(problem, chunk) > 2 * MOST_WORKSPACE)
    n, d, v = problem.tokens, problem.hidden, problem.vocab
    tokens, columns = chunk
    makes_hidden, makes_weight = gradients
    rows, parts = math.ceil(n / tokens), math.ceil(v / columns)
    each = gemm(tokens, columns, d)
    if has_epilogue:
        each = _gemm_seconds(problem, False, tokens, columns, d)
    each += makes_hidden * gemm(tokens, d, columns)
    # Sums that have no room in the memory of dweight alone are two GEMMs.
    halved = rows > 1 and 2 * columns > v and _weight_sum_bytes(problem, columns) < 4 * columns * d
    halves = 2 if halved else 1
    each += makes_weight * halves * gemm(math.ceil(columns / halves), d, tokens)
    moved = passes * problem.operand_bytes * n * v
    moved += SUM_BYTES * n * d * parts * (makes_hidden and parts > 1)
    moved += SUM_BYTES * v * d * rows * (makes_weight and rows > 1)
    return rows * parts * each + moved / BYTES


@lru_cache
def choose(problem: Problem, limit: int) -> Plan | None:
    """Returns the plan that may be fastest of those that fit; None where the library has none."""
    if 0 in (problem.tokens, problem.hidden, problem.vocab):
        return None
    is_few = problem.tokens * problem.vocab <= FEW_LOGITS and not problem.running
    if is_few and token_chunk_scratch(problem, problem.tokens) <= limit:
        return None
    room = limit - problem.narrowed_bytes
    found = _fastest(problem, room + SLACK)
    if found is None:
        return None
    tiling, most = found, room
    if limit < SMALL_BUDGET:
        # Beside the scratch there are a token's outputs.
        room -= 32 * problem.tokens
        tight = _fastest(problem, room)
        if tight is not None and tight.products(problem) <= tiling.products(problem):
            tiling, most = tight, room
    return planned(problem, limit, tiling, most)


def planned(problem: Problem, limit: int, tiling: Tiling, most: int) -> Plan:
    """Returns the plan of a tiling, with as much workspace of `most` bytes as it uses."""
    scratch = tiling.scratch(problem)
    # With whole rows of the unnormalised softmax, sums of dhidden may take the workspace too.
    sums = _chunk_sum_bytes(problem, tiling.chunk[0]) if tiling.by_tokens(problem) else 0
    left = max(most - scratch, 0)
    scratch += min(left, max(MOST_WORKSPACE - tiling.workspace(problem), 0) + sums) // 256 * 256
    products, scratch = tiling.products(problem), scratch + _beside_bytes(problem)
    return Plan(
        "library",
        *tiling.chunk,
        products,
        scratch,
        limit,
        apart=tiling.apart,
        kept=tiling.kept,
        once=tiling.once,
        wide=tiling.wide,
    )


def _beside_bytes(problem: Problem) -> int:
    """Returns bytes that are held beside a call's scratch."""
    return BIAS_BYTES * problem.bias * problem.vocab + problem.narrowed_bytes


def _distribution_bytes(problem: Problem) -> int:
    """Returns bytes of workspace that entropy and correct take in addition.

    That is a row's logits in f32 twice, for GPUs whose GEMMs have no epilogue.
    """
    return PART_BYTES * MOST_PARTS * problem.tokens + 8 * problem.vocab + MIB


def _fastest(problem: Problem, room: int) -> Tiling | None:
    """Returns the fastest tiling of those that fit into so many bytes."""
    fitting = [tiling for tiling in _candidates(problem, room) if tiling.scratch(problem) <= room]
    fitting += _two_sweeps(problem, room)
    return min(fitting, key=lambda tiling: tiling.seconds(problem), default=None)


def _candidates(problem: Problem, room: int) -> Iterator[Tiling]:
    is_wide = problem.operand_bytes < 4
    has_fused = not is_wide or _has_epilogue(problem)
    for tokens in _extents(problem.tokens):
        if problem.reduced and has_fused:
            yield Tiling((tokens, problem.vocab), fused=True)
        if is_wide:
            yield Tiling((tokens, problem.vocab), fused=problem.reduced, wide=True)
        if not problem.reduced or tokens < problem.tokens:
            for columns in _extents(problem.vocab):
                yield Tiling((tokens, columns), fused=False)
    if problem.reduced:
        yield from _fused_by_columns(problem, room)
        # Gradients of other dtypes have no memory for saved logits.
        if _is_alike(problem):
            yield from _fused_by_both(problem, room)


def _fused_by_columns(problem: Problem, room: int) -> Iterator[Tiling]:
    """Yields tilings by columns that save as many logits as there is room for."""
    tokens = problem.tokens
    if problem.operand_bytes < 4 and (problem.vocab_is_last or not _has_epilogue(problem)):
        return
    without = Tiling((tokens, 1), fused=True).scratch(problem)
    most = (room - without) // (tokens * problem.operand_bytes) // STEP * STEP
    columns = {math.ceil(most * part / 16 / STEP) * STEP for part in range(4, 17)}
    # A few columns fewer may be a wave of tiles fewer.
    columns |= {most - STEP * fewer for fewer in range(1, 8)}
    columns |= {*_extents(problem.vocab)}
    for count in sorted(count for count in columns if 0 < count < problem.vocab):
        yield Tiling((tokens, count), fused=True)
        for slots in SLOTS if _is_alike(problem) and not problem.vocab_is_last else ():
            kept = _kept_columns(problem, count, slots)
            if kept is not None:
                yield Tiling((tokens, count), fused=True, kept=kept)


def _fused_by_both(problem: Problem, room: int) -> Iterator[Tiling]:
    """Yields tilings that save some columns' unnormalised softmax, and recompute the others."""
    if problem.vocab_is_last or not _has_epilogue(problem):
        return
    if Tiling((problem.tokens, problem.vocab), fused=True).scratch(problem) <= room:
        return
    for tokens in _extents(problem.tokens):
        none = Tiling((0, 0), fused=True, once=(tokens, 0))
        left = room - none.scratch(problem)
        chunk = _best_recomputed_chunk(problem, left + _single_pass_bytes(problem, (tokens, 0)))
        if chunk is None:
            continue
        most = left // (tokens * problem.operand_bytes)
        half = problem.vocab // 2
        if most > half and tokens < problem.tokens:
            # Beyond half of the vocabulary a column has sums in the scratch as well.
            per_column = tokens * problem.operand_bytes + 4 * problem.hidden
            most = half + (left - half * tokens * problem.operand_bytes) // per_column
        # Somewhat fewer leave GEMMs a workspace.
        for part in range(8, 17):
            columns = most * part // 16 // STEP * STEP
            if 0 < columns < problem.vocab:
                rest = problem.vocab - columns
                even = math.ceil(_even_chunks(rest, chunk[1])[0] / STEP) * STEP
                even = min(even, chunk[1], rest)
                yield Tiling((chunk[0], even), fused=True, once=(tokens, columns))


@lru_cache
def _best_recomputed_chunk(problem: Problem, room: int) -> Extents | None:
    """Returns the best chunk of a sweep with so many bytes for logits and sums of dweight."""

    def fits(chunk: Extents) -> bool:
        return _recomputed_bytes(problem, chunk) <= room

    fitting = [
        (tokens, columns)
        for tokens in _extents(problem.tokens)
        # The widest: narrower ones may be a wave of tiles less.
        for columns in [c for c in _extents(problem.vocab) if fits((tokens, c))][:4]
    ]
    return min(
        fitting,
        key=lambda chunk: _sweep_seconds(problem, chunk, DLOGITS_PASSES, (True, True)),
        default=None,
    )


def _kept_columns(problem: Problem, last: int, slots: int) -> Extents | None:
    """Returns the most columns that so many slots in dweight's memory hold, and those of a slot."""
    n, d, v = problem.tokens, problem.hidden, problem.vocab
    even = math.ceil(math.ceil((v - last) / slots) / STEP) * STEP
    slot = min(even, v * d // (d + slots * max(n, d)) // STEP * STEP)
    if slot <= 0:
        return None
    columns = min(slots * slot, v - last)

    def lines(elements: int) -> int:
        return math.ceil(elements / 256) * 256

    # As `has_room` in crates/xentile-cuda/src/linear_cross_entropy/cut.rs.
    rows, logits = lines(slot * d), n * _row_stride(problem, slot)
    end = rows + (columns - 1) // slot * lines(max(rows, logits)) + logits
    return (columns, slot) if end <= v * d and columns > 0 else None


def _two_sweeps(problem: Problem, room: int) -> Iterator[Tiling]:
    """Yields the tiling of the best chunks of separate sweeps for dhidden and dweight."""

    def best(gradients: tuple[bool, bool]) -> Extents | None:
        both = [(n, v) for n in _extents(problem.tokens) for v in _extents(problem.vocab)]
        side = 0 if gradients[0] else 1

        def fits(chunk: Extents) -> bool:
            sums = (_chunk_sum_bytes, _weight_sum_bytes)[side](problem, chunk[side])
            return _logit_bytes(problem, chunk) + sums + _token_bytes(problem) <= room - WORKSPACE

        fitting = [chunk for chunk in both if fits(chunk)]
        return min(
            fitting, key=lambda chunk: _sweep_seconds(problem, chunk, 2, gradients), default=None
        )

    hidden, weight = best((True, False)), best((False, True))
    if hidden is None or weight is None:
        return
    tiling = Tiling(hidden, fused=False, apart=weight)
    if tiling.scratch(problem) <= room:
        yield tiling


@lru_cache
def _extents(total: int) -> tuple[int, ...]:
    """Returns chunks that divide `total` evenly, rounded up to steps."""
    found, count = [total], 2
    while found[-1] > LEAST_EXTENT:
        chunk = math.ceil(math.ceil(total / count) / STEP) * STEP
        if chunk < found[-1]:
            found.append(chunk)
        count += max(1, count // 8)
    return tuple(found)


def plan_call(name: str, vocab_axis: int, plan: Plan, operands: Any) -> tuple[dict[str, int], int]:
    """Returns the attributes and the bytes of scratch of the library's call `name`."""
    problem = Problem.of(operands, vocab_axis, reduced=False, running=name == "add")
    scratch = plan.scratch_bytes - _beside_bytes(problem)
    made = Tiling.of(plan)
    if name == "distribution_fused":
        scratch += _distribution_bytes(problem)
    attributes = {
        "vocab_axis": vocab_axis,
        "chunk_tokens": plan.tokens,
        "chunk_columns": plan.columns,
        "workspace_bytes": made.workspace(problem) + scratch - made.scratch(problem),
    }
    if plan.once is not None:
        attributes["once_tokens"], attributes["once_columns"] = plan.once
    if plan.kept is not None:
        attributes["kept_columns"], attributes["kept_slot"] = plan.kept
    if plan.wide:
        attributes["wide"] = True
    if plan.apart is not None:
        attributes["apart_tokens"], attributes["apart_columns"] = plan.apart
    return attributes, scratch
