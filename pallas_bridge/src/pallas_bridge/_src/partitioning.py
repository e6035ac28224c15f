"""Layouts and attributes by which XLA shards the tokens of a call's arrays over a mesh.

Shardy, which chooses shardings, gets a rule that names every axis. The partitioner after it gets
the number of leading axes that all arrays share. It replicates arrays with fewer axes, such as
shared operands.

A sum over tokens is a result of partial sums, which XLA adds, also over devices. So that each
device has a whole number of partial sums, the last axis of tokens becomes two: the first may be
sharded and has at most one entry per device; the kernel sums over the second.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend.mlir import ir

from .arrays import Dims, Signature
from .compat import shards_by_shardy

# The most partial sums of a problem, and the fewest tokens of each: enough sums for many threads,
# and few beside the tokens.
MOST_BLOCKS = 128
FEWEST_ROWS = 32


def device_count(module: Any) -> int:
    """Returns the number of devices over which XLA shards a module's arrays.

    It is 1 in programs for one device, and within a `shard_map` over all mesh axes.
    """
    context = module.axis_context
    manual = getattr(context, "manual_axes", None)
    if manual is None:
        return getattr(context, "num_devices", None) or 1
    return math.prod(size for name, size in context.mesh.shape.items() if name not in manual)


def is_whole(module: Any) -> bool:
    """Whether XLA shards no array of a module."""
    context = module.axis_context
    manual = getattr(context, "manual_axes", None)
    if manual is None:
        return getattr(context, "num_devices", None) in (None, 1)
    return {*manual} == {*context.mesh.axis_names}


# An axis: its name, or a number if it may be sharded, and its extent.
Axis = tuple[int | str, Any]


@dataclass(frozen=True)
class Layout:
    """The shapes of a call's arrays, and the attributes that tell XLA how to shard them."""

    operands: Sequence[tuple[Any, ...]]
    results: Sequence[tuple[Any, ...]]
    attributes: dict[str, ir.Attribute] = field(default_factory=dict)
    # Axes of partial sums over which XLA sums.
    summed: tuple[int, ...] = ()


def layout(
    signature: Signature, operands: Sequence[Any], results: Sequence[Any], mapped: int, devices: int
) -> Layout:
    """Returns the layout of a call's arrays in a program for `devices` devices.

    Sums keep the first `mapped` axes of tokens.
    """
    tokens = signature.leading(operands)
    extents = {extent for aval in (*operands, *results) for extent in aval.shape}
    is_known = all(isinstance(extent, int) for extent in extents) and 0 not in extents
    if not is_known or signature.mapped_axes(operands) or (signature.sums and devices == 1):
        few = (*tokens[:mapped], _blocks(tokens[mapped:]))
        given = [
            _unpacked(dims, aval, aval.shape[: dims.leading(aval)])
            for dims, aval in zip(signature.operands, operands, strict=True)
        ]
        found = [
            _unpacked(dims, aval, aval.shape[: dims.leading(aval)] if dims.has_tokens else few)
            for dims, aval in zip(signature.results, results, strict=True)
        ]
        return Layout(given, found, {}, (mapped,))
    sharded, behind, sums = tokens, tokens[:0], 1
    if signature.sums and mapped < len(tokens):
        *others, last = tokens
        parts = math.gcd(last, devices)
        sharded, behind = (*others, parts), (last // parts,)
        sums = max(_blocks(tokens) // math.prod(sharded), 1)
    shared = [len(dims.names) for dims in signature.operands if not dims.has_tokens]
    units = max(max(shared, default=-1) + 1 - len(sharded), 0) if sharded else 0
    sharded = (*[1] * units, *sharded)

    def axes(dims: Dims, aval: Any, leading: Sequence[Axis]) -> list[Axis]:
        own = signature.whole(dims, aval)
        if dims.has_tokens:
            leading = [*enumerate(sharded), *(("behind", extent) for extent in behind)]
        return [*leading, *own]

    taken = [axes(*pair, []) for pair in zip(signature.operands, operands, strict=True)]
    of_sums: list[Axis] = [*enumerate(sharded), ("sums", sums)]
    made = [axes(*pair, of_sums) for pair in zip(signature.results, results, strict=True)]
    if devices > 1 and all(len(one) == len(sharded) for one in (*taken, *made)):
        # XLA's partitioner gathers arrays without an axis after those that may be sharded.
        taken, made = ([[*one, ("one", 1)] for one in side] for side in (taken, made))
    # XLA also sums over the axes of 1 that were put first.
    summed = (*range(units), *range(units + mapped, len(sharded) + 1))
    given, found = ([tuple(n for _, n in axes) for axes in side] for side in (taken, made))
    return Layout(given, found, _attributes(taken, made, len(sharded)), summed)


def _unpacked(dims: Dims, aval: Any, leading: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the `leading` axes and the array's named axes, packed axes as two."""
    return (*leading, *(extent for _, extent in dims.unpacked(aval)))


def _attributes(
    operands: Sequence[Sequence[Axis]], results: Sequence[Sequence[Axis]], count: int
) -> dict[str, ir.Attribute]:
    """Returns the attributes by which XLA shards the first `count` axes only."""
    batch: dict[str, ir.Attribute] = {"num_batch_dims": ir.StringAttr.get(str(count))}
    attributes: dict[str, ir.Attribute] = {"mhlo.frontend_attributes": ir.DictAttr.get(batch)}
    if shards_by_shardy():
        extents = dict(axis for axes in (*operands, *results) for axis in axes)
        letters = dict(zip(extents, _letters(len(extents)), strict=True))

        def side(arrays: Sequence[Sequence[Axis]]) -> str:
            names = (", ".join(letters[name] for name, _ in axes) for axes in arrays)
            return f"({', '.join(map('[{}]'.format, names))})"

        factors = ", ".join(f"{letters[name]}={extent}" for name, extent in extents.items())
        whole = ", ".join(letters[name] for name in extents if isinstance(name, str))
        attributes["sdy.sharding_rule"] = ir.Attribute.parse(
            f"#sdy.op_sharding_rule<{side(operands)}->{side(results)} {{{factors}}}"
            f"{f' need_replication={{{whole}}},' if whole else ','} custom>"
        )
    return attributes


def _letters(count: int) -> list[str]:
    """Returns Shardy's names of `count` factors."""
    letters = "ijklmnopqrstuvwxyz"
    return [*letters, *(f"z_{index + 1}" for index in range(count - len(letters)))][:count]


def _blocks(leading: Sequence[Any]) -> int:
    """Returns the number of partial sums over tokens with the axes `leading`."""
    rows = math.prod(leading)
    # With a symbolic number of tokens a block may be empty.
    return min(max(rows // FEWEST_ROWS, 1), MOST_BLOCKS) if isinstance(rows, int) else MOST_BLOCKS
