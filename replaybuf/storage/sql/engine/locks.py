"""PostgreSQL's locks, in the order in which a transaction takes them, and the commit stamps of connections.

SQLite has a single writer and needs none of them. The advisory locks are:

1. WRITERS: every write transaction takes it in its first statement, shared; then the row of its connection in
   `rb_info`. Checkpoints, refreshes, restores, resumes and the start of a race take it exclusively: each write is
   before a checkpoint or after it, and no put or take uses a step, an epoch or sampling keys that are being changed.
2. SCHEMA: creating the tables, so that two processes may open a new database.
3. SWEEP: by one sweep at a time, which only tries it: two with versions of one group would each leave its payload to
   the other.
4. TASK (by name): puts and draws of tasks with limits, which depend on counts that they read.
5. Names of groups that fill, which are locked as keys; then rows of groups, by uid; lanes, by id.
6. KEY (by name): puts with a key, so that the second of two finds the first one's group; then that group's row.
7. MINUTE: recording a buffer's statistics, once a minute, by one process at a time.

Rows of 5 may be locked in another order (a draw takes them in its policy's order, and skips locked ones). PostgreSQL
aborts one transaction of a deadlock, which is retried (`is_conflict`).

Commit stamps say whether a transaction whose answer to COMMIT was lost was committed. Each connection has a row in
`rb_info` with the number of its last committed transaction, and the first message of each write raises that number, on
a condition (`raise_stamp`). A transaction whose answer is lost is repeated with its own row and number:

- If the first one still runs on the server, it holds the row, and the repeat waits for its end.
- If it was committed, the row has the number already: nothing is changed, the client is told so (`is_raised`) before it
  sends anything else, and the repeat only commits. The result is that of the first one.
- If it was rolled back, or never arrived, the repeat raises the number and goes on.

A transaction can be committed only after its client has heard that the number was raised. So a first message that
arrives after the repeat changes nothing.

A commit waits for a synchronous standby after it is in the primary's own WAL: without a limit, and with all locks of
its transaction. If the wait is interrupted, the commit stays on the primary, visible to all. Later commits follow it
in the WAL and wait for both. So one whose wait was given up is in doubt until a later one was confirmed: of a repeat,
whose refused upsert has locked the row, which is in the WAL, too; or of `READ_STAMP`.
"""

from __future__ import annotations

import time
import uuid
from enum import IntEnum
from typing import NamedTuple


class Lock(IntEnum):
    """Locks by number. The numbers are arbitrary, and the same in all versions of replaybuf."""

    WRITERS = 0x5EB0F
    SCHEMA = 0x5EB10
    SWEEP = 0x5EB11
    MINUTE = 0x5EB12


class NamedLock(IntEnum):
    """Seeds of the hash for locks on a name of any length."""

    KEY = 0
    TASK = 1


def first(*, alone: bool) -> str:
    """Return a write transaction's first statement: it locks WRITERS, exclusively if `alone`."""
    return f"SELECT pg_advisory_xact_lock{'' if alone else '_shared'}({Lock.WRITERS:d});"


# Commit stamps

#: The name prefix of connections' rows in `rb_info`.
PREFIX = "connection "


class Stamp(NamedTuple):
    """The row of a connection in `rb_info`, and the number of a transaction there."""

    row: str
    number: int


def next_stamp(last: Stamp | None) -> Stamp:
    """Return the stamp of the next transaction of a connection, after its last one."""
    # Numbers are microseconds since 1970, which also give a row's age; they increase even if the clock is set back.
    now = int(time.time() * 1_000_000)
    if last is None:
        return Stamp(f"{PREFIX}{uuid.uuid4().hex}", now)
    return last._replace(number=max(last.number + 1, now))


def raise_stamp(stamp: Stamp) -> str:
    """Return the statement that raises the number of a stamp's row to its own, unless it is as high already."""
    return (
        f"INSERT INTO rb_info AS mark (name, number) VALUES ('{stamp.row}', {stamp.number:d}) "  # noqa: S608
        "ON CONFLICT (name) DO UPDATE SET number = excluded.number WHERE mark.number < excluded.number;"
    )


def is_raised(status: str) -> bool:
    """Return whether the number was raised, by the server's answer to a message that ends with `raise_stamp`."""
    return status == "INSERT 0 1"


#: Returns the number of a row, once no transaction that holds it runs any more; a missing row gets the number $2. It
#: changes the row, so that its commit follows in the WAL, and is waited for.
READ_STAMP = """
    INSERT INTO rb_info AS mark (name, number) VALUES ($1, $2)
    ON CONFLICT (name) DO UPDATE SET number = mark.number RETURNING number
"""
