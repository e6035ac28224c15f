"""Compiles the library of custom calls with cargo and puts it into the wheel.

The library is plain C with no Python in it, so that one wheel serves every Python of a platform.

Kernels for NVIDIA GPUs are part of it on Linux. CUDA's compiler is then asked for as a
requirement of the build, unless there is one at XENTILE_NVCC; the machine that builds needs no GPU.
XENTILE_CUDA=0 leaves the kernels out and downloads nothing of CUDA, and XENTILE_CUDA=1 fails where
there is no compiler.

XENTILE_WHEEL_TARGET, such as `aarch64-unknown-linux-gnu.2.28`, builds for another machine, or for
an older glibc, with cargo-zigbuild: a target of Rust's and a version of glibc. scripts/wheels.sh
sets it.
"""

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
TARGET = re.compile(r"(?P<machine>x86_64|aarch64)-unknown-linux-gnu\.(?P<glibc>2\.\d+)")


class CustomBuildHook(BuildHookInterface[Any]):
    """Adds the library and its platform to the wheel, and the crates to the sdist."""

    def dependencies(self) -> list[str]:
        """Returns what the build needs besides hatchling: CUDA's compiler, where it is wanted."""
        named = os.environ.get("XENTILE_NVCC")
        return list(COMPILER) if self.target_name == "wheel" and wants_cuda() and not named else []

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
        print(f"warning: {caution}", file=sys.stderr)


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


def wants_cuda() -> bool:
    """Whether the library is to have kernels for NVIDIA GPUs, where there is a compiler."""
    wanted = os.environ.get("XENTILE_CUDA", "")
    if wanted not in {"", "0", "1"}:
        raise RuntimeError(
            f"XENTILE_CUDA is {wanted!r}; it must be 0 for a library without CUDA, 1 for one with "
            "it, or empty for what can be had"
        )
    on_linux = sys.platform == "linux" and platform.machine() in {"x86_64", "aarch64"}
    return wanted == "1" or (wanted == "" and on_linux)


def cuda_compiler(workspace: Path) -> Path | None:
    """Returns CUDA's compiler, or none where the library is to do without."""
    if wants_cuda():
        for compiler in cuda_compilers(workspace):
            if compiler.is_file():
                return compiler
    if os.environ.get("XENTILE_CUDA") == "1":
        raise RuntimeError(
            "XENTILE_CUDA is 1, and there is no CUDA compiler: set XENTILE_NVCC or CUDA_HOME, or "
            f"install {' '.join(COMPILER)}"
        )
    return None


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
