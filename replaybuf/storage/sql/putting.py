"""Puts that are committed together: which of them are stored, and in whose place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection

from replaybuf.errors import ConflictError, FullError, ReplayBufError
from replaybuf.rollout import Status
from replaybuf.storage.base import NewGroup, check_epoch, lost_to_others
from replaybuf.storage.sql.fields import uid_in
from replaybuf.storage.sql.lanes import Scope
from replaybuf.storage.sql.lease import hold, rows_of
from replaybuf.storage.sql.put import key_of, lock_replaced, remove_replaced, store
from replaybuf.storage.sql.rows import EncodedGroup
from replaybuf.storage.sql.tables import group
from replaybuf.storage.sql.tally import lock_tasks, read_levels
from replaybuf.storage.sql.uids import uids_in_checkpoints

Outcome = int | ReplayBufError


def put_groups(connection: Connection, scope: Scope, groups: Sequence[EncodedGroup], now: float) -> list[Outcome]:
    """Insert groups, in order, and evict what is beyond the capacity; their uids, or why one was not stored."""
    limits = scope.rules.limits
    tasks = {encoded.group.task_name for encoded in groups}
    if limits.slows_puts or limits.capacity is not None:
        lock_tasks(connection, scope, tasks)
    if any(one.group.replaces or (limits.slows_puts and one.group.key) for one in groups):
        if _are_independent(groups) and not limits.slows_puts:
            return _put_replacing(connection, scope, groups, now)
        return [_put_one(connection, scope, one, now) for one in groups]
    refused = _refused(connection, scope, [one.group for one in groups], tasks) if limits.slows_puts else {}
    uids = iter(store(connection, scope, [one for place, one in enumerate(groups) if place not in refused], now))
    return [refused[place] if place in refused else next(uids) for place in range(len(groups))]


def _refused(
    connection: Connection, scope: Scope, groups: Sequence[NewGroup], tasks: Iterable[str]
) -> dict[int, FullError]:
    """Which of these groups, by place, find no room."""
    limits, levels = scope.rules.limits, read_levels(connection, scope, tasks)
    refused = {}
    for place, new in enumerate(groups):
        if limits.insertable(levels[new.task_name], new.status) == 0:
            refused[place] = FullError(f"task {new.task_name}: {limits.why_full(levels[new.task_name], new.status)}")
        else:
            levels[new.task_name] = levels[new.task_name].joined_by(new.status)
    return refused


def _put_one(connection: Connection, scope: Scope, encoded: EncodedGroup, now: float) -> Outcome:
    """Store a group that takes the place of others, if it can."""
    new = encoded.group
    try:
        replaced = _find_replaced(connection, scope, new)
        if not new.stays_leased:
            _check_room(connection, scope, new, replaced)
    except ReplayBufError as error:  # nothing was changed
        return error
    made_from = uids_in_checkpoints(connection, scope, _origins(replaced))
    remove_replaced(connection, scope, replaced, now)
    [uid] = store(connection, scope, [encoded], now, evicting=not new.stays_leased, made_from=[made_from])
    if new.stays_leased:
        delivered = max(row.deliveries for row in replaced)
        rows = rows_of(connection, scope, [uid])
        hold(connection, scope, rows, replaced[0].lease, replaced[0].leased_until, deliveries=delivered)
    return uid


def _are_independent(groups: Sequence[EncodedGroup]) -> bool:
    """Whether no put replaces what another one does, or puts, and nothing else has to be done group by group."""
    replaced = [uid for one in groups for uid in one.group.replaces]
    special = any(one.group.key is not None or one.group.stays_leased for one in groups)
    return not special and len(set(replaced)) == len(replaced)


def _put_replacing(connection: Connection, scope: Scope, groups: Sequence[EncodedGroup], now: float) -> list[Outcome]:
    """Store groups that take the place of others, if they can, all with the same statements."""
    named = [uid for one in groups for uid in one.group.replaces]
    there = {row.uid: row for row in lock_replaced(connection, scope, uid_in(connection, named))}
    refused: dict[int, ReplayBufError] = {}
    replaced: dict[int, list[Any]] = {}
    for place, one in enumerate(groups):
        try:
            replaced[place] = _replaced_by(scope, one.group, there)
        except ReplayBufError as error:
            refused[place] = error
    gone = [row for rows in replaced.values() for row in rows]
    kept = set(uids_in_checkpoints(connection, scope, _origins(gone)))
    made_from = [sorted(_origins(rows) & kept) for rows in replaced.values()]
    remove_replaced(connection, scope, gone, now)
    uids = iter(store(connection, scope, [groups[place] for place in replaced], now, made_from=made_from))
    return [refused[place] if place in refused else next(uids) for place in range(len(groups))]


def _origins(replaced: Iterable[Any]) -> set[int]:
    """These groups, and all that they were made from."""
    return {uid for row in replaced for uid in (row.uid, *(row.made_from or ()))}


def _find_replaced(connection: Connection, scope: Scope, new: NewGroup) -> list[Any]:
    """The groups that a put names. Raises ConflictError, LeaseLostError and FencedError."""
    there = {row.uid: row for row in lock_replaced(connection, scope, uid_in(connection, new.replaces))}
    return _replaced_by(scope, new, there)


def _replaced_by(scope: Scope, new: NewGroup, there: Mapping[int, Any]) -> list[Any]:
    """The groups that a put names, of those that are there. Raises ConflictError, LeaseLostError and FencedError."""
    token = None
    if new.lease is not None:
        check_epoch(new.lease, scope.epoch)
        token = new.lease.token
    found = {uid: there[uid] for uid in new.replaces if uid in there and there[uid].lease == token}
    missing = [uid for uid in new.replaces if uid not in found]
    if missing and new.lease is not None:
        raise lost_to_others(new.lease, len(missing))
    if missing:
        raise ConflictError(f"group {missing[0]}, which was to be replaced, is not in the buffer; nothing was stored")
    return list(found.values())


def _check_room(connection: Connection, scope: Scope, new: NewGroup, replaced: Iterable[Any]) -> None:
    """Raise FullError when the limits leave no room for a group that takes the place of these, and of its key's."""
    limits = scope.rules.limits
    if not limits.slows_puts:
        return
    keyed = lock_replaced(connection, scope, group.c.scoped_key == key_of(scope, new)) if new.key else []
    gone = {row.uid: row for row in (*keyed, *replaced) if not row.leased}
    here = [Status(row.status) for row in gone.values() if row.task_name == new.task_name]
    level = read_levels(connection, scope, [new.task_name])[new.task_name].without(here)
    if limits.insertable(level, new.status) == 0:
        raise FullError(f"task {new.task_name}: {limits.why_full(level, new.status)}")
