"""PostgreSQL's advisory locks, in the order in which a transaction takes them.

SQLite has a single writer and needs none of them.

1. WRITERS: every write transaction takes it in its first statement, shared; then the row of its connection in
   `rb_info` (`engine.commit_stamp`). Checkpoints, refreshes, restores, resumes
   and the start of a race take it exclusively: each write is before a checkpoint or after it, and no put or take uses a
   step, an epoch or sampling keys that are being changed.
2. SCHEMA: creating the tables, so that two processes may open a new database.
3. SWEEP: by one sweep at a time, which only tries it: two with versions of one group would each leave its payload to
   the other.
4. TASK (by name): puts and draws of tasks with limits, which depend on counts that they read. A put into several
   buffers takes 4 to 6 for one buffer after the other, by name.
5. Rows of groups, by uid; lanes, by id.
6. KEY (by name): puts with a key, so that the second of two finds the first one's group; then that group's row.
7. SHARDS: merging the count shards of closed connections, by one process at a time.
8. MINUTE: recording a buffer's statistics, once a minute, by one process at a time.

Rows of 5 may be locked in another order (a draw takes them in its policy's order, and skips locked ones). PostgreSQL
aborts one transaction of a deadlock, which is retried (`is_conflict`).
"""

from __future__ import annotations

from enum import IntEnum


class Lock(IntEnum):
    """Locks by number. The numbers are arbitrary, and the same in all versions of replaybuf."""

    WRITERS = 0x5EB0F
    SCHEMA = 0x5EB10
    SWEEP = 0x5EB11
    SHARDS = 0x5EB07
    MINUTE = 0x5EB12


class NamedLock(IntEnum):
    """Seeds of the hash for locks on a name of any length."""

    KEY = 0
    TASK = 1


def first(*, alone: bool) -> str:
    """Return a write transaction's first statement: it locks WRITERS, exclusively if `alone`."""
    return f"SELECT pg_advisory_xact_lock{'' if alone else '_shared'}({Lock.WRITERS:d});"
