"""The fields of the query language and the keys of puts as columns."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from sqlalchemy import JSON, ColumnElement, Text, cast

from replaybuf.query import FIELDS as QUERIED
from replaybuf.query import SetNode
from replaybuf.query.sql_conditions import compile_sql
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.schema.tables import group, lane, staleness

#: These need `group` joined to `lane`.
FIELDS: dict[str, ColumnElement[Any]] = {
    "uid": group.c.uid,
    "timestamp_id": group.c.uid,
    "task_name": lane.c.task_name,
    "status": lane.c.status,
    "staleness": staleness,
    "priority": group.c.priority,
    "times_sampled": group.c.times_sampled,
    "created_at": group.c.created_at,
    "reward": group.c.reward,
    "worker": group.c.worker,
    "trained_step": group.c.trained_step,
    "tags": group.c.tags,
}

#: Which of the fields that groups are ordered by may be NULL.
NULLABLE = {name: kind.nullable for name, kind in QUERIED.items()}

#: All columns of a group, with JSON as text: it is parsed where it is needed, and may be damaged.
STORED: tuple[ColumnElement[Any], ...] = tuple(
    cast(column, Text).label(column.name) if isinstance(column.type, JSON) else column for column in group.columns
)
JSON_COLUMNS = tuple(column.name for column in group.columns if isinstance(column.type, JSON))
#: The place of each of these columns, and the names of those that always have a value.
PLACES = {column.name: place for place, column in enumerate(group.columns)}
NEEDED = tuple(column.name for column in group.columns if not column.nullable)


def uid_in(tx: Transaction, uids: Iterable[int], column: ColumnElement[int] = group.c.uid) -> ColumnElement[bool]:
    """Return `uid IN (...)`, for any number of uids."""
    return compile_sql(SetNode("uid", "$in", tuple(uids)), {"uid": column}, tx.dialect.name)


def scoped_key(buffer: str | None, task_name: str, key: str | None) -> str | None:
    """Return a put's key with its task and buffer as one text, short enough for a PostgreSQL index (2,700 bytes)."""
    return None if key is None else json.dumps([task_name, key, buffer], ensure_ascii=False)


def rescoped_key(scoped: str, buffer: str | None) -> str:
    """Return a scoped key moved to another buffer."""
    task_name, key, _ = json.loads(scoped)
    return json.dumps([task_name, key, buffer], ensure_ascii=False)


def key_of(scoped: str | None) -> str | None:
    """Return the put's key in a scoped key."""
    return None if scoped is None else str(json.loads(scoped)[1])
