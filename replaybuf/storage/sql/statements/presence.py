"""Presence: workers with their activity and waits, events, and a buffer's statistics once a minute.

Times are those of the store's clock, since hosts' clocks may differ. Events are rare, and written in the transaction
that they are about.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from typing import Any, TypedDict, Unpack

from sqlalchemy import ColumnElement, Select, and_, case, delete, func, insert, or_, select, update

from replaybuf.rules.circumstances import in_force
from replaybuf.rules.transitions import Tally, expired_ever, of_tasks
from replaybuf.storage.reports import EventKind, Waiting, WorkerEvent
from replaybuf.storage.sql.engine.locks import Lock
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.schema.records import (
    ACTIVITY_SECONDS,
    HISTORY_SECONDS,
    activity,
    event,
    history,
    waiter,
    worker,
)
from replaybuf.storage.sql.statements.buffer_facts import read_tallies
from replaybuf.storage.sql.statements.fence import is_fenced_off
from replaybuf.storage.sql.statements.rows import GroupRow
from replaybuf.worker_name import machine

#: Retained events of a buffer, and uids of one event, at most.
MOST_EVENTS, MOST_UIDS = 10_000, 100
_MOST_DETAIL = 2000
# Repeated events are counted in one of this many latest ones, within these seconds.
_RECENT, _RECENT_SECONDS = 20, 60.0


class About(TypedDict, total=False):
    """The subject of an event: a number of groups of a task; `worker` caused it, or held the groups."""

    task_name: str | None
    worker: str | None
    groups: int
    detail: str | None


def note(
    tx: Transaction,
    kind: EventKind,
    *,
    step: int | None = None,
    uids: Sequence[int] = (),
    time: float | None = None,
    **about: Unpack[About],
) -> None:
    """Write an event, with the lowest uids of its groups, in order, at the current or a given store's `time`."""
    detail = about.get("detail")
    values = {
        "buffer": tx.scope.buffer,
        "happened_at": tx.dialect.clock(tx) if time is None else time,
        "kind": str(kind),
        "task_name": about.get("task_name"),
        "worker": about.get("worker"),
        "step": step,
        "groups": about.get("groups", 0),
        "uids": nsmallest(MOST_UIDS, uids) or None,
        "detail": None if detail is None else detail[:_MOST_DETAIL],
    }
    tx.execute(insert(event), values)


def note_more(tx: Transaction, kind: EventKind, **about: Unpack[About]) -> None:
    """Write a repeatable event: its groups are added to a recent event that is the same otherwise."""
    alike = {"kind": str(kind), **{name: about.get(name) for name in ("task_name", "worker", "detail")}}
    newest = select(event.c.id, event.c.happened_at, *(event.c[name] for name in alike))
    newest = newest.where(event.c.buffer == tx.scope.buffer).order_by(event.c.happened_at.desc()).limit(_RECENT)
    since = tx.dialect.clock(tx) - _RECENT_SECONDS
    for row in tx.execute(newest).mappings():
        if row["happened_at"] >= since and all(row[name] == value for name, value in alike.items()):
            more = event.c.groups + about.get("groups", 0)
            tx.execute(update(event).where(event.c.id == row["id"]).values(groups=more))
            return
    note(tx, kind, **about)


def note_last(tx: Transaction, kind: EventKind, *, time: float, **about: Unpack[About]) -> None:
    """Write an event that replaces the same one of the last minute of its worker and task."""
    task_name = event.c.task_name.is_not_distinct_from(about.get("task_name"))
    alike = event.c.kind == str(kind), event.c.worker == about.get("worker"), task_name
    recent = event.c.buffer == tx.scope.buffer, event.c.happened_at.between(time - _RECENT_SECONDS, time)
    tx.execute(delete(event).where(*recent, *alike))
    note(tx, kind, time=time, **about)


def note_rows(tx: Transaction, kind: EventKind, rows: Iterable[GroupRow], detail: str | None = None) -> None:
    """Write an event of leased groups, one for each task and holder."""
    alike: dict[tuple[str, Any], list[int]] = {}
    for row in rows:
        alike.setdefault((row.task_name, row.column("holder")), []).append(row.uid)
    for (task_name, holder), uids in alike.items():
        note(tx, kind, task_name=task_name, worker=holder, groups=len(uids), uids=uids, detail=detail)


def prune_events(tx: Transaction) -> None:
    """Remove the buffer's events beyond MOST_EVENTS, oldest first."""
    ours = event.c.buffer == tx.scope.buffer
    newest_first = select(event.c.happened_at).where(ours).order_by(event.c.happened_at.desc())
    last = tx.execute(newest_first.offset(MOST_EVENTS).limit(1)).scalar()
    if last is not None:
        tx.execute(delete(event).where(ours, event.c.happened_at <= last))


# Workers and waits

_HOUR = 3600.0
# Longer queries are truncated.
_MOST_CHARS = 10_000
#: Retention in seconds: activity, minute statistics, ended or silent workers, and waits without a heartbeat.
KEEP_ACTIVITY, KEEP_HISTORY, KEEP_WORKERS, KEEP_WAITERS = 24 * _HOUR, 48 * _HOUR, 7 * 24 * _HOUR, 24 * _HOUR


@dataclass(slots=True)
class Activity:
    """A worker's activity: groups, rollouts and response tokens put; failures, which are groups put as FAILED and
    failed deliveries that it returned; and groups drawn."""

    groups: int = 0
    rollouts: int = 0
    tokens: int = 0
    failures: int = 0
    taken: int = 0

    def add(self, other: Activity) -> None:
        """Add the counts of another activity."""
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(frozen=True, slots=True)
class Process:
    """A process that has the buffer open; `since` is its start in seconds since the epoch by its own clock."""

    host: str
    pid: int
    since: float


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat of a process's workers, with their activity since the last one.

    `waits` are all current waits, `gone` the numbers of waits that ended since the last heartbeat, and `events` the
    reported ones. `ended`: this is the last heartbeat. `limits`: record the limits in force here, as those of a worker
    that draws (True), or if none are recorded yet (False).
    """

    workers: Mapping[str, Activity]
    waits: Sequence[Waiting] = ()
    gone: Sequence[int] = ()
    events: Sequence[WorkerEvent] = ()
    ended: bool = False
    limits: Collection[bool] = ()


def write_beat(tx: Transaction, process: Process, beat: Beat) -> None:
    """Write a heartbeat."""
    now = tx.dialect.clock(tx)
    ahead = now - time.time()
    ids = {name: _see(tx, name, process, now, ahead, ended=beat.ended) for name in sorted(beat.workers)}
    for name, done in beat.workers.items():
        _add_activity(tx, ids[name], now, done)
    if beat.gone:
        tx.execute(delete(waiter).where(waiter.c.worker_id.in_(_ids_of(tx, process)), waiter.c.number.in_(beat.gone)))
    for waiting in beat.waits:
        _write_waiter(tx, ids[waiting.worker], waiting, now, ahead)
    for one in beat.events:
        write = note_last if one.kind == EventKind.GAVE_UP else note
        write(
            tx,
            one.kind,
            task_name=one.task_name,
            worker=one.worker,
            groups=one.groups,
            detail=one.detail,
            time=one.time + ahead,
        )
    if beat.limits and beat.workers and not is_fenced_off(tx):
        _note_limits(tx, sorted(beat.workers)[0], draws=True in beat.limits)


def _note_limits(tx: Transaction, name: str, *, draws: bool) -> None:
    """Record the limits in force here if they have changed; a worker that draws overrides recorded ones."""
    ours = event.c.buffer == tx.scope.buffer, event.c.kind == EventKind.LIMITS
    newest = select(event.c.detail).where(*ours).order_by(event.c.happened_at.desc(), event.c.id.desc()).limit(1)
    known, shown = tx.execute(newest).scalar(), json.dumps(in_force(tx.scope.rules.limits))
    if shown != (known or "{}") and (draws or known is None):
        note(tx, EventKind.LIMITS, worker=name, detail=shown)


def _see(tx: Transaction, name: str, process: Process, now: float, ahead: float, *, ended: bool) -> int:
    """Record a heartbeat of a worker; return its id."""
    began, ends = process.since + ahead, now if ended else None
    # Another process may have had the same name and pid before, or this one has reopened the buffer.
    since = case((worker.c.ended_at.is_(None), worker.c.started_at), else_=began)
    sign = {"seen_at": now, "ended_at": ends, "started_at": since, "machine": machine()}
    mine = _of_process(tx, process), worker.c.name == name
    seen = tx.execute(update(worker).where(*mine).values(sign).returning(worker.c.id)).scalar()
    if seen is None:  # an upsert would use up an id each time
        new = {"buffer": tx.scope.buffer, "name": name, "host": process.host, "pid": process.pid}
        row = tx.dialect.insert(worker).values(**new, **(sign | {"started_at": began}))
        keys = [worker.c[column] for column in new]
        row = row.on_conflict_do_update(index_elements=keys, set_={"seen_at": now})
        seen = tx.execute(row.returning(worker.c.id)).scalar_one()
    return int(seen)


def _of_process(tx: Transaction, process: Process) -> ColumnElement[bool]:
    return and_(worker.c.buffer == tx.scope.buffer, worker.c.host == process.host, worker.c.pid == process.pid)


def _ids_of(tx: Transaction, process: Process) -> Select[Any]:
    return select(worker.c.id).where(_of_process(tx, process))


def _add_activity(tx: Transaction, worker_id: int, now: float, done: Activity) -> None:
    if done == Activity():
        return
    counts = {name: getattr(done, name) for name in done.__slots__}
    row = tx.dialect.insert(activity).values(worker_id=worker_id, since=_period(now, ACTIVITY_SECONDS), **counts)
    added = {name: activity.c[name] + row.excluded[name] for name in counts}
    tx.execute(row.on_conflict_do_update(index_elements=[activity.c.worker_id, activity.c.since], set_=added))


def _write_waiter(tx: Transaction, worker_id: int, waiting: Waiting, now: float, ahead: float) -> None:
    wait = waiting.wait
    changing = {"wants": dict(wait.wants), "seen_at": now, "reason": waiting.reason}
    row = tx.dialect.insert(waiter).values(
        worker_id=worker_id,
        number=waiting.number,
        kind=wait.kind,
        status=str(wait.status),
        query=None if wait.query is None else wait.query[:_MOST_CHARS],
        since=now if wait.since is None else wait.since + ahead,
        deadline=None if wait.deadline is None else wait.deadline + ahead,
        limits=in_force(waiting.limits),
        **changing,
    )
    tx.execute(row.on_conflict_do_update(index_elements=[waiter.c.worker_id, waiter.c.number], set_=changing))


# Once a minute, by the first process


def is_noted(tx: Transaction) -> bool:
    """Return whether this minute's statistics of the buffer are recorded."""
    since = _period(tx.dialect.clock(tx), HISTORY_SECONDS)
    noted = select(history.c.since).where(history.c.buffer == tx.scope.buffer, history.c.since == since)
    return tx.execute(noted).first() is not None


def note_minute(tx: Transaction) -> bool:
    """Record the buffer's statistics (`at` this moment) unless recorded this minute, and apply the retention.

    Returns False, and does nothing, while another process records a minute, of any buffer.

    The newest row beyond the retention is kept, as the baseline of later ones after a long pause.
    """
    if not tx.dialect.try_lock(tx, Lock.MINUTE):
        return False
    now, tallies = tx.dialect.clock(tx), read_tallies(tx, tx.scope.buffer or "")
    tasks = {
        task: {
            **{name: value for name, value in figures.items() if value != 0},
            "put_of": {},
            "expired_ever": expired_ever(tallies, task),
        }
        for task, figures in of_tasks(tallies).items()
    }
    for (task, status, name), n in tallies.items():
        if name == Tally.PUT and n:
            tasks[task]["put_of"][str(status)] = n
    row = tx.dialect.insert(history).values(
        buffer=tx.scope.buffer, since=_period(now, HISTORY_SECONDS), data={"at": now, "tasks": tasks}
    )
    if tx.execute(row.on_conflict_do_nothing()).rowcount:
        _prune(tx, now)
    return True


def _prune(tx: Transaction, now: float) -> None:
    ours = worker.c.buffer == tx.scope.buffer
    old = select(worker.c.id).where(ours, func.coalesce(worker.c.ended_at, worker.c.seen_at) < now - KEEP_WORKERS)
    gone = list(tx.execute(old).scalars())
    noted = history.c.buffer == tx.scope.buffer
    newest = select(func.max(history.c.since)).where(noted, history.c.since < now - KEEP_HISTORY)
    tx.execute(delete(history).where(noted, history.c.since < newest.scalar_subquery()))
    tx.execute(delete(waiter).where(or_(waiter.c.seen_at < now - KEEP_WAITERS, waiter.c.worker_id.in_(gone))))
    tx.execute(delete(activity).where(or_(activity.c.since < now - KEEP_ACTIVITY, activity.c.worker_id.in_(gone))))
    tx.execute(delete(worker).where(worker.c.id.in_(gone)))
    prune_events(tx)


def _period(now: float, seconds: int) -> int:
    """Return the start of the period of `seconds` that contains this time."""
    return int(now // seconds) * seconds
