"""The library of custom calls: finding it, checking it, telling XLA of it.

The library is plain C (crates/xentile-xla/include/xentile_xla.h), so that ctypes is all it takes.
"""

import ctypes
import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from platform import machine
from typing import Any

import jax

from . import platforms, targets, versions

# Where another library than the carried one is.
VARIABLE = "XENTILE_XLA_LIBRARY"
TABLE_VERSION = 3
# As XLA numbers the stages of a call.
STAGES = ("instantiate", "prepare", "initialize", "execute")
# The names that JAX gives to the platforms of the table.
JAX_PLATFORMS = {"Host": "cpu", "CUDA": "cuda"}
# The names that the library has for dtypes.
DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
# Platforms that a library may be built without, and what builds one that has them.
BUILDS = {
    "cuda": "run `XENTILE_CUDA=1 pip install ./pallas_bridge` in a checkout of xentile, "
    "which says what it misses",
}


class LibraryError(RuntimeError):
    """The library of custom calls is missing, or is not one that this process can use."""


class _Target(ctypes.Structure):
    """`xentile_target`."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("target", ctypes.c_char_p),
        ("platform", ctypes.c_char_p),
        ("stage", ctypes.c_uint32),
        ("symbol", ctypes.c_char_p),
        ("handler", ctypes.c_void_p),
    )


@dataclass(frozen=True)
class Target:
    """A row of the library's table: one handler."""

    target: str
    platform: str
    stage: str
    symbol: str
    address: int


@dataclass(frozen=True)
class Library:
    """A library that was loaded, checked and registered with XLA."""

    path: Path
    version: str
    ffi_version: tuple[int, int]
    cpu_isa: str
    targets: Sequence[Target]

    @property
    def platforms(self) -> frozenset[str]:
        """The platforms that it has handlers for, as JAX calls them."""
        return frozenset().union(*(self.platforms_of(row.target) for row in self.targets))

    def platforms_of(self, target: str) -> frozenset[str]:
        """The platforms that it has handlers of a target for, as JAX calls them."""
        names = {row.platform for row in self.targets if row.target == target}
        return frozenset(JAX_PLATFORMS.get(name, name.lower()) for name in names)


def find() -> Path:
    """Returns where the library is.

    Raises:
        LibraryError: there is none.
    """
    if chosen := os.environ.get(VARIABLE):
        path = Path(chosen)
        if not path.is_file():
            raise LibraryError(f"{VARIABLE} is {chosen}, which is no file: name a libxentile_xla")
        return path
    name = {"darwin": "libxentile_xla.dylib", "win32": "xentile_xla.dll"}
    path = Path(__file__).with_name(name.get(sys.platform, "libxentile_xla.so"))
    if not path.is_file():
        if obstacle := platforms.obstacle():
            raise LibraryError(obstacle)
        raise LibraryError(
            f"pallas_bridge was installed without its library ({path} is missing): run `pip "
            f"install ./pallas_bridge` in a checkout of xentile, or set {VARIABLE} to a built "
            "libxentile_xla"
        )
    return path


def get_library() -> str:
    """Returns the path of the library of custom calls, for programs that load or link it.

    Raises:
        LibraryError: there is none.
    """
    return str(find())


def get_include() -> str:
    """Returns the folder of `xentile_xla.h`, the header of the library, for C and C++ compilers.

    Raises:
        LibraryError: there is none.
    """
    package = Path(__file__).parents[1]
    # A wheel carries it; otherwise this is a checkout.
    in_checkout = package.parents[2] / "crates" / "xentile-xla" / "include"
    for folder in (package / "include", in_checkout):
        if (folder / "xentile_xla.h").is_file():
            return str(folder)
    raise LibraryError(f"{package / 'include'} has no xentile_xla.h: install pallas_bridge again")


def others_loaded(path: Path) -> list[str]:
    """Returns the copies of the library in this process that are not the file at `path`.

    On Linux, as its system tells; none elsewhere.
    """
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    mapped = {line.split(maxsplit=5)[-1] for line in maps.splitlines() if "libxentile_xla" in line}
    return sorted(name for name in mapped if not (Path(name).exists() and path.samefile(name)))


def runtime_ffi_version() -> tuple[int, int]:
    """Returns the version of XLA's FFI that the installed jaxlib speaks."""
    header = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    text = header.read_text()
    major, minor = (
        re.search(rf"#define XLA_FFI_API_{part}\s+(\d+)", text) for part in ("MAJOR", "MINOR")
    )
    if major is None or minor is None:
        raise LibraryError(f"{header} does not tell the version of XLA's FFI")
    return int(major[1]), int(minor[1])


def load(path: Path) -> tuple[ctypes.CDLL, Library]:
    """Loads the library at `path` and checks that this process can use it.

    Raises:
        LibraryError: it was built for another platform, is no libxentile_xla, comes from another
            version or revision of pallas_bridge, or was written for a newer XLA.
    """
    try:
        handle = ctypes.CDLL(str(path))
    except OSError as error:
        raise LibraryError(
            f"{path} cannot be loaded on {sys.platform} {machine()}; it may have been "
            f"built for another platform ({error})"
        ) from error
    try:
        table_version, version = handle.xentile_table_version, handle.xentile_version
        ffi_version, cpu_isa = handle.xentile_ffi_version, handle.xentile_cpu_isa
        table, prefers_xla = handle.xentile_targets, handle.xentile_prefers_xla
        ask_for_plan, declarations = handle.xentile_plan, handle.xentile_declarations
    except AttributeError as error:
        raise LibraryError(f"{path} is not a libxentile_xla ({error})") from error
    table_version.restype = ctypes.c_uint32
    version.restype = cpu_isa.restype = declarations.restype = ctypes.c_char_p
    ffi_version.argtypes = [ctypes.POINTER(ctypes.c_int32)] * 2
    ffi_version.restype = None
    prefers_xla.argtypes = [ctypes.c_char_p] * 3
    prefers_xla.restype = ctypes.c_int32
    ask_for_plan.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t]
    ask_for_plan.restype = ctypes.c_size_t
    table.argtypes = [ctypes.POINTER(ctypes.c_size_t)]
    table.restype = ctypes.POINTER(_Target)

    found = version().decode()
    if table_version() != TABLE_VERSION or found != versions.PACKAGE:
        raise LibraryError(
            f"{path} is version {found} (table {table_version()}) and pallas_bridge is "
            f"{versions.PACKAGE} (table {TABLE_VERSION}): build both from one checkout"
        )
    major, minor = ctypes.c_int32(), ctypes.c_int32()
    ffi_version(ctypes.byref(major), ctypes.byref(minor))
    spoken = major.value, minor.value
    check_runtime(path, spoken, runtime_ffi_version())
    for name in targets.differing(declarations().decode()):
        raise LibraryError(_of_another_revision(path, f"{name} takes other arguments there"))

    count = ctypes.c_size_t()
    rows = table(ctypes.byref(count))
    found_targets = [
        Target(
            target=row.target.decode(),
            platform=row.platform.decode(),
            stage=STAGES[row.stage],
            symbol=row.symbol.decode(),
            address=row.handler,
        )
        for row in rows[: count.value]
    ]
    return handle, Library(path, found, spoken, cpu_isa().decode(), found_targets)


def _of_another_revision(path: Path, found: str) -> str:
    return (
        f"{path} was built of another revision than this pallas_bridge: {found}; build both from "
        "one checkout, `pip install ./pallas_bridge`"
    )


def check_runtime(path: Path, spoken: tuple[int, int], runtime: tuple[int, int]) -> None:
    """Refuses handlers that the runtime would refuse, and JAX lose a whole backend by.

    Raises:
        LibraryError: `spoken`, the version of XLA's FFI that the handlers of the library at `path`
            were written for, is newer than `runtime`, or of another major version.
    """
    if spoken[0] != runtime[0] or spoken > runtime:
        raise LibraryError(
            f"{path} speaks XLA FFI {spoken[0]}.{spoken[1]} and the installed jaxlib "
            f"{runtime[0]}.{runtime[1]}: install a newer jaxlib"
        )


def register(library: Library) -> None:
    """Tells XLA of every handler, for all backends that run or will run in this process."""
    calls: dict[tuple[str, str], dict[str, object]] = defaultdict(dict)
    for row in library.targets:
        capsule = jax.ffi.pycapsule(ctypes.c_void_p(row.address))
        calls[row.target, row.platform][row.stage] = capsule
    for (target, platform), stages in calls.items():
        jax.ffi.register_ffi_target(target, stages, platform=platform)
    for target in {row.target for row in library.targets}:
        # With this XLA's partitioner leaves leading axes shard as they are.
        jax.ffi.register_ffi_target_as_batch_partitionable(target)


def tuned_tile(table: str, dtype: Any, vocab: int) -> tuple[int, int] | None:
    """Returns the time_block and block_size that a sweep found quickest.

    None where `table`, such as "linear_cross_entropy.cpu", has none for the dtype, or where the
    library cannot be used.
    """
    outcome = attempt()
    if isinstance(outcome, LibraryError):
        return None
    ask = outcome[0].xentile_tuned_tile
    extents = [ctypes.POINTER(ctypes.c_size_t)] * 2
    ask.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, *extents]
    ask.restype = ctypes.c_int32
    rows, columns = ctypes.c_size_t(), ctypes.c_size_t()
    named = table.encode(), DTYPES[str(dtype)].encode()
    has_one = ask(*named, vocab, ctypes.byref(rows), ctypes.byref(columns))
    return (rows.value, columns.value) if has_one else None


@cache
def prefers_xla(platform: str, operation: str, variant: str) -> bool:
    """Returns whether XLA's own program was measured to be faster than an operation's kernel.

    `variant` is what of it, such as "silu halves". Not where the library cannot be used.
    """
    outcome = attempt()
    if isinstance(outcome, LibraryError):
        return False
    ask = outcome[0].xentile_prefers_xla
    return bool(ask(platform.encode(), operation.encode(), variant.encode()))


def plan(request: Mapping[str, Any]) -> Any:
    """Returns the library's answer to a request for a plan; None where the library cannot be used.

    `xentile_plan` in xentile_xla.h documents both.

    Raises:
        LibraryError: the library knows other requests.
        ValueError: a request that the library refuses.
    """
    return _plan(json.dumps(request))


@lru_cache(maxsize=4096)
def _plan(request: str) -> Any:
    outcome = attempt()
    if isinstance(outcome, LibraryError):
        return None
    answer = ctypes.create_string_buffer(4096)
    if outcome[0].xentile_plan(request.encode(), answer, len(answer)) >= len(answer):
        raise ValueError("the library's plan is longer than any plan can be")
    found = json.loads(answer.value)
    if "error" in found:
        if re.match("(unknown|missing) field", found["error"]):
            raise LibraryError(_of_another_revision(outcome[1].path, found["error"]))
        raise ValueError(found["error"])
    (only,) = found.values()
    return only


@cache
def has(platform: str, target: str) -> bool:
    """Whether the library is there and has `target` for `platform`."""
    outcome = attempt()
    return not isinstance(outcome, LibraryError) and platform in outcome[1].platforms_of(target)


@cache
def attempt() -> tuple[ctypes.CDLL, Library] | LibraryError:
    """Loads and registers the library once; returns the error where that cannot be done.

    The handle is kept with it: handlers must outlive every program.
    """
    try:
        handle, library = load(find())
        # Both would register the same calls, and XLA would lose the whole platform by that.
        if others := others_loaded(library.path):
            raise LibraryError(
                f"{library.path} and {', '.join(others)} are both loaded, and XLA takes the calls "
                f"of one library: unset {VARIABLE}, or remove what loads the other, and start again"
            )
    except LibraryError as error:
        return error
    register(library)
    return handle, library


def require() -> Library:
    """Returns the library, loaded and registered.

    Raises:
        LibraryError: that cannot be done; the message says why.
    """
    outcome = attempt()
    if isinstance(outcome, LibraryError):
        raise LibraryError(str(outcome)) from outcome
    return outcome[1]
