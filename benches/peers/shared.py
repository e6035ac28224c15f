"""Problems, and the protocol between drivers and workers.

A worker is one process for one peer on one problem. It imports its framework, prints `ready`, waits
for a line, measures, and prints its result as one line of JSON after MARK.
"""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from harness import first_line

MARK = "peer-result: "
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Logits [tokens, vocab] of a distribution, and labels, for one peer."""

    peer: str
    tokens: int
    vocab: int
    dtype: str
    platform: str
    seconds: float
    # As `distributions.Distribution.parse` reads it.
    distribution: str
    # Where the driver has written what peers read.
    folder: str
    # What the mean is multiplied by before its gradient; None for no factor.
    factor: float | None = None
    # Whether the factor is an argument of the step and not a constant of the program.
    is_traced: bool = False

    @property
    def shape(self) -> str:
        """The shape as it is given and shown."""
        return f"{self.tokens}x{self.vocab}"

    @property
    def bytes(self) -> int:
        """Bytes of the logits."""
        return self.tokens * self.vocab * BYTES[self.dtype]

    @property
    def inputs(self) -> tuple[str, str]:
        """What is the same for problems with the same inputs."""
        return self.shape, self.distribution

    def file(self, name: str) -> Path:
        """The file of an array: logits or hidden and weight, labels, and results to check."""
        return Path(self.folder) / f"{self.shape} {self.distribution}.{name}.npy"

    def to_json(self) -> str:
        """What `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads what `to_json` wrote."""
        return cls(**json.loads(text))


@dataclass(frozen=True, kw_only=True)
class LinearProblem(Problem):
    """Hidden [tokens, hidden] and weight [vocab, hidden] whose product is such logits."""

    hidden: int
    # Scratch of the peers of this library; None for the default.
    budget_mib: int | None

    @property
    def shape(self) -> str:
        """The shape as it is given and shown."""
        return f"{self.tokens}x{self.hidden}x{self.vocab}"

    @property
    def operand_bytes(self) -> int:
        """Bytes of hidden and weight, and so those of their gradients."""
        return (self.tokens + self.vocab) * self.hidden * BYTES[self.dtype]


P = TypeVar("P", bound=Problem)


def serve(
    kind: type[P],
    modes: Mapping[str, Callable[[P], dict[str, Any]]],
    prepare: Callable[[str, P], object],
) -> None:
    """Serves the driver: one problem, or as the yardstick as many as it sends.

    Args:
        kind: The problem's type.
        modes: By mode, what measures a problem.
        prepare: Takes the mode and the first problem, and imports what these need while other
            processes measure. An error of it is the answer.
    """
    mode, text = sys.argv[1:]
    problem = kind.from_json(text)
    work = modes[mode]
    try:
        prepare(mode, problem)
    except Exception as error:
        failure = {"error": first_line(error)}
        work = lambda _: failure  # noqa: E731

    def answer(problem: P) -> None:
        try:
            found = work(problem)
        except Exception as error:
            found = {"error": first_line(error)}
        if mode == "yardstick" and "torch" in sys.modules:
            # Other processes measure next.
            sys.modules["torch"].cuda.empty_cache()
        print(MARK + json.dumps(found), flush=True)

    print("ready", flush=True)
    is_there = bool(sys.stdin.readline())
    if is_there and mode != "yardstick":
        answer(problem)
    while is_there and mode == "yardstick" and (line := sys.stdin.readline()):
        answer(kind.from_json(line))
