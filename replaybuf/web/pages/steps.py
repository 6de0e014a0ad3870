"""What each train step was trained on: its draws, their groups, and who made them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from replaybuf.rules.comparison import by_worker
from replaybuf.storage.sql.inspection.batches import Member, recorded
from replaybuf.storage.sql.inspection.buffers import buffers_of, check_buffer
from replaybuf.storage.sql.inspection.look import Look
from replaybuf.storage.sql.inspection.record_pages import BATCH_GROUPS, BATCHES, newest
from replaybuf.storage.sql.inspection.steps import StepSummary, summarise_steps, trace_step
from replaybuf.web.ask import LARGEST, Ask
from replaybuf.web.plots import Plot, lines
from replaybuf.web.wrong import NotThereError

if TYPE_CHECKING:
    from replaybuf.storage.sql.inspection.reader import Transaction

_SIZE = 50
_MOST_GROUPS = 100_000
_PLOTTED = {
    "Reward": {"mean": "reward", "min": "min_reward", "max": "max_reward"},
    "Staleness": {"mean": "staleness", "max": "max_staleness"},
}


def read_steps(tx: Transaction, ask: Ask) -> dict[str, Any]:
    """Return the train steps of a buffer, newest first, and the last draws that name none."""
    look = Look.over(tx)
    buffer, buffers = _one_buffer(look, ask)
    before = ask.number("before", least=-LARGEST)
    found = summarise_steps(look, buffer, before=before, limit=_SIZE + 1)
    numbers = sorted({one.step for one in found}, reverse=True)
    more = len(numbers) > _SIZE
    steps = [one for one in found if not more or one.step > numbers[-1]]
    without = recorded(look, buffer).without_step
    unnamed = newest(look, BATCHES, buffer, _SIZE, "step IS NULL") if without and before is None else []
    return {
        "now": look.now(),
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


def read_step(tx: Transaction, ask: Ask) -> dict[str, Any]:
    """Return what a train step was trained on, for each run that trained on it. Raises NotThereError."""
    look = Look.over(tx)
    buffer, _ = _one_buffer(look, ask)
    step = ask.number("step", 0, least=-LARGEST)
    assert step is not None
    runs = trace_step(look, buffer, step)
    if not runs:
        raise NotThereError(f"no draw for step {step} of {buffer!r:.100} is on record; the oldest are forgotten")
    return {"now": look.now(), "chosen": buffer, "step": step, "runs": runs}


def read_batch(tx: Transaction, ask: Ask) -> dict[str, Any]:
    """Return a draw with its groups, and those by who made them. Raises NotThereError."""
    look, number = Look.over(tx), ask.number("batch")
    found = newest(look, BATCHES, None, 1, "id = :id", id=number)
    if not found:
        raise NotThereError(f"there is no draw {number} on record; the oldest are forgotten")
    groups = newest(look, BATCH_GROUPS, None, _MOST_GROUPS, "batch = :batch", batch=number)
    members = [Member(**{name: row[name] for name in Member.__slots__}) for row in groups]
    return {"now": look.now(), "batch": found[0], "groups": members, "workers": by_worker(members, [])}


def _one_buffer(look: Look, ask: Ask) -> tuple[str, list[str]]:
    """Return the buffer that is asked for, or the first, and all that there are. Raises InputError."""
    buffer, buffers = ask.text("buffer"), buffers_of(look)
    check_buffer(look, buffer)
    return buffer or next(iter(buffers), "default"), buffers
