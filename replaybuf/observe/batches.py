"""What a batch is made of, for loggers: what was generated now and what is replayed, apart by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from replaybuf.observe.completions import Drawn, items_of
from replaybuf.storage.values import StorageItem

#: The names for each kind of groups; `docs/metrics.md` has what they mean.
NAMES = (
    *("groups", "rollouts", "reward/mean", "reward/min", "reward/max", "staleness/mean", "staleness/max"),
    "age_seconds/max",
)
#: The kinds of groups in a batch: drawn for the first time, and drawn before.
KINDS = ("new", "replayed")


def batch_metrics(drawn: Drawn, *, now: float, prefix: str = "batch/") -> dict[str, float]:
    """Return numbers of a batch for a logger, flat: `{"batch/new/groups": 60, "batch/replayed/groups": 4, ...}`.

    `drawn` is what `sample` returns, or `lease.items`; `now` is in seconds since the epoch (`time.time()`). Groups that
    were never drawn before are `new`, the others `replayed`. A kind without groups has only its number, and one
    without rewards no rewards. Raises InputError.
    """
    items = items_of(drawn)
    numbers: dict[str, float] = {}
    for kind in KINDS:
        chosen = [item for item in items if (item.times_sampled > 1) == (kind == "replayed")]
        numbers |= {f"{prefix}{kind}/{name}": value for name, value in _numbers(chosen, now).items()}
    return numbers


def _numbers(items: Sequence[StorageItem[Any]], now: float) -> dict[str, float]:
    found: dict[str, float] = {"groups": len(items), "rollouts": sum(len(item.item) for item in items)}
    rewards = [item.reward for item in items if item.reward is not None]
    staleness = [item.staleness for item in items]
    found |= _of(rewards, "reward", mean=_mean, min=min, max=max)
    found |= _of(staleness, "staleness", mean=_mean, max=max)
    found |= _of([now - item.created_at for item in items], "age_seconds", max=max)
    return found


def _of(values: Sequence[float], name: str, **functions: Callable[[Iterable[float]], float]) -> dict[str, float]:
    return {f"{name}/{what}": function(values) for what, function in functions.items()} if values else {}


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)
