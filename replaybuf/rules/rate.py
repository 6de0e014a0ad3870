"""The rate limiter: how far puts of a task may run ahead of draws, and draws of puts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from replaybuf.errors import ConfigError
from replaybuf.rollouts.statuses import ASIDE, Status


@dataclass(frozen=True, slots=True)
class Level:
    """The numbers of a task that its limits look at.

    `buffered` counts the groups that take room: those that are neither leased nor archived, filtered or failed;
    `completed` those of them that are COMPLETED, `inserted` the completed groups that were put, `sampled` the draws of
    completed groups.
    """

    buffered: int = 0
    completed: int = 0
    inserted: int = 0
    sampled: int = 0

    def joined_by(self, status: Status) -> Level:
        """Return the level after one more group of this status was put."""
        completed = status == Status.COMPLETED
        buffered = self.buffered + (status not in ASIDE)
        return Level(buffered, self.completed + completed, self.inserted + completed, self.sampled)

    def without(self, removed: Iterable[Status]) -> Level:
        """Return the level after groups of these statuses were replaced."""
        statuses = list(removed)
        completed = statuses.count(Status.COMPLETED)
        buffered = sum(status not in ASIDE for status in statuses)
        return Level(self.buffered - buffered, self.completed - completed, self.inserted, self.sampled)


#: A tolerance in draws, or the lowest and highest error.
ErrorBuffer = float | tuple[float, float]

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Rate:
    """Keeps the error, completed groups put * samples_per_insert - draws, in a range (see `Limits`).

    Raises ConfigError for a range in which puts or draws could never go on.
    """

    samples_per_insert: float
    error_buffer: ErrorBuffer | None
    min_size: int

    def __post_init__(self) -> None:
        ratio, error = self.samples_per_insert, self.error_buffer
        _check_number("samples_per_insert", ratio)
        if isinstance(error, tuple):
            self._check_range(error)
        elif error is not None:
            _check_number("error_buffer", error)
            if error < max(1.0, ratio):
                raise ConfigError(
                    f"error_buffer {error:g} is too small for samples_per_insert {ratio:g}: neither puts nor draws "
                    f"could go on; use at least {max(1.0, ratio):g}"
                )

    def _check_range(self, error: tuple[float, ...]) -> None:
        ratio = self.samples_per_insert
        if len(error) != 2 or any(isinstance(end, bool) or not isinstance(end, (int, float)) for end in error):
            raise ConfigError(
                f"error_buffer must be one number, or the lowest and the highest error, got {error!r:.100}"
            )
        low, high = error
        if not (math.isfinite(low) and math.isfinite(high) and self.drawable_when_puts_wait >= 1):
            raise ConfigError(
                f"error_buffer {self.tolerance} is too narrow for samples_per_insert {ratio:g}: neither puts nor "
                f"draws could go on; its ends must be finite, {2 * max(1.0, ratio):g} apart are enough"
            )
        begins = ratio * self.min_size
        if low > begins:
            raise ConfigError(
                f"error_buffer {self.tolerance} is above samples_per_insert * min_size, {begins:g}: min_size groups "
                f"would be there, and none could be drawn; use a first number of at most {begins:g}, or a min_size of "
                f"at least {math.ceil(low / ratio)}"
            )
        if self.min_size == 0 and high < ratio:
            raise ConfigError(
                f"error_buffer {self.tolerance} allows no put of the first group: use a second number of at least "
                f"{ratio:g}, the samples_per_insert, or a min_size of at least 1"
            )

    @property
    def errors(self) -> tuple[float, float]:
        """The lowest and the highest error. The default tolerance leaves room for a batch of `min_size` groups."""
        if isinstance(self.error_buffer, tuple):
            return self.error_buffer
        ratio, tolerance = self.samples_per_insert, self.error_buffer
        begins = ratio * self.min_size
        if tolerance is None:
            tolerance = max(2 * max(1.0, ratio), begins)
        return begins - tolerance, begins + tolerance

    def drawable(self, level: Level) -> int:
        """Return the number of draws that are allowed now, below 0 when there were too many."""
        low, _ = self.errors
        ahead = level.inserted * self.samples_per_insert - level.sampled - low
        return math.floor(ahead + _ROUNDING)

    def insertable(self, level: Level) -> int:
        """Return the number of completed groups that may be put now, below 0 when there were too many."""
        _, high = self.errors
        return math.floor((high + level.sampled) / self.samples_per_insert - level.inserted + _ROUNDING)

    @property
    def drawable_when_puts_wait(self) -> int:
        """The number of draws that are allowed at least when puts are held back."""
        ratio = Fraction(self.samples_per_insert).limit_denominator(10**6)
        low, high = map(Fraction, self.errors)
        # One more put would take the error, which goes in steps of 1/q, above the highest one.
        step = Fraction(1, ratio.denominator)
        error = (math.floor((high - ratio) / step) + 1) * step
        return math.floor(error - low)

    @property
    def insertable_at_first(self) -> int:
        """The number of completed groups that can be put before the first draw."""
        _, high = self.errors
        return max(self.min_size, math.floor(high / self.samples_per_insert + _ROUNDING))

    def drawable_when_full(self, capacity: int) -> int:
        """Return the number of draws when the buffer is full and each group was drawn as often as possible."""
        low, _ = self.errors
        return min(capacity, math.floor(capacity - low + _ROUNDING))

    @property
    def tolerance(self) -> str:
        """The error buffer, for people."""
        low, high = self.errors
        return f"({low:g}, {high:g})" if isinstance(self.error_buffer, tuple) else f"{(high - low) / 2:g}"

    def __str__(self) -> str:
        """Return the rate limit, for people."""
        default = " (the default)" if self.error_buffer is None else ""
        return f"samples_per_insert {self.samples_per_insert:g} with error_buffer {self.tolerance}{default}"


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ConfigError(f"{name} must be a positive number, got {value!r:.100}")
