"""docs/large-runs.md has the table that its script reckons."""

from __future__ import annotations

from benchmarks.large_run import table
from tests.pages import DOCS


def test_the_table_is_the_one_that_the_script_prints() -> None:
    assert table() in (DOCS / "large-runs.md").read_text("utf-8")
