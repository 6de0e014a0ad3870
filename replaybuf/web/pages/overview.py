"""The overview page: groups, rates and waits; the pages of checkpoints and events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

from replaybuf import units
from replaybuf.buffer.metrics import of_tasks
from replaybuf.rollouts.rollout import Status
from replaybuf.rules.circumstances import in_force
from replaybuf.rules.transitions import Tally, rate
from replaybuf.storage.sql.inspection.groups import buffers_of, check_buffer
from replaybuf.storage.sql.inspection.measures import list_places, tallies_of
from replaybuf.storage.sql.inspection.reader import ReadTransaction
from replaybuf.storage.sql.inspection.run_records import history_of, last_batches, last_sign_of, newest
from replaybuf.storage.sql.inspection.waits import DrawQuestion, explain, newest_groups
from replaybuf.units import time_of
from replaybuf.web.ask import LARGEST, Ask, facet_of, listed
from replaybuf.web.plots import BARS, Plot, areas, histogram, lines, whole_bins

#: The sortable columns of tasks, besides the numbers of groups of each status.
_TASKS = (
    *("task", "buffer", "leased", "archived", "made", "prompts", "sampled_new", "sampled_again", "expired"),
    "evicted",
)
_HOURS = ("6", "1", "24", "48")
_EVENTS, _BATCHES = 8, 200
_LAST_SECOND = 2**36
#: Readings of the history are a minute apart while a process has the buffer open.
_GAP_MINUTES = 3
_DRAWN = ("sampled_new", "sampled_again")
#: A buffer, a time, and the buffer's figures by task at that time.
_Reading = tuple[str, datetime, Mapping[str, Any]]
STATUS_CLASSES = {str(status): f"status-{status}" for status in Status}


def read_overview(tx: ReadTransaction, ask: Ask) -> dict[str, Any]:
    """Return the groups, totals and rates of each task, the history of the last hours, and the current waits."""
    buffer, task = ask.text("buffer"), ask.text("task")
    hours = int(ask.choice("hours", _HOURS))
    now = tx.now()
    first, end = _range(ask, now, hours)
    tallies = tallies_of(tx, buffer)
    figures = {name: of_tasks(of_buffer) for name, of_buffer in tallies.items()}
    last = last_sign_of(tx, buffer, now)
    # Changes since the last reading of the history were made before the last process ended.
    ends = [now] if last is None else [max(last.time, first), now]
    readings = [one for one in history_of(tx, buffer, first.timestamp()) if one[1] <= end]
    noted = max((time for _, time, _ in readings), default=first)
    later = [time for time in ends if time <= end and (time > noted or not readings)]
    history = _of_task([*readings, *((name, time, of) for time in later for name, of in figures.items())], task)
    return {
        "last_worker": last and last.worker,
        "hours": hours,
        "tasks": [
            {"buffer": name, "task": one, **more, "prompts": tallies[name].get((one, Status.INIT, Tally.PUT), 0)}
            for name, of in figures.items()
            for one, more in of.items()
        ],
        "rates": _rates_now(history),
        "bytes": tx.database_bytes(),
        "places": list_places(tx),
        **read_waits(tx, buffer, task),
        "newest": newest_groups(tx, buffer, task),
        "batches": [
            {**one, "taken_at": time_of(one["taken_at"])}
            for one in last_batches(tx, buffer, _BATCHES, until=end.timestamp())[::-1]
        ],
        "history": history,
        "checkpoint": next(iter(newest(tx, "checkpoints", buffer, 1)), None),
        "events": newest(tx, "events", buffer, _EVENTS),
    }


def _range(ask: Ask, now: datetime, hours: int) -> tuple[datetime, datetime]:
    """Return the time range of the plots: that of the URL, or else the last hours. Raises InputError."""
    first, last = (ask.number(name, most=_LAST_SECOND) for name in ("from", "to"))
    if first is None:
        return now - timedelta(hours=hours), now
    return time_of(first), now if last is None else min(now, time_of(last + 1))


def _of_task(history: Sequence[_Reading], task: str | None) -> list[dict[str, Any]]:
    """Return for each time the groups by status and by task, and the cumulative puts and draws.

    A buffer without a reading at a time, because no process had it open, counts with its previous one, or its first.
    """
    known = {buffer: tasks for buffer, _, tasks in reversed(history)}
    found: dict[datetime, dict[str, Any]] = {}
    for buffer, time, tasks in history:
        known[buffer] = tasks
        found[time] = _reading_of(known.values(), task)
    return [{"time": time, **reading} for time, reading in found.items()]


def _reading_of(buffers: Iterable[Mapping[str, Any]], task: str | None) -> dict[str, Any]:
    statuses: dict[str, int] = defaultdict(int)
    of_tasks: dict[str, int] = defaultdict(int)
    put = drawn = 0
    for tasks in buffers:
        for name, numbers in tasks.items():
            if task not in (None, name):
                continue
            for status, n in numbers.get("buffered", {}).items():
                statuses[status] += n
                of_tasks[name] += n
            put += numbers.get("put", 0)
            drawn += sum(numbers.get(one, 0) for one in _DRAWN)
    return {"statuses": statuses, "tasks": of_tasks, "put": put, "drawn": drawn}


def _rates(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return puts and draws per minute between consecutive readings; never negative (after a restore).

    Where nobody read for minutes, as after the end of a run, the rate holds from the beginning of the gap.
    """
    found = []
    for before, after in pairwise(history):
        minutes = (after["time"] - before["time"]).total_seconds() / 60
        rates = {name: max(0, after[name] - before[name]) / minutes for name in ("put", "drawn")}
        begins = [before["time"] + timedelta(seconds=1)] if minutes > _GAP_MINUTES else []
        found += [{"time": time, **rates} for time in (*begins, after["time"])]
    return found


def _rates_now(history: list[dict[str, Any]]) -> dict[str, float] | None:
    """Return puts and draws per minute, over the last minute."""

    def of(name: str) -> float | None:
        return rate([(one["time"].timestamp(), one[name]) for one in history])

    put, drawn = of("put"), of("drawn")
    return None if put is None or drawn is None else {"put": 60 * put, "drawn": 60 * drawn}


# Plots


def draw_overview(data: dict[str, Any], ask: Ask) -> dict[str, Any]:
    """Return the plots, and the statuses that any task has."""
    history, batches, newest_ones = data["history"], data["batches"], data["newest"]
    rates, zoomed = _rates(history), ask.number("from") is not None
    drawn = [one for one in batches if not zoomed or (history and one["taken_at"] >= history[0]["time"])]
    plots: list[Plot | None] = [
        lines(
            "Groups a minute",
            {"put": _over_time(rates, "put"), "drawn": _over_time(rates, "drawn")},
            {"put": "s0", "drawn": "s1"},
        ),
        areas("Groups by status", _stacked(history, "statuses"), STATUS_CLASSES),
        areas("Groups by task", _stacked(history, "tasks")),
        lines("Mean reward of draws", _of_batches(drawn, "reward"), fitted=True),
        lines("Reward of draws", _of_batches(drawn, "reward", "min_reward", "max_reward")),
        lines("Staleness of draws", _of_batches(drawn, "staleness", "max_staleness")),
        histogram("Rewards", units.bins(newest_ones.rewards, BARS), "completed groups put last"),
        histogram("Staleness", whole_bins(newest_ones.staleness), "completed groups put last"),
    ]
    present = [s for s in map(str, Status) if any(one["buffered"].get(s) for one in data["tasks"])]
    rows = [
        one | {"made": one["put"] - one["prompts"]} | {f"in_{s}": one["buffered"].get(s, 0) for s in present}
        for one in data["tasks"]
    ]
    return {
        "plots": [one for one in plots if one],
        "page": listed(rows, ask, (*_TASKS, *(f"in_{s}" for s in present))),
        "statuses": present,
        "hours_offered": sorted(map(int, _HOURS)),
    }


def _over_time(rows: Iterable[Mapping[str, Any]], name: str, time: str = "time") -> list[tuple[float, float]]:
    return sorted((row[time].timestamp(), float(row[name])) for row in rows if row[name] is not None)


def _of_batches(batches: list[dict[str, Any]], *names: str) -> dict[str, list[tuple[float, float]]]:
    shown = {"reward": "mean", "staleness": "mean", "min_reward": "min", "max_reward": "max", "max_staleness": "max"}
    return {shown[name]: _over_time(batches, name, "taken_at") for name in names}


def _stacked(history: list[dict[str, Any]], by: str) -> dict[str, list[tuple[float, float]]]:
    names = sorted({name for minute in history for name in minute[by]})
    return {name: [(one["time"].timestamp(), one[by].get(name, 0)) for one in history] for name in names}


# Waits, checkpoints, events; and the buffer of a page

_MOST_WAITS = 50


def read_waits(tx: ReadTransaction, buffer: str | None, task: str | None = None) -> dict[str, Any]:
    """Return a row for each wait, the longest first, their number, and whether there are several buffers.

    A buffer without waits has rows for a hypothetical draw of one group, with `asked`.
    """
    found = explain(tx, buffer, DrawQuestion(task), asked=False)
    rows = [
        {
            **wait.row(one.buffer),
            "asked": one.asked,
            "facts": [fact.text for fact in wait.diagnosis.facts],
            "limits": (wait.limits and in_force(wait.limits)) or {},
        }
        for one in found
        for wait in one.waits
    ]
    rows.sort(key=lambda row: row["asked"])
    return {"waits": rows[:_MOST_WAITS], "waiting": sum(not row["asked"] for row in rows), "several": len(found) > 1}


_MOST_ROWS = 10_000
_CHECKPOINTS = ("step", "buffer", "created_at", "groups", "bytes")


def read_checkpoints(tx: ReadTransaction, ask: Ask) -> dict[str, Any]:
    """Return the checkpoints, newest first."""
    return {"rows": newest(tx, "checkpoints", ask.text("buffer"), _MOST_ROWS)}


def draw_checkpoints(data: dict[str, Any], ask: Ask) -> dict[str, Any]:
    """Return a page of the checkpoints in the requested order."""
    return {"page": listed(data["rows"], ask, _CHECKPOINTS)}


_EVENTS_SHOWN = 100
#: The columns by which events are filtered, and their parameters.
_CHOSEN = {"kind": "kind", "task_name": "task", "worker": "worker"}
_COUNTED = "SELECT {column}, count(*) FROM events WHERE {where} GROUP BY 1"


def read_events(tx: ReadTransaction, ask: Ask) -> dict[str, Any]:
    """Return a page of events, newest first, filtered by kind, task and worker; and the number of events of each.

    `counts` of a column are those with the filters on the other columns.
    """
    given = {column: text for column, name in _CHOSEN.items() if (text := ask.text(name)) is not None}
    conditions = ["id < :before", *(f"{column} = :{column}" for column in given)]
    before = ask.number("before", LARGEST)
    found = newest(tx, "events", ask.text("buffer"), _EVENTS_SHOWN + 1, *conditions, before=before, **given)
    rows = found[:_EVENTS_SHOWN]
    return {
        "kind": ask.text("kind"),
        "rows": rows,
        "counts": {column: _counts(tx, column, given, ask.text("buffer")) for column in _CHOSEN},
        "next": rows[-1]["id"] if len(found) > _EVENTS_SHOWN else None,
    }


def _counts(tx: ReadTransaction, column: str, given: dict[str, str], buffer: str | None) -> dict[str, int]:
    """Return the number of events by the value of a column, with the filters on the other columns."""
    values = {name: text for name, text in given.items() if name != column}
    if buffer is not None:
        values["buffer"] = buffer
    where = " AND ".join([f"{column} IS NOT NULL", *(f"{name} = :{name}" for name in values)])
    return {value: int(n) for value, n in tx.tuples(_COUNTED.format(column=column, where=where), **values)}


def draw_events(data: dict[str, Any], ask: Ask) -> dict[str, Any]:
    """Return the facets of the events."""
    counts = {_CHOSEN[column]: numbers for column, numbers in data["counts"].items()}
    return {"facets": [facet_of(name, numbers, ask, parameter=name) for name, numbers in counts.items()]}


def one_buffer(tx: ReadTransaction, ask: Ask) -> tuple[str, list[str]]:
    """Return the requested buffer, or the first, and the names of all buffers. Raises InputError."""
    buffer, buffers = ask.text("buffer"), buffers_of(tx)
    check_buffer(tx, buffer)
    return buffer or next(iter(buffers), "default"), buffers
