"""Linear cross-entropy for TPUs, in Pallas: logits exist a tile at a time, in VMEM alone.

Tiles have the vocabulary down and tokens across, so that scalars of tokens are a row, and sums over
the vocabulary are sums of registers. The forward kernel keeps lse (the online softmax of Milakov
and Gimelshein, 2018). The backward kernel recomputes each tile, once where sums of dhidden fit in
VMEM: the vocabulary is its outer loop and tokens the inner one, and it adds to dhidden of all
tokens and to dweight of one block. Where these sums do not fit, they are streamed from and to HBM,
or, where HBM has no room either, each gradient has a kernel.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..compat import varying_like
from ..cross_entropy.tpu_kernel import LEAST, Formula, finish_lse
from ..cross_entropy.tpu_plan import LANES, NUMBERS, check_tile
from ..logits_gemms import Gradients, Operands, as_gemm_operands, operand_dtype
from ..losses import formulas
from ..losses.options import Options, Tile
from ..pallas import Target
from .chunks import run_two_passes
from .declaration import OPERATION
from .plan import Plan, Problem, token_bytes, without_kernels

SUBLANES = 8
DTYPES = (jnp.bfloat16, jnp.float32)
# Tokens and columns of tiles, of which the first that fits is taken. Large ones keep the matrix
# units at work, and read operands from HBM less often.
SMALL = ((512, 512), (512, 256), (256, 256), (128, 128))
LARGEST_FORWARD = ((2048, 2048), (2048, 1024), (2048, 512), (1024, 512), *SMALL)
LARGEST_BACKWARD = ((1024, 1024), (1024, 512), *SMALL)
PART = 256
# Blocks of sums of dhidden in VMEM where these are in HBM: one that is copied in, one that is added
# to, one that is copied out. With as many blocks, a copy out ends before the next copy in begins.
SLOTS = 3
# What the compiler may hold beside what is counted.
SPARE = 4 << 20


@dataclass(frozen=True, kw_only=True)
class Tiles(Problem):
    """The tiling of a kernel: the forward one, or one that makes gradients."""

    # The dtype of GEMM operands.
    dtype: np.dtype[Any]
    # Tokens and columns of a tile, and columns of a part of it: while the vector units are at one
    # part, the matrix units are at the next. 0 until they are chosen.
    rows: int = 0
    columns: int = 0
    part: int = 0
    # Which gradients it makes: of hidden, of the weight and bias.
    makes_hidden: bool = False
    makes_weight: bool = False
    # Whether sums of dhidden are in HBM, where one kernel makes both gradients.
    spills: bool = False

    @property
    def name(self) -> str:
        """The name of the kernel."""
        name = "backward" if self.makes_hidden or self.makes_weight else "forward"
        if self.makes_hidden != self.makes_weight:
            name += "_hidden" if self.makes_hidden else "_weight"
        return f"xentile_linear_cross_entropy_{name}"

    @property
    def gemms(self) -> int:
        """How many GEMMs it computes."""
        return 1 + self.makes_hidden + self.makes_weight

    @property
    def blocks(self) -> int:
        """Blocks of tokens."""
        return pl.cdiv(self.tokens, self.rows)

    @property
    def steps(self) -> int:
        """Blocks of the vocabulary."""
        return pl.cdiv(self.vocab, self.columns)

    @property
    def width(self) -> int:
        """Columns of hidden states in whole registers."""
        return -(-self.hidden // LANES) * LANES

    @property
    def spilled_bytes(self) -> int:
        """Bytes of sums of dhidden in HBM."""
        return 4 * self.blocks * self.rows * self.width if self.spills else 0

    @property
    def bytes_moved(self) -> int:
        """Bytes between HBM and VMEM. A block that stays for several steps is copied once."""
        row = self.hidden * self.operand_bytes
        hidden, weight = self.tokens * row, self.vocab * row
        gradients = self.makes_hidden * self.tokens * self.hidden * self.hidden_bytes
        gradients += self.makes_weight * self.vocab * self.hidden * self.weight_bytes
        if not self.makes_weight:
            return hidden + (self.blocks if self.steps > 1 else 1) * weight + gradients
        sums = 2 * (self.steps - 1) * self.spilled_bytes
        return (self.steps if self.blocks > 1 else 1) * hidden + weight + gradients + sums

    @property
    def sums(self) -> int:
        """Blocks of sums of dhidden in VMEM."""
        if not self.makes_weight:
            return 1
        return SLOTS if self.spills else self.blocks

    @property
    def vmem_bytes(self) -> int:
        """Bytes of VMEM."""
        size = self.operand_bytes
        across, down = self.rows * self.width, self.columns * self.width
        total = 2 * size * (across + down) + 4 * 4 * self.rows * self.columns + SPARE
        total += size * down * self.vocab_is_last
        if self.makes_hidden:
            total += self.sums * 4 * across + 2 * self.hidden_bytes * across
        if self.makes_weight:
            total += 4 * down + 2 * self.weight_bytes * down
        if self.bias:
            total += 2 * 4 * self.columns * LANES
        return total


def choose_tiles(target: Target, untiled: Tiles, named: Tile, **makes: Any) -> Tiles | None:
    """Returns the largest tiles that fit in VMEM, no larger than those named; None where none do.

    `makes` are the fields of `Tiles` that say what the kernel makes.

    Raises:
        ValueError: an extent that is not made of whole registers.
    """
    check_tile(OPERATION, named, (LANES, LANES))
    usual = LARGEST_BACKWARD if makes else LARGEST_FORWARD
    maximum = named[0] or usual[0][0], named[1] or usual[0][1]
    within = (one for one in usual if one[0] <= maximum[0] and one[1] <= maximum[1])
    for rows, columns in dict.fromkeys((maximum, *within)):
        if named[0] is None:
            # Blocks of tokens as even as they can be: the last one costs what the others do.
            rows = pl.cdiv(untiled.tokens, pl.cdiv(untiled.tokens, rows))
        rows = -(-min(rows, untiled.tokens) // LANES) * LANES
        columns = min(columns, -(-untiled.vocab // LANES) * LANES)
        part = PART if columns % PART == 0 else LANES
        tiles = replace(untiled, rows=rows, columns=columns, part=part, **makes)
        has_slots = not tiles.spills or tiles.blocks >= SLOTS
        if has_slots and tiles.vmem_bytes <= target.vmem_bytes:
            return tiles
    return None


# The blocks and scratch of a kernel by their names.
Refs = Mapping[str, Any]


class _Tile:
    """A tile of both kernels: [columns, rows] of logits, a part at a time."""

    def __init__(
        self, tiles: Tiles, options: Options, step: Any, refs: Refs, weight_rows: Any
    ) -> None:
        self.tiles, self.bias = tiles, refs.get("bias")
        # The formula that the kernels over logits have too.
        self.formula = Formula(options)
        self.weight, self.x = weight_rows, refs["hidden"]
        self.first = step * tiles.columns
        self.labels = refs["labels"][...] - self.first

    def _column(self, start: int) -> jax.Array:
        shape = (self.tiles.part, self.tiles.rows)
        return lax.broadcasted_iota(jnp.int32, shape, 0) + start

    def is_label(self, start: int) -> Any:
        """Which logits of a part are their token's label."""
        return self._column(start) == self.labels

    def is_valid(self, start: int) -> Any:
        """Which logits of a part are in the vocabulary; None for all."""
        if self.tiles.vocab % self.tiles.columns == 0:
            return None
        return self._column(start) < self.tiles.vocab - self.first

    def logits(self, start: int) -> tuple[jax.Array, jax.Array]:
        """Logits of the part from `start` on, in f32, and what goes into the softmax."""
        part = self.weight[pl.ds(start, self.tiles.part), :]
        z = _dot(part, self.x[...], 1, 1)
        if self.bias is not None:
            # A row for all tokens, transposed to a column.
            wide = jnp.broadcast_to(self.bias[0:1, pl.ds(start, self.tiles.part)], (LANES, len(z)))
            z = z + wide.T[:, :1]
        return z, self.formula.cap(z)


def _dot(a: jax.Array, b: jax.Array, a_axis: int, b_axis: int) -> jax.Array:
    axes = (((a_axis,), (b_axis,)), ((), ()))
    return lax.dot_general(a, b, axes, preferred_element_type=jnp.float32)


def _active(rows: jax.Array, active: jax.Array) -> jax.Array:
    """[tokens, ..] with zeros where `active` [1, tokens] is 0."""
    # A row transposed to a column.
    column = jnp.broadcast_to(active, (LANES, active.shape[1])).T[:, :1]
    return jnp.where(column != 0, rows, jnp.zeros((), rows.dtype))


def _clear_last(tiles: Tiles, refs: Refs, block: Any, step: Any) -> None:
    """Zeroes what the last blocks of tokens and of the vocabulary have beyond their ends."""

    def clear(name: str, axis: int, index: Any, extent: int, size: int) -> None:
        @pl.when(index == pl.cdiv(extent, size) - 1)
        def _() -> None:
            ref, count = refs[name], extent - index * size
            place = lax.broadcasted_iota(jnp.int32, ref.shape, axis)
            ref[...] = jnp.where(place < count, ref[...], jnp.zeros((), ref.dtype))

    if tiles.tokens % tiles.rows:
        clear("hidden", 0, block, tiles.tokens, tiles.rows)
    if tiles.vocab % tiles.columns:
        clear("weight", int(tiles.vocab_is_last), step, tiles.vocab, tiles.columns)


def _transpose(refs: Refs, is_new: Any) -> Any:
    """Returns the block of the weight as rows, transposed where it `is_new`."""
    if "transposed" not in refs:
        return refs["weight"]

    @pl.when(is_new)
    def _() -> None:
        refs["transposed"][...] = refs["weight"][...].T

    return refs["transposed"]


def _by_sublane(values: jax.Array) -> jax.Array:
    """Returns [part, rows] as registers: sums over the first axis are sums of registers."""
    return values.reshape(-1, SUBLANES, values.shape[-1])


def _forward_kernel(refs: Refs, *, tiles: Tiles, options: Options) -> None:
    row_max, total, picked, sums = states = [
        refs[name] for name in ("row_max", "total", "picked", "sums")
    ]
    block, step = pl.program_id(0), pl.program_id(1)

    @pl.when(step == 0)
    def _() -> None:
        row_max[...] = jnp.full(row_max.shape, LEAST, jnp.float32)
        _blank(total, picked, sums)

    _clear_last(tiles, refs, block, step)
    tile = _Tile(tiles, options, step, refs, _transpose(refs, True))
    maximum, mass, at_label, plain = (state[...] for state in states)
    for start in range(0, tiles.columns, tiles.part):
        z = tile.logits(start)[1]
        valid = tile.is_valid(start)
        if options.label_smoothing:
            plain += _by_sublane(z if valid is None else jnp.where(valid, z, 0)).sum(0)
        if valid is not None:
            z = jnp.where(valid, z, -jnp.inf)
        at_label += _by_sublane(jnp.where(tile.is_label(start), z, 0)).sum(0)
        z = _by_sublane(z)
        new_max = jnp.maximum(maximum, z.max(0))
        mass = mass * jnp.exp(maximum - new_max) + jnp.exp(z - new_max[None]).sum(0)
        maximum = new_max
    for state, value in zip(states, (maximum, mass, at_label, plain), strict=True):
        state[...] = value

    @pl.when(step == tiles.steps - 1)
    def _() -> None:
        found = refs["numbers"]
        found[0:1, :], found[1:2, :] = finish_lse(row_max[...], total[...], axis=0)
        found[2:3, :] = jnp.sum(picked[...], axis=0, keepdims=True)
        found[3:4, :] = jnp.sum(sums[...], axis=0, keepdims=True)
        found[4:, :] = jnp.zeros((NUMBERS - 4, tiles.rows), jnp.float32)


def _blank(*sums: Any) -> None:
    """Zeroes sums, but for those that are None."""
    for one in sums:
        if one is not None:
            one[...] = jnp.zeros(one.shape, jnp.float32)


def _backward_kernel(refs: Refs, *, tiles: Tiles, options: Options) -> None:
    x, gradient = refs["hidden"], refs["gradient"]
    # Sums are there for the gradients that are made.
    hidden_sums: Any
    hidden_sums, weight_sums, bias_sums = (
        refs.get(name) for name in ("hidden_sums", "weight_sums", "bias_sums")
    )
    step, block = pl.program_id(0), pl.program_id(1)
    if not tiles.makes_weight:
        step, block = block, step
    # All blocks of tokens have sums where the vocabulary is outside.
    here = block if tiles.makes_weight else 0
    visit = step * tiles.blocks + block
    if tiles.spills:
        here = lax.rem(visit, SLOTS)

    def copy(semaphores: str, visit: Any, *, is_in: bool) -> Any:
        slot = lax.rem(visit, SLOTS)
        ends = refs["spilled"].at[lax.rem(visit, tiles.blocks)], hidden_sums.at[slot]
        return pltpu.make_async_copy(*(ends if is_in else ends[::-1]), refs[semaphores].at[slot])

    copy_in, copy_out = partial(copy, "arrived", is_in=True), partial(copy, "sent", is_in=False)
    # Sums of dhidden are copied in from the second block of the vocabulary on, and copied out after
    # each block but the last, which writes dhidden.
    last_out = (tiles.steps - 1) * tiles.blocks - 1
    if tiles.spills:
        before, after = visit - SLOTS + 1, visit + 1
        pl.when((before >= 0) & (before <= last_out))(lambda: copy_out(before).wait())
        pl.when((after >= tiles.blocks) & (after < tiles.steps * tiles.blocks))(
            lambda: copy_in(after).start()
        )

    _clear_last(tiles, refs, block, step)
    p_factor, lse, at_label, even, active = (refs["numbers"][n : n + 1, :] for n in range(5))
    if tiles.makes_weight:

        @pl.when(refs["nan_blocks"][block] != 0)
        def _() -> None:
            # 0 times the hidden state of a masked token could be NaN.
            x[...] = _active(x[...], active)

    weight_rows = _transpose(refs, block == 0 if tiles.makes_weight else True)
    if hidden_sums is not None:
        pl.when(step == 0)(lambda: _blank(hidden_sums.at[here]))
    if weight_sums is not None:
        pl.when(block == 0)(lambda: _blank(weight_sums, bias_sums))

    tile = _Tile(tiles, options, step, refs, weight_rows)
    for start in range(0, tiles.columns, tiles.part):
        plain, z = tile.logits(start)
        d = p_factor * jnp.exp(z - lse)
        d = jnp.where(tile.is_label(start), d + at_label, d)
        if options.label_smoothing:
            d -= even
        # A masked entry has none, NaN where the whole row is.
        d = jnp.where(plain == -jnp.inf, p_factor * 0, d)
        d = tile.formula.times_slope(d, z)
        d = jnp.where(active != 0, d, 0)
        valid = tile.is_valid(start)
        if valid is not None:
            d = jnp.where(valid, d, 0)
        if bias_sums is not None:
            lanes = [d[:, at : at + LANES] for at in range(0, tiles.rows, LANES)]
            bias_sums[pl.ds(start, tiles.part), :] += sum(lanes[1:], lanes[0])
        gradient[pl.ds(start, tiles.part), :] = d.astype(tiles.dtype)
    if weight_sums is not None:
        weight_sums[...] += _dot(gradient[...], x[...], 1, 0)
    if tiles.spills:
        pl.when(visit >= tiles.blocks)(lambda: copy_in(visit).wait())
    if hidden_sums is not None:
        hidden_sums[here] += _dot(gradient[...], weight_rows[...], 0, 0)

        @pl.when(step == tiles.steps - 1)
        def _() -> None:
            dhidden = refs["dhidden"]
            dhidden[...] = _active(hidden_sums[here], active).astype(dhidden.dtype)

    if tiles.spills:
        pl.when(visit <= last_out)(lambda: copy_out(visit).start())

    if weight_sums is not None:

        @pl.when(block == tiles.blocks - 1)
        def _() -> None:
            whole, dweight = weight_sums[...], refs["dweight"]
            dweight[...] = (whole.T if tiles.vocab_is_last else whole).astype(dweight.dtype)
            if bias_sums is not None:
                refs["dbias"][...] = jnp.sum(bias_sums[...].T, axis=0, keepdims=True)


def _block_specs(tiles: Tiles) -> dict[str, Any]:
    """Returns which block of each operand and result a step works on, by their names."""

    def spec(shape: tuple[int, int], index: Callable[[Any, Any], Any]) -> Any:
        """Returns a spec; `index` is a function of the block of tokens and of the vocabulary."""
        if tiles.makes_weight:  # the vocabulary is the outer axis
            return pl.BlockSpec(shape, lambda step, block: index(block, step))
        return pl.BlockSpec(shape, index)

    def tokens(count: int) -> Any:
        return spec((count, tiles.rows), lambda block, step: (0, block))

    rows, last = (tiles.rows, tiles.hidden), tiles.steps - 1
    hidden = dhidden = spec(rows, lambda block, step: (block, 0))
    if tiles.makes_weight:
        # The last block of the vocabulary writes blocks of dhidden.
        dhidden = spec(rows, lambda block, step: (jnp.where(step == last, block, 0), 0))
    weight = spec((tiles.columns, tiles.hidden), lambda block, step: (step, 0))
    if tiles.vocab_is_last:
        weight = spec((tiles.hidden, tiles.columns), lambda block, step: (0, step))
    columns = spec((1, tiles.columns), lambda block, step: (0, step))
    return {
        **{"hidden": hidden, "weight": weight, "bias": columns},
        **{"dhidden": dhidden, "dweight": weight, "dbias": columns},
        **{"labels": tokens(1), "numbers": tokens(NUMBERS)},
        "nan_blocks": pl.BlockSpec(memory_space=pltpu.SMEM),
        "spilled": pl.BlockSpec(memory_space=pl.ANY),
    }


def _call(
    target: Target,
    tiles: Tiles,
    kernel: Callable[[Refs], None],
    operands: Operands,
    results: Mapping[str, Any],
    scratch: dict[str, Any],
    **more: jax.Array,
) -> dict[str, jax.Array]:
    """Runs a kernel on operands and `more`; returns the results by name, of shapes `results`."""
    specs, grid = _block_specs(tiles), (tiles.blocks, tiles.steps)
    if tiles.vocab_is_last:
        scratch = scratch | {"transposed": pltpu.VMEM((tiles.columns, tiles.hidden), tiles.dtype)}
    hidden, weight, bias, labels = operands
    x, w = as_gemm_operands(hidden, weight)
    in_range = (labels >= 0) & (labels < tiles.vocab)
    column = jnp.where(in_range, labels, -1).astype(jnp.int32)[None]
    given = {"hidden": x, "weight": w, "labels": _padded(tiles, column, -1), **more}
    if bias is not None:
        missing = tiles.steps * tiles.columns - tiles.vocab
        given["bias"] = jnp.pad(bias.astype(jnp.float32)[None], ((0, 0), (0, missing)))
    names = [*given, *results, *scratch]
    found = pl.pallas_call(
        lambda *refs: kernel(dict(zip(names, refs, strict=True))),
        grid=grid[::-1] if tiles.makes_weight else grid,
        in_specs=[specs[name] for name in given],
        out_specs=[specs[name] for name in results],
        out_shape=[*results.values()],
        scratch_shapes=[*scratch.values()],
        # Sums go on from step to step: in order, and on one core.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=target.vmem_bytes
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * tiles.gemms * tiles.tokens * tiles.hidden * tiles.vocab,
            transcendentals=tiles.tokens * tiles.vocab,
            bytes_accessed=2 * tiles.hidden * tiles.vocab * tiles.operand_bytes,
        ),
        interpret=target.interpret,
        name=tiles.name,
    )(*given.values())
    return dict(zip(results, found, strict=True))


def _padded(tiles: Tiles, rows: jax.Array, fill: Any) -> jax.Array:
    """[.., N] with whole blocks of tokens."""
    missing = tiles.blocks * tiles.rows - tiles.tokens
    return jnp.pad(rows, ((0, 0), (0, missing)), constant_values=fill) if missing else rows


@dataclass(frozen=True)
class Kernels:
    """The kernels of a loss on a target: the forward one, and those that make gradients."""

    target: Target
    forward_tiles: Tiles
    gradient_tiles: tuple[Tiles, ...]

    def forward(self, options: Options, operands: Operands) -> tuple[jax.Array, ...]:
        """Returns loss, logps, lse and lse_low, each [N] in f32."""
        tiles = self.forward_tiles
        shape = NUMBERS, tiles.blocks * tiles.rows
        state = pltpu.VMEM((SUBLANES, tiles.rows), jnp.float32)
        found = _call(
            self.target,
            tiles,
            partial(_forward_kernel, tiles=tiles, options=options),
            operands,
            {"numbers": varying_like(operands.hidden, shape, jnp.float32)},
            dict.fromkeys(("row_max", "total", "picked", "sums"), state),
        )
        numbers = found["numbers"][:4, : tiles.tokens]
        return formulas.outputs_of_sums(options, tiles.vocab, operands.labels, numbers)

    def backward(
        self, options: Options, operands: Operands, saved: Any, cotangents: Any
    ) -> Gradients:
        """Returns gradients for saved (lse, lse_low) and cotangents of (loss, logps, lse).

        They are zeros where no kernel makes them.
        """
        hidden, weight, bias, labels = operands
        given = self.forward_tiles.vocab, labels, saved, cotangents
        p_factor, at_label, even, active = formulas.gradient_scalars(options, *given)
        rows = [p_factor, saved[0], at_label, even, active.astype(jnp.float32)]
        numbers = jnp.stack([*rows, *[jnp.zeros_like(even)] * (NUMBERS - len(rows))])
        made = jax.tree.map(jnp.zeros_like, {"dhidden": hidden, "dweight": weight, "dbias": bias})
        for tiles in self.gradient_tiles:
            made |= self._make_gradients(tiles, options, operands, numbers, active)
        return made["dhidden"], made["dweight"], made["dbias"]

    def fused(self, options: Options, operands: Operands, factors: jax.Array) -> Any:
        """Returns loss, lse and lse_low, each [N] in f32, and gradients for `factors`.

        Logits are computed twice: to compute them once, HBM would have to hold some.
        """
        forward, backward = partial(self.forward, options), partial(self.backward, options)
        return run_two_passes(forward, backward, operands, factors)

    def _make_gradients(
        self, tiles: Tiles, options: Options, operands: Operands, numbers: Any, active: Any
    ) -> dict[str, jax.Array]:
        """Returns the gradients of one kernel by name, of `numbers` [NUMBERS, N] of all tokens."""
        hidden, weight, bias, _ = operands
        more = {"numbers": _padded(tiles, numbers, 0)}
        results: dict[str, Any] = {}
        scratch: dict[str, Any] = {"gradient": pltpu.VMEM((tiles.columns, tiles.rows), tiles.dtype)}

        def add(name: str, shape: tuple[int, ...], dtype: Any, *sums: int) -> None:
            """Adds a gradient, and sums in VMEM of such a shape."""
            results[f"d{name}"] = varying_like(hidden, shape, dtype)
            scratch[f"{name}_sums"] = pltpu.VMEM(sums, jnp.float32)

        if tiles.makes_hidden:
            add("hidden", hidden.shape, hidden.dtype, tiles.sums, tiles.rows, tiles.hidden)
        if tiles.makes_weight:
            x, _ = as_gemm_operands(hidden, weight)
            # Blocks with masked tokens whose hidden states would make dweight NaN.
            bad = _padded(tiles, (~active & ~jnp.isfinite(x).all(1))[None], fill=False)
            bad = bad.reshape(tiles.blocks, tiles.rows).any(1)
            more["nan_blocks"] = bad.astype(jnp.int32)
            add("weight", weight.shape, weight.dtype, tiles.columns, tiles.hidden)
        if tiles.makes_weight and bias is not None:
            add("bias", (1, tiles.steps * tiles.columns), jnp.float32, tiles.columns, LANES)
        if tiles.spills:
            shape = tiles.blocks, tiles.rows, tiles.hidden
            results["spilled"] = varying_like(hidden, shape, jnp.float32)
            scratch |= dict.fromkeys(("arrived", "sent"), pltpu.SemaphoreType.DMA((SLOTS,)))
        kernel = partial(_backward_kernel, tiles=tiles, options=options)
        found = _call(self.target, tiles, kernel, operands, results, scratch, **more)
        if bias is not None and "dbias" in found:
            found["dbias"] = found["dbias"][0, : len(bias)].astype(bias.dtype)
        return found


def choose_kernels(
    target: Target,
    operands: Sequence[Any],
    vocab_axis: int,
    max_scratch_bytes: int,
    *,
    named: Tile = (None, None),
    wanted: tuple[bool, bool] = (True, True),
) -> Kernels | None:
    """Returns the kernels for the gradients `wanted`; None where there are none for such operands.

    Tiles are no larger than the one `named`.

    Raises:
        ValueError: a named extent that is not made of whole registers.
    """
    problem, dtype = Problem.of(operands, vocab_axis, reduced=False), operand_dtype(*operands[:2])
    extents = problem.tokens, problem.hidden
    if dtype not in DTYPES or not all(isinstance(one, int) and one > 0 for one in extents):
        return None
    fit = partial(choose_tiles, target, Tiles(**vars(problem), dtype=dtype), named)
    forward = fit()
    both = fit(makes_hidden=wanted[0], makes_weight=wanted[1])
    if both is None and all(wanted):
        both = fit(makes_hidden=True, makes_weight=True, spills=True)
        if both is not None and both.spilled_bytes > max_scratch_bytes:
            both = None
    kernels = [both] if both is not None else [fit(makes_hidden=True), fit(makes_weight=True)]
    found = tuple(one for one in kernels if one is not None)
    if forward is None or len(found) < len(kernels):
        return None
    return Kernels(target, forward, found)


def plan(
    target: Target, usual: Plan, operands: Sequence[Any], vocab_axis: int, named: Tile
) -> Plan:
    """Returns what runs on `target` where elsewhere `usual` does.

    Raises:
        ValueError: as for `choose_kernels`.
    """
    problem = Problem.of(operands, vocab_axis, reduced=False)
    limit = usual.max_scratch_bytes
    kernels = choose_kernels(target, operands, vocab_axis, limit, named=named)
    if kernels is None:
        return without_kernels(problem, usual)
    tiles = kernels.gradient_tiles[0]
    every = kernels.forward_tiles, *kernels.gradient_tiles
    moved = tuple((one.name, one.bytes_moved) for one in every)
    gemms = sum(one.gemms for one in every)
    # Scalars of a token, in rows of as many as a register has, operands and results.
    scratch = 2 * token_bytes(problem) + tiles.spilled_bytes + problem.narrowed_bytes
    return Plan("kernels", tiles.rows, tiles.columns, gemms, scratch, limit, moved=moved)
