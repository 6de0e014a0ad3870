"""Database statistics before and after a load (sizes, WAL, dead rows), session samples, and whose groups are in it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from replaybuf import units
from replaybuf.bench.loads import PREFIX
from replaybuf.errors import InputError, NotADatabaseError, ReplayBufError, UnreachableError
from replaybuf.rollouts.statuses import Status
from replaybuf.rules.transitions import Tally
from replaybuf.storage.sql.inspection.measures import tallies_of
from replaybuf.storage.sql.inspection.reader import Reader, ReadTransaction, open_reader

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
