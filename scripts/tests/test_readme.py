"""Runs every command and Python program in README.md, so that the page stays true.

Commands in docs/ that fetch something are run after them, as they take the same environment.

Run in an environment that has pytest; commands that take minutes are run too:

    python -m pytest -v scripts/tests/test_readme.py
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from pages import blocks, pages  # noqa: E402

README = ROOT / "README.md"

# This suite is started by it.
SUITE = "scripts/test.sh"
# What CI runs: the same, with nothing left out.
WHOLE_SUITE = f"{SUITE} --all"

LIMIT_S = 900


def fences(kind: str, text: str) -> list[str]:
    """What the fences of one kind in a Markdown text hold."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def commands(text: str) -> Iterator[str]:
    """The command lines in the `sh` fences of a Markdown text, each once, in order.

    A command that goes on after a backslash at a line's end stays one command, with its line ends.
    """
    seen = set()
    for fence in fences("sh", text):
        for match in re.finditer(r"(?:.*\\\n)*.*\n", fence):
            command = match[0].strip()
            if command and not command.startswith("#") and command not in seen:
                seen.add(command)
                yield command


def readme() -> str:
    """README.md's text, empty where there is none: a test below says so."""
    return README.read_text(encoding="utf-8") if README.is_file() else ""


def test_commands_of_a_text() -> None:
    """Fences in other languages, comments and repetitions are left out; continuations are kept."""
    text = (
        "```sh\n# a comment\ncargo a\n\ncargo b \\\n    --c\n```\n"
        "text\n```yaml\nkey: value\n```\n```sh\ncargo a\ncargo d  # why\n```\n"
    )
    assert list(commands(text)) == ["cargo a", "cargo b \\\n    --c", "cargo d  # why"]


def test_every_fence_is_of_a_known_kind() -> None:
    """No command hides in a fence that is not `sh`: `bash`, `console` and bare ones are refused."""
    kinds = re.findall(r"^\s*(?:```|~~~)(.*)$", readme(), re.MULTILINE)[::2]
    known = {"sh", "rust", "cpp", "toml", "yaml", "json", "python", "text", "c"}
    assert kinds and set(kinds) <= known
    assert "sh" in kinds


def test_ci_runs_the_suite_that_the_readme_names() -> None:
    """Commands not run below are what runs this; the last line of .ci/run is the whole suite."""
    assert {SUITE, WHOLE_SUITE} <= {*commands(readme())}
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if SUITE in line] == [WHOLE_SUITE]
    assert lines[-1] == WHOLE_SUITE


COMMANDS = [command for command in commands(readme()) if not command.startswith(SUITE)]
FETCHING = [
    command
    for page in pages()
    for block in blocks(page)
    if (block.language, block.reasons) == ("sh", ("network",))
    for command in commands(f"```sh\n{block.text}```\n")
]
COMMANDS += [command for command in dict.fromkeys(FETCHING) if command not in COMMANDS]


@pytest.mark.parametrize("command", COMMANDS, ids=[" ".join(c.split()) for c in COMMANDS])
def test_command(command: str) -> None:
    """The command works in a clone's root, with nobody at the keyboard."""
    run(["bash", "-euo", "pipefail", "-c", command])


@pytest.mark.parametrize("program", fences("python", readme()))
def test_python(program: str) -> None:
    """The program works where the commands above it were run."""
    run(["python", "-c", program])


def run(arguments: list[str]) -> None:
    """Runs a program in the root of the repository, and fails where it does."""
    result = subprocess.run(
        arguments,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=LIMIT_S,
        check=False,
    )
    print(result.stdout)
    assert result.returncode == 0, f"exit code {result.returncode}: {arguments}"
