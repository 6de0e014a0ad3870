"""The advisory locks of PostgreSQL, in the order in which a transaction takes them.

SQLite has one writer at a time and needs none of them.

0. A number of its connection's own, by which the transaction is found if the connection is lost (`engine.outage`).
1. WRITERS: every write transaction takes it in its first statement, shared. Refreshes, restores, resumes and the
   beginning of a race take it exclusively: no put or take uses a step, an epoch or keys that are just being changed.
2. SCHEMA: creating the tables, so that two processes may open a new database.
3. SWEEP: making a checkpoint, in a transaction alongside the one that copies, which takes WRITERS at the end: nobody
   who has WRITERS waits for SWEEP. Sweeps and undone takes try for it, shared: no payload is deleted that a copy will
   need, and a take is undone in a checkpoint that was being made once that is there.
4. TASK (by name): puts and draws of tasks with limits, which act on counts that they read. A put into several buffers
   takes 4 to 6 for one buffer after the other, by name.
5. Rows of groups, by uid; lanes, by id.
6. KEY (by name): puts with a key, so that the second of two finds the first one's group; then that group's row.
7. SHARDS: merging the counts of connections that are gone, unless another process does.
8. MINUTE: noting how a buffer stands, once a minute, unless another process does.

Rows of 5 may be locked in another order (a draw takes them in its policy's order, and skips locked ones). PostgreSQL
ends one of the transactions of a deadlock, and that one is repeated (`is_conflict`).
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
    """Locks by a text of any length, hashed with this seed."""

    KEY = 0
    TASK = 1


def first(own: int | None, *, alone: bool) -> str:
    """Return the statement with which a write transaction begins: it takes its own lock, if it has one, and WRITERS."""
    writers = f"pg_advisory_xact_lock{'' if alone else '_shared'}({Lock.WRITERS:d})"
    return f"SELECT {writers};" if own is None else f"SELECT pg_advisory_xact_lock({own:d}), {writers};"


TAKE = "SELECT pg_advisory_xact_lock($1)"
TRY = "SELECT pg_try_advisory_xact_lock($1)"
TRY_SHARED = "SELECT pg_try_advisory_xact_lock_shared($1)"
TAKE_NAMED = "SELECT pg_advisory_xact_lock(hashtextextended($1, $2))"
