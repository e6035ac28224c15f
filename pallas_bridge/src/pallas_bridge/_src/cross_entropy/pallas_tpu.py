"""Cross-entropy kernels for TPUs, in Pallas; docs/tpu-cross-entropy.md says why they are so.

One kernel does all three passes. Tiles of [time_block, block_size] come from HBM into a ring of
slots in VMEM, by copies that the kernel starts and awaits itself. Over a block of rows it sweeps
once to reduce, once to write gradients, or both; where both, the tiles stay in their slots between
the sweeps, so that HBM sees each byte once in and once out. Gradients take the place of the logits
in their slot and leave from there, while tiles of the next rows come in.

The online softmax is that of Milakov and Gimelshein (2018), kept a lane at a time.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..custom_call import Call
from ..pallas import Target
from .declaration import OPERATION
from .options import Options, is_ignored

LANES = 128
# Lanes start from here and not from -inf, so that no difference of shifts is inf - inf.
LEAST = float(np.finfo(np.float32).min)
# Columns that straight-line code handles at a time.
CHUNK = 8192
# Tiles that may be on their way out before the slot of the oldest is used again.
LAG = 2
# Rows of the array of numbers a token, for the kernel and from it. Eight is what a register has.
NUMBERS = 8


@dataclass(frozen=True)
class Plan:
    """How logits [tokens, vocab] are cut, and what lies in VMEM."""

    tokens: int
    vocab: int
    dtype: Any
    time_block: int
    block_size: int
    # Whether a block of rows stays in VMEM between its two sweeps.
    resident: bool
    slots: int
    # What ragged copies are rounded up to: how HBM pads an array.
    multiples: tuple[int, int] = (8, LANES)
    # Rows and lanes that are one register as memory has them.
    piece: tuple[int, int] = (8, LANES)

    @property
    def blocks(self) -> int:
        """Blocks of rows."""
        return pl.cdiv(self.tokens, self.time_block)

    @property
    def tiles(self) -> int:
        """Tiles of a block of rows."""
        return pl.cdiv(self.vocab, self.block_size)

    @property
    def tile_bytes(self) -> int:
        """Bytes of a slot."""
        return self.time_block * self.block_size * int(np.dtype(self.dtype).itemsize)

    @property
    def vmem_bytes(self) -> int:
        """Bytes of VMEM, of which the kernel's own stack is a guess."""
        return self.slots * self.tile_bytes + _working_bytes(self.time_block)


def _working_bytes(time_block: int) -> int:
    # State a row and lane, blocks of numbers (twice, as they are fetched ahead), and the stack:
    # what turns rows into columns is [time_block, time_block].
    rows = 9 * time_block * LANES * 4
    turning = 4 * time_block * max(time_block, LANES) * 4
    return rows + turning + 4 * NUMBERS * max(time_block, LANES) * 4 + (1 << 20)


def sublanes(dtype: Any) -> int:
    """Returns the rows of a register of `dtype`."""
    return 32 // int(np.dtype(dtype).itemsize)


def plan(
    target: Target,
    tokens: int,
    vocab: int,
    dtype: Any,
    *,
    time_block: int | None,
    block_size: int | None,
    reduces: bool,
    writes: bool,
) -> Plan | None:
    """Returns how to cut logits for the sweeps wanted; None where both do not fit at once.

    Raises:
        ValueError: a tile that is not made of whole registers, or that does not fit in VMEM.
    """
    unit = sublanes(dtype)
    for name, extent, multiple in (
        ("time_block", time_block, unit),
        ("block_size", block_size, LANES),
    ):
        if extent is not None and extent % multiple:
            raise ValueError(
                f"{OPERATION}: {name} is {extent}; on TPU, with logits of {np.dtype(dtype).name}, "
                f"it must be a multiple of {multiple}, such as {-(-extent // multiple) * multiple}"
            )
    padded = 8 if np.dtype(dtype).itemsize == 4 else target.rows_of_16_bits
    # Interpreted arrays are not padded.
    multiples = (1, 1) if target.interpret else (padded, LANES)
    # Two registers' worth of 8 rows of 16 bits lie side by side, where rows are padded to 8.
    packed = np.dtype(dtype).itemsize == 2
    piece = (unit, LANES) if not packed or target.rows_of_16_bits == 16 else (8, 2 * LANES)
    whole = -(-vocab // LANES) * LANES
    columns = min(block_size or 32768, whole)
    both = reduces and writes

    def cut(rows: int, columns: int) -> Plan | None:
        tiles = -(-vocab // columns)
        least = tiles + 2 * LAG if both else 2 * LAG
        wanted = 2 * tiles if both else 4 * LAG
        one = Plan(tokens, vocab, dtype, rows, columns, both, 1, multiples, piece)
        room = (target.vmem_bytes - _working_bytes(rows)) // one.tile_bytes
        if room < least:
            return None
        return dataclasses.replace(one, slots=min(max(wanted, least), room))

    enough = -(-max(tokens, 1) // unit) * unit
    candidates = (64, 32, 16, 8) if time_block is None else (time_block,)
    for rows in candidates:
        if rows % unit == 0 and (found := cut(min(rows, enough), columns)) is not None:
            return found
    if both:
        return None
    rows = min(candidates[-1] if time_block is not None else unit, enough)
    largest = (target.vmem_bytes - _working_bytes(rows)) // (2 * LAG * rows) // LANES * LANES
    largest //= int(np.dtype(dtype).itemsize)
    largest = max(largest // LANES * LANES, LANES)
    raise ValueError(
        f"{OPERATION}: a tile of time_block {rows} and block_size {columns} does not fit "
        f"{2 * LAG} times in the {target.vmem_bytes >> 20} MiB of VMEM of {target.name}; with that "
        f"time_block the largest block_size is {largest}"
    )


@dataclass(frozen=True)
class _Formula:
    """The options that kernels are specialised for."""

    label_smoothing: float
    z_loss: float
    softcap: float | None
    compares_bf16: bool


def _expm1(x: jax.Array) -> jax.Array:
    """Returns exp(x) - 1 for x <= 0, with a small relative error near 0."""
    near = jnp.maximum(x, -0.5)
    series = jnp.ones_like(near)
    for divisor in range(9, 1, -1):
        series = 1 + near * series / divisor
    return jnp.where(x > -0.5, near * series, jnp.exp(x) - 1)


def _kernel(*refs: Any, plan: Plan, formula: _Formula, reduces: bool, writes: bool) -> None:
    places, numbers, logits, *rest = refs
    dlogits: Any = rest.pop(0) if writes else None
    found: Any = rest.pop(0) if reduces else None
    ring, arrived, left, head, following, state = rest
    # Lane by lane: of the maximum, the sum of exponentials beneath it, the sum of logits, the
    # label's logit; then, the same in all lanes: lse, the factor of exp(z - lse), whether the token
    # takes part, and the gradient at the label.
    highest, total, sums, picked, shift, scale, takes_part, at_label = (
        state.at[index] for index in range(8)
    )
    spread = state.at[8]

    rows, columns, tiles = plan.time_block, plan.block_size, plan.tiles
    slots, count = plan.slots, plan.blocks * plan.tiles
    unit = sublanes(plan.dtype)
    block = pl.program_id(0)
    first = block * tiles
    last_columns = plan.vocab - (tiles - 1) * columns

    def slot_of(tile: Any) -> Any:
        return lax.rem(tile, slots)

    # A copy that is ragged has another, static, shape, and takes whole registers: what HBM holds of
    # an array is padded to those anyway.
    row_kinds = _kinds(plan.tokens, rows, plan.multiples[0])
    column_kinds = _kinds(plan.vocab, columns, plan.multiples[1])

    def copy(tile: Any, outwards: bool, act: Callable[[Any], None]) -> None:
        row, column, slot = lax.div(tile, tiles), lax.rem(tile, tiles), slot_of(tile)
        for which_rows, height in row_kinds:
            for which_columns, width in column_kinds:

                def transfer(height: int = height, width: int = width) -> None:
                    top = pl.multiple_of(row * rows, unit)
                    side = pl.multiple_of(column * columns, LANES)
                    outside = (pl.ds(top, height), pl.ds(side, width))
                    inside = ring.at[slot, pl.ds(0, height), pl.ds(0, width)]
                    if outwards:
                        act(pltpu.make_async_copy(inside, dlogits.at[outside], left.at[slot]))
                    else:
                        act(pltpu.make_async_copy(logits.at[outside], inside, arrived.at[slot]))

                _when_all(
                    [which_rows(row, plan.blocks), which_columns(column, tiles)],
                    transfer,
                )

    def start(copy: Any) -> None:
        copy.start()

    def wait(copy: Any) -> None:
        copy.wait()

    # The tiles of a block's labels, as a list of rows for each tile.
    @pl.loop(0, tiles)
    def _(tile: Any) -> None:
        head[tile] = -1

    @pl.loop(0, rows)
    def _(row: Any) -> None:
        tile = places[0, 0, row]

        @pl.when(tile >= 0)
        def _() -> None:
            following[row] = head[tile]
            head[tile] = row

    def for_labels(tile: Any, act: Callable[[Any, Any, Any, Any], None]) -> None:
        """Calls `act` for each row whose label lies in `tile`, with the register that holds it."""

        def step(row: Any) -> Any:
            offset = places[0, 1, row]
            top = pl.multiple_of(lax.div(row, unit) * unit, unit)
            side = pl.multiple_of(lax.div(offset, LANES) * LANES, LANES)
            shape = (unit, LANES)
            is_it = (lax.broadcasted_iota(jnp.int32, shape, 0) == row - top) & (
                lax.broadcasted_iota(jnp.int32, shape, 1) == offset - side
            )
            act(row, pl.ds(top, unit), pl.ds(side, LANES), is_it)
            return following[row]

        lax.while_loop(lambda row: row >= 0, step, head[tile])

    def pick(slot: Any) -> Callable[..., None]:
        def act(_: Any, group: Any, side: Any, is_it: Any) -> None:
            z = ring[slot, group, side].astype(jnp.float32)
            picked[group, :] = jnp.where(is_it, z, picked[group, :])

        return act

    def put(slot: Any) -> Callable[..., None]:
        def act(_: Any, group: Any, side: Any, is_it: Any) -> None:
            before = ring[slot, group, side].astype(jnp.float32)
            after = jnp.where(is_it, at_label[group, :], before)
            ring[slot, group, side] = after.astype(plan.dtype)

        return act

    def over_columns(tile: Any, act: Callable[..., Any], carry: Any) -> Any:
        """Folds `act` over chunks: first column, registers, and valid lanes of the last."""
        size = min(CHUNK, columns)
        while columns % size:
            size -= LANES
        full = columns // size
        whole = last_columns // size
        chunks = jnp.where(tile == tiles - 1, whole, full) if whole != full else full

        def body(index: Any, carry: Any) -> Any:
            return act(pl.multiple_of(index * size, LANES), size // LANES, LANES, carry)

        carry = lax.fori_loop(0, chunks, body, carry)
        if rest := last_columns % size:

            def tail(carry: Any) -> Any:
                registers = -(-rest // LANES)
                return act(whole * size, registers, rest - (registers - 1) * LANES, carry)

            carry = lax.cond(tile == tiles - 1, tail, lambda carry: carry, carry)
        return carry

    height, width = plan.piece

    def pieces(registers: int, lanes: int) -> list[tuple[int, int, Any, jax.Array | None]]:
        """Cuts a chunk into what vector units take at a time.

        For each: its first row of the group, its registers, what it indexes, and which lanes of it
        are logits, where not all are.
        """
        found = []
        for register in range(0, registers, width // LANES):
            count = min(width // LANES, registers - register)
            is_valid = None
            if lanes < LANES and register + count == registers:
                shape = (height, count * LANES)
                end = (count - 1) * LANES + lanes
                is_valid = lax.broadcasted_iota(jnp.int32, shape, 1) < end
            for top in range(0, unit, height):
                where = pl.ds(top, height), pl.ds(register * LANES, count * LANES)
                found.append((top, count, where, is_valid))
        return found

    def chunk_of(slot: Any, group: Any, column: Any, registers: int) -> Any:
        # A view, so that registers are at fixed offsets of one address: scalar units are slow.
        return ring.at[slot, group, pl.ds(column, registers * LANES)]

    def by_height(values: Any) -> dict[int, Any]:
        """What a group of rows has of a value, by the first row of each piece."""
        return {top: values[top : top + height] for top in range(0, unit, height)}

    def repeated(values: Any, count: int) -> Any:
        return values if count == 1 else jnp.concatenate([values] * count, axis=1)

    def registers_of(values: Any, count: int) -> list[Any]:
        return [values[:, index * LANES : (index + 1) * LANES] for index in range(count)]

    def cap(z: jax.Array) -> jax.Array:
        if formula.softcap is None:
            return z
        return formula.softcap * jnp.tanh(z * (1 / formula.softcap))

    tops = range(0, unit, height)

    def reduce_tile(tile: Any, slot: Any) -> None:
        compared = plan.dtype if formula.compares_bf16 else jnp.float32

        @pl.loop(0, rows // unit)
        def _(index: Any) -> None:
            group = pl.ds(pl.multiple_of(index * unit, unit), unit)

            def largest(column: Any, registers: int, lanes: int, carry: Any) -> Any:
                parts = {top: list(own) for top, own in zip(tops, carry, strict=True)}
                chunk = chunk_of(slot, group, column, registers)
                for at, (top, count, where, is_valid) in enumerate(pieces(registers, lanes)):
                    x = chunk[where].astype(compared)
                    if is_valid is not None:
                        x = jnp.where(is_valid, x.astype(jnp.float32), -jnp.inf).astype(compared)
                    own = parts[top]
                    part = at // len(tops) % len(own)
                    if count * LANES < width:
                        own[part] = jnp.concatenate(
                            [
                                jnp.maximum(own[part][:, : count * LANES], x),
                                own[part][:, count * LANES :],
                            ],
                            axis=1,
                        )
                    else:
                        own[part] = jnp.maximum(own[part], x)
                return tuple(map(tuple, parts.values()))

            lowest = jnp.full((height, width), -jnp.inf, compared)
            found = over_columns(tile, largest, ((lowest,) * 4,) * len(tops))
            mosts = [
                _tree(
                    jnp.maximum,
                    registers_of(_tree(jnp.maximum, own).astype(jnp.float32), width // LANES),
                )
                for own in found
            ]
            before = highest[group, :]
            most = mosts[0] if len(mosts) == 1 else jnp.concatenate(mosts, axis=0)
            peak = jnp.maximum(before, cap(most))
            peaks = by_height(peak)

            def add(column: Any, registers: int, lanes: int, carry: Any) -> Any:
                parts, sums = ({t: list(o) for t, o in zip(tops, c, strict=True)} for c in carry)
                chunk = chunk_of(slot, group, column, registers)
                for at, (top, count, where, is_valid) in enumerate(pieces(registers, lanes)):
                    z = cap(chunk[where].astype(jnp.float32))
                    exponential = jnp.exp(z - repeated(peaks[top], count))
                    if is_valid is not None:
                        exponential = jnp.where(is_valid, exponential, 0.0)
                        z = jnp.where(is_valid, z, 0.0)
                    for accumulated, values in ((parts[top], exponential), (sums[top], z)):
                        if not accumulated:
                            continue
                        for register, value in enumerate(registers_of(values, count)):
                            part = (at // len(tops) * count + register) % len(accumulated)
                            accumulated[part] += value
                return tuple(tuple(map(tuple, c.values())) for c in (parts, sums))

            zero = jnp.zeros((height, LANES), jnp.float32)
            smooth = (zero,) * 2 if formula.label_smoothing else ()
            start = ((zero,) * 4,) * len(tops), (smooth,) * len(tops)
            parts, more = over_columns(tile, add, start)

            def joined(parts: Any) -> Any:
                sums = [_tree(jnp.add, own) for own in parts]
                return sums[0] if len(sums) == 1 else jnp.concatenate(sums, axis=0)

            highest[group, :] = peak
            total[group, :] = total[group, :] * jnp.exp(before - peak) + joined(parts)
            if formula.label_smoothing:
                sums[group, :] += joined(more)

    def write_tile(tile: Any, slot: Any) -> None:
        @pl.loop(0, rows // unit)
        def _(index: Any) -> None:
            group = pl.ds(pl.multiple_of(index * unit, unit), unit)
            shifts, factors = by_height(shift[group, :]), by_height(scale[group, :])
            active = by_height(takes_part[group, :] != 0)
            even = by_height(spread[group, :]) if formula.label_smoothing else None

            def write(column: Any, registers: int, lanes: int, carry: Any) -> Any:
                chunk = chunk_of(slot, group, column, registers)
                for top, count, where, _ in pieces(registers, lanes):
                    z = cap(chunk[where].astype(jnp.float32))
                    factor = repeated(factors[top], count)
                    d = jnp.exp(z - repeated(shifts[top], count)) * factor
                    if even is not None:
                        d += repeated(even[top], count)
                        if formula.softcap is None:
                            # NaN where the whole row is.
                            d = jnp.where(z == -jnp.inf, factor * 0.0, d)
                    if formula.softcap is not None:
                        t = z * (1 / formula.softcap)
                        d *= (1 - t) * (1 + t)
                    d = jnp.where(repeated(active[top], count), d, 0.0)
                    chunk[where] = d.astype(plan.dtype)
                return carry

            over_columns(tile, write, 0)

    def column_of(row: int) -> jax.Array:
        """Turns a row of numbers, a token a lane, into a column."""
        line = numbers[0, row : row + 1, :]
        return jnp.sum(jnp.where(_diagonal(rows), line, 0.0), axis=1, keepdims=True)

    def row_of(column: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(_diagonal(rows), column, 0.0), axis=0, keepdims=True)

    def prepare(lse: jax.Array, low: jax.Array) -> None:
        """Sets what the sweep that writes needs of each token."""
        g, h, k = column_of(0), column_of(1), column_of(2)
        wide = (rows, LANES)
        a = g * (1 + 2 * formula.z_loss * lse) - h + k
        c = -g * (formula.label_smoothing / plan.vocab)
        shift[...] = jnp.broadcast_to(lse, wide)
        scale[...] = jnp.broadcast_to(a * jnp.exp(-low), wide)
        takes_part[...] = jnp.broadcast_to(
            jnp.where((g != 0) | (h != 0) | (k != 0), 1.0, 0.0), wide
        )
        if formula.label_smoothing:
            spread[...] = jnp.broadcast_to(c, wide)

    def prepare_labels(lse: jax.Array, low: jax.Array) -> None:
        """Sets the gradient at the label: of a token that is all but certain, p - 1 is small."""
        g, k = column_of(0), column_of(2)
        a = g * (1 + 2 * formula.z_loss * lse) - column_of(1) + k
        z = cap(jnp.sum(picked[...], axis=1, keepdims=True))
        d = a * _expm1((z - lse) - low)
        d += g * (2 * formula.z_loss * lse + formula.label_smoothing) + k
        d -= g * (formula.label_smoothing / plan.vocab)
        if formula.softcap is None:
            d = jnp.where(z == -jnp.inf, a * 0.0, d)
        else:
            t = z * (1 / formula.softcap)
            d *= (1 - t) * (1 + t)
        d = jnp.where(takes_part[:, :1] != 0, d, 0.0)
        at_label[...] = jnp.broadcast_to(d, (rows, LANES))

    ahead = slots - LAG if writes else slots

    @pl.when(block == 0)
    def _() -> None:
        @pl.loop(0, min(ahead, count))
        def _(tile: Any) -> None:
            copy(tile, False, start)

    def fetch(tile: Any) -> None:
        @pl.when(tile < count)
        def _() -> None:
            copy(tile, False, start)

    picked[...] = jnp.zeros((rows, LANES), jnp.float32)
    if reduces:
        highest[...] = jnp.full((rows, LANES), LEAST, jnp.float32)
        total[...] = jnp.zeros((rows, LANES), jnp.float32)
        if formula.label_smoothing:
            sums[...] = jnp.zeros((rows, LANES), jnp.float32)

        @pl.loop(0, tiles)
        def _(index: Any) -> None:
            tile = first + index
            slot = slot_of(tile)
            copy(tile, False, wait)
            for_labels(index, pick(slot))
            reduce_tile(index, slot)
            if not writes:
                fetch(tile + slots)

        peak = jnp.max(highest[...], axis=1, keepdims=True)
        mass = jnp.sum(total[...] * jnp.exp(highest[...] - peak), axis=1, keepdims=True)
        # A row of nothing but -inf has no sum, and one with +inf no number.
        log = jnp.where(mass > 0, jnp.log(mass), jnp.nan)
        lse = peak + log
        low = (peak - lse) + log
        # The error of a sum, whichever term is larger.
        low = jnp.where(jnp.abs(peak) >= jnp.abs(log), low, (log - lse) + peak)
        z = cap(jnp.sum(picked[...], axis=1, keepdims=True))
        found[0, 0:1, :] = row_of(lse)
        found[0, 1:2, :] = row_of(low)
        found[0, 2:3, :] = row_of(z)
        if formula.label_smoothing:
            found[0, 3:4, :] = row_of(jnp.sum(sums[...], axis=1, keepdims=True))
        else:
            found[0, 3:4, :] = jnp.zeros((1, rows), jnp.float32)
        found[0, 4:, :] = jnp.zeros((NUMBERS - 4, rows), jnp.float32)
    elif writes:
        lse, low = column_of(3), column_of(4)
    if writes:
        prepare(lse, low)
        if reduces:
            prepare_labels(lse, low)

        @pl.loop(0, tiles)
        def _(index: Any) -> None:
            tile = first + index
            slot = slot_of(tile)
            if not reduces:
                copy(tile, False, wait)
                for_labels(index, pick(slot))

                @pl.when(head[index] >= 0)
                def _() -> None:
                    prepare_labels(lse, low)

            write_tile(index, slot)
            for_labels(index, put(slot))
            copy(tile, True, start)

            @pl.when(tile >= LAG)
            def _() -> None:
                copy(tile - LAG, True, wait)

            fetch(tile - LAG + slots)

        @pl.when(block == plan.blocks - 1)
        def _() -> None:
            for back in range(min(LAG, count), 0, -1):
                copy(count - back, True, wait)


def _kinds(extent: int, block: int, multiple: int) -> list[tuple[Callable[..., Any], int]]:
    """The sizes that blocks of an extent come in, with what tells which are of each."""
    rest = extent % block
    if not rest:
        return [(lambda index, blocks: None, block)]
    # Interpreted, an array has no padding: nothing beyond it may be touched.
    ragged = -(-rest // multiple) * multiple
    last: tuple[Callable[..., Any], int] = (lambda index, blocks: index == blocks - 1, ragged)
    if extent < block:
        return [(lambda index, blocks: None, ragged)]
    return [(lambda index, blocks: index < blocks - 1, block), last]


def _when_all(conditions: Sequence[Any], act: Callable[[], None]) -> None:
    known = [condition for condition in conditions if condition is not None]
    if not known:
        act()
        return
    pl.when(known[0] if len(known) == 1 else known[0] & known[1])(act)


def _tree(combine: Callable[..., Any], parts: Sequence[Any]) -> Any:
    while len(parts) > 1:
        pairs = [combine(*parts[at : at + 2]) for at in range(0, len(parts) - 1, 2)]
        parts = [*pairs, *parts[len(pairs) * 2 :]]
    return parts[0]


def _diagonal(extent: int) -> jax.Array:
    shape = (extent, extent)
    return lax.broadcasted_iota(jnp.int32, shape, 0) == lax.broadcasted_iota(jnp.int32, shape, 1)


def _call(
    target: Target,
    plan: Plan,
    options: Options,
    logits: jax.Array,
    labels: jax.Array,
    numbers: Sequence[jax.Array],
    *,
    reduces: bool,
    writes: bool,
) -> tuple[jax.Array | None, jax.Array | None]:
    """Runs the kernel on logits [T, V].

    Returns dlogits and what the reduction found, [NUMBERS, T], where there are such.
    """
    rows, blocks = plan.time_block, plan.blocks
    missing = blocks * rows - plan.tokens

    def by_block(values: jax.Array, fill: Any) -> jax.Array:
        """[.., T] to [blocks, .., time_block]."""
        padded = jnp.pad(values, ((0, 0), (0, missing)), constant_values=fill)
        return padded.reshape(-1, blocks, rows).swapaxes(0, 1)

    in_range = (labels >= 0) & (labels < plan.vocab)
    column = jnp.where(in_range, labels, 0).astype(jnp.int32)
    tile = jnp.where(in_range, column // plan.block_size, -1)
    places = by_block(jnp.stack([tile, column % plan.block_size]), -1)
    zero = jnp.zeros(plan.tokens, jnp.float32)
    given = by_block(jnp.stack([*numbers, *[zero] * (NUMBERS - len(numbers))]), 0)

    def block_of(extent: int, **space: Any) -> pl.BlockSpec:
        return pl.BlockSpec((1, extent, rows), lambda block: (block, 0, 0), **space)

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    out_shape: list[Any] = []
    out_specs = []
    if writes:
        out_shape.append(jax.ShapeDtypeStruct(logits.shape, logits.dtype))
        out_specs.append(anywhere)
    if reduces:
        out_shape.append(jax.ShapeDtypeStruct((blocks, NUMBERS, rows), jnp.float32))
        out_specs.append(block_of(NUMBERS))
    formula = _Formula(
        options.label_smoothing, options.z_loss, options.softcap, target.compares_bf16
    )
    name = {(True, True): "fused", (True, False): "forward", (False, True): "backward"}
    elements = plan.tokens * plan.vocab
    results = pl.pallas_call(
        partial(_kernel, plan=plan, formula=formula, reduces=reduces, writes=writes),
        grid=(blocks,),
        in_specs=[block_of(2, memory_space=pltpu.SMEM), block_of(NUMBERS), anywhere],
        out_specs=out_specs,
        out_shape=out_shape,
        scratch_shapes=[
            pltpu.VMEM((plan.slots, rows, plan.block_size), logits.dtype),
            pltpu.SemaphoreType.DMA((plan.slots,)),
            pltpu.SemaphoreType.DMA((plan.slots,)),
            pltpu.SMEM((plan.tiles,), jnp.int32),
            pltpu.SMEM((rows,), jnp.int32),
            pltpu.VMEM((9, rows, LANES), jnp.float32),
        ],
        # The row of one block leaves while that of the next comes in: in order, and on one core.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=target.vmem_bytes
        ),
        cost_estimate=pl.CostEstimate(
            flops=10 * elements,
            transcendentals=elements * (reduces + writes),
            bytes_accessed=elements * logits.dtype.itemsize * (1 + writes),
        ),
        input_output_aliases={2: 0} if writes and options.donate_logits else {},
        interpret=target.interpret,
        name=f"xentile_cross_entropy_{name[reduces, writes]}",
    )(places, given, logits)
    results = list(results)
    dlogits = results.pop(0) if writes else None
    if not reduces:
        return dlogits, None
    return dlogits, results[0].swapaxes(0, 1).reshape(NUMBERS, -1)[:, : plan.tokens]


def kernel(target: Target, call: Call) -> Callable[..., Sequence[jax.Array]]:
    """Returns the function that does what `call` is for, on arrays of any leading axes."""
    attributes = dict(call.attributes)
    options = Options(
        ignore_index=int(attributes["ignore_index"]),
        label_smoothing=float(attributes["label_smoothing"]),
        z_loss=float(attributes["z_loss"]),
        softcap=float(attributes["softcap"]) if "softcap" in attributes else None,
        block_size=int(attributes["block_size"]) if "block_size" in attributes else None,
        time_block=int(attributes["time_block"]) if "time_block" in attributes else None,
        every_token=bool(attributes.get("every_token", True)),
        donate_logits=call.reuses is not None,
    )
    name = call.target.removeprefix("xentile_cross_entropy_")
    functions: Any = {"forward": _forward, "backward": _backward, "fused": _fused}
    function = functions[name]

    def flat(logits: jax.Array, *tokens: jax.Array) -> Sequence[jax.Array]:
        leading = logits.shape[:-1]
        if logits.dtype not in (jnp.bfloat16, jnp.float32):
            raise TypeError(
                f"{OPERATION}: logits have dtype {logits.dtype}; on TPU it must be bfloat16 or "
                "float32"
            )
        run: Any = _nothing if 0 in leading else partial(_sweep, target, options)
        rows = logits.reshape(math.prod(leading), logits.shape[-1])
        given = [rows, *(x.reshape(-1) for x in tokens)]
        # HBM pads arrays of fewer rows than a register has to 1, 2 or 4 of them, which copies of
        # whole registers would leave.
        count, missing = len(rows), max(sublanes(logits.dtype) - len(rows), 0)
        if missing and 0 not in leading:
            given = [jnp.pad(x, ((0, missing), *((0, 0),) * (x.ndim - 1))) for x in given]
        results = function(run, options, *given)
        return [x[:count].reshape(*leading, *x.shape[1:]) for x in results]

    return flat


def _nothing(logits: jax.Array, labels: jax.Array, *_: Any, **__: bool) -> Any:
    return logits, jnp.zeros((NUMBERS, *labels.shape), jnp.float32)


def _sweep(
    target: Target,
    options: Options,
    logits: jax.Array,
    labels: jax.Array,
    *numbers: jax.Array,
    reduces: bool,
    writes: bool,
) -> tuple[jax.Array | None, jax.Array | None]:
    tokens, vocab = logits.shape
    chosen = plan(
        target,
        tokens,
        vocab,
        logits.dtype,
        time_block=options.time_block,
        block_size=options.block_size,
        reduces=reduces,
        writes=writes,
    )
    if chosen is not None:
        return _call(
            target, chosen, options, logits, labels, numbers, reduces=reduces, writes=writes
        )
    # Rows too long to stay are read twice.
    run = partial(_sweep, target, options)
    _, found = run(logits, labels, reduces=True, writes=False)
    assert found is not None
    (dloss,) = numbers
    zero = jnp.zeros_like(dloss)
    given = (dloss, zero, zero, found[0], found[1])
    dlogits, _ = run(logits, labels, *given, reduces=False, writes=True)
    return dlogits, found


def _out_of_range(options: Options, vocab: int, labels: jax.Array) -> jax.Array:
    in_range = (labels >= 0) & (labels < vocab)
    return ~in_range & ~is_ignored(options, labels)


def outputs_of(
    options: Options, vocab: int, labels: jax.Array, found: jax.Array, idle: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns loss, logps, lse and lse_low of what a reduction found; 0 for `idle` tokens.

    `idle` None stands for ignored tokens.
    """
    lse, low, at_label, total = found[:4]
    logps = (at_label - lse) - low
    e = options.label_smoothing
    loss = (1 - e) * -logps + options.z_loss * lse**2
    if e:
        loss += e * ((lse - total / vocab) + low)
    bad, ignored = _out_of_range(options, vocab, labels), is_ignored(options, labels)

    def masked(values: jax.Array) -> jax.Array:
        return jnp.where(ignored, 0, jnp.where(bad, jnp.nan, values))

    def asked(values: jax.Array) -> jax.Array:
        unasked = ignored if idle is None else idle
        return values if options.every_token else jnp.where(unasked, 0, values)

    return asked(masked(loss)), asked(masked(logps)), asked(lse), asked(low)


def cotangents_of(
    options: Options, vocab: int, labels: jax.Array, *given: jax.Array
) -> list[jax.Array]:
    """Returns cotangents as kernels take them: 0 for idle tokens, NaN for wrong labels."""
    idle = is_ignored(options, labels)
    idle |= jnp.stack([cotangent == 0 for cotangent in given]).all(0)
    bad = _out_of_range(options, vocab, labels)
    return [jnp.where(idle, 0, jnp.where(bad, jnp.nan, cotangent)) for cotangent in given]


def _forward(run: Any, options: Options, logits: jax.Array, labels: jax.Array) -> Any:
    _, found = run(logits, labels, reduces=True, writes=False)
    return outputs_of(options, logits.shape[-1], labels, found)


def _backward(
    run: Any,
    options: Options,
    logits: jax.Array,
    labels: jax.Array,
    lse: jax.Array,
    low: jax.Array,
    *cotangents: jax.Array,
) -> Any:
    given = cotangents_of(options, logits.shape[-1], labels, *cotangents)
    dlogits, _ = run(logits, labels, *given, lse, low, reduces=False, writes=True)
    return (dlogits,)


def _fused(
    run: Any, options: Options, logits: jax.Array, labels: jax.Array, dloss: jax.Array
) -> Any:
    vocab = logits.shape[-1]
    (given,) = cotangents_of(options, vocab, labels, dloss)
    dlogits, found = run(logits, labels, given, reduces=True, writes=True)
    loss, _, lse, low = outputs_of(options, vocab, labels, found, given == 0)
    return loss, lse, low, dlogits
