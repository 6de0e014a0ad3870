"""Snapshots: a store's groups in a SQLite file of their own, with the schema of every other replaybuf database.

Rows are copied as they are, in batches, from one transaction of the source, so that the snapshot is consistent while
others write, and between SQLite and PostgreSQL in both directions. The file appears under its name only when complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import glob
import itertools
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Table, delete, func, insert, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from replaybuf.codec import Codec
from replaybuf.errors import DecodeError, SnapshotError, SnapshotMismatchError
from replaybuf.storage.base import NewGroup, StorageItem
from replaybuf.storage.sql.database import Database
from replaybuf.storage.sql.driver import parse_url, translated
from replaybuf.storage.sql.lanes import need_lanes
from replaybuf.storage.sql.put import group_row, insert_rows, payload_row, set_info
from replaybuf.storage.sql.rows import EncodedGroup, GroupRow, describe, scoped_key
from replaybuf.storage.sql.schema import check_schema, create_schema
from replaybuf.storage.sql.tables import counter, garbage, group, info, lane, payload, uid_sequence
from replaybuf.storage.state import check_empty, pack_state, unpack_state

_BATCH_BYTES = 16 * 1024 * 1024
_BATCH_GROUPS = 1000


async def copy_to(source: Database, path: str, about: Mapping[str, str]) -> None:
    """Write a snapshot of `source` to the file `path`, over an older one."""
    if source.dialect == "sqlite" and not source.memory and _same_file(path, str(source.url.database)):
        raise SnapshotError(f"{path} is the database of this buffer itself; save into another folder")
    with _partial_file(path) as partial:
        target = _file_database(partial)
        try:
            await target.write(lambda connection: create_schema(connection, path))
            async with source.transaction(write=False) as reading, target.transaction(write=True) as writing:
                await _copy_rows(reading, writing)
                await writing.run_sync(set_info, dict(about))
        finally:
            await _close_file(target)
        await asyncio.to_thread(_publish, partial, path)


async def copy_from(target: Database, path: str, expected: Mapping[str, str]) -> None:
    """Load the snapshot at `path` into `target`, which must be empty."""
    source = await _open_file(path, expected)
    try:
        async with target.transaction(write=True, alone=True) as writing:
            await writing.run_sync(_make_room)
            async with source.transaction(write=False) as reading:
                await _copy_rows(reading, writing)
    finally:
        await source.dispose()


async def _copy_rows(reading: AsyncConnection, writing: AsyncConnection) -> None:
    for table in (lane, info):
        rows = await reading.run_sync(_all_rows, table)
        await writing.run_sync(_insert_rows, table, rows)
    after, size = 0, 1
    while True:
        groups, payloads = await reading.run_sync(_batch, after, size)
        if not groups:
            break
        await writing.run_sync(_insert_rows, group, groups)
        await writing.run_sync(_insert_rows, payload, payloads)
        after = groups[-1]["uid"]
        mean = sum(row["bytes"] for row in groups) / len(groups)
        size = max(1, min(_BATCH_GROUPS, int(_BATCH_BYTES / max(mean, 1))))
    await writing.run_sync(raise_uid, await reading.run_sync(last_uid))


def _all_rows(connection: Connection, table: Table) -> list[dict[str, Any]]:
    return [dict(row) for row in connection.execute(select(table)).mappings()]


def _insert_rows(connection: Connection, table: Table, rows: list[dict[str, Any]]) -> None:
    if rows:
        connection.execute(insert(table), rows)


def _batch(connection: Connection, after: int, size: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    chosen = select(group).where(group.c.uid > after).order_by(group.c.uid).limit(size)
    groups = [dict(row) for row in connection.execute(chosen).mappings()]
    if not groups:
        return [], []
    between = payload.c.uid.between(groups[0]["uid"], groups[-1]["uid"])
    wanted = select(payload).join(group, group.c.uid == payload.c.uid).where(between)
    return groups, [dict(row) for row in connection.execute(wanted).mappings()]


def _make_room(connection: Connection) -> None:
    check_empty(int(connection.execute(select(func.count()).select_from(group)).scalar_one()))
    for table in (payload, garbage, lane, info):
        connection.execute(delete(table))


def last_uid(connection: Connection) -> int:
    """The last uid that was given."""
    if connection.dialect.name == "postgresql":
        last, called = connection.execute(text("SELECT last_value, is_called FROM rb_uid")).one()
        return int(last) if called else int(last) - 1
    return int(connection.execute(select(counter.c.value).where(counter.c.name == "uid")).scalar_one())


def raise_uid(connection: Connection, last: int) -> None:
    """Give no uid up to `last` again."""
    last = max(last, last_uid(connection))
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.setval(uid_sequence.name, max(last, 1), last > 0)))
        highest = select(func.coalesce(func.max(lane.c.id), 1)).scalar_subquery()
        connection.execute(select(func.setval(func.pg_get_serial_sequence("rb_lane", "id"), highest)))
    else:
        connection.execute(update(counter).where(counter.c.name == "uid").values(value=last))


# States


def read_state(connection: Connection, codec: Codec) -> dict[str, Any]:
    """The portable state of the store."""
    joined = group.join(lane, lane.c.id == group.c.lane).outerjoin(payload, payload.c.uid == group.c.uid)
    columns = select(group, lane.c.task_name, lane.c.status, lane.c.step, payload.c.data)
    rows = connection.execute(columns.select_from(joined).order_by(group.c.uid)).mappings()
    totals = connection.execute(select(lane.c.task_name, func.sum(lane.c.dropped)).group_by(lane.c.task_name))
    dropped = {task_name: int(count) for task_name, count in totals if count}
    return pack_state([_state_of(GroupRow.of(row), codec) for row in rows], last_uid(connection) + 1, dropped)


def _state_of(row: GroupRow, codec: Codec) -> tuple[StorageItem, bytes]:
    """A group with its payload as a reader would get it."""
    data = row.payload or b""
    try:
        if row.refreshed_to is not None or row.columns["marks"].get("expired"):
            data = codec.encode(row.decode(codec).item)
    except DecodeError as error:
        return row.item([], str(error)), data
    return row.item([]), data


def load_state(connection: Connection, codec: Codec, state: dict[str, Any]) -> None:
    """Load a portable state into the store, which must be empty."""
    groups, next_uid, dropped = unpack_state(state)
    _make_room(connection)
    names = {(item.task_name, str(item.status)) for item, _ in groups}
    lanes = need_lanes(connection, names | {(task_name, "expired") for task_name in dropped})
    rows = [(item, _encoded(codec, item, data)) for item, data in groups]
    keyed = [(item, encoded, scoped_key(item.task_name, item.key)) for item, encoded in rows]
    insert_rows(connection, group, [group_row(item.uid, encoded, key, lanes) for item, encoded, key in keyed])
    insert_rows(connection, payload, [payload_row(item.uid, encoded) for item, encoded in rows])
    for item, _ in rows:
        rest = {"times_sampled": item.times_sampled, "error": item.error, "reward": item.reward}
        connection.execute(update(group).where(group.c.uid == item.uid).values(rest))
    for task_name, count in dropped.items():
        chosen = lane.c.id == lanes[(task_name, "expired")].id
        connection.execute(update(lane).where(chosen).values(dropped=count))
    raise_uid(connection, next_uid - 1)


def _encoded(codec: Codec, item: StorageItem, data: bytes) -> EncodedGroup:
    new = NewGroup(
        item.task_name, item.status, item.staleness, [], item.created_at, None, item.priority, item.tags, item.key
    )
    try:
        return describe(new, codec.decode(data), data)
    except DecodeError:
        return describe(new, [], data)


def write_state(path: str, state: dict[str, Any], about: Mapping[str, str], codec: Codec) -> None:
    """Write a portable state as a snapshot file; blocks."""

    async def write() -> None:
        with _partial_file(path) as partial:
            target = _file_database(partial)
            try:
                await target.write(lambda connection: create_schema(connection, path))
                await target.write(lambda connection: load_state(connection, codec, state))
                await target.write(lambda connection: set_info(connection, about))
            finally:
                await _close_file(target)
            _publish(partial, path)

    asyncio.run(write())


def load_file_state(path: str, expected: Mapping[str, str], codec: Codec) -> dict[str, Any]:
    """The portable state in a snapshot file; blocks."""

    async def read() -> dict[str, Any]:
        source = await _open_file(path, expected)
        try:
            return await source.read(lambda connection: read_state(connection, codec))
        finally:
            await source.dispose()

    return asyncio.run(read())


# Files


def _file_database(path: str, *, read_only: bool = False) -> Database:
    url = parse_url("sqlite://").set(database=str(Path(path).absolute()))
    return Database(url, durability="normal", lock_timeout=30, read_only=read_only)


async def _open_file(path: str, expected: Mapping[str, str]) -> Database:
    database = _file_database(path, read_only=True)
    try:
        if not await database.read(lambda connection: check_schema(connection, path)):
            raise SnapshotMismatchError(f"{path} is a database, but not a snapshot of replaybuf")
        rows = await database.read(lambda connection: _all_rows(connection, info))
        found = {row["name"]: row["value"] for row in rows}
        for name, value in expected.items():
            if found.get(name) != value:
                raise SnapshotMismatchError(
                    f"{path} was saved with {name} {found.get(name)!r}, and this buffer has {name} {value!r}: "
                    f"build the buffer with {name}={found.get(name)!r} to resume from it"
                )
    except BaseException:
        await database.dispose()
        raise
    return database


async def _close_file(database: Database) -> None:
    """Leave everything in the one file: no log beside it."""
    try:
        with translated(database.url, database.lock_timeout):
            async with database.engine.connect() as connection:
                await connection.run_sync(_leave_wal)
    finally:
        await database.dispose()


def _leave_wal(connection: Connection) -> None:
    cursor: Any = connection.connection.cursor()
    cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    cursor.execute("PRAGMA journal_mode = DELETE")
    cursor.close()


def _publish(partial: str, path: str) -> None:
    """Give a complete file its name, so that it is there as a whole after a power cut, too."""
    with open(partial, "rb") as file:
        os.fsync(file.fileno())
    os.replace(partial, path)


@contextlib.contextmanager
def _partial_file(path: str) -> Iterator[str]:
    """The name of a file to write to before it gets the name `path`: one's own, so that several may save at once.

    Nothing of it is left behind, nor of those that processes of this host left when they were killed.
    """
    prefix = f"{Path(path).name}.{socket.gethostname()}-"
    for file in Path(path).parent.glob(f"{glob.escape(prefix)}*.partial"):
        if not _is_alive(file.name.removeprefix(prefix).partition("-")[0]):
            _remove(str(file))
    partial = str(Path(path).with_name(f"{prefix}{os.getpid()}-{next(_number)}.partial"))
    try:
        yield partial
    finally:
        _remove(partial)


_number = itertools.count(1)


def _is_alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:
        return True
    return True


def _same_file(path: str, other: str) -> bool:
    return os.path.exists(path) and os.path.exists(other) and os.path.samefile(path, other)


def _remove(path: str) -> None:
    for suffix in ("", "-wal", "-shm", "-journal"):
        with contextlib.suppress(FileNotFoundError):
            os.remove(path + suffix)
