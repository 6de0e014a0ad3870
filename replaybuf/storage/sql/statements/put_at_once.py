"""Putting in one statement, where each statement is a round trip: groups that no stored group has to leave for.

The statement is made from what this process knows of the lanes, and stores nothing if they have changed since, or if
the buffer was restored: the groups are then put as in `put`, in the same transaction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Column, Table, text
from sqlalchemy.dialects import postgresql
from sqlalchemy.dialects.postgresql import ARRAY

from replaybuf.rules import transitions
from replaybuf.rules.tallies import LaneName
from replaybuf.storage.sql.engine.identity import MARK
from replaybuf.storage.sql.engine.prepared import Prepared
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.schema.tables import group, payload
from replaybuf.storage.sql.statements.counts import Counts, add_step
from replaybuf.storage.sql.statements.fence import check_fence
from replaybuf.storage.sql.statements.lanes import Lane, find_lanes
from replaybuf.storage.sql.statements.put import Outcome, group_row, payload_row, put_groups
from replaybuf.storage.sql.statements.rows import EncodedGroup, most_bytes

#: The most bytes of all rows of one statement, which arrive in one message.
MOST_BYTES = 64 * 1024 * 1024

KnownLanes = dict[LaneName, Lane]


def put_behind_fence(
    tx: Transaction, groups: Sequence[EncodedGroup], known: KnownLanes, uids: Sequence[int] | None = None
) -> list[Outcome]:
    """Put groups as `put_groups` does, in one statement if possible; the first of a transaction, it checks the fence.

    `known` are lanes as they were read last, and is updated. `uids` were reserved for these groups, in their order.
    """
    if not (tx.dialect.is_remote and fits_one_statement(tx, groups)):
        check_fence(tx)
        return put_groups(tx, groups)
    names = {(one.group.task_name, one.group.status) for one in groups}
    if all(_is_settled(known.get((one.group.task_name, one.group.status)), one) for one in groups):
        stored = _store(tx, groups, {name: known[name] for name in names}, uids)
        if stored:
            return stored
    check_fence(tx)
    outcomes = put_groups(tx, groups)
    known |= find_lanes(tx, names)
    return outcomes


def fits_one_statement(tx: Transaction, groups: Sequence[EncodedGroup]) -> bool:
    """Return whether nothing has to leave, to be refused or to be locked for these groups."""
    limits = tx.scope.rules.limits
    if limits.slows_puts or limits.capacity is not None:
        return False
    news = [one.group for one in groups]
    if any(new.key or new.replaces or new.stays_leased or new.dropped is not None for new in news):
        return False
    tags = sum(len(str(new.tags)) for new in news if new.tags)
    return sum(map(most_bytes, groups)) + 4 * tags <= MOST_BYTES


def _is_settled(home: Lane | None, encoded: EncodedGroup) -> bool:
    """Return whether a group needs nothing of its lane, neither a key in a race nor a first train step."""
    return home is not None and not home.clocks and (home.step is not None or encoded.group.train_step is None)


def _store(
    tx: Transaction, groups: Sequence[EncodedGroup], lanes: KnownLanes, uids: Sequence[int] | None
) -> list[Outcome]:
    """Store and count the groups and return their uids; nothing is stored, and none returned, if the lanes changed."""
    counts: Counts = Counter()
    for (task, status), n in Counter((one.group.task_name, one.group.status) for one in groups).items():
        add_step(counts, lanes, task, transitions.put(status), n)
    rows = tx.fetch_marking(
        _PUT,
        tx.scope.buffer,
        tx.scope.epoch,
        [home.id for home in lanes.values()],
        [home.step for home in lanes.values()],
        len(groups),
        uids,
        *_given(group, [group_row(0, one, None, lanes, {}, None) for one in groups]),
        *_given(payload, [payload_row(0, one) for one in groups]),
        [lane_id for lane_id, _ in counts],
        [name.value for _, name in counts],
        list(counts.values()),
    )
    return list(rows[0][0]) if rows else []


# The statement. Rows come as an array for each column. They are unnested in a SELECT's list and not in its FROM, where
# PostgreSQL would write large ones to a file first.

#: Columns that the statement makes.
_MADE = {"uid": "unnest(uids)", "ticket": "unnest(uids) - shift"}


def _given(table: Table, rows: Iterable[Sequence[Any]]) -> list[list[Any]]:
    """Return the columns of rows, but those that the statement makes."""
    columns = zip(table.columns, zip(*rows, strict=True), strict=True)
    return [list(values) for column, values in columns if column.name not in _MADE]


def _parameters(table: Table) -> list[str]:
    return [f"{table.name}_{column.name}" for column in table.columns if column.name not in _MADE]


def _insert(table: Table) -> str:
    """Return the INSERT of the rows of groups whose uids are in `new`."""
    names, values = ", ".join(column.name for column in table.columns), ", ".join(map(_value, table.columns))
    return f"INSERT INTO {table.name} ({names}) SELECT {values} FROM new"  # noqa: S608


_DIALECT = postgresql.dialect()  # type: ignore[no-untyped-call]


def _value(column: Column[Any]) -> str:
    kind, _, _ = ARRAY(column.type).compile(dialect=_DIALECT).partition(" COLLATE")
    return _MADE.get(column.name, f"unnest(CAST(:{column.table.name}_{column.name} AS {kind}))")


_PUT = Prepared(
    lambda _: text(f"""
WITH fence AS (
    SELECT coalesce(max(epoch), 0) AS epoch, nullif(max(ticket_shift), 0) AS shift
    FROM rb_buffer WHERE name = CAST(:buffer AS varchar)
), unchanged AS (
    SELECT count(*) AS lanes
    FROM unnest(CAST(:lanes AS int[]), CAST(:steps AS bigint[])) AS known (id, step) JOIN rb_lane USING (id)
    WHERE rb_lane.step IS NOT DISTINCT FROM known.step AND uniform_clock IS NULL AND prioritized_clock IS NULL
), new AS (
    SELECT shift, coalesce(
        CAST(:uids AS bigint[]),
        ARRAY(SELECT nextval('rb_uid') FROM generate_series(1, CAST(:count AS int)))
    ) AS uids
    FROM fence, unchanged WHERE epoch = :epoch AND lanes = cardinality(CAST(:lanes AS int[]))
), groups AS (
    {_insert(group)}
), payloads AS (
    {_insert(payload)}
), counts AS (
    INSERT INTO rb_tally AS own (lane, name, shard, amount)
    SELECT unnest(CAST(:counted AS int[])), unnest(CAST(:tallies AS varchar[])), pg_backend_pid(),
        unnest(CAST(:amounts AS bigint[]))
    FROM new
    ON CONFLICT (lane, name, shard) DO UPDATE SET amount = own.amount + excluded.amount
), mark AS (
    INSERT INTO rb_counter (name, value) VALUES (:mark_row, :mark_number)
    ON CONFLICT (name) DO UPDATE SET value = excluded.value
)
SELECT uids FROM new
"""),  # noqa: S608
    *("buffer", "epoch", "lanes", "steps", "count", "uids"),
    *(*_parameters(group), *_parameters(payload), "counted", "tallies", "amounts", *MARK),
)
