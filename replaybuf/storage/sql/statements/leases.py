"""Leases: drawn groups are in separate lanes, with a token and an end, until acknowledged, given back or overdue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from replaybuf.errors import LeaseLostError
from replaybuf.rules import transitions
from replaybuf.rules.transitions import LaneName, Place, Tally
from replaybuf.storage.decoding import extent_of
from replaybuf.storage.reports import EventKind
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.schema.tables import payload
from replaybuf.storage.sql.statements.batches import settle
from replaybuf.storage.sql.statements.counts import (
    Counts,
    add_counts,
    add_step,
    add_to_checkpoints,
    change,
    move,
    trained_at,
)
from replaybuf.storage.sql.statements.files import READING_SECONDS, count_back
from replaybuf.storage.sql.statements.lanes import Lane, find_lanes, need_lanes
from replaybuf.storage.sql.statements.new_rows import insert_rows
from replaybuf.storage.sql.statements.ordering import enter_race
from replaybuf.storage.sql.statements.past import come_back, is_taken, keep
from replaybuf.storage.sql.statements.presence import note_rows
from replaybuf.storage.sql.statements.rows import COLUMNS, GroupRow, read_rows
from replaybuf.storage.values import Leased, check_database, check_lease, lost_to_others, passed_on
from replaybuf.values.rollouts.statuses import Status


def begin_lease(tx: Transaction, seconds: float) -> tuple[int, float]:
    """Return the token and the end of a new lease."""
    [token] = tx.reserve_uids(1)
    return token, tx.start_clock() + seconds


def hold(
    tx: Transaction, rows: Sequence[GroupRow], token: int, until: float, holder: str | None, **values: Any
) -> list[int]:
    """Lease these groups, which are in their lanes, to a holder, and set other columns; return their uids."""
    return move(tx, rows, transitions.leased, lease=token, leased_until=until, holder=holder, **values)


def rows_of(tx: Transaction, uids: Sequence[int]) -> list[GroupRow]:
    """Return these groups of the buffer with their lanes."""
    rows = read_rows(tx, "g.uid {in:uids} {lock:g}", uids=uids)
    lanes = find_lanes(tx, {(row.task_name, row.status) for row in rows})
    for row in rows:
        row.found_in = lanes[(row.task_name, row.status)]
    return rows


def acknowledge(tx: Transaction, lease: Leased, uids: Sequence[int]) -> None:
    """Consume groups of a lease."""
    check_lease(lease, tx.scope.epoch, tx.scope.database)
    limits = tx.scope.rules.limits
    try:
        rows = _check_held(tx, lease, uids)
    except LeaseLostError:
        if tx.value(_ACKNOWLEDGED, lease=lease.token, uids=list(uids)) == len(uids):  # by other handles
            return
        raise
    if len(rows) < len(uids):
        _check_not_passed_on(tx, lease, set(uids).difference(row.uid for row in rows))
    step, lanes = _trained_at(tx, lease, rows)
    move(tx, rows, lambda row: transitions.acknowledged(row, limits), lanes, **trained_at(step))
    settle(tx, lease, [row.uid for row in rows], step)


#: How many of these groups a lease drew in batches of which it has acknowledged all groups.
_ACKNOWLEDGED = """SELECT count(DISTINCT p.uid) FROM rb_past p JOIN rb_batch b ON b.id = p.draw
WHERE p.uid {in:uids} AND p.draw > 0 AND b.lease = :lease AND b.settled = b.groups"""


def _trained_at(tx: Transaction, lease: Leased, rows: Sequence[GroupRow]) -> tuple[int | None, Iterable[Lane]]:
    """Return the train step of groups that are acknowledged now, and the lanes read for it.

    It is the step named by the caller, else that of the last refresh: groups may have been leased some steps ahead.
    """
    if lease.named_step is not None or not rows:
        return lease.named_step, ()
    homes = {(row.task_name, row.status) for row in rows}
    lanes = find_lanes(tx, homes | {(task, Status.ARCHIVED) for task, _ in homes})  # all possible target lanes
    trained = (lanes[name] for name in homes if name[1] == Status.COMPLETED and name in lanes)
    return max((lane.step for lane in trained if lane.step is not None), default=lease.train_step), lanes.values()


def extend(tx: Transaction, lease: Leased, uids: Sequence[int], seconds: float, shortens: bool) -> float:
    """Renew the lease of these groups; return its new end, or the old one if other handles have settled all of them.

    Unless it `shortens` the lease, a later end stays: that of an explicit extension, or of another handle.
    """
    check_lease(lease, tx.scope.epoch, tx.scope.database)
    rows = _check_held(tx, lease, uids)
    held = [row.uid for row in rows]
    if not held:
        return lease.until
    ends: list[float] = [] if shortens else [row.column("leased_until") for row in rows]
    until = max([tx.start_clock() + seconds, *ends])
    keep(tx, held)
    change(tx, held, {"leased_until": until})
    return until


def give_back(tx: Transaction, lease: Leased, uids: Sequence[int], reason: str | None) -> Counter[str | None]:
    """End the lease of those of these groups that it still holds; return their number by holder."""
    check_database(lease, tx.scope.database)
    limits, rows = tx.scope.rules.limits, _held_rows(tx, lease, uids)
    move(tx, rows, lambda row: transitions.given_back(row, limits, reason))
    if reason is not None:
        _note_returned(tx, EventKind.GIVEN_BACK, rows, reason)
    return Counter(row.column("holder") for row in rows)


def unhold(tx: Transaction, lease: Leased, uids: Sequence[int]) -> None:
    """Undo a lease that its caller didn't receive."""
    move(tx, _held_rows(tx, lease, uids), transitions.unleased)


def end_leases(tx: Transaction, *, wait: bool = False) -> int:
    """End overdue leases, and return the number of their groups.

    With `wait`, the number includes groups whose leases a concurrent transaction is ending; they have ended at the end
    of the call.
    """
    now, limits = tx.clock(), tx.scope.rules.limits
    uids = tx.values(OVERDUE if wait else f"{OVERDUE} {{skip}}", now=now, buffer=tx.scope.buffer)
    if not uids:
        return 0
    rows = read_rows(tx, "g.uid {in:uids} AND g.leased_until <= :now {lock:g}", uids=uids, now=now)
    move(tx, rows, lambda row: transitions.lapsed(row, limits))
    _note_returned(tx, EventKind.LEASE_LAPSED, rows)
    return len(uids)


def _note_returned(tx: Transaction, kind: EventKind, rows: Sequence[GroupRow], reason: str | None = None) -> None:
    """Record failed deliveries, and the groups that were set aside for them."""
    limits = tx.scope.rules.limits
    note_rows(tx, kind, rows, reason)
    note_rows(tx, EventKind.SET_ASIDE, [row for row in rows if transitions.is_last(row, limits)], reason)


# The lane is an EXISTS subquery: with a join, SQLite reads all groups of the buffer, lane by lane. Without the ORDER
# BY, PostgreSQL reads all groups of a table that hasn't been analysed yet.
#: The groups of a buffer with an overdue lease, the longest overdue first.
OVERDUE = """SELECT uid FROM rb_group g WHERE leased_until <= {clock:now}
AND EXISTS (SELECT 1 FROM rb_lane l WHERE l.id = g.lane AND l.buffer = :buffer) ORDER BY leased_until"""


def return_all(tx: Transaction) -> int:
    """End all leases and return the number of their groups: a store's copy is unknown to their consumers."""
    rows = read_rows(tx, "l.leased AND g.lease IS NOT NULL AND g.leased_until IS NOT NULL {lock:g}")
    move(tx, rows, transitions.unleased)
    return len(rows)


def _held_rows(tx: Transaction, lease: Leased, uids: Sequence[int]) -> list[GroupRow]:
    """Return those of these groups that a lease still holds."""
    return read_rows(tx, "g.uid {in:uids} AND g.lease = :lease {lock:g}", uids=uids, lease=lease.token)


def _check_held(tx: Transaction, lease: Leased, uids: Sequence[int]) -> list[GroupRow]:
    """Return the groups of a lease, without groups that were replaced while leased.

    Raises LeaseLostError if the lease's time is over and it no longer holds all of them. While it holds any, another
    process may have renewed it, and settled the others.
    """
    rows = _held_rows(tx, lease, uids)
    until = max([lease.until, *(row.column("leased_until") for row in rows)])
    if len(rows) < len(uids) and tx.clock() >= until:
        raise lost_to_others(lease, set(uids).difference(row.uid for row in rows))
    return rows


def _check_not_passed_on(tx: Transaction, lease: Leased, uids: Iterable[int]) -> None:
    """Raise LeaseLostError if the lease has lost any of these groups without having acknowledged it."""
    rows = tx.tuples("SELECT uid, times_sampled, lease IS NOT NULL FROM rb_group WHERE uid {in:uids}", uids=list(uids))
    if lost := passed_on(lease, ((uid, sampled, bool(leased)) for uid, sampled, leased in rows)):
        raise lost_to_others(lease, lost)


def unconsume(tx: Transaction, rows: Sequence[GroupRow], made_before: int) -> dict[int, str]:
    """Move drawn groups that their caller didn't receive back to their lanes; return unreadable ones, with the reason.

    A group whose key another one has, or has in a checkpoint since the draw, isn't restored: that one replaced it. A
    group that stayed in its lane and was removed since was delivered to others. Checkpoints after `made_before`, the
    newest one at the draw, have the groups, too.
    """
    counts: Counts = Counter()
    limits = tx.scope.rules.limits
    unarchived = replace(limits, archive_groups=None, archive_seconds=None)
    names = {row.home.name for row in rows}
    names |= {(task, Status.COMPLETED) for task, status in names if status == Status.ARCHIVED}
    homes = need_lanes(tx, names | {(task, Status.ARCHIVED) for task, _ in names if limits.archives})
    keyless: dict[LaneName, list[int]] = {}
    lost: dict[int, str] = {}
    for row in sorted(rows, key=lambda row: row.uid):
        draw = transitions.drawn(row, limits)
        if not draw.moves:
            if _unsample(tx, row, made_before):
                add_step(counts, homes, row.task_name, draw.undone)
            continue
        if draw.after is None or not _unarchive(tx, row, homes[(row.task_name, Status.ARCHIVED)]):
            draw = transitions.drawn(row, unarchived)
            if _restore(tx, row, made_before, lost):
                counts[(row.lane, Tally.BYTES)] += row.column("bytes") or 0
            else:
                add_step(counts, homes, row.task_name, transitions.removed(Place(row.status), Tally.REPLACED))
        add_step(counts, homes, row.task_name, draw.undone)
        if homes[row.home.name].race is not None and (row.home.race is None or row.column("random_key") is None):
            keyless.setdefault(row.home.name, []).append(row.uid)
    add_counts(tx, counts)
    add_to_checkpoints(tx, counts, made_before)
    for name, uids in keyless.items():  # the race that began in the lane since the draw
        enter_race(tx, homes[name], uids)
    return lost


_TOO_LATE = f"its arrays were deleted: a draw that nobody received was undone more than {READING_SECONDS:g} s later"


def _unsample(tx: Transaction, row: GroupRow, made_before: int) -> bool:
    """Undo the draw of a group that stayed in its lane; return False if it is gone."""
    key = row.column("random_key")
    values = {"uid": row.uid, "times": row.times_sampled, "trained": row.column("trained_step"), "key": key}

    def undo(table: str, condition: str = "", **parameters: Any) -> bool:
        return tx.change(_UNSAMPLE.format(table=table) + condition, **values, **parameters) > 0

    undo("rb_past", " AND since >= :since", since=max(made_before, row.column("since")))
    return undo("rb_group")


# The trained step is that of the next draw without a lease, if another has followed.
_UNSAMPLE = """UPDATE {table} SET times_sampled = times_sampled - 1,
    trained_step = CASE WHEN times_sampled - CASE WHEN lease IS NULL THEN 0 ELSE 1 END = :times + 1
        THEN :trained ELSE trained_step END,
    random_key = coalesce(:key, random_key)
WHERE uid = :uid AND times_sampled > :times"""


def _unarchive(tx: Transaction, row: GroupRow, archive: Lane) -> bool:
    """Move an archived group back to its lane; return False if it is no longer in the archive."""
    if not tx.change(_UNARCHIVE, **row.values._asdict(), archive=archive.id):
        return False
    come_back(tx, row.uid, row.column("since"))
    return True


def _restore(tx: Transaction, row: GroupRow, made_before: int, lost: dict[int, str]) -> bool:
    """Reinsert a removed group; return False if there is a newer one with its key.

    If its arrays were deleted before they were read, the reason is added to `lost`.
    """
    key = row.column("scoped_key")
    if (key is not None and is_taken(tx, key, row.uid, made_before)) or not tx.change(_RESTORE, **row.values._asdict()):
        return False
    come_back(tx, row.uid, row.column("since"))
    if row.payload is not None and not tx.tuples("SELECT 1 FROM rb_payload WHERE uid = :uid", uid=row.uid):
        # The payload was swept already. (The outline isn't restored: views, requeues and annotations do without.)
        extent = extent_of(row.payload) if row.whole is row.payload else None
        if extent is not None and not count_back(tx, extent.file):
            lost[row.uid], extent = _TOO_LATE, None
        where = {} if extent is None else {"file": extent.file, "size": extent.size}
        insert_rows(tx, payload, [{"uid": row.uid, "outline": "[]", "data": row.whole, **where}])
    return True


_RESTORE = f"""INSERT INTO rb_group ({", ".join(COLUMNS)}) VALUES ({", ".join(f":{name}" for name in COLUMNS)})
ON CONFLICT DO NOTHING"""  # noqa: S608
_UNARCHIVE = f"""UPDATE rb_group SET {", ".join(f"{name} = :{name}" for name in COLUMNS)}
WHERE uid = :uid AND lane = :archive"""  # noqa: S608
