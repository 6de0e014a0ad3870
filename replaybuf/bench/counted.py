"""Counters of a load's processes, which add up exactly (latencies, uid ledgers, errors), and the database's statistics.

The latter are sizes, WAL and dead rows before and after a load, and the wait events of sessions during it.
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

#: The calls whose latencies are recorded: their names in JSON, and in the text.
CALLS = {
    "put": "put",
    "put_waited": "put that waited for room",
    "put_due": "put, from when it was due",
    "take": "take, less its wait",
    "acknowledge": "acknowledge",
}
#: The reported quantiles, by their names in JSON.
QUANTILES = {"p50_ms": 0.5, "p90_ms": 0.9, "p99_ms": 0.99, "p999_ms": 0.999}

#: Maximum relative error of a quantile (between LEAST and MOST).
RELATIVE_ERROR = 0.01
#: Seconds; shorter and longer latencies count as these. The longest is also recorded exactly.
LEAST, MOST = 1e-6, 1e4
# The middle of a bucket is at most RELATIVE_ERROR from both of its ends.
_LOG_GROWTH = math.log((1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR))


@dataclass(slots=True)
class Histogram:
    """Latencies in buckets that grow by a constant factor, so that quantiles have a bounded relative error.

    `total` is the sum in nanoseconds, an integer, so that sums are exact in any order; `longest` is in seconds.
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
        """Add the counts of another histogram, exactly as if this one had counted both."""
        self.counts.update(other.counts)
        self.total += other.total
        self.longest = max(self.longest, other.longest)

    def quantile(self, q: float) -> float | None:
        """Return the quantile `q` in seconds, within RELATIVE_ERROR; None without latencies.

        By nearest rank, not interpolated.
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
        """Return mean, quantiles and maximum, in milliseconds; None without latencies."""
        count = self.counts.total()
        if not count:
            return dict.fromkeys(("mean_ms", *QUANTILES, "max_ms"))
        quantiles = {name: 1000 * (self.quantile(q) or 0.0) for name, q in QUANTILES.items()}
        return {"mean_ms": self.total / count / 1e6, **quantiles, "max_ms": 1000 * self.longest}


@dataclass(slots=True)
class UidSums:
    """The uids of groups, in constant memory: their number, and the sum of their hashes.

    Two equal ledgers have the same uids with the same multiplicities, with an error probability of 2^-64.
    """

    count: int = 0
    total: int = 0

    def add(self, *uids: int) -> UidSums:
        """Add uids; return this ledger."""
        self.count += len(uids)
        self.total = (self.total + sum(xxh64_intdigest(uid.to_bytes(8, "big")) for uid in uids)) % (1 << 64)
        return self

    def __add__(self, other: UidSums) -> UidSums:
        return UidSums(self.count + other.count, (self.total + other.total) % (1 << 64))


@dataclass(slots=True)
class Said:
    """An error or a warning: its count, and its first text."""

    count: int
    first: str


@dataclass(slots=True)
class Report:
    """The counters of a process since its start, except `latencies`, which are those since its last report.

    `refused`: puts that timed out waiting for room, and were retried. `starved`: takes that timed out. `late`: puts
    that were due but not started at the end. `in_doubt`: puts that may or may not be stored. `waits` are the waits
    inside the buffer's calls, `waited` their seconds; `pauses` are those of workers while there were enough groups.
    `cpu` is in seconds, `memory` in bytes; `last` marks the final report of a process that ends normally.
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
    """The counters of a process. `report` is sent to the parent, and its latencies are cleared each time."""

    def __init__(self) -> None:
        self.report = Report()
        #: Latencies before this time don't count: the first calls fill caches and open connections.
        self.counts_from = 0.0

    def latency(self, call: str, begun: float, seconds: float) -> None:
        """Count the latency of a call that began, or was due, at `begun` of the monotonic clock."""
        if begun >= self.counts_from:
            self.report.latencies.setdefault(call, Histogram()).add(seconds)

    def held(self, waits: int, seconds: float) -> None:
        """Record the total number of waits inside this process's calls, and their seconds."""
        self.report.waits, self.report.waited = waits, seconds

    def error(self, call: str, error: BaseException) -> None:
        """Count an error that a user would see."""
        said = self.report.errors.setdefault((call, type(error).__name__), Said(0, str(error)))
        said.count += 1
        self.report.in_doubt += bool(getattr(error, "in_doubt", False))

    def warn(self, logger: str, text: str) -> None:
        """Count a line of the log."""
        self.report.warnings.setdefault(logger, Said(0, text)).count += 1


# The database's statistics

#: Prefix of the names of loads' buffers; other buffers may hold a user's groups.
PREFIX = "replaybuf-bench-"
_SAMPLE_SECONDS = 1.0

# Other users of the database

_GROUPS = """
SELECT l.buffer, EXISTS (SELECT 1 FROM rb_group g WHERE g.lane = l.id) AS groups
FROM rb_lane l WHERE l.buffer NOT LIKE :ours"""
_CHECKPOINTS = "SELECT DISTINCT buffer FROM rb_checkpoint WHERE buffer NOT LIKE :ours"


def refuse_others(url: str) -> None:
    """Raise InputError for a database with groups or checkpoints in buffers other than those of loads."""
    try:
        reader = open_reader(url)
    except UnreachableError:
        return  # a file that will be created
    try:
        found = reader.read(_of_others)
    except NotADatabaseError:
        return  # without tables, or invalid, which opening the buffer reports
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


# During the load

# Active sessions and those in a transaction, by wait event; idle ones only count as connections.
_SESSIONS = """
SELECT CASE WHEN state = 'idle' THEN '' WHEN state LIKE 'idle in transaction%' THEN 'the client (in a transaction)'
    ELSE coalesce(wait_event_type || ' ' || wait_event, 'nothing (it runs)') END AS wait, count(*) AS sessions
FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend' GROUP BY 1"""


class ActivitySampler:
    """Samples the database's activity every second in a thread, inside a `with` block.

    `groups` is the number of groups available to take in the last sample; `waits` counts the sampled wait events of
    PostgreSQL's sessions; `connections` is the maximum number of connections, `log_bytes` the maximum size of SQLite's
    WAL.
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
                continue  # the processes count their own errors
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
