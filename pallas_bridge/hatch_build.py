"""Compiles the library of custom calls with cargo and puts it into the wheel.

The library is plain C with no Python in it, so that one wheel serves every Python of a platform.

Kernels for NVIDIA GPUs are part of it on Linux where CUDA's compiler is found, as it is in the
isolated environment that pip builds in; the machine that builds needs no GPU. XENTILE_CUDA=0 leaves
them out, and XENTILE_CUDA=1 fails where there is no compiler.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

CRATE = "xentile-xla"


class CustomBuildHook(BuildHookInterface[Any]):
    """Adds the compiled library, and the platform it is for, to the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Builds; `version` is "editable" for a development install."""
        workspace = Path(self.root).parent
        if self.target_name != "wheel" or not (workspace / "crates" / CRATE).is_dir():
            raise RuntimeError(
                f"pallas_bridge is built from a checkout of xentile, which has the crate {CRATE}; "
                f"{workspace} has not: run `pip install ./pallas_bridge` in the checkout"
            )
        library = compile_library(workspace)
        carried = f"pallas_bridge/_src/{library.name}"
        if version == "editable":
            shutil.copy2(library, Path(self.root) / "src" / carried)
        else:
            build_data["force_include"][str(library)] = carried
        build_data["force_include"][str(workspace / "LICENSE")] = "pallas_bridge/LICENSE"
        build_data["pure_python"] = False
        machine = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{machine}"


def compile_library(workspace: Path) -> Path:
    """Returns the library that cargo built."""
    cargo = os.environ.get("CARGO", "cargo")
    if shutil.which(cargo) is None:
        raise RuntimeError(
            f"{cargo} not found: pallas_bridge compiles a library in Rust; install Rust 1.89 or "
            "later (https://rustup.rs), or set CARGO to its path"
        )
    command = [cargo, "build", "--release", "--package", CRATE, "--message-format", "json"]
    environment = dict(os.environ)
    compiler = cuda_compiler(workspace)
    if compiler is not None:
        command += ["--features", "cuda"]
        environment["XENTILE_NVCC"] = str(compiler)
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


def cuda_compiler(workspace: Path) -> Path | None:
    """Returns CUDA's compiler, or none where the library is to do without."""
    wanted = os.environ.get("XENTILE_CUDA", "")
    if wanted not in {"", "0", "1"}:
        raise RuntimeError(
            f"XENTILE_CUDA is {wanted!r}; it must be 0 for a library without CUDA, 1 for one with "
            "it, or empty for what can be had"
        )
    if wanted == "0":
        return None
    if wanted == "1" or (sys.platform == "linux" and platform.machine() in {"x86_64", "aarch64"}):
        for compiler in cuda_compilers(workspace):
            if compiler.is_file():
                return compiler
    if wanted == "1":
        raise RuntimeError(
            "XENTILE_CUDA is 1, and there is no CUDA compiler: set XENTILE_NVCC or CUDA_HOME, or "
            "install the wheels that pallas_bridge/pyproject.toml lists under build-system"
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
    spec = find_spec("nvidia")
    for place in list(spec.submodule_search_locations or []) if spec else []:
        yield from Path(place).glob("cu*/bin/nvcc")
    home = os.environ.get("CUDA_HOME")
    if home:
        yield Path(home, "bin", "nvcc")
    in_path = shutil.which("nvcc")
    if in_path:
        yield Path(in_path)
    yield from workspace.glob(".venv/lib/python*/site-packages/nvidia/cu*/bin/nvcc")
