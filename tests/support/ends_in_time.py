"""A pytest plugin that skips the tests that are left at a time of the clock, GPUOPT_TESTS_END."""

import os
import time

import pytest

END = float(os.environ["GPUOPT_TESTS_END"])
REASON = "no time was left for it"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    if time.time() > END:
        pytest.skip(REASON)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    if count := sum(REASON in str(report.longrepr) for report in skipped):
        terminalreporter.write_line(f"{count} tests were not begun: no time was left")
