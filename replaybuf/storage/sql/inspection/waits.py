"""Explains current waits, failed waits, and why a draw issued now would block.

Polled often, so everything is read by index or from small tables, whatever the number of groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from replaybuf.rollouts.statuses import Status
from replaybuf.rules.circumstances import LIVE_SECONDS, Circumstances, Wait
from replaybuf.rules.diagnosis import Diagnosis, diagnose
from replaybuf.rules.limits import Limits
from replaybuf.storage.reports import EventKind, kind_of_wait, lasted
from replaybuf.storage.sql.inspection.circumstances import (
    Waiter,
    matching,
    read_circumstances,
    read_limits,
    read_waiters,
)
from replaybuf.storage.sql.inspection.groups import DEFAULT, check_buffer, opened_buffers
from replaybuf.storage.sql.inspection.reader import ReadTransaction
from replaybuf.storage.sql.statements.buffer_facts import STALENESS
from replaybuf.units import time_of

_DAY = 24 * 3600.0
# Only the newest events are searched for a failed wait, and only the newest draws and groups for what followed it.
_EVENTS, _NEWEST = 100, 1000


@dataclass(frozen=True, slots=True)
class DrawQuestion:
    """A hypothetical draw to explain: from each task, or from the one it names."""

    task: str | None = None
    size: int = 1
    status: Status = Status.COMPLETED
    query: str | None = None


@dataclass(frozen=True, slots=True)
class Explained:
    """A wait, the limits that apply to it (None if unknown), and the diagnosis of why it goes on."""

    wait: Wait
    limits: Limits | None
    diagnosis: Diagnosis

    def row(self, buffer: str) -> dict[str, Any]:
        """Return the diagnosis of a wait in this buffer and the wait's fields as plain values."""
        wait, diagnosis = self.wait, self.diagnosis
        return {
            "reason": str(diagnosis.reason),
            "sentence": diagnosis.sentence,
            "task_name": diagnosis.task_name,
            "buffer": buffer,
            "worker": wait.worker,
            "kind": wait.kind,
            "wants": dict(wait.wants),
            "status": str(wait.status),
            "query": wait.query,
            "since": time_of(wait.since),
            "deadline": time_of(wait.deadline),
        }


@dataclass(frozen=True, slots=True)
class Ended:
    """A wait that timed out, at a time in seconds since the epoch; `detail` has its duration and reason.

    `killed`: its process was killed, or lost, and sent its last heartbeat at this time.
    """

    worker: str
    task_name: str | None
    time: float
    detail: str
    killed: bool = False


@dataclass(frozen=True, slots=True)
class Explanation:
    """The waits of a buffer with their diagnoses, and the circumstances.

    `gave_up` is the last wait that failed; None while a draw waits, or if the worker has succeeded since.

    `asked` is true if the waits are hypothetical draws: no process waits, or an answer to a question was requested.
    """

    buffer: str
    about: Circumstances
    asked: bool
    waits: list[Explained] = field(default_factory=list)
    gave_up: Ended | None = None


def explain(tx: ReadTransaction, buffer: str | None, question: DrawQuestion, *, asked: bool) -> list[Explanation]:
    """Explain the waits of one buffer or of all; only those for the question's task, if it names one.

    Consumers come first, longest wait first. Where no process waits, or everywhere with `asked`, the question is
    answered instead. Raises InputError when only other buffers exist.
    """
    check_buffer(tx, buffer)
    names = opened_buffers(tx) if buffer is None else [buffer]
    return [_explain(tx, name, question, asked) for name in names or [DEFAULT]]


def _explain(tx: ReadTransaction, buffer: str, question: DrawQuestion, asked: bool) -> Explanation:
    waiters = read_waiters(tx, buffer)
    about = read_circumstances(tx, buffer, [one.wait for one in waiters])
    chosen = [] if asked else [one for one in waiters if question.task is None or question.task in one.wait.wants]
    drawing = any(one.wait.kind == "groups" for one in chosen)
    gave_up = None if drawing or asked else last_given_up(tx, buffer, question.task)
    shown = sorted(chosen, key=lambda one: one.wait.kind != "groups")
    waits = [
        Explained(
            one.wait, one.limits, diagnose(one.wait, matching(tx, buffer, one.wait, replace(about, limits=one.limits)))
        )
        for one in shown or _answers(tx, buffer, question, about, waiters)
    ]
    return Explanation(buffer, about, not chosen, waits, gave_up)


def _answers(
    tx: ReadTransaction, buffer: str, question: DrawQuestion, about: Circumstances, waiters: Sequence[Waiter]
) -> list[Waiter]:
    """Return the draws that a question is about, with the limits of a waiting process, or recorded ones."""
    known = [one.limits for one in waiters if one.limits is not None]
    limits = known[0] if known else read_limits(tx, buffer)
    tasks = [question.task] if question.task is not None else sorted({task for task, _, _ in about.tallies})
    draws = [
        Wait({task: question.size}, status=question.status, query=question.query) for task in tasks or ["any task"]
    ]
    return [Waiter(draw, limits) for draw in draws]


# Waits that ended without success

_GAVE_UP = """
SELECT worker, task_name, happened_at AS time, detail FROM rb_event
WHERE buffer = :buffer AND kind = :kind AND happened_at > :earliest ORDER BY happened_at DESC, id DESC LIMIT :most"""

_KILLED = """
SELECT w.name, a.kind, a.wants, a.since AS began, a.seen_at AS time, a.reason
FROM rb_waiter a JOIN rb_worker w ON w.id = a.worker_id
WHERE w.buffer = :buffer AND a.seen_at BETWEEN :earliest AND :live AND w.ended_at IS NULL
ORDER BY a.seen_at DESC LIMIT :most"""

# Removed groups are counted by period in `rb_activity`; a period that began before `time` may include earlier ones.
_DREW = """
SELECT 1 FROM (SELECT worker, taken_at FROM rb_batch WHERE buffer = :buffer ORDER BY id DESC LIMIT :newest) newest
WHERE worker = :worker AND taken_at > :time
UNION ALL
SELECT 1 FROM rb_worker w JOIN rb_activity a ON a.worker_id = w.id
WHERE w.buffer = :buffer AND w.name = :worker AND a.since > :time AND a.taken > 0"""
_PUT = """
SELECT 1 FROM rb_worker w JOIN rb_activity a ON a.worker_id = w.id
WHERE w.buffer = :buffer AND w.name = :worker AND a.since > :time AND a.groups > 0"""
_WAITS_AGAIN = """
SELECT 1 FROM rb_worker w JOIN rb_waiter a ON a.worker_id = w.id
WHERE w.buffer = :buffer AND w.name = :worker AND a.since >= :time AND a.seen_at > :live AND w.ended_at IS NULL"""
_LANES = "SELECT id FROM rb_lane WHERE buffer = :buffer"
_PUT_INTO = """
SELECT 1 FROM (
    SELECT worker, created_at FROM rb_group WHERE lane BETWEEN :lane AND :lane
    ORDER BY lane DESC, uid DESC LIMIT :newest) newest
WHERE worker = :worker AND created_at > :time"""


def last_given_up(tx: ReadTransaction, buffer: str, task: str | None = None) -> Ended | None:
    """Return the last failed wait of the last day, of one task or of all.

    Waits are left out whose worker has since drawn (or put, if it waited for room), or waits again.
    """
    times = {"buffer": buffer, "earliest": tx.seconds() - _DAY, "most": _EVENTS}
    rows = tx.rows(_GAVE_UP, kind=str(EventKind.GAVE_UP), **times)
    found = [Ended(row["worker"] or "", row["task_name"], row["time"], row["detail"] or "") for row in rows]
    for row in tx.rows(_KILLED, live=tx.seconds() - LIVE_SECONDS, **times):
        wants = list(row["wants"])
        detail = f"after at least {lasted(row['kind'], row['time'] - row['began'])}: {row['reason']}"
        one_task = task if task in wants else wants[0] if wants else None
        found.append(Ended(row["name"], one_task, row["time"], detail, killed=True))
    for ended in sorted(found, key=lambda one: -one.time):
        if task in (None, ended.task_name) and not _went_on(tx, buffer, ended):
            return ended
    return None


def _went_on(tx: ReadTransaction, buffer: str, ended: Ended) -> bool:
    about = {"worker": ended.worker, "time": ended.time}
    kind = kind_of_wait(ended.detail)
    if tx.value(_WAITS_AGAIN, **about, buffer=buffer, live=tx.seconds() - LIVE_SECONDS):
        return True
    if kind != "room" and tx.value(_DREW, **about, buffer=buffer, newest=_NEWEST):
        return True
    if kind == "groups":
        return False
    lanes = tx.values(_LANES, buffer=buffer)
    put = tx.value(_PUT, **about, buffer=buffer)
    return bool(put) or any(tx.value(_PUT_INTO, **about, lane=lane, newest=_NEWEST) for lane in lanes)


@dataclass(frozen=True, slots=True)
class NewestGroups:
    """The number of sampled groups, their rewards, and their counts by staleness."""

    groups: int
    rewards: list[float]
    staleness: dict[int, int]


#: The number of newest groups whose rewards and staleness are read, and the number of lanes they come from.
NEWEST_GROUPS, _MOST_LANES = 2000, 100
_COMPLETED_LANES = """SELECT id FROM rb_lane WHERE status = 'completed' AND buffer = coalesce(:buffer, buffer)
AND task_name = coalesce(:task, task_name) LIMIT :most"""
_NEWEST_OF_LANE = f"""SELECT * FROM (SELECT g.reward, {STALENESS} FROM rb_group g JOIN rb_lane l ON l.id = g.lane
WHERE g.lane = {{lane}} ORDER BY g.uid DESC LIMIT {{most}}) lane{{lane}}"""  # noqa: S608


def newest_groups(tx: ReadTransaction, buffer: str | None, task: str | None) -> NewestGroups:
    """Return rewards and staleness of the completed groups put last, an equal number of each task."""
    lanes = tx.values(_COMPLETED_LANES, buffer=buffer, task=task, most=_MOST_LANES)
    if not lanes:
        return NewestGroups(0, [], {})
    most = -(-NEWEST_GROUPS // len(lanes))
    rows = tx.tuples(" UNION ALL ".join(_NEWEST_OF_LANE.format(lane=int(lane), most=most) for lane in lanes))
    rewards = [float(reward) for reward, _ in rows if reward is not None]
    staleness = Counter(int(stale) for _, stale in rows if stale is not None)
    return NewestGroups(len(rows), rewards, dict(sorted(staleness.items())))
