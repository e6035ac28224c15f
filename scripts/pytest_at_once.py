"""Tells of each test that fails as it does.

    python -m pytest -p scripts.pytest_at_once

pytest tells why tests failed once all have run: of a run that is stopped before, nothing is known.
"""

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Prints a failure, past what pytest captures."""
    if report.failed:
        print(f"\n-- {report.nodeid}\n{report.longreprtext}\n{report.capstdout}", flush=True)
