"""The advisory locks of PostgreSQL, in the order in which a transaction takes them.

SQLite has one writer at a time, and needs none of them.

1. WRITERS: every write transaction takes it in its first statement, shared. Refreshes, restores, resumes and whoever
   begins a race take it alone: nothing is put or taken against a step, an epoch or keys that are just being changed.
2. SCHEMA: whoever creates the tables, so that two processes may open a new database.
3. SWEEP: whoever makes or drops a checkpoint, restores one, or undoes a take. Sweeps try for it, shared: no payload
   goes that a copy is going to need. A checkpoint takes it, and WRITERS, in a transaction beside the one that copies.
4. TASK (by name): puts and draws of tasks with limits, which act on counts that they have read.
5. Rows of groups, by uid; lanes, by id.
6. KEY (by name): puts with a key, so that the second of two finds the first one's group; then that group's row.
7. SHARDS: whoever adds up the counts of connections that are gone, if nobody else does.

Rows of 5 may be met in another order (a draw takes them as its policy says, and skips those that are locked). Of
transactions that wait for each other in a circle PostgreSQL ends one, and that one is run again (`is_conflict`).
"""

from __future__ import annotations

from enum import IntEnum

from sqlalchemy import text


class Lock(IntEnum):
    """Locks by number. The numbers are arbitrary, and part of what all versions of replaybuf share."""

    WRITERS = 0x5EB0F
    SCHEMA = 0x5EB10
    SWEEP = 0x5EB11
    SHARDS = 0x5EB07


class NamedLock(IntEnum):
    """Locks by a text of any length, hashed with this seed."""

    KEY = 0
    TASK = 1


TAKE = text("SELECT pg_advisory_xact_lock(:key)")
TAKE_SHARED = text("SELECT pg_advisory_xact_lock_shared(:key)")
TRY = text("SELECT pg_try_advisory_xact_lock(:key)")
TRY_SHARED = text("SELECT pg_try_advisory_xact_lock_shared(:key)")
TAKE_NAMED = text("SELECT pg_advisory_xact_lock(hashtextextended(:name, :seed))")
