"""docs/sql.md is true: columns of the views one by one, and the answers to its questions, on both databases.

`REPLAYBUF_TEST_UPDATE_DOCS=1 pytest tests/test_sql_page.py` writes the answers anew.
"""

from __future__ import annotations

import re

from sqlalchemy import inspect

from replaybuf.storage.presence import EventKind, WaitKind
from replaybuf.storage.sql.schema.views import VIEWS
from tests.cli.conftest import run as command
from tests.pages import DOCS
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
    assert re.findall(r"`(\w+)`", waits) == [*WaitKind]


def test_the_command_lists_the_same_columns() -> None:
    told = " ".join(command("sql", "--help").stdout.split())
    for view, columns in DOCUMENTED.items():
        assert f"{view}: {', '.join(name for name, _ in columns)}" in told
