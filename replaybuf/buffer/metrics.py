"""Metrics: counts of groups that are put, drawn and removed, as plain dicts with stable names.

New groups are counted apart from replayed ones: `put` and `sampled_new` count groups once, `sampled_again` counts
repeated draws. Draws of completed groups, for training, are counted apart from draws of groups to be finished or
regenerated (`taken_unfinished`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from replaybuf.rules.transitions import OF_COMPLETED, TOTALS, UNFINISHED, LaneName, of_tasks
from replaybuf.values.rollouts.statuses import Status

if TYPE_CHECKING:  # the command uses the figures without a buffer
    from replaybuf.buffer.waits import Waits, WaitStats
    from replaybuf.storage.sql.backend import SQLStorage

__all__ = ["DISTRIBUTIONS", "OF_COMPLETED", "RATES", "TOTALS", "UNFINISHED", "of_tasks"]

#: The totals that are also given as a rate.
RATES = ("put", "sampled_new", "sampled_again", "taken")
#: The fields whose distribution is given.
DISTRIBUTIONS = ("staleness", "times_sampled")


class Meter:
    """Computes rates from the totals of the last reading."""

    def __init__(self) -> None:
        self._time = time.monotonic()
        self._totals: dict[str, dict[str, int]] = {}

    async def read(self, storage: SQLStorage, waits: Waits, *, distributions: bool) -> dict[str, Any]:
        """Return the current metrics. Rates are averages since the last reading, and 0 at the first."""
        tallies = await storage.tallies()
        now = time.monotonic()
        elapsed = max(now - self._time, 1e-9)
        tasks = of_tasks(tallies)
        for task, numbers in tasks.items():
            before = self._totals.get(task, {} if self._totals else numbers)
            self._totals[task] = {name: numbers[name] for name in RATES}
            numbers |= {f"{name}_per_second": (numbers[name] - before.get(name, 0)) / elapsed for name in RATES}
        self._time = now
        if distributions:
            for field, histogram in (await storage.histograms(DISTRIBUTIONS)).items():
                add_distributions(tasks, field, histogram)
        return {
            "seconds": elapsed,
            "tasks": tasks,
            "waits": {"groups": _waited(waits.for_groups), "room": _waited(waits.for_room)},
        }


def add_distributions(
    tasks: Mapping[str, dict[str, Any]], field: str, histogram: Mapping[LaneName, Mapping[int, int]]
) -> None:
    """Add the distribution of a field among the completed groups of each task."""
    for (task, status), counts in histogram.items():
        if task in tasks and status == Status.COMPLETED:
            tasks[task][field] = describe(counts)


def describe(counts: Mapping[int, int]) -> dict[str, Any]:
    """Return mean, quantiles and counts of a distribution of whole numbers, given as value -> count."""
    values = sorted(counts)
    total = sum(counts.values())

    def quantile(q: float) -> int:
        seen = 0
        for value in values:
            seen += counts[value]
            if seen >= q * total:
                return value
        return values[-1]

    return {
        "mean": sum(value * n for value, n in counts.items()) / total,
        "min": values[0],
        "p50": quantile(0.5),
        "p90": quantile(0.9),
        "max": values[-1],
        "counts": {value: counts[value] for value in values},
    }


def flatten(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return nested metrics as one dict of numbers for loggers: `{"tasks/math/put": 12, ...}`.

    The `counts` of distributions are left out: each of their values would be a name of its own.
    """
    flat: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            if name == "counts":
                continue
            flat |= flatten(value, f"{prefix}{name}/")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _waited(waited: WaitStats) -> dict[str, float]:
    return {"count": waited.count, "seconds": waited.seconds, "timeouts": waited.timeouts}
