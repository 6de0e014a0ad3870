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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Table, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from replaybuf.codec import Codec
from replaybuf.errors import SnapshotError, SnapshotMismatchError
from replaybuf.rollout import Status
from replaybuf.storage.sql.cursors import read_cursors, write_cursors
from replaybuf.storage.sql.database import Database
from replaybuf.storage.sql.driver import parse_url, translated
from replaybuf.storage.sql.fence import check_fence, join, set_next_ticket
from replaybuf.storage.sql.lanes import CLOCKS, Scope
from replaybuf.storage.sql.lease import return_all
from replaybuf.storage.sql.put import set_info
from replaybuf.storage.sql.rows import rescoped_key
from replaybuf.storage.sql.schema import check_schema, create_schema
from replaybuf.storage.sql.states import load_state, read_state
from replaybuf.storage.sql.tables import group, info, lane, payload, tally
from replaybuf.storage.sql.tally import read_lane_tallies
from replaybuf.storage.sql.uids import free_shift, last_uid, make_room, raise_uid
from replaybuf.tally import Tally

_BATCH_BYTES = 16 * 1024 * 1024
_BATCH_GROUPS = 1000


async def copy_to(source: Database, scope: Scope, path: str, about: Mapping[str, str]) -> None:
    """Write a snapshot of a buffer in `source` to the file `path`, over an older one."""
    if source.dialect == "sqlite" and not source.memory and _same_file(path, str(source.url.database)):
        raise SnapshotError(f"{path} is the database of this buffer itself; save into another folder")
    with _partial_file(path) as partial:
        target, held = _file_database(partial), Scope(rules=scope.rules)
        try:
            await target.write(lambda connection: create_schema(connection, path))
            async with source.transaction(write=False) as reading, target.transaction(write=True) as writing:
                await _copy_rows(reading, scope, writing, held)
                await writing.run_sync(return_all, held)
                await writing.run_sync(set_info, dict(about))
        finally:
            await _close_file(target)
        await asyncio.to_thread(_publish, partial, path)


async def copy_from(target: Database, scope: Scope, path: str, expected: Mapping[str, str]) -> None:
    """Load the snapshot at `path` into a buffer in `target`, which must be empty."""
    source = await _open_file(path, expected)
    try:
        async with target.transaction(write=True, alone=True) as writing:
            await writing.run_sync(check_fence, scope)
            await writing.run_sync(make_room, scope)
            async with source.transaction(write=False) as reading:
                await _copy_rows(reading, _FILE, writing, scope, anew=True)
    finally:
        await source.dispose()


#: A snapshot file holds one buffer.
_FILE = Scope()


async def _copy_rows(
    reading: AsyncConnection, source: Scope, writing: AsyncConnection, target: Scope, *, anew: bool = False
) -> None:
    lanes, tallies = await reading.run_sync(_read_lanes, source)
    last = await reading.run_sync(last_uid)
    next_ticket = last + 1 - (await reading.run_sync(join, source)).ticket_shift
    shift = await writing.run_sync(free_shift, last)
    if anew:
        _begin_anew(target, lanes, tallies)
    ids = await writing.run_sync(_write_lanes, target, lanes, tallies)
    after, size = 0, 1
    while True:
        groups, payloads = await reading.run_sync(_batch, source, after, size)
        if not groups:
            break
        after = groups[-1]["uid"]
        mean = sum(row["bytes"] for row in groups) / len(groups)
        size = max(1, min(_BATCH_GROUPS, int(_BATCH_BYTES / max(mean, 1))))
        for row in groups:
            row["lane"] = ids[row["lane"]]
            if shift and row["ticket"] is None:
                row["ticket"] = row["uid"]
            row["uid"] += shift
            if row["scoped_key"] is not None:
                row["scoped_key"] = rescoped_key(row["scoped_key"], target.buffer)
        for row in payloads:
            row["uid"] += shift
        await writing.run_sync(_insert_rows, group, groups)
        await writing.run_sync(_insert_rows, payload, payloads)
    await writing.run_sync(raise_uid, last + shift)
    await writing.run_sync(set_next_ticket, target, next_ticket)
    await writing.run_sync(write_cursors, target, await reading.run_sync(read_cursors, source))


def _read_lanes(connection: Connection, scope: Scope) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The lanes of a buffer, and what was counted in them."""
    lanes = [dict(row) for row in connection.execute(select(lane).where(lane.c.buffer == scope.buffer)).mappings()]
    return lanes, read_lane_tallies(connection, [row["id"] for row in lanes])


def _begin_anew(scope: Scope, lanes: Sequence[dict[str, Any]], tallies: Sequence[dict[str, Any]]) -> None:
    """Lanes without groups, whose races have not begun to run, are as in a new buffer: the races are the rules' own."""
    filled = {row["lane"] for row in tallies if row["name"] == str(Tally.SIZE) and row["amount"]}
    clocks = {key: column.name for key, column in CLOCKS.items()}
    for row in lanes:
        if row["id"] not in filled and not any(row[name] for name in (*clocks.values(), lane.c.idle_clock.name)):
            own = () if row["leased"] or row["status"] == str(Status.ARCHIVED) else scope.rules.races
            row.update({name: 0.0 if key in own else None for key, name in clocks.items()})


def _write_lanes(
    connection: Connection, scope: Scope, lanes: Sequence[dict[str, Any]], tallies: Sequence[dict[str, Any]]
) -> dict[int, int]:
    """Make the lanes in a buffer that has none; their new ids by the old ones."""
    if not lanes:
        return {}
    connection.execute(
        insert(lane),
        [{name: value for name, value in row.items() if name != "id"} | {"buffer": scope.buffer} for row in lanes],
    )
    made = select(lane.c.id, lane.c.task_name, lane.c.status, lane.c.leased).where(lane.c.buffer == scope.buffer)
    found = {(row.task_name, row.status, row.leased): row.id for row in connection.execute(made)}
    ids = {row["id"]: found[(row["task_name"], row["status"], row["leased"])] for row in lanes}
    rows = [{**row, "lane": ids[row["lane"]], "shard": 0} for row in tallies]
    _insert_rows(connection, tally, rows)
    return ids


def _insert_rows(connection: Connection, table: Table, rows: list[dict[str, Any]]) -> None:
    if rows:
        connection.execute(insert(table), rows)


def _batch(
    connection: Connection, scope: Scope, after: int, size: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    lanes = list(connection.execute(select(lane.c.id).where(lane.c.buffer == scope.buffer)).scalars())
    chosen = select(group).where(group.c.uid > after, group.c.lane.in_(lanes)).order_by(group.c.uid).limit(size)
    groups = [dict(row) for row in connection.execute(chosen).mappings()]
    if not groups:
        return [], []
    between = payload.c.uid.between(groups[0]["uid"], groups[-1]["uid"])
    wanted = select(payload).join(group, group.c.uid == payload.c.uid).where(between, group.c.lane.in_(lanes))
    return groups, [dict(row) for row in connection.execute(wanted).mappings()]


def write_state(path: str, state: dict[str, Any], about: Mapping[str, str], codec: Codec) -> None:
    """Write a portable state as a snapshot file; blocks."""

    async def write() -> None:
        with _partial_file(path) as partial:
            target = _file_database(partial)
            try:
                await target.write(lambda connection: create_schema(connection, path))
                await target.write(lambda connection: load_state(connection, _FILE, codec, state))
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
            return await source.read(lambda connection: read_state(connection, _FILE, codec))
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
        rows = await database.read(lambda connection: connection.execute(select(info)).all())
        found = {row.name: row.value for row in rows}
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
