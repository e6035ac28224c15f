"""Changing, as a later call is lowered, what an earlier one of the same block has become.

A rule for lowering sees the program so far, and JAX holds on to values that it has got. So results
that may come from elsewhere later on are given out through a handle, an operation that changes
nothing and that XLA leaves out. A value that an earlier call is to take is moved before it, with
all that it is made of; the order of operations says nothing to XLA, which goes by what they take.
Nothing is erased: XLA drops what nothing uses any more.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo


def handle(value: Any) -> Any:
    """Returns an `ir.Value` equal to one whose source may be changed by `redirect`."""
    return stablehlo.convert(value.type, value)


def source(value: Any) -> tuple[Any, int] | None:
    """Returns the operation that `handle` was given a result of, and which one; None for others."""
    operation = _owner(value)
    if operation is None or operation.name != "stablehlo.convert":
        return None
    (given,) = operation.operands
    made_by = _owner(given)
    if made_by is None or given.type != value.type:
        return None
    return made_by, ir.OpResult(given).result_number


def redirect(operation: Any, index: int, value: Any) -> None:
    """Has all that uses a result of an operation use `value` in its place."""
    ir.Value(operation.results[index]).replace_all_uses_with(value)


def is_used(value: Any) -> bool:
    """Whether the program so far takes a value."""
    return any(True for _ in value.uses)


def is_in_this_block(operation: Any) -> bool:
    """Whether an operation lies in the block that is being lowered."""
    return bool(operation.block == ir.InsertionPoint.current.block)


def hoist(value: Any, before: Any) -> bool:
    """Moves what makes a value of a block before an operation of that block, which may then use it.

    Returns:
      Whether it could: not where the operation's own results are part of what makes it. Then
      nothing is moved.
    """
    block, moved, seen = before.block, [], set()
    stack = [(value, False)]
    while stack:
        one, is_ready = stack.pop()
        operation = _owner(one)
        if operation is not None:
            operation = _within(operation, block)
        # What other blocks give, and arguments of this one, are there before all of it.
        if operation is None:
            continue
        if is_ready:
            moved.append(operation)
            continue
        if operation == before:
            return False
        first = operation.results[0]
        if first in seen or operation.is_before_in_block(before):
            continue
        seen.add(first)
        stack.append((first, True))
        stack.extend((operand, False) for operand in _taken(operation))
    for operation in moved:
        operation.move_before(before)
    return True


def constant(value: Any, steps: int = 8) -> float | None:
    """Returns the number that a program says, within so many steps, a value is everywhere."""
    operation = _owner(value)
    if steps == 0 or operation is None:
        return None
    if operation.name == "stablehlo.constant":
        number = operation.attributes["value"]
        if isinstance(number, ir.DenseFPElementsAttr) and number.is_splat:
            return float(ir.FloatAttr(number.get_splat_value()).value)
        return None
    if operation.name in ("stablehlo.multiply", "stablehlo.divide"):
        left, right = (constant(operand, steps - 1) for operand in operation.operands)
        if left is None or right is None or (right == 0 and operation.name == "stablehlo.divide"):
            return None
        return left * right if operation.name == "stablehlo.multiply" else left / right
    if operation.name == "stablehlo.negate":
        number = constant(operation.operands[0], steps - 1)
        return None if number is None else -number
    if operation.name in _CARRIERS:
        return constant(operation.operands[0], steps - 1)
    return None


# What carries a constant on.
_CARRIERS = {f"stablehlo.{name}" for name in ("broadcast_in_dim", "convert", "reshape")}


def _owner(value: Any) -> Any:
    """Returns the operation that a value is a result of; None for an argument of a block."""
    owner = value.owner
    return owner.operation if isinstance(owner, ir.Operation | ir.OpView) else None


def _within(operation: Any, block: Any) -> Any:
    """Returns the operation of a block that is or holds another; None where none does."""
    while operation is not None and operation.block != block:
        parent = operation.parent
        operation = None if parent is None or parent.name == "builtin.module" else parent.operation
    return operation


def _taken(operation: Any) -> Sequence[Any]:
    """Returns the values that an operation takes, and those that its regions see and take."""
    taken = [*operation.operands]
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                taken.extend(_taken(inner.operation))
    return taken
