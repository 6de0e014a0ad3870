"""docs/sql.md is true: columns of the views one by one, and the answers to its questions, on both databases.

`REPLAYBUF_TEST_UPDATE_DOCS=1 pytest tests/test_sql_page.py` writes the answers anew.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Iterator
from decimal import Decimal
from itertools import pairwise
from numbers import Real
from typing import Any

import pytest
from sqlalchemy import Connection, inspect

from replaybuf.storage.presence import EventKind
from replaybuf.storage.sql.schema.views import VIEWS
from tests.cli.conftest import run as command
from tests.pages import DOCS
from tests.postgres import new_database
from tests.sql_example import fill
from tests.test_schema import create, run

PAGE = DOCS / "sql.md"
TEXT = PAGE.read_text("utf-8")

_SECTION = re.compile(r"(?ms)^### (\w+)\n\n\| column \| type \| meaning \|\n\|---\|---\|---\|\n(.*?)\n\n")
_ROW = re.compile(r"(?m)^\| `(\w+)` \| (\w+) \|")

#: What the page says of the columns of each view, in their order.
DOCUMENTED = {name: _ROW.findall(rows) for name, rows in _SECTION.findall(TEXT)}

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
    assert tuple(DOCUMENTED) == VIEWS
    listed = TEXT[TEXT.index("| view | a row for each |") : TEXT.index("Names, order and meaning")]
    assert tuple(re.findall(r"(?m)^\| `(\w+)` \|", listed)) == VIEWS
    assert f"GRANT SELECT ON {', '.join(VIEWS)} TO" in TEXT


async def test_columns_are_those_of_the_page__postgresql(postgres_database: str) -> None:
    """In its order and with its types: whoever changes one, breaks people's queries."""
    await run(postgres_database, create)

    def columns(connection: object) -> dict[str, list[tuple[str, str]]]:
        found = inspect(connection)
        return {
            view: [(one["name"], _TYPES[str(one["type"]).split(" COLLATE")[0]]) for one in found.get_columns(view)]  # type: ignore[union-attr]
            for view in VIEWS
        }

    assert await run(postgres_database, columns) == DOCUMENTED


async def test_columns_are_those_of_the_page__sqlite(tmp_path: object) -> None:
    url = f"sqlite:///{tmp_path}/run.db"
    await run(url, create)
    names = await run(
        url, lambda connection: {view: [c["name"] for c in inspect(connection).get_columns(view)] for view in VIEWS}
    )
    assert names == {view: [name for name, _ in columns] for view, columns in DOCUMENTED.items()}


def test_all_kinds_of_events_and_waits_are_on_the_page() -> None:
    [events] = re.findall(r"(?m)^\| `kind` \| text \| (`lease_lapsed.*) \|$", TEXT)
    assert re.findall(r"`(\w+)`", events) == [*EventKind]
    [waits] = re.findall(r"(?m)^\| `kind` \| text \| (`groups`.*) \|$", TEXT)
    assert re.findall(r"`(\w+)`", waits) == ["groups", "room", "trainer"]


_QUERY = re.compile(r"(?ms)^```sql\n(?:-- (SQLite|PostgreSQL)\n)?(.*?)^```\n(?:\n```\n(.*?)^```\n)?")
QUERIES = _QUERY.findall(TEXT)
# Queries whose answers are times.
_UNTOLD = ("taken_at - m.created_at", "julianday(b.taken_at)")


@pytest.fixture(scope="module", params=["SQLite", "PostgreSQL"])
def answers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, dict[str, str]]]:
    """The database, and what it answers to each query that it can read."""
    if request.param == "SQLite":
        yield "SQLite", asyncio.run(_ask(f"sqlite:///{tmp_path_factory.mktemp('sql')}/run.db", "SQLite"))
    else:
        with new_database(request.getfixturevalue("postgres_url")) as url:
            yield "PostgreSQL", asyncio.run(_ask(url, "PostgreSQL"))


async def _ask(url: str, database: str) -> dict[str, str]:
    await fill(url)

    def ask(connection: Connection) -> dict[str, str]:
        ours = [query for only, query, _ in QUERIES if only in ("", database)]
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


def test_the_answers_are_those_of_the_databases(answers: tuple[str, dict[str, str]]) -> None:
    database, found = answers
    if os.environ.get("REPLAYBUF_TEST_UPDATE_DOCS"):
        PAGE.write_text(_QUERY.sub(lambda match: _block(match, found), PAGE.read_text("utf-8")), "utf-8")
        return
    for only, query, answer in QUERIES:
        if only in ("", database) and answer:
            assert found[query] == answer, query


def _block(match: re.Match[str], found: dict[str, str]) -> str:
    """Return a query with its answer, below the last of those that ask the same."""
    only, query, _ = match.groups()
    if query not in found or only == "SQLite" or any(text in query for text in _UNTOLD):
        return match[0]
    comment = f"-- {only}\n" if only else ""
    return f"```sql\n{comment}{query}```\n\n```\n{found[query]}```\n"


def test_databases_that_are_asked_differently_answer_alike(answers: tuple[str, dict[str, str]]) -> None:
    """A query of SQLite's is followed by PostgreSQL's, and the answer holds for both."""
    database, found = answers
    for (one, query, _), (other, _, answer) in pairwise(QUERIES):
        if one == "SQLite":
            assert other == "PostgreSQL"
            if database == "SQLite" and answer:
                assert found[query] == answer


def test_nothing_is_asked_without_an_answer() -> None:
    assert len(QUERIES) >= 20
    silent = [query for only, query, answer in QUERIES if only != "SQLite" and not answer]
    assert len(silent) == 1


def test_the_command_lists_the_same_columns() -> None:
    told = " ".join(command("sql", "--help").stdout.split())
    for view, columns in DOCUMENTED.items():
        assert f"{view}: {', '.join(name for name, _ in columns)}" in told
