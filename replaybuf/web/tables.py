"""Tables that go on: a part of some rows, in the order of a column, and how many of them have which value."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from replaybuf.errors import InputError
from replaybuf.web.ask import Ask

#: Rows of a table on a page, and values of a facet.
SIZE, VALUES = 100, 10


@dataclass(frozen=True, slots=True)
class Listed:
    """The rows on a page, how many there are in all, where the page begins, and where the next one does, if any."""

    rows: Sequence[Any]
    total: int
    first: int
    next: int | None


def listed(
    rows: Sequence[Any], ask: Ask, columns: Sequence[str], *, order: str = "order", after: str = "after"
) -> Listed:
    """Return a page of rows, in the order of a column, from the other end with a "-" before it; as they come if none.

    `order` and `after` are the parameters that say so. Rows without a value come last. Raises InputError.
    """
    name, first = ask.text(order), ask.number(after, 0) or 0
    if name is not None:
        column = name.removeprefix("-")
        if column not in columns:
            raise InputError(
                f"{order} must be one of {', '.join(columns)}, or that with a - before it, not {name!r:.100}"
            )
        known = [row for row in rows if value_of(row, column) is not None]
        known.sort(key=lambda row: value_of(row, column), reverse=name != column)
        rows = [*known, *(row for row in rows if value_of(row, column) is None)]
    end = first + SIZE
    return Listed(rows[first:end], len(rows), first, end if end < len(rows) else None)


def value_of(row: Any, name: str) -> Any:
    """Return a value of a row: of a mapping, or of an object with attributes."""
    return row[name] if isinstance(row, Mapping) else getattr(row, name)


@dataclass(frozen=True, slots=True)
class Choice:
    """A value of a facet: its text, how many rows have it, the address that chooses it, and whether it is chosen."""

    text: str
    count: int
    href: str
    chosen: bool


@dataclass(frozen=True, slots=True)
class Facet:
    """What a column has, the most frequent first; `more` is the number of values that aren't shown."""

    name: str
    choices: Sequence[Choice]
    more: int


def facet_of(name: str, counts: Mapping[Any, int], ask: Ask, *, parameter: str | None = None) -> Facet:
    """Return the values of a column, with how many rows have each.

    A value is chosen by the parameter, or else by the query `where`; once it is, its address takes that back.
    """
    choices = []
    for value, count in Counter(counts).most_common(VALUES):
        if parameter is not None:
            chosen = ask.text(parameter) == value
            href = ask.link("", **{parameter: None if chosen else value, "after": None, "before": None})
        else:
            where, chosen = toggled(ask.text("where"), name, value)
            href = ask.link("", where=where, after=None)
        choices.append(Choice(value if isinstance(value, str) else json.dumps(value), count, href, chosen))
    return Facet(name, choices, max(0, len(counts) - VALUES))


def toggled(where: str | None, name: str, value: Any) -> tuple[str | None, bool]:
    """Return a query with the condition that a field has a value, or without it, and whether it was there."""
    try:
        query = json.loads(where) if where and where.strip() else {}
    except ValueError:
        query = {}
    if not isinstance(query, dict):
        query = {}
    if name in query and query[name] == value and type(query[name]) is type(value):
        rest = {field: one for field, one in query.items() if field != name}
        return json.dumps(rest) if rest else None, True
    if name in query and isinstance(query[name], dict):
        return json.dumps({"$and": [query, {name: value}]}), False
    return json.dumps({**query, name: value}), False
