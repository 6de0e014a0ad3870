"""What each train step was trained on: its draws, their groups, and who made them."""

from __future__ import annotations

from typing import Any

from replaybuf.errors import InputError
from replaybuf.storage.sql.inspection.groups import now_of
from replaybuf.storage.sql.inspection.reader import Transaction
from replaybuf.storage.sql.inspection.record_pages import BATCH_GROUPS, BATCHES, newest
from replaybuf.web.ask import Ask
from replaybuf.web.plots import Plot, lines

_SIZE = 50
_PLOTTED = {"Reward": ("min_reward", "reward", "max_reward"), "Staleness": ("staleness", "max_staleness")}


class NoSuchBatchError(InputError):
    """There is no such batch: the oldest are forgotten."""


def read_steps(tx: Transaction, ask: Ask) -> dict[str, Any]:
    """Return the draws, newest first; those of one train step, if it is asked for."""
    step = ask.number("step", least=-(2**63))
    equal = {} if step is None else {"step": step}
    before = ask.number("before")
    found = newest(tx, BATCHES, ask.text("buffer"), _SIZE + 1, before=before, **equal)
    rows = found[:_SIZE]
    return {"now": now_of(tx), "step": step, "rows": rows, "next": rows[-1]["id"] if len(found) > _SIZE else None}


def draw_steps(data: dict[str, Any], ask: Ask) -> dict[str, Any]:
    """Return plots of the rewards and the staleness of the draws on the page."""
    rows = data["rows"][::-1]
    plots: list[Plot | None] = []
    if data["step"] is None:
        for title, names in _PLOTTED.items():
            series = {
                name: [(row["taken_at"].timestamp(), float(row[name])) for row in rows if row[name] is not None]
                for name in names
            }
            plots.append(lines(title, series))
    return {"plots": [one for one in plots if one]}


def read_batch(tx: Transaction, ask: Ask) -> dict[str, Any]:
    """Return a draw with its groups, and those by who made them. Raises NoSuchBatchError."""
    number = ask.number("batch")
    found = newest(tx, BATCHES, None, 1, id=number)
    if not found:
        raise NoSuchBatchError(f"there is no batch {number}: the oldest are forgotten")
    groups = newest(tx, BATCH_GROUPS, None, 100_000, batch=number)
    return {"now": now_of(tx), "batch": found[0], "groups": groups, "workers": _by_worker(groups)}


def _by_worker(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups, the mean reward and staleness of each worker, the lowest rewards first."""
    members: dict[str | None, list[dict[str, Any]]] = {}
    for one in groups:
        members.setdefault(one["worker"], []).append(one)
    rows = [
        {
            "worker": worker,
            "groups": len(of_worker),
            "reward": _mean([one["reward"] for one in of_worker]),
            "staleness": _mean([one["staleness"] for one in of_worker]),
        }
        for worker, of_worker in members.items()
    ]
    return sorted(rows, key=lambda row: (row["reward"] is None, row["reward"] or 0))


def _mean(values: list[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None
