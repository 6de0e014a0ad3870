"""Pages of a run: overview, train steps, one step, workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from replaybuf.storage.sql.inspection.group_metadata import buffers_of, check_buffer
from replaybuf.storage.sql.inspection.reader import Transaction
from replaybuf.values.rollouts.statuses import Status
from replaybuf.view.columns import BY_TASK, BY_WORKER, MEMBERS, PROCESSES, STEPS, TASKS, annotated, columns, value_of
from replaybuf.view.overview import Overview, event_text, rates_of, read_overview
from replaybuf.view.steps import no_groups, read_step, read_steps
from replaybuf.view.wait_reasons import DrawQuestion, read_waits
from replaybuf.view.workers import Workers, by_task_columns, read_workers
from replaybuf.web.page_tables import LARGEST, Ask, NotThereError, Table, table_of
from replaybuf.web.plots import Across, Plot, lines

_HOURS = (1, 6, 24, 48)
STATUS_CLASSES = {str(status): f"status-{status}" for status in Status}

Points = list[tuple[float, float]]


def show_overview(tx: Transaction, ask: Ask) -> dict[str, Any]:
    """Return the overview with its plots and the table of tasks, and the current waits."""
    buffer, task, now = ask.text("buffer"), ask.text("task"), tx.now()
    hours = ask.number("hours", 6, least=1, most=48) or 6
    view = read_overview(tx, buffer, task, now - timedelta(hours=hours))
    waits = waits_of(tx, buffer, task)

    def groups(row: Any) -> str:
        return ask.link("/groups", task=row["task_name"], buffer=row["buffer"] if waits["several"] else buffer)

    def of_status(status: str) -> Callable[[Any], str | None]:
        return lambda row: f"{groups(row)}&status={status}" if row[status] else None

    statuses = {str(status): of_status(str(status)) for status in Status if status != Status.ARCHIVED}
    task_columns = [column for column in TASKS if waits["several"] or column.name != "buffer"]
    links = {"task_name": groups, "buffer": lambda row: ask.link("", buffer=row["buffer"]), **statuses}
    return {
        "hours": hours,
        "hours_offered": _HOURS,
        "view": view,
        "plots": _plots_of_overview(view),
        "table": table_of("Groups by task and status", waits["tasks"], task_columns, ask, now, links=links),
        "events": [(event, event_text(event)) for event in view.events],
        **waits,
    }


def _plots_of_overview(view: Overview) -> list[Plot]:
    """Return the plots, which share the axis of times at which there was a run."""
    history, rates = view.history, rates_of(view.history)
    start = min((minute.time for minute in history), default=None)
    draws = [draw for draw in view.batches if start is not None and draw["taken_at"] >= start]
    times = [minute.time for minute in history] + [draw["taken_at"] for draw in draws]
    across = Across(low=min(times).timestamp(), high=max(times).timestamp()) if times else Across()
    statuses = sorted({status for minute in history for status, n in minute.statuses.items() if n})
    groups = {name: [(row.time.timestamp(), row.statuses.get(name, 0)) for row in history] for name in statuses}
    rate = {name: sorted((time.timestamp(), value_of(row, name)) for time, row in rates) for name in ("put", "drawn")}
    return _drawable(
        lines("Groups a minute", rate, {"put": "s0", "drawn": "s1"}, across=across),
        lines("Groups by status", groups, STATUS_CLASSES, across=across),
        *_plots_of_figures([(draw["taken_at"].timestamp(), draw) for draw in draws], across, suffix=" of draws"),
    )


def _plots_of_figures(
    rows: Sequence[tuple[float, Any]], across: Across, suffix: str = "", marks: Mapping[float, str] | None = None
) -> Iterator[Plot | None]:
    """Yield plots of the rewards and the staleness of draws or steps, each with its place on the x axis."""

    def named(**fields: str) -> dict[str, Points]:
        return {name: _points(rows, field) for name, field in fields.items()}

    yield lines(f"Mean reward{suffix}", named(mean="reward"), across=across, fitted=True, marks=marks)
    yield lines(f"Reward{suffix}", named(mean="reward", min="min_reward", max="max_reward"), across=across)
    yield lines(f"Staleness{suffix}", named(mean="staleness", max="max_staleness"), across=across)


def _points(rows: Iterable[tuple[float, Any]], field: str) -> Points:
    return sorted((x, float(value)) for x, row in rows if (value := value_of(row, field)) is not None)


def _drawable(*plots: Plot | None) -> list[Plot]:
    return [plot for plot in plots if plot is not None]


# Waits, and the buffer of a page

_MOST_WAITS = 50


def waits_of(tx: Transaction, buffer: str | None, task: str | None = None) -> dict[str, Any]:
    """Return the waits, those of buffers in which somebody waits first, their number, tasks, workers, and whether there
    are several buffers. A buffer without waits has the answer about a hypothetical draw, with `asked`."""
    answers = read_waits(tx, buffer, DrawQuestion(task))
    rows = [(wait, not answer.somebody_waits) for answer in answers for wait in answer.waits]
    rows.sort(key=lambda row: row[1])
    return {
        "waits": [{**wait, "asked": asked} for wait, asked in rows[:_MOST_WAITS]],
        "waiting": sum(not asked for _, asked in rows),
        "tasks": [task for answer in answers for task in answer.tasks],
        "workers": [worker | {"buffer": answer.buffer} for answer in answers for worker in answer.workers],
        "several": len(answers) > 1,
    }


def one_buffer(tx: Transaction, ask: Ask) -> tuple[str, Sequence[str]]:
    """Return the requested buffer, or the first, and the names of all buffers. Raises InputError."""
    buffer, buffers = ask.text("buffer"), buffers_of(tx)
    check_buffer(tx, buffer)
    return buffer or next(iter(buffers), "default"), buffers


# Steps and workers

#: Maximum number of train steps that are read.
_MOST_STEPS = 1000
_LOWEST_SHOWN = 3


def show_steps(tx: Transaction, ask: Ask) -> dict[str, Any]:
    """Return the train steps of a buffer, newest first, what stands out in them, and plots of rewards and staleness.

    All are of one task or worker, if the URL names it.
    """
    buffer, buffers = one_buffer(tx, ask)
    before, task, worker = ask.number("before", None, least=-LARGEST), ask.text("task"), ask.text("worker")
    view = read_steps(tx, buffer, before=before, limit=_MOST_STEPS, task=task, worker=worker)
    rows = view.rows
    steps = [step for step in rows if not step.undone]
    across = Across(times=False)
    marks = {float(step.step): step.lower for step in steps if step.lower}
    links = {"step": lambda row: ask.link(f"/steps/{row.step}", task=task, worker=worker)}
    return {
        "chosen": buffer,
        "buffers": buffers,
        "view": view,
        "unnamed_count": view.known.without_step,
        "plots": _drawable(*_plots_of_figures([(float(step.step), step) for step in steps], across, marks=marks)),
        "table": table_of("Steps", rows, STEPS, ask, view.now, usual="-step", links=links),
        "fell": [step for step in rows if step.lower],
        "by_task": None if worker is not None else _by_task(view.workers, ask, buffer, view.now),
    }


def _by_task(workers: Workers, ask: Ask, buffer: str, now: datetime) -> Table | None:
    """Return the table of workers by task, whose cells lead to the steps with one worker's groups of a task."""

    def steps_of(task: str) -> Callable[[Any], str | None]:
        return lambda row: ask.link("/steps", task=task, worker=row["name"], buffer=buffer)

    if not (by_task := workers.by_task).says_more:
        return None
    links = {f"task {task}": steps_of(task) for task in by_task.tasks}
    return table_of("By task", by_task.rows, by_task_columns(by_task), ask, now, sorts=False, links=links)


def show_step(tx: Transaction, ask: Ask) -> dict[str, Any]:
    """Return the groups and draws of a train step, for each run that trained it, the lowest first.

    They are those of one task or worker, if the URL names it. Raises NotThereError.
    """
    buffer, _ = one_buffer(tx, ask)
    step, now, task, worker = ask.number("step", 0, least=-LARGEST), tx.now(), ask.text("task"), ask.text("worker")
    assert step is not None
    runs = read_step(tx, buffer, step, _LOWEST_SHOWN, task=task, worker=worker)
    if not runs:
        scope = f"for step {step} of {buffer!r:.100}"
        raise NotThereError(no_groups(tx, buffer, scope, task, worker))
    tables = [
        (
            table_of("By worker", run.workers, BY_WORKER, ask, now, sorts=False),
            _by_task(run.over_steps, ask, buffer, now),
            table_of("Tasks", run.tasks, BY_TASK, ask, now, sorts=False, links={"name": lambda row: None}),
            table_of("Groups", run.groups, annotated(MEMBERS, run.groups), ask, now, usual="reward"),
        )
        for run in runs
    ]
    return {"step": step, "runs": runs, "tables": tables}


def show_workers(tx: Transaction, ask: Ask) -> dict[str, Any]:
    """Return the workers: what they made of the last steps, their processes, the waits.

    What they made and the waits are of one task, if the URL names it.
    """
    buffer, task, now = ask.text("buffer"), ask.text("task"), tx.now()
    buffer_name, _ = one_buffer(tx, ask)
    view, _ = read_workers(tx, buffer_name, task=task)
    waits = waits_of(tx, buffer, task)
    links = {"groups": lambda row: ask.link("/steps", task=task, worker=row.name, buffer=buffer_name)}
    worker_columns = [*columns("buffer"), *PROCESSES] if waits["several"] else PROCESSES
    return {
        "chosen": buffer_name,
        "found": view,
        "nothing": no_groups(tx, buffer_name, "in the last steps", task) if task and not view.made else "",
        "compared": table_of("What they made", view.made, BY_WORKER, ask, now, sorts=False, links=links),
        "by_task": _by_task(view, ask, buffer_name, now),
        "table": table_of("Processes", waits["workers"], worker_columns, ask, now, usual="-seen_at"),
        **waits,
    }
