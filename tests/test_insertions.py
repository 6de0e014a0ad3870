"""Rows that are inserted together."""

from __future__ import annotations

import sqlite3

import pytest
import sqlalchemy
from sqlalchemy import StaticPool

from replaybuf.storage.sql.engine.prepared import ROWS_AT_ONCE, SqliteDriver

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("count", [1, 2, 3, ROWS_AT_ONCE - 1, ROWS_AT_ONCE, ROWS_AT_ONCE + 1, 3 * ROWS_AT_ONCE + 5])
def test_any_number_of_rows_is_inserted_in_order(count: int) -> None:
    raw = sqlite3.connect(":memory:")
    raw.execute("CREATE TABLE t (n INTEGER PRIMARY KEY AUTOINCREMENT, number INTEGER, bytes BLOB)")
    rows = [(place, b"%d" % place) for place in range(count)]
    engine = sqlalchemy.create_engine("sqlite://", creator=lambda: raw, poolclass=StaticPool)
    with engine.connect() as connection:
        SqliteDriver(connection, raw).insert_many("INSERT INTO t (number, bytes) VALUES (?, ?)", rows)
        assert raw.execute("SELECT number, bytes FROM t ORDER BY n").fetchall() == rows
