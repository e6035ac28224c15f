"""Holds docs/adding-an-operation.md against the tree, as it says that it is."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "adding-an-operation.md").read_text(encoding="utf-8")
NAME = "rms_norm"


def table(heading: str) -> list[list[str]]:
    """The rows of the first table under a heading, cells stripped."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip().strip("`") for cell in row] for row in rows[2:]]


def tracked() -> list[str]:
    """Every file that git has, or would have if it were added."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in found.splitlines() if (ROOT / name).is_file()]


def test_files_are_those_of_the_tree() -> None:
    """Every file with the operation's name, and no other; notes are no part of it."""
    listed = [row[0] for row in table("Its files")]
    assert len(listed) == len(set(listed))
    assert set(listed) == {name for name in tracked() if NAME in name}


def test_lines_elsewhere_are_there() -> None:
    """Each line is in its file."""
    rows = table("The lines elsewhere")
    assert len(rows) <= 12
    for file, line, _ in rows:
        assert line in (ROOT / file).read_text(encoding="utf-8"), f"{file} lacks {line}"


def test_no_tool_knows_an_operation() -> None:
    """No operation is named in xentile-tools' code, but in its tests."""
    source = ROOT / "crates" / "xentile-tools" / "src"
    operations = (ROOT / "crates" / "xentile" / "src" / "operations.rs").read_text(encoding="utf-8")
    names = re.findall(r"&(\w+)::operation::OPERATION", operations)
    assert NAME in names
    for file in source.rglob("*.rs"):
        if file.name == "tests.rs":
            continue
        text = file.read_text(encoding="utf-8").split("#[cfg(test)]")[0]
        code = re.sub(r"//.*", "", text)
        for name in names:
            found = re.search(rf"\b{name}\b", code)
            assert found is None, f"{file.relative_to(ROOT)} names {name}"
