"""What may keep kernels from running here, each with what to do about it.

It imports JAX, and what needs JAX, inside functions: a JAX that is missing or too old is one of the
things that it finds.
"""

import contextlib
import ctypes
import importlib
import importlib.metadata
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from platform import machine
from typing import Any, Literal

from . import platforms

State = Literal["ok", "warning", "failed"]

# The plug-ins through which JAX reaches GPUs, a pair for each major version of CUDA.
CUDA_PLUGINS = {major: (f"jax-cuda{major}-plugin", f"jax-cuda{major}-pjrt") for major in (12, 13)}
# Of the GPUs that there are kernels for: Ampere.
OLDEST_CAPABILITY = (8, 0)
# The version of CUDA whose driver the kernels need, and that driver on Linux.
OLDEST_DRIVER = (13, 0)
OLDEST_DRIVER_NAME = "580"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    state: State
    what: str
    # What to do, where something is wrong.
    remedy: str | None = None

    def __str__(self) -> str:
        """A line, and a second one for the remedy."""
        line = f"{self.state + ':':<9}{self.what}"
        return line if self.remedy is None else f"{line}\n         -> {self.remedy}"


def is_asked() -> bool:
    """Whether this process is `python -m pallas_bridge doctor`."""
    arguments = sys.orig_argv
    wanted = ["-m", "pallas_bridge", "doctor"]
    return any(arguments[at : at + 3] == wanted for at in range(len(arguments)))


def main() -> int:
    """Prints every finding; returns 1 where one failed, else 0."""
    findings = []
    for finding in examine():
        print(finding, flush=True)
        findings.append(finding)
    failed = sum(finding.state == "failed" for finding in findings)
    warned = sum(finding.state == "warning" for finding in findings)
    print(f"{len(findings)} checks, {failed} failed, {warned} with a warning")
    return 1 if failed else 0


def examine() -> Iterator[Finding]:
    """Yields a finding for everything that decides whether kernels run."""
    yield _python()
    yield _platform()
    found = [_jax(), _jaxlib()]
    yield from found
    yield from _plugins()
    yield from _driver()
    # What follows needs a JAX that can be imported.
    if all(finding.state != "failed" for finding in found):
        for check in (_library, _devices, _cache, _call):
            yield from _safely(check)


def _safely(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """Yields what a check does; an exception is a finding too."""
    try:
        yield from check()
    except Exception as error:
        name = check.__name__.removeprefix("_")
        yield Finding("failed", f"{name}: {type(error).__name__}: {error}", "see the message")


def _version(distribution: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(distribution)
    return None


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    return Finding("ok", f"python {version}, {sys.executable}")


def _platform() -> Finding:
    where = f"platform: {sys.platform} {machine()}"
    if obstacle := platforms.obstacle():
        return Finding("failed", where, obstacle)
    if caution := platforms.caution():
        return Finding("warning", where, caution)
    return Finding("ok", where)


def _jax() -> Finding:
    try:
        import jax
    except Exception as error:
        # jax itself refuses a jaxlib that does not fit it.
        return Finding("failed", f"jax: {error}", "pip install --upgrade jax jaxlib")
    return _check_version("jax", jax.__version__)


def _jaxlib() -> Finding:
    try:
        version = importlib.import_module("jaxlib.version").__version__
    except Exception as error:
        return Finding("failed", f"jaxlib: {error}", "pip install --upgrade jax jaxlib")
    return _check_version("jaxlib", version)


def _check_version(name: str, version: str) -> Finding:
    from . import versions

    complaint = versions.complaint(name, version)
    if complaint is None:
        return Finding("ok", f"{name} {version}")
    old = versions.numbers(version) < versions.OLDEST
    return Finding("failed" if old else "warning", f"{name} {version}", complaint)


def _plugins() -> Iterator[Finding]:
    """What JAX reaches accelerators by, and whether it fits the jaxlib."""
    jaxlib = _version("jaxlib")
    found = False
    for major, names in CUDA_PLUGINS.items():
        has = {name: version for name in names if (version := _version(name)) is not None}
        if not has:
            continue
        found = True
        summary = ", ".join(f"{name} {version}" for name, version in has.items())
        if jaxlib is not None and (len(has) < len(names) or set(has.values()) != {jaxlib}):
            yield Finding(
                "warning",
                f"plug-in: {summary}, beside jaxlib {jaxlib}",
                f"pip install 'jax[cuda{major}]=={jaxlib}'",
            )
        else:
            yield Finding("ok", f"plug-in: {summary}")
    if libtpu := _version("libtpu"):
        found = True
        yield Finding("ok", f"plug-in: libtpu {libtpu}")
    if not found:
        yield Finding("ok", "plug-ins: none, so that JAX runs on this machine's CPU")


def _driver() -> Iterator[Finding]:
    """NVIDIA's driver, where there is one or a plug-in that wants one."""
    has_plugin = any(_version(name) for names in CUDA_PLUGINS.values() for name in names)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        if has_plugin:
            yield Finding(
                "warning",
                "driver: NVIDIA's libcuda.so.1 is not found, so that JAX has no GPU",
                f"install NVIDIA's driver, {OLDEST_DRIVER_NAME} or later; in a container, start it "
                "with the GPUs",
            )
        return
    number = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(number))
    version = number.value // 1000, number.value % 1000 // 10
    summary = f"driver: for CUDA {version[0]}.{version[1]}"
    with contextlib.suppress(OSError, TypeError):
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            match = re.search(r"\b(\d{3}\.\d+(\.\d+)?)\b", file.read())
        summary += f", {match[1]}" if match else ""
    if version < OLDEST_DRIVER:
        yield Finding(
            "failed",
            summary,
            f"install NVIDIA's driver {OLDEST_DRIVER_NAME} or later, which CUDA "
            f"{OLDEST_DRIVER[0]}.{OLDEST_DRIVER[1]} takes, or set JAX_PLATFORMS=cpu",
        )
    else:
        yield Finding("ok", summary)
    if not has_plugin:
        yield Finding(
            "warning",
            "plug-in: none for the GPU that the driver is for",
            "pip install 'pallas_bridge[cuda13]'",
        )


def _library() -> Iterator[Finding]:
    """The library of custom calls."""
    library: Any = importlib.import_module(f"{__package__}.library")
    outcome = library.attempt()
    if isinstance(outcome, library.LibraryError):
        remedy = 'the message says what; until then, implementation="reference" runs'
        yield Finding("failed", f"library: {outcome}", remedy)
        return
    loaded = outcome[1]
    major, minor = loaded.ffi_version
    chosen = f", as {library.VARIABLE} says" if os.environ.get(library.VARIABLE) else ""
    yield Finding("ok", f"library: {loaded.path} {loaded.version}{chosen}, XLA FFI {major}.{minor}")
    yield Finding("ok", f"kernels: {', '.join(sorted(loaded.platforms))}; CPUs by {loaded.cpu_isa}")
    if others := library.others_loaded(loaded.path):
        remedy = f"unset {library.VARIABLE}, or remove what loads the other, and start again"
        yield Finding("failed", f"library: a second copy is loaded, {', '.join(others)}", remedy)


def _devices() -> Iterator[Finding]:
    """What JAX runs on, and whether there are kernels for it."""
    import jax

    library: Any = importlib.import_module(f"{__package__}.library")
    devices = jax.devices()
    kinds = ", ".join(sorted({device.device_kind for device in devices}))
    summary = f"devices: {len(devices)} x {kinds} ({devices[0].platform})"
    if devices[0].platform == "gpu":
        capability = str(getattr(devices[0], "compute_capability", ""))
        numbers = tuple(map(int, re.findall(r"\d+", capability)))
        outcome = library.attempt()
        if numbers and numbers < OLDEST_CAPABILITY:
            remedy = 'kernels are for the A100 and later; here implementation="reference" runs'
            yield Finding("failed", f"{summary}, compute capability {capability}", remedy)
            return
        if not isinstance(outcome, library.LibraryError) and "cuda" not in outcome[1].platforms:
            yield Finding(
                "failed", f"{summary}: the library has no kernels", library.BUILDS["cuda"]
            )
            return
    yield Finding("ok", summary)


def _cache() -> Iterator[Finding]:
    """JAX's cache of compiled programs on disk, where it is on."""
    import jax

    folder = jax.config.values.get("jax_compilation_cache_dir")
    if folder is None:
        return
    compat: Any = importlib.import_module(f"{__package__}.compat")
    summary = f"cache: compiled programs are kept in {folder}"
    if compat.callbacks_by_name() is None:
        yield Finding(
            "warning",
            f"{summary}; in this jax, no other process finds those that XLA shards by Python",
            "install a version that pallas_bridge is tested with, or compile anew in each process",
        )
    else:
        yield Finding("ok", f"{summary}; to be warned of what XLA gathers, compile without it")


def _call() -> Iterator[Finding]:
    """One loss, of the kernels and of XLA's own program."""
    import jax
    import jax.numpy as jnp

    api: Any = importlib.import_module(f"{__package__}.cross_entropy.api")
    logits = jnp.linspace(-3, 3, 6 * 67, dtype=jnp.float32).reshape(6, 67)
    labels = jnp.arange(6)
    run = jax.jit(api.cross_entropy, static_argnames="implementation")
    loss = float(run(logits, labels))
    right = float(run(logits, labels, implementation="reference"))
    if not abs(loss - right) <= 1e-4 * abs(right):
        remedy = "report it, with all that this prints"
        yield Finding("failed", f"a call: the loss is {loss:.6g}, and XLA's {right:.6g}", remedy)
    else:
        yield Finding("ok", f"a call: the loss is {loss:.4f}, as XLA's own program has it")
