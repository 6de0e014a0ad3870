"""The SQL page: one read-only statement, as a table, a plot or CSV."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any

from replaybuf.errors import AccessError, InputError, LockedError, QueryError
from replaybuf.storage.sql.inspection.reader import Reader, ReadTransaction
from replaybuf.storage.sql.inspection.run_records import newest
from replaybuf.storage.sql.inspection.user_sql import QUESTIONS
from replaybuf.storage.sql.inspection.view_columns import VIEW_COLUMNS, View, ViewColumn, without_markup
from replaybuf.web.apart import Answer, run_apart
from replaybuf.web.ask import Ask
from replaybuf.web.plots import STEPS, TIMES, Across, Plot, bars, lines

#: Maximum number of rows on the page and in JSON, and in CSV.
ROWS, CSV_ROWS = 500, 100_000
_LONGEST = 20_000
_LINES, _BARS = 8, 60
#: The train step in the texts of the questions, which is replaced by the buffer's last one.
_STEP = "413"


def run_typed(reader: Reader, ask: Ask, seconds: float, rows: int) -> dict[str, Any]:
    """Return the result of the requested statement, or its error, and the questions that can be asked."""
    statement = (ask.text("sql") or "").strip()
    if len(statement) > _LONGEST:
        raise InputError(f"a statement has at most {_LONGEST:,} characters, not {len(statement):,}")
    topics = reader.read(lambda tx: _questions(tx, ask.text("buffer")), timeout=seconds)
    ours = any(statement == one["sql"] for questions in topics.values() for one in questions)
    data: dict[str, Any] = {
        "sql": statement,
        "error": None,
        "names": [],
        "rows": [],
        "is_cut": False,
        "topics": topics,
    }
    if not statement:
        return data
    try:
        found = run_apart(reader, statement, seconds, rows, ours=ours)
    except (AccessError, LockedError, QueryError) as error:
        return {**data, "error": str(error)}
    return {**data, "names": found.names, "rows": found.rows, "is_cut": found.is_cut}


def _questions(tx: ReadTransaction, buffer: str | None) -> dict[str, list[dict[str, str]]]:
    """Return the questions by topic, about the last train step."""
    found = newest(tx, "batches", buffer, 1, "step IS NOT NULL")
    step = str(found[0]["step"]) if found else _STEP
    topics: dict[str, list[dict[str, str]]] = {}
    for one in QUESTIONS:
        text = without_markup(one.text).rstrip(":").replace(_STEP, step)
        asked = {"text": text, "sql": one.on(tx.dialect_name).replace(_STEP, step)}
        topics.setdefault(one.topic, []).append(asked)
    return topics


def rows_of_statement(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a result as dicts. Raises the statement's error."""
    if data["error"]:
        raise QueryError(data["error"])
    return [dict(zip(data["names"], row, strict=True)) for row in data["rows"]]


def draw_statement(data: dict[str, Any], ask: Ask) -> dict[str, Any]:
    """Return the page's additions to a result: its columns of numbers, a plot, and the views for completion."""
    numbers = [_is_numbers(column) for column in zip(*data["rows"], strict=True)] or [False] * len(data["names"])
    plot = plot_of(Answer(data["names"], data["rows"], data["is_cut"]))
    words = json.dumps({name: [column.name for column in view.columns] for name, view in VIEW_COLUMNS.items()})
    return {"numbers": numbers, "plots": [plot] if plot else [], "views": _VIEWS, "words": words, "csv_rows": CSV_ROWS}


_VIEWS = {
    name: View(without_markup(view.row), [ViewColumn(*map(without_markup, column)) for column in view.columns])
    for name, view in VIEW_COLUMNS.items()
}


def plot_of(answer: Answer) -> Plot | None:
    """Return a plot of a result over its first column; None if it can't be plotted.

    Over numbers or times: a line for each other column of numbers, or, if the second column has texts, a line of the
    first column of numbers for each text. Over distinct texts: bars of the first column of numbers.
    """
    columns = [*zip(*answer.rows, strict=True)]
    values = [place for place, column in enumerate(columns) if place and _is_numbers(column)]
    if len(answer.rows) < 2 or not values:
        return None
    first = columns[0]
    title = answer.names[values[0]]
    if _is_numbers(first) or _is_times(first):
        at = [_number(value) for value in first]
        across = Across(TIMES, zoom=None) if _is_times(first) else Across(STEPS, answer.names[0], None)
        second = columns[1]
        if len(columns) > 2 and all(isinstance(one, str | None) for one in second) and not _is_times(second):
            series = _by_name(at, second, columns[values[0]])
        else:
            series = {answer.names[place]: _points(zip(at, columns[place], strict=True)) for place in values[:_LINES]}
            title = ", ".join(series)
        return lines(title, series, across=across, fitted=True)
    named = [(str(name), value) for name, value in zip(first, columns[values[0]], strict=True) if value is not None]
    distinct = len({name for name, _ in named}) == len(named) <= _BARS
    return bars(f"{title} by {answer.names[0]}", named) if distinct and min(value for _, value in named) >= 0 else None


def _by_name(at: Sequence[float | None], names: Sequence[Any], values: Sequence[Any]) -> dict[str, Any]:
    found: dict[str, list[tuple[float, float]]] = {}
    for x, name, y in zip(at, names, values, strict=True):
        if x is not None and y is not None and (name in found or len(found) < _LINES):
            found.setdefault(str(name), []).append((x, y))
    return {name: _points(points) for name, points in found.items()}


def _points(pairs: Iterable[tuple[float | None, Any]]) -> list[tuple[float, float]]:
    """Return the known points in order; none where an x has several values, which is no line."""
    ordered = sorted((x, float(y)) for x, y in pairs if x is not None and y is not None)
    return [] if any(one[0] == other[0] for one, other in pairwise(ordered)) else ordered


def _number(value: Any) -> float | None:
    if isinstance(value, str):
        value = datetime.fromisoformat(value + "+00:00")
    return value.timestamp() if isinstance(value, datetime) else None if value is None else float(value)


def _is_numbers(column: Sequence[Any]) -> bool:
    known = [value for value in column if value is not None]
    return bool(known) and all(isinstance(value, int | float) and not isinstance(value, bool) for value in known)


#: SQLite's times, as the views write them.
_TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(\.\d+)?")


def _is_times(column: Sequence[Any]) -> bool:
    known = [value for value in column if value is not None]
    return bool(known) and all(
        isinstance(value, datetime) or (isinstance(value, str) and _TIME.fullmatch(value)) for value in known
    )
