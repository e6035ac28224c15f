"""The library and the versions: found, checked, or refused with a reason."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from pallas_bridge._src import library, targets, versions

import pallas_bridge

# `python -c` that makes one call with each library, in processes that fork from it.
CALL = """
import os, sys
import jax.numpy as jnp
for path in sys.argv[1:]:
    print("CALL", flush=True)
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
        continue
    os.environ["XENTILE_XLA_LIBRARY"] = path
    import pallas_bridge as pb
    logits, labels = jnp.ones((2, 3)), jnp.zeros(2, int)
    print(pb.info().details())
    try:
        print(pb.cross_entropy(logits, labels))
    except pb.LibraryError as error:
        print("raised:", error)
    if path == sys.argv[1]:
        print("reference:", pb.cross_entropy(logits, labels, implementation="reference"))
    sys.stdout.flush()
    os._exit(0)
"""
# C of a library that says of itself what the real one says, but for what is defined otherwise.
FAKE = """
#include <stddef.h>
#include <stdint.h>
const char *xentile_version(void) { return VERSION; }
const char *xentile_cpu_isa(void) { return "none"; }
uint32_t xentile_table_version(void) { return TABLE; }
void xentile_ffi_version(int32_t *a, int32_t *b) { *a = MAJOR; *b = MINOR; }
int32_t xentile_tuned_tile(void) { return 0; }
int32_t xentile_prefers_xla(void) { return 0; }
size_t xentile_plan(void) { return 0; }
const char *xentile_declarations(void) { return "{\\"targets\\": []}"; }
void *xentile_targets(size_t *count) { *count = 0; return count; }
"""
DEFINED = {
    "VERSION": f'"{versions.PACKAGE}"',
    "TABLE": str(library.TABLE_VERSION),
    "MAJOR": "0",
    "MINOR": "1",
}
# What is defined otherwise, and what is said of it.
VERSIONS: dict[str, tuple[dict[str, str], str]] = {
    "another version": (
        {"VERSION": '"9.9.9"'},
        f"is version 9.9.9 (table {library.TABLE_VERSION}) and pallas_bridge is",
    ),
    "another table": ({"TABLE": "7"}, "(table 7) and pallas_bridge is"),
    "a later interface": ({"MINOR": "99"}, "speaks XLA FFI 0.99 and the installed jaxlib"),
    "another revision": ({}, "was built of another revision than this pallas_bridge: xentile_"),
    "another interface": ({"MAJOR": "1"}, "speaks XLA FFI 1.1 and the installed jaxlib"),
}


def compile_c(path: Path, source: str, **defined: str) -> None:
    defines = [f"-D{name}={value}" for name, value in defined.items()]
    command = ["cc", "-shared", "-fPIC", *defines, "-x", "c", "-", "-o", path]
    subprocess.run(command, input=source, text=True, check=True)


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What CALL prints with each library, by its name."""
    folder = tmp_path_factory.mktemp("libraries")
    for name, (changed, _) in VERSIONS.items():
        compile_c(folder / name, FAKE, **{**DEFINED, **changed})
    compile_c(folder / "other", "int other(void) { return 0; }")
    (folder / "none").write_bytes(b"\x7fELF, but not for long")
    # The real one, with another machine in its ELF header.
    loaded = pallas_bridge.info().library
    assert loaded is not None
    shutil.copy(loaded.path, folder / "processor")
    with (folder / "processor").open("r+b") as file:
        file.seek(18)
        file.write((243).to_bytes(2, "little"))  # RISC-V
    names = ["missing", "other", "none", "processor", *VERSIONS]
    done = subprocess.run(
        [sys.executable, "-c", CALL, *(str(folder / name) for name in names)],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    texts = done.stdout.split("CALL\n")[1:]
    assert all("raised:" in one for one in texts) and "reference: 1.0986" in texts[0], texts
    return dict(zip(names, texts, strict=True))


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


@pytest.mark.fixed
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "no file"),
        ("none", "another platform"),
        ("processor", "another platform"),
        ("other", "is not a libxentile_xla"),
        *((name, message) for name, (_, message) in VERSIONS.items()),
    ],
)
@pytest.mark.slow
def test_a_library_that_is_refused(printed: dict[str, str], name: str, message: str) -> None:
    assert message in printed[name]


def test_requests_that_the_library_does_not_know_are_said_to_be_of_another_revision() -> None:
    request = {"platform": "cpu", "dtype": "f32", "problem": {}, "limits": {"may_do_all": True}}
    with pytest.raises(library.LibraryError, match=r"another revision .* field .*build both from"):
        library.plan(request)


def test_a_missing_library_is_said_to_be_missing(printed: dict[str, str]) -> None:
    assert (
        "raised: XENTILE_XLA_LIBRARY is" in printed["missing"] and "cpu: None" in printed["missing"]
    )


def test_an_installation_without_its_library_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(library.VARIABLE, raising=False)
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    with pytest.raises(library.LibraryError, match=r"pip install \./pallas_bridge"):
        library.find()


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
