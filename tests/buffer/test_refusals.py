"""Refusals of puts, and files that may not be opened."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest

from replaybuf import FullError, ReplayBufferConfig
from replaybuf.errors import AccessError


async def test_a_refusal_is_not_held_up_by_a_locked_database(tmp_path: Path) -> None:
    """Its count is left out then: the lock would be waited for in place of the error."""
    url = f"sqlite:///{tmp_path}/run.db"
    async with ReplayBufferConfig(
        url=url, rollout_type=dict, capacity=1, on_full="reject", lock_timeout=120
    ).build() as buffer:
        await buffer.put([{"response": "a"}], "math")
        with contextlib.closing(sqlite3.connect(tmp_path / "run.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(FullError):
                await buffer.waits._refuse(None, "no room")  # type: ignore[arg-type]
            other.execute("ROLLBACK")


def test_a_folder_that_may_not_be_entered_is_an_access_error(tmp_path: Path) -> None:
    from replaybuf.storage.sql.engine.sqlite_files import translate_sqlite

    inside = tmp_path / ("x" * 300) / "run.db"  # a path that can't be looked at, also by root
    error = translate_sqlite(sqlite3.OperationalError("unable to open database file"), "sqlite", str(inside), 1.0)
    assert isinstance(error, AccessError)
