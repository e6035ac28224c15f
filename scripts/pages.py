"""Builds the pages in docs/, and runs the code that is in them.

    python scripts/pages.py build [FOLDER]      the site, with every warning an error
    python scripts/pages.py run PAGE...         a page's Python, as one program
    python scripts/pages.py left-out            the blocks that no test runs, with why

A fence's first word is its language. A word after it says what it takes: `network` for what fetches
something, which the tier readme runs; a package for what the tier frameworks runs; `gpu` or `tpu`
for what no test runs. `sh install` is what a page needs beside pallas_bridge, and `sh clone` at its
top says that it needs the checkout: other pages are run outside of it.
"""

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
# What a test does with blocks of these: run them, compile them, or read them alone.
RUN, COMPILED, READ = {"python", "sh"}, {"rust", "c", "cpp"}, {"yaml", "json", "toml", "text"}
# What a block takes, a package that is tested in an environment of its own among others, or is for.
DEVICES, PACKAGES = {"gpu", "tpu"}, {"maxtext", "levanter", "easydel", "tunix"}
REASONS = {"network", "clone", "install"} | DEVICES | PACKAGES
CLONE = "git clone https://github.com/xentile/xentile && cd xentile\n"


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    # Of its first line of code, from 1.
    line: int
    language: str
    reasons: tuple[str, ...]
    text: str

    @property
    def name(self) -> str:
        """Where it is."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """Every page but README.md, whose tests are its own."""
    return sorted(DOCS.rglob("*.md"))


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page, in order; directives of Sphinx are none."""
    lines = page.read_text(encoding="utf-8").splitlines()
    index = 0
    while index < len(lines):
        opened = re.match(r"^\s*(`{3,}|~{3,})(.*)$", lines[index])
        index += 1
        if not opened:
            continue
        start = index
        while index < len(lines) and not lines[index].strip().startswith(opened[1]):
            index += 1
        words = opened[2].split()
        if not opened[2].strip().startswith("{"):
            text = "".join(f"{line}\n" for line in lines[start:index])
            language, *reasons = words or [""]
            yield Block(page, start + 1, language, tuple(reasons), text)
        index += 1


def left_out() -> list[Block]:
    """The blocks that would be run or compiled, and are not: those that need a device."""
    return [
        block
        for page in pages()
        for block in blocks(page)
        if set(block.reasons) & DEVICES and block.language in RUN | COMPILED
    ]


def needs_checkout(page: Path) -> bool:
    """Whether a page says that it is for a clone."""
    return any("clone" in block.reasons for block in blocks(page))


def installs(page: Path) -> tuple[str, ...]:
    """The packages that a page says to install beside pallas_bridge, in order."""
    texts = [block.text for block in blocks(page) if "install" in block.reasons]
    return tuple(sorted(set("".join(texts).replace("pip install", "").split())))


def program(page: Path) -> str:
    """A page's Python, each line at its place in the page, for tracebacks to name that."""
    text = ""
    for block in blocks(page):
        if block.language == "python" and not block.reasons:
            text += "\n" * (block.line - 1 - text.count("\n")) + block.text
    return text


def run_page(page: Path) -> None:
    """Runs a page's Python in this process, from top to bottom."""
    exec(compile(program(page), str(page.relative_to(ROOT)), "exec"), {"__name__": "__main__"})


def build(folder: Path) -> int:
    """Builds the site; returns the exit code of Sphinx, which is not 0 where there is a warning."""
    command = [sys.executable, "-m", "sphinx", "--builder", "html", "--fail-on-warning"]
    command += ["--fresh-env", "--nitpicky", "--quiet", str(DOCS), str(folder)]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def main() -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    of_build = commands.add_parser("build")
    of_build.add_argument("folder", type=Path, nargs="?", default=ROOT / "target" / "site")
    commands.add_parser("run").add_argument("page", type=Path, nargs="+")
    commands.add_parser("left-out")
    given = parser.parse_args()
    if given.command == "build":
        return build(given.folder)
    if given.command == "run":
        for page in given.page:
            run_page(page.resolve())
    else:
        for block in left_out():
            first = block.text.splitlines()[0]
            print(f"left out: {block.name}, which needs {' and '.join(block.reasons)}: {first}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
