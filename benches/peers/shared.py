"""What the driver and its workers have in common: problems, what is measured, and the talk between.

A worker is one process for one peer on one problem. It imports its framework, says `ready`, waits
for a line, measures, and prints what it found as one line of JSON after MARK.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

MARK = "peer-result: "
# value_and_grad of the mean; forward and backward for given per-token cotangents; the mean alone.
MEASURES = ("value_and_grad", "pair", "forward")
# Passes over bytes of the logits that each takes at least.
PASSES = {"value_and_grad": 2, "pair": 3, "forward": 1}
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
# Calls that are enqueued before each wait.
CALLS = 30


@dataclass(frozen=True)
class Problem:
    """Random normal logits [tokens, vocab] of scale 2 and labels, for one peer."""

    peer: str
    tokens: int
    vocab: int
    dtype: str
    platform: str
    seconds: float

    @property
    def bytes(self) -> int:
        """Bytes of the logits."""
        return self.tokens * self.vocab * BYTES[self.dtype]

    def to_json(self) -> str:
        """What `from_json` reads."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "Problem":
        """Reads what `to_json` wrote."""
        return Problem(**json.loads(text))


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


def median_ms(round_ms: Callable[[int], float], seconds: float) -> dict[str, float]:
    """The median over rounds of a call's milliseconds.

    `round_ms(calls)` makes so many calls with one wait and returns milliseconds a call.
    """
    started = time.perf_counter()
    round_ms(2)  # the first calls
    ms = []
    while len(ms) < 5 or (time.perf_counter() - started < seconds and len(ms) < 50):
        ms.append(round_ms(CALLS))
    return {"median_ms": statistics.median(ms), "min_ms": min(ms), "rounds": len(ms)}
