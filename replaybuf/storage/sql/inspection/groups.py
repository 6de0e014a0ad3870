"""The metadata of groups and rollouts, from the views for people, and the payload of a group on request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from sqlalchemy import ColumnElement, column, func, select, table, true

from replaybuf.codec.payload import Codec
from replaybuf.errors import DecodeError, InputError
from replaybuf.query import LogicNode, Node, ScalarNode
from replaybuf.redact import redact_path
from replaybuf.rollouts.rollout_type import RolloutType
from replaybuf.rules.policies import Order
from replaybuf.storage.sql.engine.transaction import Scope, Transaction
from replaybuf.storage.sql.schema.tables import group, lane
from replaybuf.storage.sql.statements.columns import uid_in
from replaybuf.storage.sql.statements.leases import store_clock
from replaybuf.storage.sql.statements.matching import count_groups, find_uids, read_groups, select_matching
from replaybuf.storage.sql.statements.rows import GroupRow

_COLUMNS = (
    *("uid", "buffer", "task_name", "status", "staleness", "reward", "priority", "times_sampled", "created_at"),
    *("leased_until", "archived_at", "deliveries", "rollouts", "prompt_tokens", "response_tokens", "finish_reasons"),
    *("bytes", "key", "tags", "error", "prompt", "response"),
)
_ROLLOUT_COLUMNS = (
    *("uid", "position", "rollout_id", "status", "staleness", "oldest_model_step", "reward", "rewards"),
    *("prompt_tokens", "response_tokens", "finish_reason", "response", "error_msg"),
)
GROUPS = table("groups", *map(column, _COLUMNS))
_ROLLOUTS = table("rollouts", *map(column, _ROLLOUT_COLUMNS))
_CHUNK = 1000

#: Decodes rollouts as dicts, whatever their class and those in their fields were, and needs neither torch nor Ray.
AS_DICTS = Codec(RolloutType(dict), tensors="numpy", object_refs="value", as_plain=True)


@dataclass(frozen=True, slots=True)
class Looking(Scope):
    """The scope of a reader: one buffer or all, including leased groups."""

    @property
    def lanes(self) -> ColumnElement[bool]:
        return true() if self.buffer is None else lane.c.buffer == self.buffer


@dataclass(slots=True)
class Listing:
    """The metadata of groups, the number that match, the time then, and whether there are other buffers."""

    rows: list[dict[str, Any]]
    matching: int
    now: datetime
    several: bool


@dataclass(slots=True)
class Shown:
    """A group and its rollouts, the time then, and whether there are other buffers."""

    group: dict[str, Any]
    rollouts: list[dict[str, Any]]
    now: datetime
    several: bool
    stored: GroupRow | None = None

    def decode(self) -> list[dict[str, Any]]:
        """Return the full rollouts, if the payload was read. Raises DecodeError."""
        assert self.stored is not None
        try:
            return self.stored.decode(AS_DICTS).item
        except DecodeError as error:
            raise DecodeError(f"group {self.stored.uid}: {error} (without --full its metadata can be shown)") from error


@dataclass(frozen=True, slots=True)
class Removable:
    """The groups that a query would remove: a row for each task and status, the number of leased ones, which stay, and
    the last uid of all of them."""

    rows: list[dict[str, Any]]
    leased: int
    last: int

    @property
    def groups(self) -> int:
        return sum(row["groups"] for row in self.rows)


def buffers_of(tx: Transaction) -> list[str]:
    """Return the names of the buffers in the database."""
    return list(tx.execute(select(lane.c.buffer).distinct().order_by(lane.c.buffer)).scalars())


def tasks_of(tx: Transaction, buffer: str | None) -> list[str]:
    """Return the names of the tasks of one buffer or of all."""
    return sorted(tx.execute(select(lane.c.task_name).where(Looking(buffer).lanes).distinct()).scalars())


def looking_at(tx: Transaction, buffer: str | None) -> Transaction:
    """Return the transaction, scoped to one buffer or all. Raises InputError when only other buffers exist."""
    if buffer is not None and (there := buffers_of(tx)) and buffer not in there:
        raise InputError(
            f"there is no buffer {redact_path(buffer)!r:.200} in this database; there are {', '.join(there)}"
        )
    return tx.of(Looking(buffer))


def list_groups(
    tx: Transaction, buffer: str | None, query: Node, order: Order, limit: int | None, *, count: bool
) -> Listing:
    """Return the groups that match, in order; with `count` also the number of all matches, beyond the limit."""
    tx = looking_at(tx, buffer)
    rows = _find_groups(tx, query, order, limit)
    matching = count_groups(tx, query, None) if count and len(rows) == limit else len(rows)
    return Listing(rows, matching, now_of(tx), several=buffer is None and len(buffers_of(tx)) > 1)


def show_group(tx: Transaction, uid: int, *, payload: bool) -> Shown | None:
    """Return a group of any buffer, or None when it isn't there."""
    tx = looking_at(tx, None)
    found = _find_groups(tx, ScalarNode("uid", "$eq", uid), (), 1)
    if not found:
        return None
    chosen = select(_ROLLOUTS).where(_ROLLOUTS.c.uid == uid).order_by(_ROLLOUTS.c.position)
    rollouts = [tidy(row) for row in tx.execute(chosen).mappings()]
    stored = read_groups(tx, [uid], LogicNode("$and", ())) if payload else []
    return Shown(found[0], rollouts, now_of(tx), len(buffers_of(tx)) > 1, *stored)


def removable(tx: Transaction, name: str, query: Node) -> Removable:
    """Return what deleting the groups of a buffer that match would remove."""
    columns = lane.c.task_name, lane.c.status, lane.c.leased
    counted = (*columns, func.count().label("groups"), func.max(group.c.uid).label("last"))
    chosen = select_matching(tx.of(Looking(name)), query, *counted)
    found = list(tx.execute(chosen.group_by(*columns).order_by(*columns)))
    rows = [{"task_name": row.task_name, "status": row.status, "groups": row.groups} for row in found if not row.leased]
    leased = sum(row.groups for row in found if row.leased)
    return Removable(rows, leased, max((row.last for row in found), default=0))


def _find_groups(tx: Transaction, query: Node, order: Order, limit: int | None) -> list[dict[str, Any]]:
    uids = [uid for uid, _ in find_uids(tx, query, order, limit)]
    found: dict[int, dict[str, Any]] = {}
    for start in range(0, len(uids), _CHUNK):
        chosen = select(group.c.uid).where(uid_in(tx, uids[start : start + _CHUNK]))
        for row in tx.execute(select(GROUPS).where(GROUPS.c.uid.in_(chosen))).mappings():
            found[row["uid"]] = tidy(row)
    return [found[uid] for uid in uids if uid in found]


def tidy(row: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a row of a view with the same Python types from both databases."""
    values = dict(row)
    for name, value in values.items():
        if isinstance(value, Decimal):
            values[name] = int(value) if value == value.to_integral_value() else float(value)
    for name in ("tags", "rewards"):
        if isinstance(values.get(name), str):
            values[name] = json.loads(values[name])
    for name in ("created_at", "leased_until", "archived_at", "oldest", "newest"):
        if isinstance(values.get(name), str):
            values[name] = datetime.fromisoformat(values[name]).replace(tzinfo=UTC)
    return values


def now_of(tx: Transaction) -> datetime:
    """Return the present time by the store's clock, which decides when leases end."""
    return datetime.fromtimestamp(store_clock(tx), UTC)
