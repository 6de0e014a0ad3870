"""Metadata queries: reading, counting, changing and removing the groups that match."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from pydantic_core import from_json

from replaybuf.rules.policies import Order
from replaybuf.rules.query import LogicNode, Node, SetNode, to_text
from replaybuf.rules.query.sql_conditions import condition_text
from replaybuf.rules.transitions import Place, Tally, removed, updated
from replaybuf.storage.decoding import DAMAGE
from replaybuf.storage.reports import EventKind
from replaybuf.storage.sql.engine.dialect import to_json_text
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.schema.tables import DUE
from replaybuf.storage.sql.statements.buffer_facts import last_uid
from replaybuf.storage.sql.statements.counts import Step, apply, change
from replaybuf.storage.sql.statements.lanes import Lane, lanes_where
from replaybuf.storage.sql.statements.new_rows import dump_json
from replaybuf.storage.sql.statements.ordering import enter_race
from replaybuf.storage.sql.statements.past import keep
from replaybuf.storage.sql.statements.presence import note
from replaybuf.storage.sql.statements.rows import FIELDS, GroupRow, read_rows, sort_key
from replaybuf.storage.values import Changes, Unset
from replaybuf.values.rollouts.statuses import Status

_CHUNK = 10_000


def select_matching(tx: Transaction, query: Node, columns: str) -> tuple[str, dict[str, Any]]:
    """Return the SELECT of columns of the groups `g`, with their lanes `l`, that match, and its values."""
    condition, values = condition_text(query, FIELDS, tx.dialect.compiler)
    conditions = [condition] if tx.scope.buffer is None else ["l.buffer = :buffer", condition]
    conditions += [] if tx.scope.with_leased else [_NOT_LEASED]
    joined = "rb_group g JOIN rb_lane l ON l.id = g.lane"
    values["buffer"] = tx.scope.buffer
    return f"SELECT {columns} FROM {joined} WHERE {' AND '.join(conditions)}", values  # noqa: S608


_NOT_LEASED = "l.leased = FALSE"


def find_uids(tx: Transaction, query: Node, order: Order, limit: int | None) -> list[tuple[int, int]]:
    """Return the uids of the groups that match, in order, each with the size of its payload in bytes (0 if damaged)."""
    statement, values = select_matching(tx, query, "g.uid, g.bytes")
    if order:
        keys = [sort_key(term.field, FIELDS[term.field], descending=term.descending) for term in order]
        statement += f" ORDER BY {', '.join(keys)}"
    if limit is not None:
        statement += " LIMIT :limit"
    return _uids_with_sizes(tx.tuples(statement, limit=limit, **values))


def find_page(
    tx: Transaction, query: Node, after: int, last: int | None, size: int
) -> tuple[list[tuple[int, int]], int]:
    """Return the next groups that match after a uid, in the order of uids, at most `size`, and the `last` uid.

    The search ends with that one, by default the last uid at its first page.
    """
    last = last_uid(tx) if last is None else last
    statement, values = select_matching(tx, query, "g.uid, g.bytes")
    statement += " AND g.uid > :after AND g.uid <= :last ORDER BY g.uid LIMIT :size"
    return _uids_with_sizes(tx.tuples(statement, after=after, last=last, size=size, **values)), last


def _uids_with_sizes(rows: Iterable[Sequence[Any]]) -> list[tuple[int, int]]:
    return [(uid, size if type(size) is int else 0) for uid, size in rows]


def read_matching(tx: Transaction, uids: Sequence[int], query: Node, payloads: bool) -> list[GroupRow]:
    """Return the existing groups with these uids that (still) match, perhaps with payloads, in the given order."""
    condition, values = condition_text(query, FIELDS, tx.dialect.compiler)
    condition = f"g.uid {{in:uids}} AND {_NOT_LEASED} AND {condition}"
    rows = {row.uid: row for row in read_rows(tx, condition, payloads=payloads, uids=uids, **values)}
    return [rows[uid] for uid in uids if uid in rows]


def count_groups(tx: Transaction, query: Node, at_most: int | None) -> int:
    """Return the number of groups that match, at most `at_most`."""
    statement, values = select_matching(tx, query, "count(*)" if at_most is None else "1")
    if at_most is not None:
        statement = f"SELECT count(*) FROM ({statement} LIMIT :most) m"  # noqa: S608
    return int(tx.value(statement, most=at_most, **values))


def delete_groups(tx: Transaction, query: Node) -> int:
    """Remove the groups that match, and return their number."""
    deleted: dict[str, list[int]] = {}
    for by_lane in _lock_matching(tx, query):
        steps = [(home.task_name, removed(Place(home.status), Tally.DELETED), uids) for home, uids in by_lane]
        apply(tx, steps, (home for home, _ in by_lane))
        for home, uids in by_lane:
            deleted.setdefault(home.task_name, []).extend(uids)
    _note_each(tx, EventKind.DELETED, deleted, query)
    return sum(map(len, deleted.values()))


def _note_each(tx: Transaction, kind: EventKind, by_task: Mapping[str, Sequence[int]], query: Node) -> None:
    """Write an event per task of groups that match a query."""
    worker, detail = tx.scope.worker, to_text(query)
    for task_name, uids in by_task.items():
        note(tx, kind, worker=worker, task_name=task_name, groups=len(uids), uids=uids, detail=detail)


def update_groups(tx: Transaction, query: Node, changes: Changes) -> int:
    """Change the groups that match, and return their number."""
    values: dict[str, Any] = {}
    if not isinstance(changes.priority, Unset):
        values["priority"] = changes.priority
    if not isinstance(changes.tags, Unset):
        values["tags"] = to_json_text(changes.tags or None)
    number = 0
    for by_lane in _lock_matching(tx, query):
        for home, uids in by_lane:
            if values:
                keep(tx, uids)
                change(tx, uids, values)
            if "priority" in values:
                enter_race(tx, home, uids)
            number += len(uids)
        if not isinstance(changes.status, Unset):
            _settle(tx, [uid for home, uids in by_lane if home.status != Status.COMPLETED for uid in uids])
            steps = [(home.task_name, updated(home.status, changes.status), uids) for home, uids in by_lane]
            apply(tx, steps, (home for home, _ in by_lane))
    return number


def _settle(tx: Transaction, uids: Sequence[int]) -> None:
    """Let no rollout be due to expire any more: who sets a group's status has decided what becomes of it."""
    query = f"SELECT uid, CAST(marks AS text) FROM rb_group WHERE uid {{in:uids}} AND {DUE} ORDER BY uid"  # noqa: S608
    rows = []
    for uid, text in tx.tuples(query, uids=uids) if uids else ():
        with suppress(*DAMAGE):  # the next refresh or draw sets such a group aside
            marks = from_json(text)
            del marks["due"]
            rows.append((uid, dump_json(marks)))
    keep(tx, [uid for uid, _ in rows])
    tx.set_columns(("marks",), rows)


#: Statuses of groups that can be requeued.
REQUEUED = (Status.FAILED, Status.FILTERED, Status.EXPIRED)


def requeue_groups(tx: Transaction, query: Node) -> dict[Status, int]:
    """Make failed, filtered and expired groups that match COMPLETED, or ABORTED if a rollout has no response.

    A filtered rollout counts as completed if it has a response. ABORTED groups are generated again. The groups' errors
    and delivery attempts are reset. Returns the numbers by new status.
    """
    numbers: dict[Status, int] = {}
    requeued: dict[str, list[int]] = {}
    condition = LogicNode("$and", (query, SetNode("status", "$in", tuple(map(str, REQUEUED)))))
    for by_lane in _lock_matching(tx, condition):
        steps: list[Step] = []
        for home, uids in by_lane:
            finished = set(tx.values(_FINISHED, uids=uids))
            for status, members in (
                (Status.ABORTED, [uid for uid in uids if uid not in finished]),
                (Status.COMPLETED, [uid for uid in uids if uid in finished]),
            ):
                if members:
                    steps.append((home.task_name, updated(home.status, status), members))
                    numbers[status] = numbers.get(status, 0) + len(members)
            requeued.setdefault(home.task_name, []).extend(uids)
        apply(tx, steps, (home for home, _ in by_lane))
    _note_each(tx, EventKind.REQUEUED, requeued, query)
    return numbers


#: The groups whose rollouts are all completed, or filtered with a response. The view has no rollouts of a group whose
#: outline was lost, by a repair or the late undo of a draw: such a group is generated again.
_FINISHED = """
SELECT uid FROM rollouts WHERE uid {in:uids} GROUP BY uid HAVING 0 = count(CASE WHEN status <> 'completed'
    AND NOT (status = 'filtered' AND (response_tokens > 0 OR length(response) > 0)) THEN 1 END)"""


def update_priorities(tx: Transaction, priorities: Mapping[int, float]) -> int:
    """Set the priorities of groups, including leased ones; return the number of groups found."""
    if not priorities:
        return 0
    locked = lock_groups(tx, WITH_UIDS, uids=sorted(priorities))
    by_lane = _uids_by_lane(tx, locked)
    rows = [(priorities[uid], uid) for _, uids in by_lane for uid in uids]
    if rows:
        keep(tx, [uid for uid, _ in locked])
        tx.each("UPDATE rb_group SET priority = :priority WHERE uid = :uid", rows)
    for home, uids in by_lane:
        enter_race(tx, home, uids)
    return len(rows)


#: Conditions of `lock_groups`.
WITH_UIDS, WITH_KEYS = "uid {in:uids}", "scoped_key {in_texts:keys}"


def lock_groups(tx: Transaction, condition: str, **values: Any) -> list[tuple[int, int]]:
    """Return uids and lanes of the groups, of any buffer and leased or not, that meet a condition, with row locks.

    Without a join: with one, PostgreSQL would omit a group that changed its lane during the wait for its lock.
    """
    rows = tx.tuples(f"SELECT uid, lane FROM rb_group WHERE {condition} ORDER BY uid {{lock}}", **values)  # noqa: S608
    return [(uid, lane_id) for uid, lane_id in rows]


def _uids_by_lane(tx: Transaction, rows: Sequence[tuple[int, int]]) -> list[tuple[Lane, list[int]]]:
    """Return the groups of the buffer by lane, from their uids and lane ids."""
    members: dict[int, list[int]] = {}
    for uid, lane_id in rows:
        members.setdefault(lane_id, []).append(uid)
    return [(home, members[home.id]) for home in lanes_where(tx, "id {in:ids}", ids=sorted(members))]


def _lock_matching(tx: Transaction, query: Node) -> Iterator[list[tuple[Lane, list[int]]]]:
    """Yield the groups that match, with row locks, in chunks, by lane.

    Where others may have held those locks, the groups are found, locked, and asked again whether they match.
    """
    matching, values = select_matching(tx, query, "g.uid, g.lane")
    rows = [(uid, lane_id) for uid, lane_id in tx.tuples(f"{matching} ORDER BY g.uid", **values)]
    for start in range(0, len(rows), _CHUNK):
        chunk = rows[start : start + _CHUNK]
        if tx.dialect.is_remote:
            uids = [uid for uid, _ in chunk]
            lock_groups(tx, WITH_UIDS, uids=uids)
            still_matching = tx.tuples(f"{matching} AND g.uid {{in:uids}}", uids=uids, **values)
            chunk = [(uid, lane_id) for uid, lane_id in still_matching]
        yield _uids_by_lane(tx, chunk)
