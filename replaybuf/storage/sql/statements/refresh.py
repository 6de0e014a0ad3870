"""Staleness refresh: sets a lane's train step, and expires its stale groups.

Most groups follow their lane's step and are not touched. Only groups whose staleness was pinned since the last refresh,
and groups that expire or lose stale tokens (found by an index range), are updated. Payloads are never touched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from pydantic_core import from_json

from replaybuf.rules import transitions
from replaybuf.rules.transitions import Place, Tally
from replaybuf.storage.decoding import DAMAGE, damaged
from replaybuf.storage.reports import EventKind
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.schema.tables import DUE, NO_STEP, STEP_ORDER, UNSETTLED
from replaybuf.storage.sql.statements.counts import Counts, add_counts, add_step, apply, set_aside
from replaybuf.storage.sql.statements.eviction import Leaving, keep_leaving, note
from replaybuf.storage.sql.statements.lanes import Lane, find_lanes, need_lanes
from replaybuf.storage.sql.statements.new_rows import dump_json
from replaybuf.storage.sql.statements.ordering import enter_race
from replaybuf.storage.sql.statements.past import keep, newest
from replaybuf.storage.sql.statements.presence import note as note_event
from replaybuf.storage.sql.statements.rows import GroupRow
from replaybuf.storage.values import Refresh
from replaybuf.values.rollouts.marks import Marks
from replaybuf.values.rollouts.rollout import Status

_CHUNK = 5_000

Row = tuple[Any, ...]


def refresh_staleness(tx: Transaction, refresh: Refresh) -> tuple[dict[str, int], list[GroupRow]]:
    """Refresh lanes and expire groups.

    Returns the number of expired groups by task, and the removed groups, if requested.
    """
    leaving: Leaving = None if refresh.dropped is None else []
    names = [(task_name, status) for task_name in refresh.rules for status in refresh.statuses]
    lanes = find_lanes(tx, names)
    expired: dict[str, list[int]] = {task_name: [] for task_name in refresh.rules}
    # EXPIRED goes first: groups that expire from other lanes now must not be refreshed again there.
    for task_name, status in sorted(lanes, key=lambda name: (name[0], name[1] != Status.EXPIRED)):
        home = lanes[(task_name, status)]
        due = _read_due(tx, home)
        _set_step(tx, home, refresh.train_step)
        expired[task_name] += _expire(tx, home, refresh, leaving, due)
    for task_name, uids in expired.items():
        if uids:
            step, number = refresh.train_step, len(uids)
            note_event(
                tx, EventKind.EXPIRED, worker=tx.scope.worker, task_name=task_name, step=step, groups=number, uids=uids
            )
    keep_leaving(tx, leaving)
    return {task_name: len(uids) for task_name, uids in expired.items()}, leaving or []


def _set_step(tx: Transaction, home: Lane, step: int) -> None:
    """Set the lane's step, and unpin groups pinned since the last refresh if their staleness can follow it."""
    tx.change("UPDATE rb_lane SET step = :step WHERE id = :lane", step=step, lane=home.id)
    home.step = step
    # Staleness 0 can't be derived from the step for groups without model steps, and for mixed groups whose model is
    # ahead of the train step.
    zero = "oldest_step IS NULL OR (mixed AND oldest_step >= :step)"
    pinned = f"pinned_staleness = CASE WHEN {zero} THEN 0 END, pinned_step = CASE WHEN {zero} THEN :step END"
    _pin(tx, home, step, f"lane = :lane AND {UNSETTLED}", pinned)
    too_new = f"lane = :lane AND pinned_staleness IS NULL AND mixed AND {STEP_ORDER} >= :step AND {_HAS_STEP}"
    _pin(tx, home, step, too_new, "pinned_staleness = 0, pinned_step = :step")


_HAS_STEP = f"{STEP_ORDER} < {NO_STEP}"


def _pin(tx: Transaction, home: Lane, step: int, condition: str, values: str) -> None:
    if newest(tx):
        keep(tx, tx.values(f"SELECT uid FROM rb_group WHERE {condition}", lane=home.id, step=step))  # noqa: S608
    tx.change(f"UPDATE rb_group SET {values} WHERE {condition}", lane=home.id, step=step)  # noqa: S608


def _read_due(tx: Transaction, home: Lane) -> list[tuple[int, str]]:
    """Return uid and metadata of groups with rollouts that were EXPIRED when put without a train step.

    All of them were put since the last refresh. They weren't COMPLETED then, and an update of the status settles them.
    """
    if home.status == Status.COMPLETED:
        return []
    query = f"""SELECT uid, CAST(marks AS text) FROM rb_group
WHERE lane = :lane AND {UNSETTLED} AND {DUE}"""  # noqa: S608
    return [(uid, text) for uid, text in tx.tuples(query, lane=home.id)]


def _expire(
    tx: Transaction, home: Lane, refresh: Refresh, leaving: Leaving, due: Sequence[tuple[int, str]]
) -> list[int]:
    """Expire groups of a lane that are too stale by their task's rule, or due to expire; return their uids.

    Those whose marks are damaged are set aside.
    """
    rule, step = refresh.rules[home.task_name], refresh.train_step
    if home.status == Status.EXPIRED and not rule.retryable:
        lane_uids = tx.values("SELECT uid FROM rb_group WHERE lane = :lane", lane=home.id)
        _drop(tx, home, lane_uids, leaving)
        return lane_uids
    thresholds = [steps for steps in (rule.stale_threshold, rule.token_stale_threshold) if steps is not None]
    candidates = dict(due)
    if thresholds:
        # A rollout's newest trainable token isn't older than its oldest token, so this range has all candidates.
        newest_expired = step - 1 - min(thresholds)
        query = f"""SELECT uid, CAST(marks AS text) FROM rb_group
WHERE lane = :lane AND pinned_staleness IS NULL AND {STEP_ORDER} <= :newest"""  # noqa: S608
        candidates.update((uid, text) for uid, text in tx.tuples(query, lane=home.id, newest=newest_expired))
    by_marks: dict[str, list[int]] = {}  # many groups of a step have the same metadata, and change alike
    for uid, text in candidates.items():
        by_marks.setdefault(text, []).append(uid)
    # By uid, with the values of _EXPIRED but the lane, or of _MASKED.
    expired, reset, masked = list[Row](), list[Row](), list[Row]()
    unreadable: dict[int, str] = {}
    for text, uids in by_marks.items():
        try:
            marks = Marks.from_json(from_json(text))
            # A group that is EXPIRED already isn't counted again when rollouts that were EXPIRED at the put are reset.
            is_known = home.status == Status.EXPIRED and not any(marks.too_old(rule, step))
            has_expired, has_masked = marks.expire(rule, step), marks.mask(rule, step)
            new_text = dump_json(marks.to_json()) if has_expired or has_masked else text
            if has_expired:
                oldest, staleness = marks.oldest_step, max(marks.staleness or [0])
                values = oldest, staleness, None, marks.mixed, marks.mean_reward, new_text, None
                (reset if is_known else expired).extend((uid, *values) for uid in uids)
            elif has_masked:
                masked += [(uid, new_text) for uid in uids]
        except DAMAGE as error:
            unreadable |= {uid: str(damaged(uid, error)) for uid in uids}
    if unreadable and home.status != Status.FAILED:
        set_aside(tx, home, unreadable)
    keep(tx, [uid for uid, _ in masked])
    tx.set_columns(_MASKED, sorted(masked))
    _write_expired(tx, home, reset)
    expired_uids = sorted(uid for uid, *_ in expired)
    if expired and rule.retryable:
        _keep_expired(tx, home, expired, expired_uids)
    else:
        _drop(tx, home, expired_uids, leaving)
    return expired_uids


def _keep_expired(tx: Transaction, home: Lane, expired: Sequence[Row], uids: Sequence[int]) -> None:
    step, name = transitions.expired(home.status), (home.task_name, Status.EXPIRED)
    lanes = {home.name: home, **need_lanes(tx, [name])}
    _write_expired(tx, lanes[name], expired)
    if step.enters_races:
        enter_race(tx, lanes[name], uids)
    counts: Counts = Counter()
    add_step(counts, lanes, home.task_name, step, len(uids))
    add_counts(tx, counts)


def _write_expired(tx: Transaction, target: Lane, expired: Sequence[Row]) -> None:
    """Write the metadata of groups with expired rollouts, which move into a lane or are in it."""
    # In primary key order, so that no page is written twice.
    rows = sorted(((uid, target.id, *values) for uid, *values in expired), key=itemgetter(0))
    keep(tx, [uid for uid, *_ in rows])
    tx.set_columns(_EXPIRED, rows)


def _drop(tx: Transaction, home: Lane, expired: Sequence[int], leaving: Leaving) -> None:
    step = transitions.removed(Place(home.status), Tally.DROPPED)
    for start in range(0, len(expired), _CHUNK):
        uids = expired[start : start + _CHUNK]
        note(tx, uids, leaving)
        apply(tx, [(home.task_name, step, uids)], [home])


_MASKED = ("marks",)
_EXPIRED = ("lane", "oldest_step", "pinned_staleness", "pinned_step", "mixed", "reward", "marks", "archived_at")
