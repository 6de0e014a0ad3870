"""Workers, waits, events and history as another process reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, TypeVar

from sqlalchemy import func, select

from replaybuf import ReplayBuffer
from replaybuf.rules.circumstances import LIVE_SECONDS, SILENT_SECONDS
from replaybuf.storage.sql.inspection.groups import check_buffer
from replaybuf.storage.sql.inspection.reader import ReadTransaction, open_reader

T = TypeVar("T")
State = Literal["working", "silent", "ended"]


@dataclass(frozen=True, slots=True)
class Working:
    """A process that has put or drawn under a name, or waited, and what it did in the last hour.

    It is "silent" when it gave no sign of life for a minute, without having ended: it was killed, or its host is lost.
    `failures` are groups put as FAILED, and failed deliveries that it gave back.
    """

    buffer: str
    worker: str
    host: str
    pid: int
    state: State
    started_at: datetime
    last_seen: datetime
    ended_at: datetime | None
    groups: int
    rollouts: int
    tokens: int
    failures: int
    taken: int


@dataclass(frozen=True, slots=True)
class Waits:
    """A wait: for what ("groups", "room" or "trainer"), since when and until when, why, and by which limits."""

    buffer: str
    worker: str
    host: str
    pid: int
    kind: str
    wants: Mapping[str, int]
    status: str | None
    query: str | None
    since: datetime
    deadline: datetime | None
    seen_at: datetime
    live: bool
    reason: str
    limits: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Event:
    """What happened: see `storage.presence.EventKind`. `uids` are the lowest of the `groups` that it is about."""

    id: int
    buffer: str
    happened_at: datetime
    kind: str
    task_name: str | None
    worker: str | None
    step: int | None
    groups: int
    uids: list[int]
    detail: str | None


@dataclass(frozen=True, slots=True)
class Minute:
    """The figures of each task at some moment of a minute (`rules.transitions`); those that are 0 are left out."""

    buffer: str
    since: datetime
    tasks: Mapping[str, Mapping[str, Any]]


def list_workers(tx: ReadTransaction, buffer: str | None = None, *, limit: int = 1000) -> list[Working]:
    """Return the workers of one buffer or of all, those seen last first."""
    rows = _rows(tx, "workers", buffer, "last_seen DESC, pid", limit)
    silent = tx.now() - timedelta(seconds=SILENT_SECONDS)
    return [_working(row, silent) for row in rows]


def _working(row: Mapping[str, Any], silent: datetime) -> Working:
    state: State = "ended" if row["ended_at"] else "silent" if row["last_seen"] < silent else "working"
    return Working(state=state, **{name.removesuffix("_last_hour"): value for name, value in row.items()})


def list_waiters(
    tx: ReadTransaction, buffer: str | None = None, *, live: bool = True, limit: int = 1000
) -> list[Waits]:
    """Return who waits in one buffer or in all, those that wait the longest first.

    Nothing is heard any more of the waits of a process that was killed: `live` leaves them out.
    """
    recent = tx.now() - timedelta(seconds=LIVE_SECONDS)
    rows = _rows(tx, "waiters", buffer, "since, worker", limit)
    found = [Waits(live=row["seen_at"] >= recent, **row) for row in rows]
    return [one for one in found if one.live or not live]


def list_events(
    tx: ReadTransaction,
    buffer: str | None = None,
    *,
    before: int | None = None,
    kind: str | None = None,
    limit: int = 100,
) -> list[Event]:
    """Return the newest events, the last one first; `before` is the id of the last one of another page."""
    given = {"id < :before": before, "kind = :kind": kind}
    conditions = {condition: value for condition, value in given.items() if value is not None}
    rows = _rows(tx, "events", buffer, "id DESC", limit, **conditions)
    return [Event(**{**row, "uids": row["uids"] or []}) for row in rows]


def read_history(tx: ReadTransaction, buffer: str | None = None, *, seconds: float = 3600.0) -> list[Minute]:
    """Return how one buffer stood, or all, in each minute of the last so many seconds, for plots.

    Minutes in which no process had it open are missing.
    """
    start = {"since >= :start": tx.seconds() - seconds}
    return [
        Minute(row["buffer"], datetime.fromtimestamp(row["since"], UTC), row["data"].get("tasks", {}))
        for row in _rows(tx, "rb_history", buffer, "since, buffer", None, **start)
    ]


def _rows(
    tx: ReadTransaction, source: str, buffer: str | None, order: str, limit: int | None, **conditions: Any
) -> list[dict[str, Any]]:
    """Return rows of a view or table that meet the conditions, each given with the value of its parameter."""
    check_buffer(tx, buffer)
    if buffer is not None:
        conditions["buffer = :buffer"] = buffer
    values = {condition.partition(":")[2]: value for condition, value in conditions.items()}
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    end = "" if limit is None else f" LIMIT {limit:d}"
    return tx.rows(f"SELECT * FROM {source}{where} ORDER BY {order}{end}", **values)


async def seen(url: str, function: Callable[..., T], *args: Any, **options: Any) -> T:
    """Read as another process does."""
    return await asyncio.to_thread(lambda: open_reader(url).read(lambda tx: function(tx, *args, **options)))


async def waits_of(url: str) -> list[Waits]:
    return await seen(url, list_waiters)


async def workers_of(url: str) -> dict[str, Working]:
    return {one.worker: one for one in await seen(url, list_workers)}


async def count(buffer: ReplayBuffer, table: Any) -> int:
    storage: Any = buffer.storage
    return await storage._read(lambda tx: tx.execute(select(func.count()).select_from(table)).scalar_one())
