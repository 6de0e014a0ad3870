"""Tables go on: in the order of each column, page by page, and chosen by what they have."""

from __future__ import annotations

import html
import json
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from replaybuf.errors import InputError
from replaybuf.query import parse
from replaybuf.web import tables
from replaybuf.web.ask import Ask, facet_of, toggled
from replaybuf.web.tables import listed
from tests.web.conftest import Client
from tests.web.example import SCRIPT


@dataclass
class Row:
    name: str
    value: float | None


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


@pytest.mark.parametrize(
    ("where", "expected", "chosen"),
    [
        (None, {"tags.level": 3}, False),
        ('{"reward": 1}', {"reward": 1, "tags.level": 3}, False),
        ('{"tags.level": 2}', {"tags.level": 3}, False),
        ('{"tags.level": {"$gt": 2}}', {"$and": [{"tags.level": {"$gt": 2}}, {"tags.level": 3}]}, False),
        ('{"tags.level": 3, "reward": 1}', {"reward": 1}, True),
        ('{"tags.level": 3}', None, True),
        ('{"tags.level": true}', {"tags.level": 3}, False),
        ("no JSON", {"tags.level": 3}, False),
        ("[1]", {"tags.level": 3}, False),
    ],
)
def test_a_value_is_chosen_beside_the_query_and_taken_back(where: str | None, expected: Any, chosen: bool) -> None:
    text, was_chosen = toggled(where, "tags.level", 3)
    assert (None if text is None else json.loads(text), was_chosen) == (expected, chosen)
    if text is not None:
        parse(json.loads(text))


def test_the_most_frequent_values_come_first() -> None:
    found = facet_of("worker", {f"w{n}": n for n in range(1, 15)}, Ask({"worker": "w3"}), parameter="worker")
    assert [one.text for one in found.choices] == [f"w{n}" for n in range(14, 4, -1)]
    assert found.more == 4


def _choices(page: Client, path: str) -> dict[str, tuple[str, int]]:
    """The address and the count of each value of the facets of a page."""
    found = re.findall(r'<a href="([^"]*)"[^>]*>([^<]*)</a> <span class="quiet">([\d,]+)</span>', page.get(path).text)
    return {html.unescape(text): (html.unescape(href), int(count.replace(",", ""))) for href, text, count in found}


@pytest.mark.parametrize("text", ["math", "failed", "3", SCRIPT])
def test_a_facet_of_groups_leads_to_as_many_groups_as_it_counts(page: Client, text: str) -> None:
    path, count = "/groups", 0
    href, count = next((one for name, one in _choices(page, path).items() if name.startswith(text[:39])))
    query = {name: values[0] for name, values in parse_qs(urlsplit(href).query).items()}
    found = page.data("groups", {**query, "size": 500})
    assert len(found["rows"]) == count > 0


def test_a_facet_of_events_leads_to_as_many_events_as_it_counts(page: Client) -> None:
    choices = _choices(page, "/events")
    assert choices
    for href, count in choices.values():
        query = {name: values[0] for name, values in parse_qs(urlsplit(href).query).items()}
        assert len(page.data("events", query)["rows"]) == min(100, count)


@pytest.mark.parametrize("path", ["/", "/steps", "/workers", "/checkpoints", "/batches/1", "/steps/413", "/groups"])
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


def test_lists_of_groups_are_counted_up_to_a_thousand(page: Client) -> None:
    found = page.data("groups")
    assert found["looked_at"] == sum(count for _, count in found["values"]["status"])
    assert set(found["values"]) >= {"status", "task_name", "tags.level"}
