"""What drivers and workers have in common: problems, how long to measure, and the talk between.

A worker is one process for one peer on one problem. It imports its framework, says `ready`, waits
for a line, measures, and prints what it found as one line of JSON after MARK.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

MARK = "peer-result: "
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
# Calls that are enqueued before each wait.
CALLS = 30


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
    # What the mean is multiplied by before its gradient; None where nothing is.
    factor: float | None = None
    # Whether the factor is an argument of the step, and not known as it is compiled.
    is_traced: bool = False

    @property
    def shape(self) -> str:
        """As it is asked for and shown."""
        return f"{self.tokens}x{self.vocab}"

    @property
    def bytes(self) -> int:
        """Bytes of the logits."""
        return self.tokens * self.vocab * BYTES[self.dtype]

    @property
    def inputs(self) -> tuple[str, str]:
        """What problems with the same inputs share."""
        return self.shape, self.distribution

    def file(self, name: str) -> Path:
        """Where an array lies: logits or hidden and weight, labels, and gradients to be checked."""
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
    # Scratch that ours may take; None for its default.
    budget_mib: int | None

    @property
    def shape(self) -> str:
        """As it is asked for and shown."""
        return f"{self.tokens}x{self.hidden}x{self.vocab}"

    @property
    def operand_bytes(self) -> int:
        """Bytes of hidden and weight, and so those of their gradients."""
        return (self.tokens + self.vocab) * self.hidden * BYTES[self.dtype]


# Some kind of them.
P = TypeVar("P", bound=Problem)


def await_turn() -> bool:
    """Says that imports are done and waits for the driver; false where it has gone."""
    print("ready", flush=True)
    return bool(sys.stdin.readline())


def answer(found: dict[str, Any]) -> None:
    """Hands a result to the driver."""
    print(MARK + json.dumps(found), flush=True)


def first_line(error: BaseException) -> str:
    """What went wrong, in one line of a table."""
    text = str(error).strip()
    line = text.splitlines()[0] if text else type(error).__name__
    return f"{type(error).__name__}: {line}"[:160]


def serve(
    problem: P,
    mode: str,
    modes: Mapping[str, Callable[[P], dict[str, Any]]],
    prepare: Callable[[], object],
) -> None:
    """Serves the driver in a mode; as a yardstick for as many problems as it asks for.

    What `prepare` fails with is the answer: it imports, while other processes measure.
    """
    work = modes[mode]
    try:
        prepare()
    except Exception as error:
        failure = {"error": first_line(error)}
        work = lambda _: failure  # noqa: E731
    if not await_turn():
        return

    def tried(problem: P) -> dict[str, Any]:
        try:
            return work(problem)
        except Exception as error:
            return {"error": first_line(error)}

    if mode != "yardstick":
        answer(tried(problem))
        return
    while line := sys.stdin.readline():
        answer(tried(type(problem).from_json(line)))


def calls_for(step: Callable[[], object], seconds: float) -> int:
    """How many calls fill a tenth of the time; `step` makes one and waits for it."""
    started = time.perf_counter()
    step()
    return max(1, min(CALLS, int(seconds / 10 / (time.perf_counter() - started))))


def median_ms(
    round_ms: Callable[[int], float], seconds: float, calls: int = CALLS, rounds: int = 5
) -> dict[str, float]:
    """The median over rounds, at least so many, of a call's milliseconds.

    `round_ms(calls)` makes so many calls with one wait and returns milliseconds a call. Half of the
    time is not counted: under load a GPU slows down for some tenths of a second, and stays so for
    those who train.
    """
    started = time.perf_counter()
    round_ms(min(2, calls))  # the first calls
    while time.perf_counter() - started < seconds / 2:
        round_ms(calls)
    ms: list[float] = []
    while len(ms) < rounds or (time.perf_counter() - started < seconds and len(ms) < 50):
        ms.append(round_ms(calls))
    return {"median_ms": statistics.median(ms), "min_ms": min(ms), "rounds": len(ms)}
