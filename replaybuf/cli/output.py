"""Printing: tables and sentences for people, JSON for programs.

Data goes to stdout, everything else to stderr. Control characters are escaped in tables and on a terminal; programs
get values as they are.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

import typer

from replaybuf.common.redact import escape, escape_json, escape_line
from replaybuf.common.units import plain
from replaybuf.view.columns import Column, used

if TYPE_CHECKING:
    from rich.console import Console

Row = Mapping[str, Any]

# Without a terminal, tables have any width, with texts of up to this length.
_LONGEST_TEXT = 80
_SHORTEST_TEXT = 10
_UNLIMITED_WIDTH = 100_000
#: The colours of statuses, and of the states of workers.
STYLES = {
    "completed": "green",
    "failed": "red",
    "aborted": "yellow",
    "expired": "magenta",
    "filtered": "cyan",
    "init": "blue",
    "archived": "dim",
    "filling": "blue",
    "alive": "green",
    "silent": "red",
    "fenced": "red",
}


#: The formats of --format.
FORMATS = ("text", "json")


class Output:
    """Prints rows as a table for people, or as JSON."""

    def __init__(self, format: str = "text") -> None:
        self.for_people = format == "text"

    def rows(self, rows: Sequence[Any], columns: Sequence[Column] = (), now: datetime | None = None) -> None:
        """Print rows, as a table of `columns` or with all their fields."""
        if self.for_people:
            print_table(rows, columns, now)
        else:
            write(f"{',' if i else '['}\n {encode(row)}" for i, row in enumerate(rows))
            write("\n]\n" if rows else "[]\n")

    def note(self, text: str) -> None:
        """Print a note about the output on stderr."""
        if self.for_people:
            sys.stdout.flush()  # the output comes before the note
            typer.echo(escape_line(text), err=True)


def write(texts: Iterable[str]) -> None:
    """Write to stdout."""
    sys.stdout.writelines(texts)


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    write([encode(value, indent=2) + "\n"])


def encode(value: Any, indent: int | None = None) -> str:
    """Return a value as JSON."""
    speaks_unicode = (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")
    return escape_json(json.dumps(plain(value), ensure_ascii=not speaks_unicode, indent=indent))


def console() -> Console:
    """Return rich's console for stdout: data isn't parsed as markup, and only terminals get colours."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else _UNLIMITED_WIDTH
    return Console(file=sys.stdout, width=width, highlight=False, markup=False, emoji=False)


def print_line(text: str, style: str = "", indent: str = "") -> None:
    """Print a sentence, wrapped at words on a terminal; further lines are indented."""
    from rich.text import Text

    out = console()
    if not out.is_terminal:
        write([f"{indent}{escape_line(text)}\n"])
        return
    lines = Text(escape_line(text), style=style).wrap(out, max(_SHORTEST_TEXT, out.width - len(indent)))
    for line in lines:
        line.rstrip()
        out.print(Text(indent).append(line), soft_wrap=True)


def print_facts(title: str, facts: Mapping[str, object], width: int, styles: Mapping[str, str] = {}) -> None:
    """Print a title, and below it the facts that aren't empty, with their names; one with the name "" without."""
    from rich.text import Text

    console().print(Text(escape(title), style="bold"))
    for name, value in facts.items():
        if value:
            print_labelled(f"  {name:<{width}}" if name else "  ", str(value), style=styles.get(name, ""))


def print_labelled(label: str, text: str, *, label_style: str = "", style: str = "") -> None:
    """Print a text after a label; further lines are indented to the end of the label."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid()
    grid.add_column(no_wrap=True, width=len(label))
    grid.add_column(overflow="fold")
    grid.add_row(Text(label, style=label_style), Text(escape(text), style=style))
    console().print(grid)


def print_table(
    rows: Sequence[Any], columns: Sequence[Column], now: datetime | None = None, *, footer: bool = False
) -> None:
    """Print a table, or one field on each line if the table is wider than the terminal.

    Texts shrink, the longest first, numbers never. With `footer`, the last row is a total.
    """
    from rich.cells import cell_len

    width, left_out = console().width, list[str]()
    columns = used(columns, rows)
    while True:
        cells = [[escape(column.text(row, now)) for column in columns] for row in rows]
        headers = [escape(column.header) for column in columns]
        natural = [max(map(cell_len, texts)) for texts in zip(headers, *cells, strict=True)]
        least = sum(min(n, _SHORTEST_TEXT) if column.is_text else n for n, column in zip(natural, columns, strict=True))
        gap = next((gap for gap in (2, 1) if least + gap * (len(columns) - 1) <= width), 0)
        if gap:
            room = width - gap * (len(columns) - 1) - least
            text_widths = [n for n, column in zip(natural, columns, strict=True) if column.is_text]
            _print_table(rows, columns, cells, gap, footer, _widest_text(text_widths, room))
            break
        spare = next((column for column in reversed(columns) if column.spare), None)
        if spare is None:
            _print_records(headers, cells)
            break
        columns.remove(spare)
        left_out.append(spare.header)
    if left_out:
        sys.stdout.flush()
        typer.echo(f"too narrow for: {', '.join(reversed(left_out))}", err=True)


def _widest_text(widths: Sequence[int], room: int) -> int:
    """Return the largest width to which texts can be cut, if `room` is left beside the shortest ones."""
    limit = _SHORTEST_TEXT
    while (longer := sum(width > limit for width in widths)) and longer <= room:
        limit, room = limit + 1, room - longer
    return limit


def _print_records(headers: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    """Print each field of each row on its own line."""
    from rich.table import Table
    from rich.text import Text

    out = console()
    for i, texts in enumerate(cells, 1):
        start = f"─[ {i} ]"
        out.print(Text(start + "─" * max(0, out.width - len(start)), style="dim"), no_wrap=True)
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(style="bold", max_width=max(_SHORTEST_TEXT, out.width // 2))
        grid.add_column(overflow="fold")
        for header, text in zip(headers, texts, strict=True):
            grid.add_row(Text(header), Text(text))
        out.print(grid)


def _style(column: Column, row: Any) -> str:
    if column.is_bad(row):
        return "red"
    return STYLES.get(column.text(row, None), "") if column.kind == "status" else ""


def _print_table(
    rows: Sequence[Any],
    columns: Sequence[Column],
    cells: Sequence[Sequence[str]],
    gap: int,
    footer: bool,
    longest: int,
) -> None:
    """Print a table whose texts have at most `longest` characters on a terminal."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    out, longest = console(), longest if sys.stdout.isatty() else _LONGEST_TEXT
    table = Table(box=box.SIMPLE_HEAD, padding=(0, gap - 1, 0, 0), pad_edge=False, show_edge=False, header_style="bold")
    for column in columns:
        justify: Literal["left", "right"] = "right" if column.is_right else "left"
        header, max_width = Text(escape(column.header), no_wrap=True), longest if column.is_text else None
        table.add_column(header, justify=justify, no_wrap=not column.is_text, overflow="ellipsis", max_width=max_width)
    for i, (row, texts) in enumerate(zip(rows, cells, strict=True)):
        total = footer and i == len(rows) - 1
        table.add_row(
            *(Text(text, _style(column, row), no_wrap=True) for column, text in zip(columns, texts, strict=True)),
            style="bold" if total else None,
            end_section=footer and i == len(rows) - 2,
        )
    if out.is_terminal:
        out.print(table)
        return
    with out.capture() as captured:
        out.print(table)
    write(f"{line.rstrip()}\n" for line in captured.get().splitlines())
