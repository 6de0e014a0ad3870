"""Tables go on: in the order of each column, page by page, and chosen by what they have."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest

from replaybuf.errors import InputError
from replaybuf.view.columns import columns
from replaybuf.web import tables
from replaybuf.web.ask import Ask
from replaybuf.web.tables import Table, table_of
from tests.web.conftest import Client


@dataclass
class Row:
    name: str
    value: float | None


def listed(rows: list[Any], asked: Ask, names: tuple[str, ...]) -> Table:
    return table_of("any", rows, columns(*names), asked, datetime.now(UTC))


ROWS = [Row("a", 2.0), Row("b", None), Row("c", 1.0)]


@pytest.mark.parametrize(
    ("order", "expected"), [(None, "abc"), ("value", "cab"), ("-value", "acb"), ("-name", "cba"), ("name", "abc")]
)
def test_rows_without_a_value_come_last_in_both_directions(order: str | None, expected: str) -> None:
    asked = Ask({} if order is None else {"order": order})
    assert "".join(row.name for row in listed(ROWS, asked, ("name", "value")).rows) == expected


def test_every_row_is_on_one_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "SIZE", 3)
    rows, found, after = [{"n": n} for n in range(10)], [], 0
    while True:
        page = listed(rows, Ask({"after": str(after)}), ("n",))
        found += page.rows
        assert (page.total, page.first) == (10, after)
        if page.next is None:
            break
        after = page.next
    assert found == rows


@pytest.mark.parametrize("order", ["nope", "-", "--name", "name; DROP TABLE groups"])
def test_an_unknown_column_is_an_error_that_names_the_columns(order: str) -> None:
    with pytest.raises(InputError, match="order must be one of name, value"):
        listed(ROWS, Ask({"order": order}), ("name", "value"))


@pytest.mark.parametrize("filled", ["sqlite"], indirect=True)
@pytest.mark.parametrize("path", ["/", "/steps", "/workers", "/checkpoints", "/steps/413", "/groups"])
def test_every_heading_that_sorts_does(page: Client, path: str) -> None:
    links = re.findall(r'<th scope="col"[^>]*><a href="([^"]*)"', page.get(path).text)
    assert links
    for link in links:
        answer = page.get(path + html.unescape(link))
        assert answer.status_code == 200, link
        assert "aria-sort=" in answer.text
    leads = {
        other.split("?")[0].rsplit("/", 1)[0]: other for other in sorted(re.findall(r'href="(/[^"]*)"', answer.text))
    }
    for other in leads.values():
        assert page.get(html.unescape(other)).status_code == 200, other
