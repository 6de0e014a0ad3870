"""Pages of train steps, of one step with its groups, of one draw, and of workers with their shares of the steps."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate
from operator import itemgetter
from typing import Any

from replaybuf.rules.comparison import by_worker, tabulate
from replaybuf.storage.sql.inspection.reader import ReadTransaction
from replaybuf.storage.sql.inspection.run_records import STEPS_BEFORE, Member, newest, recorded
from replaybuf.storage.sql.inspection.traces import (
    StepSummary,
    WorkerStep,
    changes,
    judge_steps,
    lowest_answers,
    neighbours,
    steps_by_worker,
    summarise_steps,
    trace_step,
    trace_worker,
)
from replaybuf.web.ask import LARGEST, Ask, NotThereError, listed
from replaybuf.web.pages.overview import one_buffer, read_waits
from replaybuf.web.plots import STEPS, Across, Plot, lines

_SIZE = 50
#: Maximum number of train steps that are plotted.
_MOST_STEPS = 1000
#: Maximum number of groups that are read to find the steps that stand out.
_MOST_JUDGED = 20_000
_MOST_GROUPS = 100_000
_LOWEST = 3
_ACROSS = ("step", "time")


def read_steps(tx: ReadTransaction, ask: Ask) -> dict[str, Any]:
    """Return the train steps of a buffer, newest first, those to be plotted, and the last draws without a step.

    `judged` has the workers that are lower than the others all along, and the steps that are lower than those before.
    """
    buffer, buffers = one_buffer(tx, ask)
    first, last = (ask.number(name, least=-LARGEST) for name in ("from", "to"))
    before = ask.number("before", None if last is None else min(last + 1, LARGEST), least=-LARGEST)
    found = summarise_steps(tx, buffer, before=before, limit=_MOST_STEPS)
    plotted = [one for one in found if first is None or one.step >= first]
    numbers = sorted({one.step for one in plotted}, reverse=True)
    more = len(numbers) > _SIZE
    steps = [one for one in plotted if not more or one.step > numbers[_SIZE]]
    without = recorded(tx, buffer).without_step
    # All steps on the page are judged, and earlier ones up to the limit on groups.
    few = bisect_right([*accumulate(one.groups for one in plotted)], _MOST_JUDGED)
    unnamed = newest(tx, "batches", buffer, _SIZE, "step IS NULL") if without and before is None else []
    return {
        "chosen": buffer,
        "buffers": buffers,
        "steps": steps,
        "plotted": plotted,
        "steps_before": STEPS_BEFORE,
        "judged": asdict(judge_steps(tx, buffer, plotted[: max(len(steps), few)])),
        "unnamed": unnamed,
        "unnamed_count": without,
        "next": numbers[_SIZE - 1] if more else None,
    }


def draw_steps(data: dict[str, Any], ask: Ask) -> dict[str, Any]:
    """Return plots of the rewards and the staleness of the steps, and the verdicts, by step and restores."""
    steps = [one for one in data["plotted"] if not one.undone]
    across, x_of = _across(ask, steps)
    fell = {(step, restores): text for step, restores, text in data["judged"]["fell"]}
    marks = {x_of(one): text for one in steps if (text := fell.get((one.step, one.restores)))}

    def named(**fields: str) -> dict[str, list[tuple[float, float]]]:
        return {
            name: sorted((x_of(one), float(value)) for one in steps if (value := getattr(one, field)) is not None)
            for name, field in fields.items()
        }

    plots = [
        lines("Mean reward", named(mean="reward"), across=across, fitted=True, marks=marks),
        lines("Rewards", named(mean="reward", min="min_reward", max="max_reward"), across=across),
        lines("Staleness", named(mean="staleness", max="max_staleness"), across=across),
    ]
    ordered = listed(data["plotted"], ask, _STEPS) if ask.text("order") else None
    keys = [(one.step, one.restores) for one in data["plotted"]]
    return {
        "changes": dict(zip(keys, changes(data["plotted"]), strict=True)),
        "plots": [one for one in plots if one],
        "verdicts": fell,
        "across": ask.choice("across", _ACROSS),
        "ordered": ordered,
        "shown": data["steps"] if ordered is None else ordered.rows,
    }


def _across(ask: Ask, steps: Sequence[StepSummary]) -> tuple[Across, Callable[[StepSummary], float]]:
    """Return the x axis of the plots of steps, and the function from a step to its x."""
    if ask.choice("across", _ACROSS) == "step":
        return Across(STEPS, "step", to=_place_of(ask)), lambda one: float(one.step)
    drawn = sorted((one.last_at.timestamp(), one.step) for one in steps)

    def step_at(time: float) -> int:
        return drawn[max(0, bisect_right(drawn, time, key=itemgetter(0)) - 1)][1]

    to = _place_of(ask)
    return Across(zoom=step_at, to=lambda time: to(step_at(time))), lambda one: one.last_at.timestamp()


def _place_of(ask: Ask) -> Callable[[float], str]:
    """Return a function from a train step to the URL of its page."""
    buffer = ask.text("buffer")
    of_pages = Ask({}, prefix=ask.prefix)
    return lambda step: of_pages.link(f"/steps/{int(step)}", buffer=buffer)


def read_step(tx: ReadTransaction, ask: Ask) -> dict[str, Any]:
    """Return the groups and draws of a train step, for each run that trained it. Raises NotThereError."""
    buffer, _ = one_buffer(tx, ask)
    step = ask.number("step", 0, least=-LARGEST)
    assert step is not None
    runs = trace_step(tx, buffer, step)
    if not runs:
        known = recorded(tx, buffer)
        there = "; no draw names its step" if known.last is None else f"; there are steps {known.first} to {known.last}"
        raise NotThereError(f"no draw for step {step} of {buffer!r:.100} is on record{there}")
    lowest = [lowest_answers(tx, buffer, run, _LOWEST) for run in runs]
    previous, following = neighbours(tx, buffer, step)
    return {
        "chosen": buffer,
        "step": step,
        "previous": previous,
        "next": following,
        "runs": runs,
        "lowest": lowest,
    }


#: The sortable columns of a step's or a draw's groups.
_MEMBERS = ("reward", "staleness", "uid", "task_name", "worker", "oldest_model_step", "created_at")
_STEPS = (
    *("step", "last_at", "batches", "groups", "settled", "reward", "min_reward", "max_reward", "staleness"),
    *("max_staleness", "oldest_model_step"),
)


def draw_step(data: dict[str, Any], ask: Ask) -> dict[str, Any]:
    """Return a page of the groups of each run in the requested order; by default the lowest rewards first."""
    return {"pages": [listed([one for _, one in run.groups], ask, _MEMBERS) for run in data["runs"]]}


def read_batch(tx: ReadTransaction, ask: Ask) -> dict[str, Any]:
    """Return a draw with its groups, and a summary of them by worker. Raises NotThereError."""
    number = ask.number("batch")
    found = newest(tx, "batches", None, 1, "id = :id", id=number)
    if not found:
        raise NotThereError(f"there is no draw {number} on record; the oldest are forgotten")
    groups = newest(tx, "batch_groups", None, _MOST_GROUPS, "batch = :batch", batch=number)
    members = [Member(**{name: row[name] for name in Member.__slots__}) for row in groups]
    return {"batch": found[0], "groups": members, "workers": by_worker([tabulate(members)])}


def draw_batch(data: dict[str, Any], ask: Ask) -> dict[str, Any]:
    """Return a page of the groups of a draw in the requested order."""
    return {"page": listed(data["groups"], ask, _MEMBERS)}


_MOST_ROWS = 10_000
#: The sortable columns of workers: their shares of the steps, and their last hour.
_MADE = ("name", "groups", "reward", "lead", "worse", "staleness")
_WORKERS = (
    *("worker", "host", "pid", "last_seen", "started_at", "groups_last_hour", "rollouts_last_hour"),
    *("tokens_last_hour", "failures_last_hour", "taken_last_hour"),
)
_STEPS_OF_WORKERS = 50
_MOST_LINES, _LOWEST_SHOWN = 8, 50


def read_workers(tx: ReadTransaction, ask: Ask) -> dict[str, Any]:
    """Return the workers, latest heartbeat first, their shares of the last steps, and the current waits."""
    buffer = ask.text("buffer")
    chosen, _ = one_buffer(tx, ask)
    made = [
        {**asdict(one.part), "steps": one.steps, "lead": -(one.part.below or 0.0), "worse": int(one.worse)}
        for one in steps_by_worker(tx, chosen, _STEPS_OF_WORKERS)
    ]
    return {
        "chosen": chosen,
        "workers": newest(tx, "workers", buffer, _MOST_ROWS),
        "made": sorted(made, key=lambda one: (one["lead"], one["name"] or "")),
        "steps": len({step.summary.step for one in made for step in one["steps"]}),
        **read_waits(tx, buffer),
    }


def draw_workers(data: dict[str, Any], ask: Ask) -> dict[str, Any]:
    """Return plots of the workers side by side: mean reward and staleness over the last steps."""
    shown = data["made"][:_MOST_LINES]
    return {
        "plots": plot_workers({one["name"] or "unknown": one["steps"] for one in shown}, _place_of(ask)),
        "lines": len(shown),
        "compared": listed(data["made"], ask, _MADE, order="sort", after="page"),
        "page": listed(data["workers"], ask, _WORKERS),
    }


def plot_workers(made: Mapping[str, Sequence[WorkerStep]], to: Callable[[float], str]) -> list[Plot]:
    """Return plots of the workers' mean rewards and staleness over train steps; `to` returns the URL of a step."""

    def of(field: str) -> dict[str, list[tuple[float, float]]]:
        return {
            name: sorted(
                (float(one.summary.step), value)
                for one in steps
                if not one.summary.undone and (value := getattr(one.part, field)) is not None
            )
            for name, steps in made.items()
        }

    worse = {
        float(one.summary.step): f"{name} stands out: mean reward {one.part.reward:.3f}, others {one.part.others:.3f}"
        for name, steps in [*made.items()][:1]
        for one in steps
        if one.part.stands_out
    }
    across = Across(STEPS, "step", None, to)
    plots = [
        lines("Mean reward by worker", of("reward"), across=across, fitted=True, marks=worse),
        lines("Staleness by worker", of("staleness"), across=across),
    ]
    return [one for one in plots if one]


def read_worker(tx: ReadTransaction, ask: Ask) -> dict[str, Any]:
    """Return the groups that a worker put, by step, and its draws. Raises NotThereError."""
    buffer, _ = one_buffer(tx, ask)
    name = ask.text("worker") or ""
    found = trace_worker(tx, buffer, name, _STEPS_OF_WORKERS)
    rows = newest(tx, "workers", buffer, 1, "worker = :name", name=name)
    if found is None and not rows:
        raise NotThereError(f"nothing is known of a worker {name!r:.100} in the buffer {buffer!r:.100}")
    return {
        "chosen": buffer,
        "worker": name,
        "row": rows[0] if rows else None,
        "steps": found.steps if found else [],
        "buffered": found.buffered if found else [],
        "draws": found.draws if found else [],
        "lowest": [one for _, one in found.lowest[:_LOWEST_SHOWN]] if found else [],
    }


def draw_worker(data: dict[str, Any], ask: Ask) -> dict[str, Any]:
    """Return the plots of a worker's rewards and staleness over steps."""
    return {"plots": plot_workers({data["worker"]: data["steps"]}, _place_of(ask)) if data["steps"] else []}
