"""The metadata of groups and rollouts, from the views; payloads are not read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from sqlalchemy import ColumnElement, Connection, column, select, table, true

from replaybuf import units
from replaybuf.errors import InputError
from replaybuf.query import Node
from replaybuf.rules.policies import Order
from replaybuf.storage.sql.schema.tables import group, lane
from replaybuf.storage.sql.statements.columns import uid_in
from replaybuf.storage.sql.statements.lanes import Scope
from replaybuf.storage.sql.statements.leases import store_clock
from replaybuf.storage.sql.statements.matching import find_uids

GROUPS = table(
    "groups",
    *(
        column(name)
        for name in (
            "uid",
            "buffer",
            "task_name",
            "status",
            "staleness",
            "reward",
            "priority",
            "times_sampled",
            "created_at",
            "leased_until",
            "archived_at",
            "deliveries",
            "rollouts",
            "prompt_tokens",
            "response_tokens",
            "finish_reasons",
            "bytes",
            "key",
            "tags",
            "error",
            "prompt",
            "response",
        )
    ),
)
ROLLOUTS = table(
    "rollouts",
    *(
        column(name)
        for name in (
            "uid",
            "position",
            "rollout_id",
            "status",
            "staleness",
            "oldest_model_step",
            "reward",
            "prompt_tokens",
            "response_tokens",
            "finish_reason",
            "response",
        )
    ),
)

STATUS_STYLES = {
    "completed": "green",
    "failed": "red",
    "aborted": "yellow",
    "expired": "magenta",
    "filtered": "cyan",
    "init": "blue",
    "archived": "dim",
}


@dataclass(frozen=True, slots=True)
class Looking(Scope):
    """What those who only look see of one buffer, or of all: leased groups too."""

    @property
    def lanes(self) -> ColumnElement[bool]:
        return true() if self.buffer is None else lane.c.buffer == self.buffer


#: All buffers of the database.
EVERYWHERE = Looking(None)

_CHUNK = 1000


def status_style(row: Mapping[str, Any]) -> str:
    return STATUS_STYLES.get(str(row.get("status")), "")


def buffers_of(connection: Connection) -> list[str]:
    """The names of the buffers in the database."""
    return list(connection.execute(select(lane.c.buffer).distinct().order_by(lane.c.buffer)).scalars())


def look_at(connection: Connection, buffer: str | None) -> Looking:
    """One buffer, or all. Raises InputError where there are others, but not this one."""
    if buffer is None:
        return EVERYWHERE
    there = buffers_of(connection)
    if there and buffer not in there:
        raise InputError(f"there is no buffer {buffer!r} in this database; there are {', '.join(there)}")
    return Looking(buffer)


def find_groups(
    connection: Connection, scope: Looking, query: Node, order: Order, limit: int | None
) -> list[dict[str, Any]]:
    """The metadata of the groups that match, in order."""
    uids = [uid for uid, _ in find_uids(connection, scope, query, order, limit)]
    found: dict[int, dict[str, Any]] = {}
    for start in range(0, len(uids), _CHUNK):
        chosen = select(group.c.uid).where(uid_in(connection, uids[start : start + _CHUNK]))
        for row in connection.execute(select(GROUPS).where(GROUPS.c.uid.in_(chosen))).mappings():
            found[row["uid"]] = tidy(row)
    return [found[uid] for uid in uids if uid in found]


def find_rollouts(connection: Connection, uid: int) -> list[dict[str, Any]]:
    """What is known of the rollouts of a group, in order."""
    chosen = select(ROLLOUTS).where(ROLLOUTS.c.uid == uid).order_by(ROLLOUTS.c.position)
    return [tidy(row) for row in connection.execute(chosen).mappings()]


def tidy(row: Mapping[Any, Any]) -> dict[str, Any]:
    """A row of a view with the same Python types from both databases."""
    values = dict(row)
    for name, value in values.items():
        if isinstance(value, Decimal):
            values[name] = int(value) if value == value.to_integral_value() else float(value)
    if isinstance(values.get("tags"), str):
        values["tags"] = json.loads(values["tags"])
    for name in ("created_at", "leased_until", "archived_at", "oldest", "newest"):
        if isinstance(values.get(name), str):
            values[name] = datetime.fromisoformat(values[name]).replace(tzinfo=UTC)
    return values


def now_of(connection: Connection) -> datetime:
    """The present time by the store's clock, by which leases end."""
    return datetime.fromtimestamp(store_clock(connection), UTC)


def age_of(moment: datetime | None, now: datetime) -> float | None:
    """Seconds since a moment."""
    return None if moment is None else (now - moment).total_seconds()


def lease_text(until: datetime | None, now: datetime) -> str:
    """When a lease ends: in 45s; or that it is over, and its groups come back when they are drawn."""
    if until is None:
        return "-"
    left = (until - now).total_seconds()
    return f"in {units.age(left)}" if left > 0 else f"over {units.age(-left)} ago"


def tags_text(tags: Mapping[str, Any] | None) -> str:
    """Tags on one line: name=value."""
    return " ".join(
        f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in (tags or {}).items()
    )
