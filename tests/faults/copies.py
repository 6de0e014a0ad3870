"""Databases that are copied, so that every kill meets the same state; and a look at all that is in one."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, inspect, make_url, text

from replaybuf.storage.sql.engine.database import Access
from replaybuf.storage.sql.engine.urls import parse_url
from replaybuf.storage.sql.inspection.writer import over_sqlalchemy
from tests.postgres import new_database

# What differs from one run of the same operation to the next; shards are summed up.
_OF_THE_MOMENT = {"created_at", "archived_at", "leased_until", "removed_at", "restored_at", "shard", "amount"}
_OF_THE_MOMENT |= {"taken_at", "happened_at"}
# Each process has a name of its own; whether there is one, and where it came from, must not differ.
_NAMES = {"worker", "holder"}
# Written now and then by whoever is there, whatever it does.
_BEATS = {"rb_worker", "rb_history"}
_EVENTS_OF_BEATS = {"gave_up", "dataset_ended"}


@dataclass(frozen=True)
class Copies:
    """A database to prepare, and what makes a copy of it, of which it yields the URL. The original has to be closed."""

    url: str
    copy: Callable[[], AbstractContextManager[str]]


@contextmanager
def copies(kind: str, folder: Path, server: str | None) -> Iterator[Copies]:
    """Copies of a new, empty database of a kind."""
    if kind == "sqlite":
        numbers = itertools.count(1)
        original = folder / "original.db"
        yield Copies(f"sqlite:///{original}", lambda: _file_like(original, folder / f"copy{next(numbers)}.db"))
        return
    assert server is not None
    with new_database(server) as url:
        yield Copies(url, lambda: new_database(server, str(make_url(url).database)))


@contextmanager
def _file_like(original: Path, copy: Path) -> Iterator[str]:
    if original.exists():
        shutil.copy(original, copy)
    yield f"sqlite:///{copy}"
    for suffix in ("", "-wal", "-shm"):
        Path(f"{copy}{suffix}").unlink(missing_ok=True)


async def transact(url: str, function: Any) -> Any:
    """Run a function over a connection in a write transaction of its own."""
    return await over_sqlalchemy(Access(parse_url(url), lock_timeout=10), function)


async def look(url: str) -> dict[str, Any]:
    """Every row of every table, but for what is of the moment, and whether the file is sound."""
    return dict(await transact(url, _look))


def _look(connection: Connection) -> dict[str, Any]:
    state: dict[str, Any] = {}
    if connection.dialect.name == "sqlite":
        assert connection.execute(text("PRAGMA integrity_check")).scalars().all() == ["ok"]
    inspector = inspect(connection)
    for table in sorted(name for name in set(inspector.get_table_names()) - _BEATS if name.startswith("rb_")):
        rows = [dict(row) for row in connection.execute(text(f"SELECT * FROM {table}")).mappings()]
        # Connections to PostgreSQL number their transactions there; leases on SQLite note when the host was started;
        # a database has a number of its own.
        rows = [row for row in rows if not str(row.get("name")).startswith(("connection ", "start of ", "identity"))]
        if table == "rb_event":  # numbered with those of beats
            rows = [row | {"id": None} for row in rows if row["kind"] not in _EVENTS_OF_BEATS]
        state[table] = _sums(rows) if table == "rb_tally" else sorted(repr(_lasting(row)) for row in rows)
    return state


def _lasting(row: dict[str, Any]) -> dict[str, Any]:
    lasting = {name: value for name, value in row.items() if name not in _OF_THE_MOMENT}
    lasting |= {name: lasting[name] is not None for name in _NAMES & lasting.keys()}
    return lasting


def _sums(rows: list[dict[str, Any]]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for row in rows:
        key = repr(_lasting(row))
        sums[key] = sums.get(key, 0) + row["amount"]
    return {key: amount for key, amount in sums.items() if amount}
