"""Puts in a single statement, where each statement is a round trip, of groups that replace no others.

The statement relies on lanes cached in this process. It stores nothing if a lane has changed since, if the buffer was
restored, or if there isn't room for all of the groups. Eviction follows in further statements.

Puts that block at the capacity are serialised by the lock of their task, which is taken before the counting statement
and held until the commit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from replaybuf.storage.sql.engine.postgres_dialect import array, texts
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.schema.tables import group, payload
from replaybuf.storage.sql.statements.counts import Counts, add_counts, lock_tasks
from replaybuf.storage.sql.statements.eviction import evict
from replaybuf.storage.sql.statements.files import name_files
from replaybuf.storage.sql.statements.lanes import KnownLanes, raceless
from replaybuf.storage.sql.statements.new_rows import (
    MOST_BYTES,
    EncodedGroup,
    are_light,
    arrays,
    counts_of,
    first_steps,
    group_row,
    insert_payloads,
    insertion,
    payload_row,
)
from replaybuf.values.rollouts.statuses import Status


def fits_one_statement(tx: Transaction, groups: Sequence[EncodedGroup]) -> bool:
    """Return whether these groups can be stored without replacing others or comparing with the number of draws."""
    limits = tx.scope.rules.limits
    if limits.samples_per_insert is not None:
        return False
    new_groups = [encoded.group for encoded in groups]
    if any(new.key or new.replaces or new.part or new.parts or new.rest or new.stays_leased for new in new_groups):
        return False
    if limits.capacity is not None and any(new.dropped is not None for new in new_groups):
        return False  # evicted groups are attributed to the put that evicts them
    texts = sum(len(encoded.outline) + len(encoded.marks) + len(encoded.prompt or "") for encoded in groups)
    texts += sum(len(str(new.tags)) for new in new_groups if new.tags)
    return sum(len(encoded.payload) for encoded in groups) + 4 * texts <= MOST_BYTES  # at four bytes a character


def store_at_once(
    tx: Transaction, groups: Sequence[EncodedGroup], known: KnownLanes, reserved: Callable[[], object]
) -> list[int]:
    """Store and count the groups, and return their uids; call `reserved()` once they have them.

    Stores nothing and returns [] if a lane isn't as `known`, has a race or would get its first train step, or if there
    isn't room for all groups.
    """
    names, limits = {(encoded.group.task_name, encoded.group.status) for encoded in groups}, tx.scope.rules.limits
    if limits.slows_puts:
        lock_tasks(tx, {task for task, _ in names})
    lanes = raceless(known, names)
    if len(lanes) < len(names) or first_steps(groups, lanes):
        return []
    # Heavy payloads follow in further statements, while the next put may already reserve its uids.
    payloads = [payload_row(0, encoded) for encoded in groups]
    with_payloads = are_light(payloads)
    values = _values(tx, groups, lanes) | (arrays(payload, payloads) if with_payloads else {})
    rows = tx.tuples(_PUTS[with_payloads], **values)
    if not rows:
        return []
    uids = [int(uid) for uid in rows[0][0]]
    tx.newest = rows[0][1]
    name_files(tx, (encoded.extent for encoded in groups if encoded.extent is not None))
    reserved()
    if not with_payloads:
        insert_payloads(tx, [row | {"uid": uid} for uid, row in zip(uids, payloads, strict=True)])
    if limits.capacity is not None and not limits.slows_puts:  # the locks of their tasks serialise evictions
        tasks = {encoded.group.task_name for encoded in groups}
        lock_tasks(tx, tasks)
        counts: Counts = Counter()
        evict(tx, tasks, counts)
        add_counts(tx, counts)
    return uids


def _values(tx: Transaction, groups: Sequence[EncodedGroup], lanes: KnownLanes) -> dict[str, Any]:
    """Return the parameter values of the statement, except for payloads."""
    counts = counts_of(groups, lanes)
    limits, completed = tx.scope.rules.limits, [put.group for put in groups if put.group.status == Status.COMPLETED]
    held_back = Counter(new.task_name for new in completed if limits.slows_puts)
    return {
        "buffer": tx.scope.buffer,
        "epoch": tx.scope.epoch,
        "lanes": texts(home.id for home in lanes.values()),
        "tasks": [home.task_name for home in lanes.values()],
        "statuses": [home.status.value for home in lanes.values()],
        "steps": texts(home.step for home in lanes.values()),
        "count": len(groups),
        **arrays(group, [group_row(0, encoded, None, lanes, None, None, 0) for encoded in groups]),
        "counted": texts(lane_id for lane_id, _ in counts),
        "tallies": [name.value for _, name in counts],
        "amounts": texts(counts.values()),
        "held_back": list(held_back),
        "more": texts(held_back.values()),
        "capacity": limits.capacity,
    }


#: Columns whose values the statement computes.
_MADE_GROUPS = {"uid": "unnest(uids)", "ticket": "unnest(uids) - shift", "since": "newest"}
_MADE_PAYLOADS = {"uid": "unnest(uids)"}


# `room`: whether there is any for all groups of each task that is held back, counted under the lock of the task.
def _put(payloads: str) -> str:
    return f"""
WITH fence AS (
    SELECT coalesce(max(epoch), 0) AS epoch, nullif(max(ticket_shift), 0) AS shift,
        (SELECT coalesce(max(id), 0) FROM rb_checkpoint WHERE buffer = CAST(:buffer AS varchar)) AS newest
    FROM rb_buffer WHERE name = CAST(:buffer AS varchar)
), unchanged AS (
    SELECT count(*) AS lanes
    FROM unnest(
        {array(":lanes", "int")}, CAST(:tasks AS text[]), CAST(:statuses AS text[]), {array(":steps", "bigint")}
    ) AS known (id, task_name, status, step) JOIN rb_lane USING (id, task_name, status)
    WHERE buffer = CAST(:buffer AS varchar) AND rb_lane.step IS NOT DISTINCT FROM known.step
        AND race IS NULL
), room AS (
    SELECT coalesce(bool_and(more + there <= CAST(:capacity AS bigint)), true) AS is_enough
    FROM unnest(CAST(:held_back AS text[]), {array(":more", "bigint")}) AS wanted (of_task, more), LATERAL (
        SELECT coalesce(sum(amount), 0) AS there FROM rb_lane JOIN rb_tally ON lane = id
        WHERE buffer = CAST(:buffer AS varchar) AND task_name = of_task AND status = 'completed' AND name = 'size'
    ) AS level
), new AS (
    SELECT shift, newest, ARRAY(SELECT nextval('rb_uid') FROM generate_series(1, CAST(:count AS int))) AS uids
    FROM fence, unchanged, room
    WHERE epoch = CAST(:epoch AS bigint) AND lanes = cardinality(CAST(:lanes AS text[])) AND is_enough
), groups AS ({insertion(group, _MADE_GROUPS, "FROM new")}), counts AS (
    INSERT INTO rb_tally AS own (lane, name, shard, amount)
    SELECT unnest({array(":counted", "int")}), unnest(CAST(:tallies AS text[])), pg_backend_pid(),
        unnest({array(":amounts", "bigint")})
    FROM new
    ON CONFLICT (lane, name, shard) DO UPDATE SET amount = own.amount + excluded.amount
){payloads}
SELECT CAST(uids AS text[]), newest FROM new
"""  # noqa: S608


#: By whether payloads are in the statement.
_PUTS = {False: _put(""), True: _put(f", payloads AS ({insertion(payload, _MADE_PAYLOADS, 'FROM new')})")}
