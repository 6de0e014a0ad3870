"""Request parameters, validated; the table pages and facets that they select."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from replaybuf.errors import InputError

LARGEST = 2**63 - 1
#: The parameters that pages know. Others are dropped: each link repeats those of its page.
PARAMETERS = frozenset(
    (
        *("across", "after", "all", "before", "buffer", "by", "from", "hours", "kind"),
        *("order", "page", "size", "sort", "status", "task", "to", "where", "worker"),
    )
)


@dataclass(frozen=True, slots=True)
class Ask:
    """The parameters of a URL's query, and the numbers in its path. Accessors raise InputError for invalid values.

    `prefix` is the path of a proxy before the paths of all pages, "/rl" or "".
    """

    parameters: Mapping[str, str]
    path: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""

    def text(self, name: str) -> str | None:
        """Return a parameter's text, or None when it is missing or empty."""
        given = self.parameters.get(name) or None
        if given is not None and "\x00" in given:
            raise InputError(f"{name} has a NUL character, which no name and no query has")
        return given

    def number(self, name: str, default: int | None = None, *, least: int = 0, most: int = LARGEST) -> int | None:
        """Return a whole number between `least` and `most`, or the default when it isn't given."""
        given = self.path.get(name) or self.parameters.get(name)
        if not given:
            return default
        if not given.removeprefix("-").isdecimal() or not given.isascii() or len(given) > len(str(LARGEST)) + 1:
            raise InputError(f"{name} must be a whole number, not {given!r:.100}")
        if not least <= (value := int(given)) <= most:
            raise InputError(f"{name} must be from {least:,} to {most:,}, not {value:,}")
        return value

    def choice(self, name: str, among: tuple[str, ...]) -> str:
        """Return a parameter's value, which must be one of `among`; the default is the first of them."""
        given = self.text(name) or among[0]
        if given not in among:
            raise InputError(f"{name} must be one of {', '.join(among)}, not {given!r:.100}")
        return given

    def link(self, path: str = "", **changes: object) -> str:
        """Return a URL with these parameters; those set to None are left out.

        On this page (without a path) its other parameters are kept, on another one only the buffer.
        """
        kept = {name: one for name, one in self.parameters.items() if not path or name == "buffer"}
        parameters = {**kept, **changes}
        query = urlencode({name: one for name, one in parameters.items() if one not in (None, "")}, errors="replace")
        path = self.prefix + path if path else ""
        return f"{path}?{query}" if query else path or "?"


class NotThereError(InputError):
    """There is nothing of this number: it was taken, deleted or forgotten, or never was."""


#: Values of a facet.
VALUES = 10


@dataclass(frozen=True, slots=True)
class Choice:
    """A value of a facet: its text, the number of rows with it, the URL that selects it, and whether it is selected."""

    text: str
    count: int
    href: str
    chosen: bool


@dataclass(frozen=True, slots=True)
class Facet:
    """The values of a column, most frequent first; `more` is the number of values that aren't shown."""

    name: str
    choices: Sequence[Choice]
    more: int


def facet_of(name: str, counts: Mapping[Any, int], ask: Ask, *, parameter: str | None = None) -> Facet:
    """Return the values of a column with their row counts.

    The parameter, or else the query `where`, selects a value; the URL of a selected value deselects it.
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
    """Add the condition that a field has a value to a query, or remove it; return the query, and whether it had it."""
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
