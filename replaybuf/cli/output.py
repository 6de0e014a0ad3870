"""Printing rows: a table for people, or JSON, newline-delimited JSON and CSV for programs.

Data goes to stdout, everything else to stderr. Control characters are escaped in tables and on a terminal; programs
get values as they are.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import typer

from replaybuf.redact import escape, escape_json, escape_line
from replaybuf.units import csv_lines, plain
from replaybuf.units import iso as iso

if TYPE_CHECKING:
    from rich.console import Console

Format = Literal["table", "json", "nl", "csv"]
Row = Mapping[str, Any]

# Without a terminal, tables have any width, with texts of up to this length.
_LONGEST_TEXT = 80
_SHORTEST_TEXT = 10
_WIDE = 100_000


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: its header, and the text for a row.

    If the table is too wide, `text` columns shrink; then `spare` ones are left out, the last first.
    """

    header: str
    show: Callable[[Row], str]
    right: bool = True
    text: bool = False
    spare: bool = False
    style: Callable[[Row], str] | None = None


class Output:
    """Prints in a format. `asked` says whether the user requested it, for commands whose default isn't a table."""

    def __init__(self, format: Format, *, asked: bool = True) -> None:
        self.format = format
        self.asked = asked

    @property
    def for_people(self) -> bool:
        return self.format == "table"

    def rows(self, rows: Sequence[Row], columns: Sequence[Column]) -> None:
        """Print rows, as a table of `columns` or with all their fields."""
        if self.for_people:
            print_table(rows, columns)
        elif self.format == "csv":
            keep = "\n" if sys.stdout.isatty() else None
            write(line if keep is None else escape(line, keep=keep) for line in csv_lines(rows))
        elif self.format == "nl":
            write(encode(row) + "\n" for row in rows)
        else:
            write(f"{',' if i else '['}\n {encode(row)}" for i, row in enumerate(rows))
            write("\n]\n" if rows else "[]\n")

    def value(self, value: Any) -> None:
        """Print one value as JSON."""
        write([encode(value, indent=2) + "\n"])

    def printed(self, value: Callable[[], Any], rows: Callable[[], Sequence[Row]]) -> bool:
        """Print a value as JSON, or rows as CSV or NDJSON; return False, printing nothing, if the format is a table."""
        if self.format == "json":
            self.value(value())
        elif not self.for_people:
            self.rows(rows(), [])
        return not self.for_people

    def note(self, text: str) -> None:
        """Print a note about the output on stderr."""
        if self.for_people:
            sys.stdout.flush()  # the output comes before the note
            typer.echo(escape_line(text), err=True)


def write(texts: Iterable[str]) -> None:
    """Write to stdout."""
    sys.stdout.writelines(texts)


def console(width: int | None = None) -> Console:
    """Return rich's console for stdout: data isn't parsed as markup, and only terminals get colours."""
    from rich.console import Console

    if width is None and not sys.stdout.isatty():
        width = _WIDE
    return Console(file=sys.stdout, width=width, highlight=False, markup=False, emoji=False)


def print_facts(title: str, facts: Mapping[str, object], width: int, styles: Mapping[str, str] = {}) -> None:
    """Print a title, and below it the facts that aren't empty, with their names; one with the name "" without."""
    from rich.text import Text

    out = console()
    out.print(Text(escape(title), style="bold"), soft_wrap=True)
    for name, value in facts.items():
        if value:
            label = Text(f"  {name:<{width}}" if name else "  ")
            out.print(label.append(escape(str(value)), style=styles.get(name, "")), soft_wrap=True)


def print_table(rows: Sequence[Row], columns: Sequence[Column], *, footer: bool = False) -> None:
    """Print a table, or one field on each line if the table is wider than the terminal.

    With `footer`, the last row is a total.
    """
    from rich.cells import cell_len

    width = console().width
    columns = list(columns)
    left_out: list[str] = []
    while True:
        cells = [[escape(column.show(row)) for column in columns] for row in rows]
        headers = [escape(column.header) for column in columns]
        natural = [max(map(cell_len, texts)) for texts in zip(headers, *cells, strict=True)]
        gap, widths = fit(natural, [column.text for column in columns], width)
        if sum(widths) + gap * (len(widths) - 1) <= width:
            _print_table(rows, columns, cells, gap, widths, footer)
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


def _print_table(
    rows: Sequence[Row],
    columns: Sequence[Column],
    cells: Sequence[Sequence[str]],
    gap: int,
    widths: Sequence[int],
    footer: bool,
) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    headers = [escape(column.header) for column in columns]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, gap - 1, 0, 0), pad_edge=False, show_edge=False, header_style="bold")
    for column, header, width in zip(columns, headers, widths, strict=True):
        justify: Literal["left", "right"] = "right" if column.right else "left"
        table.add_column(Text(header), justify=justify, no_wrap=True, overflow="ellipsis", width=width)
    for i, (row, texts) in enumerate(zip(rows, cells, strict=True)):
        styles = (column.style(row) if column.style else "" for column in columns)
        total = footer and i == len(rows) - 1
        table.add_row(
            *(Text(text, style=style) for text, style in zip(texts, styles, strict=True)),
            style="bold" if total else None,
            end_section=footer and i == len(rows) - 2,
        )
    # The table adds a gap at its right edge.
    out = console(max(console().width, sum(widths) + gap * len(widths)))
    if out.is_terminal:
        out.print(table)
        return
    with out.capture() as captured:
        out.print(table)
    write(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def fit(natural: Sequence[int], texts: Sequence[bool], available: int) -> tuple[int, list[int]]:
    """Return the gap between columns, and their widths: texts shrink, the longest first, numbers never."""
    limit = available if available < _WIDE else _LONGEST_TEXT
    widths = [min(width, limit) if is_text else width for width, is_text in zip(natural, texts, strict=True)]
    shortest = [min(width, _SHORTEST_TEXT) if is_text else width for width, is_text in zip(widths, texts, strict=True)]
    gap = 2 if sum(shortest) + 2 * (len(widths) - 1) <= available else 1
    excess = sum(widths) + gap * (len(widths) - 1) - available
    while excess > 0:
        i = max((i for i, is_text in enumerate(texts) if is_text), key=lambda i: widths[i], default=None)
        if i is None or widths[i] <= _SHORTEST_TEXT:
            break
        widths[i] -= 1
        excess -= 1
    return gap, widths


# Values for programs


def encode(value: Any, indent: int | None = None) -> str:
    """Return a value as JSON."""
    speaks_unicode = (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")
    return escape_json(json.dumps(plain(value), ensure_ascii=not speaks_unicode, indent=indent))
