"""The first page: what there is, how fast it comes and goes, and who waits for what."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import datetime
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from replaybuf.buffer.metrics import of_tasks
from replaybuf.rollouts.rollout import Status
from replaybuf.storage.sql.inspection.look import Look
from replaybuf.storage.sql.inspection.recent import history_of, newest_batches, newest_groups, tallies_of
from replaybuf.storage.sql.inspection.record_pages import CHECKPOINTS, EVENTS, newest
from replaybuf.web.ask import Ask
from replaybuf.web.pages.waits import read_waits
from replaybuf.web.plots import Plot, areas, bins, histogram, lines, whole_bins

if TYPE_CHECKING:
    from replaybuf.storage.sql.inspection.reader import Transaction

_HOURS = ("6", "1", "24", "48")
_EVENTS = 8
_DRAWN = ("sampled_new", "sampled_again", "taken_unfinished")
STATUS_CLASSES = {str(status): f"status-{status}" for status in Status}


def read_overview(tx: Transaction, ask: Ask) -> dict[str, Any]:
    """Return the numbers of groups, totals and rates of each task, the last hours, and who waits."""
    buffer, task = ask.text("buffer"), ask.text("task")
    hours = int(ask.choice("hours", _HOURS))
    look = Look.over(tx)
    now = look.now()
    tasks = _by_task(tallies_of(tx, buffer))
    history = _of_task(history_of(tx, buffer, now.timestamp() - hours * 3600), task)
    return {
        "now": now,
        "hours": hours,
        "tasks": tasks,
        "rates": _rates_now(history),
        "bytes": look.database_bytes(),
        **read_waits(tx, buffer, task),
        "newest": newest_groups(tx, buffer, task),
        "batches": newest_batches(tx, buffer),
        "history": history,
        "checkpoint": next(iter(newest(look, CHECKPOINTS, buffer, 1)), None),
        "events": newest(look, EVENTS, buffer, _EVENTS),
    }


def _by_task(tallies: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {"buffer": buffer, "task": task, **numbers}
        for buffer, of_buffer in tallies.items()
        for task, numbers in of_tasks(of_buffer).items()
    ]


def _of_task(history: Iterable[tuple[str, datetime, Mapping[str, Any]]], task: str | None) -> list[dict[str, Any]]:
    """Return for each minute the groups by status and by task, and what was put and drawn until then."""
    minutes: dict[datetime, dict[str, Any]] = {}
    for _, time, tasks in history:
        minute = minutes.setdefault(
            time, {"time": time, "statuses": defaultdict(int), "tasks": defaultdict(int), "put": 0, "drawn": 0}
        )
        for name, numbers in tasks.items():
            if task not in (None, name):
                continue
            for status, n in numbers.get("buffered", {}).items():
                minute["statuses"][status] += n
                minute["tasks"][name] += n
            minute["put"] += numbers.get("put", 0)
            minute["drawn"] += sum(numbers.get(one, 0) for one in _DRAWN)
    return list(minutes.values())


def _rates(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what was put and drawn a minute, between each reading and the one before; a restore counts as none."""
    found = []
    for before, after in pairwise(history):
        minutes = (after["time"] - before["time"]).total_seconds() / 60
        rates = {name: max(0, after[name] - before[name]) / minutes for name in ("put", "drawn")}
        found.append({"time": after["time"], **rates})
    return found


def _rates_now(history: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the groups a minute over the last five minutes of the history."""
    rates = _rates(history[-6:])
    if not rates:
        return None
    return {name: sum(one[name] for one in rates) / len(rates) for name in ("put", "drawn")}


# Plots


def draw_overview(data: dict[str, Any], ask: Ask) -> dict[str, Any]:
    """Return the plots, and the statuses that any task has."""
    history, batches, newest_ones = data["history"], data["batches"], data["newest"]
    rates = _rates(history)
    plots: list[Plot | None] = [
        lines(
            "Groups a minute",
            {"put": _over_time(rates, "put"), "drawn": _over_time(rates, "drawn")},
            {"put": "s0", "drawn": "s1"},
        ),
        areas("Groups by status", _stacked(history, "statuses"), STATUS_CLASSES),
        areas("Groups by task", _stacked(history, "tasks")),
        lines("Reward of draws", _of_batches(batches, "reward", "min_reward", "max_reward")),
        lines("Staleness of draws", _of_batches(batches, "staleness", "max_staleness")),
        histogram("Rewards", bins(newest_ones.rewards), "completed groups put last"),
        histogram("Staleness", whole_bins(newest_ones.staleness), "completed groups put last"),
    ]
    present = [s for s in map(str, Status) if any(one["buffered"].get(s) for one in data["tasks"])]
    return {
        "plots": [one for one in plots if one],
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
