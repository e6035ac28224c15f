"""A compiled program's buffers, and the memory of its temporaries as it runs.

XLA gives its buffer assignment and its program as serialised protocol buffers
(`BufferAssignmentProto` and `HloModuleProto` of xla/service/hlo.proto). Only a few of their fields
are read here, by number, so that no package with their declarations is needed.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

LARGEST = 10
# Points of a timeline; of longer programs each point is the peak of several instructions.
POINTS = 200
# Instructions that only pass their operands on.
HANDS_ON = ("get-tuple-element", "tuple", "bitcast", "optimization-barrier")
# Scopes of `jax.lax.scan` itself, which counts, slices stacks and updates them.
OF_SCAN = re.compile(r"/(body|cond)/(jit\([^)]*\)/)?[^/]*$|(while|broadcast_in_dim)$")
# Steps from an instruction in the search for a source line.
FAR = 6


def varint(data: bytes, at: int) -> tuple[int, int]:
    """The integer at a position, and the position after it.

    Raises:
        ValueError: The data ends within the integer.
    """
    value = shift = 0
    while at < len(data):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at
    raise ValueError("a message ends within a number")


def fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a message: number and value, an int or bytes.

    Raises:
        ValueError: It is no message.
    """
    at = 0
    while at < len(data):
        tag, at = varint(data, at)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, at = varint(data, at)
            yield number, value
            continue
        if wire not in (1, 2, 5):
            raise ValueError(f"a message has a field of wire type {wire}")
        size, at = varint(data, at) if wire == 2 else ({1: 8, 5: 4}[wire], at)
        yield number, data[at : at + size]
        at += size


def many(data: bytes, number: int) -> list[Any]:
    """The values of a repeated field."""
    return [value for found, value in fields(data) if found == number]


def one(data: bytes, number: int, default: Any = 0) -> Any:
    """The value of a field, or the default."""
    found = many(data, number)
    return found[-1] if found else default


def numbers(data: bytes, number: int) -> list[int]:
    """The values of a repeated field of integers, packed or not."""
    found: list[int] = []
    for value in many(data, number):
        if isinstance(value, int):
            found.append(value)
            continue
        at = 0
        while at < len(value):
            item, at = varint(value, at)
            found.append(item)
    return found


@dataclass
class Instruction:
    """An instruction: names, operands, tuple index, called computations, and source line."""

    name: str
    opcode: str
    scope: str
    source: str
    operands: list[int]
    of_tuple: int
    called: list[int]

    @property
    def has_source(self) -> bool:
        """Whether it has a source line of the model that is not of the loop itself."""
        return bool(self.source) and not OF_SCAN.search(self.scope)


@dataclass
class Module:
    """A program: instructions by id, and the ids of each computation in execution order."""

    instructions: dict[int, Instruction] = field(default_factory=dict)
    computations: dict[int, list[int]] = field(default_factory=dict)
    entry: int = 0

    def in_order(self) -> list[int]:
        """Ids in execution order: the body of a loop once, before the loop's own."""
        found: list[int] = []

        def walk(computation: int) -> None:
            for identity in self.computations[computation]:
                instruction = self.instructions[identity]
                if instruction.opcode in ("while", "call", "conditional"):
                    for called in instruction.called:
                        walk(called)
                found.append(identity)

        walk(self.entry)
        return found

    def nearest_source(self, makers: Sequence[int]) -> Instruction:
        """The nearest instruction with a source line to those that write a buffer.

        Near are a maker itself and what it calls as a fusion, then operands, and theirs. The first
        maker is given where there is none.
        """
        level, seen = list(makers), set(makers)
        for _ in range(FAR):
            following: list[int] = []
            for identity in level:
                instruction = self.instructions[identity]
                if instruction.opcode in ("while", "parameter"):
                    continue
                inner = [
                    self.instructions[at]
                    for computation in instruction.called
                    if instruction.opcode == "fusion"
                    for at in reversed(self.computations[computation])
                ]
                for each in (instruction, *inner):
                    if each.has_source:
                        return each
                following += [one for one in instruction.operands if one not in seen]
                seen.update(following)
            level = following
        return self.instructions[makers[0]]


def sources_of(data: bytes) -> dict[int, str]:
    """By the id of a stack frame, the file and line of the trainer or this benchmark."""
    index = one(data, 17, b"")
    files = [name.decode() for name in many(index, 1)]
    places = [(one(of, 1), one(of, 3)) for of in many(index, 3)]
    frames = [(one(of, 1), one(of, 2)) for of in many(index, 4)]
    found: dict[int, str] = {}
    for start in range(1, len(frames) + 1):
        frame = start
        while 0 < frame <= len(frames):
            place, frame = frames[frame - 1]
            file, line = places[place - 1]
            if short := short_path(files[file - 1]):
                found[start] = f"{short}:{line}"
                break
    return found


def short_path(file: str) -> str:
    """A file's path from its package on, `train` or `transformer_bench`; "" for another's."""
    for package in ("examples/train/", "benches/transformer_bench/"):
        _, found, rest = file.rpartition(package)
        if found:
            return f"{package.partition('/')[2]}{rest}"
    return ""


def module_of(data: bytes) -> Module:
    """Reads an `HloModuleProto`."""
    module = Module(entry=one(data, 6))
    sources = sources_of(data)
    for computation in many(data, 3):
        ids = []
        for of in many(computation, 2):
            metadata = one(of, 7, b"")
            file = short_path(one(metadata, 3, b"").decode())
            # Older versions of XLA give the innermost file and line.
            source = f"{file}:{one(metadata, 4)}" if file else sources.get(one(metadata, 15), "")
            identity = one(of, 35)
            module.instructions[identity] = Instruction(
                one(of, 1, b"").decode(),
                one(of, 2, b"").decode(),
                one(metadata, 2, b"").decode(),
                source,
                numbers(of, 36),
                one(of, 13),
                numbers(of, 38),
            )
            ids.append(identity)
        module.computations[one(computation, 5)] = ids
    for entry in many(one(data, 7, b""), 1):
        module.computations[one(entry, 1)] = numbers(one(entry, 2, b""), 1)
    return module


class Buffer(NamedTuple):
    """A range of memory while it holds the same value.

    Attributes:
        what: `argument`, `result`, `constant` or `temporary`.
        start: Where it lies; a number for each allocation, and the bytes in it.
        size: Bytes.
        makers: The ids of the instructions that write it, in the order they run.
        first, last: Positions in that order from which and to which it is in use.
    """

    what: str
    start: int
    size: int
    makers: list[int]
    first: int
    last: int


def buffers_of(assignment: bytes, module: Module) -> list[Buffer]:
    """The buffers of a program; values that share memory, such as a loop's, are one buffer.

    A buffer is in use from the first instruction that makes its value to the last that reads it.
    """
    order = module.in_order()
    position = {identity: at for at, identity in enumerate(order)}
    # The value at each instruction and index of its result's tuple.
    holder: dict[tuple[int, tuple[int, ...]], int] = {}
    defined: dict[int, int] = {}
    group: dict[int, int] = {}

    def root(value: int) -> int:
        while group[value] != value:
            value = group[value]
        return value

    for of in many(assignment, 1):
        value, place = one(of, 1), one(of, 3, b"")
        defined[value] = one(place, 4)
        group[value] = value
        holder[one(place, 4), tuple(numbers(place, 3))] = value
    for alias in many(assignment, 2):
        place = one(alias, 2, b"")
        other = holder.get((one(place, 4), tuple(numbers(place, 3))))
        if other is not None:
            group[root(other)] = root(one(alias, 1))
    given: dict[int, dict[tuple[int, ...], int]] = {}
    for (identity, index), value in holder.items():
        given.setdefault(identity, {})[index] = value
    last: dict[int, int] = {}
    for at, identity in enumerate(order):
        instruction = module.instructions[identity]
        if instruction.opcode not in HANDS_ON:
            for operand in instruction.operands:
                for value in given.get(operand, {}).values():
                    last[root(value)] = at
            continue
        own = given.setdefault(identity, {})
        for place, operand in enumerate(instruction.operands):
            for index, value in given.get(operand, {}).items():
                if instruction.opcode == "tuple":
                    own.setdefault((place, *index), value)
                elif instruction.opcode != "get-tuple-element":
                    own.setdefault(index, value)
                elif index[:1] == (instruction.of_tuple,):
                    own.setdefault(index[1:], value)
    return [
        buffer
        for allocation in many(assignment, 3)
        for buffer in describe_allocation(allocation, module, defined, position, last, root)
    ]


def describe_allocation(
    allocation: bytes,
    module: Module,
    defined: dict[int, int],
    position: dict[int, int],
    last: dict[int, int],
    root: Callable[[int], int],
) -> Iterator[Buffer]:
    """The buffers of an allocation, unless it is thread-local or holds addresses."""
    if one(allocation, 3) or one(allocation, 11):
        return
    kinds = ((5, "argument"), (7, "result"), (12, "constant"))
    what = next((name for number, name in kinds if one(allocation, number)), "temporary")
    # Allocations never overlap.
    base = one(allocation, 1) << 48
    found: dict[int, list[tuple[int, int, int]]] = {}
    for of in many(allocation, 9):
        identity = defined.get(one(of, 1), -1)
        if identity in position:
            value = (position[identity], one(of, 2), one(of, 3))
            found.setdefault(root(one(of, 1)), []).append(value)
    order = {at: identity for identity, at in position.items()}
    for name, values in found.items():
        values.sort()
        first, start, _ = values[0]
        size = max(size for _, _, size in values)
        makers = [order[at] for at, _, _ in values]
        ends = max(last.get(name, first), values[-1][0])
        yield Buffer(what, base + start, size, makers, first, ends)


def largest(buffers: Sequence[Buffer], module: Module) -> list[dict[str, Any]]:
    """The largest buffers: bytes, kind, and their instruction with its scope and line."""
    found = []
    for buffer in sorted(buffers, key=lambda of: of.size, reverse=True)[:LARGEST]:
        # An argument's scope is its name, even if an optimizer overwrites it.
        own = buffer.makers[:1] if buffer.what == "argument" else buffer.makers
        maker = module.nearest_source(own)
        found.append(
            {
                "bytes": buffer.size,
                "what": buffer.what,
                "name": module.instructions[buffer.makers[0]].name,
                "scope": maker.scope,
                "line": maker.source,
            }
        )
    return found


def timeline(buffers: Sequence[Buffer], length: int) -> list[int]:
    """Bytes of temporaries in use, by instructions in the order they run.

    What XLA leaves free between them is no use.
    """
    temporaries = [buffer for buffer in buffers if buffer.what == "temporary"]
    in_use = [covered(at, temporaries) for at in range(length)]
    piece = -(-length // POINTS) or 1
    return [max(in_use[at : at + piece]) for at in range(0, length, piece)]


def covered(at: int, buffers: Sequence[Buffer]) -> int:
    """The bytes of memory of buffers in use at a position, each byte once."""
    spans = sorted((of.start, of.start + of.size) for of in buffers if of.first <= at <= of.last)
    total = reached = 0
    for start, end in spans:
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


def describe_program(compiled: Any) -> dict[str, Any]:
    """The largest buffers of a compiled program, and its timeline; {} if XLA gives none."""
    analysis = compiled.memory_analysis()
    assignment = getattr(analysis, "serialized_buffer_assignment_proto", b"")
    if not assignment:
        return {}
    (program,) = compiled.runtime_executable().hlo_modules()
    module = module_of(program.as_serialized_hlo_module_proto())
    found = buffers_of(assignment, module)
    return {
        "buffers": largest(found, module),
        "timeline": timeline(found, len(module.in_order())),
    }
