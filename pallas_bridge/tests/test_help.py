"""What tells users where they stand: the doctor, `explain` on the command line, and docstrings."""

import doctest
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pallas_bridge.__main__ import main
from pallas_bridge._src import doctor, info, library, platforms

import pallas_bridge

SOURCES = Path(pallas_bridge.__file__).parent
# Those with examples.
MODULES = (
    "pallas_bridge.optax",
    *(
        f"pallas_bridge._src.{path.parent.name}.api"
        for path in sorted(SOURCES.glob("_src/*/api.py"))
        if ">>>" in path.read_text(encoding="utf-8")
    ),
)


def command(*arguments: str, before: str = "", **environment: str) -> tuple[int, str]:
    """The exit code of `python -m pallas_bridge` and what it prints, after the program `before`."""
    run = [sys.executable, "-m", "pallas_bridge", *arguments]
    if before:
        # As -m does, after something else was done in the process.
        program = f"{before}\nimport runpy; runpy.run_module('pallas_bridge', run_name='__main__')"
        run = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(
        run,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


def test_doctor_finds_nothing_here() -> None:
    code, printed = command("doctor")
    assert code == 0, printed
    for piece in ("ok:      python", "jaxlib", "library: ", "a call: the loss is"):
        assert piece in printed
    assert " 0 failed" in printed


@pytest.mark.slow
def test_doctor_names_a_missing_library(tmp_path: Path) -> None:
    code, printed = command("doctor", XENTILE_XLA_LIBRARY=str(tmp_path / "none.so"))
    assert code == 1
    assert "failed:  library: XENTILE_XLA_LIBRARY is" in printed and "-> " in printed


@pytest.mark.slow
def test_two_copies_are_refused_before_xla_sees_both(tmp_path: Path) -> None:
    second = tmp_path / "libxentile_xla_2.so"
    shutil.copy(library.get_library(), second)
    before = f"import ctypes; ctypes.CDLL({str(second)!r})"
    code, printed = command("doctor", before=before)
    assert code == 1
    assert f"and {second} are both loaded" in printed and "unset XENTILE_XLA_LIBRARY" in printed
    # JAX itself still runs.
    assert "devices: " in printed


@pytest.mark.parametrize(
    ("version", "code", "piece"),
    [("0.8.0", 1, "failed:  jax 0.8.0"), ("0.13.0", 0, "warning: jax 0.13.0")],
)
def test_doctor_on_another_jax(version: str, code: int, piece: str, tmp_path: Path) -> None:
    """It runs where the package refuses to be imported."""
    (tmp_path / "sitecustomize.py").write_text(f"import jax\njax.__version__ = {version!r}\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    found, printed = command("doctor", PYTHONPATH=path)
    assert found == code, printed
    assert piece in printed and f"and this is jax {version}" in printed


def test_platforms_have_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert "WSL 2" in str(platforms.obstacle())
    monkeypatch.setattr(sys, "platform", "darwin")
    assert platforms.obstacle() is None and "on macOS" in str(platforms.caution())
    monkeypatch.setattr(sys, "platform", "linux")
    assert platforms.obstacle() is None
    monkeypatch.setattr(platforms, "is_musl", lambda: True)
    assert "musl" in str(platforms.obstacle())
    assert doctor._platform().state == "failed"


def test_explain_and_info_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    def here(*arguments: str) -> tuple[int, str]:
        """What `command` gives, of this process."""
        try:
            code = main([*arguments])
        except SystemExit as error:
            code = int(error.code or 0)
        return code, "".join(capsys.readouterr())

    of = ("--tokens", "512", "--hidden", "64", "--vocab", "32000")
    code, printed = here("explain", *of, "--max-scratch", "16MiB", "--platform", "cuda")
    assert code == 0 and "MiB of scratch" in printed
    code, printed = here("explain", *of, "--max-scratch", "1KiB", "--platform", "cpu")
    assert code == 2 and "error: max_scratch_bytes is 1024" in printed
    code, printed = here("explain", *of, "--max-scratch", "much")
    assert code == 2 and "'much' is no size" in printed
    for size in ("-1", "0", "1.5"):
        code, printed = here("explain", *of, "--tokens", size)
        assert code == 2 and f"'{size}' is no size; it must be a whole number" in printed
    code, printed = command("info")
    assert str(pallas_bridge.info().library.path) in printed  # type: ignore[union-attr]
    rows = {line.split()[0]: line.split()[1:] for line in printed.splitlines() if line}
    short = info.SHORT
    for name, found in pallas_bridge.info().operations.items():
        assert rows[name] == [short[row.implementation] for row in found]
    assert "xentile_" not in printed.replace("libxentile_xla", "")
    assert "xentile_rope" in here("info", "--all")[1]


def test_header_and_library_are_there() -> None:
    header = Path(pallas_bridge.get_include(), "xentile_xla.h").read_text()
    assert f'#define XENTILE_VERSION "{pallas_bridge.__version__}"' in header
    assert Path(pallas_bridge.get_library()).is_file()


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_docstrings(name: str) -> None:
    tried = doctest.testmod(importlib.import_module(name))
    assert tried.attempted > 0 and tried.failed == 0
