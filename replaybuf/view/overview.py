"""The state of a database in one look: rates, the last hours, draws, and what happened."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

from replaybuf.common import units
from replaybuf.common.units import time_of
from replaybuf.rules.transitions import of_tasks
from replaybuf.storage.reports import EventKind
from replaybuf.storage.sql.inspection.measures import list_places, tallies_of
from replaybuf.storage.sql.inspection.reader import Transaction
from replaybuf.storage.sql.inspection.run_records import history_of, last_batches, newest
from replaybuf.storage.sql.inspection.wait_facts import last_worker

_EVENTS, _BATCHES = 20, 200
_DRAW_TOTALS = ("sampled_new", "sampled_again")
#: A buffer, a time, and the buffer's figures by task at that time.
_Reading = tuple[str, datetime, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Minute:
    """The groups by status at a time, and the puts and draws up to then."""

    time: datetime
    statuses: dict[str, int]
    put: int
    drawn: int


@dataclass(frozen=True, slots=True)
class Rates:
    """Groups put and drawn a minute."""

    put: float
    drawn: float


@dataclass(frozen=True, slots=True)
class Overview:
    """The history of some hours and the rates of the last minutes.

    `batches` are the last draws, `events` the last ones that people should know of; `wal_bytes` of the `bytes` are a
    SQLite file's WAL.
    """

    rates: Rates | None
    history: list[Minute]
    batches: list[dict[str, Any]]
    checkpoint: dict[str, Any] | None
    events: list[dict[str, Any]]
    bytes: int
    wal_bytes: int
    places: list[dict[str, Any]]


def read_overview(tx: Transaction, buffer: str | None, task: str | None, first: datetime) -> Overview:
    """Return the overview of one buffer or of all; the history, from `first` on, is of one task or of all."""
    now = tx.now()
    figures = {name: of_tasks(tallies) for name, tallies in tallies_of(tx, buffer).items()}
    worker = last_worker(tx, buffer)
    # Changes since the last reading of the history were made before the last process ended.
    ends = [now] if worker is None else [max(time_of(worker.left_at), first), now]
    readings = history_of(tx, buffer, first.timestamp())
    noted = max((time for _, time, _ in readings), default=first)
    later = [time for time in ends if time > noted or not readings]
    history = _minutes([*readings, *((name, time, tasks) for time in later for name, tasks in figures.items())], task)
    batches = last_batches(tx, buffer, _BATCHES)[::-1]
    return Overview(
        rates_now(history),
        history,
        [{**batch, "taken_at": time_of(batch["taken_at"])} for batch in batches],
        next(iter(newest(tx, "checkpoints", buffer, 1)), None),
        read_events(tx, buffer, _EVENTS),
        *tx.database_bytes(),
        list_places(tx),
    )


def _minutes(history: Sequence[_Reading], task: str | None) -> list[Minute]:
    """Return for each time the groups by status, and the cumulative puts and draws.

    A buffer without a reading at a time, because no process had it open, counts with its previous one, or its first.
    """
    latest = {buffer: tasks for buffer, _, tasks in reversed(history)}
    minutes: dict[datetime, Minute] = {}
    for buffer, time, tasks in history:
        latest[buffer] = tasks
        minutes[time] = _minute(time, latest.values(), task)
    return [*minutes.values()]


def _minute(time: datetime, buffers: Iterable[Mapping[str, Any]], task: str | None) -> Minute:
    statuses = defaultdict[str, int](int)
    put = drawn = 0
    for tasks in buffers:
        for name, numbers in tasks.items():
            if task not in (None, name):
                continue
            for status, n in numbers.get("buffered", {}).items():
                statuses[status] += n
            put += numbers.get("put", 0)
            drawn += sum(numbers.get(total, 0) for total in _DRAW_TOTALS)
    return Minute(time, dict(statuses), put, drawn)


def rates_of(history: Sequence[Minute]) -> list[tuple[datetime, Rates]]:
    """Return puts and draws per minute between consecutive readings; never negative (after a restore)."""
    series = []
    for before, after in pairwise(history):
        minutes = (after.time - before.time).total_seconds() / 60
        rates = Rates(max(0, after.put - before.put) / minutes, max(0, after.drawn - before.drawn) / minutes)
        series.append((after.time, rates))
    return series


def rates_now(history: Sequence[Minute]) -> Rates | None:
    """Return puts and draws per minute since the newest reading that is a minute old; None if there is none.

    Of a young run, most of what it did may have been before its first reading.
    """
    latest = history[-1:]
    before = [minute for minute in history if latest[0].time - minute.time >= timedelta(minutes=1)][-1:]
    return rates_of([*before, *latest])[-1][1] if before else None


# Events

#: Kinds of events that every run has, which tell nobody anything.
_ROUTINE_KINDS = "', '".join((EventKind.CHECKPOINT, EventKind.CHECKPOINT_DROPPED, EventKind.LEFT_OUT))


def read_events(tx: Transaction, buffer: str | None, size: int) -> list[dict[str, Any]]:
    """Return the newest events of one buffer or of all, without those that every run has."""
    return newest(tx, "events", buffer, size, f"kind NOT IN ('{_ROUTINE_KINDS}')")


def event_text(event: Mapping[str, Any]) -> str:
    """Return an event in a sentence, without its time."""
    kind, step, task, worker, groups = (event[name] for name in ("kind", "step", "task_name", "worker", "groups"))
    text = kind.replace("_", " ")
    text += f" to step {step}" if kind == EventKind.RESTORED and step is not None else ""
    details = [units.number_of(groups, "group")] if groups and kind != EventKind.DATASET_ENDED else []
    sentence = ", ".join([" ".join([text, *([task] if task else [])]), *details, *([worker] if worker else [])])
    return f"{sentence}: {event['detail']}" if event["detail"] else sentence
