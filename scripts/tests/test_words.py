"""Holds code, comments and docs to the field's words, where this project once had its own.

Each entry is a word or phrase that readers stumbled over, with what to write in its place.
"""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORDS = {
    r"for nothing beside|as it came|of which either(?! axis)": "say it in two plain sentences",
    r"all the same\b": "nevertheless, or equal",
    r"\btold\b": "gets, reports, is passed, prints",
    r"\buntold\b": "not reported",
    r"\bfn (what|that)_": "name the subject: a test of shapes is `wrong_shapes_are_refused`",
    r"said to be\b": "is",
    r"\bunread tokens?\b|\bidle tokens?\b": "masked token",
    r"\blifts?\b|\blifted\b": "rescale, raise",
    r"known_parts|reduced_known": "auxiliary outputs",
    r"\bin_parts\b|\bcuts? over\b": "on_shards; sharded over, split into",
    r"unnormalised by|put off|\bstands? apart": "unnormalised softmax; deferred; separate",
}
# History, results as they were printed, and this list.
EXCEPT = (":!CHANGELOG.md", ":!benches/results", ":!scripts/tests/test_words.py", ":!Cargo.lock")
KINDS = ("*.py", "*.rs", "*.cu", "*.cuh", "*.md", "*.sh", "*.h", "*.toml", "*.yaml")


def test_words_are_the_fields() -> None:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *KINDS, *EXCEPT]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = []
    for name in filter(lambda name: (ROOT / name).is_file(), names.splitlines()):
        for number, line in enumerate((ROOT / name).read_text(encoding="utf-8").splitlines(), 1):
            found += [
                f"{name}:{number}: {match[0]!r}; write: {better}"
                for pattern, better in WORDS.items()
                if (match := re.search(pattern, line))
            ]
    assert found == []
