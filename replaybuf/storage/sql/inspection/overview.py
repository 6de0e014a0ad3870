"""The figures of a database: groups by task and status, tallies since the beginning, cursors, sizes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from replaybuf.rollouts.status import Status
from replaybuf.rules.tallies import LaneName, Tally
from replaybuf.storage.sql.inspection.buffers import buffers_of, check_buffer, in_order
from replaybuf.storage.sql.inspection.look import Look

if TYPE_CHECKING:
    from replaybuf.storage.sql.engine.transaction import Transaction
    from replaybuf.storage.values import Cursor

_STATUSES = [*map(str, Status)]


@dataclass(slots=True)
class BufferFigures:
    """A buffer's tallies, its numbers of groups by value of each field, its cursors, and its checkpoints' steps."""

    tallies: dict[tuple[str, Status, Tally], int]
    histograms: dict[str, dict[LaneName, dict[int, int]]]
    cursors: list[Cursor]
    checkpoints: list[int]


@dataclass(slots=True)
class Overview:
    """A row for each buffer, task and status, the figures of each buffer and of the whole database, and the time."""

    rows: list[dict[str, Any]]
    buffers: dict[str, BufferFigures]
    database: dict[str, Any]
    now: datetime


def overview(look: Look, buffer: str | None, fields: Iterable[str]) -> Overview:
    """Return the figures of one buffer or of all, with histograms of these fields (`staleness`, `times_sampled`)."""
    check_buffer(look, buffer)
    buffers = {}
    for name in buffers_of(look):
        if buffer in (None, name):
            steps = look.rows("SELECT step FROM checkpoints WHERE buffer = :buffer ORDER BY created_at", buffer=name)
            buffers[name] = BufferFigures(
                read_tallies(look, name),
                {field: read_histogram(look, name, field) for field in fields},
                read_cursors(look, name),
                [row["step"] for row in steps],
            )
    return Overview(_groups(look, buffer), buffers, _database(look), look.now())


_GROUPS = """
SELECT
    buffer, task_name, status, count(*) - count(leased_until) AS groups, count(leased_until) AS leased,
    sum(rollouts) AS rollouts, avg(reward) AS reward, avg(staleness) AS staleness, max(staleness) AS max_staleness,
    sum(prompt_tokens) AS prompt_tokens, sum(response_tokens) AS response_tokens, sum(bytes) AS bytes,
    min(created_at) AS oldest, max(created_at) AS newest
FROM groups{where} GROUP BY buffer, task_name, status"""


def _groups(look: Look, buffer: str | None) -> list[dict[str, Any]]:
    overdue = _overdue(look)
    rows = _of(look, _GROUPS, buffer)
    for row in rows:
        row["staleness"] = float(row["staleness"])
        row["overdue"] = overdue.get((row["buffer"], row["task_name"], row["status"]), 0)
    rows.sort(key=lambda row: (in_order(row["buffer"]), row["task_name"], _STATUSES.index(row["status"])))
    return rows


def _of(look: Look, statement: str, buffer: str | None) -> list[dict[str, Any]]:
    """Return the rows for one buffer or for all."""
    if buffer is None:
        return look.rows(statement.format(where=""))
    return look.rows(statement.format(where=" WHERE buffer = :buffer"), buffer=buffer)


_OVERDUE = """
SELECT l.buffer, l.task_name, l.status, count(*) FROM rb_group g JOIN rb_lane l ON l.id = g.lane
WHERE g.leased_until <= :now GROUP BY l.buffer, l.task_name, l.status"""


def _overdue(look: Look) -> dict[tuple[str, str, str], int]:
    """Return the number of leased groups whose lease is over, by buffer, task and status.

    They come back when a process next looks for groups: where all consumers are gone, none has.
    """
    _, rows = look.table(_OVERDUE, now=look.seconds())
    return {(buffer, task, status): count for buffer, task, status, count in rows}


_TALLIES = """
SELECT l.task_name, l.status, t.name, sum(t.amount) FROM rb_lane l JOIN rb_tally t ON t.lane = l.id
WHERE l.buffer = :buffer GROUP BY l.task_name, l.status, t.name"""


def read_tallies(look: Look, buffer: str) -> dict[tuple[str, Status, Tally], int]:
    """Return the tallies of a buffer by task and status."""
    _, rows = look.table(_TALLIES, buffer=buffer)
    return {(task, Status(status), Tally(name)): int(amount) for task, status, name, amount in rows}


_HISTOGRAMS = {
    field: f"""
SELECT task_name, status, {field}, count(*) FROM groups
WHERE buffer = :buffer AND leased_until IS NULL GROUP BY task_name, status, {field}"""  # noqa: S608  # one of two
    for field in ("staleness", "times_sampled")
}


def read_histogram(look: Look, buffer: str, field: str) -> dict[LaneName, dict[int, int]]:
    """Return the number of groups in a buffer, without leased ones, by value of a field, for each task and status."""
    found: dict[LaneName, dict[int, int]] = {}
    for task_name, status, number, count in look.table(_HISTOGRAMS[field], buffer=buffer)[1]:
        found.setdefault((task_name, Status(status)), {})[int(number)] = int(count)
    return found


def read_cursors(look: Look, buffer: str) -> list[Cursor]:
    """Return the buffer's present cursors."""
    _, rows = look.table(
        "SELECT name, version, position, value FROM rb_cursor WHERE buffer = :buffer AND checkpoint = 0", buffer=buffer
    )
    if not rows:  # saves the import
        return []
    from replaybuf.storage.values import Cursor

    return [Cursor(*row) for row in rows]


def _database(look: Look) -> dict[str, Any]:
    return {
        "schema": look.revision(),
        "database_bytes": look.database_bytes(),
        "unswept_payloads": look.value("SELECT count(*) FROM rb_garbage"),
    }


def database_bytes(tx: Transaction) -> int:
    """Return the size of the database on disk, in bytes."""
    return tx.dialect.database_bytes(tx.connection)


def read_backlog(tx: Transaction) -> tuple[int, float | None]:
    """Return the number of payloads that wait to be swept, and since when the oldest has waited."""
    _, [(count, oldest)] = Look.over(tx).table("SELECT count(*), min(removed_at) FROM rb_garbage")
    return int(count), oldest
