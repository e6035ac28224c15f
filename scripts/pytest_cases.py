"""Chooses which cases of each test run, and shares tests among processes.

    XENTILE_TEST_CASES=cover python -m pytest -p scripts.pytest_cases

XENTILE_TEST_CASES is
- `all`, as unless it is set: every case;
- `cover`: the fewest cases, chosen greedily in their order, that have every value of every
  parameter, but the first N of a test that is marked `few(N)`, which may be 0; all cases of a test
  that is marked `fixed`, unless XENTILE_TEST_NUMBERS is 0;
- `fast`: the first of these, of tests that are not marked `slow`.
The choice depends on the tests alone: each run of a commit runs the same cases.

XENTILE_TEST_SHARE, as in "2/8", keeps every eighth of these from the third on. Where
XENTILE_TEST_CLAIMS names a folder, processes that have the same tests claim them there as they come
to them instead: whole files, so that what a file compiles and sets up is made once, or where there
are few files single tests, but together those that share a fixture of a file or that are marked
`together(NAME)`. pytest-xdist is not
used, as machines with a GPU often have no package index.
"""

import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

CLAIMS = os.environ.get("XENTILE_TEST_CLAIMS")
# So many files are claimed as a whole.
MANY_FILES = 16
CLAIMS_FILES = pytest.StashKey[bool]()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the chosen cases of those that apply, and of these the share."""
    choose = CHOICES[os.environ.get("XENTILE_TEST_CASES", "all")]
    share, shares = map(int, os.environ.get("XENTILE_TEST_SHARE", "0/1").split("/"))
    tests = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    chosen = {case for cases in tests.values() for case in choose(cases)}
    kept = [item for item in items if item in chosen]
    if CLAIMS is None:
        kept = kept[share::shares]
    else:
        # What takes longest is claimed first, so that processes end at about the same time.
        counts = Counter(item.path for item in kept)
        kept.sort(key=lambda item: -counts[item.path])
        config.stash[CLAIMS_FILES] = len(counts) >= MANY_FILES
    config.hook.pytest_deselected(items=[*{*items}.difference(kept)])
    items[:] = kept


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Runs the tests that this process claims, each once the next one is known.

    pytest takes down after a test what the next one does not share.
    """
    if CLAIMS is None or session.config.option.collectonly or session.testsfailed:
        return None
    takes_files = session.config.stash[CLAIMS_FILES]
    ours = (one for one in session.items if claim(str(one.path) if takes_files else shares(one)))
    item = next(ours, None)
    while item is not None:
        following = next(ours, None)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        item = following
    return True


def shares(item: pytest.Item) -> str:
    """Returns a test's name, or one for all with its marker `together` or fixtures of a file."""
    for mark in item.iter_markers("together"):
        return str(mark.args[0])
    fixtures = getattr(item, "_fixtureinfo").name2fixturedefs  # noqa: B009 (pytest has no public way)
    names = sorted(name for name, found in fixtures.items() if found[-1].scope == "module")
    return f"{item.path} {names}" if names else item.nodeid


@cache
def claim(name: str) -> bool:
    """Returns whether this process is the first that claims a file or a test."""
    assert CLAIMS is not None
    try:
        Path(CLAIMS, hashlib.sha256(name.encode()).hexdigest()).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def cover(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Returns cases of a test in which every value of every parameter occurs, or a few."""
    if is_fixed(cases[0]):
        return cases
    for mark in cases[0].iter_markers("few"):
        (count,) = mark.args
        return cases[:count]
    missing = set[tuple[str, str]]().union(*map(values, cases))
    chosen = [cases[0]]
    missing -= values(cases[0])
    while missing:
        chosen.append(max(cases, key=lambda case: len(values(case) & missing)))
        missing -= values(chosen[-1])
    return chosen


@cache
def values(case: pytest.Item) -> set[tuple[str, str]]:
    """Returns each parameter of a case with its value, as text: not every value can be hashed."""
    spec = getattr(case, "callspec", None)
    return set() if spec is None else {(name, repr(value)) for name, value in spec.params.items()}


def is_fixed(case: pytest.Item) -> bool:
    """Returns whether all cases of a test run where values of parameters are covered."""
    holds_numbers = os.environ.get("XENTILE_TEST_NUMBERS") != "0"
    return holds_numbers and any(case.iter_markers("fixed"))


CHOICES: dict[str, Callable[[list[pytest.Item]], list[pytest.Item]]] = {
    "all": lambda cases: cases,
    "cover": cover,
    "fast": lambda cases: cover(cases)[: not any(cases[0].iter_markers("slow"))],
}
