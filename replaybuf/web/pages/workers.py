"""The workers side by side, and one of them: what it made of the last train steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from replaybuf.storage.sql.inspection.reader import ReadTransaction
from replaybuf.storage.sql.inspection.run_records import newest
from replaybuf.storage.sql.inspection.traces import (
    WorkerStep,
    steps_by_worker,
    trace_worker,
)
from replaybuf.web.ask import Ask, NotThereError
from replaybuf.web.axes import STEPS
from replaybuf.web.pages.records import one_buffer, read_waits
from replaybuf.web.plots import Across, Plot, lines
from replaybuf.web.tables import listed

_MOST_ROWS = 10_000
#: The columns by which workers are ordered: what they made, and their last hour.
_MADE = ("name", "groups", "reward", "lead", "worse", "staleness")
_WORKERS = (
    *("worker", "host", "pid", "last_seen", "started_at", "groups_last_hour", "rollouts_last_hour"),
    *("tokens_last_hour", "failures_last_hour", "taken_last_hour"),
)
_STEPS_OF_WORKERS = 50
_MOST_LINES, _LOWEST_SHOWN = 8, 50


def read_workers(tx: ReadTransaction, ask: Ask) -> dict[str, Any]:
    """Return the workers, those heard of last first, what they made of the last steps, and the waits under way."""
    buffer = ask.text("buffer")
    chosen, _ = one_buffer(tx, ask)
    made = [_total(name, steps) for name, steps in steps_by_worker(tx, chosen, _STEPS_OF_WORKERS).items()]
    return {
        "now": tx.now(),
        "chosen": chosen,
        "workers": newest(tx, "workers", buffer, _MOST_ROWS),
        "made": sorted(made, key=lambda one: (-one["worse"], one["lead"], one["name"] or "")),
        **read_waits(tx, buffer),
    }


def draw_workers(data: dict[str, Any], ask: Ask) -> dict[str, Any]:
    """Return plots of the workers side by side: mean reward and staleness over the last steps."""
    shown = data["made"][:_MOST_LINES]
    return {
        "plots": plot_workers({one["name"] or "unknown": one["steps"] for one in shown}),
        "lines": len(shown),
        "compared": listed(data["made"], ask, _MADE, order="sort", after="page"),
        "page": listed(data["workers"], ask, _WORKERS),
    }


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
    buffer, _ = one_buffer(tx, ask)
    name = ask.text("worker") or ""
    found = trace_worker(tx, buffer, name, _STEPS_OF_WORKERS)
    rows = newest(tx, "workers", buffer, 1, "worker = :name", name=name)
    if found is None and not rows:
        raise NotThereError(f"nothing is known of a worker {name!r:.100} in the buffer {buffer!r:.100}")
    made = {} if found is None else {"steps": found.steps, "buffered": found.buffered, "draws": found.draws}
    lowest = [one for _, one in found.lowest[:_LOWEST_SHOWN]] if found else []
    return {"now": tx.now(), "chosen": buffer, "worker": name, "row": rows[0] if rows else None,
            "steps": [], "buffered": [], "draws": [], **made, "lowest": lowest}  # fmt: skip


def draw_worker(data: dict[str, Any], ask: Ask) -> dict[str, Any]:
    """Return the plots of a worker's rewards and staleness over steps."""
    return {"plots": plot_workers({data["worker"]: data["steps"]}) if data["steps"] else []}
