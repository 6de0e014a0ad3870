"""Putting: the statements that store groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, delete, insert, select, text

from replaybuf.race import PRIORITIZED, UNIFORM
from replaybuf.rollout import Status
from replaybuf.storage.base import NewGroup
from replaybuf.storage.sql.bulk import insert_rows
from replaybuf.storage.sql.evict import evict
from replaybuf.storage.sql.fields import uid_in
from replaybuf.storage.sql.lanes import Lane, Scope, need_lanes, start_steps
from replaybuf.storage.sql.leaving import remove
from replaybuf.storage.sql.races import new_keys
from replaybuf.storage.sql.rows import EncodedGroup, dump_json, scoped_key
from replaybuf.storage.sql.select import lock_groups
from replaybuf.storage.sql.tables import group, info, lane, payload
from replaybuf.storage.sql.tally import Counts, add_counts
from replaybuf.storage.sql.uids import reserve_uids
from replaybuf.tally import LaneName, Tally


def store(
    connection: Connection,
    scope: Scope,
    groups: Sequence[EncodedGroup],
    now: float,
    *,
    evicting: bool = True,
    made_from: Sequence[Sequence[int]] = (),
) -> list[int]:
    """Insert groups for which there is room, and evict what is beyond the capacity; their uids.

    `made_from` has, for each group, those of the groups that it was made from that a checkpoint has.
    """
    if not groups:
        return []
    lanes = _lanes_for(connection, scope, groups)
    uids = reserve_uids(connection, len(groups))
    counts: Counts = Counter()
    for encoded in groups:
        home = lanes[(encoded.group.task_name, encoded.group.status)]
        counts[(home.id, Tally.PUT)] += 1
        counts[(home.id, Tally.SIZE)] += 1
    rows = [(uid, one, key_of(scope, one.group)) for uid, one in zip(uids, groups, strict=True)]
    if any(key is not None for _, _, key in rows):
        rows = _replace_same_keys(connection, scope, rows, lanes, counts, now)
    drawn, shift = _draw_keys(scope, lanes, rows), scope.ticket_shift
    origins = dict(zip(uids, made_from, strict=False))
    values = [
        group_row(uid, one, key, lanes, drawn.get(uid, {}), uid - shift if shift else None, origins.get(uid, ()))
        for uid, one, key in rows
    ]
    insert_rows(connection, group, values)
    insert_rows(connection, payload, [payload_row(uid, one) for uid, one, _ in rows])
    if evicting:
        evict(connection, scope, {task for task, _ in lanes}, counts, now)
    add_counts(connection, counts)
    return uids


def _lanes_for(connection: Connection, scope: Scope, groups: Sequence[EncodedGroup]) -> dict[LaneName, Lane]:
    names = {(encoded.group.task_name, encoded.group.status) for encoded in groups}
    lanes = need_lanes(connection, scope, names)
    steps: dict[int, int] = {}
    for encoded in groups:
        home, train_step = lanes[(encoded.group.task_name, encoded.group.status)], encoded.group.train_step
        if train_step is not None and home.step is None:
            steps.setdefault(home.id, train_step)
    if not steps:
        return lanes
    start_steps(connection, steps)
    return need_lanes(connection, scope, names)


def key_of(scope: Scope, new: NewGroup) -> str | None:
    return scoped_key(scope.buffer, new.task_name, new.key)


def _replace_same_keys(
    connection: Connection,
    scope: Scope,
    rows: list[tuple[int, EncodedGroup, str | None]],
    lanes: Mapping[LaneName, Lane],
    counts: Counts,
    now: float,
) -> list[tuple[int, EncodedGroup, str | None]]:
    """Delete the stored groups that have one of these keys; of several new ones with the same key the last stays."""
    last = {key: uid for uid, _, key in rows if key is not None}
    if connection.dialect.name == "postgresql":
        # Two puts of one key wait for each other here, instead of failing on the unique index.
        for name in sorted(last):
            connection.execute(text("SELECT pg_advisory_xact_lock(hashtextextended(:key, 0))"), {"key": name})
    replace_groups(connection, scope, group.c.scoped_key.in_(sorted(last)), now)
    kept: list[tuple[int, EncodedGroup, str | None]] = []
    for uid, encoded, key in rows:
        if key is None or last[key] == uid:
            kept.append((uid, encoded, key))
        else:
            home = lanes[(encoded.group.task_name, encoded.group.status)]
            counts[(home.id, Tally.SIZE)] -= 1
            counts[(home.id, Tally.REPLACED)] += 1
    return kept


def replace_groups(connection: Connection, scope: Scope, condition: ColumnElement[bool], now: float) -> None:
    """Remove the groups, leased ones too, in whose place others come."""
    remove_replaced(connection, scope, lock_replaced(connection, scope, condition), now)


def lock_replaced(connection: Connection, scope: Scope, condition: Any) -> list[Any]:
    """The stored groups that are to be replaced, leased ones too, with their lanes."""
    locked = [uid for uid, _ in lock_groups(connection, condition)]
    found = (
        select(
            *(group.c[name] for name in ("uid", "lane", "lease", "leased_until", "deliveries", "made_from")),
            *(lane.c[name] for name in ("task_name", "status", "leased")),
        )
        .select_from(group.join(lane, lane.c.id == group.c.lane))
        .where(lane.c.buffer == scope.buffer, uid_in(connection, locked))
    )
    return list(connection.execute(found)) if locked else []


def remove_replaced(connection: Connection, scope: Scope, rows: Sequence[Any], now: float) -> None:
    if not rows:
        return
    homes = need_lanes(connection, scope, {(row.task_name, Status(row.status)) for row in rows})
    counts: Counts = Counter()
    for row in rows:
        home = homes[(row.task_name, Status(row.status))].id
        counts[(home, Tally.LEASED if row.leased else Tally.SIZE)] -= 1
        counts[(home, Tally.REPLACED)] += 1
    uids = [row.uid for row in rows]
    remove(connection, uids, now)
    add_counts(connection, counts)


def _draw_keys(
    scope: Scope, lanes: Mapping[LaneName, Lane], rows: Sequence[tuple[int, EncodedGroup, str | None]]
) -> dict[int, dict[str, float]]:
    """The keys of new groups in the races of their lanes."""
    drawn: dict[int, dict[str, float]] = {}
    for name, home in lanes.items():
        if home.clocks:
            members = [one for one in rows if (one[1].group.task_name, one[1].group.status) == name]
            entries = [(uid, uid - scope.ticket_shift, encoded.group.priority) for uid, encoded, _ in members]
            drawn |= new_keys(scope, home, entries)
    return drawn


def group_row(
    uid: int,
    encoded: EncodedGroup,
    key: str | None,
    lanes: Mapping[LaneName, Lane],
    keys: Mapping[str, float],
    ticket: int | None,
    made_from: Sequence[int] = (),
) -> tuple[Any, ...]:
    """A new group as a row of `rb_group`."""
    new, oldest = encoded.group, encoded.oldest_step
    home = lanes[(new.task_name, new.status)]
    # A group whose staleness is that of its lane's train step follows the lane from now on.
    follows = (
        oldest is not None
        and new.train_step is not None
        and home.step == new.train_step
        and new.staleness == new.train_step - oldest - 1
    )
    return (
        uid,
        home.id,
        oldest,
        None if follows else new.staleness,  # pinned_staleness
        None,  # pinned_step
        encoded.mixed,
        new.priority,
        0,  # times_sampled
        new.created_at,
        encoded.reward,
        len(encoded.payload),
        encoded.marks,
        dump_json(new.tags) if new.tags else None,
        key,
        None,  # error
        keys.get(UNIFORM),
        keys.get(PRIORITIZED),
        0,  # deliveries
        None,  # lease
        None,  # leased_until
        now_if_archived(new),
        ticket,
        dump_json(list(made_from)) if made_from else None,
    )


def now_if_archived(new: NewGroup) -> float | None:
    """When a group that is put as ARCHIVED was archived."""
    return new.created_at if new.status == Status.ARCHIVED else None


def payload_row(uid: int, encoded: EncodedGroup) -> tuple[Any, ...]:
    """A new group as a row of `rb_payload`."""
    return uid, encoded.outline, encoded.prompt, encoded.payload


def count_lost(connection: Connection, scope: Scope, name: LaneName, why: Tally) -> None:
    """Count a put that was not stored."""
    home = need_lanes(connection, scope, [name])[name]
    counts: Counts = Counter({(home.id, why): 1})
    if why == Tally.DROPPED:
        counts[(home.id, Tally.PUT)] = 1
    add_counts(connection, counts)


def set_info(connection: Connection, facts: Mapping[str, str]) -> None:
    """Write facts about the store, over what they were before."""
    connection.execute(delete(info).where(info.c.name.in_(list(facts))))
    if facts:
        connection.execute(insert(info), [{"name": name, "value": value} for name, value in facts.items()])
