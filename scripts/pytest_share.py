"""Several processes may share the work of one run of pytest.

XENTILE_TEST_SHARE, as in "2/8", keeps every eighth test from the third on, with

    python -m pytest -p scripts.pytest_share
"""

import os

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keeps the share, of which what does not apply is then left out."""
    share, shares = map(int, os.environ.get("XENTILE_TEST_SHARE", "0/1").split("/"))
    items[:] = items[share::shares]
