"""The records of what was done, page by page, newest first: draws, events, checkpoints, workers, who waits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import TableClause, column, select, table

from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.inspection.groups import looking_at
from replaybuf.storage.sql.inspection.look import tidy


@dataclass(frozen=True, slots=True)
class Records:
    """A view: its columns, which of them are times and which are JSON, and which one orders it, newest first."""

    view: TableClause
    key: str
    times: tuple[str, ...] = ()
    values: tuple[str, ...] = ()


def _records(name: str, columns: str, *, key: str, times: str = "", values: str = "") -> Records:
    return Records(table(name, *map(column, columns.split())), key, tuple(times.split()), tuple(values.split()))


BATCHES = _records(
    "batches",
    "id buffer taken_at step status worker lease tasks groups settled reward min_reward max_reward staleness "
    "max_staleness oldest_model_step newest_model_step restores",
    key="id",
    times="taken_at",
)
BATCH_GROUPS = _records(
    "batch_groups",
    "batch buffer step taken_by uid task_name worker reward staleness oldest_model_step created_at",
    key="uid",
    times="created_at",
)
EVENTS = _records(
    "events",
    "id buffer happened_at kind task_name worker step groups uids detail",
    key="id",
    times="happened_at",
    values="uids",
)
CHECKPOINTS = _records("checkpoints", "buffer step created_at groups bytes", key="created_at", times="created_at")
WORKERS = _records(
    "workers",
    "buffer worker host pid started_at last_seen ended_at groups_last_hour rollouts_last_hour tokens_last_hour "
    "failures_last_hour taken_last_hour",
    key="last_seen",
    times="started_at last_seen ended_at",
)
WAITERS = _records(
    "waiters",
    "buffer worker host pid kind wants status query since deadline seen_at reason limits",
    key="since",
    times="since deadline seen_at",
    values="wants limits",
)


def newest(
    tx: Transaction, records: Records, buffer: str | None, size: int, *, before: int | None = None, **equal: Any
) -> list[dict[str, Any]]:
    """Return the newest rows of one buffer or of all, below a number, with these values in these columns."""
    looking_at(tx, buffer)
    c = records.view.c
    query = select(records.view).order_by(c[records.key].desc()).limit(size)
    if buffer is not None:
        query = query.where(c.buffer == buffer)
    if before is not None:
        query = query.where(c[records.key] < before)
    for name, value in equal.items():
        query = query.where(c[name] == value)
    return [_typed(records, row) for row in tx.execute(query).mappings()]


def _typed(records: Records, row: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a row with the same Python types from both databases."""
    values = tidy(row)
    for name in records.times:
        if isinstance(values[name], str):
            values[name] = datetime.fromisoformat(values[name]).replace(tzinfo=UTC)
    for name in records.values:
        if isinstance(values[name], str):
            values[name] = json.loads(values[name])
    return values
