"""Who waits for what in each buffer, and why; and why a draw issued now would block.

Polled often, so everything is read by index or from small tables, whatever the number of groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from replaybuf.common import units
from replaybuf.common.units import time_of
from replaybuf.rules.causes import diagnose
from replaybuf.rules.circumstances import Circumstances, Held, Taking, Wait, Worker
from replaybuf.rules.transitions import Tally, of_tasks
from replaybuf.storage.reports import EventKind
from replaybuf.storage.sql.inspection.group_metadata import DEFAULT, check_buffer, opened_buffers
from replaybuf.storage.sql.inspection.reader import Transaction
from replaybuf.storage.sql.inspection.run_records import newest
from replaybuf.storage.sql.inspection.wait_facts import read_circumstances, read_limits, with_matches
from replaybuf.values.rollouts.statuses import Status


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

    Unless `somebody_waits`, `waits` is the answer about a hypothetical draw: no process waits, or a question was asked.
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
    def nobody_draws(self) -> dict[str, Any] | None:
        """The taker that was seen last, if no taker is alive and it didn't end by itself."""
        takers = [taker for taker in self.workers if taker["taken"]]
        if not takers or any(taker["state"] == "alive" for taker in takers):
            return None
        last_taker = max(takers, key=lambda taker: taker["ended_at"] or taker["seen_at"])
        return None if last_taker["ended_at"] is not None else last_taker


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
    waits = [] if asked else [wait for wait in about.waits if question.task is None or question.task in wait.wants]
    shown = sorted(waits, key=lambda wait: wait.kind != "groups") or [_answer(tx, buffer, question, about)]
    gave_up = newest(tx, "events", buffer, 1, "kind = :kind", kind=str(EventKind.GAVE_UP))
    return Waits(
        buffer,
        time_of(about.now),
        bool(waits),
        [_explain_wait(tx, buffer, wait, about) for wait in shown],
        [
            _task(about, buffer, task, numbers)
            for task, numbers in of_tasks(about.tallies).items()
            if question.task is None or task == question.task
        ],
        [_row(lease) for lease in about.held],
        [_row(worker) | {"state": about.state_of(worker)} for worker in about.workers],
        None if about.trainer is None else asdict(about.trainer),
        None if about.last_take is None else _row(about.last_take),
        next(({**event, "time": event["happened_at"]} for event in gave_up), None),
    )


_TIMES = ("started_at", "seen_at", "ended_at", "until", "time", "since", "deadline")


def _row(record: Held | Worker | Taking | Wait) -> dict[str, Any]:
    return {name: time_of(value) if name in _TIMES else value for name, value in asdict(record).items()}


def _explain_wait(tx: Transaction, buffer: str, wait: Wait, about: Circumstances) -> dict[str, Any]:
    diagnosis = asdict(diagnose(wait, with_matches(tx, buffer, wait, about)))
    limits = None if wait.limits is None else wait.limits.in_force
    return {**diagnosis, "buffer": buffer, **_row(wait), "limits": limits}


def _answer(tx: Transaction, buffer: str, question: DrawQuestion, about: Circumstances) -> Wait:
    """Return the draw that a question is about, with the limits of a waiting process, or recorded ones."""
    limits = next((wait.limits for wait in about.waits if wait.limits is not None), None) or read_limits(tx, buffer)
    tasks = [question.task] if question.task is not None else sorted({task for task, _, _ in about.tallies})
    wants = dict.fromkeys(tasks or ["any task"], question.size)
    return Wait(wants, status=question.status, query=question.query, limits=limits)


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


def idle_sentence(waits: Waits, *, several: bool) -> str | None:
    """Return the sentence about a buffer whose last consumer was killed, or is silent; None about others."""
    if waits.somebody_waits or (taker := waits.nobody_draws) is None:
        return None
    end = f" of {waits.buffer}" if several else ""
    return f"Nobody draws{end}; {taker['name']} gave its last sign of life {units.ago(taker['seen_at'], waits.now)}"
