"""`replaybuf schema`: the views for SQL, and what their columns mean."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator
from typing import Annotated

import typer

from replaybuf.cli.options import listing
from replaybuf.cli.output import Output, write
from replaybuf.storage.sql.inspection.view_columns import VIEW_COLUMNS, without_markup


@listing
def schema(
    output: Output,
    view: Annotated[str | None, typer.Argument(metavar="VIEW", help="Only this one.", show_default=False)] = None,
) -> None:
    """List the views for SQL, with what their columns mean.

    They are the same in every database of this version, on SQLite and PostgreSQL: names, order and meaning of columns
    stay, new ones come at the end. Times are UTC.

    \b
    Examples:
      replaybuf schema
      replaybuf schema batches
      replaybuf schema rollouts --json
    """
    if view is not None and view not in VIEW_COLUMNS:
        there = ", ".join(VIEW_COLUMNS)
        raise typer.BadParameter(f"there is no view {view!r:.100}: there are {there}", param_hint="VIEW")
    names = [*VIEW_COLUMNS] if view is None else [view]
    if output.for_people:
        write(_lines(names))
        return
    rows = [
        {"view": name, "column": one.name, "type": one.type, "meaning": without_markup(one.meaning)}
        for name in names
        for one in VIEW_COLUMNS[name].columns
    ]
    output.rows(rows, [])


def _lines(names: list[str]) -> Iterator[str]:
    """Yield each view with its columns, wrapped as the terminal is wide."""
    width = min(120, shutil.get_terminal_size().columns)
    for place, name in enumerate(names):
        view = VIEW_COLUMNS[name]
        gap = "\n" if place else ""
        yield f"{gap}{textwrap.fill(f'{name}: a row for each {without_markup(view.row)}', width)}\n"
        broadest = max(len(one.name) for one in view.columns)
        for one in view.columns:
            indent = f"  {one.name:<{broadest}}  {one.type:<7}  "
            meaning = textwrap.wrap(without_markup(one.meaning), width - len(indent)) or [""]
            yield f"{indent}{meaning[0]}".rstrip() + "\n"
            yield from (f"{' ' * len(indent)}{line}\n" for line in meaning[1:])
