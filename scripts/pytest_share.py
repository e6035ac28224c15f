"""Several processes may share the work of one run of pytest, and a run may be thinned.

    python -m pytest -p scripts.pytest_share

XENTILE_TEST_SHARE, as in "2/8", keeps every eighth test from the third on. Before that
XENTILE_TEST_THIN, as in "4", keeps a quarter of each test's cases, one at least, and
XENTILE_TEST_HALF, 0 or 1, that half of the tests, and all that are marked `numbers`. The number
XENTILE_TEST_DRAW chooses which they are. All cases of tests that are marked `fixed` run, but where
XENTILE_TEST_NUMBERS is 0.
"""

import os
import random
import zlib
from collections import defaultdict

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keeps the share, of which what does not apply is then left out."""
    share, shares = map(int, os.environ.get("XENTILE_TEST_SHARE", "0/1").split("/"))
    thin = int(os.environ.get("XENTILE_TEST_THIN", "1"))
    draw = int(os.environ.get("XENTILE_TEST_DRAW", "0"))
    half = os.environ.get("XENTILE_TEST_HALF")
    kept = [item for item in items if half is None or in_half(item, int(half), draw)]
    items[:] = thinned(kept, thin, draw)[share::shares]


def in_half(item: pytest.Item, half: int, draw: int) -> bool:
    """Whether a test is of that half of all, or holds numbers."""
    if any(item.iter_markers("numbers")) or is_fixed(item):
        return True
    name = item.nodeid.partition("[")[0]
    return zlib.crc32(f"{draw} {name}".encode()) % 2 == half


def is_fixed(item: pytest.Item) -> bool:
    """Whether all cases of a test run here."""
    holds_numbers = os.environ.get("XENTILE_TEST_NUMBERS") != "0"
    return holds_numbers and any(item.iter_markers("fixed"))


def thinned(items: list[pytest.Item], thin: int, draw: int) -> list[pytest.Item]:
    """One in so many of each test's cases, in their order."""
    cases = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    chance = random.Random(draw)
    kept = {
        case for of_one in cases.values() for case in chance.sample(of_one, -(-len(of_one) // thin))
    }
    return [item for item in items if item in kept or is_fixed(item)]
