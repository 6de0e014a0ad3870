"""Which option to change, and how, where a limit holds back draws or puts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from replaybuf.errors import ConfigError
from replaybuf.rollouts.statuses import Status
from replaybuf.rules.limits import Limits
from replaybuf.rules.rate import Level


def to_draw(limits: Limits, level: Level, count: int) -> list[str]:
    """Return what lets so many groups be drawn that are there, and are held back."""
    rate, ratio = limits.rate, limits.samples_per_insert
    if level.completed < limits.min_size or rate is None or ratio is None:
        return ["lower min_size"]
    low, high = rate.errors
    lacking = count - rate.drawable(level)
    wider = f"raise error_buffer to {(high - low) / 2 + lacking:g}"
    if isinstance(limits.error_buffer, tuple):
        wider = f"lower the first number of error_buffer to {low - lacking:g}"
    more = _allows_more(limits, 2 * ratio, lambda changed: changed.drawable(level))
    return [*(["raise samples_per_insert"] if more else []), wider]


def to_put(limits: Limits, level: Level) -> list[str]:
    """Return what lets more completed groups be put, where they are held back."""
    ratio, full = limits.samples_per_insert, limits.capacity is not None and level.completed >= limits.capacity
    if ratio is None or (full and limits.on_full != "evict"):
        return ["raise the capacity"]
    two = isinstance(limits.error_buffer, tuple)
    less = _allows_more(limits, ratio / 2, lambda changed: changed.insertable(level, Status.COMPLETED) or 0)
    return [
        *(["lower samples_per_insert"] if less else []),
        "raise the second number of error_buffer" if two else "raise error_buffer",
    ]


def _allows_more(limits: Limits, ratio: float, allowed: Callable[[Limits], int]) -> bool:
    """Return whether another `samples_per_insert` is valid beside the other options, and allows more."""
    try:
        return allowed(replace(limits, samples_per_insert=ratio)) > allowed(limits)
    except ConfigError:
        return False
