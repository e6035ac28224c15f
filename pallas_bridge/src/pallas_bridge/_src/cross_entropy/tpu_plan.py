"""The tiling of logits for the TPU kernel, and its layout of VMEM."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.experimental import pallas as pl

from ..losses.options import Tile
from ..pallas import Target
from .declaration import OPERATION

LANES = 128
# Outgoing copies in flight before the slot of the oldest is reused.
LAG = 2
# Rows of the arrays of scalars a token, to the kernel and from it: the rows of a register.
NUMBERS = 8
# The tile where tokens are lanes, the quickest by the estimate of v5e, v6e and tpu7x.
ACROSS_TILE = (128, 16384)


@dataclass(frozen=True)
class Plan:
    """The tiling of logits [tokens, vocab], and the layout of VMEM."""

    tokens: int
    vocab: int
    dtype: Any
    time_block: int
    block_size: int
    # Whether a block of rows stays in VMEM between its two sweeps.
    resident: bool
    slots: int
    # The multiples that ragged copies are rounded up to, as HBM pads arrays.
    multiples: tuple[int, int] = (8, LANES)
    # Rows and lanes that are one register as memory has them.
    piece: tuple[int, int] = (8, LANES)
    # Of logits that lie as [sequences, vocab, tokens of each], so that tokens are lanes; 0 of those
    # that lie as [tokens, vocab].
    sequences: int = 0

    @property
    def is_across(self) -> bool:
        """Whether tokens are lanes."""
        return self.sequences > 0

    def order(self, of_tokens: Any, of_vocab: Any) -> tuple[Any, Any]:
        """Orders something of tokens and something of the vocabulary as a tile lies in VMEM."""
        return (of_vocab, of_tokens) if self.is_across else (of_tokens, of_vocab)

    @property
    def state_shape(self) -> tuple[int, int]:
        """Rows and lanes of what is kept of each token of a block."""
        return self.order(self.time_block, sublanes(self.dtype) if self.is_across else LANES)

    def state_of(self, rows: Any, lanes: Any) -> tuple[Any, Any]:
        """The index of the state of the tokens that lie in `rows` and `lanes` of a tile."""
        return (slice(None), lanes) if self.is_across else (rows, slice(None))

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
        """Bytes of VMEM, with an estimate of the kernel's stack."""
        return self.slots * self.tile_bytes + _working_bytes(self.time_block)


def _working_bytes(time_block: int) -> int:
    # State a row and lane, blocks of scalars (twice, as they are fetched ahead), and the stack:
    # rows are transposed to columns by [time_block, time_block].
    rows = 9 * time_block * LANES * 4
    transposes = 4 * time_block * max(time_block, LANES) * 4
    return rows + transposes + 4 * NUMBERS * max(time_block, LANES) * 4 + (1 << 20)


def lies_across(length: int, vocab: int) -> bool:
    """Whether tokens are lanes of logits [.., length, vocab] where no tile is named.

    XLA has them so as operands and results of a program, since that pads less: between matrix
    products it has them as the kernel does.
    """
    return length > 0 and length % LANES == 0 and vocab % LANES != 0


def sublanes(dtype: Any) -> int:
    """Returns the rows of a register of `dtype`."""
    return 32 // int(np.dtype(dtype).itemsize)


def check_tile(operation: object, tile: Tile, multiples: tuple[int, int], of: str = "") -> None:
    """Checks the extents of a tile that the user named.

    Raises:
        ValueError: an extent that is not made of whole registers, of `multiples`.
    """
    for name, extent, multiple in zip(("time_block", "block_size"), tile, multiples, strict=True):
        if extent is not None and extent % multiple:
            raise ValueError(
                f"{operation}: {name} is {extent}; on TPU{of} it must be a multiple of {multiple}, "
                f"such as {-(-extent // multiple) * multiple}"
            )


def plan_tiles(
    target: Target,
    tokens: int,
    vocab: int,
    dtype: Any,
    *,
    time_block: int | None,
    block_size: int | None,
    reduces: bool,
    writes: bool,
    sequences: int = 0,
) -> Plan | None:
    """Returns the tiling for the sweeps wanted; None where VMEM does not hold both at once.

    With `sequences`, tokens are lanes.

    Raises:
        ValueError: a tile that is not made of whole registers, or that does not fit in VMEM.
    """
    unit = sublanes(dtype)
    with_logits = f", with logits of {np.dtype(dtype).name},"
    check_tile(OPERATION, (time_block, block_size), (unit, LANES), with_logits)
    padded = 8 if np.dtype(dtype).itemsize == 4 else target.rows_of_16_bits
    # Interpreted arrays are not padded.
    padding = (LANES, padded) if sequences else (padded, LANES)
    multiples = (1, 1) if target.interpret else padding
    # Two registers' worth of 8 rows of 16 bits lie side by side, where rows are padded to 8.
    packed = np.dtype(dtype).itemsize == 2
    piece = (unit, LANES) if not packed or target.rows_of_16_bits == 16 else (8, 2 * LANES)
    whole = -(-vocab // LANES) * LANES
    heights, width = (ACROSS_TILE[:1], ACROSS_TILE[1]) if sequences else ((64, 32, 16, 8), 32768)
    columns = min(block_size or width, whole)
    both = reduces and writes

    def make_plan(rows: int, columns: int) -> Plan | None:
        tiles = -(-vocab // columns)
        least = tiles + 2 * LAG if both else 2 * LAG
        wanted = 2 * tiles if both else 4 * LAG
        one = Plan(tokens, vocab, dtype, rows, columns, both, 1, multiples, piece, sequences)
        room = (target.vmem_bytes - _working_bytes(rows)) // one.tile_bytes
        if room < least:
            return None
        return dataclasses.replace(one, slots=min(max(wanted, least), room))

    enough = -(-max(tokens, 1) // unit) * unit
    candidates = heights if time_block is None else (time_block,)
    for rows in candidates:
        if rows % unit == 0 and (found := make_plan(min(rows, enough), columns)) is not None:
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
