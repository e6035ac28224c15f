"""Which implementation of an operation runs, and why."""

from dataclasses import dataclass
from typing import Literal, get_args

import jax

from . import library, versions

Implementation = Literal["reference", "custom_call", "pallas"]


def choose(operation: str, implementation: Implementation | None) -> Implementation:
    """Returns the implementation to trace; the platform is chosen as the program is compiled.

    Raises:
        ValueError: there is no implementation of that name.
    """
    if implementation is None:
        return "custom_call"
    if implementation not in get_args(Implementation):
        names = ", ".join(map(repr, get_args(Implementation)))
        raise ValueError(
            f"{operation}: implementation is {implementation!r}; it must be one of {names}, or None"
        )
    return implementation


@dataclass(frozen=True)
class PlatformInfo:
    """What `implementation=None` means on one platform."""

    platform: str
    # None where no implementation runs unless one is asked for by name.
    implementation: Implementation | None
    reason: str


@dataclass(frozen=True)
class Info:
    """What runs where; as text, a line each."""

    version: str
    jax: str
    library: library.Library | None
    # Why there is no library.
    library_error: str | None
    platforms: tuple[PlatformInfo, ...]

    def __str__(self) -> str:
        """A line for everything that decides what runs."""
        lines = [f"pallas_bridge {self.version} on jax {self.jax}"]
        if self.library is None:
            lines.append(f"library: none: {self.library_error}")
        else:
            targets = sorted({target.target for target in self.library.targets})
            major, minor = self.library.ffi_version
            lines.append(f"library: {self.library.path}, XLA FFI {major}.{minor}")
            lines.append(f"targets: {', '.join(targets)}")
        for platform in self.platforms:
            lines.append(f"{platform.platform}: {platform.implementation}: {platform.reason}")
        return "\n".join(lines)


def info() -> Info:
    """Returns which implementation runs on which platform, and why; `print(info())` shows it."""
    outcome = library.attempt()
    loaded = None if isinstance(outcome, library.LibraryError) else outcome[1]
    platforms = []
    for platform in ("cpu", "cuda", "tpu"):
        if loaded is not None and platform in loaded.platforms:
            detail = f", {loaded.cpu_isa}" if platform == "cpu" else ""
            row = PlatformInfo(platform, "custom_call", f"kernels of the library{detail}")
        elif loaded is None and platform in library.JAX_PLATFORMS.values():
            row = PlatformInfo(platform, None, "the library cannot be used")
        elif platform == "tpu":
            row = PlatformInfo(platform, "pallas", "kernels in Pallas")
        elif platform in library.BUILDS:
            reason = f"the library was built without: {library.BUILDS[platform]}"
            row = PlatformInfo(platform, None, reason)
        else:
            row = PlatformInfo(platform, None, 'no kernels yet; ask for "reference" by name')
        platforms.append(row)
    return Info(
        version=versions.PACKAGE,
        jax=jax.__version__,
        library=loaded,
        library_error=str(outcome) if isinstance(outcome, library.LibraryError) else None,
        platforms=tuple(platforms),
    )
