"""Puts, and groups that aren't stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import NamedTuple

from replaybuf.errors import FullError, ReplayBufError
from replaybuf.rules import transitions
from replaybuf.rules.limits import Limits
from replaybuf.rules.transitions import LaneName, Transition
from replaybuf.storage.reports import EventKind
from replaybuf.storage.sql.engine.locks import NamedLock
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.statements.counts import Counts, add_counts, add_step, lock_tasks, read_levels
from replaybuf.storage.sql.statements.eviction import (
    Leaving,
    evict,
    keep_leaving,
    lock_replaced,
    remove_replaced,
    replace_groups,
    replaced_by_place,
)
from replaybuf.storage.sql.statements.fence import FENCE, Row, compare, ticket_column, ticket_of
from replaybuf.storage.sql.statements.files import name_files
from replaybuf.storage.sql.statements.lanes import COLUMNS, Lane, need_lanes, start_steps
from replaybuf.storage.sql.statements.leases import begin_lease, hold, rows_of
from replaybuf.storage.sql.statements.ledger import move_cursor, note_drawn, note_judged
from replaybuf.storage.sql.statements.matching import WITH_KEYS
from replaybuf.storage.sql.statements.new_rows import (
    EncodedGroup,
    counts_of,
    first_steps,
    group_row,
    insert_groups,
    payload_row,
)
from replaybuf.storage.sql.statements.parts import place_part, read_parts
from replaybuf.storage.sql.statements.past import newest
from replaybuf.storage.sql.statements.presence import note, note_again
from replaybuf.storage.sql.statements.rows import GroupRow, name_key, part_key, scoped_key
from replaybuf.storage.values import Cursor, NewGroup
from replaybuf.values.rollouts.statuses import Status

Outcome = int | ReplayBufError


class _Start(NamedTuple):
    """The lanes of new groups that exist, and their uids, as read with the fence; empty for what wasn't."""

    lanes: Mapping[LaneName, Lane] | None = None
    uids: Sequence[int] = ()


_NOTHING_READ = _Start()


def put_groups(
    tx: Transaction, groups: Sequence[EncodedGroup], reserved: Callable[[], object] = lambda: None
) -> list[Outcome]:
    """Insert groups in order and evict beyond the capacity; return the uid or the error of each. Checks the fence.

    Groups that depend on each other are stored one after the other, others together. `reserved()` is called once the
    groups have their uids, if nothing else of them depends on the order of puts. A retry takes new uids: after a crash,
    PostgreSQL may have given the first ones to another transaction.
    """
    if not groups:
        return []
    limits = tx.scope.rules.limits
    if limits.slows_puts or limits.capacity is not None:
        lock_tasks(tx, {encoded.group.task_name for encoded in groups})
    _lock_names(tx, [encoded.group for encoded in groups])
    runs = _independent_runs(groups, limits)
    start = _begin(tx, groups, reserves=tx.dialect.is_remote and len(runs) == 1 and _need_only_room(groups, limits))
    if start.uids and _needs_no_turn(groups, start):
        reserved()
    if len(runs) == 1:
        return _put_together(tx, groups, start)
    _lock_keys(tx, groups)  # each run locks its own keys: two transactions could wait for one another
    return [outcome for run in runs for outcome in _put_together(tx, run)]


def _needs_no_turn(groups: Sequence[EncodedGroup], start: _Start) -> bool:
    """Return whether these groups replace none by key, and begin no lane, nor the train steps of one."""
    names = {(encoded.group.task_name, encoded.group.status) for encoded in groups}
    lanes = start.lanes or {}
    has_keys = any(encoded.group.key is not None for encoded in groups)
    return not has_keys and names <= lanes.keys() and not first_steps(groups, lanes)


def _need_only_room(groups: Iterable[EncodedGroup], limits: Limits) -> bool:
    """Return whether these groups are stored if there is room below the capacity for all of them."""
    new_groups = [encoded.group for encoded in groups]
    return limits.samples_per_insert is None and not any(
        new.replaces or new.parts or new.part or new.lease for new in new_groups
    )


def _begin(tx: Transaction, groups: Sequence[EncodedGroup], *, reserves: bool) -> _Start:
    """Check the fence, and read the lanes of groups; with `reserves`, reserve uids for them, if all have room.

    The shared lock of all writers (`locks.first`) keeps lanes as they are, but for first train steps and the clocks of
    races.
    """
    limits = tx.scope.rules.limits
    tasks = {encoded.group.task_name for encoded in groups}
    completed = Counter(encoded.group.task_name for encoded in groups if encoded.group.status == Status.COMPLETED)
    most = max(completed.values(), default=0)
    rows = tx.tuples(
        _BEGIN[reserves],
        buffer=tx.scope.buffer,
        tasks=sorted(tasks),
        epoch=tx.scope.epoch,
        count=len(groups),
        allowed=limits.capacity - most if limits.slows_puts and limits.capacity is not None else None,
    )
    width = len(Row._fields)
    compare(tx, Row(*rows[0][:width]))
    lanes = [Lane.read(*row[width:-1]) for row in rows if row[width] is not None]  # without any lane, a row of NULLs
    return _Start({home.name: home for home in lanes}, [*map(int, rows[0][-1] or ())])


# Draws with a seed depend on uids: a put that is fenced off, or has no room, takes none.
_UIDS = """CASE WHEN coalesce(epoch, 0) = CAST(:epoch AS bigint) AND (
    CAST(:allowed AS bigint) IS NULL OR CAST(:allowed AS bigint) >= ALL (
        SELECT 0 UNION ALL
        SELECT sum(amount) FROM rb_lane JOIN rb_tally ON lane = id WHERE buffer = :buffer
            AND task_name {in_texts:tasks} AND status = 'completed' AND name = 'size' GROUP BY task_name
    )
) THEN CAST(ARRAY(SELECT nextval('rb_uid') FROM generate_series(1, CAST(:count AS int))) AS text[]) END"""
#: By whether uids are reserved.
_BEGIN = {
    reserves: f"""SELECT fence.*, {COLUMNS}, {uids} FROM ({FENCE}) AS fence
LEFT JOIN rb_lane ON buffer = :buffer AND NOT leased AND task_name {{in_texts:tasks}}"""  # noqa: S608
    for reserves, uids in ((False, "NULL"), (True, _UIDS))
}


def _lock_names(tx: Transaction, groups: Iterable[NewGroup]) -> None:
    """Lock the names of groups that fill, or have filled, in order: all of a transaction, before any row."""
    names = {new.part.name for new in groups if new.part is not None}
    tx.lock_names(NamedLock.KEY, [name_key(tx.scope.buffer, name) for name in names])


def _lock_keys(tx: Transaction, groups: Sequence[EncodedGroup]) -> list[str]:
    """Lock the keys of groups, in order, and return them. Rollouts of groups that fill have free places instead."""
    scoped_keys = {_key_of(tx, encoded.group) for encoded in groups if encoded.group.status != Status.FILLING}
    keys = sorted(key for key in scoped_keys if key is not None)
    tx.lock_names(NamedLock.KEY, keys)
    return keys


def claim(
    tx: Transaction,
    groups: Sequence[EncodedGroup],
    moved: Cursor,
    seconds: float,
    epochs: Mapping[int, int] | None = None,
) -> tuple[list[GroupRow], int, float] | None:
    """Move a cursor and put groups under a lease; return their rows, and the lease's token and end.

    None if another process or a restore has moved the cursor. `epochs` has those of prompts that are drawn by order.
    """
    if not move_cursor(tx, moved):
        return None
    if epochs is not None:
        note_drawn(tx, moved.name, moved.version + 1, epochs)
    uids = store(tx, groups, evicting=False)
    rows = rows_of(tx, uids)
    for row, encoded in zip(rows, groups, strict=True):
        row.payload = bytes(encoded.payload)
    token, until = begin_lease(tx, seconds)
    hold(tx, rows, token, until, groups[0].group.worker if groups else None)
    return rows, token, until


def put_with_cursor(
    tx: Transaction, groups: Sequence[EncodedGroup], moved: Cursor, event: EventKind | None = None
) -> bool:
    """Move a cursor and put groups; return False, and do nothing, if another process has moved it."""
    if not move_cursor(tx, moved):
        return False
    for outcome in put_groups(tx, groups):
        if isinstance(outcome, ReplayBufError):
            raise outcome
    if groups and event is not None:
        note_again(tx, event, adds=True, worker=groups[0].group.worker, groups=len(groups), detail=moved.name)
    return True


def _independent_runs(groups: Sequence[EncodedGroup], limits: Limits) -> list[list[EncodedGroup]]:
    """Return the groups in runs, within which none depends on another."""
    new_groups = [encoded.group for encoded in groups]
    all_alone = any(new.key for new in new_groups) and (limits.slows_puts or any(new.replaces for new in new_groups))
    runs, names, closed = [list[EncodedGroup]()], set[str | int | tuple[str, str]](), False
    for encoded, new in zip(groups, new_groups, strict=True):
        is_alone = all_alone or new.stays_leased or new.dropped is not None or new.rest is not None
        name = new.part.name if new.part is not None else (new.task_name, new.key) if new.key is not None else None
        if runs[-1] and (is_alone or closed or name in names):
            runs.append([])
            names.clear()
        closed = is_alone
        runs[-1].append(encoded)
        if name is not None:
            names.add(name)
    return runs


def _put_together(tx: Transaction, groups: Sequence[EncodedGroup], start: _Start = _NOTHING_READ) -> list[Outcome]:
    """Store groups that don't depend on each other, and return their outcomes.

    One that stays leased, or with a `dropped` list, comes alone.
    """
    first, stays_leased = groups[0].group, groups[0].group.stays_leased
    replaced, errors = replaced_by_place(tx, [encoded.group for encoded in groups])
    errors |= _place_parts(tx, groups)
    if tx.scope.rules.limits.slows_puts and not stays_leased and not start.uids:
        errors |= _room_errors(tx, groups, replaced, errors)
    places = [place for place in range(len(groups)) if place not in errors]
    groups[0].leaving = leaving = None if first.dropped is None else list[GroupRow]()
    removed_rows = [replaced.get(place, ()) for place in places]
    if replaced:
        remove_replaced(tx, [row for rows in removed_rows for row in rows], leaving)
    uids = store(tx, [groups[place] for place in places], not stays_leased, removed_rows, leaving, start)
    keep_leaving(tx, leaving)
    if uids and (rest := groups[0].rest) is not None:
        put_uids = [*uids, *store(tx, [rest])]
        detail = f"{len(rest.group.rollouts)} {rest.group.status} of group {put_uids[0]}, now group {put_uids[-1]}"
        note(tx, EventKind.LEFT_OUT, worker=first.worker, task_name=first.task_name, uids=put_uids, detail=detail)
    note_judged(tx, (groups[place].group for place in places))
    if stays_leased and uids:
        leased_rows = replaced[0]
        delivered = max(row.deliveries for row in leased_rows)
        lease, until = leased_rows[0].column("lease"), leased_rows[0].column("leased_until")
        hold(tx, rows_of(tx, uids), lease, until, first.worker, deliveries=delivered)
    outcomes: dict[int, Outcome] = {**errors, **dict(zip(places, uids, strict=True))}
    return [outcomes[place] for place in range(len(groups))]


def _place_parts(tx: Transaction, groups: Sequence[EncodedGroup]) -> dict[int, ReplayBufError]:
    """Give rollouts their places in groups that fill. Return the errors of those without, by index."""
    errors: dict[int, ReplayBufError] = {}
    for place, new in enumerate(encoded.group for encoded in groups):
        try:
            if new.part is not None:
                place_part(tx, new) if new.status == Status.FILLING else read_parts(tx, new.part.name)
        except ReplayBufError as error:
            errors[place] = error
    return errors


def _room_errors(
    tx: Transaction,
    groups: Sequence[EncodedGroup],
    replaced: Mapping[int, Sequence[GroupRow]],
    passed_over: Container[int],
) -> dict[int, FullError]:
    """Return the errors of groups without room, by index; one with a key comes alone, and leaves the room of another.

    `replaced` has the groups that each names.
    """
    limits = tx.scope.rules.limits
    levels = read_levels(tx, {encoded.group.task_name for encoded in groups})
    errors = {}
    for place, new in enumerate(encoded.group for encoded in groups):
        if place in passed_over:
            continue
        removed_rows = {row.uid: row for row in replaced.get(place, ())}
        if (key := _key_of(tx, new)) is not None:
            removed_rows |= {row.uid: row for row in lock_replaced(tx, WITH_KEYS, keys=[key])}
        # Leased groups take no room.
        freed = [row.status for row in removed_rows.values() if row.task_name == new.task_name and not row.is_leased]
        level = levels[new.task_name].without(freed)
        if limits.insertable(level, new.status) == 0:
            errors[place] = FullError(f"task {new.task_name}: {limits.why_full(level, new.status)}")
        else:
            levels[new.task_name] = level.joined_by(new.status)
    return errors


def store(
    tx: Transaction,
    groups: Sequence[EncodedGroup],
    evicting: bool = True,
    removed_rows: Sequence[Sequence[GroupRow]] = (),
    leaving: Leaving = None,
    start: _Start = _NOTHING_READ,
) -> list[int]:
    """Insert groups for which there is room, and evict beyond the capacity; return their uids.

    `removed_rows` has the groups that each of them names, and has replaced. Groups that are replaced by key, or
    evicted, are appended to `leaving`.
    """
    if not groups:
        return []
    lanes = _lanes_for(tx, groups, start.lanes)
    uids = start.uids or tx.reserve_uids(len(groups))
    counts = counts_of(groups, lanes)
    rows = [(uid, encoded, _key_of(tx, encoded.group)) for uid, encoded in zip(uids, groups, strict=True)]
    if any(key is not None for _, _, key in rows):
        replace_groups(tx, WITH_KEYS, leaving, keys=_lock_keys(tx, groups))
    keys, at = _draw_keys(tx, lanes, rows), newest(tx)
    made_from = [[old.uid for old in named] if named else () for named in removed_rows] or [()] * len(rows)
    values = [
        group_row(uid, encoded, key, lanes, at, keys.get(uid), ticket_column(tx, uid), old_uids)
        for (uid, encoded, key), old_uids in zip(rows, made_from, strict=True)
    ]
    name_files(tx, (encoded.extent for _, encoded, _ in rows if encoded.extent is not None))
    insert_groups(tx, values, [payload_row(uid, encoded) for uid, encoded, _ in rows])
    if evicting:
        evict(tx, {task for task, _ in lanes}, counts, leaving)
    add_counts(tx, counts)
    return [*uids]


def _lanes_for(
    tx: Transaction, groups: Sequence[EncodedGroup], known: Mapping[LaneName, Lane] | None
) -> dict[LaneName, Lane]:
    names = {(encoded.group.task_name, encoded.group.status) for encoded in groups}
    lanes = need_lanes(tx, names, known)
    if steps := first_steps(groups, lanes):
        start_steps(tx, steps)
        lanes = need_lanes(tx, names)
    return lanes


def _key_of(tx: Transaction, new: NewGroup) -> str | None:
    if new.part is None:
        return scoped_key(tx.scope.buffer, new.task_name, new.key)
    buffer = tx.scope.buffer
    return part_key(buffer, new.part) if new.status == Status.FILLING else name_key(buffer, new.part.name)


def _draw_keys(
    tx: Transaction, lanes: Mapping[LaneName, Lane], rows: Sequence[tuple[int, EncodedGroup, str | None]]
) -> dict[int, float]:
    """Return the sampling keys of new groups in lanes that run a race, by uid."""
    by_uid: dict[int, float] = {}
    for name, home in lanes.items():
        if home.race is not None:
            members = [(uid, put.group) for uid, put, _ in rows if (put.group.task_name, put.group.status) == name]
            keys = home.race.draw_keys((ticket_of(tx, uid), new.priority) for uid, new in members)
            by_uid |= zip((uid for uid, _ in members), keys, strict=True)
    return by_uid


def drop(tx: Transaction, new: NewGroup) -> list[GroupRow]:
    """Count a group that isn't stored, and remove the groups that its put would replace.

    Returns the removed groups if the put has a `dropped` list.
    """
    leaving: Leaving = None if new.dropped is None else []
    _lock_names(tx, [new])
    replaced, errors = replaced_by_place(tx, [new])
    if errors:
        raise errors[0]
    removed_rows = {row.uid: row for row in replaced.get(0, ())}
    if (key := _key_of(tx, new)) is not None:
        tx.lock_names(NamedLock.KEY, [key])
        removed_rows |= {row.uid: row for row in lock_replaced(tx, WITH_KEYS, keys=[key])}
    remove_replaced(tx, removed_rows.values(), leaving)
    keep_leaving(tx, leaving)
    note_judged(tx, [new])
    _count_step(tx, new, transitions.dropped(new.status))
    return leaving or []


def refuse(tx: Transaction, new: NewGroup) -> None:
    """Count a group as refused for lack of room."""
    _count_step(tx, new, transitions.refused(new.status))
    note_again(tx, EventKind.REFUSED, adds=True, task_name=new.task_name, worker=new.worker, groups=1)


def _count_step(tx: Transaction, new: NewGroup, step: Transition) -> None:
    counts: Counts = Counter()
    add_step(counts, need_lanes(tx, [(new.task_name, new.status)]), new.task_name, step)
    add_counts(tx, counts)
