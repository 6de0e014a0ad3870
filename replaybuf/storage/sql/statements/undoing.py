"""Undoing a draw that nobody received."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from sqlalchemy import bindparam, case, delete, insert, select, update

from replaybuf.rollouts.rollout import Status
from replaybuf.rules import transitions
from replaybuf.rules.race import KEYS
from replaybuf.rules.tallies import LaneName, Tally
from replaybuf.rules.transitions import Place
from replaybuf.storage.sql.engine.prepared import Prepared
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.schema.tables import garbage, group, payload
from replaybuf.storage.sql.statements.columns import uid_in
from replaybuf.storage.sql.statements.counts import Counts, add_counts, add_step
from replaybuf.storage.sql.statements.lanes import Lane, need_lanes
from replaybuf.storage.sql.statements.race_keys import enter_races
from replaybuf.storage.sql.statements.rows import GroupRow


def unconsume(tx: Transaction, rows: Sequence[GroupRow]) -> Counts:
    """Put back drawn groups that nobody received; return what that adds to the tallies.

    A group whose key was put again in the meantime is not put back: the newer one replaced it. One that stayed for its
    next draw and has left since was delivered to others.
    """
    counts: Counts = Counter()
    if tx.dialect.locks_rows and rows:
        # If a sweep holds some of these rows, it has deleted their payloads by the time that this lock is taken.
        ours = uid_in(tx, sorted(row.uid for row in rows), garbage.c.uid)
        tx.execute(tx.dialect.for_update(select(garbage.c.uid).where(ours)))
    limits = tx.scope.rules.limits
    unarchived = replace(limits, archive_groups=None, archive_seconds=None)
    names = {row.home.name for row in rows}
    homes = need_lanes(tx, names | {(task, Status.ARCHIVED) for task, _ in names if limits.archives})
    keyless: dict[LaneName, list[int]] = {}
    for row in sorted(rows, key=lambda row: row.uid):
        draw = transitions.drawn(row, limits)
        if not draw.moves:
            if _unsample(tx, row):
                add_step(counts, homes, row.task_name, draw.undone)
            continue
        if draw.after is None or not _unarchive(tx, row, homes[(row.task_name, Status.ARCHIVED)]):
            draw = transitions.drawn(row, unarchived)
            if not _restore(tx, row):
                add_step(counts, homes, row.task_name, transitions.removed(Place(row.status), Tally.REPLACED))
        add_step(counts, homes, row.task_name, draw.undone)
        if any(row.column(race) is None for race in homes[row.home.name].clocks):
            keyless.setdefault(row.home.name, []).append(row.uid)
    add_counts(tx, counts)
    for name, uids in keyless.items():  # races that began in their lane since the draw
        enter_races(tx, homes[name], uids)
    return counts


def _unsample(tx: Transaction, row: GroupRow) -> bool:
    """Undo the draw of a group that has stayed; return False when it is gone."""
    keys = {race: row.column(race) for race in KEYS if row.column(race) is not None}
    back = update(group).where(group.c.uid == row.uid, group.c.times_sampled > row.times_sampled)
    nobody_since = group.c.times_sampled == row.times_sampled + 1
    trained_step = case((nobody_since, row.column("trained_step")), else_=group.c.trained_step)
    values = {"times_sampled": group.c.times_sampled - 1, "trained_step": trained_step, **keys}
    return tx.execute(back.values(values)).rowcount > 0


def _unarchive(tx: Transaction, row: GroupRow, archive: Lane) -> bool:
    """Put back a group that was archived; return False when it is no longer in the archive."""
    return bool(tx.fetch(_UNARCHIVE, *row.values, row.uid, archive.id))


def _restore(tx: Transaction, row: GroupRow) -> bool:
    """Put back a group that had left; return False when there is a newer one of its key."""
    if not tx.fetch(_RESTORE, *row.values):
        return False
    tx.execute(delete(garbage).where(garbage.c.uid == row.uid))
    here = select(payload.c.uid).where(payload.c.uid == row.uid)
    if row.payload is not None and tx.execute(here).first() is None:
        # The payload was swept already. (The outline is only for people.)
        kept = {"uid": row.uid, "outline": [], "prompt": None, "data": row.payload}
        tx.execute(insert(payload), kept)
    return True


_RESTORE = Prepared(
    lambda dialect: dialect.insert(group).on_conflict_do_nothing().returning(group.c.uid), *group.columns.keys()
)
_UNARCHIVE = Prepared(
    lambda _: (
        update(group)
        .where(group.c.uid == bindparam("of_uid"), group.c.lane == bindparam("of_lane"))
        .values({column.name: bindparam(f"new_{column.name}", type_=column.type) for column in group.columns})
        .returning(group.c.uid)
    ),
    *(f"new_{column.name}" for column in group.columns),
    "of_uid",
    "of_lane",
)
