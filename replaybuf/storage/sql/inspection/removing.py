"""What deleting groups would remove."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import func

from replaybuf.query import Node
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.inspection.groups import Looking
from replaybuf.storage.sql.schema.tables import group, lane
from replaybuf.storage.sql.statements.matching import select_matching


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


def removable(tx: Transaction, name: str, query: Node) -> Removable:
    """Return what deleting the groups of a buffer that match would remove."""
    columns = lane.c.task_name, lane.c.status, lane.c.leased
    counted = (*columns, func.count().label("groups"), func.max(group.c.uid).label("last"))
    chosen = select_matching(tx.of(Looking(name)), query, *counted)
    found = list(tx.execute(chosen.group_by(*columns).order_by(*columns)))
    rows = [{"task_name": row.task_name, "status": row.status, "groups": row.groups} for row in found if not row.leased]
    leased = sum(row.groups for row in found if row.leased)
    return Removable(rows, leased, max((row.last for row in found), default=0))
