"""Counters of the processes of a load (latency histograms, uid ledgers, errors), and their sums in the parent."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from replaybuf.bench.histogram import Histogram, Packed

_MASK = (1 << 64) - 1

#: The calls whose latencies are kept, by their names in JSON, with what people read.
CALLS = {
    "put": "put",
    "put_waited": "put that waited for room",
    "put_due": "put, from when it was due",
    "take": "take, less its wait",
    "acknowledge": "acknowledge",
}


@dataclass(slots=True)
class UidSums:
    """The uids of groups, in constant memory: their number, and two sums of hashes.

    Two ledgers that are equal have, but for one chance in 2^64, the same uids, each as often.
    """

    count: int = 0
    mixed: int = 0
    total: int = 0

    def add(self, uid: int) -> None:
        """Write down a uid."""
        hashed = _hash(uid)
        self.count += 1
        self.mixed ^= hashed
        self.total = (self.total + hashed) & _MASK

    def add_all(self, uids: Iterable[int]) -> UidSums:
        """Write down many; return this ledger."""
        for uid in uids:
            self.add(uid)
        return self

    def __add__(self, other: UidSums) -> UidSums:
        return UidSums(self.count + other.count, self.mixed ^ other.mixed, (self.total + other.total) & _MASK)


def _hash(number: int) -> int:
    """Return 64 bits that each bit of a number changes (splitmix64)."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


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
    those of workers while there were enough groups. `cpu` is in seconds, `memory` in bytes.
    """

    put: UidSums = field(default_factory=UidSums)
    taken: UidSums = field(default_factory=UidSums)
    latencies: dict[str, Packed] = field(default_factory=dict)
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


class Counter:
    """Counts in a process: `report` is what is sent."""

    def __init__(self) -> None:
        self.report = Report()
        self._latencies: dict[str, Histogram] = {}
        #: The time from which latencies count: those of the first calls are of caches and connections.
        self.counts_from = 0.0

    def latency(self, call: str, begun: float, seconds: float) -> None:
        """Count the latency of a call that began, or was due, at a time of the monotonic clock."""
        if begun >= self.counts_from:
            self._latencies.setdefault(call, Histogram()).add(seconds)

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

    def taken_out(self) -> Report:
        """Return the report to be sent now; latencies are counted anew from here on."""
        self.report.latencies = {call: one.packed() for call, one in self._latencies.items()}
        self._latencies = {}
        return self.report
