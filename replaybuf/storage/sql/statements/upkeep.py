"""Background statements: what is due; retention of archived, filtered and failed groups."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

from replaybuf.rules.transitions import Place, Tally, removed
from replaybuf.storage.sql.engine.locks import PREFIX
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.statements.buffer_facts import DROPPED
from replaybuf.storage.sql.statements.counts import GONE_SHARDS, MERGE_SHARDS, Step, apply, read_lane_tallies
from replaybuf.storage.sql.statements.lanes import Lane, lanes_where
from replaybuf.storage.sql.statements.leases import OVERDUE


def any_to_prune(tx: Transaction, now: float) -> bool:
    """Return whether any group is beyond the age or number limit of its status."""
    return any(uids for _, uids in _find_outdated(tx, now, 1))


def prune(tx: Transaction, now: float, limit: int) -> int:
    """Remove up to `limit` groups per task and status beyond its limits, oldest first; return their number."""
    outdated = _find_outdated(tx, now, limit, "{skip}")
    steps: list[Step] = [(home.task_name, removed(Place(home.status), Tally.PRUNED), uids) for home, uids in outdated]
    apply(tx, steps, [home for home, _ in outdated])
    return sum(len(uids) for _, uids in outdated)


def _find_outdated(tx: Transaction, now: float, limit: int, locked: str = "") -> list[tuple[Lane, list[int]]]:
    """Return the bounded lanes, each with up to `limit` groups beyond its bound, oldest first."""
    limits = tx.scope.rules.limits
    lanes = lanes_where(
        tx, "NOT leased AND status {in_texts:statuses}", statuses=[str(status) for status in limits.bounded_aside]
    )
    tallies = read_lane_tallies(tx, [home.id for home in lanes])
    sizes = {row["lane"]: row["amount"] for row in tallies if row["name"] == Tally.SIZE}
    outdated: list[tuple[Lane, list[int]]] = []
    for home in lanes:
        size, (groups, seconds) = sizes.get(home.id, 0), limits.bound_aside(home.status)
        excess, dated = max(0, size - (groups or 0)), "" if groups is not None else "AND archived_at < :before"
        query = f"""SELECT uid FROM rb_group WHERE lane = :lane AND archived_at IS NOT NULL {dated}
ORDER BY archived_at, uid LIMIT :limit {locked}"""  # noqa: S608
        values = {"lane": home.id, "limit": min(excess, limit), "before": now - (seconds or 0)}
        outdated.append((home, tx.values(query, **values) if excess else []))
    return outdated


#: Longer than any outcome is queried.
_KEPT_SECONDS = 7 * 86_400


_OLD_STAMPS = "FROM rb_info WHERE name LIKE :stamps AND number < :old"


def is_anything_left(tx: Transaction) -> bool:
    """Return whether closed connections to PostgreSQL have left shards or old commit stamps."""
    return bool(tx.value(f"SELECT EXISTS ({GONE_SHARDS}) OR EXISTS (SELECT 1 {_OLD_STAMPS})", **_old_stamps()))


def clear_what_is_left(tx: Transaction) -> None:
    """Merge the shards of closed connections to PostgreSQL, and delete old commit stamps."""
    tx.run(MERGE_SHARDS)
    tx.change(f"DELETE {_OLD_STAMPS}", **_old_stamps())


def _old_stamps() -> dict[str, Any]:
    return {"stamps": f"{PREFIX}%", "old": int((time.time() - _KEPT_SECONDS) * 1_000_000)}


@dataclass(frozen=True, slots=True)
class Chores:
    """Whether leases of the buffer are overdue, payloads can be swept, and dropped checkpoints have versions.

    `now` is the server's time at the query (SQLite: this host's), `next` the seconds from then on until another lease
    of any buffer ends.
    """

    overdue: bool = False
    due: bool = False
    dropped: bool = False
    now: float = 0.0
    next: float = math.inf


def find_chores(tx: Transaction, grace: float, now: float) -> Chores:
    """Return the due work: payloads can be swept `grace` seconds after the removal of their groups."""
    # On a server, its own clock is part of the query.
    clock, wall = (None, None) if tx.dialect.is_remote else (tx.clock(), now)
    [row] = tx.tuples(_CHORES, now=clock, buffer=tx.scope.buffer, wall=wall)
    overdue, lease_ends, removed_at, dropped, clock, wall_clock = row
    due = removed_at is not None and removed_at + grace <= wall_clock
    next_end = math.inf if lease_ends is None else lease_ends - clock
    return Chores(bool(overdue), due, bool(dropped), float(wall_clock), next_end)


_CHORES = f"""SELECT ({OVERDUE} LIMIT 1) IS NOT NULL,
    (SELECT leased_until FROM rb_group WHERE leased_until > {{clock:now}} ORDER BY leased_until LIMIT 1),
    (SELECT removed_at FROM rb_past WHERE until IS NULL AND removed_at >= 0 ORDER BY removed_at LIMIT 1),
    EXISTS ({DROPPED}), {{clock:now}}, {{clock:wall}}"""  # noqa: S608
