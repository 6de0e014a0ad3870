"""Snapshots: a store's groups in a separate SQLite file, with the schema of every other replaybuf database.

Rows are copied unchanged, in batches, from one transaction of the source, so that the snapshot is consistent during
concurrent writes. Copies go between SQLite and PostgreSQL in both directions. The file is published under its name when
complete.

Payloads that are kept apart are copied whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import Table

from replaybuf.common.atomic_file import partial_file, publish
from replaybuf.common.progress import OnProgress, ProgressReporter
from replaybuf.common.redact import redact_path
from replaybuf.errors import DecodeError, SnapshotError
from replaybuf.rules.limits import Rules
from replaybuf.rules.transitions import Tally
from replaybuf.storage.places.store import Extent, FileLostError
from replaybuf.storage.sql.copies.snapshot_file import (
    BUFFER,
    check_facts,
    close_file,
    damaged,
    file_engine,
    is_damage,
    open_file,
    same_file,
    write_facts,
)
from replaybuf.storage.sql.copies.whole import BATCH_BYTES, keeping_files, read_whole
from replaybuf.storage.sql.engine.database import Database, Steps
from replaybuf.storage.sql.engine.errors import translated
from replaybuf.storage.sql.engine.transaction import DEFAULT, Scope, Transaction
from replaybuf.storage.sql.schema.create import create_schema
from replaybuf.storage.sql.schema.tables import group, lane, payload, tally
from replaybuf.storage.sql.statements.buffer_facts import last_uid, read_cursors
from replaybuf.storage.sql.statements.checkpoints import check_no_groups, free_shift, make_room, raise_uid
from replaybuf.storage.sql.statements.counts import read_lane_tallies
from replaybuf.storage.sql.statements.cursors import write_cursors
from replaybuf.storage.sql.statements.fence import check_fence, join, next_ticket, set_next_ticket
from replaybuf.storage.sql.statements.files import name_files
from replaybuf.storage.sql.statements.lanes import all_lanes
from replaybuf.storage.sql.statements.leases import return_all
from replaybuf.storage.sql.statements.rows import rescoped_key
from replaybuf.values.codec.payload import Codec

if TYPE_CHECKING:
    from replaybuf.storage.sql.tasks.file_batch import FileBatch
    from replaybuf.storage.sql.tasks.payload_files import PayloadFiles

_BATCH_GROUPS = 1000

T = TypeVar("T")
Row = dict[str, Any]
#: The columns of a row of `rb_payload` with a whole payload.
_INSIDE: Row = {"file": None, "size": None}


async def copy_to(
    source: Database,
    scope: Scope,
    path: str,
    about: Mapping[str, str],
    progress: OnProgress | None = None,
) -> None:
    """Write a snapshot of a buffer in `source` to the file `path`, replacing an older one."""
    if source.path is not None and same_file(path, source.path):
        raise SnapshotError(f"{path} is the database of this buffer itself; save into another folder")
    with partial_file(path) as partial:
        target, held = file_engine(partial), Scope(rules=scope.rules)
        try:
            await target.write(lambda tx: create_schema(tx, path))
            async with (
                keeping_files(source, scope) as kept,
                source.transaction(scope, write=False) as reading,
                target.transaction(held, write=True) as writing,
            ):
                ends = _CopyEnd(source, scope, reading), _CopyEnd(target, held, writing)
                places = await ends[0].run(Transaction.places)

                async def convert(rows: list[Row]) -> list[Row]:
                    payloads = await read_whole([row["data"] for row in rows], places, kept=kept)
                    return [row | {"data": data} | _INSIDE for row, data in zip(rows, payloads, strict=True)]

                await _copy_rows(*ends, convert, progress)
                await ends[1].run(return_all)
                await write_facts(ends[1].run, {**about, BUFFER: scope.buffer or ""})
        finally:
            await close_file(target)
        try:
            await asyncio.to_thread(publish, partial, path)
        except OSError as error:
            raise SnapshotError(f"the snapshot {redact_path(path)} can't be written: {error.strerror}") from error


async def copy_from(
    target: Database,
    scope: Scope,
    path: str,
    expected: Mapping[str, str],
    progress: OnProgress | None,
    codec: Codec,
    files: PayloadFiles,
) -> None:
    """Load the snapshot at `path` into an empty buffer in `target`; `files` are the buffer's."""
    source = await open_file(path, expected)
    try:
        async with source.transaction(write=False) as reading:
            snapshot = _Loading(_CopyEnd(source, DEFAULT, reading, path), codec, files)
            payloads = await check_facts(snapshot.end.run, path)
            while True:
                try:
                    if files.writes:
                        await target.read(_check_room, scope)
                        await snapshot.write_apart()
                    async with target.transaction(scope, write=True, alone=True) as writing:
                        await writing.run(check_fence)
                        await writing.run(make_room)
                        ends = snapshot.end, _CopyEnd(target, scope, writing)
                        if await _copy_rows(*ends, snapshot.converted, progress, loads=True) != payloads:
                            raise damaged(path, "not all of its groups can be found")
                        await writing.run(name_files, snapshot.extents.values())
                    return
                except FileLostError:
                    continue
    finally:
        await source.dispose()


def _check_room(tx: Transaction) -> None:
    check_fence(tx)
    check_no_groups(tx)


class _Loading:
    """A snapshot being loaded. `extents` are the payloads written to files of the buffer, by uid."""

    def __init__(self, end: _CopyEnd, codec: Codec, files: PayloadFiles) -> None:
        self.end = end
        self.extents: dict[int, Extent] = {}
        self._codec = codec
        self._files = files

    async def write_apart(self) -> None:
        """Write the payloads that are to be kept apart, before the transaction that refers to them."""
        self.extents, after, size = {}, 0, 1
        while batch := self._files.batch():
            groups, rows = await self.end.run(_batch, after, size, batch.threshold)
            if not groups:
                return
            after, size = groups[-1]["uid"], _next_size(groups)
            self.extents |= await asyncio.to_thread(self._add, batch, rows)

    def _add(self, batch: FileBatch, rows: Sequence[Row]) -> dict[int, Extent]:
        extents = {}
        for row in rows:
            with suppress(DecodeError):  # a damaged payload stays in the database
                split = self._codec.split(row["data"])
                if split.size >= batch.threshold:
                    extents[row["uid"]] = batch.add(split)
        batch.flush()
        return extents

    async def converted(self, rows: list[Row]) -> list[Row]:
        """Return rows of `rb_payload` as rows of the buffer."""
        return [self._named(row) if row["uid"] in self.extents else row for row in rows]

    def _named(self, row: Row) -> Row:
        extent = self.extents[row["uid"]]
        head = self._codec.split(row["data"]).head
        return row | {"data": head + extent.packed(), "file": extent.file, "size": extent.size}


@dataclass(frozen=True, slots=True)
class _CopyEnd:
    """One end of a copy: a buffer, with a transaction of its database. Errors are reported as errors of this end."""

    engine: Database
    scope: Scope
    steps: Steps
    snapshot: str | None = None  # the path, where a snapshot is read

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        try:
            with translated(self.engine.url, self.engine.lock_timeout):
                return await self.steps.run(function, *args)
        except Exception as error:
            if self.snapshot is None or not is_damage(error):
                raise
            raise damaged(self.snapshot, error) from error


async def _copy_rows(
    source: _CopyEnd,
    target: _CopyEnd,
    convert: Callable[[list[Row]], Awaitable[list[Row]]],
    progress: OnProgress | None,
    *,
    loads: bool = False,
) -> int:
    """Copy a buffer, and return the number of its payloads.

    `convert` returns rows of `rb_payload` as they are stored in the copy, which `loads` a snapshot or is one.
    """
    lanes, tallies = await source.run(_read_lanes)
    last, ticket = await source.run(_read_ends)
    shift = await target.run(free_shift, last)
    if loads:
        _begin_anew(target.scope.rules, lanes)
    ids = await target.run(write_lanes, lanes)
    await target.run(write_tallies, tallies, ids)
    there = (str(Tally.SIZE), str(Tally.LEASED))
    reporter = ProgressReporter(progress, sum(int(row["amount"]) for row in tallies if row["name"] in there))
    after, size, copied = 0, 1, 0
    while True:
        groups, payloads = await source.run(_batch, after, size)
        if not groups:
            break
        after, size = groups[-1]["uid"], _next_size(groups)
        converted = await convert(payloads)
        copied += len(converted)
        for row in groups:
            row["lane"] = ids[row["lane"]]
            row["made_from"], row["since"] = None, 0  # checkpoints aren't copied
            if shift and row["ticket"] is None:
                row["ticket"] = row["uid"]
            row["uid"] += shift
            if row["scoped_key"] is not None:
                row["scoped_key"] = rescoped_key(row["scoped_key"], target.scope.buffer)
        for row in converted:
            row["uid"] += shift
        await target.run(_check_sizes, converted)
        await target.run(_insert_rows, group, groups)
        await target.run(_insert_rows, payload, converted)
        reporter.add(len(groups), _bytes_of(groups))
    await target.run(raise_uid, last + shift)
    await target.run(set_next_ticket, ticket)
    await target.run(write_cursors, await source.run(lambda tx: read_cursors(tx, tx.scope.buffer or "")))
    reporter.finish()
    return copied


def _bytes_of(groups: Sequence[Row]) -> int:
    return sum(row["bytes"] for row in groups)


def _next_size(groups: Sequence[Row]) -> int:
    """Return the number of groups of the next batch, from the sizes of these."""
    return max(1, min(_BATCH_GROUPS, int(BATCH_BYTES * len(groups) / max(_bytes_of(groups), 1))))


def _read_lanes(tx: Transaction) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the lanes of a buffer, and their tallies."""
    lanes = [row._asdict() for row in all_lanes(tx)]
    return lanes, read_lane_tallies(tx, [row["id"] for row in lanes])


def _read_ends(tx: Transaction) -> tuple[int, int]:
    """Return the last uid, and the ticket of the buffer's next group."""
    join(tx)
    return last_uid(tx), next_ticket(tx)


def _begin_anew(rules: Rules, lanes: Sequence[dict[str, Any]]) -> None:
    """Let lanes run no race if it isn't that of the buffer's own rules: their next random draw begins one."""
    key, seed = rules.random or (None, None)
    for row in lanes:
        if key is not None and (row["race"] != key or (seed is not None and row["seed"] != str(seed))):
            row.update(race=None)


def write_lanes(tx: Transaction, lanes: Sequence[dict[str, Any]]) -> dict[int, int]:
    """Create lanes in a buffer without any; return their new ids by the old ones."""
    if not lanes:
        return {}
    rows = [{name: value for name, value in row.items() if name != "id"} for row in lanes]
    _insert_rows(tx, lane, [row | {"buffer": tx.scope.buffer} for row in rows])
    found = {(row.task_name, row.status, row.leased): row.id for row in all_lanes(tx)}
    return {row["id"]: found[(row["task_name"], row["status"], row["leased"])] for row in lanes}


def write_tallies(tx: Transaction, tallies: Sequence[dict[str, Any]], ids: Mapping[int, int]) -> None:
    """Write the tallies of these lanes; `ids` has the lanes' new ids by the old ones."""
    _insert_rows(tx, tally, [{**row, "lane": ids[row["lane"]], "shard": 0} for row in tallies])


def _insert_rows(tx: Transaction, table: Table, rows: list[dict[str, Any]]) -> None:
    names = list(rows[0]) if rows else []
    insert = f"INSERT INTO {table.name} ({', '.join(names)}) VALUES ({', '.join(f':{name}' for name in names)})"  # noqa: S608
    tx.each(insert, [[row[name] for name in names] for row in rows])


def _check_sizes(tx: Transaction, payloads: Sequence[Mapping[str, Any]]) -> None:
    limit = tx.dialect.row_limit(tx)
    for row in payloads:
        limit.check(f"group {row['uid']}", (row["data"], row["prompt"]))


def _batch(tx: Transaction, after: int, size: int, least: int = 0) -> tuple[list[Row], list[Row]]:
    """Return the next groups of at least `least` bytes, as rows of `rb_group` and `rb_payload`."""
    ours = {"lanes": [row.id for row in all_lanes(tx)], "least": least}
    groups = _rows(tx, group, "g", _GROUPS, after=after, count=size, **ours)
    if not groups:
        return [], []
    for row in groups:
        row["mixed"] = bool(row["mixed"])
    payloads = _rows(tx, payload, "p", _PAYLOADS, first=groups[0]["uid"], last=groups[-1]["uid"], **ours)
    for row in payloads:
        if not isinstance(row["data"], bytes):  # changed by hand, or damaged: copied as an undecodable payload
            row["data"] = str(row["data"]).encode()
    return groups, payloads


_OURS = "g.lane {in:lanes} AND g.bytes >= :least"
_GROUPS = f"FROM rb_group g WHERE uid > :after AND {_OURS} ORDER BY uid LIMIT :count"
_PAYLOADS = f"FROM rb_payload p JOIN rb_group g ON g.uid = p.uid WHERE p.uid BETWEEN :first AND :last AND {_OURS}"


def _rows(tx: Transaction, table: Table, alias: str, source: str, **values: Any) -> list[Row]:
    """Return rows of a table by column, with JSON as text."""
    names = [column.name for column in table.columns]
    found = tx.tuples(f"SELECT {', '.join(f'{alias}.{name}' for name in names)} {source}", **values)
    return [dict(zip(names, row, strict=True)) for row in found]
