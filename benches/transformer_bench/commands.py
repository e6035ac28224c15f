"""The commands that measure, and their modules."""

import importlib
from typing import Any

# By the name of the command, the module that has `cells`, `prepare`, `table` and `words`.
MODULES = {
    "time": "timing",
    "compare": "compare",
    "memory": "memory",
    "layers": "layers",
    "kernels": "kernels",
    "precision": "precision",
    "attention": "attention",
    "jit": "jit",
}


def module_of(command: str) -> Any:
    """The module of a command."""
    return importlib.import_module(f".{MODULES[command]}", __package__)
