"""The commands that measure."""

import importlib
from typing import Any, NamedTuple


class Command(NamedTuple):
    """A command: its module has `cells`, `prepare`, `table` and `words`."""

    module: str
    help: str
    title: str


COMMANDS = {
    "time": Command(
        "timing", "seconds of a step by size, length and steps of warm-up", "Time of a step"
    ),
    "compare": Command(
        "compare",
        "XLA's kernels and ours in turns, in one process",
        "XLA's kernels and ours in turns",
    ),
    "memory": Command(
        "memory",
        "memory of a program by category, and its largest buffers; nothing runs",
        "Memory of a program",
    ),
    "layers": Command(
        "layers",
        "milliseconds of each part of a layer, and of the model",
        "Where a layer's time goes",
    ),
    "kernels": Command(
        "kernels",
        "the model's kernels from a profile, by kind and by part",
        "Which kernels take a step's time",
    ),
    "precision": Command(
        "precision", "float32, bfloat16 and mixed: times, dtypes, errors", "Precision"
    ),
    "attention": Command(
        "attention", "attention alone, by head size and length", "Attention alone"
    ),
    "jit": Command(
        "jit", "op by op, compiled, and compiled with our kernels", "Op by op, and compiled"
    ),
}


def module_of(command: str) -> Any:
    """The module of a command."""
    return importlib.import_module(f".{COMMANDS[command].module}", __package__)
