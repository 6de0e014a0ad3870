"""Putting: the statements that store groups, and those that give taken ones back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, Dialect, Table, any_, delete, func, insert, literal, select, text, update
from sqlalchemy.dialects import postgresql, sqlite

from replaybuf.rollout import Status
from replaybuf.storage.sql.lanes import Lane, LaneName, need_lanes, start_clock
from replaybuf.storage.sql.rows import EncodedGroup, GroupRow, dump_json, scoped_key
from replaybuf.storage.sql.tables import counter, garbage, group, info, lane, payload, uid_sequence


def put_groups(connection: Connection, groups: Sequence[EncodedGroup], now: float) -> list[int]:
    """Insert groups, in order; their uids."""
    lanes = _lanes_for(connection, groups)
    uids = reserve_uids(connection, len(groups))
    keys = [scoped_key(encoded.group.task_name, encoded.group.key) for encoded in groups]
    rows = list(zip(uids, groups, keys, strict=True))
    if any(key is not None for key in keys):
        rows = _replace_same_keys(connection, rows, now)
    insert_rows(connection, group, [group_row(uid, encoded, key, lanes) for uid, encoded, key in rows])
    insert_rows(connection, payload, [payload_row(uid, encoded) for uid, encoded, _ in rows])
    return uids


def insert_rows(connection: Connection, table: Table, rows: Sequence[tuple[Any, ...]]) -> None:
    """Insert rows, each a tuple in the order of the table's columns, JSON as text.

    The statement is SQLAlchemy's, but compiled once and given to the driver with the rows as they are: half the time of
    an insert of dicts.
    """
    if rows:
        connection.exec_driver_sql(_insert_statement(connection.dialect, table), list(rows))


@lru_cache
def _insert_statement(dialect: Dialect, table: Table) -> str:
    return str(insert(table).compile(dialect=dialect, column_keys=[column.key for column in table.columns]))


def reserve_uids(connection: Connection, count: int) -> list[int]:
    """The next uids; they are never given again, even when the transaction fails (PostgreSQL: leaving a gap)."""
    if connection.dialect.name == "postgresql":
        series = func.generate_series(1, count).table_valued("n")
        return [int(uid) for (uid,) in connection.execute(select(uid_sequence.next_value()).select_from(series))]
    raised = update(counter).where(counter.c.name == "uid").values(value=counter.c.value + count)
    last = connection.execute(raised.returning(counter.c.value)).scalar_one()
    return list(range(last - count + 1, last + 1))


def _lanes_for(connection: Connection, groups: Sequence[EncodedGroup]) -> dict[LaneName, Lane]:
    names = {(encoded.group.task_name, str(encoded.group.status)) for encoded in groups}
    lanes = need_lanes(connection, names)
    started = False
    for encoded in groups:
        new = encoded.group
        if new.train_step is not None and lanes[(new.task_name, str(new.status))].step is None:
            start_clock(connection, lanes[(new.task_name, str(new.status))].id, new.train_step)
            lanes[(new.task_name, str(new.status))].step = new.train_step
            started = True
    return need_lanes(connection, names) if started else lanes


def _replace_same_keys(
    connection: Connection, rows: list[tuple[int, EncodedGroup, str | None]], now: float
) -> list[tuple[int, EncodedGroup, str | None]]:
    """Delete the stored groups that have one of these keys; of several new ones with the same key the last stays."""
    last = {key: uid for uid, _, key in rows if key is not None}
    if connection.dialect.name == "postgresql":
        # Two puts of one key wait for each other here, instead of failing on the unique index.
        for key in sorted(last):
            connection.execute(text("SELECT pg_advisory_xact_lock(hashtextextended(:key, 0))"), {"key": key})
    gone = delete(group).where(group.c.scoped_key.in_(sorted(last))).returning(group.c.uid)
    discard(connection, [uid for (uid,) in connection.execute(gone)], now)
    return [(uid, encoded, key) for uid, encoded, key in rows if key is None or last[key] == uid]


def group_row(uid: int, encoded: EncodedGroup, key: str | None, lanes: Mapping[LaneName, Lane]) -> tuple[Any, ...]:
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
    )


def payload_row(uid: int, encoded: EncodedGroup) -> tuple[Any, ...]:
    """A new group as a row of `rb_payload`."""
    return uid, encoded.outline, encoded.prompt, encoded.payload


def discard(connection: Connection, uids: Sequence[int], now: float) -> None:
    """Leave the payloads of removed groups to the sweep."""
    if uids:
        connection.execute(insert(garbage), [{"uid": uid, "removed_at": now} for uid in uids])


def give_back(connection: Connection, rows: Sequence[GroupRow], failed: Mapping[int, str]) -> None:
    """Put taken groups back where they were; those in `failed` are set aside with the reason.

    A group whose key was put again in the meantime stays away: the newer one has replaced it.
    """
    if not rows:
        return
    lanes = need_lanes(connection, {(row.task_name, str(Status.FAILED)) for row in rows if row.uid in failed})
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    if dialect is postgresql:
        # A sweep that holds some of these rows has deleted the payloads when the lock is ours.
        uids = literal(sorted(row.uid for row in rows), postgresql.ARRAY(garbage.c.uid.type))
        connection.execute(select(garbage.c.uid).where(garbage.c.uid == any_(uids)).with_for_update())
    for row in rows:
        columns = dict(row.columns)
        if row.uid in failed:
            columns |= pinned(row) | {
                "lane": lanes[(row.task_name, str(Status.FAILED))].id,
                "error": failed[row.uid],
            }
        stored = connection.execute(dialect.insert(group).on_conflict_do_nothing(), columns)
        if stored.rowcount:
            connection.execute(delete(garbage).where(garbage.c.uid == row.uid))
            here = select(payload.c.uid).where(payload.c.uid == row.uid)
            if row.payload is not None and connection.execute(here).first() is None:
                # This comes so late that it was swept. (The outline is only for people to look at.)
                kept = {"uid": row.uid, "outline": [], "prompt": None, "data": row.payload}
                connection.execute(insert(payload), kept)


def pinned(row: GroupRow) -> dict[str, Any]:
    """The columns that keep a group's staleness as it is when it leaves its lane."""
    if row.columns["pinned_staleness"] is not None:
        return {}
    return {"pinned_staleness": row.staleness, "pinned_step": row.step}


def count_dropped(connection: Connection, task_name: str, count: int) -> None:
    """Count groups of a task that expired and weren't retryable."""
    home = need_lanes(connection, [(task_name, str(Status.EXPIRED))])[(task_name, str(Status.EXPIRED))]
    connection.execute(update(lane).where(lane.c.id == home.id).values(dropped=lane.c.dropped + count))


def set_info(connection: Connection, facts: Mapping[str, str]) -> None:
    """Write facts about the store, over what they were before."""
    connection.execute(delete(info).where(info.c.name.in_(list(facts))))
    if facts:
        connection.execute(insert(info), [{"name": name, "value": value} for name, value in facts.items()])
