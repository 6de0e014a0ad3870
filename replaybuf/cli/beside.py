"""Responses side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from replaybuf.cli.colours import coloured
from replaybuf.cli.conversation import is_there, text_of
from replaybuf.cli.escape import escape, escape_line
from replaybuf.cli.groups import status_style
from replaybuf.cli.output import Row, console
from replaybuf.cli.summary import summary

if TYPE_CHECKING:
    from rich.text import Text

_NARROWEST = 38
_GAP = 2
_CUT = 2000
_LINES = "\n\t"


@dataclass(frozen=True, slots=True)
class Answer:
    """A rollout to be shown: its title, its metadata, and its fields."""

    title: str
    row: Row
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Layout:
    """How answers are shown: so many in a row (None: as many as fit), colours of tokens, all of it or beginnings."""

    columns: int | None
    colour: str | None
    full: bool


def print_beside(answers: Sequence[Answer], layout: Layout) -> None:
    """Print answers side by side."""
    from rich.table import Table
    from rich.text import Text

    out = console()
    width = out.width if out.is_terminal else min(out.width, 120)
    many = min(len(answers), layout.columns or max(1, (width + _GAP) // (_NARROWEST + _GAP)))
    legend: dict[str, str] = {}
    for start in range(0, len(answers), many):
        row = answers[start : start + many]
        grid = Table.grid(expand=True, padding=(0, _GAP, 0, 0))
        for _ in range(many):
            grid.add_column(ratio=1, overflow="fold", vertical="top")
        cells = []
        for one in row:
            cell, meanings = _cell(one, layout)
            cells.append(cell)
            legend |= {meaning: style for style, meaning in meanings}
        grid.add_row(*cells, *([Text()] * (many - len(cells))))
        _print(grid, width)
    if legend:
        line = Text("colours: ", style="dim")
        for meaning, style in legend.items():
            line.append(f" {meaning} ", style=f"not dim {style}")
        out.print(line)


def _print(grid: Any, width: int) -> None:
    out = console(width)
    with out.capture() as captured:
        out.print()
        out.print(grid)
    lines = captured.get().split("\n")
    out.file.write("\n".join(line if out.is_terminal else line.rstrip() for line in lines))


def _cell(one: Answer, layout: Layout) -> tuple[Text, Sequence[tuple[str, str]]]:
    from rich.text import Text

    cell = Text()
    cell.append(escape_line(one.title), style="bold")
    cell.append(f"\n{escape_line(summary(one.row))}\n", style=status_style(one.row))
    response = one.fields.get("response")
    if response is None:  # of classes with other names the beginning is known
        response = one.row["response"]
    tokens = None
    if layout.colour is not None:
        tokens = coloured(one.fields, response, layout.colour, full=layout.full)
        cell.append_text(tokens.text)
    if tokens is None or not tokens.is_response:
        cell.append(shown(response, full=layout.full)).append("\n")
    for name in ("tool_calls", "error_msg", "extra_fields"):
        if is_there(one.fields.get(name)):
            cell.append(f"[{name}]\n", style="dim").append(shown(one.fields[name], full=layout.full)).append("\n")
    return cell, () if tokens is None else tokens.legend


def shown(value: Any, *, full: bool) -> str:
    """Return a value as a text that can't drive the terminal, cut unless `full`."""
    if value is None:
        return "(none)"
    text = text_of(value)
    more = "" if full or len(text) <= _CUT else f"… {len(text) - _CUT:,} more characters (--full)"
    return escape(text if full else text[:_CUT], keep=_LINES) + more
