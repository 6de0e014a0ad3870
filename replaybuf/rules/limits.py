"""The rules of a buffer: what is drawn, what is evicted, how often, how much, and how fast.

Parts are named as in DeepMind Reverb's tables: sampler, remover, rate limiter, max times sampled. Everything is pure:
the store keeps the numbers and asks these rules what is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal, TypeGuard

from replaybuf.common.checks import shown
from replaybuf.common.units import are, groups
from replaybuf.errors import ConfigError
from replaybuf.rules.policies import FIFOPolicy, ReplayPolicy
from replaybuf.values.rollouts.statuses import ASIDE, Status


@dataclass(frozen=True, slots=True)
class Level:
    """The numbers of a task that its limits depend on.

    `buffered` counts the groups that take room (all but leased, ARCHIVED, FILTERED, FAILED and FILLING ones),
    `completed` the COMPLETED ones among them, `inserted` the puts of completed groups, and `sampled` their draws.
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

    Raises ConfigError for a range in which puts or draws could block for ever.
    """

    samples_per_insert: float
    error_buffer: ErrorBuffer | None
    min_size: int

    def __post_init__(self) -> None:
        ratio, error = self.samples_per_insert, self.error_buffer
        _check_number("samples_per_insert", ratio)
        if error is not None and not isinstance(error, tuple):
            _check_number("error_buffer", error)
        elif error is not None and not (len(error) == 2 and all(map(_is_finite, error))):
            raise ConfigError(f"error_buffer must be one number, or the lowest and highest error, got {error!r:.100}")
        (low, high), begins, wide = self.errors, ratio * self.min_size, max(1.0, ratio)
        if self.drawable_when_puts_wait < 1 or low > begins or (self.min_size == 0 and high < ratio):
            raise ConfigError(
                f"error_buffer {self.tolerance} is too small for samples_per_insert {ratio:g} and min_size "
                f"{self.min_size}: puts or draws would wait for ever; use at least {wide:g}, or a range from at most "
                f"{begins:g} to at least {begins + 2 * wide:g}"
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
        """Return the number of draws allowed now, negative after too many."""
        low, _ = self.errors
        ahead = level.inserted * self.samples_per_insert - level.sampled - low
        return math.floor(ahead + _ROUNDING)

    def insertable(self, level: Level) -> int:
        """Return the number of completed groups that may be put now, negative after too many."""
        _, high = self.errors
        return math.floor((high + level.sampled) / self.samples_per_insert - level.inserted + _ROUNDING)

    @property
    def drawable_when_puts_wait(self) -> int:
        """The least number of draws allowed while puts are blocked."""
        ratio = Fraction(self.samples_per_insert).limit_denominator(10**6)
        low, high = map(Fraction, self.errors)
        # One more put would raise the error, a multiple of 1/q, above the maximum.
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
        """The error buffer as text."""
        low, high = self.errors
        return f"({low:g}, {high:g})" if isinstance(self.error_buffer, tuple) else f"{(high - low) / 2:g}"

    def __str__(self) -> str:
        """Return the rate limit as text."""
        default = " (the default)" if self.error_buffer is None else ""
        return f"samples_per_insert {self.samples_per_insert:g} with error_buffer {self.tolerance}{default}"


def _check_number(name: str, value: object) -> None:
    if not _is_finite(value) or value <= 0:
        raise ConfigError(f"{name} must be a positive number, got {shown(value)}")


def _is_finite(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -math.inf < value < math.inf


OnFull = Literal["evict", "block", "reject"]


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a task: how many groups it holds, how often they are drawn, and at what rate.

    `max_times_sampled`: a completed group is removed by its n-th draw; with 0 it stays. `capacity` bounds the groups of
    a task that take room (FILTERED and FAILED ones don't), and the remover evicts beyond it (`on_full="evict"`).
    Otherwise it bounds the completed groups, and a put of one more blocks ("block") or is refused ("reject"); groups of
    other statuses are not limited then. `min_size`: nothing is drawn while there are fewer completed groups.
    `samples_per_insert` keeps the number of draws per completed group put near this value: it blocks puts as well as
    draws. The formula is that of Reverb's SampleToInsertRatio limiter (`reverb/rate_limiters.py`): the error

        completed groups put * samples_per_insert - draws

    never rises above `high` by a put nor falls below `low` by a draw. An `error_buffer` of two numbers is (low, high);
    one number e stands for (o - e, o + e), where o = min_size * samples_per_insert, so that it counts from
    the first min_size groups on. Unlike in Reverb, puts never block while there are fewer completed groups than
    min_size, or than could be put at the beginning, high / samples_per_insert: expired, deleted and evicted groups are
    never drawn, and puts would wait for their draws for ever.

    `archive_groups` and `archive_seconds`: groups consumed by draws stay as ARCHIVED, up to this number per
    task or this age. `unfit_groups` and `unfit_seconds`: the same for FILTERED and FAILED groups, of each status; None
    for both keeps all of them. `max_deliveries`: a group that was leased this often without acknowledgement is set
    aside as FAILED; 0 means no limit. `fill_seconds`: a group that fills goes without the rollouts that are missing so
    long after the first one, and is drawable, or FAILED if too few are completed; None waits for ever.

    Raises ConfigError for values that could never deliver a batch.
    """

    max_times_sampled: int = 1
    capacity: int | None = None
    on_full: OnFull = "evict"
    min_size: int = 0
    samples_per_insert: float | None = None
    error_buffer: ErrorBuffer | None = None
    archive_groups: int | None = None
    archive_seconds: float | None = None
    unfit_groups: int | None = None
    unfit_seconds: float | None = None
    max_deliveries: int = 5
    fill_seconds: float | None = None

    def __post_init__(self) -> None:
        for name, least in (("max_times_sampled", 0), ("min_size", 0), ("max_deliveries", 0)):
            _check_count(name, getattr(self, name), least)
        for name, least in (("capacity", 1), ("archive_groups", 1), ("unfit_groups", 0)):
            if getattr(self, name) is not None:
                _check_count(name.removesuffix("_groups"), getattr(self, name), least)
        for name, seconds in (
            ("archive", self.archive_seconds),
            ("unfit", self.unfit_seconds),
            ("fill_seconds", self.fill_seconds),
        ):
            if seconds is not None and not 0 < seconds < math.inf:
                raise ConfigError(f"{name} must be a positive time, got {seconds!r} seconds")
        self._check_capacity()
        self._check_rate()

    @property
    def in_force(self) -> dict[str, Any]:
        """The fields that differ from the defaults, as processes record them."""
        return {limit.name: value for limit in fields(self) if (value := getattr(self, limit.name)) != limit.default}

    @classmethod
    def recorded(cls, stored: Mapping[str, Any]) -> Limits | None:
        """Return the limits of which a process recorded what is `in_force`; None if they can't be read."""
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in stored.items()
        }
        with suppress(ConfigError, TypeError):  # written by another version
            return cls(**values)
        return None

    def _check_capacity(self) -> None:
        if self.capacity is None:
            if self.on_full != "evict" and self.samples_per_insert is None:
                raise ConfigError(f"on_full={self.on_full!r} needs a capacity: the buffer is never full without one")
            return
        if self.capacity < self.min_size:
            raise ConfigError(
                f"capacity {self.capacity} is below min_size {self.min_size}: nothing could ever be drawn; "
                "raise capacity or lower min_size"
            )
        if self.on_full == "block" and self.max_times_sampled == 0:
            raise ConfigError(
                "max_times_sampled=0 keeps every group, so with on_full='block' all puts would wait for ever once the "
                "buffer is full; use on_full='evict', or a number of samples"
            )

    def _check_rate(self) -> None:
        ratio, error, times = self.samples_per_insert, self.error_buffer, self.max_times_sampled
        if ratio is None:
            if error is not None:
                raise ConfigError("error_buffer needs samples_per_insert, whose tolerance it is")
            return
        rate = Rate(ratio, error, self.min_size)
        if times and ratio > times:
            raise ConfigError(
                f"samples_per_insert {ratio:g} can't be reached with max_times_sampled {times}: puts would wait for "
                "ever; lower the one or raise the other"
            )
        if self.capacity is None or self.on_full == "evict":
            return
        if ratio != times:
            raise ConfigError(
                f"with samples_per_insert {ratio:g} and max_times_sampled {times} more is put than leaves, so with "
                f"on_full={self.on_full!r} the buffer fills up and nothing moves any more; use on_full='evict', or the "
                "same number for both"
            )
        if (drawable := rate.drawable_when_full(self.capacity)) < 1:
            raise ConfigError(
                f"error_buffer {rate.tolerance} is too small for capacity {self.capacity} and min_size "
                f"{self.min_size}: nothing could be drawn from a full buffer; widen it, or raise the capacity to "
                f"{self.capacity + 1 - drawable}"
            )

    # Draws

    def keeps(self, status: Status, times_sampled: int) -> bool:
        """Return whether a group of this status stays after its n-th draw (`times_sampled`); only completed ones do."""
        if status != Status.COMPLETED:
            return False
        return self.max_times_sampled == 0 or times_sampled < self.max_times_sampled

    @property
    def archives(self) -> bool:
        """Whether groups consumed by draws stay as ARCHIVED."""
        return self.archive_groups is not None or self.archive_seconds is not None

    @property
    def keeps_unfit(self) -> bool:
        """Whether FILTERED and FAILED groups have a bound: then strategies keep the ones they make, too."""
        return self.unfit_groups is not None or self.unfit_seconds is not None

    def bound_aside(self, status: Status) -> tuple[int | None, float | None]:
        """Return the retention of a status that takes no room: the number of groups in each task, and seconds."""
        if status == Status.FILLING:
            return None, None
        if status == Status.ARCHIVED:
            return self.archive_groups, self.archive_seconds
        return self.unfit_groups, self.unfit_seconds

    @property
    def bounded_aside(self) -> tuple[Status, ...]:
        """The statuses that take no room and have a retention of their own."""
        return tuple(status for status in ASIDE if self.bound_aside(status) != (None, None))

    @property
    def slows_draws(self) -> bool:
        """Whether draws of completed groups may block although there are some."""
        return self.min_size > 1 or self.samples_per_insert is not None

    @property
    def slows_puts(self) -> bool:
        """Whether a put may block or be refused."""
        return self.samples_per_insert is not None or (self.capacity is not None and self.on_full != "evict")

    def drawable(self, level: Level, archived: int = 0) -> int:
        """Return the number of completed groups, and so many archived ones, that may be drawn now."""
        if level.completed < self.min_size:
            return 0
        rate, stored = self.rate, level.completed + archived
        return stored if rate is None else max(0, min(stored, rate.drawable(level)))

    def insertable(self, level: Level, status: Status) -> int | None:
        """Return the number of groups of this status that may be put now; None for any number.

        Eviction makes room by itself. Otherwise only completed groups are limited and fill the buffer: unfinished
        groups are removed by the producer that takes and finishes them, so a producer waiting for their removal would
        block for ever.
        """
        if status != Status.COMPLETED:
            return None
        room = None if self.capacity is None or self.on_full == "evict" else max(0, self.capacity - level.completed)
        rate = self.rate
        if rate is None:
            return room
        # Lost groups are never drawn, and consumers may need as many groups as there were at the beginning.
        allowed = max(0, rate.insertable(level), self._always_insertable(rate) - level.completed)
        return allowed if room is None else min(room, allowed)

    @property
    def largest_batch(self) -> int | None:
        """The largest number of groups of a task that can be drawn at once; None for any number.

        Larger batches could block for ever, because puts would block, too.
        """
        rate = self.rate
        if rate is None:
            return self.capacity
        largest = min(rate.drawable_when_puts_wait, self._always_insertable(rate))
        if self.capacity is not None and self.on_full != "evict":
            largest = min(largest, rate.drawable_when_full(self.capacity))
        return largest

    def _always_insertable(self, rate: Rate) -> int:
        """Return the number of completed groups that are always allowed: those that can be put before a draw."""
        number = rate.insertable_at_first
        return number if self.capacity is None else min(number, self.capacity)

    @property
    def rate(self) -> Rate | None:
        """The rate limit, None without one; its str() is for people."""
        if self.samples_per_insert is None:
            return None
        return _rate(self.samples_per_insert, self.error_buffer, self.min_size)

    def why_full(self, level: Level, status: Status) -> str:
        """Return why there is no room for a put, as the middle of FullError's sentence."""
        if self.capacity is not None and self.on_full != "evict" and level.completed >= self.capacity:
            return f"{are(level.completed, 'completed')} buffered, and the capacity is {self.capacity}"
        puts = f"{groups(level.inserted, 'completed')} {'was' if level.inserted == 1 else 'were'} put"
        return f"{puts} and {level.sampled} drawn, and {self.rate} allows no more"

    def why_slow(self, level: Level) -> str:
        """Return which limit blocks draws, as text; "" if none does."""
        if level.completed < self.min_size:
            return f"min_size is {self.min_size}"
        if self.samples_per_insert is not None and self.drawable(level) < level.completed:
            return (
                f"samples_per_insert {self.samples_per_insert:g} allows {self.drawable(level)} now: "
                f"{level.inserted} were put and {level.sampled} drawn"
            )
        return ""


@dataclass(frozen=True, slots=True)
class Rules:
    """The sampler, the remover, and the limits. Raises ConfigError for two random orders."""

    sampler: ReplayPolicy = field(default_factory=FIFOPolicy)
    remover: ReplayPolicy = field(default_factory=FIFOPolicy)
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        random = [policy for policy in (self.sampler, self.remover) if policy.key is not None]
        if len({policy.key for policy in random}) > 1 or len({policy.seed for policy in random} - {None}) > 1:
            raise ConfigError(
                f"the policies {self.sampler.name} and {self.remover.name} are random in two ways: a buffer has one "
                "random order, with one seed; use one of them for both, or another remover"
            )

    @property
    def random(self) -> tuple[str, int | None] | None:
        """The sampling key of the random policies and their seed, if one is given; None if neither is random."""
        keys = [(policy.key, policy.seed) for policy in (self.sampler, self.remover) if policy.key is not None]
        return max(keys, key=lambda pair: pair[1] is not None, default=None)


#: Validated once, since puts and draws ask for it.
_rate = lru_cache(100)(Rate)


def _check_count(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**53:
        raise ConfigError(f"{name} must be a whole number of at least {least}, got {shown(value)}")
