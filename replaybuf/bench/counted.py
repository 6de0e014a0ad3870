"""Counters of the processes of a load (latencies, uid ledgers, errors), which the parent adds up exactly."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate

from xxhash import xxh64_intdigest

#: The calls whose latencies are kept, by their names in JSON, with what people read.
CALLS = {
    "put": "put",
    "put_waited": "put that waited for room",
    "put_due": "put, from when it was due",
    "take": "take, less its wait",
    "acknowledge": "acknowledge",
}
#: The quantiles that are told of, by their names in JSON.
QUANTILES = {"p50_ms": 0.5, "p90_ms": 0.9, "p99_ms": 0.99, "p999_ms": 0.999}

#: A quantile differs from that of the values themselves by at most this part of it (between LEAST and MOST).
RELATIVE_ERROR = 0.01
#: Seconds: shorter and longer ones count as these; the longest is known exactly as well.
LEAST, MOST = 1e-6, 1e4
# The middle of a bucket is at most RELATIVE_ERROR from both of its ends.
_LOG_GROWTH = math.log((1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR))


@dataclass(slots=True)
class Histogram:
    """Counts of seconds in buckets that grow by a constant factor, so that quantiles have a constant relative error.

    `total` is the sum of all in nanoseconds, so that adding up is exact in any order, `longest` is in seconds.
    """

    counts: Counter[int] = field(default_factory=Counter)
    total: int = 0
    longest: float = 0.0

    def add(self, seconds: float) -> None:
        """Count a latency."""
        seconds = max(seconds, 0.0)
        self.counts[int(math.log(min(max(seconds, LEAST), MOST) / LEAST) / _LOG_GROWTH)] += 1
        self.total += round(seconds * 1e9)
        self.longest = max(self.longest, seconds)

    def merge(self, other: Histogram) -> None:
        """Add the counts of another one: exactly what this one would have, had it counted both."""
        self.counts.update(other.counts)
        self.total += other.total
        self.longest = max(self.longest, other.longest)

    def quantile(self, q: float) -> float | None:
        """Return the seconds that the part `q` of the latencies doesn't exceed, within RELATIVE_ERROR; None for none.

        It is a latency that was measured (the lowest of those with that rank), not one between two.
        """
        count = self.counts.total()
        rank = max(1, math.ceil(q * count - 1e-9))
        if rank >= count:
            return self.longest if count else None
        places = sorted(self.counts)
        below = accumulate(self.counts[place] for place in places)
        place = next(place for place, most in zip(places, below, strict=True) if most >= rank)
        return min(LEAST * math.exp(place * _LOG_GROWTH) * (1 + RELATIVE_ERROR), self.longest)

    def figures(self) -> dict[str, float | None]:
        """Return mean, quantiles and maximum, in milliseconds; None where there is no latency."""
        count = self.counts.total()
        if not count:
            return dict.fromkeys(("mean_ms", *QUANTILES, "max_ms"))
        quantiles = {name: 1000 * (self.quantile(q) or 0.0) for name, q in QUANTILES.items()}
        return {"mean_ms": self.total / count / 1e6, **quantiles, "max_ms": 1000 * self.longest}


@dataclass(slots=True)
class UidSums:
    """The uids of groups, in constant memory: their number, and the sum of their hashes.

    Two ledgers that are equal have, but for one chance in 2^64, the same uids, each as often.
    """

    count: int = 0
    total: int = 0

    def add(self, *uids: int) -> UidSums:
        """Write down uids; return this ledger."""
        self.count += len(uids)
        self.total = (self.total + sum(xxh64_intdigest(uid.to_bytes(8, "big")) for uid in uids)) % (1 << 64)
        return self

    def __add__(self, other: UidSums) -> UidSums:
        return UidSums(self.count + other.count, (self.total + other.total) % (1 << 64))


@dataclass(slots=True)
class Said:
    """An error or a warning: how often, and its first text."""

    count: int
    first: str


@dataclass(slots=True)
class Report:
    """The counters of a process since it began, but for `latencies`, which are those since its last report.

    `refused`: puts that found no room within their time, and were put again. `starved`: takes that found no batch
    within theirs. `late`: puts that were due, and weren't begun when the time was over. `in_doubt`: puts of which it
    isn't known whether they were stored. `waits` are those of the buffer's calls, `waited` their seconds; `pauses` are
    those of workers while there were enough groups. `cpu` is in seconds, `memory` in bytes; `last` says that the
    process ends, as it should.
    """

    put: UidSums = field(default_factory=UidSums)
    taken: UidSums = field(default_factory=UidSums)
    latencies: dict[str, Histogram] = field(default_factory=dict)
    errors: dict[tuple[str, str], Said] = field(default_factory=dict)
    warnings: dict[str, Said] = field(default_factory=dict)
    waits: int = 0
    waited: float = 0.0
    pauses: int = 0
    paused: float = 0.0
    refused: int = 0
    starved: int = 0
    late: int = 0
    in_doubt: int = 0
    cpu: float = 0.0
    memory: int = 0
    last: bool = False


class LoadCounter:
    """Counts in a process: `report` is what is sent, and its latencies begin anew then."""

    def __init__(self) -> None:
        self.report = Report()
        #: The time from which latencies count: those of the first calls are of caches and connections.
        self.counts_from = 0.0

    def latency(self, call: str, begun: float, seconds: float) -> None:
        """Count the latency of a call that began, or was due, at a time of the monotonic clock."""
        if begun >= self.counts_from:
            self.report.latencies.setdefault(call, Histogram()).add(seconds)

    def held(self, waits: int, seconds: float) -> None:
        """Note how often the calls of this process have waited until now, and for how long."""
        self.report.waits, self.report.waited = waits, seconds

    def error(self, call: str, error: BaseException) -> None:
        """Count an error that a user would have seen."""
        said = self.report.errors.setdefault((call, type(error).__name__), Said(0, str(error)))
        said.count += 1
        self.report.in_doubt += bool(getattr(error, "in_doubt", False))

    def warn(self, logger: str, text: str) -> None:
        """Count a line of the log."""
        self.report.warnings.setdefault(logger, Said(0, text)).count += 1
