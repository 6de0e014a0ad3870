"""Metrics of a buffer (`metrics()`): counts and distributions of its groups, as plain dicts with stable names.

New groups and replayed ones have separate counts: `put` and `sampled_new` count groups once, `sampled_again` counts
repeated draws. So have draws of completed groups, for training, and of groups to be finished (`taken_unfinished`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from replaybuf.rules.transitions import OF_COMPLETED, TOTALS, UNFINISHED, LaneName, of_tasks
from replaybuf.values.rollouts.statuses import Status

if TYPE_CHECKING:  # the command uses the figures without a buffer
    from replaybuf.buffer.waits import Waits
    from replaybuf.storage.sql.backend import SQLStorage

__all__ = ["DISTRIBUTIONS", "OF_COMPLETED", "TOTALS", "UNFINISHED", "of_tasks"]

#: The fields whose distribution is given.
DISTRIBUTIONS = ("staleness", "times_sampled")


async def read_metrics(storage: SQLStorage, waits: Waits, *, distributions: bool) -> dict[str, Any]:
    """Return the current metrics of a buffer, as `ReplayBuffer.metrics` documents them."""
    tasks = of_tasks(await storage.tallies())
    if distributions:
        for field, histogram in (await storage.histograms(DISTRIBUTIONS)).items():
            add_distributions(tasks, field, histogram)
    return {"tasks": tasks, "waits": {"groups": asdict(waits.for_groups), "room": asdict(waits.for_room)}}


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
        count = 0
        for value in values:
            count += counts[value]
            if count >= q * total:
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
