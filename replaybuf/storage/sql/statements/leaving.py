"""What becomes of groups that were drawn: they leave, stay for their next draw, or are archived; and back again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import case, delete, insert, literal, select, update

from replaybuf.rollouts.rollout import Status
from replaybuf.rules.race import KEYS
from replaybuf.rules.tallies import Tally
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.schema.tables import garbage, group, payload
from replaybuf.storage.sql.statements.columns import uid_in
from replaybuf.storage.sql.statements.counts import Counts, add_counts
from replaybuf.storage.sql.statements.lanes import Lane, need_lane
from replaybuf.storage.sql.statements.race_keys import enter_races
from replaybuf.storage.sql.statements.rows import GroupRow


def consume(tx: Transaction, rows: Sequence[GroupRow], now: float) -> None:
    """These groups, drawn from their lanes, belong to the taker."""
    counts: Counts = Counter()
    for row in rows:
        counts[(row.lane, sampled(row.times_sampled))] += 1
    raised = {"times_sampled": group.c.times_sampled + 1}
    for home, members in by_lane(rows).items():
        kept = [row.uid for row in members if tx.scope.rules.limits.keeps(row.status, row.times_sampled + 1)]
        gone = [row.uid for row in members if not tx.scope.rules.limits.keeps(row.status, row.times_sampled + 1)]
        if kept:
            tx.execute(update(group).where(uid_in(tx, kept)).values(raised))
            enter_races(tx, members[0].home, kept)
        if gone:
            counts[(home, Tally.SIZE)] -= len(gone)
            _leave(tx, members[0].home, gone, counts, now, raised)
    add_counts(tx, counts)


def finish(tx: Transaction, home: Lane, rows: Sequence[GroupRow], now: float) -> None:
    """Leased groups of the lane `home` have been consumed."""
    counts: Counts = Counter({(home.id, Tally.LEASED): -len(rows)})
    kept = [row.uid for row in rows if tx.scope.rules.limits.keeps(row.status, row.times_sampled)]
    gone = [row.uid for row in rows if not tx.scope.rules.limits.keeps(row.status, row.times_sampled)]
    if kept:
        counts[(home.id, Tally.SIZE)] += len(kept)
        values = FREE | {"lane": home.id, "deliveries": 0}
        tx.execute(update(group).where(uid_in(tx, kept)).values(values))
        enter_races(tx, home, kept)
    if gone:
        _leave(tx, home, gone, counts, now, FREE | {"deliveries": 0})
    add_counts(tx, counts)


#: The columns of a group that isn't leased.
FREE: dict[str, Any] = {"lease": None, "leased_until": None}


def _leave(
    tx: Transaction,
    home: Lane,
    uids: Sequence[int],
    counts: Counts,
    now: float,
    values: Mapping[str, Any],
) -> None:
    """Groups leave for good, or are archived with these values."""
    counts[(home.id, Tally.TAKEN)] += len(uids)
    if home.status == Status.COMPLETED and tx.scope.rules.limits.archives:
        archive = need_lane(tx, (home.task_name, Status.ARCHIVED))
        counts[(archive.id, Tally.SIZE)] += len(uids)
        archived = pinned(home) | {"lane": archive.id, "archived_at": now} | dict(values)
        tx.execute(update(group).where(uid_in(tx, uids)).values(archived))
        return
    remove(tx, uids, now)


def pinned(home: Lane) -> dict[str, Any]:
    """The columns that keep the staleness of groups of this lane as it is when they leave it."""
    follows = group.c.pinned_staleness.is_(None)
    step = literal(home.step or 0, group.c.oldest_step.type)
    return {
        "pinned_staleness": case((follows, step - group.c.oldest_step - 1), else_=group.c.pinned_staleness),
        "pinned_step": case((follows, step), else_=group.c.pinned_step),
    }


def remove(tx: Transaction, uids: Sequence[int], now: float) -> None:
    """Remove groups, and leave their payloads to the sweep."""
    if not uids:
        return
    tx.dialect.remove_groups(tx.connection, uid_in(tx, uids), uids, now)


def set_aside(tx: Transaction, home: Lane, reasons: Mapping[int, str]) -> None:
    """Groups of a lane become FAILED, each for a reason."""
    failed = need_lane(tx, (home.task_name, Status.FAILED))
    for uid, reason in reasons.items():
        values = {"error": reason} | (pinned(home) | {"lane": failed.id} if failed.id != home.id else {})
        tx.execute(update(group).where(group.c.uid == uid).values(values))
    if failed.id != home.id:
        enter_races(tx, failed, list(reasons))
    n = len(reasons)
    counts: Counts = Counter({(home.id, Tally.SET_ASIDE): n})
    counts[(home.id, Tally.SIZE)] -= n
    counts[(failed.id, Tally.SIZE)] += n
    add_counts(tx, counts)


def sampled(times_before: int) -> Tally:
    """How a draw of a group counts that was drawn so often before."""
    return Tally.SAMPLED_AGAIN if times_before else Tally.SAMPLED_NEW


def by_lane(rows: Iterable[GroupRow]) -> dict[int, list[GroupRow]]:
    """Groups by their lane's id."""
    lanes: dict[int, list[GroupRow]] = {}
    for row in rows:
        lanes.setdefault(row.lane, []).append(row)
    return lanes


# Undoing a draw


def unconsume(tx: Transaction, rows: Sequence[GroupRow]) -> Counts:
    """Put groups that were drawn, and that nobody received, back as they were; what that adds to the tallies.

    A group whose key was put again in the meantime stays away: the newer one has replaced it. One that had stayed for
    its next draw, and has left since, was delivered to others.
    """
    counts: Counts = Counter()
    if tx.dialect.locks_rows and rows:
        # A sweep that holds some of these rows has deleted the payloads when the lock is ours.
        ours = garbage.c.uid.in_(sorted(row.uid for row in rows))
        tx.execute(tx.dialect.for_update(select(garbage.c.uid).where(ours)))
    restored: list[GroupRow] = []
    for row in sorted(rows, key=lambda row: row.uid):
        if tx.scope.rules.limits.keeps(row.status, row.times_sampled + 1):
            counts.update(_unsample(tx, row))  # += would drop what is negative
        else:
            back = _restore(tx, row, counts)
            restored += [row] if back else []
            counts[(row.lane, Tally.TAKEN)] -= 1
            counts[(row.lane, sampled(row.times_sampled))] -= 1
            counts[(row.lane, Tally.SIZE if back else Tally.REPLACED)] += 1
    add_counts(tx, counts)
    for members in by_lane(restored).values():
        # Races may have begun in the lane since the draw.
        home = need_lane(tx, members[0].home.name)
        keyless = [row.uid for row in members if any(row.columns[race] is None for race in home.clocks)]
        enter_races(tx, home, keyless)
    return counts


def _unsample(tx: Transaction, row: GroupRow) -> Counts:
    keys = {race: row.columns[race] for race in KEYS if row.columns[race] is not None}
    back = update(group).where(group.c.uid == row.uid, group.c.times_sampled > row.times_sampled)
    there = tx.execute(back.values(times_sampled=group.c.times_sampled - 1, **keys)).rowcount
    counts: Counts = Counter()
    if there:
        counts[(row.lane, sampled(row.times_sampled))] -= 1
    return counts


def _restore(tx: Transaction, row: GroupRow, counts: Counts) -> bool:
    """Put a group that had left, or was archived, back; False when a newer one of its key is there."""
    archived = update(group).where(group.c.uid == row.uid, group.c.archived_at.is_not(None))
    if tx.execute(archived.values(row.columns)).rowcount:
        archive = need_lane(tx, (row.task_name, Status.ARCHIVED))
        counts[(archive.id, Tally.SIZE)] -= 1
        return True
    if not tx.execute(tx.dialect.insert(group).on_conflict_do_nothing(), row.columns).rowcount:
        return False
    tx.execute(delete(garbage).where(garbage.c.uid == row.uid))
    here = select(payload.c.uid).where(payload.c.uid == row.uid)
    if row.payload is not None and tx.execute(here).first() is None:
        # This comes so late that it was swept. (The outline is only for people to look at.)
        kept = {"uid": row.uid, "outline": [], "prompt": None, "data": row.payload}
        tx.execute(insert(payload), kept)
    return True
