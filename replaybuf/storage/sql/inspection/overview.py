"""The figures of a database: groups by task and status, tallies since the beginning, cursors, sizes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import func, select

from replaybuf.rollouts.rollout import Status
from replaybuf.rules.tallies import LaneName, Tally
from replaybuf.storage.sql.engine.transaction import Scope, Transaction
from replaybuf.storage.sql.inspection.checkpoints import list_checkpoints
from replaybuf.storage.sql.inspection.groups import GROUPS, buffers_of, looking_at, now_of, tidy
from replaybuf.storage.sql.schema.create import current_revision
from replaybuf.storage.sql.schema.tables import garbage, group, lane
from replaybuf.storage.sql.statements.counts import read_tallies
from replaybuf.storage.sql.statements.cursors import read_cursors
from replaybuf.storage.sql.statements.leases import store_clock
from replaybuf.storage.sql.statements.matching import read_histogram
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


def overview(tx: Transaction, buffer: str | None, fields: Iterable[str]) -> Overview:
    """Return the figures of one buffer or of all, with histograms of these fields."""
    rows = _groups(looking_at(tx, buffer))
    buffers = {}
    for name in buffers_of(tx):
        if buffer in (None, name):
            own = tx.of(Scope(name))
            histograms = {field: read_histogram(own, field) for field in fields}
            buffers[name] = BufferFigures(read_tallies(own), histograms, read_cursors(own), [])
    for made in list_checkpoints(tx, buffer):
        if made.buffer in buffers:
            buffers[made.buffer].checkpoints.append(made.step)
    return Overview(rows, buffers, _database(tx), now_of(tx))


def _groups(tx: Transaction) -> list[dict[str, Any]]:
    g = GROUPS.c
    grouped = select(
        g.buffer,
        g.task_name,
        g.status,
        (func.count() - func.count(g.leased_until)).label("groups"),
        func.count(g.leased_until).label("leased"),
        func.sum(g.rollouts).label("rollouts"),
        func.avg(g.reward).label("reward"),
        func.avg(g.staleness).label("staleness"),
        func.max(g.staleness).label("max_staleness"),
        func.sum(g.prompt_tokens).label("prompt_tokens"),
        func.sum(g.response_tokens).label("response_tokens"),
        func.sum(g.bytes).label("bytes"),
        func.min(g.created_at).label("oldest"),
        func.max(g.created_at).label("newest"),
    ).group_by(g.buffer, g.task_name, g.status)
    if tx.scope.buffer is not None:
        grouped = grouped.where(g.buffer == tx.scope.buffer)
    overdue = _overdue(tx)
    rows = []
    for found in tx.execute(grouped).mappings():
        row = tidy(found)
        row["staleness"] = float(row["staleness"])
        row["overdue"] = overdue.get((row["buffer"], row["task_name"], row["status"]), 0)
        rows.append(row)
    rows.sort(key=lambda row: (row["buffer"], row["task_name"], _STATUSES.index(row["status"])))
    return rows


def _overdue(tx: Transaction) -> dict[tuple[str, str, str], int]:
    """Return the number of leased groups whose lease is over, by buffer, task and status.

    They come back when a process next looks for groups: where all consumers are gone, none has.
    """
    lanes = (lane.c.buffer, lane.c.task_name, lane.c.status)
    over = select(*lanes, func.count()).select_from(group.join(lane, lane.c.id == group.c.lane))
    over = over.where(group.c.leased_until <= store_clock(tx), tx.scope.lanes).group_by(*lanes)
    return {(buffer, task, status): count for buffer, task, status, count in tx.execute(over)}


def _database(tx: Transaction) -> dict[str, Any]:
    return {
        "schema": current_revision(tx.connection),
        "database_bytes": database_bytes(tx),
        "unswept_payloads": read_backlog(tx)[0],
    }


def database_bytes(tx: Transaction) -> int:
    """Return the size of the database on disk, in bytes."""
    return tx.dialect.database_bytes(tx.connection)


def read_backlog(tx: Transaction) -> tuple[int, float | None]:
    """Return the number of payloads that wait to be swept, and since when the oldest has waited."""
    count, oldest = tx.execute(select(func.count(), func.min(garbage.c.removed_at))).one()
    return int(count), oldest
