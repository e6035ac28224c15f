"""What runs on which platform, and why."""

from dataclasses import dataclass

import jax

from . import library, versions
from .generation import platforms as decoding
from .operation import Implementation, Operation
from .operations import OPERATIONS

# What the table says for an implementation.
SHORT: dict[Implementation | None, str] = {
    "custom_call": "kernel",
    "pallas": "kernel",
    "reference": "XLA",
    None: "-",
}


@dataclass(frozen=True)
class PlatformInfo:
    """What `implementation=None` means on one platform."""

    platform: str
    # None where no implementation runs unless one is asked for by name.
    implementation: Implementation | None
    reason: str


@dataclass(frozen=True)
class Info:
    """What runs where: as text a table, and in `details` with the reasons."""

    version: str
    jax: str
    library: library.Library | None
    # Why there is no library.
    library_error: str | None
    # Of the first operation of the package.
    platforms: tuple[PlatformInfo, ...]
    # Of each, by its name.
    operations: dict[str, tuple[PlatformInfo, ...]]
    # How a step of `pallas_bridge.generation` runs on each platform.
    decoding: tuple[str, ...]

    def __str__(self) -> str:
        """Returns the versions, the library, and a table of operations by platforms."""
        width = max(map(len, self.operations))
        platforms = [row.platform for row in self.platforms]
        lines = [*self._head(), "", " " * width + "".join(f"  {name:6}" for name in platforms)]
        for name, rows in self.operations.items():
            cells = (f"  {SHORT[row.implementation]:6}" for row in rows)
            lines.append(f"{name:{width}}{''.join(cells)}")
        lines.append(
            '"XLA" is plain JAX, and "-" is refused unless "reference" is asked for by name.'
        )
        lines += [
            f"{row.platform}: {row.reason}" for row in self.platforms if row.implementation is None
        ]
        return "\n".join(line.rstrip() for line in lines)

    def _head(self) -> list[str]:
        """Returns the lines about the installation."""
        lines = [f"pallas_bridge {self.version} on jax {self.jax}"]
        if self.library is None:
            return [*lines, f"library: none: {self.library_error}"]
        major, minor = self.library.ffi_version
        return [*lines, f"library: {self.library.path}, XLA FFI {major}.{minor}"]

    def details(self) -> str:
        """Returns a line for everything that decides what runs, with the reason."""
        lines = self._head()
        if self.library is not None:
            targets = sorted({target.target for target in self.library.targets})
            lines.append(f"targets: {', '.join(targets)}")
        for platform in self.platforms:
            lines.append(f"{platform.platform}: {platform.implementation}: {platform.reason}")
        for name, platforms in self.operations.items():
            lines.extend(
                f"{name} on {row.platform}: {row.implementation}: {row.reason}"
                for row in platforms
                if row not in self.platforms
            )
        lines.extend(f"generation on {line}" for line in self.decoding)
        return "\n".join(lines)


def info() -> Info:
    """Returns which implementation runs on which platform, and why.

    `print(info())` shows a table, and `print(info().details())` the reasons.
    """
    outcome = library.attempt()
    loaded = None if isinstance(outcome, library.LibraryError) else outcome[1]
    operations = operations_by_platform(loaded)
    return Info(
        version=versions.PACKAGE,
        jax=jax.__version__,
        library=loaded,
        library_error=str(outcome) if isinstance(outcome, library.LibraryError) else None,
        platforms=operations[OPERATIONS[0].name],
        operations=operations,
        decoding=decoding.describe(),
    )


def operations_by_platform(
    loaded: library.Library | None,
) -> dict[str, tuple[PlatformInfo, ...]]:
    """Returns what runs of each operation on CPUs, NVIDIA GPUs and TPUs, with a library."""
    return {
        operation.name: tuple(
            _platform(operation, platform, loaded) for platform in ("cpu", "cuda", "tpu")
        )
        for operation in OPERATIONS
    }


def _platform(operation: Operation, platform: str, loaded: library.Library | None) -> PlatformInfo:
    """Returns what runs of an operation on a platform."""
    notes = "".join(f"; {note}" for of, note in operation.notes if of == platform)
    target = operation.target
    if loaded is not None and target is not None and platform in loaded.platforms_of(target):
        by_xla = [
            one for one in operation.variants if library.prefers_xla(platform, operation.name, one)
        ]
        if len(by_xla) == len(operation.variants):
            faster = "XLA's own program, which is the faster inside a block of a transformer"
            return PlatformInfo(platform, "reference", f"{faster}{notes}")
        if by_xla:
            notes += f"; XLA's own program for {', '.join(by_xla)}"
        detail = f", {loaded.cpu_isa}" if platform == "cpu" else ""
        return PlatformInfo(platform, "custom_call", f"kernels of the library{detail}{notes}")
    if platform == "tpu" and "pallas" in operation.implementations:
        return PlatformInfo(platform, "pallas", f"kernels in Pallas{notes}")
    if platform in (without := dict(operation.without)):
        return PlatformInfo(platform, "reference", without[platform])
    if operation.falls_back and platform != "cpu":
        built = library.BUILDS.get(platform)
        why = (
            f"the library was built without: {built}" if built and loaded else "there is no kernel"
        )
        return PlatformInfo(platform, "reference", f"XLA's own program; {why}")
    if loaded is None and platform in library.JAX_PLATFORMS.values():
        return PlatformInfo(platform, None, "the library cannot be used")
    if platform in library.BUILDS:
        reason = f"the library was built without: {library.BUILDS[platform]}"
        return PlatformInfo(platform, None, reason)
    return PlatformInfo(platform, None, 'no kernels yet; ask for "reference" by name')
