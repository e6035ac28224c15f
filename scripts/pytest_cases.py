"""Chooses which cases of each test run, and shares tests among processes.

    XENTILE_TEST_CASES=cover python -m pytest -p scripts.pytest_cases

XENTILE_TEST_CASES is
- `all`, as unless it is set: every case;
- `cover`: the fewest cases, chosen greedily in their order, that have every value of every
  parameter; all cases of a test that is marked `fixed`, unless XENTILE_TEST_NUMBERS is 0;
- `one`: the first case of each test.
The choice depends on the tests alone: each run of a commit runs the same cases.

XENTILE_TEST_SHARE, as in "2/8", keeps every eighth of these from the third on. pytest-xdist is not
used, as machines with a GPU often have no package index.
"""

import os
from collections import defaultdict
from collections.abc import Callable

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the chosen cases of those that apply, and of these the share."""
    choose = CHOICES[os.environ.get("XENTILE_TEST_CASES", "all")]
    share, shares = map(int, os.environ.get("XENTILE_TEST_SHARE", "0/1").split("/"))
    tests = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    chosen = {case for cases in tests.values() for case in choose(cases)}
    kept = [item for item in items if item in chosen][share::shares]
    config.hook.pytest_deselected(items=[*{*items}.difference(kept)])
    items[:] = kept


def cover(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Returns cases of a test in which every value of every parameter occurs."""
    if is_fixed(cases[0]):
        return cases
    missing = set[tuple[str, str]]().union(*map(values, cases))
    chosen = [cases[0]]
    missing -= values(cases[0])
    while missing:
        chosen.append(max(cases, key=lambda case: len(values(case) & missing)))
        missing -= values(chosen[-1])
    return chosen


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
    "one": lambda cases: cases[:1],
}
