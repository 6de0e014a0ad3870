"""The figures of each test, which `summary.py` gathers, and an end to its processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

import pytest

from tests.faults.figures import Figures, report
from tests.faults.processes import reap


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Iterator[Figures]:
    """The counts of this test; add to them before asserting anything of them."""
    counts = Figures()
    yield counts
    if counts:
        report(request.node, asdict(counts))


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    yield
    reap()
