"""Compiles the library of custom calls with cargo and puts it into the wheel.

With XENTILE_CUDA=1 in the environment it has kernels for NVIDIA GPUs too, which takes CUDA's
compiler; the wheel then serves machines with and without a GPU.

The library is plain C with no Python in it, so that one wheel serves every Python of a platform.
"""

import json
import os
import shutil
import subprocess
import sysconfig
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
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"


def compile_library(workspace: Path) -> Path:
    """Returns the library that cargo built."""
    cargo = os.environ.get("CARGO", "cargo")
    if shutil.which(cargo) is None:
        raise RuntimeError(
            f"{cargo} not found: pallas_bridge compiles a library in Rust; install Rust 1.89 or "
            "later (https://rustup.rs), or set CARGO to its path"
        )
    command = [cargo, "build", "--release", "--package", CRATE, "--message-format", "json"]
    wanted = os.environ.get("XENTILE_CUDA", "0")
    if wanted not in ("0", "1"):
        raise RuntimeError(f"XENTILE_CUDA is {wanted!r}; it must be 1 for CUDA kernels, 0 for none")
    if wanted == "1":
        command += ["--features", "cuda"]
    # What cargo has to say goes to the terminal, by way of standard error.
    build = subprocess.run(command, cwd=workspace, stdout=subprocess.PIPE, text=True, check=False)
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
