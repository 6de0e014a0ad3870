"""What is counted in the processes of a load, to be added up exactly (latencies, uid ledgers, errors), and elsewhere.

The database tells its sizes, WAL and dead rows before and after a load, and what its sessions wait for meanwhile.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from xxhash import xxh64_intdigest

from replaybuf import units
from replaybuf.errors import InputError, NotADatabaseError, ReplayBufError, UnreachableError
from replaybuf.rollouts.statuses import Status
from replaybuf.rules.transitions import Tally
from replaybuf.storage.sql.inspection.measures import tallies_of
from replaybuf.storage.sql.inspection.reader import Reader, ReadTransaction, open_reader

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


# By the database

#: Buffers of loads have names that begin so: groups of others are somebody's.
PREFIX = "replaybuf-bench-"
_SAMPLE_SECONDS = 1.0

# Whose database is it?

_GROUPS = """
SELECT l.buffer, EXISTS (SELECT 1 FROM rb_group g WHERE g.lane = l.id) AS groups
FROM rb_lane l WHERE l.buffer NOT LIKE :ours"""
_CHECKPOINTS = "SELECT DISTINCT buffer FROM rb_checkpoint WHERE buffer NOT LIKE :ours"


def refuse_others(url: str) -> None:
    """Raise InputError for a database that holds groups or checkpoints of anybody else than a load."""
    try:
        reader = open_reader(url)
    except UnreachableError:
        return  # a file that is made
    try:
        found = reader.read(_of_others)
    except NotADatabaseError:
        return  # it has no tables, or whoever opens it says what it is
    if found:
        raise InputError(
            f"{reader.where} holds groups of {units.some(sorted(found))}: a load would take disk and locks from them. "
            "Give it a database of its own on the same server or disk (createdb, or another file)"
        )


def _of_others(tx: ReadTransaction) -> set[str]:
    ours = PREFIX + "%"
    full = {f"buffer {buffer}" for buffer, groups in tx.tuples(_GROUPS, ours=ours) if groups}
    return full | {f"buffer {buffer} (checkpoints)" for buffer in tx.values(_CHECKPOINTS, ours=ours)}


def uids_left(reader: Reader, buffer: str) -> list[int]:
    """Return the uids of the groups in a buffer, leased ones included."""
    return [int(uid) for uid in reader.read(lambda tx: tx.values(_LEFT, buffer=buffer))]


_LEFT = "SELECT g.uid FROM rb_group g JOIN rb_lane l ON l.id = g.lane WHERE l.buffer = :buffer"


# Figures

_SERVER = """
SELECT current_setting('server_version') AS version, current_setting('max_connections')::int AS max_connections,
    current_setting('shared_buffers') AS shared_buffers, current_setting('max_wal_size') AS max_wal_size,
    current_setting('fsync') AS fsync, current_setting('synchronous_commit') AS synchronous_commit,
    pg_database_size(current_database()) AS bytes,
    pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint AS wal_position,
    xact_commit AS commits, xact_rollback AS rollbacks, deadlocks, temp_bytes, blks_read AS blocks_read,
    blks_hit AS blocks_hit
FROM pg_stat_database WHERE datname = current_database()"""
_TABLES = """
SELECT relname AS name, pg_total_relation_size(relid)::bigint AS bytes, n_live_tup AS live, n_dead_tup AS dead,
    autovacuum_count AS autovacuums
FROM pg_stat_user_tables WHERE relname LIKE 'rb\\_%' ORDER BY 2 DESC"""


def figures(reader: Reader) -> dict[str, Any]:
    """Return the statistics of the database: sizes, and cumulative counters."""
    return reader.read(_figures_of_file if reader.path is not None else _figures_of_server)


def _figures_of_server(tx: ReadTransaction) -> dict[str, Any]:
    [found] = tx.rows(_SERVER)
    return {"kind": "postgresql", **found, "tables": tx.rows(_TABLES)}


def _figures_of_file(tx: ReadTransaction) -> dict[str, Any]:
    path = str(tx.value("SELECT file FROM pragma_database_list WHERE name = 'main'"))
    page = int(tx.value("PRAGMA page_size"))
    return {
        "kind": "sqlite",
        "version": tx.value("SELECT sqlite_version()"),
        "bytes": page * int(tx.value("PRAGMA page_count")),
        "free_bytes": page * int(tx.value("PRAGMA freelist_count")),
        "log_bytes": _size(f"{path}-wal"),
    }


def _size(path: str) -> int:
    file = Path(path)
    return file.stat().st_size if file.exists() else 0


# Meanwhile

# Sessions that work or hold a transaction, by what they wait for; the others only count as connections.
_SESSIONS = """
SELECT CASE WHEN state = 'idle' THEN '' WHEN state LIKE 'idle in transaction%' THEN 'the client (in a transaction)'
    ELSE coalesce(wait_event_type || ' ' || wait_event, 'nothing (it runs)') END AS wait, count(*) AS sessions
FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend' GROUP BY 1"""


class ActivitySampler:
    """Looks at the database every second, in a thread of its own, until it is stopped.

    `groups` are those that could be taken then; `waits` counts how often sessions of PostgreSQL were seen waiting for
    what; `connections` is the most that there were at once, `log_bytes` the longest log of SQLite.
    """

    def __init__(self, reader: Reader, buffer: str) -> None:
        self._reader, self._buffer = reader, buffer
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="replaybuf-bench-sampler", daemon=True)
        self.samples = 0
        self.waits: Counter[str] = Counter()
        self.connections = self.log_bytes = self.groups = 0

    def __enter__(self) -> ActivitySampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            try:
                seen = self._reader.read_any(self._look, timeout=5)
            except ReplayBufError:
                continue  # what the processes meet is counted
            self.samples += 1
            if self._reader.path is not None:
                self.log_bytes = max(self.log_bytes, _size(f"{self._reader.path}-wal"))
            self.connections = max(self.connections, sum(int(count) for _, count in seen))
            self.waits.update({str(wait): int(count) for wait, count in seen if wait})

    def _look(self, tx: ReadTransaction) -> Sequence[Sequence[Any]]:
        tallies = tallies_of(tx, self._buffer)[self._buffer]
        self.groups = sum(n for (_, *name), n in tallies.items() if name == [Status.COMPLETED, Tally.SIZE])
        return tx.tuples(_SESSIONS) if self._reader.path is None else ()

    def figures(self) -> dict[str, Any]:
        """Return the sums of the samples."""
        if self._reader.path is not None:
            return {"longest_log_bytes": self.log_bytes}
        waits = dict(self.waits.most_common())
        return {"samples": self.samples, "most_connections": self.connections, "waits": waits}
