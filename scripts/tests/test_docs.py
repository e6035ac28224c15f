"""Holds pages of docs/ against the tree, as they say that they are.

What takes a build of the library or of the site is in test_pages.py.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from pages import CLONE, COMPILED, PACKAGES, READ, REASONS, RUN, blocks, pages  # noqa: E402

DOCS = ROOT / "docs"
PAGE = (ROOT / "docs" / "developing" / "adding-an-operation.md").read_text(encoding="utf-8")
NAME = "causal_conv1d"
# More than this no operation should need.
MOST_FILES = 14


def tables(heading: str) -> list[list[list[str]]]:
    """The rows of each table under a heading, cells stripped."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    found = [part for part in section.split("\n\n") if part.strip().startswith("|")]
    rows = [[line.strip("|").split("|") for line in part.strip().splitlines()] for part in found]
    return [[[cell.strip().strip("`") for cell in row] for row in table[2:]] for table in rows]


def tracked() -> list[str]:
    """Every file that git has, or would have if it were added."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in found.splitlines() if (ROOT / name).is_file()]


def test_files_are_those_of_the_tree() -> None:
    """Every file with the operation's name, and no other; docs and benchmarks are not listed."""
    listed = [row[0] for row in tables("Its files")[0]]
    assert len(listed) == len(set(listed))
    named = re.compile(rf"^(?!docs/|benches/).*(?:^|[/_]){NAME}(?:[._/]|$)")
    assert set(listed) == {name for name in tracked() if named.search(name)}
    assert len(listed) <= MOST_FILES


def test_lines_elsewhere_are_there() -> None:
    """Each line is in its file."""
    (rows,) = tables("The lines elsewhere")
    for file, line, _ in rows:
        assert line in (ROOT / file).read_text(encoding="utf-8"), f"{file} lacks {line}"


def test_no_other_file_names_it() -> None:
    """Of Rust, CUDA, Python and scripts, but for what is written by a command."""
    (rows,) = tables("The lines elsewhere")
    listed = {row[0] for row in [*tables("Its files")[0], *rows]}
    listed |= {
        "crates/xentile-xla/include/xentile_xla.h",
        "pallas_bridge/src/pallas_bridge/_src/targets.json",
    }
    code = re.compile(r"^(?:crates|pallas_bridge|scripts|configs|cmake|examples)/")
    named = set()
    for name in tracked():
        if code.search(name) and name != "scripts/tests/test_docs.py":
            text = (ROOT / name).read_text(encoding="utf-8", errors="replace")
            named |= {name} if NAME in text else set()
    # The benchmark's own test, and a model that calls it.
    users = {f"examples/train/{name}.py" for name in ("mixers", "step")}
    assert named - {"pallas_bridge/tests/test_peers.py"} - users <= listed


def test_no_tool_knows_an_operation() -> None:
    """No operation is named in xentile-tools' code, but in its tests."""
    source = ROOT / "crates" / "xentile-tools" / "src"
    folder = ROOT / "crates" / "xentile" / "src"
    texts = [path.read_text(encoding="utf-8") for path in folder.glob("*/operation.rs")]
    facts = re.compile(r"\bFacts \{\s*name: \"(\w+)\"")
    names = {name for text in texts for name in facts.findall(text)}
    assert {NAME, "rms_norm", "layer_norm"} <= names
    for file in source.rglob("*.rs"):
        if file.name == "tests.rs":
            continue
        text = file.read_text(encoding="utf-8").split("#[cfg(test)]")[0]
        code = re.sub(r"//.*", "", text)
        for name in names:
            assert not re.search(rf"\b{name}\b", code), f"{file.relative_to(ROOT)} names {name}"


def test_results_are_the_newest_alone() -> None:
    """At most 2 MiB, without what a command makes again from them."""
    files = [ROOT / name for name in tracked() if name.startswith("benches/results/")]
    assert sum(file.stat().st_size for file in files) <= 2 * 2**20
    assert not [file for file in files if file.suffix in (".png", ".html")]


LINK = re.compile(r"!?\[[^\]]*\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^(`{3,}).*?^\1", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as Markdown has them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


EVERY = [ROOT / "README.md", ROOT / "benches" / "results" / "README.md", *DOCS.rglob("*.md")]


@pytest.mark.parametrize("page", EVERY, ids=[str(page.relative_to(ROOT)) for page in EVERY])
def test_links_lead_somewhere(page: Path) -> None:
    """Each link within the repository is to a file or folder, and to a heading in it."""
    for path, anchor in LINK.findall(prose(page)):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{path} is not there"
        assert not anchor or anchor in anchors(target), f"no heading #{anchor} in {target}"


def test_pages_for_a_clone_say_so_first() -> None:
    """What only a checkout can run is on pages whose first command clones it."""
    for page in pages():
        found = list(blocks(page))
        clones = [block for block in found if "clone" in block.reasons]
        assert [block.text for block in clones] in ([], [CLONE]), page
        assert not clones or clones == [b for b in found if b.language in RUN | COMPILED][:1], page
        for block in found:
            anywhere = block.language in RUN | READ - {"yaml"}
            anywhere &= set(block.reasons) <= {"install"} | PACKAGES
            assert clones or anywhere, f"{block.name} needs a checkout, and no `sh clone` is above"
            if "install" in block.reasons:
                assert re.fullmatch(r"pip install [\w ]+\n", block.text), block.name


def test_fences_are_of_known_kinds() -> None:
    """No code hides in a fence that no test looks at."""
    found = [block for page in pages() for block in blocks(page)]
    assert found
    for block in found:
        assert block.language in RUN | COMPILED | READ, block.name
        assert set(block.reasons) <= REASONS, block.name


def test_python_that_needs_more_is_python() -> None:
    """Blocks that only some tiers run compile, and what they import from the package is there."""
    package = (ROOT / "pallas_bridge/src/pallas_bridge/__init__.py").read_text(encoding="utf-8")
    found = [block for page in pages() for block in blocks(page) if block.reasons]
    assert {reason for block in found for reason in block.reasons} >= PACKAGES
    for block in found:
        if block.language == "python":
            compile(block.text, block.name, "exec")
            for names in re.findall(r"^from pallas_bridge import (.*)$", block.text, re.MULTILINE):
                for name in names.split(", "):
                    module = ROOT / f"pallas_bridge/src/pallas_bridge/{name}.py"
                    assert f'"{name}"' in package or module.is_file(), f"{block.name}: {name}"


def sources(*patterns: str) -> str:
    """The text of all files of the repository that match."""
    files = [file for pattern in patterns for file in sorted(ROOT.glob(pattern))]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def test_environment_variables_are_those_of_the_code() -> None:
    """Every variable that Rust or Python reads has a row, and no other."""
    code = sources("crates/*/src/**/*.rs", "crates/*/tests/**/*.rs", "crates/*/build.rs")
    code += sources("pallas_bridge/hatch_build.py", "pallas_bridge/src/**/*.py")
    code += sources("benches/*.py", "benches/peers/*.py", "benches/transformer_bench/*.py")
    read = set(re.findall(r'"(XENTILE_[A-Z_]+)"', code))
    page = (DOCS / "reference" / "environment.md").read_text(encoding="utf-8")
    assert read
    assert set(re.findall(r"`(XENTILE_[A-Z_]+)`", page)) == read | made_by_build_scripts(code)


def made_by_build_scripts(code: str) -> set[str]:
    """Variables that a build script sets for the compiler."""
    return set(re.findall(r"cargo::rustc-env=(XENTILE_[A-Z_]+)=", code))


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_scripts_print_their_usage(option: str, tmp_path: Path) -> None:
    """Scripts print the comment at their head, from any folder."""
    for script in sorted((ROOT / "scripts").glob("*.sh")):
        # Others are sourced.
        if script.read_text(encoding="utf-8").startswith("#!"):
            done = subprocess.run(
                [script, option], cwd=tmp_path, capture_output=True, text=True, check=True
            )
            assert f"scripts/{script.name}" in done.stdout and not done.stderr, script
            assert "set -euo" not in done.stdout and "#!" not in done.stdout, script


def test_shipped_sweeps_change_no_tracked_file() -> None:
    """They write to target/ and leave configs/tuned alone, unless the command line says more."""
    configs = sorted((ROOT / "configs" / "sweep").glob("*.yaml"))
    assert configs
    for config in configs:
        text = config.read_text(encoding="utf-8")
        assert re.search(r"^out: target/", text, re.MULTILINE), config
        assert not re.search(r"^update_tuned: true", text, re.MULTILINE), config


def test_messages_are_those_of_the_code() -> None:
    """What troubleshooting has in headings is said somewhere; `..` stands for what varies."""
    code = sources("crates/*/src/**/*.rs", "crates/*/build.rs", "pallas_bridge/hatch_build.py")
    code += sources("pallas_bridge/src/**/*.py")
    # Strings go on over lines: in Rust after a backslash, in Python beside each other.
    code = re.sub(r"\\\n\s*", "", code)
    code = re.sub(r'"\s*\n\s*f?"', "", code)
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    messages = re.findall(r"^### `(.*)`$", page, re.MULTILINE)
    assert messages
    for message in messages:
        for part in filter(None, map(str.strip, message.split(".."))):
            assert part in code, f"nothing says {part!r}"


def test_python_reference_has_all_names() -> None:
    """Every public name of the package is on the page, and no other."""
    package = (ROOT / "pallas_bridge/src/pallas_bridge/__init__.py").read_text(encoding="utf-8")
    public = {*re.findall(r'"(\w+)"', package.split("__all__ = [")[1].split("]")[0])}
    page = (DOCS / "reference" / "python.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\.\. auto\w+:: pallas_bridge\.([\w.]+)", page, re.MULTILINE)
    modules = "checkpoint_policies", "equinox", "generation", "losses", "nn", "nnx", "optax"
    for module in modules:
        path = ROOT / "pallas_bridge/src/pallas_bridge" / f"{module}.py"
        names = path.read_text(encoding="utf-8").split("__all__ = [")[1].split("]")[0]
        public |= {f"{module}.{name}" for name in re.findall(r'"(\w+)"', names)} | {module}
    assert public
    parents = {name.partition(".")[0] for name in listed}
    assert {*listed} | parents == public
