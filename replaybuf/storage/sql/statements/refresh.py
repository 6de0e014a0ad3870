"""Refreshing staleness: a new train step for a lane, and the expiry of its groups.

Most groups follow their lane's step and are not touched. Only groups whose staleness was pinned since the last refresh,
and groups that expire or lose stale tokens (found by an index range), are rewritten. Payloads are never touched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from sqlalchemy import and_, bindparam, case, or_, select, update

from replaybuf.rollouts.marks import Marks
from replaybuf.rollouts.rollout import Status
from replaybuf.rules import transitions
from replaybuf.rules.tallies import Tally
from replaybuf.rules.transitions import Place
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.schema.tables import group, lane, unsettled
from replaybuf.storage.sql.statements.columns import uid_in
from replaybuf.storage.sql.statements.counts import Counts, add_counts, add_step
from replaybuf.storage.sql.statements.lanes import Lane, find_lanes, need_lanes
from replaybuf.storage.sql.statements.leaving import Leaving, note
from replaybuf.storage.sql.statements.race_keys import enter_races
from replaybuf.storage.sql.statements.rows import GroupRow
from replaybuf.storage.sql.statements.steps import apply
from replaybuf.storage.values import Refresh

_CHUNK = 5_000
_FEW = 8


def refresh_staleness(tx: Transaction, refresh: Refresh) -> tuple[dict[str, int], list[GroupRow]]:
    """Refresh the lanes and expire groups.

    Returns the number of expired groups by task, and those that were removed, if the caller asks for them.
    """
    leaving: Leaving = None if refresh.dropped is None else []
    names = [(task_name, status) for task_name in refresh.rules for status in refresh.statuses]
    lanes = find_lanes(tx, names)
    counts = dict.fromkeys(refresh.rules, 0)
    # EXPIRED goes first: groups that now expire from other lanes must not be refreshed a second time there.
    for task_name, status in sorted(lanes, key=lambda name: (name[0], name[1] != Status.EXPIRED)):
        home = lanes[(task_name, status)]
        _set_step(tx, home, refresh.train_step)
        counts[task_name] += _expire(tx, home, refresh, leaving)
    return counts, leaving or []


def _set_step(tx: Transaction, home: Lane, step: int) -> None:
    """Set the step of the lane, and unpin groups that were pinned since the last refresh and can follow it."""
    tx.execute(update(lane).where(lane.c.id == home.id).values(step=step))
    # Staleness 0 can't be derived from the step for groups without model steps, and for mixed groups whose model is
    # ahead of the train step.
    ahead = and_(group.c.mixed, group.c.oldest_step >= step)
    zero = or_(group.c.oldest_step.is_(None), ahead)
    in_lane = group.c.lane == home.id
    tx.execute(
        update(group).where(in_lane, unsettled).values(pinned_staleness=case((zero, 0)), pinned_step=case((zero, step)))
    )
    tx.execute(
        update(group)
        .where(in_lane, group.c.pinned_staleness.is_(None), group.c.oldest_step >= step, group.c.mixed)
        .values(pinned_staleness=0, pinned_step=step)
    )


def _expire(tx: Transaction, home: Lane, refresh: Refresh, leaving: Leaving) -> int:
    """Expire the groups of a lane that are too old for its task's rule; return their number."""
    rule, step = refresh.rules[home.task_name], refresh.train_step
    if home.status == Status.EXPIRED and not rule.retryable:
        everything = list(tx.execute(select(group.c.uid).where(group.c.lane == home.id)).scalars())
        _drop(tx, home, everything, leaving)
        return len(everything)
    thresholds = [t for t in (rule.stale_threshold, rule.token_stale_threshold) if t is not None]
    if not thresholds:
        return 0
    # A rollout's newest trainable token isn't older than its oldest token, so this range has all candidates.
    newest_expired = step - 1 - min(thresholds)
    candidates = select(group.c.uid, group.c.marks).where(
        group.c.lane == home.id, group.c.pinned_staleness.is_(None), group.c.oldest_step <= newest_expired
    )
    expired: list[tuple[int, Marks]] = []
    masked: list[dict[str, Any]] = []
    for uid, data in tx.execute(candidates):
        marks = Marks.from_json(data)
        has_expired, has_masked = marks.expire(rule, step), marks.mask(rule, step)
        if has_expired:
            expired.append((uid, marks))
        elif has_masked:
            masked.append({"masked_uid": uid, "new_marks": marks.to_json()})
    if masked:
        tx.execute(_MASK, masked)
    if expired and rule.retryable:
        _keep_expired(tx, home, expired)
    else:
        _drop(tx, home, [uid for uid, _ in expired], leaving)
    return len(expired)


def _keep_expired(tx: Transaction, home: Lane, expired: Sequence[tuple[int, Marks]]) -> None:
    step, name = transitions.expired(home.status), (home.task_name, Status.EXPIRED)
    lanes = {home.name: home, **need_lanes(tx, [name])}
    _rewrite(tx, lanes[name], expired)
    if step.enters_races:
        enter_races(tx, lanes[name], [uid for uid, _ in expired])
    counts: Counts = Counter()
    add_step(counts, lanes, home.task_name, step, len(expired))
    add_counts(tx, counts)


def _drop(tx: Transaction, home: Lane, expired: Sequence[int], leaving: Leaving) -> None:
    step = transitions.removed(Place(home.status), Tally.DROPPED)
    for start in range(0, len(expired), _CHUNK):
        uids = expired[start : start + _CHUNK]
        note(tx, uids, leaving)
        apply(tx, [(home.task_name, step, uids)], [home])


def _rewrite(tx: Transaction, target: Lane, expired: Sequence[tuple[int, Marks]]) -> None:
    # Groups whose rollouts all expired are alike afterwards, and are written by one statement.
    alike: dict[str, tuple[dict[str, Any], list[int]]] = {}
    for uid, marks in expired:
        values = _expired_values(marks, target)
        alike.setdefault(repr(values), (values, []))[1].append(uid)
    few: list[dict[str, Any]] = []
    for values, uids in alike.values():
        if len(uids) < _FEW:
            few += [{"expired_uid": uid, **{f"new_{name}": value for name, value in values.items()}} for uid in uids]
            continue
        for start in range(0, len(uids), _CHUNK):
            chosen = uid_in(tx, uids[start : start + _CHUNK])
            tx.execute(update(group).where(chosen).values(values))
    if few:
        tx.execute(_EXPIRE, few)


_MASK = update(group).where(group.c.uid == bindparam("masked_uid")).values(marks=bindparam("new_marks"))
_EXPIRE = (
    update(group)
    .where(group.c.uid == bindparam("expired_uid"))
    .values(
        {
            name: bindparam(f"new_{name}")
            for name in ("lane", "oldest_step", "pinned_staleness", "pinned_step", "mixed", "reward", "marks")
        }
    )
)


def _expired_values(marks: Marks, target: Lane) -> dict[str, Any]:
    return {
        "lane": target.id,
        "oldest_step": marks.oldest_step,
        "pinned_staleness": max(marks.staleness or [0]),
        "pinned_step": None,
        "mixed": marks.mixed,
        "reward": marks.mean_reward,
        "marks": marks.to_json(),
    }
