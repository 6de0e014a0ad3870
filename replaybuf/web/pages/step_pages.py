"""Pages of train steps, of one step with its groups, of one draw, and of workers with their shares of the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from replaybuf.rules.comparison import Part
from replaybuf.storage.sql.inspection.reader import ReadTransaction
from replaybuf.storage.sql.inspection.run_records import newest, recorded
from replaybuf.view.columns import BY_TASK, BY_WORKER, MEMBERS, Column, annotated, columns
from replaybuf.view.steps import STEPS, neighbours, no_draw, read_step, read_steps
from replaybuf.view.workers import SHARES, by_task_columns, read_shares
from replaybuf.web.ask import LARGEST, Ask, NotThereError
from replaybuf.web.html_tables import table_of
from replaybuf.web.pages.overview_page import one_buffer, waits_of
from replaybuf.web.plots import Across, Plot, lines

#: Maximum number of train steps that are read.
_MOST_STEPS = 1000
_LOWEST = 3


def show_steps(tx: ReadTransaction, ask: Ask) -> dict[str, Any]:
    """Return the train steps of a buffer, newest first, what stands out in them, and plots of rewards and staleness."""
    buffer, buffers = one_buffer(tx, ask)
    before = ask.number("before", None, least=-LARGEST)
    view = read_steps(tx, buffer, before=before, limit=_MOST_STEPS)
    rows = view.rows
    steps = [one for one in rows if not one.undone]
    across = Across(times=False)
    marks = {float(one.step): one.lower for one in steps if one.lower}

    def named(**fields: str) -> dict[str, list[tuple[float, float]]]:
        return {
            name: sorted((float(one.step), float(value)) for one in steps if (value := getattr(one, field)) is not None)
            for name, field in fields.items()
        }

    plots = [
        lines("Mean reward", named(mean="reward"), across=across, fitted=True, marks=marks),
        lines("Reward", named(mean="reward", min="min_reward", max="max_reward"), across=across),
        lines("Staleness", named(mean="staleness", max="max_staleness"), across=across),
    ]
    return {
        "chosen": buffer,
        "buffers": buffers,
        "view": view,
        "unnamed_count": view.known.without_step,
        "plots": [one for one in plots if one],
        "table": table_of("Steps", rows, STEPS, ask, view.now, usual="-step"),
        "earlier": min((one.step for one in rows), default=None) if len(rows) >= _MOST_STEPS else None,
        "fell": [one for one in rows if one.lower],
    }


def show_step(tx: ReadTransaction, ask: Ask) -> dict[str, Any]:
    """Return the groups and draws of a train step, for each run that trained it, the lowest first.

    Raises NotThereError.
    """
    buffer, _ = one_buffer(tx, ask)
    step, now = ask.number("step", 0, least=-LARGEST), tx.now()
    assert step is not None
    runs = read_step(tx, buffer, step, _LOWEST)
    if not runs:
        raise NotThereError(no_draw(recorded(tx, buffer), f"for step {step} of {buffer!r:.100}"))
    previous, following = neighbours(tx, buffer, step)
    tables = [
        (
            table_of("By worker", run.workers, BY_WORKER, ask, now, sorts=False),
            table_of("By task", run.by_task.rows, by_task_columns(run.by_task), ask, now, sorts=False),
            table_of("Tasks", run.tasks, BY_TASK, ask, now, sorts=False, links={"name": lambda row: None}),
            table_of("Groups", run.groups, annotated(MEMBERS, run.groups), ask, now, usual="reward"),
        )
        for run in runs
    ]
    return {"step": step, "previous": previous, "next": following, "runs": runs, "tables": tables}


_MOST_ROWS = 10_000
#: The workers' last hour.
_WORKERS = [
    *columns("worker", "buffer", "host", "pid", "last_seen"),
    Column("ended_at", "ended", "ago", usual=None),
    Column("groups_last_hour", "groups put"),
    Column("rollouts_last_hour", "rollouts"),
    Column("tokens_last_hour", "tokens", "tokens"),
    Column("failures_last_hour", "failures", bad="failures_last_hour"),
    Column("taken_last_hour", "drawn"),
    *columns("started_at"),
]
_STEPS_OF_WORKERS = 50
_MOST_LINES = 8


def show_workers(tx: ReadTransaction, ask: Ask) -> dict[str, Any]:
    """Return the workers: plots of them side by side, their shares of the last steps, their last hour, the waits."""
    buffer, now = ask.text("buffer"), tx.now()
    chosen, _ = one_buffer(tx, ask)
    made, by_task = read_shares(tx, chosen, _STEPS_OF_WORKERS)
    workers, found = newest(tx, "workers", buffer, _MOST_ROWS), waits_of(tx, buffer)
    shown = made[:_MOST_LINES]
    listed = [one for one in _WORKERS if found["several"] or one.name != "buffer"]
    tasks = by_task_columns(by_task)
    return {
        "chosen": chosen,
        "made": made,
        "steps": len({step for row in made for step, _ in row["steps"]}),
        "plots": _plots({row["name"] or "unknown": row["steps"] for row in shown}),
        "lines": len(shown),
        "compared": table_of("What they made", made, SHARES, ask, now, order="sort", after="page"),
        "tasks_table": table_of("By task", by_task.rows, tasks, ask, now, sorts=False) if by_task.says_more else None,
        "table": table_of("In the last hour", workers, listed, ask, now, usual="-last_seen"),
        **found,
    }


def _plots(made: Mapping[str, Sequence[tuple[int, Part]]]) -> list[Plot]:
    """Return plots of the workers' mean rewards and staleness over train steps."""

    def of(field: str) -> dict[str, list[tuple[float, float]]]:
        return {
            name: sorted((float(step), value) for step, part in steps if (value := getattr(part, field)) is not None)
            for name, steps in made.items()
        }

    worse = {
        float(step): f"{name} stands out: mean reward {part.reward:.3f}, others {part.others:.3f}"
        for name, steps in [*made.items()][:1]
        for step, part in steps
        if part.stands_out
    }
    numbers = [step for steps in made.values() for step, _ in steps]
    across = Across(times=False, low=min(numbers, default=0), high=max(numbers, default=0))
    plots = [
        lines("Mean reward by worker", of("reward"), across=across, fitted=True, marks=worse),
        lines("Staleness by worker", of("staleness"), across=across),
    ]
    return [one for one in plots if one]
