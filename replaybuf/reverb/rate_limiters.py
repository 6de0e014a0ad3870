"""Reverb's rate limiters: how far inserts may be ahead of samples, and samples of inserts."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from replaybuf.checks import whole
from replaybuf.errors import ConfigError


class RateLimiter(ABC):
    """A rate limiter, by the limits that do the same here."""

    @property
    @abstractmethod
    def limits(self) -> dict[str, Any]:
        """The fields of `Limits` (`replaybuf.rules.limits`)."""

    @property
    def error_range(self) -> tuple[float, float]:
        """The lowest and the highest error that it allows."""
        low, high = self.limits.get("error_buffer", (-math.inf, math.inf))
        return low, high


@dataclass(frozen=True)
class MinSize(RateLimiter):
    """Samples wait until there are `min_size_to_sample` items; inserts never do."""

    min_size_to_sample: int

    def __post_init__(self) -> None:
        _check_count("min_size_to_sample", self.min_size_to_sample)

    @property
    def limits(self) -> dict[str, Any]:
        return {"min_size": self.min_size_to_sample}


@dataclass(frozen=True)
class SampleToInsertRatio(RateLimiter):
    """Each item is sampled `samples_per_insert` times on average: samples and inserts wait for each other.

    The error, inserts * samples_per_insert - samples, stays in the range (low, high) that `error_buffer` gives. One
    number e stands for min_size_to_sample * samples_per_insert - e to + e. Until there are `min_size_to_sample` items,
    samples wait and inserts don't.
    """

    samples_per_insert: float
    min_size_to_sample: int
    error_buffer: float | tuple[float, float]

    def __post_init__(self) -> None:
        _check_count("min_size_to_sample", self.min_size_to_sample)
        if isinstance(self.error_buffer, list):
            object.__setattr__(self, "error_buffer", tuple(self.error_buffer))

    @property
    def limits(self) -> dict[str, Any]:
        return {
            "min_size": self.min_size_to_sample,
            "samples_per_insert": self.samples_per_insert,
            "error_buffer": self.error_buffer,
        }

    @property
    def error_range(self) -> tuple[float, float]:
        if isinstance(self.error_buffer, tuple):
            return self.error_buffer
        begins = self.min_size_to_sample * self.samples_per_insert
        return begins - self.error_buffer, begins + self.error_buffer


@dataclass(frozen=True)
class Queue(RateLimiter):
    """Inserts wait while `size` more items were inserted than sampled; for a table of its own: `Table.queue`."""

    size: int

    def __post_init__(self) -> None:
        _check_count("size", self.size)

    @property
    def limits(self) -> dict[str, Any]:
        return {"min_size": 1, "samples_per_insert": 1.0, "error_buffer": (0.0, float(self.size))}


@dataclass(frozen=True)
class Stack(Queue):
    """The same for `Table.stack`."""


def _check_count(name: str, value: object) -> None:
    number = whole(value)
    if number is None or number < 1:
        raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r:.100}")
