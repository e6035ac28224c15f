"""Several processes may share the work of one run of pytest, and a run may be thinned.

    python -m pytest -p scripts.pytest_share

XENTILE_TEST_SHARE, as in "2/8", keeps every eighth test from the third on. Before that
XENTILE_TEST_THIN, as in "4", keeps a quarter of each test's cases, one at least, which the number
XENTILE_TEST_DRAW chooses.
"""

import os
import random
from collections import defaultdict

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keeps the share, of which what does not apply is then left out."""
    share, shares = map(int, os.environ.get("XENTILE_TEST_SHARE", "0/1").split("/"))
    thin = int(os.environ.get("XENTILE_TEST_THIN", "1"))
    draw = int(os.environ.get("XENTILE_TEST_DRAW", "0"))
    items[:] = thinned(items, thin, draw)[share::shares]


def thinned(items: list[pytest.Item], thin: int, draw: int) -> list[pytest.Item]:
    """One in so many of each test's cases, in their order."""
    cases = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    chance = random.Random(draw)
    kept = {
        case for of_one in cases.values() for case in chance.sample(of_one, -(-len(of_one) // thin))
    }
    return [item for item in items if item in kept]
