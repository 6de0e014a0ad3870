"""Presence, written and pruned: workers with their activity and waits, events, a buffer's figures of each minute.

Times are those of the store's clock, since hosts' clocks may differ. Events are rare, and written in the transaction
that they are about.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import nsmallest
from typing import Any

from replaybuf.common.worker_name import host_name, machine
from replaybuf.rules.transitions import Tally, expired_ever, of_tasks
from replaybuf.storage.reports import ACTIVITIES, EventKind, Waiting, WorkerEvent
from replaybuf.storage.sql.engine.locks import Lock
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.schema.tables import ACTIVITY_SECONDS, HISTORY_SECONDS
from replaybuf.storage.sql.statements.buffer_facts import read_tallies
from replaybuf.storage.sql.statements.rows import GroupRow

#: Retained events of a buffer, and uids of one event, at most.
MOST_EVENTS, MOST_UIDS = 10_000, 100
_MOST_DETAIL = 2000
# Repeated events within these seconds are one.
_RECENT_SECONDS = 60.0


def note(
    tx: Transaction,
    kind: EventKind,
    *,
    task_name: str | None = None,
    worker: str | None = None,
    step: int | None = None,
    groups: int = 0,
    uids: Sequence[int] = (),
    detail: str | None = None,
    time: float | None = None,
) -> None:
    """Write an event of a number of groups, with the lowest of their uids, at the current or a given store's `time`.

    `worker` caused it, or held the groups.
    """
    values = {
        "buffer": tx.scope.buffer,
        "happened_at": tx.clock() if time is None else time,
        "kind": str(kind),
        "task_name": task_name,
        "worker": worker,
        "step": step,
        "groups": groups,
        "uids": nsmallest(MOST_UIDS, uids) or None,
        "detail": None if detail is None else detail[:_MOST_DETAIL],
    }
    tx.change(_NOTE_EVENT, **values)


_NOTE_EVENT = """INSERT INTO rb_event (buffer, happened_at, kind, task_name, worker, step, groups, uids, detail)
VALUES (:buffer, :happened_at, :kind, :task_name, :worker, :step, :groups, {json:uids}, :detail)"""


def note_again(
    tx: Transaction,
    kind: EventKind,
    *,
    adds: bool,
    groups: int,
    task_name: str | None = None,
    worker: str | None = None,
    detail: str | None = None,
    time: float | None = None,
) -> None:
    """Write a repeatable event in place of the same one of the last minute, of its worker and task.

    If it `adds`, that one has the same detail, and its time and groups go on.
    """
    now = tx.clock() if time is None else time
    values = {"kind": str(kind), "worker": worker, "task": task_name, "adds": adds, "detail": detail}
    for earlier, at in tx.tuples(_DELETE_SAME, buffer=tx.scope.buffer, since=now - _RECENT_SECONDS, time=now, **values):
        if adds:
            groups, now = groups + earlier, at
    note(tx, kind, time=now, task_name=task_name, worker=worker, groups=groups, detail=detail)


_DELETE_SAME = """DELETE FROM rb_event WHERE buffer = :buffer AND happened_at BETWEEN :since AND :time AND kind = :kind
AND coalesce(worker, '') = coalesce(:worker, '') AND coalesce(task_name, '') = coalesce(:task, '')
AND (NOT :adds OR coalesce(detail, '') = coalesce(:detail, '')) RETURNING groups, happened_at"""


def note_rows(tx: Transaction, kind: EventKind, rows: Iterable[GroupRow], detail: str | None = None) -> None:
    """Write an event of leased groups, one for each task and holder."""
    by_holder: dict[tuple[str, Any], list[int]] = {}
    for row in rows:
        by_holder.setdefault((row.task_name, row.column("holder")), []).append(row.uid)
    for (task_name, holder), uids in by_holder.items():
        note(tx, kind, task_name=task_name, worker=holder, groups=len(uids), uids=uids, detail=detail)


def prune_events(tx: Transaction) -> None:
    """Remove the buffer's events beyond MOST_EVENTS, oldest first."""
    query = """SELECT happened_at FROM rb_event WHERE buffer = :buffer ORDER BY happened_at DESC LIMIT 1 OFFSET :most"""
    for at in tx.values(query, buffer=tx.scope.buffer, most=MOST_EVENTS):
        tx.change("DELETE FROM rb_event WHERE buffer = :buffer AND happened_at <= :at", buffer=tx.scope.buffer, at=at)


# Workers and waits

_HOUR = 3600.0
# Longer queries are truncated.
_MOST_CHARS = 10_000
#: Retention in seconds of minute statistics, and of ended or silent workers.
KEEP_HISTORY, KEEP_WORKERS = 48 * _HOUR, 7 * 24 * _HOUR


@dataclass(slots=True)
class Activity:
    """What a worker did since its process opened the buffer: groups, rollouts and response tokens put; failures, which
    are groups put as FAILED and failed deliveries that it returned; and groups drawn.

    `draws`: it has drawn groups, or waited for some. `id` and `marks` are those of its row in `rb_worker`.
    """

    groups: int = 0
    rollouts: int = 0
    tokens: int = 0
    failures: int = 0
    taken: int = 0
    draws: bool = False
    id: int = field(default_factory=lambda: secrets.randbits(62))
    marks: dict[int, list[int]] = field(default_factory=dict)

    def noted(self, now: float) -> dict[str, Any]:
        """Return the counts for a heartbeat at this time, with those of the last hour."""
        counts = {name: getattr(self, name) for name in ACTIVITIES}
        old = [since for since in self.marks if since < now - _HOUR - 2 * ACTIVITY_SECONDS]
        for since in sorted(old)[:-1]:  # the newest of them is where the last hour begins
            del self.marks[since]
        self.marks[_start_of_period(now, ACTIVITY_SECONDS)] = [*counts.values()]
        marks = {str(since): mark for since, mark in self.marks.items()}
        return counts | {"marks": marks, "draws": self.draws or self.taken > 0}


def write_beat(
    tx: Transaction,
    since: float,
    workers: Mapping[str, Activity],
    waits: Sequence[Waiting],
    events: Sequence[WorkerEvent],
    *,
    ended: bool,
) -> None:
    """Write a heartbeat of workers of this process, with all of its current waits, and the reported events.

    `since` is when the process began, in seconds since the epoch by its own clock. `ended`: it is the last heartbeat.
    """
    now = tx.clock()
    ahead = now - time.time()
    settings = {"limits": tx.scope.rules.limits.in_force, "epoch": tx.scope.epoch}
    for name, activity in sorted(workers.items()):
        tx.change(
            _NOTE_WORKER,
            buffer=tx.scope.buffer,
            id=activity.id,
            name=name,
            host=host_name(),
            pid=os.getpid(),
            machine=machine(),
            began=since + ahead,
            now=now,
            ended=now if ended else None,
            activity=activity.noted(now) | settings,
            waits=[_noted_wait(waiting, now, ahead) for waiting in waits if waiting.worker == name],
        )
    for event in events:
        write = partial(note_again, adds=False) if event.kind == EventKind.GAVE_UP else note
        details: dict[str, Any] = {"task_name": event.task_name, "worker": event.worker, "detail": event.detail}
        write(tx, event.kind, time=event.time + ahead, groups=event.groups, **details)


_NOTE_WORKER = """INSERT INTO rb_worker
    (buffer, id, name, host, pid, machine, started_at, seen_at, ended_at, activity, waits)
VALUES (:buffer, :id, :name, :host, :pid, :machine, :began, :now, :ended, {json:activity}, {json:waits})
ON CONFLICT (buffer, id) DO UPDATE SET seen_at = excluded.seen_at, ended_at = excluded.ended_at,
    activity = excluded.activity, waits = excluded.waits"""


def _noted_wait(waiting: Waiting, now: float, ahead: float) -> dict[str, Any]:
    wait = waiting.wait
    return {
        "kind": wait.kind,
        "wants": dict(wait.wants),
        "status": str(wait.status),
        "query": None if wait.query is None else wait.query[:_MOST_CHARS],
        "since": now if wait.since is None else wait.since + ahead,
        "deadline": None if wait.deadline is None else wait.deadline + ahead,
        "limits": {} if wait.limits is None else wait.limits.in_force,
        "reason": waiting.reason,
    }


# Once a minute, by the first process


def record_minute(tx: Transaction) -> bool:
    """Record the buffer's statistics (`at` this moment) unless recorded this minute, and apply the retention.

    Returns False, and does nothing, while another process records a minute, of any buffer.

    The newest row beyond the retention is kept, as the baseline of later ones after a long pause.
    """
    if not tx.try_lock(Lock.MINUTE):
        return False
    now, tallies = tx.clock(), read_tallies(tx, tx.scope.buffer or "")
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
    insert = "INSERT INTO rb_history (buffer, since, data) VALUES (:buffer, :since, {json:data}) ON CONFLICT DO NOTHING"
    data = {"at": now, "tasks": tasks}
    if tx.change(insert, buffer=tx.scope.buffer, since=_start_of_period(now, HISTORY_SECONDS), data=data):
        _prune(tx, now)
    return True


def _prune(tx: Transaction, now: float) -> None:
    tx.change(_PRUNE_HISTORY, buffer=tx.scope.buffer, before=now - KEEP_HISTORY)
    forget = "DELETE FROM rb_worker WHERE buffer = :buffer AND seen_at < :before"
    tx.change(forget, buffer=tx.scope.buffer, before=now - KEEP_WORKERS)
    prune_events(tx)


_PRUNE_HISTORY = """DELETE FROM rb_history WHERE buffer = :buffer AND since < (
    SELECT max(since) FROM rb_history WHERE buffer = :buffer AND since < CAST(:before AS double precision))"""


def _start_of_period(now: float, seconds: int) -> int:
    """Return the start of the period of `seconds` that contains this time."""
    return int(now // seconds) * seconds
