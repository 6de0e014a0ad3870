"""docs/sql.md is true: the views, their columns one by one, and the answers to its questions, on both databases.

`REPLAYBUF_TEST_UPDATE_DOCS=1 pytest tests/test_sql_page.py` writes the answers anew.
"""

from __future__ import annotations

import asyncio
import json
import re
from decimal import Decimal
from numbers import Real
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, inspect

from replaybuf import ReplayBufferConfig
from replaybuf.storage.reports import EventKind
from replaybuf.storage.sql.inspection.user_sql import VIEW_COLUMNS
from replaybuf.storage.sql.schema.views import VIEWS
from tests.cli.conftest import run as command
from tests.pages import compare
from tests.postgres import new_url
from tests.sql_example import PAGE, fill, questions
from tests.storage.test_schema import create, run

TEXT = PAGE.read_text("utf-8")

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


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_both_databases_answer_the_questions_of_the_page_as_it_says(
    database: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    asked = questions()
    statements = {statement for question in asked for statement in (question.sqlite, question.postgresql)}
    assert len(statements) == TEXT.partition("## Questions")[2].count("```sql") > 5
    for url in new_url(database, request, tmp_path):
        asyncio.run(fill(url))
        for question in asked:
            answer = asyncio.run(_answer(url, question.on(database)))
            begin = f"{question.postgresql}```\n\n```\n"
            compare(PAGE, f"{begin}{question.answer}```", f"{begin}{answer}```")


async def _answer(url: str, statement: str) -> str:
    def ask(connection: Connection) -> str:
        return _table(connection.exec_driver_sql(statement.replace("%", "%%")))

    return await run(url, ask)


def test_the_command_lists_the_same_columns(tmp_path: Path) -> None:
    with ReplayBufferConfig(url=(url := f"sqlite:///{tmp_path}/run.db")).build_sync() as buffer:
        buffer.metrics()
    rows = json.loads(command("sql", url, "--format=json").stdout)
    assert [(row["view"], row["column"], row["type"]) for row in rows] == [
        (view, name, kind) for view, columns in DOCUMENTED.items() for name, kind in columns
    ]
    assert "drawn for good" in command("sql", url).stdout
