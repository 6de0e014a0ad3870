"""Reads the circumstances of waits in a buffer (`rules.circumstances`), and the current waits with their limits.

Everything is read by index or from small tables, whatever the number of groups; only a query examines groups.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from replaybuf.common.worker_name import is_gone
from replaybuf.errors import InputError
from replaybuf.rules.circumstances import (
    LIVE_SECONDS,
    TRAINER,
    Circumstances,
    Held,
    Restored,
    Taking,
    TrainState,
    Wait,
    Worker,
)
from replaybuf.rules.limits import Limits
from replaybuf.rules.transitions import LaneName
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.statements.buffer_facts import read_tallies
from replaybuf.values.rollouts.statuses import Status

# Losses are those of this period, and everything before is known from the minute recorded before it.
_LATELY_SECONDS = 3600

#: The workers, last seen first, with their activity and waits (`schema.tables`).
_WORKERS = """
SELECT name, host, pid, machine, started_at AS began, seen_at AS seen, ended_at AS ended, activity, waits
FROM rb_worker WHERE buffer = coalesce(:buffer, buffer) AND seen_at > :after
ORDER BY seen_at DESC, name, pid LIMIT 1000"""


def current_waits(tx: Transaction, buffer: str) -> list[Wait]:
    """Return the current waits in a buffer, longest first; none of processes that were killed on this machine."""
    waits = []
    for row in tx.rows(_WORKERS, buffer=buffer, after=tx.clock() - LIVE_SECONDS):
        if _is_killed(row):
            continue
        for wait in row["waits"]:
            status, limits = Status(wait["status"] or Status.COMPLETED), Limits.recorded(wait["limits"])
            facts = wait["query"], row["name"], wait["since"], wait["deadline"]
            waits.append(Wait(wait["wants"], wait["kind"], status, *facts, limits))
    return sorted(waits, key=lambda wait: wait.since or 0.0)


def read_workers(tx: Transaction, buffer: str | None) -> list[Worker]:
    """Return the workers of one buffer or of all, last seen first."""
    return [
        Worker(
            row["name"],
            row["began"],
            row["seen"],
            row["ended"],
            **{name: row["activity"][name] for name in ("groups", "failures", "taken", "epoch")},
            host=row["host"],
            pid=row["pid"],
            waits=bool(row["waits"]),
            killed=_is_killed(row),
        )
        for row in tx.rows(_WORKERS, buffer=buffer, after=0.0)
    ]


def _is_killed(row: Mapping[str, Any]) -> bool:
    return row["ended"] is None and is_gone(row["machine"], row["pid"])


def last_worker(tx: Transaction, buffer: str | None) -> Worker | None:
    """Return the worker that left one buffer, or all, last; None while one is alive, or if none is known."""
    workers, now = read_workers(tx, buffer), tx.clock()
    if any(worker.is_alive(now) for worker in workers):
        return None
    return max(workers, key=lambda worker: worker.left_at, default=None)


def names_of_alive(tx: Transaction, buffer: str) -> list[str]:
    """Return the names of the workers that have a buffer open."""
    return sorted({worker.name for worker in read_workers(tx, buffer) if worker.is_alive(tx.clock())})


def read_limits(tx: Transaction, buffer: str) -> Limits | None:
    """Return the limits of the worker that was seen last, if possible of one that draws; None if they can't be read."""
    activities = [row["activity"] for row in tx.rows(_WORKERS, buffer=buffer, after=0.0)]
    preferred = [activity for activity in activities if activity["draws"]] or activities
    return Limits.recorded(preferred[0]["limits"]) if preferred else None


def read_circumstances(tx: Transaction, buffer: str) -> Circumstances:
    """Return the circumstances of a buffer; what matches a wait's query isn't counted yet."""
    batch = next(iter(tx.rows(_LAST_BATCH, buffer=buffer)), None)
    last_take = None if batch is None else Taking(batch["worker"], batch["time"], int(batch["groups"]))
    earlier_at, earlier = _read_earlier(tx, buffer)
    tallies = read_tallies(tx, buffer)
    return Circumstances(
        tx.clock(),
        tallies,
        held=[Held(task, Status(status), *numbers) for task, status, *numbers in tx.tuples(_HELD, buffer=buffer)],
        workers=read_workers(tx, buffer),
        waits=current_waits(tx, buffer),
        trainer=read_trainer(tx, buffer),
        steps=dict(map(tuple, tx.tuples(_STEPS, buffer=buffer))),
        earlier=earlier,
        earlier_at=earlier_at,
        last_put=_read_last_puts(tx, buffer, batch),
        last_take=last_take,
        errors=_read_errors(tx, buffer),
        restored=_read_restored(tx, buffer),
        others=() if tallies else tx.values(_OTHER_BUFFERS, buffer=buffer),
        datasets=_read_ended_datasets(tx, buffer),
    )


def with_matches(tx: Transaction, buffer: str, wait: Wait, circumstances: Circumstances) -> Circumstances:
    """Return the circumstances with the counts of groups that match the wait's query, up to the wanted number."""
    if wait.query is None:
        return replace(circumstances, matches=None)
    from replaybuf.rules.query import LogicNode, ScalarNode, parse
    from replaybuf.storage.sql.engine.transaction import Scope
    from replaybuf.storage.sql.statements.matching import count_groups

    node, matches = parse(json.loads(wait.query)), {}
    for task, count in wait.wants.items():
        lane = ScalarNode("task_name", "$eq", task), ScalarNode("status", "$eq", wait.status.value)
        matches[task] = count_groups(tx.of(Scope(buffer)), LogicNode("$and", (*lane, node)), count)
    return replace(circumstances, matches=matches)


# Leases and workers

# Leased groups have lanes of their own: without that, SQLite would scan all groups.
_HELD = """
SELECT l.task_name, l.status, g.holder, count(*), max(g.leased_until)
FROM rb_lane l JOIN rb_group g ON g.lane = l.id
WHERE l.buffer = :buffer AND l.leased AND g.leased_until IS NOT NULL
GROUP BY l.task_name, l.status, g.holder ORDER BY 1, 2, 3"""

# Earlier totals, and times of the last put and draw

_EARLIER_TALLIES = """
SELECT since AS minute, data FROM rb_history WHERE buffer = :buffer AND since <= :latest ORDER BY since DESC LIMIT 1"""

# With `g.lane = l.id` PostgreSQL may walk the primary key from its end, past the groups of other lanes.
_COLUMN_OF_NEWEST = """
(SELECT g.{column} FROM rb_group g WHERE g.lane BETWEEN l.id AND l.id ORDER BY g.lane DESC, g.uid DESC LIMIT 1)"""

_LAST_PUTS = (
    f"SELECT l.id, l.task_name, l.status, {_COLUMN_OF_NEWEST.format(column='created_at')} "  # noqa: S608
    "FROM rb_lane l WHERE l.buffer = :buffer"
)
_STEPS = "SELECT task_name, max(step) FROM rb_lane WHERE buffer = :buffer AND step IS NOT NULL GROUP BY task_name"
_LAST_BATCH = """
SELECT id, worker, taken_at AS time, groups FROM rb_batch WHERE buffer = :buffer ORDER BY id DESC LIMIT 1"""
_MEMBERS = "SELECT lane, created_at FROM rb_past WHERE draw = :draw AND draw > 0"


def _read_earlier(tx: Transaction, buffer: str) -> tuple[float | None, dict[str, Any]]:
    """Return the time and the totals of tasks of the last record from before an hour; None and {} if there is none."""
    for row in tx.rows(_EARLIER_TALLIES, buffer=buffer, latest=int(tx.clock() - _LATELY_SECONDS)):
        return float(row["data"].get("at", row["minute"])), row["data"].get("tasks", {})
    return None, {}


def _read_last_puts(tx: Transaction, buffer: str, drawn: Mapping[str, Any] | None) -> dict[LaneName, float]:
    """Return when the newest group of each task and status was put, of those present and those drawn last."""
    rows = tx.tuples(_LAST_PUTS, buffer=buffer)
    names = {lane: (task, Status(status)) for lane, task, status, _ in rows}
    members = () if drawn is None else tx.tuples(_MEMBERS, draw=drawn["id"])
    put_at: dict[LaneName, float] = {}
    for lane, created_at in [*((row[0], row[-1]) for row in rows), *members]:
        if lane in names and created_at is not None:
            put_at[names[lane]] = max(put_at.get(names[lane], created_at), created_at)
    return put_at


def read_trainer(tx: Transaction, buffer: str) -> TrainState | None:
    """Return the state that the trainer has published; None if there is none, or one of another version."""
    cursors = "SELECT value FROM rb_cursor WHERE buffer = :buffer AND name = :name AND checkpoint = 0"
    value = tx.value(cursors, buffer=buffer, name=TRAINER)
    if value is None:
        return None
    with suppress(InputError):  # of another version
        return TrainState.decode(bytes(value))
    return None


# A ledger that has continued since, with more epochs or after a restore, is at another position.
_ENDED_DATASETS = """
SELECT DISTINCT e.task_name, e.detail, e.groups
FROM rb_event e LEFT JOIN rb_cursor c ON c.buffer = e.buffer AND c.name = e.detail AND c.checkpoint = 0
WHERE e.buffer = :buffer AND e.kind = 'dataset_ended' AND coalesce(c.position, 0) = e.groups"""


def _read_ended_datasets(tx: Transaction, buffer: str) -> dict[str, int]:
    """Return the number of prompts drawn of each task whose prompt ledgers have read their datasets to the end."""
    drawn = Counter[str]()
    for task, _, prompts in tx.tuples(_ENDED_DATASETS, buffer=buffer):
        drawn[task] += prompts
    return drawn


_FAILED_LANES = f"""
SELECT l.task_name, {_COLUMN_OF_NEWEST.format(column="uid")} FROM rb_lane l
WHERE l.buffer = :buffer AND l.status = 'failed'"""  # noqa: S608


def _read_errors(tx: Transaction, buffer: str) -> dict[str, str]:
    """Return the errors of the newest failed groups, by task."""
    tasks = {uid: task for task, uid in tx.tuples(_FAILED_LANES, buffer=buffer) if uid is not None}
    errors = tx.tuples("SELECT uid, error FROM groups WHERE uid {in:uids} AND error IS NOT NULL", uids=[*tasks])
    return {tasks[uid]: error for uid, error in errors}


_OTHER_BUFFERS = "SELECT DISTINCT buffer FROM rb_lane WHERE buffer <> :buffer ORDER BY buffer LIMIT 5"
_RESTORED = "SELECT restored_at, epoch FROM rb_buffer WHERE name = :buffer AND restored_at IS NOT NULL"
_RESTORER = """
SELECT worker FROM rb_event WHERE buffer = :buffer AND kind = 'restored' AND happened_at > :time
ORDER BY happened_at DESC LIMIT 1"""


def _read_restored(tx: Transaction, buffer: str) -> Restored | None:
    for time, epoch in tx.tuples(_RESTORED, buffer=buffer):
        return Restored(time, tx.value(_RESTORER, buffer=buffer, time=time - 60.0), epoch)
    return None
