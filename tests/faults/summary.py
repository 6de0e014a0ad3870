"""The figures of the suite, printed at the end, also of tests that ran in other processes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.faults.figures import Figures, total

_NAME = "figures"


class Summary:
    """Gathers what tests report of themselves (as `user_properties`, which come with the reports of all workers)."""

    def __init__(self) -> None:
        self._gathered: list[tuple[str, dict[str, int]]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self._gathered += [(report.nodeid, value) for name, value in report.user_properties if name == _NAME]  # type: ignore[misc]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        if not self._gathered:
            return
        terminalreporter.section("faults")
        if config.get_verbosity() > 0:
            for name, counts in self._gathered:
                terminalreporter.line(json.dumps({"test": name, **counts}))
        terminalreporter.line(str(total([Figures(**counts) for _, counts in self._gathered])))


def report(node: pytest.Item, counts: dict[str, Any]) -> None:
    """Have the counts of a test printed."""
    node.user_properties.append((_NAME, counts))
