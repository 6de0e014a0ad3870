"""Groups that a put replaces: finding, checking and removing them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, select

from replaybuf.errors import ConflictError, ReplayBufError
from replaybuf.rollouts.rollout import Status
from replaybuf.rules.tallies import Tally
from replaybuf.rules.transitions import Place, removed
from replaybuf.storage.sql.engine.transaction import Scope, Transaction
from replaybuf.storage.sql.schema.tables import group, lane
from replaybuf.storage.sql.statements.columns import uid_in
from replaybuf.storage.sql.statements.leaving import Leaving, note
from replaybuf.storage.sql.statements.matching import lock_groups
from replaybuf.storage.sql.statements.steps import apply
from replaybuf.storage.values import NewGroup, check_lease, lost_to_others


def replace_groups(tx: Transaction, condition: ColumnElement[bool], leaving: Leaving = None) -> None:
    """Remove the groups, including leased ones, that others replace."""
    remove_replaced(tx, lock_replaced(tx, condition), leaving)


def replaced_by_place(
    tx: Transaction, groups: Sequence[NewGroup]
) -> tuple[dict[int, list[Any]], dict[int, ReplayBufError]]:
    """Return what each of these groups replaces, or why it can't, by place. Each stored group is replaced once."""
    wanted = sorted({uid for new in groups for uid in new.replaces})
    there = {row.uid: row for row in lock_replaced(tx, uid_in(tx, wanted))} if wanted else {}
    replaced: dict[int, list[Any]] = {}
    refused: dict[int, ReplayBufError] = {}
    for place, new in enumerate(groups):
        if new.replaces:
            try:
                replaced[place] = _check_replaced(tx.scope, new, there)
            except ReplayBufError as error:
                refused[place] = error
            else:
                for uid in new.replaces:
                    there.pop(uid, None)
    return replaced, refused


def find_replaced(tx: Transaction, new: NewGroup) -> list[Any]:
    """Return the groups that a put names. Raises ConflictError, LeaseLostError and FencedError."""
    there = {row.uid: row for row in lock_replaced(tx, uid_in(tx, new.replaces))}
    return _check_replaced(tx.scope, new, there)


def _check_replaced(scope: Scope, new: NewGroup, there: Mapping[int, Any]) -> list[Any]:
    """Return the groups there that a put names. Raises ConflictError, LeaseLostError and FencedError."""
    token = None
    if new.lease is not None:
        check_lease(new.lease, scope.epoch, scope.database)
        token = new.lease.token
    found = {uid: there[uid] for uid in new.replaces if uid in there and there[uid].lease == token}
    missing = [uid for uid in new.replaces if uid not in found]
    if missing and new.lease is not None:
        raise lost_to_others(new.lease, len(missing))
    if missing:
        raise ConflictError(f"group {missing[0]}, which was to be replaced, is not in the buffer; nothing was stored")
    return list(found.values())


def lock_replaced(tx: Transaction, condition: Any) -> list[Any]:
    """Return the stored groups that are to be replaced, including leased ones, with their lanes."""
    locked = [uid for uid, _ in lock_groups(tx, condition)]
    found = (
        select(
            *(group.c[name] for name in ("uid", "lane", "lease", "leased_until", "deliveries", "made_from")),
            *(lane.c[name] for name in ("task_name", "status", "leased")),
        )
        .select_from(group.join(lane, lane.c.id == group.c.lane))
        .where(lane.c.buffer == tx.scope.buffer, uid_in(tx, locked))
    )
    return list(tx.execute(found)) if locked else []


def remove_replaced(tx: Transaction, rows: Iterable[Any], leaving: Leaving = None) -> None:
    rows = list(rows)
    note(tx, (row.uid for row in rows), leaving)
    steps = [(row.task_name, removed(Place(Status(row.status), row.leased), Tally.REPLACED), [row.uid]) for row in rows]
    apply(tx, steps)


def origins(replaced: Iterable[Any]) -> set[int]:
    """Return the uids of these groups, and of all that they replaced."""
    return {uid for row in replaced for uid in (row.uid, *(row.made_from or ()))}


def kept_origins(replaced: Iterable[Any], in_checkpoints: Container[int]) -> list[int]:
    """Return the origins that are kept with the new group: those that it replaced itself, and those in checkpoints.

    A restore that keeps the new group doesn't bring the latter back.
    """
    direct = {row.uid for row in replaced}
    return sorted(uid for uid in origins(replaced) if uid in direct or uid in in_checkpoints)
