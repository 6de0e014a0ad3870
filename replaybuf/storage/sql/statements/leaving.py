"""What becomes of groups that were drawn: they leave, stay for their next draw, or are archived; and back again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, any_, case, delete, insert, literal, select, update
from sqlalchemy.dialects import postgresql, sqlite

from replaybuf.rollouts.rollout import Status
from replaybuf.rules.race import KEYS
from replaybuf.rules.tallies import Tally
from replaybuf.storage.sql.schema.tables import garbage, group, payload
from replaybuf.storage.sql.statements.bulk import insert_rows
from replaybuf.storage.sql.statements.columns import uid_in
from replaybuf.storage.sql.statements.counts import Counts, add_counts
from replaybuf.storage.sql.statements.lanes import Lane, Scope, need_lane
from replaybuf.storage.sql.statements.race_keys import enter_races
from replaybuf.storage.sql.statements.rows import GroupRow


def consume(connection: Connection, scope: Scope, rows: Sequence[GroupRow], now: float) -> None:
    """These groups, drawn from their lanes, belong to the taker."""
    counts: Counts = Counter()
    for row in rows:
        counts[(row.lane, sampled(row.times_sampled))] += 1
    raised = {"times_sampled": group.c.times_sampled + 1}
    for home, members in by_lane(rows).items():
        kept = [row.uid for row in members if scope.rules.limits.keeps(row.status, row.times_sampled + 1)]
        gone = [row.uid for row in members if not scope.rules.limits.keeps(row.status, row.times_sampled + 1)]
        if kept:
            connection.execute(update(group).where(uid_in(connection, kept)).values(raised))
            enter_races(connection, scope, members[0].home, kept)
        if gone:
            counts[(home, Tally.SIZE)] -= len(gone)
            _leave(connection, scope, members[0].home, gone, counts, now, raised)
    add_counts(connection, counts)


def finish(connection: Connection, scope: Scope, home: Lane, rows: Sequence[GroupRow], now: float) -> None:
    """Leased groups of the lane `home` have been consumed."""
    counts: Counts = Counter({(home.id, Tally.LEASED): -len(rows)})
    kept = [row.uid for row in rows if scope.rules.limits.keeps(row.status, row.times_sampled)]
    gone = [row.uid for row in rows if not scope.rules.limits.keeps(row.status, row.times_sampled)]
    if kept:
        counts[(home.id, Tally.SIZE)] += len(kept)
        values = FREE | {"lane": home.id, "deliveries": 0}
        connection.execute(update(group).where(uid_in(connection, kept)).values(values))
        enter_races(connection, scope, home, kept)
    if gone:
        _leave(connection, scope, home, gone, counts, now, FREE | {"deliveries": 0})
    add_counts(connection, counts)


#: The columns of a group that isn't leased.
FREE: dict[str, Any] = {"lease": None, "leased_until": None}


def _leave(
    connection: Connection,
    scope: Scope,
    home: Lane,
    uids: Sequence[int],
    counts: Counts,
    now: float,
    values: Mapping[str, Any],
) -> None:
    """Groups leave for good, or are archived with these values."""
    counts[(home.id, Tally.TAKEN)] += len(uids)
    if home.status == Status.COMPLETED and scope.rules.limits.archives:
        archive = need_lane(connection, scope, (home.task_name, Status.ARCHIVED))
        counts[(archive.id, Tally.SIZE)] += len(uids)
        archived = pinned(home) | {"lane": archive.id, "archived_at": now} | dict(values)
        connection.execute(update(group).where(uid_in(connection, uids)).values(archived))
        return
    remove(connection, uids, now)


def pinned(home: Lane) -> dict[str, Any]:
    """The columns that keep the staleness of groups of this lane as it is when they leave it."""
    follows = group.c.pinned_staleness.is_(None)
    step = literal(home.step or 0, group.c.oldest_step.type)
    return {
        "pinned_staleness": case((follows, step - group.c.oldest_step - 1), else_=group.c.pinned_staleness),
        "pinned_step": case((follows, step), else_=group.c.pinned_step),
    }


def remove(connection: Connection, uids: Sequence[int], now: float) -> None:
    """Remove groups, and leave their payloads to the sweep."""
    if not uids:
        return
    chosen = delete(group).where(uid_in(connection, uids))
    if connection.dialect.name == "postgresql":
        gone = chosen.returning(group.c.uid).cte("gone")
        removed = select(gone.c.uid, literal(now, garbage.c.removed_at.type))
        connection.execute(insert(garbage).from_select(["uid", "removed_at"], removed))
    else:
        connection.execute(chosen)
        insert_rows(connection, garbage, [(uid, now) for uid in uids])


def set_aside(connection: Connection, scope: Scope, home: Lane, reasons: Mapping[int, str]) -> None:
    """Groups of a lane become FAILED, each for a reason."""
    failed = need_lane(connection, scope, (home.task_name, Status.FAILED))
    for uid, reason in reasons.items():
        values = {"error": reason} | (pinned(home) | {"lane": failed.id} if failed.id != home.id else {})
        connection.execute(update(group).where(group.c.uid == uid).values(values))
    if failed.id != home.id:
        enter_races(connection, scope, failed, list(reasons))
    n = len(reasons)
    counts: Counts = Counter({(home.id, Tally.SET_ASIDE): n})
    counts[(home.id, Tally.SIZE)] -= n
    counts[(failed.id, Tally.SIZE)] += n
    add_counts(connection, counts)


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


def unconsume(connection: Connection, scope: Scope, rows: Sequence[GroupRow]) -> Counts:
    """Put groups that were drawn, and that nobody received, back as they were; what that adds to the tallies.

    A group whose key was put again in the meantime stays away: the newer one has replaced it. One that had stayed for
    its next draw, and has left since, was delivered to others.
    """
    counts: Counts = Counter()
    if connection.dialect.name == "postgresql" and rows:
        # A sweep that holds some of these rows has deleted the payloads when the lock is ours.
        uids = literal(sorted(row.uid for row in rows), postgresql.ARRAY(garbage.c.uid.type))
        connection.execute(select(garbage.c.uid).where(garbage.c.uid == any_(uids)).with_for_update())
    restored: list[GroupRow] = []
    for row in sorted(rows, key=lambda row: row.uid):
        if scope.rules.limits.keeps(row.status, row.times_sampled + 1):
            counts.update(_unsample(connection, row))  # += would drop what is negative
        else:
            back = _restore(connection, scope, row, counts)
            restored += [row] if back else []
            counts[(row.lane, Tally.TAKEN)] -= 1
            counts[(row.lane, sampled(row.times_sampled))] -= 1
            counts[(row.lane, Tally.SIZE if back else Tally.REPLACED)] += 1
    add_counts(connection, counts)
    for members in by_lane(restored).values():
        # Races may have begun in the lane since the draw.
        home = need_lane(connection, scope, members[0].home.name)
        keyless = [row.uid for row in members if any(row.columns[race] is None for race in home.clocks)]
        enter_races(connection, scope, home, keyless)
    return counts


def _unsample(connection: Connection, row: GroupRow) -> Counts:
    keys = {race: row.columns[race] for race in KEYS if row.columns[race] is not None}
    back = update(group).where(group.c.uid == row.uid, group.c.times_sampled > row.times_sampled)
    there = connection.execute(back.values(times_sampled=group.c.times_sampled - 1, **keys)).rowcount
    counts: Counts = Counter()
    if there:
        counts[(row.lane, sampled(row.times_sampled))] -= 1
    return counts


def _restore(connection: Connection, scope: Scope, row: GroupRow, counts: Counts) -> bool:
    """Put a group that had left, or was archived, back; False when a newer one of its key is there."""
    archived = update(group).where(group.c.uid == row.uid, group.c.archived_at.is_not(None))
    if connection.execute(archived.values(row.columns)).rowcount:
        archive = need_lane(connection, scope, (row.task_name, Status.ARCHIVED))
        counts[(archive.id, Tally.SIZE)] -= 1
        return True
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    if not connection.execute(dialect.insert(group).on_conflict_do_nothing(), row.columns).rowcount:
        return False
    connection.execute(delete(garbage).where(garbage.c.uid == row.uid))
    here = select(payload.c.uid).where(payload.c.uid == row.uid)
    if row.payload is not None and connection.execute(here).first() is None:
        # This comes so late that it was swept. (The outline is only for people to look at.)
        kept = {"uid": row.uid, "outline": [], "prompt": None, "data": row.payload}
        connection.execute(insert(payload), kept)
    return True
