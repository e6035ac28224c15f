"""The build hook of pallas_bridge chooses kernels for NVIDIA GPUs as docs/install.md says.

Nothing is built.
"""

import contextlib
import importlib.util
import os
import pty
import sys
from pathlib import Path
from types import ModuleType
from typing import Generic, TypeVar

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOOK = ROOT / "pallas_bridge" / "hatch_build.py"


Config = TypeVar("Config")


class Interface(Generic[Config]):
    """What the hook reads of hatchling's `BuildHookInterface`."""

    target_name = "wheel"


def load() -> ModuleType:
    """The hook's module, over a hatchling that has nothing but `Interface`."""
    hatchling = ModuleType("hatchling.builders.hooks.plugin.interface")
    vars(hatchling)["BuildHookInterface"] = Interface
    spec = importlib.util.spec_from_file_location("hatch_build", HOOK)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, hatchling.__name__, hatchling)
        spec.loader.exec_module(module)
    return module


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The hook on Linux without a GPU, with no variable set; its one compiler is not there."""
    module = load()
    for variable in ("XENTILE_CUDA", "XENTILE_NVCC"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(module.sys, "platform", "linux")
    monkeypatch.setattr(module.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(module, "GPUS", (str(tmp_path / "nvidiactl"),))
    monkeypatch.setattr(module, "cuda_compilers", lambda workspace: iter([tmp_path / "nvcc"]))
    return module


def chosen(hook: ModuleType, tmp_path: Path) -> tuple[list[str], Path | None]:
    """What the build requires, and the compiler that it takes."""
    return hook.CustomBuildHook().dependencies(), hook.cuda_compiler(tmp_path)


def test_without_a_gpu_the_library_is_for_cpus_and_the_build_says_so(
    hook: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "nvcc").touch()
    assert chosen(hook, tmp_path) == ([], None)
    text = capsys.readouterr().err
    assert "for CPUs only: no NVIDIA GPU is in sight (XENTILE_CUDA=1 builds for GPUs too)" in text


@pytest.mark.parametrize("why", ["a GPU", "XENTILE_CUDA", "XENTILE_NVCC"])
def test_kernels_for_gpus_are_built_where_they_are_wanted(
    hook: ModuleType, tmp_path: Path, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "nvcc"
    compiler.touch()
    if why == "a GPU":
        (tmp_path / "nvidiactl").touch()
    else:
        monkeypatch.setenv(why, "1" if why == "XENTILE_CUDA" else str(compiler))
    required = [] if why == "XENTILE_NVCC" else list(hook.COMPILER)
    assert chosen(hook, tmp_path) == (required, compiler)


def test_variables_decide_before_the_gpu(
    hook: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setenv("XENTILE_CUDA", "0")
    assert chosen(hook, tmp_path) == ([], None)
    monkeypatch.setenv("XENTILE_CUDA", "1")
    with pytest.raises(RuntimeError, match="XENTILE_CUDA is 1, and there is no CUDA compiler"):
        chosen(hook, tmp_path)
    monkeypatch.setenv("XENTILE_CUDA", "yes")
    with pytest.raises(RuntimeError, match="XENTILE_CUDA is 'yes'; it must be 0"):
        chosen(hook, tmp_path)


def test_a_missing_compiler_leaves_gpus_out_and_the_build_says_so(
    hook: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "nvidiactl").touch()
    assert chosen(hook, tmp_path) == (list(hook.COMPILER), None)
    assert "for CPUs only: there is no CUDA compiler" in capsys.readouterr().err


def test_what_the_build_says_reaches_the_terminal() -> None:
    """Though the output of the build is pip's, which hides it."""
    child, terminal = pty.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        load().tell("for CPUs only")
        os._exit(0)
    shown = b""
    # Linux ends a terminal that nobody writes to with an error.
    with contextlib.suppress(OSError):
        while part := os.read(terminal, 1024):
            shown += part
    os.close(terminal)
    assert os.waitpid(child, 0)[1] == 0
    assert b"for CPUs only" in shown
