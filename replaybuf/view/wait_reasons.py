"""Who waits for what in each buffer, and why; and why a draw issued now would block.

Polled often, so everything is read by index or from small tables, whatever the number of groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime
from typing import Any

from replaybuf.common import units
from replaybuf.common.units import joined, listed, time_of
from replaybuf.rules.causes import diagnose
from replaybuf.rules.circumstances import Circumstances, Held, Taking, Wait, Worker
from replaybuf.rules.diagnosis import Reason
from replaybuf.rules.limits import Limits
from replaybuf.rules.transitions import Tally, of_tasks
from replaybuf.storage.reports import EventKind
from replaybuf.storage.sql.inspection.group_metadata import DEFAULT, check_buffer, opened_buffers
from replaybuf.storage.sql.inspection.reader import Transaction
from replaybuf.storage.sql.inspection.run_records import newest
from replaybuf.storage.sql.inspection.wait_facts import read_circumstances, read_limits, with_matches
from replaybuf.values.rollouts.statuses import Status
from replaybuf.view.columns import Column, columns


@dataclass(frozen=True, slots=True)
class DrawQuestion:
    """A hypothetical draw to explain: from each task, or from the one it names."""

    task: str | None = None
    size: int = 1
    status: Status = Status.COMPLETED
    query: str | None = None


@dataclass(frozen=True, slots=True)
class Waits:
    """The waits of a buffer, longest first and consumers before others, and what there is about them.

    Unless `somebody_waits`, `waits` are answers about hypothetical draws: no process waits, or a question was asked.
    Each has the fields of `Diagnosis` and of `Wait`; its `limits` are those in force that aren't the defaults, None if
    they are unknown.
    `tasks` has a row for each task: its groups by status, its totals, and the completed groups put in the last hour.
    `leases`, `workers` and `last_draw` have the fields of `Held`, `Worker` (with its state) and `Taking`.
    `last_timeout` is the last wait that timed out: its worker, task and time, and in `detail` how long it was and why.
    """

    buffer: str
    now: datetime
    somebody_waits: bool
    waits: list[dict[str, Any]]
    tasks: list[dict[str, Any]]
    leases: list[dict[str, Any]]
    workers: list[dict[str, Any]]
    trainer: dict[str, Any] | None
    last_draw: dict[str, Any] | None
    last_timeout: dict[str, Any] | None

    @property
    def gave_up(self) -> bool:
        """Whether the last wait timed out, no other is running, and no draw was committed since."""
        gave_up, drawn = self.last_timeout, self.last_draw
        return bool(gave_up and not self.somebody_waits and (drawn is None or drawn["time"] < gave_up["time"]))

    @property
    def nobody_draws(self) -> dict[str, Any] | None:
        """The taker that was seen last, if no taker is alive and it didn't end by itself."""
        takers = [one for one in self.workers if one["taken"]]
        if not takers or any(one["state"] == "alive" for one in takers):
            return None
        last = max(takers, key=lambda one: one["ended_at"] or one["seen_at"])
        return None if last["ended_at"] is not None else last


def read_waits(
    tx: Transaction, buffer: str | None, question: DrawQuestion = DrawQuestion(), *, asked: bool = False
) -> list[Waits]:
    """Explain the waits of one buffer or of all; only those for the question's task, if it names one.

    Where no process waits, or everywhere with `asked`, the question is answered instead. Raises
    InputError when only other buffers exist.
    """
    check_buffer(tx, buffer)
    names = opened_buffers(tx) if buffer is None else [buffer]
    return [_read(tx, name, question, asked) for name in names or [DEFAULT]]


def _read(tx: Transaction, buffer: str, question: DrawQuestion, asked: bool) -> Waits:
    about = read_circumstances(tx, buffer)
    waits = [] if asked else [one for one in about.waits if question.task is None or question.task in one.wants]
    shown = sorted(waits, key=lambda one: one.kind != "groups") or _answers(tx, buffer, question, about)
    gave_up = newest(tx, "events", buffer, 1, "kind = :kind", kind=str(EventKind.GAVE_UP))
    return Waits(
        buffer,
        time_of(about.now),
        bool(waits),
        [_explained(tx, buffer, one, about) for one in shown],
        [
            _task(about, buffer, task, numbers)
            for task, numbers in of_tasks(about.tallies).items()
            if question.task is None or task == question.task
        ],
        [_row(one) for one in about.held],
        [_row(one) | {"state": about.state_of(one)} for one in about.workers],
        None if about.trainer is None else asdict(about.trainer),
        None if about.last_take is None else _row(about.last_take),
        next(({**one, "time": one["happened_at"]} for one in gave_up), None),
    )


_TIMES = ("started_at", "seen_at", "ended_at", "until", "time", "since", "deadline")


def _row(one: Held | Worker | Taking | Wait) -> dict[str, Any]:
    return {name: time_of(value) if name in _TIMES else value for name, value in asdict(one).items()}


def _explained(tx: Transaction, buffer: str, wait: Wait, about: Circumstances) -> dict[str, Any]:
    found = asdict(diagnose(wait, with_matches(tx, buffer, wait, about)))
    limits = None if wait.limits is None else wait.limits.in_force
    return {**found, "buffer": buffer, **_row(wait), "limits": limits}


def _answers(tx: Transaction, buffer: str, question: DrawQuestion, about: Circumstances) -> list[Wait]:
    """Return the draws that a question is about, with the limits of a waiting process, or recorded ones.

    Tasks that lack groups for one cause are in one draw.
    """
    limits = next((one.limits for one in about.waits if one.limits is not None), None) or read_limits(tx, buffer)
    tasks = [question.task] if question.task is not None else sorted({task for task, _, _ in about.tallies})
    draw = Wait({}, status=question.status, query=question.query, limits=limits)
    alike: dict[str, dict[str, int]] = {}
    for task in tasks or ["any task"]:
        one = replace(draw, wants={task: question.size})
        found = diagnose(one, with_matches(tx, buffer, one, about))
        cause = task if found.reason == Reason.READY else found.sentence.partition(": ")[2]
        alike.setdefault(cause, {})[task] = question.size
    return [replace(draw, wants=wants) for wants in alike.values()]


def _task(about: Circumstances, buffer: str, task: str, numbers: Mapping[str, Any]) -> dict[str, Any]:
    prompts = about.count(task, Status.INIT, Tally.PUT)
    return {
        "buffer": buffer,
        "task_name": task,
        **{str(status): about.count(task, status) for status in Status},
        "leased": numbers["leased"],
        "prompts": prompts,
        "made": numbers["put"] - prompts,
        "drawn": numbers["sampled_new"] + numbers["sampled_again"],
        "replays": numbers["sampled_again"],
        "expired_so_far": numbers["expired"],  # `expired` is the number of those in the buffer now
        "evicted": numbers["evicted"],
        "last_hour": about.put(task, Status.COMPLETED, lately=True),
        "last_put": time_of(about.last(task)),
        "refreshed_to": about.steps.get(task),
    }


#: The columns of `Waits.tasks`.
TASKS = [
    *columns("buffer", "task_name", "completed"),
    *(
        Column(str(one), str(one), usual=0, spare=True)
        for one in Status
        if one not in (Status.COMPLETED, Status.ARCHIVED)
    ),
    Column("leased", "leased"),
    Column("archived", "archived", usual=0, spare=True),
    Column("prompts", "prompts", usual=0, spare=True, title="put by a prompt ledger, to be generated"),
    Column("made", "made", spare=True, title="groups put since the beginning, without prompts"),
    Column("drawn", "drawn", spare=True),
    Column("replays", "replays", usual=0, spare=True, title="draws of groups that were drawn before"),
    Column("expired_so_far", "expired so far", usual=0, spare=True, title="since the beginning"),
    Column("evicted", "evicted", usual=0, spare=True),
    Column("last_hour", "last hour", spare=True),
    Column("last_put", "last put", "ago"),
    Column("refreshed_to", "at step", "id", spare=True),
]


#: The share of the groups of a task that have expired and are in the buffer, from which it is said.
_MANY_EXPIRED = 0.2


def expired_sentences(found: Waits) -> list[str]:
    """Return a sentence for each task of whose groups many have expired, and were not generated again."""
    return [
        f"{units.number_of(task['expired'], 'group')} of {task['task_name']} expired before their turn "
        f"({task['expired'] / task['made']:.0%} of those made) and wait to be generated again, by a Sampler; "
        "expired_groups_retryable=False drops such groups, and a capacity below batch size times threshold avoids them"
        for task in found.tasks
        if task["expired"] and task["expired"] >= _MANY_EXPIRED * task["made"] > 0
    ]


def unequal_sentence(found: Waits) -> str | None:
    """Return the settings in which the processes that have the buffer open differ, as a sentence; None if in none."""
    alive = sorted((one for one in found.workers if one["state"] == "alive"), key=lambda one: str(one["name"]))
    defaults, differ = {one.name: one.default for one in fields(Limits)}, []
    for setting in sorted({name for one in alive for name in one["settings"]}):
        whose: dict[str, set[str]] = {}
        for one in alive:
            if setting == "policy" and not one["taken"]:
                continue
            value = one["settings"].get(setting, defaults.get(setting))
            whose.setdefault("none" if value is None else str(value), set()).add(one["name"])
        if len(whose) > 1:
            each = "; ".join(f"{value}: {listed(sorted(names))}" for value, names in whose.items())
            differ.append(f"{setting} ({each})")
    return f"processes differ in {joined(differ)}: give all of a run the same config" if differ else None


def idle_sentence(found: Waits, *, several: bool) -> str | None:
    """Return the sentence about a buffer whose last consumer was killed, or is silent, or whose trainer has finished
    and nobody is left; None about others."""
    if found.somebody_waits:
        return None
    of = f" of {found.buffer}" if several else ""
    if (taker := found.nobody_draws) is not None:
        return f"Nobody draws{of}; {taker['name']} gave its last sign of life {units.ago(taker['seen_at'], found.now)}"
    if found.trainer is None or not found.trainer["finished"] or any(one["state"] == "alive" for one in found.workers):
        return None
    return f"Nobody waits{of}: the trainer has finished, and no process is left"
