"""Queries of a buffer's facts: counts, cursors, checkpoints, leases, contents. Each is one SQL text.

Used by the buffer itself, the command line, the web pages, metrics and the doctor, without SQLAlchemy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from replaybuf.rules.transitions import LaneName, Tally
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.schema import STALENESS
from replaybuf.values.rollouts.statuses import Status

if TYPE_CHECKING:
    from replaybuf.storage.values import Cursor

Tallied = dict[tuple[str, Status, Tally], int]

#: The tallies of a buffer by task, status and name, but those of bytes; further conditions go between both parts.
SUMS = """SELECT l.task_name, l.status, t.name, sum(t.amount) AS amount
FROM rb_lane l JOIN rb_tally t ON t.lane = l.id WHERE l.buffer = :buffer AND t.name <> 'bytes'"""
BY_NAME = "GROUP BY l.task_name, l.status, t.name"
_CURSORS = "SELECT name, version, position, value FROM rb_cursor WHERE buffer = :buffer AND checkpoint = 0"


def read_tallies(tx: Transaction, buffer: str) -> Tallied:
    """Return the tallies of a buffer by task and status."""
    return tallied(tx.tuples(f"{SUMS} {BY_NAME}", buffer=buffer))


def tallied(rows: Iterable[Sequence[Any]]) -> Tallied:
    """Return the tallies in rows of a task, a status, a name and an amount."""
    return {(task, Status(status), Tally(name)): int(n) for task, status, name, n in rows}


def read_cursors(tx: Transaction, buffer: str) -> list[Cursor]:
    """Return the current cursors of a buffer."""
    rows = tx.tuples(_CURSORS, buffer=buffer)
    if not rows:  # saves the import
        return []
    from replaybuf.storage.values import Cursor

    return [Cursor(*row) for row in rows]


_CHECKPOINTS = """SELECT id, buffer, step, created_at, groups, bytes FROM rb_checkpoint
WHERE buffer = coalesce(:buffer, buffer) ORDER BY id"""


def list_checkpoints(tx: Transaction, buffer: str | None) -> list[dict[str, Any]]:
    """Return the checkpoints of one buffer or of all, in the order in which they were made.

    `created_at` is in seconds since the epoch.
    """
    return tx.rows(_CHECKPOINTS, buffer=buffer)


def find_checkpoint(tx: Transaction, buffer: str | None, step: int) -> dict[str, Any]:
    """Return all columns of the checkpoint of a step of a buffer. Raises CheckpointError."""
    query = "SELECT * FROM rb_checkpoint WHERE buffer = :buffer AND step = :step"
    for row in tx.rows(query, buffer=buffer, step=step):
        return row
    from replaybuf.storage.values import missing_checkpoint  # a slow import

    raise missing_checkpoint(step, [row["step"] for row in list_checkpoints(tx, buffer)])


#: The query of the ids of dropped checkpoints that still have versions of groups: an index look-up for each checkpoint.
DROPPED = """WITH RECURSIVE found(id) AS (
    SELECT min(until) FROM rb_past WHERE until > 0
    UNION ALL
    SELECT (SELECT min(p.until) FROM rb_past p WHERE p.until > found.id)
    FROM found WHERE found.id IS NOT NULL)
SELECT id FROM found WHERE id IS NOT NULL AND id NOT IN (SELECT id FROM rb_checkpoint)"""


# Leased groups have lanes of their own: without the lanes, SQLite would scan all groups.
_OVERDUE = """SELECT l.buffer, l.task_name, l.status, count(*) FROM rb_lane l JOIN rb_group g ON g.lane = l.id
WHERE l.leased AND g.leased_until <= :now AND l.buffer = coalesce(:buffer, l.buffer)
GROUP BY l.buffer, l.task_name, l.status"""


def count_overdue(tx: Transaction, buffer: str | None) -> dict[tuple[str, str, str], int]:
    """Return the numbers of groups whose lease is over, in one buffer or in all, by buffer, task and status.

    They are returned at a process's next poll: if all processes are gone, they stay overdue.
    """
    rows = tx.tuples(_OVERDUE, buffer=buffer, now=tx.clock())
    return {(name, task, status): int(count) for name, task, status, count in rows}


_CONTENTS = f"""SELECT l.task_name AS task_name, l.status AS status, l.leased AS is_leased,
    g.times_sampled AS times_sampled, {STALENESS} AS staleness, count(*) AS groups, sum(g.bytes) AS bytes,
    min(g.created_at) AS oldest_at, count(g.reward) AS rewards, sum(g.reward) AS reward, min(g.reward) AS lowest,
    max(g.reward) AS highest
FROM rb_group g JOIN rb_lane l ON l.id = g.lane WHERE l.buffer = :buffer GROUP BY 1, 2, 3, 4, 5"""  # noqa: S608

#: A row for each task, status, leased flag, number of draws and staleness: the number of such groups, their bytes, the
#: time of the oldest, and the number, sum and bounds of their rewards.
Contents = Sequence[Mapping[str, Any]]


def read_contents(tx: Transaction, buffer: str) -> Contents:
    """Return the contents of a buffer, in one scan of its groups."""
    return tx.rows(_CONTENTS, buffer=buffer)


def read_histograms(tx: Transaction, buffer: str, fields: Iterable[str]) -> dict[str, dict[LaneName, dict[int, int]]]:
    """Return `histogram_of` of each of these fields, by field."""
    contents = read_contents(tx, buffer)
    return {field: histogram_of(contents, field) for field in fields}


def histogram_of(contents: Contents, field: str) -> dict[LaneName, dict[int, int]]:
    """Return the number of groups by `staleness` or `times_sampled`, without leased ones, for each task and status."""
    histograms: dict[LaneName, dict[int, int]] = {}
    for row in contents:
        if not row["is_leased"]:
            counts = histograms.setdefault((row["task_name"], Status(row["status"])), {})
            counts[int(row[field])] = counts.get(int(row[field]), 0) + int(row["groups"])
    return histograms


_LAST_UID = {
    "sqlite": "SELECT number FROM rb_info WHERE name = 'uid'",
    "postgresql": "SELECT CASE WHEN is_called THEN last_value ELSE last_value - 1 END FROM rb_uid",
}


def last_uid(tx: Transaction) -> int:
    """Return the last uid of the database, 0 before the first."""
    return int(tx.value(_LAST_UID[tx.dialect.name]) or 0)
