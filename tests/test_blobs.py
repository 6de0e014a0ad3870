"""Payloads that are read one by one through `sqlite3`'s blobs."""

from __future__ import annotations

import gc
import sqlite3
import weakref

import pytest
from sqlalchemy import create_engine

from replaybuf.storage.sql.engine import prepared
from replaybuf.storage.sql.engine.prepared import SqliteDriver


@pytest.fixture
def driver() -> SqliteDriver:
    connection = create_engine("sqlite://").connect()
    raw = connection.connection.driver_connection
    assert isinstance(raw, sqlite3.Connection)
    raw.execute("CREATE TABLE numbers (id INTEGER PRIMARY KEY, data BLOB)")
    raw.executemany("INSERT INTO numbers VALUES (?, ?)", [(at, b"%d" % at) for at in range(100)])
    return SqliteDriver(connection, raw)


def weak_references() -> int:
    return sum(type(one) is weakref.ref for one in gc.get_objects())


def test_what_was_read_leaves_nothing_behind(driver: SqliteDriver) -> None:
    before = weak_references()
    for at in range(5 * prepared._MOST_OPENED):
        assert driver.read_blob("numbers", "data", at % 100) == b"%d" % (at % 100)
    assert weak_references() - before <= 1.5 * prepared._MOST_OPENED


def test_a_blob_that_is_still_open_is_remembered(driver: SqliteDriver) -> None:
    """Closing the connection closes it, which without the reference would be a crash."""
    blob = driver.raw.blobopen("numbers", "data", 7)
    for at in range(2 * prepared._MOST_OPENED):
        driver.read_blob("numbers", "data", at % 100)
    assert blob.read() == b"7"
    driver.raw.close()
    with pytest.raises(sqlite3.ProgrammingError):
        blob.read()


def test_what_is_not_there_is_none(driver: SqliteDriver) -> None:
    assert driver.read_blob("numbers", "data", 100) is None
