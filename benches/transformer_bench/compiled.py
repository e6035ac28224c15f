"""Programs that are compiled at their first call, within a memory limit."""

import re
from pathlib import Path
from typing import Any

from .config import GIB


class OutOfMemory(Exception):
    """A program does not fit; `asked` is its total in bytes."""

    def __init__(self, asked: int) -> None:
        """Takes the bytes."""
        super().__init__(f"RESOURCE_EXHAUSTED: {asked} bytes")
        self.asked = asked


def device_limit(memory_limit: float | None) -> int | None:
    """The memory limit of a program in bytes, where the device's allocator enforces none.

    None on a GPU, whose allocator does. Else the limit given, or what the machine has available.
    """
    import jax

    if jax.default_backend() == "gpu":
        return None
    if memory_limit is not None:
        return int(memory_limit * GIB)
    info = Path("/proc/meminfo")
    if not info.is_file():
        return None
    found = re.search(r"MemAvailable:\s+(\d+) kB", info.read_text(encoding="utf-8"))
    return int(found[1]) * 1024 if found else None


class Compiling:
    """A function that is compiled at its first call, within a memory limit."""

    def __init__(self, function: Any, limit: int | None, **options: Any) -> None:
        """Takes the function, the limit in bytes, and options of `jax.jit`."""
        self.function, self.limit, self.options = function, limit, options
        self.compiled: Any = None

    def compile(self, *arguments: Any) -> None:
        """Compiles the function for arguments.

        Raises:
            OutOfMemory: The program holds more than the limit.
        """
        import jax
        from train.step import program_bytes

        self.compiled = jax.jit(self.function, **self.options).lower(*arguments).compile()
        needed = program_bytes(self.compiled)
        if self.limit is not None and needed > self.limit:
            raise OutOfMemory(needed)

    def start(self, *arguments: Any) -> Any:
        """Starts the function and returns its results; raises what `compile` does."""
        if self.compiled is None:
            self.compile(*arguments)
        return self.compiled(*arguments)

    def __call__(self, *arguments: Any) -> Any:
        """Runs the function and waits for its results; raises what `compile` does."""
        import jax

        return jax.block_until_ready(self.start(*arguments))
