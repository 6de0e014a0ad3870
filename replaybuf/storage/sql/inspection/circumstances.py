"""What is known of a buffer when somebody waits (`rules.circumstances`), and who waits at this moment.

All of it is read by indexes or from small tables, however many groups there are; only a query has to look at groups.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from replaybuf.errors import InputError, QueryError
from replaybuf.rollouts.status import Status
from replaybuf.rules.circumstances import Before, Circumstances, Held, Restored, Taking, Wait, Worker, limits_of
from replaybuf.rules.limits import Limits
from replaybuf.rules.tallies import Tallies, Tally
from replaybuf.storage.sql.inspection.look import Look
from replaybuf.storage.sql.inspection.overview import read_tallies

if TYPE_CHECKING:
    from replaybuf.rules.train_state import TrainState
    from replaybuf.storage.sql.engine.transaction import Transaction

#: A wait of which nothing was heard for so long is over: its process was killed.
LIVE_SECONDS = 15.0
#: Rates are those of the time since then.
_RATE_SECONDS = 3600
_MINUTE = 60.0

#: How each task stood in a minute: its figures by name.
_Figures = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Waiter:
    """A wait of some process at this moment, and the limits that it goes by; None if they can't be read."""

    wait: Wait
    limits: Limits | None


_WAITERS = """
SELECT w.name, a.kind, a.wants, a.status, a.query, a.since AS began, a.deadline AS ends, a.limits
FROM rb_waiter a JOIN rb_worker w ON w.id = a.worker_id
WHERE w.buffer = :buffer AND a.seen_at > :live ORDER BY a.since, a.number"""


def read_waiters(look: Look, buffer: str) -> list[Waiter]:
    """Return who waits in a buffer, those that wait the longest first."""
    rows = look.rows(_WAITERS, buffer=buffer, live=look.seconds() - LIVE_SECONDS)
    return [_waiter(row) for row in rows]


def _waiter(row: Mapping[str, Any]) -> Waiter:
    wants = {str(task): int(n) for task, n in row["wants"].items()}
    status = Status.COMPLETED if row["status"] is None else Status(row["status"])
    wait = Wait(wants, row["kind"], status, row["query"], row["name"], row["began"], row["ends"])
    return Waiter(wait, limits_of(row["limits"]))


def circumstances_of(tx: Transaction, wait: Wait) -> Circumstances:
    """Return what is known of the buffer of the transaction, for one wait in it, by the limits of this process."""
    look, buffer = Look.over(tx), tx.scope.buffer or ""
    others = [one.wait for one in read_waiters(look, buffer)]
    about = replace(read_circumstances(look, buffer, others), limits=tx.scope.rules.limits)
    return matching(tx, wait, about)


def read_circumstances(look: Look, buffer: str, waits: Sequence[Wait]) -> Circumstances:
    """Return what is known of a buffer, in which these wait. Limits and matches aren't known yet."""
    now, tallies = look.seconds(), read_tallies(look, buffer)
    errors, failed_by = _read_failures(look, buffer)
    minutes, drawn = _read_minutes(look, buffer, now), _read_last_batch(look, buffer)
    return Circumstances(
        now,
        tallies,
        held=_read_held(look, buffer),
        workers=_read_workers(look, buffer),
        waits=waits,
        trainer=_read_trainer(look, buffer),
        steps=_read_steps(look, buffer),
        before=_before(*minutes[0]) if minutes else None,
        last_put=_latest(_read_last_puts(look, buffer, drawn), _last_changes(minutes, _puts(tallies))),
        last_take=None if drawn is None else Taking(drawn["worker"], drawn["time"], drawn["groups"]),
        errors=errors,
        failed_by=failed_by,
        restored=_read_restored(look, buffer),
    )


def matching(tx: Transaction, wait: Wait, about: Circumstances) -> Circumstances:
    """Return the circumstances with the number of groups that match the query of a wait, as far as it needs them.

    The transaction is of the buffer.
    """
    if wait.query is None:
        return replace(about, matches=None)
    from replaybuf.query import LogicNode, ScalarNode, parse
    from replaybuf.storage.sql.statements.matching import count_groups

    try:
        node = parse(json.loads(wait.query))
    except (ValueError, QueryError):  # of another version
        return replace(about, matches=None)
    matches = {}
    for task, least in wait.wants.items():
        lane = ScalarNode("task_name", "$eq", task), ScalarNode("status", "$eq", wait.status.value)
        matches[task] = count_groups(tx, LogicNode("$and", (*lane, node)), least)
    return replace(about, matches=matches)


# Who holds, who works

# Leased groups have lanes of their own: without that, SQLite would look at all groups.
_HELD = """
SELECT l.task_name, l.status, g.holder, count(*), max(g.leased_until)
FROM rb_lane l JOIN rb_group g ON g.lane = l.id
WHERE l.buffer = :buffer AND l.leased AND g.leased_until IS NOT NULL
GROUP BY l.task_name, l.status, g.holder ORDER BY 1, 2, 3"""

_WORKERS = """
SELECT w.name, w.started_at, w.seen_at, w.ended_at,
       coalesce(sum(a.groups), 0), coalesce(sum(a.failures), 0), coalesce(sum(a.taken), 0), w.host, w.pid
FROM (SELECT * FROM rb_worker WHERE buffer = :buffer ORDER BY seen_at DESC LIMIT 1000) w
     LEFT JOIN rb_activity a ON a.worker_id = w.id
GROUP BY w.id, w.name, w.started_at, w.seen_at, w.ended_at, w.host, w.pid ORDER BY w.seen_at DESC, w.id"""


def _read_held(look: Look, buffer: str) -> list[Held]:
    _, rows = look.table(_HELD, buffer=buffer)
    return [Held(task, Status(status), holder, n, until) for task, status, holder, n, until in rows]


def _read_workers(look: Look, buffer: str) -> list[Worker]:
    """Return the workers, the last seen first, with what they did as far as it is kept."""
    _, rows = look.table(_WORKERS, buffer=buffer)
    return [Worker(*row[:4], *map(int, row[4:7]), *row[7:]) for row in rows]


# When what was put, drawn and restored

_MINUTES = """
SELECT since AS minute, data FROM rb_history
WHERE buffer = :buffer AND since > :earliest AND since <= :now ORDER BY since"""

# With `g.lane = l.id` PostgreSQL may walk the primary key from its end, past the groups of other lanes.
_OF_NEWEST = """
(SELECT g.{column} FROM rb_group g WHERE g.lane BETWEEN l.id AND l.id ORDER BY g.lane DESC, g.uid DESC LIMIT 1)"""

_LAST_PUTS = (
    f"SELECT l.id, l.task_name, {_OF_NEWEST.format(column='created_at')} FROM rb_lane l WHERE l.buffer = :buffer"  # noqa: S608
)
_LAST_BATCH = """
SELECT worker, taken_at AS time, groups, members FROM rb_batch WHERE buffer = :buffer ORDER BY id DESC LIMIT 1"""


def _read_minutes(look: Look, buffer: str, now: float) -> list[tuple[float, _Figures]]:
    """Return how each task stood in each minute of the last hour."""
    rows = look.rows(_MINUTES, buffer=buffer, earliest=int(now) - _RATE_SECONDS, now=int(now))
    return [(float(row["minute"]), row["data"].get("tasks", {})) for row in rows]


def _before(time: float, tasks: _Figures) -> Before | None:
    if any("put_of" not in figures for figures in tasks.values()):
        return None  # of another version
    put = {(task, Status(status)): n for task, figures in tasks.items() for status, n in figures["put_of"].items()}
    expired = {task: max(figures.get("expired", 0), figures.get("dropped", 0)) for task, figures in tasks.items()}
    return Before(time, put, expired, {task: figures.get("set_aside", 0) for task, figures in tasks.items()})


def _puts(tallies: Tallies) -> dict[str, int]:
    puts: dict[str, int] = {}
    for (task, _, name), n in tallies.items():
        if name == Tally.PUT:
            puts[task] = puts.get(task, 0) + n
    return puts


def _latest(*times: Mapping[str, float]) -> dict[str, float]:
    """Return the latest of these times of each task."""
    tasks = {task for one in times for task in one}
    return {task: max(one[task] for one in times if task in one) for task in tasks}


def _last_changes(minutes: Sequence[tuple[float, _Figures]], puts: Mapping[str, int]) -> dict[str, float]:
    """Return the beginning of the last of these minutes in which something was put into each task."""
    last = {}
    for task, count in puts.items():
        for minute, tasks in reversed(minutes):
            if tasks.get(task, {}).get("put", 0) < count:
                last[task] = minute
                break
    return last


def _read_last_puts(look: Look, buffer: str, drawn: Mapping[str, Any] | None) -> dict[str, float]:
    """Return when the newest group of each task that is still there, or was drawn last, was put."""
    last: dict[str, float] = {}
    tasks = {}
    for lane, task, created_at in look.table(_LAST_PUTS, buffer=buffer)[1]:
        tasks[lane] = task
        if created_at is not None:
            last[task] = max(last.get(task, created_at), created_at)
    for member in [] if drawn is None else drawn["members"]:
        lane, created_at = member[1], member[6]
        if (task := tasks.get(lane)) is not None and created_at is not None:
            last[task] = max(last.get(task, created_at), created_at)
    return last


def _read_last_batch(look: Look, buffer: str) -> dict[str, Any] | None:
    """Return the last draw, with its members."""
    for row in look.rows(_LAST_BATCH, buffer=buffer):
        if isinstance(row["members"], str):
            row["members"] = json.loads(row["members"])
        return row
    return None


def _read_steps(look: Look, buffer: str) -> dict[str, int]:
    steps = "SELECT task_name, max(step) FROM rb_lane WHERE buffer = :buffer AND step IS NOT NULL GROUP BY task_name"
    return dict(look.table(steps, buffer=buffer)[1])


def _read_trainer(look: Look, buffer: str) -> TrainState | None:
    cursors = "SELECT value FROM rb_cursor WHERE buffer = :buffer AND name = :name AND checkpoint = 0"
    value = look.value(cursors, buffer=buffer, name="replaybuf:trainer")
    if value is None:  # saves the import
        return None
    from replaybuf.rules.train_state import TrainState

    with suppress(InputError):  # withdrawn, or of another version
        return TrainState.decode(bytes(value))
    return None


_FAILED_LANES = f"""
SELECT l.task_name, l.id, {_OF_NEWEST.format(column="uid")} FROM rb_lane l
WHERE l.buffer = :buffer AND l.status = 'failed'"""  # noqa: S608
_FAILED_BY = """
SELECT worker, count(*) FROM (
    SELECT worker FROM rb_group WHERE lane BETWEEN :lane AND :lane ORDER BY lane DESC, uid DESC LIMIT 1000) newest
WHERE worker IS NOT NULL GROUP BY worker"""


def _read_failures(look: Look, buffer: str) -> tuple[dict[str, str], dict[str, dict[str, int]]]:
    """Return why the newest failed group of each task did, and whose the newest ones are."""
    errors, makers = {}, {}
    for task, lane, uid in look.table(_FAILED_LANES, buffer=buffer)[1]:
        if uid is not None:
            makers[task] = {worker: int(n) for worker, n in look.table(_FAILED_BY, lane=lane)[1]}
            if error := look.value("SELECT error FROM groups WHERE uid = :uid", uid=uid):
                errors[task] = error
    return errors, makers


def _read_restored(look: Look, buffer: str) -> Restored | None:
    own = "SELECT restored_step, restored_at FROM rb_buffer WHERE name = :buffer AND restored_at IS NOT NULL"
    for step, time in look.table(own, buffer=buffer)[1]:
        told = """
SELECT worker FROM rb_event WHERE buffer = :buffer AND kind = 'restored' AND happened_at > :time
ORDER BY happened_at DESC LIMIT 1"""
        return Restored(step, time, look.value(told, buffer=buffer, time=time - _MINUTE))
    return None
