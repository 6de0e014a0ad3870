"""The figures of the suite, gathered from its tests and printed at the end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

import pytest

from tests.faults.figures import Figures, total
from tests.faults.processes import reap

_GATHERED = pytest.StashKey[list[tuple[str, Figures]]]()


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Iterator[Figures]:
    """The counts of this test; add to them before asserting anything of them."""
    counts = Figures()
    yield counts
    request.config.stash.setdefault(_GATHERED, []).append((request.node.nodeid, counts))


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    yield
    reap()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    gathered = [(name, counts) for name, counts in config.stash.get(_GATHERED, []) if counts]
    if not gathered:
        return
    terminalreporter.section("faults")
    if config.get_verbosity() > 0:
        for name, counts in gathered:
            terminalreporter.line(json.dumps({"test": name, **asdict(counts)}))
    terminalreporter.line(str(total([counts for _, counts in gathered])))
