"""Payloads that are read one by one through `sqlite3`'s blobs."""

from __future__ import annotations

import gc
import sqlite3
import weakref

import pytest

from replaybuf.storage.sql.engine import sqlite_session
from replaybuf.storage.sql.engine.sqlite_session import SqliteSession


@pytest.fixture
def session() -> SqliteSession:
    raw = sqlite3.connect(":memory:", isolation_level=None)
    raw.execute("CREATE TABLE numbers (id INTEGER PRIMARY KEY, data BLOB)")
    raw.executemany("INSERT INTO numbers VALUES (?, ?)", [(at, b"%d" % at) for at in range(100)])
    return SqliteSession(raw)


def weak_references() -> int:
    return sum(type(one) is weakref.ref for one in gc.get_objects())


def test_what_was_read_leaves_nothing_behind(session: SqliteSession) -> None:
    before = weak_references()
    for at in range(5 * sqlite_session._MOST_OPENED):
        assert session.read_blob("numbers", "data", at % 100) == b"%d" % (at % 100)
    assert weak_references() - before <= 1.5 * sqlite_session._MOST_OPENED


def test_a_blob_that_is_still_open_is_remembered(session: SqliteSession) -> None:
    """Closing the connection closes it, which without the reference would be a crash."""
    blob = session.raw.blobopen("numbers", "data", 7)
    for at in range(2 * sqlite_session._MOST_OPENED):
        session.read_blob("numbers", "data", at % 100)
    assert blob.read() == b"7"
    session.raw.close()
    with pytest.raises(sqlite3.ProgrammingError):
        blob.read()


def test_what_is_not_there_is_none(session: SqliteSession) -> None:
    assert session.read_blob("numbers", "data", 100) is None
