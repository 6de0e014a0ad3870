"""Pages of train steps, of one step with its groups, of one draw, and of workers with their shares of the steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from replaybuf.storage.sql.inspection.reader import ReadTransaction
from replaybuf.storage.sql.inspection.run_records import newest, recorded
from replaybuf.view.columns import BATCHES, BY_TASK, BY_WORKER, MEMBERS, Column, columns, value_of
from replaybuf.view.steps import STEPS, neighbours, no_draw, read_step, read_steps
from replaybuf.view.workers import (
    BUFFERED,
    SHARES,
    WORKER_GROUPS,
    WORKER_STEPS,
    WorkerStep,
    by_task_columns,
    read_shares,
    read_worker,
)
from replaybuf.web.ask import LARGEST, Ask, NotThereError
from replaybuf.web.pages.overview import one_buffer, read_waits
from replaybuf.web.plots import STEPS as STEP_SCALE
from replaybuf.web.plots import Across, Plot, lines
from replaybuf.web.tables import table_of

#: Maximum number of train steps that are read.
_MOST_STEPS = 1000
_MOST_GROUPS = 100_000
_LOWEST = 3


def read_steps_page(tx: ReadTransaction, ask: Ask) -> dict[str, Any]:
    """Return the train steps of a buffer, newest first, and what stands out in them."""
    buffer, buffers = one_buffer(tx, ask)
    first, last = (ask.number(name, least=-LARGEST) for name in ("from", "to"))
    before = ask.number("before", None if last is None else min(last + 1, LARGEST), least=-LARGEST)
    found = read_steps(tx, buffer, first=first, before=before, limit=_MOST_STEPS)
    return {"chosen": buffer, "buffers": buffers, "view": found, "unnamed_count": found.known.without_step}


def draw_steps(data: dict[str, Any], ask: Ask) -> dict[str, Any]:
    """Return the table of the steps, and plots of their rewards and staleness."""
    rows = data["view"].rows
    steps = [one for one in rows if not one.undone]
    across = Across(STEP_SCALE, "step", to=_place_of(ask))
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
    earlier = min((one.step for one in rows), default=None) if len(rows) >= _MOST_STEPS else None
    return {
        "plots": [one for one in plots if one],
        "table": table_of("Steps", rows, STEPS, ask, data["now"], usual="-step"),
        "earlier": earlier,
        "fell": [one for one in rows if one.lower],
    }


def _place_of(ask: Ask) -> Callable[[float], str]:
    """Return a function from a train step to the URL of its page."""
    return lambda step: ask.link(f"/steps/{int(step)}")


def read_step_page(tx: ReadTransaction, ask: Ask) -> dict[str, Any]:
    """Return the groups and draws of a train step, for each run that trained it. Raises NotThereError."""
    buffer, _ = one_buffer(tx, ask)
    step = ask.number("step", 0, least=-LARGEST)
    assert step is not None
    runs = read_step(tx, buffer, step, _LOWEST)
    if not runs:
        raise NotThereError(no_draw(recorded(tx, buffer), f"for step {step} of {buffer!r:.100}"))
    previous, following = neighbours(tx, buffer, step)
    return {"chosen": buffer, "step": step, "previous": previous, "next": following, "runs": runs}


def draw_step(data: dict[str, Any], ask: Ask) -> dict[str, Any]:
    """Return the tables of each run: its groups by worker and task, and a page of the groups, the lowest first."""
    now = data["now"]
    return {
        "tables": [
            (
                _by_worker(run.workers, ask, now),
                table_of("Tasks", run.tasks, BY_TASK, _plain(ask), now, sorts=False),
                table_of("Groups", run.groups, MEMBERS, ask, now, usual="reward"),
            )
            for run in data["runs"]
        ]
    }


def _by_worker(parts: Sequence[Any], ask: Ask, now: Any) -> Any:
    return table_of("By worker", parts, BY_WORKER, _plain(ask), now, sorts=False, links={"name": _worker_link(ask)})


def _plain(ask: Ask) -> Ask:
    """Return a question without the order and the page of another table."""
    return Ask({name: one for name, one in ask.parameters.items() if name == "buffer"}, ask.path, ask.prefix)


def _worker_link(ask: Ask) -> Callable[[Any], str | None]:
    return lambda row: ask.link("/worker", worker=name) if (name := value_of(row, "name")) else None


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
_MOST_LINES, _LOWEST_SHOWN = 8, 50


def read_workers(tx: ReadTransaction, ask: Ask) -> dict[str, Any]:
    """Return the workers, latest heartbeat first, their shares of the last steps, and the current waits."""
    buffer = ask.text("buffer")
    chosen, _ = one_buffer(tx, ask)
    made, by_task = read_shares(tx, chosen, _STEPS_OF_WORKERS)
    return {
        "chosen": chosen,
        "workers": newest(tx, "workers", buffer, _MOST_ROWS),
        "made": made,
        "by_task": by_task,
        "steps": len({step.step for one in made for step in one.steps}),
        **read_waits(tx, buffer),
    }


def draw_workers(data: dict[str, Any], ask: Ask) -> dict[str, Any]:
    """Return plots of the workers side by side, the tables of what they made, and of their last hour."""
    shown, now, by_task = data["made"][:_MOST_LINES], data["now"], data["by_task"]
    listed = [one for one in _WORKERS if data["several"] or one.name != "buffer"]
    to = _worker_link(ask)
    return {
        "plots": plot_workers({one.name or "unknown": one.steps for one in shown}, _place_of(ask)),
        "lines": len(shown),
        "compared": table_of(
            "What they made", data["made"], SHARES, ask, now, order="sort", after="page", links={"name": to}
        ),
        "tasks_table": table_of(
            "By task", by_task.rows, by_task_columns(by_task), ask, now, sorts=False, links={"name": to}
        )
        if len(by_task.tasks) > 1
        else None,
        "table": table_of("In the last hour", data["workers"], listed, ask, now, usual="-last_seen"),
    }


def plot_workers(made: Mapping[str, Sequence[WorkerStep]], to: Callable[[float], str]) -> list[Plot]:
    """Return plots of the workers' mean rewards and staleness over train steps; `to` returns the URL of a step."""

    def of(field: str) -> dict[str, list[tuple[float, float]]]:
        return {
            name: sorted(
                (float(one.step), value)
                for one in steps
                if not one.undone and (value := getattr(one, field)) is not None
            )
            for name, steps in made.items()
        }

    worse = {
        float(one.step): f"{name} stands out: mean reward {one.reward:.3f}, others {one.others:.3f}"
        for name, steps in [*made.items()][:1]
        for one in steps
        if one.stands_out
    }
    steps = [one.step for several in made.values() for one in several]
    across = Across(STEP_SCALE, "step", None, to, min(steps, default=0), max(steps, default=0))
    plots = [
        lines("Mean reward by worker", of("reward"), across=across, fitted=True, marks=worse),
        lines("Staleness by worker", of("staleness"), across=across),
    ]
    return [one for one in plots if one]


def read_worker_page(tx: ReadTransaction, ask: Ask) -> dict[str, Any]:
    """Return the groups that a worker put, by step, and its draws. Raises NotThereError."""
    buffer, _ = one_buffer(tx, ask)
    name = ask.text("worker") or ""
    found = read_worker(tx, buffer, name, _STEPS_OF_WORKERS)
    rows = newest(tx, "workers", buffer, 1, "worker = :name", name=name)
    if found is None and not rows:
        raise NotThereError(f"nothing is known of a worker {name!r:.100} in the buffer {buffer!r:.100}")
    return {"chosen": buffer, "worker": name, "row": rows[0] if rows else None, "view": found}


def draw_worker(data: dict[str, Any], ask: Ask) -> dict[str, Any]:
    """Return the plots of a worker's rewards and staleness over steps, and its tables."""
    view, now = data["view"], data["now"]
    if view is None:
        return {"plots": [], "tables": []}
    query = json.dumps({"worker": data["worker"]})

    def groups(row: Any) -> str:
        return ask.link("/groups", task=row["task_name"], status=row["status"], where=query)

    steps = [WORKER_STEPS[0], *columns("last_at"), *WORKER_STEPS[1:]]
    tables = [
        table_of("Train steps that had groups of it", view.steps, steps, ask, now, sorts=False),
        table_of("Its groups, lowest reward first", view.groups[:_LOWEST_SHOWN], WORKER_GROUPS, ask, now, sorts=False),
        table_of("In the buffer", view.buffered, BUFFERED, ask, now, sorts=False, links={"groups": groups}),
        table_of("Its last draws", view.draws, BATCHES[:-1], ask, now, sorts=False),
    ]
    return {"plots": plot_workers({data["worker"]: view.steps}, _place_of(ask)), "tables": tables}
