"""Where a program is for NVIDIA's GPUs: one call of the library's for all chunks.

Its products are cuBLASLt's, which add to what is there, read a slice of the weight where it lies
and write one of its gradient in its place (under a loop of XLA's each of those is a copy), and on
Hopper, of a weight in 16 bits, its own, which have the cross-entropy in them.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from .plan import MIB, STEP, Plan, Problem, by_tokens

# What products have to work in: so much beyond the budget, as numbers of a token are, and up to so
# much of what a plan leaves of it.
WORKSPACE, MOST_WORKSPACE = 4 * MIB, 32 * MIB
SLACK = WORKSPACE + MIB
# Of a budget below this what is beyond it is a large part, and XLA's allocator gives a free block
# whole that is less than twice as large: it holds all, unless that takes more products.
SMALL = 64 * MIB
# What a column's bias and its gradient take in f32, beyond the budget too.
PER_BIAS = 8
# What is said of the distribution of a token in a part of its row, and the most parts there are: as
# `layout` in crates/xentile-cuda/src/fused_product.rs.
PER_PART, MOST_PARTS = 12, 66
# A second's products and bytes, tiles that run at a time and their extents, and seconds from a
# product's end to the next: of an H200, and only to weigh one plan against another.
FLOPS, FLOPS_F32, BYTES = 7e14, 5e13, 4e12
# Bytes of a sum in f32 that is read and written, of which a product hides a part.
SUM = 5
# Passes over logits that products are worth that write the unnormalised softmax, and dlogits; and
# what logits in f32 take through memory, forward alone, backward and where one pass makes both.
UNNORMALISED, DLOGITS = 0.5, 1
WIDE = (4, 9, 9)
TILES, TILE, SPLIT, LAUNCH = 132, (128, 256), 0.8, 3e-6
# Kernels beside the products of a chunk that has one.
SMALL_KERNELS, KERNELS_OF_PLACE = 8, 3
# So few logits are left to XLA, where they fit: its programs are launched as one, and its products
# cut long sums of few tiles. 1024 x 1024 x 4096 takes 0.082 ms there and 0.096 in the library,
# 2048 x 1024 x 8192 0.248 and 0.203 (NVIDIA H200, 2026-11-24).
FEW_LOGITS = 1 << 22
# Kernels of logits that pass through the workspace, forward and backward.
KERNELS_OF_BLOCK = 5
# A part of a tile that there is time for whatever its sums are cut into.
LEAST_WAVE = 0.05
LEAST = 128
# Slots that logits may be kept in.
SLOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)

Extents = tuple[int, int]


@dataclass(frozen=True)
class Cut:
    """A way to cut a problem: chunks of tokens and columns."""

    chunk: Extents
    # Whether gradients come with the loss, in one call: then a chunk has all tokens or all columns.
    fused: bool
    # Where dhidden and dweight are swept for one after the other: the chunks of the second sweep.
    apart: Extents | None = None
    # Where chunks are of columns: those whose logits stay in the memory of dweight, and of a slot.
    kept: Extents | None = None
    # Where chunks are of columns or of both: tokens of chunks of the first columns, which are made
    # once before the others are gone over, and how many these are.
    once: Extents | None = None
    # Whether logits of 16-bit operands go through memory, in f32.
    wide: bool = False

    @classmethod
    def of(cls, plan: Plan) -> "Cut":
        """That of a plan that was made here."""
        chunk = (plan.tokens, plan.columns)
        return cls(chunk, plan.products < 4, plan.apart, plan.kept, plan.once, plan.wide)

    def by_tokens(self, problem: Problem) -> bool:
        """Whether gradients come with the loss, of whole rows."""
        return self.fused and self.chunk[1] == problem.vocab

    def products(self, problem: Problem) -> float:
        """Products of the size of the logits' own."""
        if self.wide:
            return 3 if self.fused else 4
        if self.apart is not None:
            return 5
        if self.once is not None:
            return 4 - self.once[1] / problem.vocab
        made_once = self.chunk[1] + (self.kept or (0, 0))[0] if self.fused else 0
        return 4 - made_once / problem.vocab

    def scratch(self, problem: Problem) -> int:
        """What it holds, as crates/xentile-cuda/src/linear_cross_entropy/cut.rs lays it out."""
        numbers = self.workspace(problem) + _numbers(problem)
        tokens, columns = self.chunk
        if self.wide:
            numbers += math.ceil(4 * tokens * columns / 256) * 256 + 16 * tokens
        elif self.fused:
            numbers += _scaled(problem, tokens) + _lifts(
                problem, self.once or self.chunk, self.kept
            )
        if self.once is not None:
            sums = _chunk_sums(problem, _scratch_rows(problem.tokens))
            chunks = max(_made_once(problem, self.once), _again(problem, self.chunk))
            return numbers + sums + chunks
        if self.apart is None:
            cut = columns < problem.vocab and not self.by_tokens(problem)
            of_hidden = _hidden_sums(problem, tokens) if cut else 0
            of_weight = _weight_sums(problem, columns) if tokens < problem.tokens else 0
            return numbers + _logits(problem, self.chunk) + of_hidden + of_weight
        first = _logits(problem, self.chunk) + _chunk_sums(problem, self.chunk[0])
        second = _logits(problem, self.apart) + _weight_sums(problem, self.apart[1])
        return numbers + max(first, second)

    def workspace(self, problem: Problem) -> int:
        """What products need to work in."""
        if self.once is None:
            return WORKSPACE
        # Few tokens' dhidden is summed in parts, which nothing else has room for.
        tokens = self.once[0]
        parts = TILES // (math.ceil(tokens / TILE[0]) * math.ceil(problem.hidden / TILE[1]))
        return max(WORKSPACE, 4 * tokens * problem.hidden * parts if parts > 1 else 0)

    def seconds(self, problem: Problem) -> float:
        """What it may take."""
        if self.once is not None:
            rest = replace(problem, vocab=problem.vocab - self.once[1])
            return _once(problem, self.once) + _sweep(rest, self.chunk, DLOGITS, (True, True))
        if self.wide:
            forward, backward, fused = WIDE
            wide = partial(_sweep, problem, self.chunk, in_product=False)
            if self.fused:
                return wide(fused, (True, True))
            return wide(forward, (False, False)) + wide(backward, (True, True))
        if self.by_tokens(problem):
            if not _are_in_product(problem):
                return _sweep(problem, self.chunk, 2, (True, True), in_product=False)
            # The unnormalised softmax comes of the product: writing it takes it a little longer.
            small = math.ceil(problem.tokens / self.chunk[0]) * SMALL_KERNELS * LAUNCH
            return _sweep(problem, self.chunk, UNNORMALISED, (True, True)) + small
        if self.fused:
            return self._columns(problem)
        forward, backward = _passes(problem)
        total = _column_blocks(problem) + _sweep(problem, self.chunk, forward, (False, False))
        if self.apart is None:
            return total + _sweep(problem, self.chunk, backward, (True, True))
        total += _sweep(problem, self.chunk, backward, (True, False))
        return total + _sweep(problem, self.apart, backward, (False, True))

    def _columns(self, problem: Problem) -> float:
        """Seconds of a call that goes over chunks of columns twice, but for what is there still."""
        n, d, v = problem.tokens, problem.hidden, problem.vocab
        last = self.chunk[1]
        in_place, slot = self.kept or (0, 1)
        kept, again = _pieces(in_place, slot), _pieces(v - last - in_place, last)
        splits = _logits(problem, self.chunk) > 2 * MOST_WORKSPACE
        product = partial(_product, problem, splits)
        # Each place has its own of those kernels that go over it.
        total = (SMALL_KERNELS + KERNELS_OF_PLACE * len(kept)) * LAUNCH
        made_again = (again, 2, sum(_passes(problem)))
        of_kept, of_last = (UNNORMALISED,) * 2 if _are_in_product(problem) else (3, 2)
        for columns, logits, passes in ((kept, 1, of_kept), made_again, ([last], 1, of_last)):
            for count in columns:
                total += logits * product(n, count, d) + product(n, d, count) + product(count, d, n)
                total += (passes * problem.operand_bytes * n * count + SUM * n * d) / BYTES
        return total


def _column_blocks(problem: Problem) -> float:
    """Seconds between kernels over logits of 16-bit operands, few of which have room at a time."""
    if _are_in_product(problem) or problem.operand_bytes == 4:
        return 0.0
    return 4 * problem.tokens * problem.vocab / WORKSPACE * KERNELS_OF_BLOCK * LAUNCH


def _made_once(problem: Problem, once: Extents) -> int:
    """Bytes of a chunk of the columns that are made once, and their sums that dweight lacks."""
    tokens, _ = once
    scaled = tokens * problem.hidden * problem.operand_bytes
    return _logits(problem, once) + scaled + 4 * problem.hidden * _beyond(problem, once)


def _beyond(problem: Problem, once: Extents) -> int:
    """Those whose sums are in the scratch: dweight has room for those of half of the vocabulary."""
    tokens, columns = once
    return max(columns - problem.vocab // 2, 0) if tokens < problem.tokens else 0


def _again(problem: Problem, chunk: Extents) -> int:
    """Bytes of a chunk of columns that are made again, and of sums of their dweight."""
    tokens, columns = chunk
    sums = _weight_sums(problem, columns) if tokens < problem.tokens else 0
    return _logits(problem, chunk) + sums


def _once(problem: Problem, once: Extents) -> float:
    """Seconds of what is made of the first columns, and of sums over the others."""
    n, d, v = problem.tokens, problem.hidden, problem.vocab
    tokens, columns = once
    product = partial(_product, problem, True)
    each = product(tokens, v, d) + product(tokens, d, columns) + SMALL_KERNELS * LAUNCH
    chunks = math.ceil(n / tokens)
    beyond = _beyond(problem, once)
    each += sum(product(part, d, tokens) for part in (columns - beyond, beyond) if part)
    moved = UNNORMALISED * problem.operand_bytes * n * columns + SUM * n * d
    moved += SUM * columns * d * chunks * (chunks > 1)
    return chunks * each + moved / BYTES


def _numbers(problem: Problem) -> int:
    """Bytes of numbers of a token, and a bit for each column that is a label."""
    return 32 * problem.tokens + problem.vocab // 8 + 4096


def _scaled(problem: Problem, tokens: int) -> int:
    """Bytes of scaled hidden states, where their gradient is not of their dtype."""
    if problem.hidden_bytes == problem.operand_bytes:
        return 0
    return math.ceil(tokens * problem.hidden * problem.operand_bytes / 256) * 256


def _is_alike(problem: Problem) -> bool:
    """Whether every gradient is of the dtype of products."""
    return problem.hidden_bytes == problem.weight_bytes and not problem.running


def _lifts(problem: Problem, chunk: Extents, kept: Extents | None) -> int:
    """Bytes of the shifts of the unnormalised softmax: two for each token and tile."""
    if problem.operand_bytes == 4:
        return 0
    tokens, columns = chunk
    in_place, slot = kept or (0, 1)
    places = [min(slot, in_place - first) for first in range(0, in_place, slot)] + [columns]
    tiles = sum(math.ceil(columns / TILE[1]) for columns in places)
    return math.ceil(2 * tokens * tiles / 256) * 256


def _passes(problem: Problem) -> tuple[int, int]:
    """Passes over logits, forward and backward, that are not hidden by products."""
    return (0, DLOGITS) if _are_in_product(problem) else (1, 2)


def _are_in_product(problem: Problem) -> bool:
    """Whether the product that makes logits has the cross-entropy in it."""
    row = problem.vocab if problem.vocab_is_last else problem.hidden
    return problem.operand_bytes == 2 and problem.hidden % 8 == 0 and row % 8 == 0


def _pieces(total: int, chunk: int) -> list[int]:
    """Even chunks of `total`."""
    if total <= 0:
        return []
    count = math.ceil(total / chunk)
    return [math.ceil(total / count)] * count


def _logits(problem: Problem, chunk: Extents) -> int:
    """Bytes of a chunk of logits, whose rows are whole lines."""
    tokens, columns = chunk
    return tokens * _stride(problem, columns) * problem.operand_bytes


def _stride(problem: Problem, columns: int) -> int:
    line = 128 // problem.operand_bytes
    return math.ceil(columns / line) * line


def _scratch_rows(rows: int) -> int:
    """Rows of sums that are not where their gradient goes."""
    return rows - rows // 128 * 64


def _hidden_sums(problem: Problem, tokens: int) -> int:
    """Bytes in the scratch of sums of all tokens' dhidden, where chunks have so many."""
    n = problem.tokens
    return _chunk_sums(problem, _scratch_rows(n) if tokens < n else n)


def _chunk_sums(problem: Problem, rows: int) -> int:
    """Bytes of sums of so many rows of dhidden."""
    return 4 * problem.hidden * rows if problem.hidden_bytes < 4 else 0


def _weight_sums(problem: Problem, columns: int) -> int:
    """Bytes in the scratch of sums of so many columns' dweight."""
    if problem.weight_bytes == 4 or problem.running:
        return 0
    rows, row = columns, problem.hidden
    if problem.vocab_is_last:
        rows, row = row, rows
    shares = not problem.vocab_is_last or columns == problem.vocab
    return 4 * row * (_scratch_rows(rows) if shares else rows)


def _product(problem: Problem, splits: bool, m: int, n: int, k: int) -> float:
    """Seconds of a product; `splits` is whether there is room for parts of sums."""
    flops = FLOPS if problem.operand_bytes < 4 else FLOPS_F32
    waves = math.ceil(m / TILE[0]) * math.ceil(n / TILE[1]) / TILES
    # Where tiles are few, long sums are cut among what they leave idle, at some loss.
    few = min(1.0, waves / SPLIT) if splits else 1.0
    waves = math.ceil(waves) if waves > 1 else max(few, LEAST_WAVE)
    return waves * TILES * TILE[0] * TILE[1] * 2 * k / flops + LAUNCH


def _sweep(
    problem: Problem,
    chunk: Extents,
    passes: float,
    gradients: tuple[bool, bool],
    *,
    in_product: bool | None = None,
) -> float:
    """Seconds of logits, so many passes over them, and the gradients of hidden and weight.

    The library's own product of logits, which it takes by default where it can, cuts no sums.
    """
    in_product = _are_in_product(problem) if in_product is None else in_product
    # Parts of sums need a place; beside small chunks there is little.
    product = partial(_product, problem, _logits(problem, chunk) > 2 * MOST_WORKSPACE)
    n, d, v = problem.tokens, problem.hidden, problem.vocab
    tokens, columns = chunk
    of_hidden, of_weight = gradients
    rows, parts = math.ceil(n / tokens), math.ceil(v / columns)
    each = product(tokens, columns, d)
    if in_product:
        each = _product(problem, False, tokens, columns, d)
    each += of_hidden * product(tokens, d, columns)
    # Sums in two places are two products: those that have no room in what is not written yet.
    halved = rows > 1 and 2 * columns > v and _weight_sums(problem, columns) < 4 * columns * d
    halves = 2 if halved else 1
    each += of_weight * halves * product(math.ceil(columns / halves), d, tokens)
    moved = passes * problem.operand_bytes * n * v
    moved += SUM * n * d * parts * (of_hidden and parts > 1)
    moved += SUM * v * d * rows * (of_weight and rows > 1)
    return rows * parts * each + moved / BYTES


@lru_cache
def choose(problem: Problem, limit: int) -> Plan | None:
    """Returns the plan that may be fastest of those that fit; None where the library has none."""
    if 0 in (problem.tokens, problem.hidden, problem.vocab):
        return None
    is_few = problem.tokens * problem.vocab <= FEW_LOGITS and not problem.running
    if is_few and by_tokens(problem, problem.tokens) <= limit:
        return None
    room = limit - problem.narrowed_bytes
    found = _fastest(problem, room + SLACK)
    if found is None:
        return None
    cut, most = found, room
    if limit < SMALL:
        # Beside the scratch there are a token's outputs.
        room -= 32 * problem.tokens
        tight = _fastest(problem, room)
        if tight is not None and tight.products(problem) <= cut.products(problem):
            cut, most = tight, room
    return planned(problem, limit, cut, most)


def planned(problem: Problem, limit: int, cut: Cut, most: int) -> Plan:
    """The plan of a cut, which is given what it has a use for of `most` bytes."""
    scratch = cut.scratch(problem)
    # Where the unnormalised softmax is made of whole rows, sums of dhidden may pass through there
    # too.
    sums = _chunk_sums(problem, cut.chunk[0]) if cut.by_tokens(problem) else 0
    left = max(most - scratch, 0)
    scratch += min(left, max(MOST_WORKSPACE - cut.workspace(problem), 0) + sums) // 256 * 256
    products, scratch = cut.products(problem), scratch + _beside(problem)
    return Plan(
        "library",
        *cut.chunk,
        products,
        scratch,
        limit,
        apart=cut.apart,
        kept=cut.kept,
        once=cut.once,
        wide=cut.wide,
    )


def _beside(problem: Problem) -> int:
    """Bytes that are held beside a call's scratch."""
    return PER_BIAS * problem.bias * problem.vocab + problem.narrowed_bytes


def _distribution(problem: Problem) -> int:
    """Bytes that products work in beyond that where something is said of the distribution.

    It has room for a row's logits in f32 and as much again, for GPUs whose products say nothing.
    """
    return PER_PART * MOST_PARTS * problem.tokens + 8 * problem.vocab + MIB


def _fastest(problem: Problem, room: int) -> Cut | None:
    """The fastest of all that fit into so many bytes."""
    fitting = [cut for cut in _cuts(problem, room) if cut.scratch(problem) <= room]
    fitting += _two_sweeps(problem, room)
    return min(fitting, key=lambda cut: cut.seconds(problem), default=None)


def _cuts(problem: Problem, room: int) -> Iterator[Cut]:
    is_wide = problem.operand_bytes < 4
    has_fused = not is_wide or _are_in_product(problem)
    for tokens in _extents(problem.tokens):
        if problem.reduced and has_fused:
            yield Cut((tokens, problem.vocab), fused=True)
        if is_wide:
            yield Cut((tokens, problem.vocab), fused=problem.reduced, wide=True)
        if not problem.reduced or tokens < problem.tokens:
            for columns in _extents(problem.vocab):
                yield Cut((tokens, columns), fused=False)
    if problem.reduced:
        yield from _fused_by_columns(problem, room)
        # Another array's gradient is no place for what is kept of these.
        if _is_alike(problem):
            yield from _fused_by_both(problem, room)


def _fused_by_columns(problem: Problem, room: int) -> Iterator[Cut]:
    """Those that make no logits again that there is room for."""
    tokens = problem.tokens
    if problem.operand_bytes < 4 and (problem.vocab_is_last or not _are_in_product(problem)):
        return
    without = Cut((tokens, 1), fused=True).scratch(problem)
    most = (room - without) // (tokens * problem.operand_bytes) // STEP * STEP
    columns = {math.ceil(most * part / 16 / STEP) * STEP for part in range(4, 17)}
    # A few columns fewer may be a wave of tiles fewer.
    columns |= {most - STEP * fewer for fewer in range(1, 8)}
    columns |= {*_extents(problem.vocab)}
    for count in sorted(count for count in columns if 0 < count < problem.vocab):
        yield Cut((tokens, count), fused=True)
        for slots in SLOTS if _is_alike(problem) and not problem.vocab_is_last else ():
            kept = _kept(problem, count, slots)
            if kept is not None:
                yield Cut((tokens, count), fused=True, kept=kept)


def _fused_by_both(problem: Problem, room: int) -> Iterator[Cut]:
    """Those that make some logits once, as the unnormalised softmax, and the others again."""
    if problem.vocab_is_last or not _are_in_product(problem):
        return
    if Cut((problem.tokens, problem.vocab), fused=True).scratch(problem) <= room:
        return
    for tokens in _extents(problem.tokens):
        none = Cut((0, 0), fused=True, once=(tokens, 0))
        left = room - none.scratch(problem)
        chunk = _made_again(problem, left + _made_once(problem, (tokens, 0)))
        if chunk is None:
            continue
        most = left // (tokens * problem.operand_bytes)
        half = problem.vocab // 2
        if most > half and tokens < problem.tokens:
            # Beyond half of the vocabulary a column has sums in the scratch as well.
            per_column = tokens * problem.operand_bytes + 4 * problem.hidden
            most = half + (left - half * tokens * problem.operand_bytes) // per_column
        # Somewhat fewer leave products a place.
        for part in range(8, 17):
            columns = most * part // 16 // STEP * STEP
            if 0 < columns < problem.vocab:
                rest = problem.vocab - columns
                even = math.ceil(_pieces(rest, chunk[1])[0] / STEP) * STEP
                even = min(even, chunk[1], rest)
                yield Cut((chunk[0], even), fused=True, once=(tokens, columns))


@lru_cache
def _made_again(problem: Problem, room: int) -> Extents | None:
    """The best chunk of a sweep that has so many bytes for logits and sums of dweight."""

    def fits(chunk: Extents) -> bool:
        return _again(problem, chunk) <= room

    fitting = [
        (tokens, columns)
        for tokens in _extents(problem.tokens)
        # The widest: narrower ones may be a wave of tiles less.
        for columns in [c for c in _extents(problem.vocab) if fits((tokens, c))][:4]
    ]
    return min(
        fitting, key=lambda chunk: _sweep(problem, chunk, DLOGITS, (True, True)), default=None
    )


def _kept(problem: Problem, last: int, slots: int) -> Extents | None:
    """The most columns that so many slots in dweight's memory keep, besides the last chunk's."""
    n, d, v = problem.tokens, problem.hidden, problem.vocab
    even = math.ceil(math.ceil((v - last) / slots) / STEP) * STEP
    slot = min(even, v * d // (d + slots * max(n, d)) // STEP * STEP)
    if slot <= 0:
        return None
    columns = min(slots * slot, v - last)

    def lines(elements: int) -> int:
        return math.ceil(elements / 256) * 256

    # As `has_room` in crates/xentile-cuda/src/linear_cross_entropy/cut.rs.
    rows, logits = lines(slot * d), n * _stride(problem, slot)
    end = rows + (columns - 1) // slot * lines(max(rows, logits)) + logits
    return (columns, slot) if end <= v * d and columns > 0 else None


def _two_sweeps(problem: Problem, room: int) -> Iterator[Cut]:
    """The best chunks of either sweep, which know nothing of each other."""

    def best(gradients: tuple[bool, bool]) -> Extents | None:
        both = [(n, v) for n in _extents(problem.tokens) for v in _extents(problem.vocab)]
        side = 0 if gradients[0] else 1

        def fits(chunk: Extents) -> bool:
            sums = (_chunk_sums, _weight_sums)[side](problem, chunk[side])
            return _logits(problem, chunk) + sums + _numbers(problem) <= room - WORKSPACE

        fitting = [chunk for chunk in both if fits(chunk)]
        return min(fitting, key=lambda chunk: _sweep(problem, chunk, 2, gradients), default=None)

    hidden, weight = best((True, False)), best((False, True))
    if hidden is None or weight is None:
        return
    cut = Cut(hidden, fused=False, apart=weight)
    if cut.scratch(problem) <= room:
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


def plan_call(name: str, vocab_axis: int, plan: Plan, operands: Any) -> tuple[dict[str, int], int]:
    """Returns the attributes and the bytes of scratch of the library's call `name`."""
    problem = Problem.of(operands, vocab_axis, reduced=False, running=name == "add")
    scratch = plan.scratch_bytes - _beside(problem)
    made = Cut.of(plan)
    if name == "distribution_fused":
        scratch += _distribution(problem)
    cut = {
        "vocab_axis": vocab_axis,
        "chunk_tokens": plan.tokens,
        "chunk_columns": plan.columns,
        "workspace_bytes": made.workspace(problem) + scratch - made.scratch(problem),
    }
    if plan.once is not None:
        cut["once_tokens"], cut["once_columns"] = plan.once
    if plan.kept is not None:
        cut["kept_columns"], cut["kept_slot"] = plan.kept
    if plan.wide:
        cut["wide"] = True
    if plan.apart is not None:
        cut["apart_tokens"], cut["apart_columns"] = plan.apart
    return cut, scratch
