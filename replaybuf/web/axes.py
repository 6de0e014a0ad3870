"""Axes of plots: the range that an axis shows, and round numbers, train steps or times on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from replaybuf import units

_MOST_TICKS, _MOST_TIMES = 6, 4
_SECOND_STEPS = (1, 2, 5, 10, 15, 30)
#: The distances in seconds that times on an axis may have.
_TIME_STEPS = (
    *_SECOND_STEPS,
    *(60 * one for one in _SECOND_STEPS),
    *(3600 * one for one in (1, 2, 3, 6, 12)),
    *(86_400 * one for one in (1, 2, 7, 14, 28)),
)


@dataclass(frozen=True, slots=True)
class Axis:
    """What an axis shows, from `low` to `high`, and its ticks: values with their texts."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]

    def place(self, value: float) -> float:
        """Return where a value is: 0 at `low`, 1 at `high`."""
        return (value - self.low) / ((self.high - self.low) or 1.0)


@dataclass(frozen=True, slots=True)
class Scale:
    """What the values along the bottom are: how one is written, and where the ticks between two of them are."""

    write: Callable[[float, float], str]
    ticks: Callable[[float, float], list[float]]

    def axis(self, low: float, high: float) -> Axis:
        """Return an axis from the first value to the last."""
        return Axis(low, high, tuple((one, self.write(one, high - low)) for one in self.ticks(low, high)))


def value_axis(values: Iterable[float], *, fitted: bool) -> Axis:
    """Return the axis of values, which begins and ends with a tick: from 0 unless it is `fitted` to them."""
    found = [*values]
    low, high = (min(found), max(found)) if fitted else (min(0.0, *found), max(0.0, *found))
    if low == high:
        spread = abs(low) / 20 or 0.5
        low, high = (low - spread, high + spread) if fitted else (low, 1.0)
    step = _round_step((high - low) / (_MOST_TICKS - 2))
    first, last = math.floor(low / step), math.ceil(high / step)
    ticks = tuple((one * step, written(one * step, step)) for one in range(first, last + 1))
    return Axis(first * step, last * step, ticks)


def written(value: float, step: float) -> str:
    """Return a value with the digits that tell it from one a step away."""
    if step >= 100 or abs(value) >= 10_000:
        return units.short(round(value))
    return f"{value:,.{max(0, -math.floor(math.log10(step)))}f}"


def _round_step(least: float) -> float:
    """Return the smallest of 1, 2, 5, 10, ... (and 0.5, 0.2, ...) that is at least this."""
    if not math.isfinite(least) or least < 1e-300:
        return 1.0 if least < 1.0 else 1e308
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * one for one in (1, 2, 5, 10) if power * one >= least * (1 - 1e-9))


def _step_ticks(low: float, high: float) -> list[float]:
    return _multiples(max(1, round(_round_step((high - low) / _MOST_TICKS))), low, high)


def _time_ticks(low: float, high: float) -> list[float]:
    step = next((one for one in _TIME_STEPS if (high - low) / one <= _MOST_TIMES), _TIME_STEPS[-1])
    return _multiples(step, low, high)


def _multiples(step: int, low: float, high: float) -> list[float]:
    return [float(one * step) for one in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _write_time(seconds: float, span: float) -> str:
    if span > 4 * 86_400:
        form = "%b %d"
    elif span > 86_400:
        form = "%b %d %H:%M"
    else:
        form = "%H:%M" if span > 600 else "%H:%M:%S"
    return datetime.fromtimestamp(seconds, UTC).strftime(form)


#: Train steps, and times in seconds since the epoch.
STEPS = Scale(lambda value, span: f"{value:,.0f}", _step_ticks)
TIMES = Scale(_write_time, _time_ticks)
