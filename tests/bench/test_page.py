"""docs/large-runs.md shows a real page of results, and every number on it is one that a load prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.conftest import run
from tests.pages import DOCS

_PAGE = (DOCS / "large-runs.md").read_text("utf-8")
_SHOWN = re.search(r"(?ms)^```\n(\d+ workers .*?)^```$", _PAGE)
_ROW = re.compile(r"^(?:(\w+) {2,}|([a-z][\w ,.]*?) {2,}(?=\d))")


def rows(page: str) -> list[str]:
    """The names of the rows of a page of results, in order."""
    found = [_ROW.match(line) for line in page.splitlines()]
    return [(match[1] or match[2]).strip() for match in found if match]


def test_the_page_of_documentation_shows_what_a_load_prints(tmp_path: Path) -> None:
    small = ("--workers", 2, "--trainers", 1, "--group", "1x8", "--take", 4, "--rate", 50, "--leases", "--groups", 9)
    page = run("bench", f"sqlite:///{tmp_path}/bench.db", *small).stdout
    assert re.search(r"^ledger +18 put, [\d,]+ taken, \d+ left: 0 lost, 0 doubled$", page, re.M)
    assert _SHOWN is not None
    assert rows(_SHOWN[1]) == rows(page)


@pytest.mark.parametrize("row", ["put", "take", "groups", "waits", "ledger", "errors"])
def test_every_row_is_explained(row: str) -> None:
    assert re.search(rf"^\| (`\w+`, )*`{row}`", _PAGE, re.M)
