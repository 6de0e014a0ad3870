"""docs/sql.md is true: the views, their columns one by one, and the answers to its questions, on both databases.

`REPLAYBUF_TEST_UPDATE_DOCS=1 pytest tests/test_sql_page.py` writes the answers anew.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import textwrap
from collections.abc import Iterator
from decimal import Decimal
from itertools import groupby
from numbers import Real
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, inspect

from replaybuf import ReplayBufferConfig
from replaybuf.storage.reports import EventKind
from replaybuf.storage.sql.inspection.user_sql import VIEW_COLUMNS
from replaybuf.storage.sql.schema.views import VIEWS
from tests.cli.conftest import run as command
from tests.pages import DOCS
from tests.postgres import new_url
from tests.sql_example import QUESTIONS, Question, fill
from tests.storage.test_schema import create, run

PAGE = DOCS / "sql.md"
TEXT = PAGE.read_text("utf-8")
UPDATE = bool(os.environ.get("REPLAYBUF_TEST_UPDATE_DOCS"))

_TYPES = {
    "BIGINT": "integer",
    "INTEGER": "integer",
    "DOUBLE PRECISION": "number",
    "VARCHAR": "text",
    "TEXT": "text",
    "TIMESTAMP": "time",
    "JSONB": "JSON",
}


def test_every_view_is_on_the_page() -> None:
    assert tuple(VIEW_COLUMNS) == VIEWS
    table = "".join(f"| `{name}` | {view.row} |\n" for name, view in VIEW_COLUMNS.items())
    assert table in TEXT
    assert f"GRANT SELECT ON {', '.join(VIEWS)} TO" in TEXT


#: The columns of each view with their types, in their order.
DOCUMENTED = {view: [(column.name, column.type) for column in columns] for view, (_, columns) in VIEW_COLUMNS.items()}


async def test_columns_are_as_documented__postgresql(postgres_database: str) -> None:
    """In its order and with its types: whoever changes one, breaks people's queries."""
    await run(postgres_database, create)

    def columns(connection: object) -> dict[str, list[tuple[str, str]]]:
        inspector = inspect(connection)
        return {
            view: [(row["name"], _TYPES[str(row["type"]).split(" COLLATE")[0]]) for row in inspector.get_columns(view)]  # type: ignore[union-attr]
            for view in VIEWS
        }

    assert await run(postgres_database, columns) == DOCUMENTED


async def test_columns_are_as_documented__sqlite(tmp_path: object) -> None:
    url = f"sqlite:///{tmp_path}/run.db"
    await run(url, create)
    names = await run(
        url, lambda connection: {view: [c["name"] for c in inspect(connection).get_columns(view)] for view in VIEWS}
    )
    assert names == {view: [name for name, _ in columns] for view, columns in DOCUMENTED.items()}


def test_all_kinds_of_events_and_waits_are_named() -> None:
    meanings = {(view, field.name): field.meaning for view, (_, columns) in VIEW_COLUMNS.items() for field in columns}
    assert re.findall(r"`(\w+)`", meanings["events", "kind"]) == [*EventKind]
    assert re.findall(r"`(\w+)`", meanings["waiters", "kind"]) == ["groups", "room", "trainer"]


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def answers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, dict[str, str]]]:
    """The database, and what it answers to each query that it can read."""
    name = {"sqlite": "SQLite", "postgresql": "PostgreSQL"}[request.param]
    for url in new_url(request.param, request, tmp_path_factory.mktemp("sql")):
        yield name, asyncio.run(_ask(url, name))


async def _ask(url: str, database: str) -> dict[str, str]:
    await fill(url)

    def ask(connection: Connection) -> dict[str, str]:
        ours = [question.on(database.lower()) for question in QUESTIONS]
        return {query: _table(connection.exec_driver_sql(query.replace("%", "%%"))) for query in ours}

    return await run(url, ask)


def _table(result: Any) -> str:
    """Return rows as the page has them: in columns, numbers at the right, with three digits at most."""
    rows = [[_shown(value) for value in row] for row in result]
    if not rows:
        return "(no rows)\n"
    numbers = [all(isinstance(value, Real | Decimal | None) for value in column) for column in zip(*rows, strict=True)]
    texts = [[*result.keys()], *([_text(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = (
        "  ".join(
            text.rjust(width) if number else text.ljust(width)
            for text, width, number in zip(line, widths, numbers, strict=True)
        )
        for line in texts
    )
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _shown(value: Any) -> Any:
    """Return JSON as a value on both databases, whose `->>` gives a number or its text."""
    return json.loads(value) if isinstance(value, str) and re.match(r"[{[]|\d+$", value) else value


def _text(value: Any) -> str:
    if isinstance(value, Decimal) and value == int(value):  # a sum of integers, on PostgreSQL
        return str(int(value))
    if isinstance(value, float | Decimal):
        return f"{float(value):.3g}"
    return json.dumps(value) if isinstance(value, dict | list) else "" if value is None else str(value)


def test_the_page_has_the_questions_with_the_answers_of_both_databases(answers: tuple[str, dict[str, str]]) -> None:
    database, replies = answers
    text = PAGE.read_text("utf-8") if UPDATE else TEXT
    start = text.index(f"### {QUESTIONS[0].topic}")
    asked = "".join(_asked(topic, [*of_topic], replies, database) for topic, of_topic in groupby(QUESTIONS, _TOPIC))
    if UPDATE:
        PAGE.write_text(text[:start] + asked, "utf-8")
    else:
        assert text[start:] == asked


_TOPIC = attrgetter("topic")


def _asked(topic: str, questions: list[Question], answer_of: dict[str, str], database: str) -> str:
    """Return a part of the page: questions, statements, and the answers, which are the same on both databases."""
    parts = [f"### {topic}"]
    for entry in questions:
        parts.append("\n".join(textwrap.wrap(entry.text, 120, break_long_words=False)))
        if entry.sqlite == entry.postgresql:
            parts.append(f"```sql\n{entry.sqlite}\n```")
        else:
            parts.append(f"```sql\n-- SQLite\n{entry.sqlite}\n```\n\n```sql\n-- PostgreSQL\n{entry.postgresql}\n```")
        parts.append(f"```\n{answer_of[entry.on(database.lower())]}```")
    return "\n\n".join(parts) + ("\n" if entry is QUESTIONS[-1] else "\n\n")


def test_the_command_lists_the_same_columns(tmp_path: Path) -> None:
    with ReplayBufferConfig(url=(url := f"sqlite:///{tmp_path}/run.db")).build_sync() as buffer:
        buffer.metrics()
    rows = json.loads(command("sql", url, "--format=json").stdout)
    assert [(row["view"], row["column"], row["type"]) for row in rows] == [
        (view, name, kind) for view, columns in DOCUMENTED.items() for name, kind in columns
    ]
    assert "drawn for good" in command("sql", url).stdout
