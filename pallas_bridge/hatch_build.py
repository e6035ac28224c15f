"""Compiles the library of custom calls with cargo and puts it into the wheel.

The library is plain C with no Python in it, so that one wheel serves every Python of a platform.

It has kernels for NVIDIA GPUs where the machine that builds has such a GPU, or XENTILE_NVCC names a
CUDA compiler; otherwise it is for CPUs only, and the build says so. XENTILE_CUDA=1 builds them on
any machine, and fails without a compiler; XENTILE_CUDA=0 never builds them. Unless XENTILE_NVCC
names a compiler, the build requires the one that NVIDIA's packages have.

XENTILE_WHEEL_TARGET, such as `aarch64-unknown-linux-gnu.2.28`, builds for another machine, or for
an older glibc, with cargo-zigbuild: a target of Rust's and a version of glibc. scripts/wheels.sh
sets it.
"""

import contextlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

CRATE = "xentile-xla"
HEADER = Path("crates", CRATE, "include", "xentile_xla.h")
# What cargo needs of the workspace; the sdist carries it.
WORKSPACE = ("Cargo.toml", "Cargo.lock", "crates", "configs")
# CUDA's compiler, as wheels.
COMPILER = tuple(
    f"nvidia-{name}==13.0.*"
    for name in ("cuda-nvcc", "nvvm", "cuda-crt", "cuda-runtime", "cuda-cccl")
)
# One of these exists where there is an NVIDIA GPU: on Linux, in WSL 2, on a Jetson.
GPUS = (
    "/dev/nvidiactl",
    "/proc/driver/nvidia/version",
    "/usr/lib/wsl/lib/libcuda.so.1",
    "/dev/nvhost-gpu",
)
TARGET = re.compile(r"(?P<machine>x86_64|aarch64)-unknown-linux-gnu\.(?P<glibc>2\.\d+)")


class CustomBuildHook(BuildHookInterface[Any]):
    """Adds the library and its platform to the wheel, and the crates to the sdist."""

    def dependencies(self) -> list[str]:
        """Returns what the build needs besides hatchling: CUDA's compiler, where it is wanted."""
        if self.target_name != "wheel" or why_without_cuda() or os.environ.get("XENTILE_NVCC"):
            return []
        return list(COMPILER)

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Builds; `version` is "editable" for a development install."""
        root = Path(self.root)
        workspace = find_workspace(root)
        if self.target_name == "sdist":
            for name in WORKSPACE:
                build_data["force_include"][str(workspace / name)] = name
            return
        report_platform(root)
        target = wheel_target()
        library = compile_library(workspace, target)
        carried = f"pallas_bridge/_src/{library.name}"
        if version == "editable":
            shutil.copy2(library, root / "src" / carried)
        else:
            build_data["force_include"][str(library)] = carried
            build_data["force_include"][str(workspace / HEADER)] = (
                f"pallas_bridge/include/{HEADER.name}"
            )
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag(target)}"


def find_workspace(root: Path) -> Path:
    """Returns the folder with the crates: an unpacked sdist, or the checkout around `root`."""
    for folder in (root, root.parent):
        if (folder / "crates" / CRATE / "Cargo.toml").is_file():
            return folder
    raise RuntimeError(
        f"the crate {CRATE} is neither in {root.parent / 'crates'} nor in {root / 'crates'}: build "
        "pallas_bridge from a checkout of xentile or from its sdist"
    )


def report_platform(root: Path) -> None:
    """Says what runs on this platform, where that is not everything.

    Raises:
        RuntimeError: the library does not run here.
    """
    path = root / "src" / "pallas_bridge" / "_src" / "platforms.py"
    spec = importlib.util.spec_from_file_location("platforms", path)
    assert spec is not None and spec.loader is not None
    platforms = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(platforms)
    if obstacle := platforms.obstacle():
        raise RuntimeError(obstacle)
    if caution := platforms.caution():
        tell(f"warning: {caution}")


def wheel_target() -> re.Match[str] | None:
    """Returns the machine and the glibc that XENTILE_WHEEL_TARGET names, or None without it."""
    named = os.environ.get("XENTILE_WHEEL_TARGET")
    if not named:
        return None
    target = TARGET.fullmatch(named)
    if target is None:
        raise RuntimeError(
            f"XENTILE_WHEEL_TARGET is {named!r}; it must be x86_64-unknown-linux-gnu.2.28, or the "
            "like with aarch64 or another glibc"
        )
    return target


def platform_tag(target: re.Match[str] | None) -> str:
    """Returns what a wheel's name says of the platform."""
    if target is None:
        return sysconfig.get_platform().replace("-", "_").replace(".", "_")
    return f"manylinux_{target['glibc'].replace('.', '_')}_{target['machine']}"


def compile_library(workspace: Path, target: re.Match[str] | None) -> Path:
    """Returns the library that cargo built."""
    cargo = os.environ.get("CARGO", "cargo")
    if shutil.which(cargo) is None:
        raise RuntimeError(
            f"{cargo} not found: pallas_bridge compiles a library in Rust; install Rust 1.89 or "
            "later (https://rustup.rs), or set CARGO to its path"
        )
    command = [cargo, "rustc"]
    if target is not None:
        command = ["cargo-zigbuild", "rustc", "--target", target[0]]
    command += ["--release", "--locked", "--package", CRATE, "--crate-type", "cdylib"]
    command += ["--message-format", "json"]
    environment = dict(os.environ)
    compiler = cuda_compiler(workspace)
    if compiler is not None:
        command += ["--features", "cuda"]
        environment["XENTILE_NVCC"] = str(compiler)
    command += ["--", "-C", "strip=symbols"]
    # What cargo has to say goes to the terminal, by way of standard error.
    build = subprocess.run(
        command, cwd=workspace, env=environment, stdout=subprocess.PIPE, text=True, check=False
    )
    if build.returncode != 0:
        raise RuntimeError(f"`{' '.join(command)}` failed in {workspace}: see above")
    for message in map(json.loads, build.stdout.splitlines()):
        if (
            message["reason"] == "compiler-artifact"
            and CRATE.replace("-", "_") == (message["target"]["name"])
        ):
            for name in map(Path, message["filenames"]):
                if name.suffix in {".so", ".dylib", ".dll"}:
                    return name
    raise RuntimeError(f"`{' '.join(command)}` made no library")


def why_without_cuda() -> str:
    """Returns why the library is to have no kernels for NVIDIA GPUs, or an empty string."""
    wanted = os.environ.get("XENTILE_CUDA", "")
    if wanted not in {"", "0", "1"}:
        raise RuntimeError(
            f"XENTILE_CUDA is {wanted!r}; it must be 0 for a library without CUDA, 1 for one with "
            "it, or empty for one with it where there is an NVIDIA GPU"
        )
    if wanted:
        return "XENTILE_CUDA is 0" if wanted == "0" else ""
    if sys.platform != "linux" or platform.machine() not in {"x86_64", "aarch64"}:
        return "kernels for NVIDIA GPUs are for Linux on x86-64 and aarch64"
    if os.environ.get("XENTILE_NVCC") or any(map(os.path.exists, GPUS)):
        return ""
    return "no NVIDIA GPU is in sight"


def cuda_compiler(workspace: Path) -> Path | None:
    """Returns CUDA's compiler; None, and says why, for a library that is for CPUs only."""
    why = why_without_cuda()
    if not why:
        for compiler in cuda_compilers(workspace):
            if compiler.is_file():
                return compiler
        why = (
            "there is no CUDA compiler: set XENTILE_NVCC or CUDA_HOME, or install "
            f"{' '.join(COMPILER)}"
        )
    if os.environ.get("XENTILE_CUDA") == "1":
        raise RuntimeError(f"XENTILE_CUDA is 1, and {why}")
    tell(f"pallas_bridge is built for CPUs only: {why} (XENTILE_CUDA=1 builds for GPUs too)")
    return None


def tell(message: str) -> None:
    """Prints a line, on the terminal too: pip hides what a build that succeeds prints."""
    print(message, file=sys.stderr)
    with contextlib.suppress(OSError), open("/dev/tty", "w", encoding="utf-8") as terminal:
        print(f"\n{message}", file=terminal)


def cuda_compilers(workspace: Path) -> Iterator[Path]:
    """Yields where the compiler may be."""
    named = os.environ.get("XENTILE_NVCC")
    if named:
        if not Path(named).is_file():
            raise RuntimeError(f"XENTILE_NVCC is {named}, which is no file; it must be nvcc")
        yield Path(named)
    # Before any other of the system's, because their version is pinned.
    spec = importlib.util.find_spec("nvidia")
    for place in list(spec.submodule_search_locations or []) if spec else []:
        yield from Path(place).glob("cu*/bin/nvcc")
    home = os.environ.get("CUDA_HOME")
    if home:
        yield Path(home, "bin", "nvcc")
    in_path = shutil.which("nvcc")
    if in_path:
        yield Path(in_path)
    yield from workspace.glob(".venv/lib/python*/site-packages/nvidia/cu*/bin/nvcc")
