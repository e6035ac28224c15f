"""How a call is laid out so that XLA may cut its tokens over a mesh, and how XLA is told.

Both of XLA's partitioners are told: Shardy by a rule that names each axis, and what then cuts the
program by the number of leading axes that every array has. An array of no more axes than that is
taken to be whole, which is how a shared operand is.

A sum over tokens is a result of partial sums, as many as the kernel makes, which stand where the
last axis of tokens does. XLA adds them up, over the devices too. An axis that does not divide
evenly would be padded, and what is padded would be summed: the rule lets that axis be cut only into
parts of which it has a whole number.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.mlir import ir

from .arrays import Signature

# Partial sums of one problem: enough for many threads, of so many tokens at the least that they are
# few beside the tokens.
MOST_BLOCKS = 128
FEWEST_ROWS = 32


def device_count(module: Any) -> int:
    """Returns how many devices XLA cuts a module's arrays over.

    It is 1 where a module is for one device, or within `shard_map` for each of a mesh by itself.
    """
    context = module.axis_context
    manual = getattr(context, "manual_axes", None)
    if manual is None:
        return getattr(context, "num_devices", None) or 1
    return math.prod(size for name, size in context.mesh.shape.items() if name not in manual)


def is_whole(module: Any) -> bool:
    """Whether XLA cuts no array of a module; it does not cut over a kernel or a linear call."""
    context = module.axis_context
    manual = getattr(context, "manual_axes", None)
    if manual is None:
        return getattr(context, "num_devices", None) in (None, 1)
    return {*manual} == {*context.mesh.axis_names}


def keeps_cuts(signature: Signature, avals: Sequence[Any]) -> bool:
    """Whether tokens of a call with such operands can stay cut.

    A shared operand that is mapped would be cut as tokens are, and only Shardy knows of an axis
    that may be cut into some numbers of parts.
    """
    is_told = not signature.sums or jax.config.values["jax_use_shardy_partitioner"]
    return bool(is_told) and signature.mapped_axes(avals) == 0


@dataclass(frozen=True)
class Layout:
    """The shapes of arrays as a call takes and gives them, and what tells XLA how to cut them."""

    operands: tuple[tuple[Any, ...], ...]
    results: tuple[tuple[Any, ...], ...]
    attributes: dict[str, ir.Attribute]
    # Which axes of a result that is a sum XLA sums.
    summed: tuple[int, ...] = ()


def layout(
    signature: Signature, operands: Sequence[Any], results: Sequence[Any], mapped: int, devices: int
) -> Layout:
    """Returns how a call's arrays are laid out in a program for so many `devices`.

    `mapped` of the axes of tokens, the first, are kept apart in sums.
    """
    given, found = ([tuple(aval.shape) for aval in avals] for avals in (operands, results))
    leading = signature.leading(operands)
    extents = {extent for shape in (*given, *found) for extent in shape}
    is_known = all(isinstance(extent, int) for extent in extents)
    sums = [not dims.has_tokens for dims in signature.results]
    if not is_known or 0 in extents or (signature.sums and (devices == 1 or not leading)):
        # As few sums as there can be.
        partial = (*leading[:mapped], _blocks(leading[mapped:]))
        for index, shape in enumerate(found):
            if sums[index]:
                found[index] = (*partial, *shape[mapped:])
        return Layout(tuple(given), tuple(found), {}, (mapped,))
    if signature.mapped_axes(operands):
        return Layout(tuple(given), tuple(found), {})
    # A shared operand is taken to be whole if it has fewer axes than lead.
    shared = [len(dims.names) for dims in signature.operands if not dims.has_tokens]
    units = (1,) * max(max(shared, default=-1) + 1 - len(leading), 0) if leading else ()
    for shapes, declared in ((given, signature.operands), (found, signature.results)):
        for index, dims in enumerate(declared):
            if dims.has_tokens:
                shapes[index] = (*units, *shapes[index])
    leading = (*units, *leading)
    rule = _Rule([*leading])
    lead: list[tuple[int, ...]] = [(index,) for index in range(len(leading))]
    of_sums, summed = lead, ()
    if signature.sums:
        kept = len(units) + mapped
        if kept < len(leading):
            *others, last = leading
            parts = math.gcd(last, devices)
            more = _divisor(last // parts, _blocks(leading) // (math.prod(others) * parts))
            rule.extents[-1] = parts
            inner = rule.whole(more), rule.whole(last // (parts * more))
            lead[-1] = (len(leading) - 1, *inner)
            of_sums = [*lead[:-1], lead[-1][:2]]
            partial = (*others, parts * more)
        else:
            of_sums, partial = [*lead, (rule.whole(1),)], (*leading, 1)
        for index, shape in enumerate(found):
            if sums[index]:
                found[index] = (*partial, *shape[mapped:])
        summed = (*range(len(units)), *range(kept, len(partial)))
    count = ir.StringAttr.get(str(len(leading)))
    attributes: dict[str, ir.Attribute] = {
        "mhlo.frontend_attributes": ir.DictAttr.get({"num_batch_dims": count})
    }
    if jax.config.values["jax_use_shardy_partitioner"]:
        trailing: dict[str, int] = {}
        arrays = [
            [(dims, lead if dims.has_tokens else other) for dims in declared]
            for declared, other in ((signature.operands, []), (signature.results, of_sums))
        ]
        for (dims, _), shape in zip([*arrays[0], *arrays[1]], [*given, *found], strict=True):
            for name, extent in zip(reversed(dims.names), reversed(shape), strict=False):
                if name not in trailing:
                    trailing[name] = rule.whole(extent)
        attributes["sdy.sharding_rule"] = rule.attribute(
            *(
                [[*lead, *((trailing[name],) for name in dims.names)] for dims, lead in side]
                for side in arrays
            )
        )
    return Layout(tuple(given), tuple(found), attributes, summed)


def _blocks(leading: Sequence[Any]) -> int:
    """Returns how many partial sums there are of so many tokens."""
    rows = math.prod(leading)
    # A block may be empty, for all that is known of tokens.
    return min(max(rows // FEWEST_ROWS, 1), MOST_BLOCKS) if isinstance(rows, int) else MOST_BLOCKS


def _divisor(number: int, most: int) -> int:
    """Returns the largest divisor of `number` that is at most `most`, or 1."""
    return next(one for one in range(max(min(number, most), 1), 0, -1) if number % one == 0)


# Of each axis of an array.
Factors = Sequence[Sequence[int]]


@dataclass
class _Rule:
    """A rule of Shardy's: every axis is a product of factors, of so many entries each."""

    extents: list[int]
    # Those that no device may have a part of.
    wholes: list[int] = field(default_factory=list)

    def whole(self, extent: int) -> int:
        """Adds a factor that is not cut, and returns it."""
        self.extents.append(extent)
        self.wholes.append(len(self.extents) - 1)
        return self.wholes[-1]

    def attribute(
        self,
        operands: Sequence[Factors],
        results: Sequence[Factors],
    ) -> ir.Attribute:
        """Returns the rule for arrays whose axes have these factors."""

        def side(arrays: Sequence[Factors]) -> str:
            return ", ".join(
                f"[{', '.join(''.join(map(_letter, axis)) for axis in axes)}]" for axes in arrays
            )

        extents = ", ".join(f"{_letter(n)}={extent}" for n, extent in enumerate(self.extents))
        wholes = ", ".join(map(_letter, self.wholes))
        return ir.Attribute.parse(
            f"#sdy.op_sharding_rule<({side(operands)})->({side(results)}) {{{extents}}}"
            f"{f' need_replication={{{wholes}}},' if wholes else ','} custom>"
        )


def _letter(factor: int) -> str:
    """Returns a factor as the notation has it."""
    letters = "ijklmnopqrstuvwxyz"
    return letters[factor] if factor < len(letters) else f"z_{factor - len(letters) + 1}"
