"""The overview page: groups, rates and waits; the pages of checkpoints and events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

from replaybuf.storage.sql.inspection.group_metadata import buffers_of, check_buffer
from replaybuf.storage.sql.inspection.reader import ReadTransaction
from replaybuf.storage.sql.inspection.run_records import newest
from replaybuf.values.rollouts.statuses import Status
from replaybuf.view.columns import CHECKPOINTS, value_of
from replaybuf.view.overview import EVENTS, TASKS, Overview, event_text, rates_of, read_events, read_overview
from replaybuf.view.wait_reasons import DrawQuestion, read_waits
from replaybuf.web.ask import LARGEST, Ask
from replaybuf.web.html_tables import table_of
from replaybuf.web.plots import Across, Plot, lines

_HOURS = ("6", "1", "24", "48")
STATUS_CLASSES = {str(status): f"status-{status}" for status in Status}

Points = list[tuple[float, float]]


def show_overview(tx: ReadTransaction, ask: Ask) -> dict[str, Any]:
    """Return the overview with its plots and the table of tasks, and the current waits."""
    buffer, task, now = ask.text("buffer"), ask.text("task"), tx.now()
    hours = int(ask.choice("hours", _HOURS))
    view = read_overview(tx, buffer, task, now - timedelta(hours=hours))
    found = waits_of(tx, buffer, task)

    def groups(row: Any) -> str:
        return ask.link("/groups", task=row["task_name"], buffer=row["buffer"] if found["several"] else buffer)

    def of_status(status: str) -> Callable[[Any], str | None]:
        return lambda row: f"{groups(row)}&status={status}" if row[status] else None

    statuses = {str(one): of_status(str(one)) for one in Status if one != Status.ARCHIVED}
    shown = [one for one in TASKS if found["several"] or one.name != "buffer"]
    links = {"task_name": groups, "buffer": lambda row: ask.link("", buffer=row["buffer"]), **statuses}
    return {
        "hours": hours,
        "hours_offered": sorted(map(int, _HOURS)),
        "view": view,
        "plots": _plots(view),
        "table": table_of("Groups by task and status", view.tasks, shown, ask, now, links=links),
        "events": [(one, event_text(one)) for one in view.events],
        **found,
    }


def _plots(view: Overview) -> list[Plot]:
    """Return the plots, which share the axis of times at which there was a run."""
    history, rates = view.history, rates_of(view.history)
    began = min((one.time for one in history), default=None)
    drawn = [one for one in view.batches if began is not None and one["taken_at"] >= began]
    times = [one.time for one in history] + [one["taken_at"] for one in drawn]
    across = Across(low=min(times).timestamp(), high=max(times).timestamp()) if times else Across()

    def of_draws(**fields: str) -> dict[str, Points]:
        return {name: _over_time(drawn, field) for name, field in fields.items()}

    def counted(by: str) -> dict[str, Points]:
        names = sorted({name for minute in history for name, n in value_of(minute, by).items() if n})
        return {name: [(one.time.timestamp(), value_of(one, by).get(name, 0)) for one in history] for name in names}

    rate = {name: sorted((time.timestamp(), value_of(one, name)) for time, one in rates) for name in ("put", "drawn")}
    plots: list[Plot | None] = [
        lines("Groups a minute", rate, {"put": "s0", "drawn": "s1"}, across=across),
        lines("Groups by status", counted("statuses"), STATUS_CLASSES, across=across),
        lines("Groups by task", counted("tasks"), across=across),
        lines("Mean reward of draws", of_draws(mean="reward"), across=across, fitted=True),
        lines("Reward of draws", of_draws(mean="reward", min="min_reward", max="max_reward"), across=across),
        lines("Staleness of draws", of_draws(mean="staleness", max="max_staleness"), across=across),
    ]
    return [one for one in plots if one]


def _over_time(draws: Iterable[Any], name: str) -> Points:
    return sorted((row["taken_at"].timestamp(), float(row[name])) for row in draws if row[name] is not None)


# Waits, checkpoints, events; and the buffer of a page

_MOST_WAITS = 50


def waits_of(tx: ReadTransaction, buffer: str | None, task: str | None = None) -> dict[str, Any]:
    """Return the waits, those of buffers in which somebody waits first, their number, and whether there are several
    buffers. A buffer without waits has answers about a hypothetical draw, with `asked`."""
    found = read_waits(tx, buffer, DrawQuestion(task))
    rows = [(one, not of.somebody_waits) for of in found for one in of.waits]
    rows.sort(key=lambda row: row[1])
    return {
        "waits": [{**one, "asked": asked} for one, asked in rows[:_MOST_WAITS]],
        "waiting": sum(not asked for _, asked in rows),
        "several": len(found) > 1,
    }


_MOST_ROWS = 10_000


def show_checkpoints(tx: ReadTransaction, ask: Ask) -> dict[str, Any]:
    """Return the table of the checkpoints, newest first."""
    rows = newest(tx, "checkpoints", ask.text("buffer"), _MOST_ROWS)
    links = {"step": lambda row: ask.link("/steps", before=row["step"] + 1)}
    return {"table": table_of("Checkpoints", rows, CHECKPOINTS, ask, tx.now(), usual="-created_at", links=links)}


_EVENTS_SHOWN = 100
#: The columns by which events are filtered, and their parameters.
_CHOSEN = {"kind": "kind", "task_name": "task", "worker": "worker"}


def show_events(tx: ReadTransaction, ask: Ask) -> dict[str, Any]:
    """Return a page of events, newest first, filtered by kind, task and worker, with links to those of one kind."""
    given = {column: text for column, name in _CHOSEN.items() if (text := ask.text(name)) is not None}
    conditions = ["id < :before", *(f"{column} = :{column}" for column in given)]
    before = ask.number("before", LARGEST)
    found = read_events(tx, ask.text("buffer"), _EVENTS_SHOWN + 1, *conditions, before=before, **given)
    rows = found[:_EVENTS_SHOWN]
    links = {
        "what": lambda row: ask.link("", kind=row["kind"], before=None),
        "uids": lambda row: ask.link(f"/groups/{row['uids'][0]}") if row["uids"] else None,
    }
    return {
        "kind": ask.text("kind"),
        "next": rows[-1]["id"] if len(found) > _EVENTS_SHOWN else None,
        "table": table_of("Events", rows, EVENTS, ask, tx.now(), sorts=False, links=links),
    }


def one_buffer(tx: ReadTransaction, ask: Ask) -> tuple[str, Sequence[str]]:
    """Return the requested buffer, or the first, and the names of all buffers. Raises InputError."""
    buffer, buffers = ask.text("buffer"), buffers_of(tx)
    check_buffer(tx, buffer)
    return buffer or next(iter(buffers), "default"), buffers
