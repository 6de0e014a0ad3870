"""Histograms of latencies with a constant relative error, which processes fill and the parent adds up exactly."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

#: A quantile differs from that of the values themselves by at most this part of it (between LEAST and MOST).
RELATIVE_ERROR = 0.01
#: Seconds: shorter and longer ones count as these; the longest is known exactly as well.
LEAST, MOST = 1e-6, 1e4

# The middle of a bucket is at most RELATIVE_ERROR from both of its ends.
_LOG_GROWTH = math.log((1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR))
_LOG_LEAST = math.log(LEAST)
_BUCKETS = math.ceil((math.log(MOST) - _LOG_LEAST) / _LOG_GROWTH) + 1

#: Counts by bucket, the sum, the longest.
Packed = tuple[dict[int, int], int, float]


class Histogram:
    """Counts of seconds in buckets that grow by a constant factor; about 8 kB, however many there are."""

    __slots__ = ("counts", "longest", "total")

    def __init__(self) -> None:
        self.counts: npt.NDArray[np.int64] = np.zeros(_BUCKETS, np.int64)
        #: The sum of all in nanoseconds, so that adding up is exact in any order, and the longest in seconds.
        self.total, self.longest = 0, 0.0

    def add(self, seconds: float) -> None:
        """Count a latency."""
        seconds = max(seconds, 0.0)
        place = int((math.log(max(seconds, LEAST)) - _LOG_LEAST) / _LOG_GROWTH)
        self.counts[min(place, _BUCKETS - 1)] += 1
        self.total += round(seconds * 1e9)
        self.longest = max(self.longest, seconds)

    def merge(self, other: Histogram) -> None:
        """Add the counts of another one: exactly what this one would have, had it counted both."""
        self.counts += other.counts
        self.total += other.total
        self.longest = max(self.longest, other.longest)

    @property
    def count(self) -> int:
        """The number of latencies."""
        return int(self.counts.sum())

    def quantile(self, q: float) -> float | None:
        """Return the seconds that the part `q` of the latencies doesn't exceed, within RELATIVE_ERROR; None for none.

        It is a latency that was measured (the lowest of those with that rank), not one between two.
        """
        count = self.count
        if not count:
            return None
        rank = max(1, math.ceil(q * count - 1e-9))
        if rank == count:
            return self.longest
        place = int(np.searchsorted(self.counts.cumsum(), rank))
        low = math.exp(_LOG_LEAST + place * _LOG_GROWTH)
        return min(low * (1 + RELATIVE_ERROR), self.longest)

    def figures(self) -> dict[str, float | None]:
        """Return mean, quantiles and maximum, in milliseconds; None where there is no latency."""
        count = self.count
        seconds = {
            "mean_ms": self.total / count / 1e9 if count else None,
            **{name: self.quantile(q) for name, q in QUANTILES.items()},
            "max_ms": self.longest if count else None,
        }
        return {name: None if value is None else value * 1000 for name, value in seconds.items()}

    def packed(self) -> Packed:
        """Return the buckets that are not zero, to be sent to another process."""
        places = np.flatnonzero(self.counts)
        return dict(zip(places.tolist(), self.counts[places].tolist(), strict=True)), self.total, self.longest

    @classmethod
    def unpacked(cls, packed: Packed) -> Histogram:
        """Return the histogram that was packed."""
        made = cls()
        counts, made.total, made.longest = packed
        for place, count in counts.items():
            made.counts[place] = count
        return made


#: The quantiles that are told of, by their names in JSON.
QUANTILES = {"p50_ms": 0.5, "p90_ms": 0.9, "p99_ms": 0.99, "p999_ms": 0.999}
