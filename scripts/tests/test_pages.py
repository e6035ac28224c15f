"""Builds the site in docs/, runs the code of its pages, and compares what is made with the code.

A page's commands and Python run in an environment that has pallas_bridge from its wheel and what
the page says to install, in a new folder; those of a page that says that it needs a clone, in ROOT.

Run by scripts/tiers/docs.sh, which builds the library, the tools and the wheel before.
"""

import functools
import html
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "benches")]

from pages import (  # noqa: E402
    DOCS,
    READ,
    Block,
    blocks,
    build,
    installs,
    needs_checkout,
    pages,
    program,
)
from test_readme import commands  # noqa: E402

LIMIT_S = 300
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
BINARIES = Path(os.environ.get("XENTILE_TEST_BINARIES", TARGET / "release"))
ALL = [block for page in pages() for block in blocks(page) if not block.reasons]


def run(
    *command: str | Path, folder: Path = ROOT, environment: Mapping[str, str] | None = None
) -> str:
    """Runs a command in a folder, and returns what it printed.

    Fails where the command does.
    """
    result = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    print(result.stdout)
    assert result.returncode == 0, f"exit code {result.returncode}: {command}"
    return result.stdout


def in_language(language: str) -> pytest.MarkDecorator:
    """Parametrises a test by the blocks of a language."""
    found = [block for block in ALL if block.language == language]
    return pytest.mark.parametrize("block", found, ids=[block.name for block in found])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site's folder; Sphinx has no warning.

    So there is no broken link, no name that is not there, and no page in no index.
    """
    folder = tmp_path_factory.mktemp("site")
    assert build(folder) == 0
    return folder


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def test_pages_have_one_search(site: Path) -> None:
    """One button, which opens the one field."""
    for page in pages():
        text = read(site / page.relative_to(DOCS).with_suffix(".html"))
        assert len(re.findall(r"<button[^>]*search-button", text)) == 1, page
        assert text.count('type="search"') == 1, page


SIGNATURE = re.compile(r'<dt class="sig[^>]* id="pallas_bridge\.([\w.]+)">(.*?)</dt>', re.DOTALL)


def test_signatures_have_types(site: Path) -> None:
    """Arguments have types, by JAX's names, and defaults, and ours have links."""
    page = read(site / "reference" / "python.html")
    found = dict(SIGNATURE.findall(page))
    shown = {
        name: " ".join(html.unescape(re.sub("<[^>]*>", "", text)).split())
        for name, text in found.items()
    }
    assert "(x: ArrayLike, weight: ArrayLike | None, *, eps: float = 1e-06" in shown["rms_norm"]
    assert "(in_features: int, vocab_size: int, *," in shown["nnx.LMHeadLoss"]
    assert "dtype: DTypeLike = jnp.float8_e4m3fn" in shown["fp8_quantize"]
    assert 'href="#pallas_bridge.Plan"' in found["explain"]
    for name, text in shown.items():
        if not text.startswith("class "):
            # Without commas of types' parameters, and of defaults that are tuples.
            arguments = text.partition("(")[2].rpartition(")")[0]
            arguments = re.sub(r"\[[^]]*\]|\([^)]*\)", "", arguments)
            for argument in filter(None, map(str.strip, arguments.split(","))):
                assert argument == "*" or ": " in argument, f"{name}: {argument}"
        assert "ndarray | " not in text and "..." not in text.replace(", ...]", "]"), text


def test_functions_link_to_themselves(site: Path) -> None:
    """Functions' names in other pages lead to the function, not to its page or section."""
    index = read(site / "index.html")
    for name in ("linear_cross_entropy", "swiglu", "paged_attention", "rms_norm_fp8"):
        assert f'href="reference/python.html#pallas_bridge.{name}"' in index
    anchors = set(re.findall(r'id="([^"]+)"', read(site / "reference" / "python.html")))
    for page in site.rglob("*.html"):
        assert not re.search(r'href="[^"]*python\.html"[^>]*><code', read(page)), page
        assert set(re.findall(r'href="[^"]*python\.html#([^"]+)"', read(page))) <= anchors, page


def test_reference_is_of_the_code(tmp_path: Path) -> None:
    """Flags, keys and targets on the pages are those of the tools."""
    run(sys.executable, "scripts/make_reference.py", "--binaries", BINARIES, "--out", tmp_path)
    for made in sorted(tmp_path.iterdir()):
        there = ROOT / "docs" / "reference" / made.name
        assert there.read_text(encoding="utf-8") == made.read_text(encoding="utf-8"), (
            f"{there.relative_to(ROOT)} is not what scripts/make_reference.py makes: run it"
        )


def drawn(picture: Path) -> tuple[str, list[float]]:
    """An SVG's text without what is made of its numbers, and its numbers."""
    text = re.sub(r"(?<=[#\"])[a-z]+[0-9a-f]{8,}", "ID", picture.read_text(encoding="utf-8"))
    number = r"-?\d+(?:\.\d+)?(?:e-?\d+)?"
    return re.sub(number, "N", text), [float(found) for found in re.findall(number, text)]


def test_pictures_are_of_the_results(tmp_path: Path) -> None:
    """Each picture is what benches/plot_results.py draws, but for a hundredth of a point."""
    run(sys.executable, "benches/plot_results.py", "--out", tmp_path)
    there = ROOT / "docs" / "images"
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == sorted(file.name for file in there.iterdir())
    for name in names:
        (text, numbers), (made, expected) = drawn(there / name), drawn(tmp_path / name)
        is_same = text == made and numbers == pytest.approx(expected, abs=0.01)
        assert is_same, f"docs/images/{name} is not what benches/plot_results.py draws: run it"


def test_readme_has_the_tables_of_the_tree() -> None:
    """Platforms and results are what scripts/make_readme.py makes, in at most 120 lines."""
    run(sys.executable, "scripts/make_readme.py", "--check")
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder outside of the checkout, which has the environments and the folders of pages."""
    folder = tmp_path_factory.mktemp("outside")
    assert not folder.resolve().is_relative_to(ROOT)
    return folder


@functools.cache
def python_with(packages: tuple[str, ...], outside: Path) -> Path:
    """The Python of an environment that has the wheel and these packages, in tested versions."""
    environment = outside / "-".join(["python", *packages])
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin" / "python"
    # JAX and the wheel are installed once.
    if packages:
        site = "import sysconfig; print(sysconfig.get_path('purelib'))"
        base = run(python_with((), outside), "-c", site)
        Path(run(python, "-c", site).strip(), "base.pth").write_text(base, encoding="utf-8")
    wheel = next(Path(os.environ["XENTILE_TEST_WHEELS"]).glob("pallas_bridge-*.whl"))
    tested = [f"--constraint=scripts/requirements-{name}.txt" for name in ("jax", "train")]
    wanted = [*tested, *(packages or [wheel])]
    uv = ROOT / ".venv" / "bin" / "uv"
    # In a fraction of pip's time. It does not see what is installed already by base.pth.
    if not packages and uv.is_file() and installs_by_uv(uv, python, wanted):
        return python
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", *wanted)
    return python


def installs_by_uv(uv: Path, python: Path, wanted: list[str | Path]) -> bool:
    """Returns whether uv installed packages: it may not find what pip's settings have pip find."""
    command = [uv, "pip", "install", "--quiet", "--python", python, *wanted]
    return subprocess.run(command, cwd=ROOT, timeout=LIMIT_S, check=False).returncode == 0


def folder_of(page: Path, outside: Path) -> Path:
    """The folder outside of the checkout for what a page makes."""
    folder = outside / page.relative_to(ROOT).with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def run_on(page: Path, outside: Path, *command: str | Path) -> None:
    """Runs a command as a reader of the page would."""
    bin_folder = python_with(installs(page), outside).parent
    there = [part for part in os.environ["PATH"].split(":") if not Path(part).is_relative_to(ROOT)]
    environment = {**os.environ, "PATH": ":".join([str(bin_folder), *there])}
    # What is installed is under test.
    for variable in ("PYTHONPATH", "XENTILE_XLA_LIBRARY", "VIRTUAL_ENV"):
        environment.pop(variable, None)
    folder = ROOT if needs_checkout(page) else folder_of(page, outside)
    run(*command, folder=folder, environment=environment)


SHELL = [
    (block, command)
    for block in ALL
    if block.language == "sh"
    for command in commands(f"```sh\n{block.text}```\n")
]


def of_page(page: Path) -> pytest.MarkDecorator:
    """Marks a test to run in the process that runs the other commands and programs of a page."""
    return pytest.mark.together(str(page))


# Before a page's Python, which may read what they make.
@pytest.mark.parametrize(
    ("block", "command"),
    [
        pytest.param(block, command, marks=of_page(block.page), id=f"{block.name} {command}")
        for block, command in SHELL
    ],
)
def test_command(block: Block, command: str, outside: Path) -> None:
    """The command works."""
    run_on(block.page, outside, "bash", "-euo", "pipefail", "-c", command)


PYTHON = list(dict.fromkeys(block.page for block in ALL if block.language == "python"))


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=of_page(page), id=str(page.relative_to(ROOT))) for page in PYTHON],
)
def test_python(page: Path, outside: Path) -> None:
    """The Python of a page runs from top to bottom."""
    source = folder_of(page, outside) / "page.py"
    source.write_text(program(page), encoding="utf-8")
    run_on(page, outside, "python", source)


@in_language("cpp")
def test_cpp(block: Block, tmp_path: Path) -> None:
    """The program compiles with the header, links with the library, and ends well."""
    source, program = tmp_path / "program.cpp", tmp_path / "program"
    source.write_text(block.text, encoding="utf-8")
    include = ROOT / "crates" / "xentile-xla" / "include"
    flags = ["-std=c++17", "-Wall", "-Werror", f"-I{include}", "-o", str(program), str(source)]
    flags += [f"-L{BINARIES}", "-lxentile_xla", f"-Wl,-rpath,{BINARIES}"]
    run("c++", *flags)
    run(program)


@in_language("yaml")
def test_config(block: Block, tmp_path: Path) -> None:
    """It is a config of gradcheck, and the kernel is within tolerance."""
    config = tmp_path / "config.yaml"
    config.write_text(block.text, encoding="utf-8")
    run(BINARIES / "gradcheck", "--config", config)


def test_every_block_has_a_test() -> None:
    """Those of `rust` are documentation tests of the crate that they use."""
    tested = {"sh", "python", "cpp", "yaml", "rust"} | (READ - {"yaml"})
    assert {block.language for block in ALL} <= tested
    sources = [*ROOT.glob("crates/*/src/lib.rs")]
    text = "".join(source.read_text(encoding="utf-8") for source in sources)
    for page in {block.page for block in ALL if block.language == "rust"}:
        assert f'include_str!("../../../{page.relative_to(ROOT)}")' in text
