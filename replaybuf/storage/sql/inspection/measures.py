"""The figures of a database for monitoring: cheap enough to be read every few seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Float, Select, case, cast, func, select

from replaybuf.rollouts.rollout import Status
from replaybuf.rules.circumstances import SILENT_SECONDS
from replaybuf.rules.tallies import LaneName, Tally
from replaybuf.storage.sql.engine.transaction import Scope, Transaction
from replaybuf.storage.sql.inspection.checkpoints import list_checkpoints
from replaybuf.storage.sql.inspection.groups import buffers_of, looking_at
from replaybuf.storage.sql.inspection.overview import database_bytes, read_backlog
from replaybuf.storage.sql.schema.records import ACTIVITY_SECONDS, activity, batch, event, waiter, worker
from replaybuf.storage.sql.schema.tables import group, lane, staleness
from replaybuf.storage.sql.statements.counts import read_tallies
from replaybuf.storage.sql.statements.cursors import read_cursors
from replaybuf.storage.sql.statements.fence import epoch_of
from replaybuf.storage.sql.statements.leases import store_clock
from replaybuf.storage.values import Cursor

# Waits that go on are written every few seconds: others were those of processes that are gone.
_LIVE_SECONDS = 15.0
_HOUR = 3600.0
_LAST_BATCH = ("step", "groups", "reward", "min_reward", "max_reward", "staleness", "max_staleness", "taken_at")
_ACTIVITY = ("groups", "rollouts", "tokens", "failures", "taken")


@dataclass(slots=True)
class BufferMeasures:
    """A buffer's tallies and cursors; its records, as they are shown; and of each task what its groups hold.

    `histograms` and `contents` are empty where there are too many groups to look at all of them.
    """

    tallies: dict[tuple[str, Status, Tally], int]
    cursors: list[Cursor]
    records: dict[str, Any]
    overdue: dict[str, int]
    histograms: dict[str, dict[LaneName, dict[int, int]]]
    contents: dict[str, dict[str, Any]]


@dataclass(slots=True)
class Measures:
    """The measures of the whole database, and of each buffer."""

    database: dict[str, Any]
    buffers: dict[str, BufferMeasures]


def measure(tx: Transaction, buffer: str | None, scanned: int) -> Measures:
    """Return the measures of one buffer or of all; groups are looked at up to this number in a buffer."""
    looking_at(tx, buffer)
    database = {"bytes": database_bytes(tx), "unswept_payloads": read_backlog(tx)[0]}
    names = [name for name in buffers_of(tx) if buffer in (None, name)]
    now = store_clock(tx)
    return Measures(database, {name: _measure(tx.of(Scope(name)), name, now, scanned) for name in names})


def _measure(tx: Transaction, name: str, now: float, scanned: int) -> BufferMeasures:
    tallies = read_tallies(tx)
    found = BufferMeasures(tallies, read_cursors(tx), _records(tx, name, now), _overdue(tx, name, now), {}, {})
    if sum(n for (_, _, tally), n in tallies.items() if tally in (Tally.SIZE, Tally.LEASED)) <= scanned:
        _scan(tx, name, found)
    return found


def _records(tx: Transaction, name: str, now: float) -> dict[str, Any]:
    made = list_checkpoints(tx, name)
    newest = made[-1] if made else None
    return {
        "restores": epoch_of(tx) or 0,
        "checkpoints": {
            "count": len(made),
            "step": newest and newest.step,
            "created_at": newest and newest.created_at.timestamp(),
        },
        "last_batch": _last_batch(tx, name),
        "waiters": _waiters(tx, name, now),
        "workers": _workers(tx, name, now),
        "last_hour": _last_hour(tx, name, now),
        "events_last_hour": _events(tx, name, now),
    }


def _last_batch(tx: Transaction, name: str) -> dict[str, Any]:
    """Return the last draw of completed groups; empty before the first."""
    last = (
        select(*(batch.c[column] for column in _LAST_BATCH))
        .where(batch.c.buffer == name, batch.c.status == str(Status.COMPLETED))
        .order_by(batch.c.id.desc())
        .limit(1)
    )
    return {column: value for row in tx.execute(last).mappings() for column, value in row.items()}


def _waiters(tx: Transaction, name: str, now: float) -> dict[str, dict[str, float]]:
    """Return the number of waits by what they are for, and how long the oldest has lasted; not those of the dead."""
    counted = (
        select(waiter.c.kind, func.count(), func.min(waiter.c.since))
        .select_from(waiter.join(worker, worker.c.id == waiter.c.worker_id))
        .where(worker.c.buffer == name, waiter.c.seen_at > now - _LIVE_SECONDS)
        .group_by(waiter.c.kind)
    )
    return {
        kind: {"count": count, "longest_seconds": max(0.0, now - since)} for kind, count, since in tx.execute(counted)
    }


def _workers(tx: Transaction, name: str, now: float) -> dict[str, int]:
    """Return how many processes live, have fallen silent without saying that they end, and have ended."""
    state = case(
        (worker.c.ended_at.is_not(None), "ended"),
        (worker.c.seen_at > now - SILENT_SECONDS, "active"),
        else_="silent",
    )
    counted = select(state, func.count()).where(worker.c.buffer == name).group_by(state)
    return {"active": 0, "silent": 0, "ended": 0} | _counts(tx, counted)


def _last_hour(tx: Transaction, name: str, now: float) -> dict[str, int]:
    summed = (
        select(*(func.coalesce(func.sum(activity.c[column]), 0) for column in _ACTIVITY))
        .select_from(activity.join(worker, worker.c.id == activity.c.worker_id))
        .where(worker.c.buffer == name, activity.c.since > now - _HOUR - ACTIVITY_SECONDS)
    )
    return {column: int(n) for column, n in zip(_ACTIVITY, tx.execute(summed).one(), strict=True)}


def _events(tx: Transaction, name: str, now: float) -> dict[str, int]:
    recent = (event.c.buffer == name) & (event.c.happened_at > now - _HOUR)
    return _counts(tx, select(event.c.kind, func.count()).where(recent).group_by(event.c.kind))


def _overdue(tx: Transaction, name: str, now: float) -> dict[str, int]:
    """Return the number of leased groups by task whose lease is over: they come back with the next draw."""
    over = select(lane.c.task_name, func.count()).select_from(group.join(lane, lane.c.id == group.c.lane))
    over = over.where(group.c.leased_until <= now, lane.c.buffer == name).group_by(lane.c.task_name)
    return _counts(tx, over)


def _counts(tx: Transaction, query: Select[Any]) -> dict[str, int]:
    return {str(name): int(count) for name, count in tx.execute(query)}


def _scan(tx: Transaction, name: str, found: BufferMeasures) -> None:
    """Look at all groups, once."""
    drawn = group.c.times_sampled
    scan = (
        select(
            *(lane.c.task_name, lane.c.status, lane.c.leased, staleness.label("staleness"), drawn),
            func.count().label("groups"),
            func.sum(group.c.bytes).label("bytes"),
            func.min(group.c.created_at).label("oldest"),
            func.count(group.c.reward).label("rewards"),
            func.sum(cast(group.c.reward, Float)).label("reward"),
            func.min(group.c.reward).label("lowest"),
            func.max(group.c.reward).label("highest"),
        )
        .select_from(group.join(lane, lane.c.id == group.c.lane))
        .where(lane.c.buffer == name)
        .group_by(lane.c.task_name, lane.c.status, lane.c.leased, staleness, drawn)
    )
    rewards: dict[str, list[Mapping[Any, Any]]] = {}
    for row in tx.execute(scan).mappings():
        task, status = row["task_name"], Status(row["status"])
        contents = found.contents.setdefault(task, {"bytes": 0})
        contents["bytes"] += int(row["bytes"])
        if status != Status.COMPLETED or row["leased"]:
            continue
        contents["oldest_at"] = min(contents.get("oldest_at", row["oldest"]), row["oldest"])
        rewards.setdefault(task, []).append(row)
        for field in ("staleness", "times_sampled"):
            counts = found.histograms.setdefault(field, {}).setdefault((task, status), {})
            counts[int(row[field])] = counts.get(int(row[field]), 0) + int(row["groups"])
    for task, rows in rewards.items():
        if rewarded := [row for row in rows if row["rewards"]]:
            found.contents[task]["reward"] = {
                "mean": sum(row["reward"] for row in rewarded) / sum(row["rewards"] for row in rewarded),
                "min": min(row["lowest"] for row in rewarded),
                "max": max(row["highest"] for row in rewarded),
            }
