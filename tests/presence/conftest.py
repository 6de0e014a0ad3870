"""Workers, waits, events and history as another process reads them; beats and waits of tenths of a second."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from replaybuf import ReplayBuffer
from replaybuf.buffer import wait_reports
from replaybuf.rules.circumstances import LIVE_SECONDS, SILENT_SECONDS
from replaybuf.storage.sql.inspection.reader import Transaction, open_reader
from replaybuf.storage.sql.inspection.run_records import history_of, newest
from replaybuf.storage.sql.tasks import heartbeats, sweeper


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beats and waits of tenths of a second."""
    monkeypatch.setattr(heartbeats, "_SOON_SECONDS", 0.02)
    monkeypatch.setattr(heartbeats, "_NEWS_SECONDS", 0.02)
    monkeypatch.setattr(heartbeats, "_WAIT_SECONDS", 0.02)
    monkeypatch.setattr(sweeper, "_IDLE_SECONDS", 0.02)
    monkeypatch.setattr(sweeper, "_POLL_SECONDS", 0.02)
    monkeypatch.setattr(wait_reports, "SHOW_SECONDS", 0.05)
    monkeypatch.setattr(wait_reports, "REASON_SECONDS", 0.05)


T = TypeVar("T")


def list_workers(tx: Transaction) -> list[Any]:
    """The rows of `workers`, those seen last first, each with its `state` and without `_last_hour` in its names."""
    silent = tx.now() - timedelta(seconds=SILENT_SECONDS)

    def state(row: dict[str, Any]) -> str:
        return "ended" if row["ended_at"] else "silent" if row["last_seen"] < silent else "working"

    rows = [row | {"state": state(row)} for row in newest(tx, "workers", None, 1000)]
    return [SimpleNamespace(**{name.removesuffix("_last_hour"): value for name, value in row.items()}) for row in rows]


def list_waiters(tx: Transaction, *, live: bool = True) -> list[Any]:
    """The rows of `waiters`; `live` leaves out those of processes of which nothing is heard any more."""
    recent = tx.now() - timedelta(seconds=LIVE_SECONDS)
    rows = tx.rows("SELECT * FROM waiters ORDER BY since, worker")
    return [SimpleNamespace(**row) for row in rows if not live or row["seen_at"] >= recent]


def list_events(tx: Transaction, buffer: str | None = None, *, kind: str | None = None) -> list[Any]:
    """The rows of `events`, the last one first."""
    conditions, values = ((), {}) if kind is None else (("kind = :kind",), {"kind": kind})
    rows = newest(tx, "events", buffer, 100, *conditions, **values)
    return [SimpleNamespace(**row | {"uids": row["uids"] or []}) for row in rows]


def read_history(tx: Transaction) -> list[Any]:
    """How the buffers stood in each minute of the last hour in which a process had them open."""
    return [SimpleNamespace(since=since, tasks=tasks) for _, since, tasks in history_of(tx, None, tx.clock() - 3600.0)]


async def seen(url: str, function: Callable[..., T], *args: Any, **options: Any) -> T:
    """Read as another process does."""
    return await asyncio.to_thread(lambda: open_reader(url).read(lambda tx: function(tx, *args, **options)))


async def waits_of(url: str) -> list[Any]:
    return await seen(url, list_waiters)


async def workers_of(url: str) -> dict[str, Any]:
    return {worker.worker: worker for worker in await seen(url, list_workers)}


async def count(buffer: ReplayBuffer, table: Any) -> int:
    return await buffer.storage._read(lambda tx: tx.value(f"SELECT count(*) FROM {table.name}"))
