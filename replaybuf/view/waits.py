"""Who waits for what in each buffer, and why; a failed wait; and why a draw issued now would block.

Polled often, so everything is read by index or from small tables, whatever the number of groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any

from replaybuf.common import units
from replaybuf.common.units import time_of
from replaybuf.rules.causes import explain
from replaybuf.rules.circumstances import LIVE_SECONDS, Circumstances, Held, Taking, Wait, Worker
from replaybuf.rules.diagnosis import Fact, diagnose
from replaybuf.rules.transitions import Tally
from replaybuf.storage.reports import EventKind, kind_of_wait, lasted
from replaybuf.storage.sql.inspection.group_metadata import DEFAULT, check_buffer, opened_buffers
from replaybuf.storage.sql.inspection.reader import ReadTransaction
from replaybuf.storage.sql.inspection.wait_facts import (
    Waiter,
    did_since,
    matching,
    read_circumstances,
    read_limits,
    read_signs,
    read_waiters,
)
from replaybuf.values.rollouts.statuses import Status
from replaybuf.view.columns import Column, columns

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
class ExplainedWait:
    """A wait, and why it goes on: a reason as a sentence, and further facts.

    `limits` are those in force that aren't the defaults; None if they are unknown.
    """

    reason: str
    sentence: str
    task_name: str | None
    buffer: str
    worker: str | None
    kind: str
    wants: dict[str, int]
    status: str
    query: str | None
    since: datetime | None
    deadline: datetime | None
    limits: dict[str, Any] | None
    facts: tuple[Fact, ...]

    @property
    def also(self) -> list[str]:
        """Other causes, which may come next."""
        return [fact.text for fact in self.facts if fact.reason is not None]


@dataclass(frozen=True, slots=True)
class GaveUp:
    """A wait that timed out; `detail` has its duration and reason.

    `killed`: its process was killed, or lost, and sent its last heartbeat at this time.
    """

    worker: str
    task_name: str | None
    time: datetime
    detail: str
    killed: bool = False


@dataclass(frozen=True, slots=True)
class Waits:
    """The waits of a buffer, longest first and consumers before others, and what there is about them.

    Unless `somebody_waits`, `waits` are answers about hypothetical draws: no process waits, or a question was asked.
    `gave_up` is the last wait that failed; None while a draw waits, or if the worker has succeeded since. `tasks` has
    a row for each task: its groups by status, its totals, and its completed groups per hour. `leases`, `workers` and
    `last_draw` have the fields of `Held`, `Worker` (with its state) and `Taking`.
    """

    buffer: str
    now: datetime
    somebody_waits: bool
    gave_up: GaveUp | None
    waits: list[ExplainedWait]
    tasks: list[dict[str, Any]]
    leases: list[dict[str, Any]]
    workers: list[dict[str, Any]]
    trainer: dict[str, Any] | None
    last_draw: dict[str, Any] | None

    @property
    def nobody_draws(self) -> dict[str, Any] | None:
        """The taker that was seen last, if no taker is alive and it didn't end by itself."""
        takers = [one for one in self.workers if one["taken"]]
        if not takers or any(one["state"] == "alive" for one in takers):
            return None
        last = max(takers, key=lambda one: one["ended_at"] or one["seen_at"])
        return None if last["ended_at"] is not None else last


def read_waits(
    tx: ReadTransaction, buffer: str | None, question: DrawQuestion = DrawQuestion(), *, asked: bool = False
) -> list[Waits]:
    """Explain the waits of one buffer or of all; only those for the question's task, if it names one.

    Where no process waits, or everywhere with `asked`, the question is answered instead. Raises
    InputError when only other buffers exist.
    """
    check_buffer(tx, buffer)
    names = opened_buffers(tx) if buffer is None else [buffer]
    return [_read(tx, name, question, asked) for name in names or [DEFAULT]]


def _read(tx: ReadTransaction, buffer: str, question: DrawQuestion, asked: bool) -> Waits:
    waiters = read_waiters(tx, buffer)
    about = read_circumstances(tx, buffer, [one.wait for one in waiters])
    chosen = [] if asked else [one for one in waiters if question.task is None or question.task in one.wait.wants]
    drawing = any(one.wait.kind == "groups" for one in chosen)
    shown = sorted(chosen, key=lambda one: one.wait.kind != "groups") or _answers(tx, buffer, question, about, waiters)
    return Waits(
        buffer,
        time_of(about.now),
        bool(chosen),
        None if drawing or asked else last_given_up(tx, buffer, question.task),
        [_explained(tx, buffer, one, about) for one in shown],
        [
            _task(about, task)
            for task in sorted({task for task, _, _ in about.tallies})
            if question.task is None or task == question.task
        ],
        [_row(one) for one in about.held],
        [_row(one) | {"state": about.state_of(one)} for one in about.workers],
        None if about.trainer is None else asdict(about.trainer),
        None if about.last_take is None else _row(about.last_take),
    )


_TIMES = ("started_at", "seen_at", "ended_at", "until", "time")


def _row(one: Held | Worker | Taking) -> dict[str, Any]:
    return {name: time_of(value) if name in _TIMES else value for name, value in asdict(one).items()}


def _explained(tx: ReadTransaction, buffer: str, one: Waiter, about: Circumstances) -> ExplainedWait:
    wait, limits = one.wait, one.limits
    found = diagnose(wait, matching(tx, buffer, wait, replace(about, limits=limits)))
    return ExplainedWait(
        str(found.reason),
        found.sentence,
        found.task_name,
        buffer,
        wait.worker,
        wait.kind,
        dict(wait.wants),
        str(wait.status),
        wait.query,
        time_of(wait.since),
        time_of(wait.deadline),
        None if limits is None else limits.in_force,
        found.facts,
    )


def _answers(
    tx: ReadTransaction, buffer: str, question: DrawQuestion, about: Circumstances, waiters: Sequence[Waiter]
) -> list[Waiter]:
    """Return the draws that a question is about, with the limits of a waiting process, or recorded ones.

    Tasks that lack groups for one cause are in one draw.
    """
    known = [one.limits for one in waiters if one.limits is not None]
    limits = known[0] if known else read_limits(tx, buffer)
    tasks = [question.task] if question.task is not None else sorted({task for task, _, _ in about.tallies})
    alike: dict[str, list[str]] = {}
    for task in tasks or ["any task"]:
        draw = Wait({task: question.size}, status=question.status, query=question.query)
        explained = explain(draw, matching(tx, buffer, draw, replace(about, limits=limits)))
        alike.setdefault(explained[0][1][0].text if explained else task, []).append(task)
    wants = [dict.fromkeys(of, question.size) for of in alike.values()]
    return [Waiter(Wait(one, status=question.status, query=question.query), limits) for one in wants]


_DRAWN = (Tally.SAMPLED_NEW, Tally.SAMPLED_AGAIN)


def _task(about: Circumstances, task: str) -> dict[str, Any]:
    return {
        "task_name": task,
        **{str(status): about.count(task, status) for status in Status},
        "leased": sum(about.count(task, status, Tally.LEASED) for status in Status),
        "prompts": about.count(task, Status.INIT, Tally.PUT),
        "put": sum(about.count(task, status, Tally.PUT) for status in Status if status != Status.INIT),
        "drawn": sum(about.count(task, Status.COMPLETED, name) for name in _DRAWN),
        "completed_per_hour": about.rate(task, Status.COMPLETED) * 3600 or None,
        "last_put": time_of(about.last(task)),
        "refreshed_to": about.steps.get(task),
    }


#: The columns of `Waits.tasks`.
TASKS = [
    *columns("task_name", "completed"),
    *(
        Column(str(one), str(one), usual=0, spare=True)
        for one in Status
        if one not in (Status.COMPLETED, Status.ARCHIVED)
    ),
    Column("leased", "leased"),
    Column("prompts", "prompts", usual=0, spare=True),
    *columns("put", "drawn", spare=("put", "drawn")),
    Column("completed_per_hour", "an hour", spare=True),
    Column("last_put", "last put", "ago"),
    Column("refreshed_to", "at step", "id", spare=True),
]


# In sentences


def sentence_of(found: Waits, *, several: bool, about_a_draw: bool = False) -> str | None:
    """Return the sentence about a buffer in which nobody waits for groups: who gave up last, or that nobody draws.

    `about_a_draw` says that the user asked about one draw: then it isn't said that nobody draws.
    """
    of = f" of {found.buffer}" if several else ""
    if last := found.gave_up:
        nobody = "Nobody waits for groups now" if found.somebody_waits else "Nobody waits now"
        end = "went silent" if last.killed else "gave up"
        return f"{nobody}{of}; {last.worker or 'somebody'} {end} {units.ago(last.time, found.now)}, {last.detail}"
    if found.somebody_waits or about_a_draw or (taker := found.nobody_draws) is None:
        return None
    return f"Nobody draws{of}; {taker['name']} gave its last sign of life {units.ago(taker['seen_at'], found.now)}"


# Waits that ended without success

_GAVE_UP = """
SELECT worker, task_name, happened_at AS time, detail FROM rb_event
WHERE buffer = :buffer AND kind = :kind AND happened_at > :earliest ORDER BY happened_at DESC, id DESC LIMIT :most"""

_DREW = """
SELECT 1 FROM (SELECT worker, taken_at FROM rb_batch WHERE buffer = :buffer ORDER BY id DESC LIMIT :newest) newest
WHERE worker = :worker AND taken_at > :time"""
_LANES = "SELECT id FROM rb_lane WHERE buffer = :buffer"
_PUT_INTO = """
SELECT 1 FROM (
    SELECT worker, created_at FROM rb_group WHERE lane BETWEEN :lane AND :lane
    ORDER BY lane DESC, uid DESC LIMIT :newest) newest
WHERE worker = :worker AND created_at > :time"""


def last_given_up(tx: ReadTransaction, buffer: str, task: str | None = None) -> GaveUp | None:
    """Return the last failed wait of the last day, of one task or of all.

    Waits are left out whose worker has since drawn (or put, if it waited for room), or waits again.
    """
    earliest, live = tx.seconds() - _DAY, tx.seconds() - LIVE_SECONDS
    rows = tx.rows(_GAVE_UP, buffer=buffer, kind=str(EventKind.GAVE_UP), earliest=earliest, most=_EVENTS)
    found = [GaveUp(row["worker"] or "", row["task_name"], time_of(row["time"]), row["detail"] or "") for row in rows]
    signs = read_signs(tx, buffer, earliest)
    for row in signs:
        if row["ended"] is None and row["seen"] <= live:
            found += [_killed(row, one, task) for one in row["waits"]]
    for ended in sorted(found, key=lambda one: one.time, reverse=True):
        if task in (None, ended.task_name) and not _went_on(tx, buffer, ended, signs):
            return ended
    return None


def _killed(row: dict[str, Any], wait: dict[str, Any], task: str | None) -> GaveUp:
    wants = list(wait["wants"])
    detail = f"after at least {lasted(wait['kind'], row['seen'] - wait['since'])}: {wait['reason']}"
    one_task = task if task in wants else wants[0] if wants else None
    return GaveUp(row["name"], one_task, time_of(row["seen"]), detail, killed=True)


def _went_on(tx: ReadTransaction, buffer: str, ended: GaveUp, signs: Sequence[dict[str, Any]]) -> bool:
    about = {"worker": ended.worker, "time": ended.time.timestamp(), "newest": _NEWEST}
    kind, time, live = kind_of_wait(ended.detail), ended.time.timestamp(), tx.seconds() - LIVE_SECONDS
    same = [row for row in signs if row["name"] == ended.worker]
    if any(one["since"] >= time for row in same if row["ended"] is None and row["seen"] > live for one in row["waits"]):
        return True
    drew = any(did_since(row, "taken", time) for row in same)
    if kind != "room" and (drew or tx.value(_DREW, **about, buffer=buffer)):
        return True
    if kind == "groups":
        return False
    lanes, put = tx.values(_LANES, buffer=buffer), any(did_since(row, "groups", time) for row in same)
    return put or any(tx.value(_PUT_INTO, **about, lane=lane) for lane in lanes)
