"""The library and the versions: found, checked, or refused with a reason."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import pytest
from pallas_bridge._src import library, targets, versions

import pallas_bridge

# `python -c` that makes one call and prints what it raises.
CALL = """
import jax.numpy as jnp, pallas_bridge as pb
logits, labels = jnp.ones((2, 3)), jnp.zeros(2, int)
print(pb.info().details())
try:
    print(pb.cross_entropy(logits, labels))
except pb.LibraryError as error:
    print("raised:", error)
print("reference:", pb.cross_entropy(logits, labels, implementation="reference"))
"""


def run(tmp_path: Path, path: Path | str) -> str:
    """Returns what CALL prints where XENTILE_XLA_LIBRARY is `path`."""
    environment = {**os.environ, library.VARIABLE: str(path)}
    done = subprocess.run(
        [sys.executable, "-c", CALL], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "reference: 1.0986" in done.stdout
    return done.stdout


def fake_library(tmp_path: Path, **changed: str) -> Path:
    """A library that says of itself what the real one says, but for what is changed."""
    parts = {
        "version": f'"{versions.PACKAGE}"',
        "table": str(library.TABLE_VERSION),
        "major": "0",
        "minor": "1",
        **changed,
    }
    source = tmp_path / "fake.c"
    source.write_text(
        textwrap.dedent("""
            #include <stddef.h>
            #include <stdint.h>
            const char *xentile_version(void) { return VERSION; }
            const char *xentile_cpu_isa(void) { return "none"; }
            uint32_t xentile_table_version(void) { return TABLE; }
            void xentile_ffi_version(int32_t *a, int32_t *b) { *a = MAJOR; *b = MINOR; }
            int32_t xentile_tuned_tile(void) { return 0; }
            int32_t xentile_prefers_xla(void) { return 0; }
            size_t xentile_plan(void) { return 0; }
            void *xentile_targets(size_t *count) { *count = 0; return count; }
        """)
    )
    defines = [f"-D{name.upper()}={value}" for name, value in parts.items()]
    subprocess.run(
        ["cc", "-shared", "-fPIC", *defines, "-o", tmp_path / "fake.so", source], check=True
    )
    return tmp_path / "fake.so"


def test_info_says_what_runs_where() -> None:
    info = pallas_bridge.info()
    loaded = info.library
    assert loaded is not None and loaded.path.is_file()
    of_host, of_cuda = (
        {target.target for target in loaded.targets if target.platform == platform}
        for platform in ("Host", "CUDA")
    )
    declared_for = {
        platform: {
            name for name, one in targets.every().items() if one.declared["handlers"][platform]
        }
        for platform in ("Host", "CUDA")
    }
    assert of_host == declared_for["Host"] and "xentile_cross_entropy_forward" in of_host
    assert of_cuda in (declared_for["CUDA"], set())
    rows = {row.platform: row for row in info.platforms}
    assert rows["cpu"].implementation == "custom_call" and loaded.cpu_isa in rows["cpu"].reason
    has_cuda = any(target.platform == "CUDA" for target in loaded.targets)
    assert rows["cuda"].implementation == ("custom_call" if has_cuda else None)
    assert rows["tpu"].implementation == "pallas"
    for piece in (f"jax {jax.__version__}", "cpu: custom_call", str(loaded.path)):
        assert piece in info.details()


def test_a_missing_library_is_said_to_be_missing(tmp_path: Path) -> None:
    printed = run(tmp_path, tmp_path / "nothing.so")
    assert "raised: XENTILE_XLA_LIBRARY is" in printed and "no file" in printed
    assert "cpu: None" in printed


def test_an_installation_without_its_library_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(library.VARIABLE, raising=False)
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    with pytest.raises(library.LibraryError, match=r"pip install \./pallas_bridge"):
        library.find()


def test_a_file_that_is_no_library(tmp_path: Path) -> None:
    path = tmp_path / "libxentile_xla.so"
    path.write_bytes(b"\x7fELF, but not for long")
    assert "raised:" in (printed := run(tmp_path, path)) and "another platform" in printed


def test_a_library_for_another_processor(tmp_path: Path) -> None:
    """The real one, with another machine in its ELF header."""
    loaded = pallas_bridge.info().library
    assert loaded is not None
    path = tmp_path / "libxentile_xla.so"
    shutil.copy(loaded.path, path)
    with path.open("r+b") as file:
        file.seek(18)
        file.write((243).to_bytes(2, "little"))  # RISC-V
    assert "raised:" in (printed := run(tmp_path, path)) and "another platform" in printed


def test_some_other_library(tmp_path: Path) -> None:
    source = tmp_path / "other.c"
    source.write_text("int other(void) { return 0; }")
    path = tmp_path / "other.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path, source], check=True)
    assert "is not a libxentile_xla" in run(tmp_path, path)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"version": '"9.9.9"'},
            f"is version 9.9.9 (table {library.TABLE_VERSION}) and pallas_bridge is",
        ),
        ({"table": "7"}, "(table 7) and pallas_bridge is"),
        ({"minor": "99"}, "speaks XLA FFI 0.99 and the installed jaxlib"),
        ({"major": "1"}, "speaks XLA FFI 1.1 and the installed jaxlib"),
    ],
    ids=str,
)
def test_a_library_of_another_version(
    tmp_path: Path, changed: dict[str, str], message: str
) -> None:
    printed = run(tmp_path, fake_library(tmp_path, **changed))
    assert "raised:" in printed and message in printed


def test_versions_that_are_too_old_are_refused() -> None:
    for version in ("0.9.0", "0.10.2", "0.11.2", "0.12.0", "0.12.7", "0.12.1.dev20261101"):
        versions.check("jax", version)
    for version in ("0.8.3", "0.4.38"):
        with pytest.raises(ImportError, match=rf"jax >= 0\.9\.0, and this is jax {version}"):
            versions.check("jax", version)


def test_versions_that_were_not_tried_are_warned_of() -> None:
    for version in ("0.13.0", "0.13.0rc1", "1.0.0"):
        with pytest.warns(UserWarning, match=rf"< 0\.13, and this is jax {version}"):
            versions.check("jax", version)


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("0.8.0", "ImportError: pallas_bridge .* works with jax >= 0.9.0, and this is jax 0.8.0"),
        ("0.13.0", "UserWarning: pallas_bridge .* was tried with jax >= 0.9.0, < 0.13"),
    ],
)
def test_import_with_another_jax(tmp_path: Path, version: str, said: str) -> None:
    code = f"import jax; jax.__version__ = '{version}'; import pallas_bridge"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode == 0) == (version == "0.13.0")
    assert len(re.findall(said, done.stderr)) == 1
