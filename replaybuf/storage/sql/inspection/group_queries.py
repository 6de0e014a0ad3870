"""Groups that match a query: lists, page by page, and what a delete would remove."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from replaybuf.rules.policies import Order
from replaybuf.rules.query import Node
from replaybuf.storage.sql.engine.transaction import Scope, Transaction
from replaybuf.storage.sql.inspection.group_metadata import (
    Listing,
    buffers_of,
    check_buffer,
    extreme_rollouts,
    read_metadata,
)
from replaybuf.storage.sql.statements.matching import count_groups, find_uids, select_matching


def read_scope(tx: Transaction, buffer: str | None) -> Transaction:
    """Return a transaction that queries one buffer or all, with leased groups. Raises InputError when only other
    buffers exist."""
    check_buffer(tx, buffer)
    return tx.of(Scope(buffer, with_leased=True))


def list_groups(
    tx: Transaction,
    buffer: str | None,
    query: Node,
    order: Order,
    limit: int | None,
    *,
    first: int = 0,
    count: bool = False,
) -> Listing:
    """Return the groups that match, in order, up to `limit` of them after the `first` ones.

    With `count` also the number of all matches, regardless of the limit.
    """
    lookup, end = read_scope(tx, buffer), None if limit is None else first + limit
    rows = read_metadata(tx, [uid for uid, _ in find_uids(lookup, query, order, end)[first:]])
    total = count_groups(lookup, query, None) if count and len(rows) == limit else len(rows)
    return Listing(rows, total, tx.now(), several=buffer is None and len(buffers_of(tx)) > 1)


# Marks have the rewards of all rollouts, completed or not.
_EXTREME = {
    "sqlite": "(SELECT {lowest}(value) FROM json_each(g.marks, '$.reward'))",
    "postgresql": "(SELECT {lowest}(value::double precision) FROM jsonb_array_elements_text(g.marks -> 'reward'))",
}


def extremes_matching(
    tx: Transaction, buffer: str | None, query: Node, count: int, *, worst: bool
) -> list[tuple[int, int]]:
    """Return the (uid, position) of `extreme_rollouts` of all groups that match."""
    lookup, (order, lowest, sign) = read_scope(tx, buffer), ("ASC", "min", 1) if worst else ("DESC", "max", -1)
    extreme = _EXTREME[tx.dialect.name].format(lowest=lowest)
    statement, values = select_matching(lookup, query, f"g.uid, {extreme} AS extreme")
    statement += f" AND g.reward IS NOT NULL ORDER BY extreme {order}, g.uid DESC LIMIT :most"
    most = 8 * count + 100
    while True:
        groups = lookup.tuples(statement, most=most, **values)
        found = extreme_rollouts(tx, [uid for uid, _ in groups], count, worst=worst)
        # A group that wasn't looked at has no rollout beyond the last one's extreme.
        if len(groups) < most or (len(found) == count and sign * found[-1][2] <= sign * groups[-1][1]):
            return [(uid, position) for uid, position, _ in found]
        most *= 8


@dataclass(frozen=True, slots=True)
class Removable:
    """The groups that a delete by query would remove: a row for each task and status, the number of leased matches
    (which stay), and the last uid of all matches."""

    rows: list[dict[str, Any]]
    leased: int
    last: int

    @property
    def groups(self) -> int:
        return sum(row["groups"] for row in self.rows)


def removable(tx: Transaction, name: str, query: Node) -> Removable:
    """Return what a delete of the matching groups of a buffer would remove."""
    columns = "l.task_name, l.status, l.leased"
    lookup = tx.of(Scope(name, with_leased=True))
    statement, values = select_matching(lookup, query, f"{columns}, count(*), max(g.uid)")
    counts = lookup.tuples(f"{statement} GROUP BY {columns} ORDER BY {columns}", **values)
    rows = [
        {"task_name": task, "status": status, "groups": groups}
        for task, status, leased, groups, _ in counts
        if not leased
    ]
    leased = sum(groups for _, _, leased, groups, _ in counts if leased)
    return Removable(rows, leased, max((last for *_, last in counts), default=0))
