"""Tables of the pages, made of the columns that the command line prints: headings that sort, cells with links."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from replaybuf.errors import InputError
from replaybuf.view.columns import Column, used, value_of
from replaybuf.web.ask import Ask

#: Rows of a table on a page.
SIZE = 100


@dataclass(frozen=True, slots=True)
class Listed:
    """One page of a table: its rows, the total number of rows, its offset, and the next page's offset, if any."""

    rows: Sequence[Any]
    total: int
    first: int
    next: int | None


def listed(
    rows: Sequence[Any], ask: Ask, columns: Sequence[str], *, order: str = "order", after: str = "after"
) -> Listed:
    """Return a page of rows, ordered by a column (descending with a "-" before its name), or in the given order.

    `order` and `after` name the parameters with the column and the offset. Rows without a value come last. Raises
    InputError.
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


@dataclass(frozen=True, slots=True)
class Heading:
    """A heading: its text, the URL that sorts by it, and how the rows are sorted by it ("ascending", "descending")."""

    text: str
    title: str
    style: str
    href: str | None
    sorted: str


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell: its text, the URL that it links to, and the time that its age is of. `opens`: the link is the row's."""

    text: str
    style: str
    title: str
    href: str | None
    moment: datetime | None
    status: str
    opens: bool


@dataclass(frozen=True, slots=True)
class Table:
    """A page of a table; `undone` rows are pale. `after` names the parameter with the offset of another page."""

    label: str
    headings: Sequence[Heading]
    rows: Sequence[tuple[bool, Sequence[Cell]]]
    total: int
    first: int
    next: int | None
    after: str


Link = Callable[[Any], str | None]
_TIMES = ("ago", "age", "lease")
_STYLES = {"name": "name", "text": "brief", "tags": "brief tag", "cell": "detail"}


def table_of(
    label: str,
    rows: Sequence[Any],
    columns: Sequence[Column],
    ask: Ask,
    now: datetime,
    *,
    usual: str = "",
    order: str = "order",
    after: str = "after",
    sorts: bool | Collection[str] = True,
    here: Listed | None = None,
    links: Mapping[str, Link] = {},
) -> Table:
    """Return a page of rows as a table. Columns of which all rows have the usual value are left out.

    `usual` is the column that the rows are ordered by if the URL doesn't say, `order` and `after` the parameters that
    do. Only the headings of columns that it `sorts` by have links (all, or none). `here` is the page of rows if they
    are chosen already. `links` are functions from a row to the URL that its cell of this column links to, besides those
    that every table has.
    """
    shown = used(columns, rows)
    names = [one.name for one in shown]
    page = here or (
        listed(rows, ask, names, order=order, after=after) if sorts else Listed(rows[:SIZE], len(rows), 0, None)
    )
    by = (ask.text(order) if sorts else None) or usual
    headings = [
        Heading(
            one.header,
            one.title,
            "number" if one.is_right else "",
            ask.link("", **{order: one.name if by == f"-{one.name}" else f"-{one.name}", after: None})
            if sorts is True or (sorts and one.name in sorts)
            else None,
            {one.name: "ascending", f"-{one.name}": "descending"}.get(by, ""),
        )
        for one in shown
    ]
    to = {**_links(ask), **links}
    opening = next((one.name for one in shown if one.name in _OPENING), None)
    cells = [
        (
            bool(getattr(row, "undone", False)),
            [_cell(row, one, now, to.get(one.name), opens=one.name == opening) for one in shown],
        )
        for row in page.rows
    ]
    return Table(label, headings, cells, page.total, page.first, page.next, after)


#: The columns whose link opens what a row is about.
_OPENING = ("uid", "step", "name", "worker", "task_name")


def _links(ask: Ask) -> dict[str, Link]:
    def field(name: str, path: str, parameter: str = "") -> Link:
        def link(row: Any) -> str | None:
            value = value_of(row, name)
            if value is None or value == "":
                return None
            return ask.link(path, **{parameter: value}) if parameter else ask.link(f"{path}/{value}")

        return link

    return {
        "uid": field("uid", "/groups"),
        "last_uid": field("last_uid", "/groups"),
        "step": field("step", "/steps"),
        "worker": field("worker", "/worker", "worker"),
        "holder": field("holder", "/worker", "worker"),
    }


def _cell(row: Any, column: Column, now: datetime, link: Link | None, *, opens: bool) -> Cell:
    value = value_of(row, column.name)
    bad = value_of(row, column.bad) if column.bad else False
    href = link(row) if link is not None else None
    style = " ".join(
        filter(None, ("number" if column.is_right else _STYLES.get(column.kind, ""), "bad" if bad else ""))
    )
    return Cell(
        column.text(row, now) if value is not None else "",
        style,
        bad if isinstance(bad, str) else "",
        href,
        value if column.kind in _TIMES else None,
        str(value) if column.kind == "status" else "",
        opens and href is not None,
    )
