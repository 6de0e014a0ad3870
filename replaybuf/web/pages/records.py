"""The pages of what was recorded: train steps and their draws, who waits and why, workers, events, checkpoints."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from replaybuf.rules.circumstances import in_force
from replaybuf.rules.comparison import by_worker, tabulate
from replaybuf.storage.sql.inspection.drawn_batches import Member, recorded
from replaybuf.storage.sql.inspection.groups import buffers_of, check_buffer
from replaybuf.storage.sql.inspection.reader import ReadTransaction
from replaybuf.storage.sql.inspection.run_records import BATCH_GROUPS, BATCHES, CHECKPOINTS, EVENTS, WORKERS, newest
from replaybuf.storage.sql.inspection.traces import (
    StepSummary,
    WorkerStep,
    judge_steps,
    lowest_answers,
    steps_by_worker,
    summarise_steps,
    trace_step,
    trace_worker,
)
from replaybuf.storage.sql.inspection.waits import Explained, Question, explain
from replaybuf.web.ask import LARGEST, Ask, NotThereError
from replaybuf.web.axes import STEPS
from replaybuf.web.plots import Across, Plot, lines

if TYPE_CHECKING:
    from replaybuf.storage.sql.inspection.reader import ReadTransaction


_MOST_WAITS = 50


def read_waits(tx: ReadTransaction, buffer: str | None, task: str | None = None) -> dict[str, Any]:
    """Return a row for each wait, those that last longest first, their number, and whether there are several buffers.

    Of a buffer in which nobody waits, the rows are the draws of one group that somebody might do now, and `asked`.
    """
    found = explain(tx, buffer, Question(task), asked=False)
    rows = [_row(one.buffer, wait, asked=one.asked) for one in found for wait in one.waits]
    rows.sort(key=lambda row: row["asked"])
    return {"waits": rows[:_MOST_WAITS], "waiting": sum(not row["asked"] for row in rows), "several": len(found) > 1}


def _row(buffer: str, one: Explained, *, asked: bool) -> dict[str, Any]:
    return {
        "buffer": buffer,
        "asked": asked,
        **one.fields,
        "reason": str(one.diagnosis.reason),
        "sentence": one.diagnosis.sentence,
        "facts": [fact.text for fact in one.diagnosis.facts],
        "limits": {} if one.limits is None else in_force(one.limits),
    }


_MOST_ROWS = 500


def read_checkpoints(tx: ReadTransaction, ask: Ask) -> dict[str, Any]:
    """Return the checkpoints, newest first."""
    return {"now": tx.now(), "rows": newest(tx, CHECKPOINTS, ask.text("buffer"), _MOST_ROWS)}


_STEPS_OF_WORKERS = 50
_MOST_LINES = 8


def read_workers(tx: ReadTransaction, ask: Ask) -> dict[str, Any]:
    """Return the workers, those heard of last first, what they made of the last steps, and the waits under way."""
    buffer = ask.text("buffer")
    chosen, _ = _one_buffer(tx, ask)
    made = [_total(name, steps) for name, steps in steps_by_worker(tx, chosen, _STEPS_OF_WORKERS).items()]
    return {
        "now": tx.now(),
        "chosen": chosen,
        "workers": newest(tx, WORKERS, buffer, _MOST_ROWS),
        "made": sorted(made, key=lambda one: (-one["worse"], one["lead"], one["name"] or "")),
        **read_waits(tx, buffer),
    }


def draw_workers(data: dict[str, Any], ask: Ask) -> dict[str, Any]:
    """Return plots of the workers side by side: mean reward and staleness over the last steps."""
    shown = data["made"][:_MOST_LINES]
    return {"plots": plot_workers({one["name"] or "unknown": one["steps"] for one in shown}), "lines": len(shown)}


def _total(name: str | None, steps: Sequence[WorkerStep]) -> dict[str, Any]:
    """Return what a worker made of several steps: means, its lead over the others, and in how many it stands out."""

    def mean_of(values: Iterable[tuple[float | None, int]]) -> float | None:
        known = [(value, groups) for value, groups in values if value is not None]
        return sum(value * groups for value, groups in known) / sum(n for _, n in known) if known else None

    parts = [one.part for one in steps]
    below = mean_of((part.below, part.groups) for part in parts)
    return {
        "name": name,
        "groups": sum(part.groups for part in parts),
        "steps": steps,
        "reward": mean_of((part.reward, part.groups) for part in parts),
        "lead": 0.0 if below is None else -below,
        "staleness": mean_of((part.staleness, part.groups) for part in parts),
        "worse": sum(part.stands_out for part in parts),
    }


def plot_workers(made: Mapping[str, Sequence[WorkerStep]]) -> list[Plot]:
    """Return plots of the mean rewards and of the staleness of workers over train steps."""

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
    across = Across(STEPS, "step", None)
    plots = [
        lines("Mean reward by worker", of("reward"), across=across, fitted=True, marks=worse),
        lines("Staleness by worker", of("staleness"), across=across),
    ]
    return [one for one in plots if one]


def read_worker(tx: ReadTransaction, ask: Ask) -> dict[str, Any]:
    """Return what a worker made and drew. Raises NotThereError."""
    buffer, _ = _one_buffer(tx, ask)
    name = ask.text("worker") or ""
    found = trace_worker(tx, buffer, name, _STEPS_OF_WORKERS)
    rows = newest(tx, WORKERS, buffer, 1, "worker = :name", name=name)
    if found is None and not rows:
        raise NotThereError(f"nothing is known of a worker {name!r:.100} in the buffer {buffer!r:.100}")
    made = {} if found is None else {"steps": found.steps, "buffered": found.buffered, "draws": found.draws}
    lowest = [one for _, one in found.lowest[:_SIZE]] if found else []
    return {"now": tx.now(), "chosen": buffer, "worker": name, "row": rows[0] if rows else None,
            "steps": [], "buffered": [], "draws": [], **made, "lowest": lowest}  # fmt: skip


def draw_worker(data: dict[str, Any], ask: Ask) -> dict[str, Any]:
    """Return the plots of a worker's rewards and staleness over steps."""
    return {"plots": plot_workers({data["worker"]: data["steps"]}) if data["steps"] else []}


_EVENTS_SHOWN = 100


def read_events(tx: ReadTransaction, ask: Ask) -> dict[str, Any]:
    """Return a page of events, newest first; those of one kind, if it is asked for."""
    kind = ask.text("kind")
    conditions = ["id < :before"] if kind is None else ["id < :before", "kind = :kind"]
    values: dict[str, Any] = {"before": ask.number("before", LARGEST)} | ({} if kind is None else {"kind": kind})
    found = newest(tx, EVENTS, ask.text("buffer"), _EVENTS_SHOWN + 1, *conditions, **values)
    rows = found[:_EVENTS_SHOWN]
    return {"now": tx.now(), "kind": kind, "rows": rows, "next": rows[-1]["id"] if len(found) > _EVENTS_SHOWN else None}


_SIZE = 50
_MOST_STEPS = 1000
#: Groups that are read to find out what stands out of the steps.
_MOST_JUDGED = 20_000
_MOST_GROUPS = 100_000
_STEP_GROUPS, _LOWEST = 100, 3
_ACROSS = ("step", "time")


def read_steps(tx: ReadTransaction, ask: Ask) -> dict[str, Any]:
    """Return the train steps of a buffer, newest first, those to be plotted, and the last draws that name none.

    `judged` has what stands out of the steps on the page, by step and number of restores.
    """
    buffer, buffers = _one_buffer(tx, ask)
    first, last = (ask.number(name, least=-LARGEST) for name in ("from", "to"))
    before = ask.number("before", None if last is None else min(last + 1, LARGEST), least=-LARGEST)
    every = summarise_steps(tx, buffer, before=before, limit=_MOST_STEPS)
    plotted = [one for one in every if first is None or one.step >= first]
    numbers = sorted({one.step for one in plotted}, reverse=True)
    more = len(numbers) > _SIZE
    steps = [one for one in plotted if not more or one.step > numbers[_SIZE]]
    without = recorded(tx, buffer).without_step
    unnamed = newest(tx, BATCHES, buffer, _SIZE, "step IS NULL") if without and before is None else []
    return {
        "now": tx.now(),
        "chosen": buffer,
        "buffers": buffers,
        "steps": steps,
        "plotted": plotted,
        "judged": [
            {"step": step, "restores": restores, "verdict": text}
            for (step, restores), text in judge_steps(tx, buffer, _to_be_judged(plotted, len(steps))).items()
        ],
        "unnamed": unnamed,
        "unnamed_count": without,
        "next": numbers[_SIZE - 1] if more else None,
    }


def _to_be_judged(steps: Sequence[StepSummary], least: int) -> Sequence[StepSummary]:
    """Return at least so many of the steps, and more of them as long as few groups are to be read for it."""
    groups = [*accumulate(one.groups for one in steps)]
    return steps[: max(least, bisect_right(groups, _MOST_JUDGED))]


def draw_steps(data: dict[str, Any], ask: Ask) -> dict[str, Any]:
    """Return plots of the rewards and the staleness of the steps, and what stands out, by step and restores."""
    steps: list[StepSummary] = [one for one in data["plotted"] if not one.undone]
    across, x_of = _across(ask, steps)
    judged = {(one["step"], one["restores"]): one["verdict"] for one in data["judged"]}
    marks = {x_of(one): text for one in steps if (text := judged.get((one.step, one.restores)))}

    def of(*fields: str) -> dict[str, list[tuple[float, float]]]:
        names = {"reward": "mean", "min_reward": "least", "max_reward": "greatest", "staleness": "mean"}
        return {
            names.get(field, "most"): sorted(
                (x_of(one), float(value)) for one in steps if (value := getattr(one, field)) is not None
            )
            for field in fields
        }

    plots = [
        lines("Mean reward", of("reward"), across=across, fitted=True, marks=marks),
        lines("Rewards", of("reward", "min_reward", "max_reward"), across=across),
        lines("Staleness", of("staleness", "max_staleness"), across=across),
    ]
    return {"plots": [one for one in plots if one], "verdicts": judged, "across": ask.choice("across", _ACROSS)}


def _across(ask: Ask, steps: Sequence[StepSummary]) -> tuple[Across, Callable[[StepSummary], float]]:
    """Return what is along the bottom of the plots of steps, and where a step is there."""
    if ask.choice("across", _ACROSS) == "step":
        return Across(STEPS, "step"), lambda one: float(one.step)
    step_at = {one.last_at.timestamp(): one.step for one in steps}
    return Across(zoom=step_at.__getitem__), lambda one: one.last_at.timestamp()


def read_step(tx: ReadTransaction, ask: Ask) -> dict[str, Any]:
    """Return what a train step was trained on, for each run that trained on it. Raises NotThereError."""
    buffer, _ = _one_buffer(tx, ask)
    step = ask.number("step", 0, least=-LARGEST)
    assert step is not None
    runs = trace_step(tx, buffer, step)
    if not runs:
        raise NotThereError(f"no draw for step {step} of {buffer!r:.100} is on record; the oldest are forgotten")
    lowest = [lowest_answers(tx, buffer, run, _LOWEST) for run in runs]
    return {"now": tx.now(), "chosen": buffer, "step": step, "runs": runs, "lowest": lowest}


def groups_of_step(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each group of each run that trained on a step."""
    return [{"restores": run.summary.restores, **asdict(one)} for run in data["runs"] for _, one in run.groups]


#: How the groups of a step are ordered: by the column of this name, from the other end with a "-" before it.
_ORDERS = tuple(f"{sign}{name}" for name in ("reward", "staleness", "uid", "task_name", "worker") for sign in ("", "-"))


def draw_step(data: dict[str, Any], ask: Ask) -> dict[str, Any]:
    """Return a page of the groups of each run in the order that is asked for, and where the next page begins."""
    order, first = ask.choice("order", _ORDERS), ask.number("after", 0) or 0
    name = order.removeprefix("-")

    def by_column(one: Member) -> tuple[bool, Any]:
        value = getattr(one, name)
        return value is None, 0 if value is None else value

    pages = []
    for run in data["runs"]:
        members = sorted((one for _, one in run.groups), key=by_column, reverse=order != name)
        pages.append(members[first : first + _STEP_GROUPS])
    more = any(len(run.groups) > first + _STEP_GROUPS for run in data["runs"])
    return {"pages": pages, "order": order, "first": first, "next": first + _STEP_GROUPS if more else None}


def read_batch(tx: ReadTransaction, ask: Ask) -> dict[str, Any]:
    """Return a draw with its groups, and those by who made them. Raises NotThereError."""
    number = ask.number("batch")
    found = newest(tx, BATCHES, None, 1, "id = :id", id=number)
    if not found:
        raise NotThereError(f"there is no draw {number} on record; the oldest are forgotten")
    groups = newest(tx, BATCH_GROUPS, None, _MOST_GROUPS, "batch = :batch", batch=number)
    members = [Member(**{name: row[name] for name in Member.__slots__}) for row in groups]
    return {"now": tx.now(), "batch": found[0], "groups": members, "workers": by_worker(tabulate(members), {})}


def _one_buffer(tx: ReadTransaction, ask: Ask) -> tuple[str, list[str]]:
    """Return the buffer that is asked for, or the first, and all that there are. Raises InputError."""
    buffer, buffers = ask.text("buffer"), buffers_of(tx)
    check_buffer(tx, buffer)
    return buffer or next(iter(buffers), "default"), buffers
