"""Repairs of groups, and of payloads and garbage that don't belong to any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import and_, select, text, update

from replaybuf.doctor.check_groups import BARE, HALF_LEASED, LANELESS, LEAKED_PAYLOADS, MISSING, WANTED
from replaybuf.doctor.findings import CheckContext, groups
from replaybuf.rollouts.statuses import Status
from replaybuf.rules.transitions import Tally
from replaybuf.storage.sql.engine.transaction import Scope, Transaction
from replaybuf.storage.sql.schema.tables import group, lane
from replaybuf.storage.sql.statements.counts import FREE, add_counts, set_aside
from replaybuf.storage.sql.statements.lanes import Lane, need_lane
from replaybuf.storage.sql.statements.ordering import enter_races
from replaybuf.storage.sql.statements.rows import uid_in
from replaybuf.storage.sql.statements.upkeep import sweep, wall_clock
from replaybuf.storage.sql.tasks.sweeper import GRACE_SECONDS
from replaybuf.units import some

#: The task for groups whose own task is unknown, and their error.
LOST = "lost+found"
WHY_LOST = "its task and status were lost"
_SWEPT_AT_ONCE = 10_000
_SWEEP_LEAKED = "INSERT INTO rb_garbage (uid, removed_at) " + LEAKED_PAYLOADS.format(columns="p.uid, :now")


def set_groups_aside(tx: Transaction, reasons: Mapping[int, str]) -> list[str]:
    """Make groups with unreadable payloads FAILED, with the reason; return what was done.

    Archived ones stay in the archive, with the reason. Leased ones are left to their consumers.
    """
    if not reasons:
        return []
    found = select(group.c.uid, lane).select_from(group.join(lane, lane.c.id == group.c.lane))
    free = found.where(uid_in(tx, list(reasons)), lane.c.leased.is_(False)).order_by(group.c.uid)
    archived: list[int] = []
    homes: dict[int, tuple[str, Lane, list[int]]] = {}
    for row in tx.execute(free).all():
        if row.status == Status.ARCHIVED:
            archived.append(row.uid)
            tx.execute(update(group).where(group.c.uid == row.uid).values(error=reasons[row.uid]))
        else:
            homes.setdefault(row.id, (row.buffer, Lane.of(row), []))[2].append(row.uid)
    done = [f"said so in the error of {groups(len(archived))} of the archive: {some(archived)}"] if archived else []
    for buffer, home, uids in homes.values():
        set_aside(tx.of(Scope(buffer)), home, {uid: reasons[uid] for uid in uids})
        done.append(f"set {groups(len(uids))} of the task {home.task_name} aside as failed: {some(uids)}")
    return done


def repair_lanes(tx: Transaction, context: CheckContext) -> Sequence[str]:
    """Set groups without a lane aside, as FAILED groups of a task of their own."""
    if not (uids := tx.values(LANELESS)):
        return []
    home = need_lane(tx, (LOST, Status.FAILED))
    free: dict[str, Any] = {**FREE, "lane": home.id, "error": WHY_LOST}
    tx.execute(update(group).where(uid_in(tx, uids)).values(free))
    stepless = and_(uid_in(tx, uids), group.c.pinned_staleness.is_(None))
    tx.execute(update(group).where(stepless).values(pinned_staleness=0))
    enter_races(tx, home, uids)
    add_counts(tx, {(home.id, Tally.PUT): len(uids), (home.id, Tally.SIZE): len(uids)})
    return [f"set {groups(len(uids))} of no task aside, as failed ones of the task {LOST}: {some(uids)}"]


def repair_leased(tx: Transaction, context: CheckContext) -> Sequence[str]:
    """Free groups that are half leased; end leases that have no end now."""
    uids = []
    for uid, lease, leased, buffer, task_name, status in tx.table(HALF_LEASED)[1]:
        own = tx.of(Scope(buffer))
        home = need_lane(own, (task_name, Status(status)))
        if leased and lease is not None:
            values: dict[str, Any] = {"leased_until": tx.dialect.clock(tx)}
        else:
            values = {**FREE, "lane": home.id}
        tx.execute(update(group).where(group.c.uid == uid).values(values))
        if leased and lease is None:
            add_counts(tx, {(home.id, Tally.LEASED): -1, (home.id, Tally.SIZE): 1})
            enter_races(own, home, [uid])
        uids.append(uid)
    return [f"gave back {groups(len(uids))} that were half leased: {some(uids)}"] if uids else []


def repair_payloads(tx: Transaction, context: CheckContext) -> Sequence[str]:
    """Set aside groups without a payload."""
    bare = tx.table(BARE)[1]
    return set_groups_aside(tx, {uid: MISSING for uid, error in bare if error is None})


def repair_leaked(tx: Transaction, context: CheckContext) -> Sequence[str]:
    """Leave payloads that nobody needs to the sweep."""
    count = tx.execute(text(_SWEEP_LEAKED), {"now": wall_clock(tx)}).rowcount
    return [f"left {count:,} leaked payloads to the sweep"] if count else []


def repair_garbage(tx: Transaction, context: CheckContext) -> Sequence[str]:
    """Take payloads of existing groups off the list, and sweep those that have waited long enough."""
    wanted = tx.execute(text(f"DELETE FROM rb_garbage WHERE {WANTED}")).rowcount  # noqa: S608
    swept = sweep(tx, wall_clock(tx) - GRACE_SECONDS, _SWEPT_AT_ONCE)
    done = [f"took {groups(wanted)} off the list of what is to be swept"] if wanted else []
    return [*done, f"swept {swept:,} payloads"] if swept else done
