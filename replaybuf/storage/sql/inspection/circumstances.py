"""What is known of a buffer when somebody waits (`rules.circumstances`), and who waits at this moment.

All of it is read by indexes or from small tables, however many groups there are; only a query has to look at groups.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import ColumnElement, func, select, true

from replaybuf.errors import InputError, QueryError
from replaybuf.query import LogicNode, Node, ScalarNode, parse
from replaybuf.rollouts.status import Status
from replaybuf.rules.circumstances import Before, Circumstances, Held, Restored, Taking, Wait, Worker, limits_of
from replaybuf.rules.limits import Limits
from replaybuf.rules.tallies import Tally
from replaybuf.rules.train_state import TRAINER, TrainState
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.inspection.look import Look
from replaybuf.storage.sql.inspection.metadata import read_metadata
from replaybuf.storage.sql.schema.records import activity, batch, event, history, waiter, worker
from replaybuf.storage.sql.schema.tables import buffer, cursor, group, lane
from replaybuf.storage.sql.statements.counts import read_tallies
from replaybuf.storage.sql.statements.leases import store_clock
from replaybuf.storage.sql.statements.matching import count_groups

#: A wait of which nothing was heard for so long is over: its process was killed.
LIVE_SECONDS = 15.0
#: Rates are those of the time since then.
_RATE_SECONDS = 3600.0
_MOST_WORKERS = 1000


@dataclass(frozen=True, slots=True)
class Waiter:
    """A wait of some process at this moment, and the limits that it goes by; None if they can't be read."""

    wait: Wait
    limits: Limits | None


def read_waiters(tx: Transaction, now: float) -> list[Waiter]:
    """Return who waits in the buffer of the transaction, those that wait the longest first."""
    columns = (worker.c.name, *(waiter.c[name] for name in _WAIT), waiter.c.limits)
    live = waiter.c.seen_at > now - LIVE_SECONDS
    rows = select(*columns).select_from(waiter.join(worker, worker.c.id == waiter.c.worker_id))
    rows = rows.where(worker.c.buffer == tx.scope.buffer, live).order_by(waiter.c.since, waiter.c.number)
    return [_waiter(row) for row in tx.execute(rows)]


_WAIT = ("kind", "wants", "status", "query", "since", "deadline")


def _waiter(row: Any) -> Waiter:
    wants = {str(task): int(n) for task, n in row.wants.items()}
    status = Status.COMPLETED if row.status is None else Status(row.status)
    wait = Wait(wants, row.kind, status, row.query, row.name, row.since, row.deadline)
    return Waiter(wait, limits_of(row.limits))


def read_circumstances(tx: Transaction, waits: Sequence[Wait]) -> Circumstances:
    """Return what is known of the buffer of the transaction, in which these wait. Limits and matches aren't known."""
    now, tallies = store_clock(tx), read_tallies(tx)
    minutes = _read_minutes(tx, now)
    last_put = _read_last_puts(tx) | _last_changes(minutes, _puts(tallies), now)
    return Circumstances(
        now,
        tallies,
        held=_read_held(tx),
        workers=_read_workers(tx),
        waits=waits,
        trainer=_read_trainer(tx),
        steps=_read_steps(tx),
        before=_before(*minutes[0]) if minutes else None,
        last_put=last_put,
        last_take=_read_last_take(tx),
        errors=_read_errors(tx, tallies),
        restored=_read_restored(tx),
    )


def matching(tx: Transaction, wait: Wait, about: Circumstances) -> Circumstances:
    """Return the circumstances with the number of groups that match the query of a wait, as far as it needs them."""
    if wait.query is None:
        return replace(about, matches=None)
    try:
        node = parse(json.loads(wait.query))
    except (ValueError, QueryError):  # of another version
        return replace(about, matches=None)
    matches = {task: count_groups(tx, _lane(task, wait.status, node), least) for task, least in wait.wants.items()}
    return replace(about, matches=matches)


def _lane(task: str, status: Status, node: Node) -> Node:
    """Return the query for the groups of a lane that match; leased ones don't count."""
    in_lane = ScalarNode("task_name", "$eq", task), ScalarNode("status", "$eq", status.value)
    return LogicNode("$and", (*in_lane, node))


# Who holds, who works


def _read_held(tx: Transaction) -> list[Held]:
    lanes = (lane.c.task_name, lane.c.status, group.c.holder)
    held = select(*lanes, func.count(), func.max(group.c.leased_until))
    held = held.select_from(group.join(lane, lane.c.id == group.c.lane))
    # They have lanes of their own: without that, SQLite would look at all groups.
    only = (lane.c.buffer == tx.scope.buffer, lane.c.leased == true(), group.c.leased_until.is_not(None))
    held = held.where(*only).group_by(*lanes)
    return [Held(task, Status(status), holder, n, until) for task, status, holder, n, until in tx.execute(held)]


def _read_workers(tx: Transaction) -> list[Worker]:
    """Return the workers, the last seen first, with what they did as far as it is kept."""
    own = (worker.c.name, worker.c.started_at, worker.c.seen_at, worker.c.ended_at)
    known = select(worker.c.id, *own, worker.c.host, worker.c.pid).where(worker.c.buffer == tx.scope.buffer)
    rows = tx.execute(known.order_by(worker.c.seen_at.desc()).limit(_MOST_WORKERS)).all()
    did = ("groups", "failures", "taken")
    sums = select(activity.c.worker_id, *(func.sum(activity.c[name]) for name in did))
    sums = sums.where(activity.c.worker_id.in_([row.id for row in rows])).group_by(activity.c.worker_id)
    done = {row[0]: dict(zip(did, map(int, row[1:]), strict=True)) for row in tx.execute(sums)}
    return [
        Worker(row.name, row.started_at, row.seen_at, row.ended_at, **done.get(row.id, {}), host=row.host, pid=row.pid)
        for row in rows
    ]


# When what was put, drawn and restored


def _read_minutes(tx: Transaction, now: float) -> list[tuple[float, Mapping[str, Any]]]:
    """Return how each task stood in each minute of the last hour."""
    kept = select(history.c.since, history.c.data).where(
        history.c.buffer == tx.scope.buffer, history.c.since > now - _RATE_SECONDS, history.c.since <= now
    )
    return [(float(since), data.get("tasks", {})) for since, data in tx.execute(kept.order_by(history.c.since))]


def _before(time: float, tasks: Mapping[str, Any]) -> Before | None:
    if any("put_of" not in counts for counts in tasks.values()):
        return None  # of another version
    put = {(task, Status(status)): int(n) for task, counts in tasks.items() for status, n in counts["put_of"].items()}
    expired = {task: max(counts.get("expired", 0), counts.get("dropped", 0)) for task, counts in tasks.items()}
    return Before(time, put, expired, {task: counts.get("set_aside", 0) for task, counts in tasks.items()})


def _puts(tallies: Mapping[tuple[str, Status, Tally], int]) -> dict[str, int]:
    puts: dict[str, int] = {}
    for (task, _, name), n in tallies.items():
        if name == Tally.PUT:
            puts[task] = puts.get(task, 0) + n
    return puts


def _last_changes(
    minutes: Sequence[tuple[float, Mapping[str, Any]]], puts: Mapping[str, int], now: float
) -> dict[str, float]:
    """Return when something was put into each task in the time of these minutes, to the minute."""
    last = {}
    for task, count in puts.items():
        for since, tasks in reversed(minutes):
            if tasks.get(task, {}).get("put", 0) < count:
                last[task] = min(now, since + 60)
                break
    return last


def _read_last_puts(tx: Transaction) -> dict[str, float]:
    """Return when the newest group of each task that is still there, or was drawn last, was put."""
    newest = select(lane.c.id, lane.c.task_name, _of_newest(group.c.created_at))
    by_lane = newest.where(lane.c.buffer == tx.scope.buffer)
    last: dict[str, float] = {}
    tasks = {}
    for lane_id, task, created_at in tx.execute(by_lane):
        tasks[lane_id] = task
        if created_at is not None:
            last[task] = max(last.get(task, created_at), created_at)
    drawn = select(batch.c.members).where(batch.c.buffer == tx.scope.buffer).order_by(batch.c.taken_at.desc()).limit(1)
    for _, lane_id, *_, created_at in tx.execute(drawn).scalar() or ():
        if (task := tasks.get(lane_id)) is not None and created_at is not None:
            last[task] = max(last.get(task, created_at), created_at)
    return last


def _of_newest(value: ColumnElement[Any]) -> ColumnElement[Any]:
    """Return a column of the newest group of a lane.

    With `lane = n` PostgreSQL may walk the primary key from its end, past the groups of other lanes.
    """
    in_lane = group.c.lane.between(lane.c.id, lane.c.id)
    return select(value).where(in_lane).order_by(group.c.lane.desc(), group.c.uid.desc()).limit(1).scalar_subquery()


def _read_last_take(tx: Transaction) -> Taking | None:
    own = select(batch.c.worker, batch.c.taken_at, batch.c.groups).where(batch.c.buffer == tx.scope.buffer)
    row = tx.execute(own.order_by(batch.c.taken_at.desc()).limit(1)).first()
    return None if row is None else Taking(row.worker, row.taken_at, int(row.groups))


def _read_steps(tx: Transaction) -> dict[str, int]:
    steps = select(lane.c.task_name, func.max(lane.c.step)).where(lane.c.buffer == tx.scope.buffer)
    return {task: step for task, step in tx.execute(steps.group_by(lane.c.task_name)) if step is not None}


def _read_trainer(tx: Transaction) -> TrainState | None:
    own = (cursor.c.buffer == tx.scope.buffer, cursor.c.name == TRAINER, cursor.c.checkpoint == 0)
    value = tx.execute(select(cursor.c.value).where(*own)).scalar()
    with suppress(InputError):  # withdrawn, or of another version
        return None if value is None else TrainState.decode(bytes(value))
    return None


def _read_errors(tx: Transaction, tallies: Mapping[tuple[str, Status, Tally], int]) -> dict[str, str]:
    """Return why the newest failed group of each task did."""
    if not any(n for (_, status, name), n in tallies.items() if (status, name) == (Status.FAILED, Tally.SIZE)):
        return {}
    of_lanes: ColumnElement[bool] = (lane.c.buffer == tx.scope.buffer) & (lane.c.status == str(Status.FAILED))
    newest = tx.execute(select(lane.c.id, _of_newest(group.c.uid)).where(of_lanes))
    uids = [uid for _, uid in newest if uid is not None]
    return {row["task_name"]: row["error"] for row in read_metadata(Look.over(tx), uids) if row["error"]}


def _read_restored(tx: Transaction) -> Restored | None:
    own = select(buffer.c.restored_step, buffer.c.restored_at).where(buffer.c.name == tx.scope.buffer)
    row = tx.execute(own).first()
    if row is None or row.restored_at is None:
        return None
    told = select(event.c.worker).where(event.c.buffer == tx.scope.buffer, event.c.kind == "restored")
    told = told.where(event.c.happened_at >= row.restored_at - 60).order_by(event.c.happened_at.desc()).limit(1)
    return Restored(row.restored_step, row.restored_at, tx.execute(told).scalar())
