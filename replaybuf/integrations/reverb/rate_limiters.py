"""Reverb's rate limiters: how far inserts may be ahead of samples, and samples of inserts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class RateLimiter:
    """A rate limiter, translated to a buffer's limits: the fields of `Limits` (`replaybuf.rules.limits`)."""

    @property
    def limits(self) -> dict[str, Any]:
        raise NotImplementedError


@dataclass(frozen=True)
class MinSize(RateLimiter):
    """Samples wait until there are `min_size_to_sample` items; inserts never wait."""

    min_size_to_sample: int

    @property
    def limits(self) -> dict[str, Any]:
        return {"min_size": self.min_size_to_sample}


@dataclass(frozen=True)
class SampleToInsertRatio(RateLimiter):
    """Each item is sampled `samples_per_insert` times on average: samples and inserts wait for each other.

    The error, inserts * samples_per_insert - samples, stays in the range (low, high) of `error_buffer`. A single number
    e means the range min_size_to_sample * samples_per_insert +- e. Until there are `min_size_to_sample` items, samples
    wait and inserts don't.
    """

    samples_per_insert: float
    min_size_to_sample: int
    error_buffer: float | tuple[float, float]

    @property
    def limits(self) -> dict[str, Any]:
        return {
            "min_size": self.min_size_to_sample,
            "samples_per_insert": self.samples_per_insert,
            "error_buffer": self.error_buffer,
        }


@dataclass(frozen=True)
class Queue(RateLimiter):
    """Inserts wait while `size` more items were inserted than sampled; for `Table.queue` and `Table.stack`."""

    size: int

    @property
    def limits(self) -> dict[str, Any]:
        return {"min_size": 1, "samples_per_insert": 1.0, "error_buffer": (0.0, self.size)}
