"""Putting in one statement, where each statement is a round trip: groups that no stored group has to leave for.

The statement is made from what this process knows of the lanes, and stores nothing if they have changed since, or if
the buffer was restored: the groups are then put as in `put`, in the same transaction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Column, text
from sqlalchemy.dialects import postgresql
from sqlalchemy.dialects.postgresql import ARRAY

from replaybuf.rules import transitions
from replaybuf.storage.sql.engine.identity import MARK
from replaybuf.storage.sql.engine.prepared import Prepared
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.schema.tables import group
from replaybuf.storage.sql.statements.counts import Counts, add_step
from replaybuf.storage.sql.statements.encoded import EncodedGroup, most_bytes
from replaybuf.storage.sql.statements.fence import check_fence
from replaybuf.storage.sql.statements.lanes import KnownLanes, Lane, find_lanes
from replaybuf.storage.sql.statements.put import Outcome, group_row, insert_payloads, payload_row, put_groups

#: The most bytes of all rows that are put like this.
MOST_BYTES = 64 << 20
#: More bytes of payloads than these come after the statement: they are then sent quicker, and the puts that follow
#: needn't wait for them to have their uids.
MOST_PAYLOADS = 1 << 19


@dataclass(slots=True)
class Batch:
    """Groups to be put together; `reserved()` is called once they have their uids, which they keep in a repetition."""

    groups: Sequence[EncodedGroup]
    reserved: Callable[[], object]
    uids: list[int] | None = None


def put_behind_fence(tx: Transaction, batch: Batch, known: KnownLanes) -> list[Outcome]:
    """Put groups as `put_groups` does, in one statement if possible; the first of a transaction, it checks the fence.

    `known` are lanes as they were read last, and is updated.
    """
    if not (tx.dialect.is_remote and _fits_one_statement(tx, batch.groups)):
        check_fence(tx)
        return put_groups(tx, batch.groups)
    names = {(one.group.task_name, one.group.status) for one in batch.groups}
    if all(_is_settled(known.get((one.group.task_name, one.group.status)), one) for one in batch.groups):
        stored = _store(tx, batch, {name: known[name] for name in names})
        if stored:
            return stored
    check_fence(tx)
    outcomes = put_groups(tx, batch.groups)
    known |= find_lanes(tx, names)
    return outcomes


def _fits_one_statement(tx: Transaction, groups: Sequence[EncodedGroup]) -> bool:
    """Return whether nothing has to leave, to be refused or to be locked for these groups."""
    limits = tx.scope.rules.limits
    if limits.slows_puts or limits.capacity is not None:
        return False
    news = [one.group for one in groups]
    if any(new.key or new.replaces or new.stays_leased for new in news):
        return False
    tags = sum(len(str(new.tags)) for new in news if new.tags)
    most = min(MOST_BYTES, tx.dialect.row_limit(tx.connection).nbytes)
    return sum(map(most_bytes, groups)) + 4 * tags <= most


def _is_settled(home: Lane | None, encoded: EncodedGroup) -> bool:
    """Return whether a group needs nothing of its lane, neither a key in a race nor a first train step."""
    return home is not None and not home.clocks and (home.step is not None or encoded.group.train_step is None)


def _store(tx: Transaction, batch: Batch, lanes: KnownLanes) -> list[Outcome]:
    """Store and count groups, and return their uids: none, and nothing is stored, if the lanes have changed."""
    groups, counts = batch.groups, Counts()
    for (task, status), n in Counter((one.group.task_name, one.group.status) for one in groups).items():
        add_step(counts, lanes, task, transitions.put(status), n)
    apart = sum(len(one.payload) for one in groups) > MOST_PAYLOADS
    values = [
        tx.scope.buffer,
        tx.scope.epoch,
        [home.id for home in lanes.values()],
        [home.task_name for home in lanes.values()],
        [home.status.value for home in lanes.values()],
        [home.step for home in lanes.values()],
        len(groups),
        batch.uids,
        *_groups(groups, lanes),
        [lane_id for lane_id, _ in counts],
        [name.value for _, name in counts],
        list(counts.values()),
    ]
    rows = tx.fetch_marking(_PUT_APART, *values) if apart else tx.fetch_marking(_PUT, *values, *_payloads(groups))
    if not rows:
        return []
    batch.uids = uids = list(rows[0][0])
    batch.reserved()
    if apart:
        insert_payloads(tx, [payload_row(uid, one) for uid, one in zip(uids, groups, strict=True)])
    return list(uids)


def _payloads(groups: Sequence[EncodedGroup]) -> list[list[Any] | None]:
    """Return the columns of `rb_payload` but the uids."""
    return _columns(payload_row(0, one) for one in groups)[1:]


def _groups(groups: Sequence[EncodedGroup], lanes: KnownLanes) -> list[list[Any] | None]:
    """Return the columns of `rb_group` but those that the statement makes."""
    rows = (group_row(0, one, None, lanes, {}, None) for one in groups)
    columns = dict(zip(group.columns.keys(), _columns(rows), strict=True))
    for name in _SHARED:
        values = columns[name]
        if values is not None and values.count(values[0]) == len(values):
            columns[name] = values[:1]
    return [values for name, values in columns.items() if name not in _MADE]


def _columns(rows: Iterable[Sequence[Any]]) -> list[list[Any] | None]:
    """Return the columns of rows, None for those without a value: asyncpg takes its time for each value of an array."""
    columns = list(zip(*rows, strict=True))
    empty = (None,) * len(columns[0])
    return [None if column == empty else list(column) for column in columns]


# The statement. Rows come as an array for each column, or NULL, which is unnested to as many. They are unnested in a
# SELECT's list and not in its FROM, where PostgreSQL would write large ones to a file first.

#: Columns that the statement makes.
_MADE = {"uid": "unnest(uids)", "ticket": "unnest(uids) - shift"}
#: Columns of which one value stands for all groups: nearly always they have the same.
_SHARED = ("worker", "put_step")
_DIALECT = postgresql.dialect()  # type: ignore[no-untyped-call]


def _value(column: Column[Any]) -> str:
    kind, _, _ = ARRAY(column.type).compile(dialect=_DIALECT).partition(" COLLATE")
    values = f"CAST(:group_{column.name} AS {kind})"
    if column.name in _SHARED:
        same = f"array_fill(({values})[1], ARRAY[CAST(:count AS int)])"
        values = f"CASE cardinality({values}) WHEN 1 THEN {same} ELSE {values} END"
    return _MADE.get(column.name, f"unnest({values})")


_INSERT_GROUPS = f"""
    INSERT INTO rb_group ({", ".join(column.name for column in group.columns)})
    SELECT {", ".join(map(_value, group.columns))} FROM new
"""  # noqa: S608
_INSERT_PAYLOADS = """
    INSERT INTO rb_payload (uid, outline, prompt, data)
    SELECT unnest(uids), unnest(CAST(:outlines AS jsonb[])), unnest(CAST(:prompts AS text[])),
        unnest(CAST(:payloads AS bytea[]))
    FROM new
"""


def _put(more: str = "") -> str:
    return f"""
WITH fence AS (
    SELECT coalesce(max(epoch), 0) AS epoch, nullif(max(ticket_shift), 0) AS shift
    FROM rb_buffer WHERE name = CAST(:buffer AS varchar)
), unchanged AS (
    SELECT count(*) AS lanes
    FROM unnest(
        CAST(:lanes AS int[]), CAST(:tasks AS varchar[]), CAST(:statuses AS varchar[]), CAST(:steps AS bigint[])
    ) AS known (id, task_name, status, step) JOIN rb_lane USING (id, task_name, status)
    WHERE buffer = CAST(:buffer AS varchar) AND rb_lane.step IS NOT DISTINCT FROM known.step
        AND uniform_clock IS NULL AND prioritized_clock IS NULL
), new AS (
    SELECT shift, coalesce(
        CAST(:uids AS bigint[]),
        ARRAY(SELECT nextval('rb_uid') FROM generate_series(1, CAST(:count AS int)))
    ) AS uids
    FROM fence, unchanged WHERE epoch = :epoch AND lanes = cardinality(CAST(:lanes AS int[]))
), groups AS ({_INSERT_GROUPS}), counts AS (
    INSERT INTO rb_tally AS own (lane, name, shard, amount)
    SELECT unnest(CAST(:counted AS int[])), unnest(CAST(:tallies AS varchar[])), pg_backend_pid(),
        unnest(CAST(:amounts AS bigint[]))
    FROM new
    ON CONFLICT (lane, name, shard) DO UPDATE SET amount = own.amount + excluded.amount
), mark AS (
    INSERT INTO rb_counter (name, value) VALUES (:mark_row, :mark_number)
    ON CONFLICT (name) DO UPDATE SET value = excluded.value
){more}
SELECT uids FROM new
"""  # noqa: S608


_GROUP = [f"group_{column.name}" for column in group.columns if column.name not in _MADE]
_PAYLOAD = ("outlines", "prompts", "payloads")
_KNOWN = ("buffer", "epoch", "lanes", "tasks", "statuses", "steps")
_NAMES = (*_KNOWN, "count", "uids", *_GROUP, "counted", "tallies", "amounts")
_PUT = Prepared(lambda _: text(_put(f", payloads AS ({_INSERT_PAYLOADS})")), *_NAMES, *_PAYLOAD, *MARK)
_PUT_APART = Prepared(lambda _: text(_put()), *_NAMES, *MARK)
