"""The kernel of cross-entropy for TPUs: forward, backward and fused.

Tiles of [time_block, block_size] come from HBM into a ring of slots in VMEM, by copies that the
kernel starts and awaits itself (`_Tiles`). Over a block of rows it sweeps once to reduce, once to
write gradients, or both (`run`); where both, the tiles stay in their slots between the sweeps, so
that HBM sees each byte once in and once out. Gradients take the place of the logits in their slot
and leave from there, while tiles of the next rows come in. What a row has of its label goes by
scalars, tile by tile (`_Labels`); all else by vectors (`_Sweeps`).

The online softmax is that of Milakov and Gimelshein (2018), kept a lane at a time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..losses.options import Options
from .tpu_chunks import Sweeps
from .tpu_kernel_across import AcrossSweeps
from .tpu_plan import LAG, LANES, NUMBERS, Plan, sublanes

# The running maximum of a lane starts here and not at -inf, so that no rescale is inf - inf.
LEAST = float(np.finfo(np.float32).min)
# Columns that are unrolled at a time.
CHUNK = 8192
# From this log p on, p - 1 is computed by expm1.
NEAR_ONE = -0.5


@dataclass(frozen=True)
class Formula:
    """The options that the kernel is specialised for."""

    options: Options
    compares_bf16: bool = False

    @property
    def smooths(self) -> bool:
        """Whether there is label smoothing."""
        return self.options.label_smoothing != 0

    def cap(self, z: jax.Array) -> jax.Array:
        """Applies softcap, where there is one, and temperature."""
        softcap, temperature = self.options.softcap, self.options.temperature
        if softcap is not None:
            z = softcap * jnp.tanh(z * (1 / softcap))
        return z if temperature == 1 else z * (1 / temperature)

    def times_slope(self, d: jax.Array, z: jax.Array) -> jax.Array:
        """Multiplies by the derivative of `cap`, of its result."""
        softcap, temperature = self.options.softcap, self.options.temperature
        if softcap is not None:
            t = z * (temperature / softcap)
            d = d * ((1 - t) * (1 + t))
        return d if temperature == 1 else d * (1 / temperature)

    def gradient(self, z: jax.Array, shift: Any, factor: Any, even: Any, active: Any) -> jax.Array:
        """The gradient of logits that are not their token's label, of what `cap` returns.

        The other arguments are scalars of tokens; `even` is None without smoothing.
        """
        d = jnp.exp(z - shift) * factor
        if even is not None:
            d += even
            if self.options.softcap is None:
                # NaN where the whole row is.
                d = jnp.where(z == -jnp.inf, factor * 0.0, d)
        d = self.times_slope(d, z)
        return jnp.where(active, d, 0.0)


def finish_lse(highest: jax.Array, total: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
    """Returns lse and its rounding error, of running maxima and sums beneath them on an axis."""
    peak = jnp.max(highest, axis=axis, keepdims=True)
    mass = jnp.sum(total * jnp.exp(highest - peak), axis=axis, keepdims=True)
    # A row of nothing but -inf has no sum, and one with +inf no number.
    log = jnp.where(mass > 0, jnp.log(mass), jnp.nan)
    lse = peak + log
    # The error of a sum, whichever term is larger.
    low = jnp.where(jnp.abs(peak) >= jnp.abs(log), (peak - lse) + log, (log - lse) + peak)
    return lse, low


def run(*refs: Any, plan: Plan, formula: Formula, reduces: bool, writes: bool) -> None:
    """Runs one step of the grid: a block of rows.

    `refs` are places and scalars of `pallas_tpu`, logits, dlogits where it writes, the results of
    the reduction where it reduces, and scratch.
    """
    places, numbers, logits, *rest = refs
    dlogits: Any = rest.pop(0) if writes else None
    found: Any = rest.pop(0) if reduces else None
    ring, arrived, left, head, following, values = rest
    block = pl.program_id(0)
    first = block * plan.tiles
    count = plan.blocks * plan.tiles
    tiles = _Tiles(plan, logits, dlogits, ring, arrived, left)
    state = _State(values)
    labels = _Labels(plan, places, head, following, ring, state)
    sweeps = (AcrossSweeps if plan.is_across else _Sweeps)(plan, formula, ring, state)
    tokens = _Tokens(plan, formula, numbers, state)

    labels.sort()
    ahead = plan.slots - LAG if writes else plan.slots

    @pl.when(block == 0)
    def _() -> None:
        @pl.loop(0, min(ahead, count))
        def _(tile: Any) -> None:
            tiles.copy(tile, False, _start)

    def fetch(tile: Any) -> None:
        @pl.when(tile < count)
        def _() -> None:
            tiles.copy(tile, False, _start)

    tokens.begin(reduces)
    if reduces:

        @pl.loop(0, plan.tiles)
        def _(index: Any) -> None:
            tile = first + index
            slot = tiles.slot_of(tile)
            tiles.copy(tile, False, _wait)
            labels.visit_labels(index, labels.pick(slot))
            sweeps.reduce(index, slot)
            if not writes:
                fetch(tile + plan.slots)

        lse, low = tokens.finish(found)
    elif writes:
        lse, low = tokens.column_of(3), tokens.column_of(4)
    if writes:
        tokens.prepare(lse, low)
        if reduces:
            tokens.prepare_labels(lse, low)

        @pl.loop(0, plan.tiles)
        def _(index: Any) -> None:
            tile = first + index
            slot = tiles.slot_of(tile)
            if not reduces:
                tiles.copy(tile, False, _wait)
                labels.visit_labels(index, labels.pick(slot))

                @pl.when(head[index] >= 0)
                def _() -> None:
                    tokens.prepare_labels(lse, low)

            sweeps.write(index, slot)
            labels.visit_labels(index, labels.put(slot))
            tiles.copy(tile, True, _start)

            @pl.when(tile >= LAG)
            def _() -> None:
                tiles.copy(tile - LAG, True, _wait)

            fetch(tile - LAG + plan.slots)

        @pl.when(block == plan.blocks - 1)
        def _() -> None:
            for back in range(min(LAG, count), 0, -1):
                tiles.copy(count - back, True, _wait)


class _State:
    """The state of each row in VMEM, `plan.state_shape` each."""

    def __init__(self, values: Any) -> None:
        # Lane by lane: of the maximum, the sum of exponentials beneath it, the sum of logits, the
        # label's logit.
        self.highest, self.total, self.sums, self.picked = (values.at[index] for index in range(4))
        # The same in all lanes: lse, the factor of exp(z - lse), whether the token takes part, the
        # gradient at the label, and what smoothing adds to every gradient.
        self.shift, self.scale, self.takes_part, self.at_label, self.spread = (
            values.at[index] for index in range(4, 9)
        )


def _start(copy: Any) -> None:
    copy.start()


def _wait(copy: Any) -> None:
    copy.wait()


class _Tiles:
    """Copies of tiles between HBM and the ring of slots."""

    def __init__(
        self, plan: Plan, logits: Any, dlogits: Any, ring: Any, arrived: Any, left: Any
    ) -> None:
        self.plan, self.logits, self.dlogits = plan, logits, dlogits
        self.ring, self.arrived, self.left = ring, arrived, left
        # A copy that is ragged has another, static, shape, and takes whole registers: what HBM
        # holds of an array is padded to those anyway.
        self.row_kinds = _kinds(plan.tokens, plan.time_block, plan.multiples[0])
        self.column_kinds = _kinds(plan.vocab, plan.block_size, plan.multiples[1])

    def slot_of(self, tile: Any) -> Any:
        """Where a tile lies in the ring."""
        return lax.rem(tile, self.plan.slots)

    def copy(self, tile: Any, outwards: bool, act: Callable[[Any], None]) -> None:
        """Calls `act` with the copy of a tile: its logits inwards, or its gradients outwards."""
        plan = self.plan
        row, column = lax.div(tile, plan.tiles), lax.rem(tile, plan.tiles)
        slot = self.slot_of(tile)
        unit = sublanes(plan.dtype)
        for which_rows, height in self.row_kinds:
            for which_columns, width in self.column_kinds:

                def transfer(height: int = height, width: int = width) -> None:
                    outside: tuple[Any, ...]
                    inside = (slot, *plan.order(pl.ds(0, height), pl.ds(0, width)))
                    if plan.is_across:
                        sequence_blocks = plan.blocks // plan.sequences
                        first = lax.rem(row, sequence_blocks) * plan.time_block
                        outside = (
                            lax.div(row, sequence_blocks),
                            pl.ds(pl.multiple_of(column * plan.block_size, unit), width),
                            pl.ds(pl.multiple_of(first, LANES), height),
                        )
                    else:
                        top = pl.multiple_of(row * plan.time_block, unit)
                        side = pl.multiple_of(column * plan.block_size, LANES)
                        outside = (pl.ds(top, height), pl.ds(side, width))
                    within = self.ring.at[inside]
                    if outwards:
                        there, done = self.dlogits.at[outside], self.left.at[slot]
                        act(pltpu.make_async_copy(within, there, done))
                    else:
                        there, done = self.logits.at[outside], self.arrived.at[slot]
                        act(pltpu.make_async_copy(there, within, done))

                _when_all(
                    [which_rows(row, plan.blocks), which_columns(column, plan.tiles)],
                    transfer,
                )


class _Labels:
    """The labels of a block of rows: a list of rows for each tile that such labels lie in."""

    def __init__(
        self, plan: Plan, places: Any, head: Any, following: Any, ring: Any, state: _State
    ) -> None:
        self.plan, self.places, self.ring, self.state = plan, places, ring, state
        self.head, self.following = head, following

    def sort(self) -> None:
        """Makes the lists."""
        head, following = self.head, self.following

        @pl.loop(0, self.plan.tiles)
        def _(tile: Any) -> None:
            head[tile] = -1

        @pl.loop(0, self.plan.time_block)
        def _(row: Any) -> None:
            tile = self.places[0, 0, row]

            @pl.when(tile >= 0)
            def _() -> None:
                following[row] = head[tile]
                head[tile] = row

    def visit_labels(self, tile: Any, act: Callable[[Any, Any, Any], None]) -> None:
        """Calls `act` for each row whose label lies in `tile`, with the register that holds it."""
        unit = sublanes(self.plan.dtype)

        def step(token: Any) -> Any:
            row, offset = self.plan.order(token, self.places[0, 1, token])
            top = pl.multiple_of(lax.div(row, unit) * unit, unit)
            side = pl.multiple_of(lax.div(offset, LANES) * LANES, LANES)
            shape = (unit, LANES)
            is_it = (lax.broadcasted_iota(jnp.int32, shape, 0) == row - top) & (
                lax.broadcasted_iota(jnp.int32, shape, 1) == offset - side
            )
            act(pl.ds(top, unit), pl.ds(side, LANES), is_it)
            return self.following[token]

        lax.while_loop(lambda row: row >= 0, step, self.head[tile])

    def pick(self, slot: Any) -> Callable[[Any, Any, Any], None]:
        """Returns what stores a label's logit in the state."""
        picked = self.state.picked

        def act(group: Any, side: Any, is_it: Any) -> None:
            z = self.ring[slot, group, side].astype(jnp.float32)
            own = self.plan.state_of(group, side)
            picked[own] = jnp.where(is_it, z, picked[own])

        return act

    def put(self, slot: Any) -> Callable[[Any, Any, Any], None]:
        """Returns what writes the gradient at a label over the one that the sweep wrote."""

        def act(group: Any, side: Any, is_it: Any) -> None:
            before = self.ring[slot, group, side].astype(jnp.float32)
            own = self.plan.state_of(group, side)
            after = jnp.where(is_it, self.state.at_label[own], before)
            self.ring[slot, group, side] = after.astype(self.plan.dtype)

        return act


class _Sweeps(Sweeps):
    """The sweeps over a tile [time_block, block_size]."""

    def __init__(self, plan: Plan, formula: Formula, ring: Any, state: _State) -> None:
        super().__init__(plan, formula, ring, state)
        self.height, self.width = plan.piece
        # The first row of each piece of a group of rows.
        self.tops = range(0, self.unit, self.height)

    def over_groups(self, act: Callable[[Any], None]) -> None:
        """Calls `act` for each group of rows that are one register."""

        @pl.loop(0, self.plan.time_block // self.unit)
        def _(index: Any) -> None:
            act(pl.ds(pl.multiple_of(index * self.unit, self.unit), self.unit))

    def over_columns(self, tile: Any, act: Callable[..., Any], carry: Any) -> Any:
        """Folds `act` over chunks: first column, registers, and valid lanes of the last."""
        plan = self.plan
        size = min(CHUNK, plan.block_size)
        while plan.block_size % size:
            size -= LANES
        return self.over_chunks(tile, size, LANES, act, carry)

    def pieces(self, registers: int, lanes: int) -> list[tuple[int, int, Any, jax.Array | None]]:
        """Splits a chunk into pieces of the size of vector units.

        For each: its first row of the group, its registers, its index, and the mask of lanes that
        are logits, where not all are.
        """
        found = []
        for register in range(0, registers, self.width // LANES):
            count = min(self.width // LANES, registers - register)
            is_valid = None
            if lanes < LANES and register + count == registers:
                shape = (self.height, count * LANES)
                end = (count - 1) * LANES + lanes
                is_valid = lax.broadcasted_iota(jnp.int32, shape, 1) < end
            for top in self.tops:
                where = pl.ds(top, self.height), pl.ds(register * LANES, count * LANES)
                found.append((top, count, where, is_valid))
        return found

    def chunk_of(self, slot: Any, group: Any, column: Any, registers: int) -> Any:
        """A view, so that registers are at fixed offsets of one address: scalar units are slow."""
        return self.ring.at[slot, group, pl.ds(column, registers * LANES)]

    def by_height(self, values: Any) -> dict[int, Any]:
        """Splits the values of a group of rows, by the first row of each piece."""
        return {top: values[top : top + self.height] for top in self.tops}

    def largest(self, tile: Any, slot: Any, group: Any) -> Any:
        """The largest logit of each lane of a group of rows."""
        tops, width = self.tops, self.width
        compared = self.plan.dtype if self.formula.compares_bf16 else jnp.float32

        def act(column: Any, registers: int, lanes: int, carry: Any) -> Any:
            parts = {top: list(own) for top, own in zip(tops, carry, strict=True)}
            chunk = self.chunk_of(slot, group, column, registers)
            for at, (top, count, where, is_valid) in enumerate(self.pieces(registers, lanes)):
                x = chunk[where].astype(compared)
                if is_valid is not None:
                    x = jnp.where(is_valid, x.astype(jnp.float32), -jnp.inf).astype(compared)
                own = parts[top]
                part = at // len(tops) % len(own)
                if count * LANES < width:
                    kept = own[part][:, count * LANES :]
                    beside = jnp.maximum(own[part][:, : count * LANES], x)
                    own[part] = jnp.concatenate([beside, kept], axis=1)
                else:
                    own[part] = jnp.maximum(own[part], x)
            return tuple(map(tuple, parts.values()))

        lowest = jnp.full((self.height, width), -jnp.inf, compared)
        found = self.over_columns(tile, act, ((lowest,) * 4,) * len(tops))
        most = [_tree(jnp.maximum, own).astype(jnp.float32) for own in found]
        return _joined(jnp.maximum, [_registers_of(one, width // LANES) for one in most])

    def exponentials(self, tile: Any, slot: Any, group: Any, peak: jax.Array) -> Any:
        """Sums of exponentials beneath the peaks; and of logits, for smoothing."""
        tops, formula, peaks = self.tops, self.formula, self.by_height(peak)

        def act(column: Any, registers: int, lanes: int, carry: Any) -> Any:
            parts, sums = ({t: list(o) for t, o in zip(tops, c, strict=True)} for c in carry)
            chunk = self.chunk_of(slot, group, column, registers)
            for at, (top, count, where, is_valid) in enumerate(self.pieces(registers, lanes)):
                z = formula.cap(chunk[where].astype(jnp.float32))
                exponential = jnp.exp(z - _repeated(peaks[top], count))
                if is_valid is not None:
                    exponential = jnp.where(is_valid, exponential, 0.0)
                    z = jnp.where(is_valid, z, 0.0)
                for accumulated, values in ((parts[top], exponential), (sums[top], z)):
                    if not accumulated:
                        continue
                    for register, value in enumerate(_registers_of(values, count)):
                        part = (at // len(tops) * count + register) % len(accumulated)
                        accumulated[part] += value
            return tuple(tuple(map(tuple, c.values())) for c in (parts, sums))

        zero = jnp.zeros((self.height, LANES), jnp.float32)
        smooth = (zero,) * 2 if formula.smooths else ()
        start = ((zero,) * 4,) * len(tops), (smooth,) * len(tops)
        parts, sums = self.over_columns(tile, act, start)
        return _joined(jnp.add, parts), _joined(jnp.add, sums) if formula.smooths else None

    def write_group(self, tile: Any, slot: Any, group: Any, *scalars: Any) -> None:
        """Writes gradients over the logits of a group of rows; `scalars` are theirs."""
        formula = self.formula
        by_height = [None if one is None else self.by_height(one) for one in scalars]

        def act(column: Any, registers: int, lanes: int, carry: Any) -> Any:
            chunk = self.chunk_of(slot, group, column, registers)
            for top, count, where, _ in self.pieces(registers, lanes):
                z = formula.cap(chunk[where].astype(jnp.float32))
                own = (None if one is None else _repeated(one[top], count) for one in by_height)
                chunk[where] = formula.gradient(z, *own).astype(self.plan.dtype)
            return carry

        self.over_columns(tile, act, 0)


class _Tokens:
    """The computations once a token: before the sweeps, between them, and after."""

    def __init__(self, plan: Plan, formula: Formula, numbers: Any, state: _State) -> None:
        self.plan, self.formula, self.numbers, self.state = plan, formula, numbers, state
        self.wide = plan.state_shape
        # The axis of the state that a token's values are joined over.
        self.axis = 0 if plan.is_across else 1

    def column_of(self, row: int) -> jax.Array:
        """Transposes a row of scalars, a token a lane, to a column, unless tokens are lanes."""
        line: jax.Array = self.numbers[0, row : row + 1, :]
        if self.plan.is_across:
            return line
        diagonal = _diagonal(self.plan.time_block)
        return jnp.sum(jnp.where(diagonal, line, 0.0), axis=1, keepdims=True)

    def row_of(self, column: jax.Array) -> jax.Array:
        """Transposes a column to a row, unless tokens are lanes."""
        if self.plan.is_across:
            return column
        diagonal = _diagonal(self.plan.time_block)
        return jnp.sum(jnp.where(diagonal, column, 0.0), axis=0, keepdims=True)

    def begin(self, reduces: bool) -> None:
        """Initialises the accumulators."""
        state = self.state
        state.picked[...] = jnp.zeros(self.wide, jnp.float32)
        if reduces:
            state.highest[...] = jnp.full(self.wide, LEAST, jnp.float32)
            state.total[...] = jnp.zeros(self.wide, jnp.float32)
            if self.formula.smooths:
                state.sums[...] = jnp.zeros(self.wide, jnp.float32)

    def finish(self, found: Any) -> tuple[jax.Array, jax.Array]:
        """Writes the results of the reduction; returns lse and its rounding error."""
        state, rows = self.state, self.plan.time_block
        lse, low = finish_lse(state.highest[...], state.total[...], self.axis)
        z = self.formula.cap(jnp.sum(state.picked[...], axis=self.axis, keepdims=True))
        found[0, 0:1, :] = self.row_of(lse)
        found[0, 1:2, :] = self.row_of(low)
        found[0, 2:3, :] = self.row_of(z)
        if self.formula.smooths:
            found[0, 3:4, :] = self.row_of(jnp.sum(state.sums[...], axis=self.axis, keepdims=True))
        else:
            found[0, 3:4, :] = jnp.zeros((1, rows), jnp.float32)
        found[0, 4:, :] = jnp.zeros((NUMBERS - 4, rows), jnp.float32)
        return lse, low

    def prepare(self, lse: jax.Array, low: jax.Array) -> None:
        """Sets the scalars of each token that the writing sweep needs."""
        state, options = self.state, self.formula.options
        g, h, k = self.column_of(0), self.column_of(1), self.column_of(2)
        a = g * (1 + 2 * options.z_loss * lse) - h + k
        c = -g * (options.label_smoothing / self.plan.vocab)
        state.shift[...] = jnp.broadcast_to(lse, self.wide)
        state.scale[...] = jnp.broadcast_to(a * jnp.exp(-low), self.wide)
        state.takes_part[...] = jnp.broadcast_to(
            jnp.where((g != 0) | (h != 0) | (k != 0), 1.0, 0.0), self.wide
        )
        if options.label_smoothing:
            state.spread[...] = jnp.broadcast_to(c, self.wide)

    def prepare_labels(self, lse: jax.Array, low: jax.Array) -> None:
        """Sets the gradient at the label: a p + b + c, with no small number lost among large ones.

        Where p nears 1 that is a (p - 1) + (a + b) + c. Elsewhere p has the digits that p - 1 has
        not, and b is 0 where another shard of the vocabulary has the label.
        """
        state, formula = self.state, self.formula
        g, h, k = self.column_of(0), self.column_of(1), self.column_of(2)
        slope, e = 2 * formula.options.z_loss * lse, formula.options.label_smoothing
        a = g * (1 + slope) - h + k
        z = formula.cap(jnp.sum(state.picked[...], axis=self.axis, keepdims=True))
        x = (z - lse) - low
        d = jnp.where(
            x > NEAR_ONE,
            a * _expm1(x) + (g * (slope + e) + k),
            a * jnp.exp(x) + (h - (1 - e) * g),
        )
        d -= g * (e / self.plan.vocab)
        if formula.options.softcap is None:
            d = jnp.where(z == -jnp.inf, a * 0.0, d)
        d = formula.times_slope(d, z)
        takes_part = state.takes_part[:1, :] if self.plan.is_across else state.takes_part[:, :1]
        d = jnp.where(takes_part != 0, d, 0.0)
        state.at_label[...] = jnp.broadcast_to(d, self.wide)


def _kinds(extent: int, block: int, multiple: int) -> list[tuple[Callable[..., Any], int]]:
    """Returns the sizes of blocks of an extent, each with the condition for a block to have it."""
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


def _joined(combine: Callable[..., Any], parts: Sequence[Sequence[Any]]) -> Any:
    sums = [_tree(combine, own) for own in parts]
    return sums[0] if len(sums) == 1 else jnp.concatenate(sums, axis=0)


def _repeated(values: Any, count: int) -> Any:
    return values if count == 1 else jnp.concatenate([values] * count, axis=1)


def _registers_of(values: Any, count: int) -> list[Any]:
    return [values[:, index * LANES : (index + 1) * LANES] for index in range(count)]


def _expm1(x: jax.Array) -> jax.Array:
    """Returns exp(x) - 1 for NEAR_ONE <= x <= 0, with a small relative error near 0."""
    near = jnp.maximum(x, NEAR_ONE)
    series = jnp.ones_like(near)
    for divisor in range(9, 1, -1):
        series = 1 + near * series / divisor
    return near * series
