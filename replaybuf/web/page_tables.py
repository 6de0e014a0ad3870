"""Tables of the pages, whose headings sort and whose cells link; request parameters, validated, and their URLs.

They are made of the columns that the command line prints.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from urllib.parse import urlencode

from replaybuf.errors import InputError
from replaybuf.rules.policies import OrderTerm, in_order
from replaybuf.view.columns import Column, used, value_of

LARGEST = 2**63 - 1
#: The parameters that pages know. Others are dropped: each link repeats those of its page.
PARAMETERS = frozenset(("after", "before", "buffer", "by", "hours", "order", "status", "task", "where", "worker"))


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
        value = self.parameters.get(name) or None
        if value is not None and "\x00" in value:
            raise InputError(f"{name} has a NUL character, which no name and no query has")
        return value

    def number(self, name: str, default: int | None = None, *, least: int = 0, most: int = LARGEST) -> int | None:
        """Return a whole number between `least` and `most`, or the default when it isn't given."""
        text = self.path.get(name) or self.parameters.get(name)
        if not text:
            return default
        if not text.removeprefix("-").isdecimal() or not text.isascii() or len(text) > len(str(LARGEST)) + 1:
            raise InputError(f"{name} must be a whole number, not {text!r:.100}")
        if not least <= (value := int(text)) <= most:
            raise InputError(f"{name} must be from {least:,} to {most:,}, not {value:,}")
        return value

    def link(self, path: str = "", **changes: object) -> str:
        """Return a URL with these parameters; those set to None are left out.

        On this page (without a path) its other parameters are kept, on another one only the buffer.
        """
        inherited = {name: value for name, value in self.parameters.items() if not path or name == "buffer"}
        parameters = {**inherited, **changes}
        query = urlencode({name: item for name, item in parameters.items() if item not in (None, "")}, errors="replace")
        path = self.prefix + path if path else ""
        return f"{path}?{query}" if query else path or "?"

    def of_worker(self, name: str) -> str:
        """Return the URL of the groups that a worker put, lowest reward first."""
        return self.link("/groups", where=json.dumps({"worker": name}), order="reward")


class NotThereError(InputError):
    """There is nothing of this number: it was taken, deleted or forgotten, or never was."""


# Tables

#: Rows of a table on a page.
SIZE = 100
Link = Callable[[Any], str | None]
_STYLES = {"name": "name", "text": "brief", "tags": "brief tag", "cell": "detail"}
#: The columns that have links in every table: to pages below a path, and to the groups of a worker.
_PATHS = {"uid": "/groups", "step": "/steps"}
_WORKERS = ("worker", "name")


@dataclass(frozen=True, slots=True)
class Table:
    """A page of a table: rows `first` to `next` (None: the last page).

    `by` says how the rows are ordered, and the headings of the columns in `sorts` have links. `links` are functions
    from a row to the URL that its cell of a column links to.
    """

    label: str
    columns: Sequence[Column]
    rows: Sequence[Any]
    ask: Ask
    now: datetime
    first: int
    next: int | None
    by: str
    sorts: Collection[str]
    links: Mapping[str, Link]

    def sorting(self, column: Column) -> str | None:
        """Return the URL that orders the rows by a column, or None if there is none."""
        if column.name not in self.sorts:
            return None
        direction = "" if self.by == f"-{column.name}" else "-"
        return self.ask.link("", order=f"{direction}{column.name}", after=None)

    def sorted_by(self, column: Column) -> str:
        """Return "ascending" or "descending" for the column by which the rows are ordered, "" for others."""
        return {column.name: "ascending", f"-{column.name}": "descending"}.get(self.by, "")

    def href(self, row: Any, column: Column) -> str | None:
        """Return the URL that a cell links to, if any."""
        if column.name in self.links:
            return self.links[column.name](row)
        if (value := value_of(row, column.name)) in (None, ""):
            return None
        if column.name in _WORKERS:
            return self.ask.of_worker(value)
        return self.ask.link(f"{_PATHS[column.name]}/{value}") if column.name in _PATHS else None

    def text(self, row: Any, column: Column) -> str:
        """Return the text of a cell; "" for a missing value."""
        return column.text(row, self.now) if value_of(row, column.name) is not None else ""

    def style(self, row: Any, column: Column) -> str:
        """Return the classes of a cell."""
        style = "number" if column.is_right else _STYLES.get(column.kind, "")
        return f"{style} bad".strip() if column.is_bad(row) else style

    def title(self, row: Any, column: Column) -> str:
        """Return why a cell is to be looked at, if the row says so in words."""
        reason = value_of(row, column.bad) if column.bad else ""
        return reason if isinstance(reason, str) else ""


def table_of(
    label: str,
    rows: Sequence[Any],
    columns: Sequence[Column],
    ask: Ask,
    now: datetime,
    *,
    usual: str = "",
    sorts: bool | Collection[str] = True,
    links: Mapping[str, Link] = {},
) -> Table:
    """Return a page of rows as a table. Columns of which all rows have the usual value are left out.

    `usual` is the column that the rows are ordered by if the URL doesn't say. A table that doesn't sort, because
    another one on its page does, has its first rows; so has one whose rows the database `sorts` by some columns.
    Rows without a value come last. Raises InputError.
    """
    used_columns = used(columns, rows)
    names = [column.name for column in columns]
    by = ask.text("order") if sorts else None
    first = (ask.number("after", 0) or 0) if sorts is True else 0
    if by is not None and sorts is True:
        name = by.removeprefix("-")
        if name not in names:
            raise InputError(f"order must be one of {', '.join(names)}, or that with a - before it, not {by!r:.100}")
        rows = in_order(rows, (OrderTerm(name, descending=name != by),), value_of)
    end = first + SIZE
    next_first = end if sorts is True and end < len(rows) else None
    return Table(
        *(label, used_columns, rows[first:end], ask, now, first, next_first, by or usual),
        names if sorts is True else sorts or (),
        links,
    )
