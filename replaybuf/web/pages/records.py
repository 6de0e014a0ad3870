"""The pages of what was recorded: train steps and their draws, who waits and why, workers, events, checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from replaybuf.rules.circumstances import in_force
from replaybuf.rules.comparison import by_worker
from replaybuf.storage.sql.inspection.drawn_batches import Member, recorded
from replaybuf.storage.sql.inspection.groups import buffers_of, check_buffer
from replaybuf.storage.sql.inspection.reader import ReadTransaction
from replaybuf.storage.sql.inspection.run_records import BATCH_GROUPS, BATCHES, CHECKPOINTS, EVENTS, WORKERS, newest
from replaybuf.storage.sql.inspection.traces import StepSummary, summarise_steps, trace_step
from replaybuf.storage.sql.inspection.waits import Explained, Question, explain
from replaybuf.web.ask import LARGEST, Ask, NotThereError
from replaybuf.web.plots import Plot, lines

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


def read_workers(tx: ReadTransaction, ask: Ask) -> dict[str, Any]:
    """Return the workers, those heard of last first, and the waits that are under way."""
    buffer = ask.text("buffer")
    return {"now": tx.now(), "workers": newest(tx, WORKERS, buffer, _MOST_ROWS), **read_waits(tx, buffer)}


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
_MOST_GROUPS = 100_000
_PLOTTED = {
    "Reward": {"mean": "reward", "min": "min_reward", "max": "max_reward"},
    "Staleness": {"mean": "staleness", "max": "max_staleness"},
}


def read_steps(tx: ReadTransaction, ask: Ask) -> dict[str, Any]:
    """Return the train steps of a buffer, newest first, and the last draws that name none."""
    buffer, buffers = _one_buffer(tx, ask)
    before = ask.number("before", least=-LARGEST)
    found = summarise_steps(tx, buffer, before=before, limit=_SIZE + 1)
    numbers = sorted({one.step for one in found}, reverse=True)
    more = len(numbers) > _SIZE
    steps = [one for one in found if not more or one.step > numbers[-1]]
    without = recorded(tx, buffer).without_step
    unnamed = newest(tx, BATCHES, buffer, _SIZE, "step IS NULL") if without and before is None else []
    return {
        "now": tx.now(),
        "chosen": buffer,
        "buffers": buffers,
        "steps": steps,
        "unnamed": unnamed,
        "unnamed_count": without,
        "next": numbers[-2] if more else None,
    }


def draw_steps(data: dict[str, Any], ask: Ask) -> dict[str, Any]:
    """Return plots of the rewards and the staleness of the steps on the page."""
    steps: list[StepSummary] = sorted(data["steps"], key=lambda one: one.last_at)
    plots: list[Plot | None] = []
    for title, names in _PLOTTED.items():
        values = {
            name: [(one.last_at.timestamp(), getattr(one, field)) for one in steps] for name, field in names.items()
        }
        series = {name: [(at, float(one)) for at, one in points if one is not None] for name, points in values.items()}
        plots.append(lines(title, series))
    return {"plots": [one for one in plots if one]}


def read_step(tx: ReadTransaction, ask: Ask) -> dict[str, Any]:
    """Return what a train step was trained on, for each run that trained on it. Raises NotThereError."""
    buffer, _ = _one_buffer(tx, ask)
    step = ask.number("step", 0, least=-LARGEST)
    assert step is not None
    runs = trace_step(tx, buffer, step)
    if not runs:
        raise NotThereError(f"no draw for step {step} of {buffer!r:.100} is on record; the oldest are forgotten")
    return {"now": tx.now(), "chosen": buffer, "step": step, "runs": runs}


def read_batch(tx: ReadTransaction, ask: Ask) -> dict[str, Any]:
    """Return a draw with its groups, and those by who made them. Raises NotThereError."""
    number = ask.number("batch")
    found = newest(tx, BATCHES, None, 1, "id = :id", id=number)
    if not found:
        raise NotThereError(f"there is no draw {number} on record; the oldest are forgotten")
    groups = newest(tx, BATCH_GROUPS, None, _MOST_GROUPS, "batch = :batch", batch=number)
    members = [Member(**{name: row[name] for name in Member.__slots__}) for row in groups]
    return {"now": tx.now(), "batch": found[0], "groups": members, "workers": by_worker(members, [])}


def _one_buffer(tx: ReadTransaction, ask: Ask) -> tuple[str, list[str]]:
    """Return the buffer that is asked for, or the first, and all that there are. Raises InputError."""
    buffer, buffers = ask.text("buffer"), buffers_of(tx)
    check_buffer(tx, buffer)
    return buffer or next(iter(buffers), "default"), buffers
