"""Snapshots: a store's groups in a separate SQLite file, with the schema of every other replaybuf database.

Rows are copied unchanged, in batches, from one transaction of the source, so that the snapshot is consistent during
concurrent writes. Copies go between SQLite and PostgreSQL in both directions. The file is published under its name when
complete.

Payloads that are kept apart are copied whole, and their files are kept meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from sqlalchemy import Table

from replaybuf.common.file_systems import partial_file, publish
from replaybuf.common.progress import OnProgress, ProgressReporter
from replaybuf.common.redact import redact_path
from replaybuf.errors import DecodeError, ReplayBufError, SnapshotError
from replaybuf.rules.limits import Rules
from replaybuf.rules.transitions import Tally
from replaybuf.storage.decoding import Places, extent_of, joined, read_tails
from replaybuf.storage.places.store import EXTENT_BYTES
from replaybuf.storage.sql.copies.snapshot_file import (
    BUFFER,
    check_facts,
    check_replaceable,
    close_file,
    damaged,
    file_engine,
    is_damage,
    open_file,
    same_file,
    write_facts,
)
from replaybuf.storage.sql.engine import open_database
from replaybuf.storage.sql.engine.database import Database, Step
from replaybuf.storage.sql.engine.dialect import check_row
from replaybuf.storage.sql.engine.driver_errors import translated
from replaybuf.storage.sql.engine.transaction import DEFAULT, Scope, Transaction
from replaybuf.storage.sql.schema.create import create_schema
from replaybuf.storage.sql.schema.tables import group, lane, payload, prompt, tally
from replaybuf.storage.sql.statements.buffer_facts import last_uid, read_cursors
from replaybuf.storage.sql.statements.checkpoints import make_room, raise_uid
from replaybuf.storage.sql.statements.counts import read_lane_tallies
from replaybuf.storage.sql.statements.fence import check_fence, join, next_ticket, set_next_ticket
from replaybuf.storage.sql.statements.files import SILENT_SECONDS, keep_files
from replaybuf.storage.sql.statements.lanes import all_lanes
from replaybuf.storage.sql.statements.leases import return_all
from replaybuf.storage.sql.statements.ledger import STATE, read_page, write_cursors
from replaybuf.storage.sql.statements.new_rows import insert_rows
from replaybuf.storage.sql.statements.rows import rescoped_key

_BATCH_GROUPS = 1000

#: Bytes of payloads in memory at a time.
_BATCH_BYTES = 16 << 20
_RENEW_SECONDS = SILENT_SECONDS / 6
#: The copy waits so long for a renewal, which the next batch tries again.
_BRIEF_SECONDS = 1.0
#: Timeout for reading a batch's payloads from a place, in seconds: files are kept until then.
_PATIENCE = SILENT_SECONDS * 3 / 4

T = TypeVar("T")
Row = dict[str, Any]
#: The columns of a row of `rb_payload` with a whole payload.
_NO_FILE: Row = {"file": None, "size": None}


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
    await asyncio.to_thread(check_replaceable, path)
    with partial_file(path) as partial:
        target, file_scope, keeper = file_engine(partial), Scope(rules=scope.rules), _FileKeeper(source, scope)
        try:
            await target.write(lambda tx: create_schema(tx, path))
            await keeper.begin()
            async with (
                source.transaction(scope, write=False) as reading,
                target.transaction(file_scope, write=True) as writing,
            ):
                ends = _CopyEnd(source, scope, reading), _CopyEnd(target, file_scope, writing)
                places = await ends[0].run(Transaction.places)

                async def convert(rows: list[Row]) -> list[Row]:
                    await keeper.renew(at_end=not rows)
                    payloads = await _read_whole([row["data"] for row in rows], places)
                    return [row | {"data": data} | _NO_FILE for row, data in zip(rows, payloads, strict=True)]

                await _copy_rows(*ends, convert, progress)
                await ends[1].run(join)
                await ends[1].run(return_all)
                await write_facts(ends[1].run, {**about, BUFFER: scope.buffer or ""})
        finally:
            await close_file(target)
        try:
            await asyncio.to_thread(publish, partial, path)
        except OSError as error:
            raise SnapshotError(f"the snapshot {redact_path(path)} can't be written: {error.strerror}") from error


async def copy_from(
    target: Database, scope: Scope, path: str, expected: Mapping[str, str], progress: OnProgress | None
) -> None:
    """Load the snapshot at `path` into an empty buffer in `target`, all payloads into the database."""
    source = await open_file(path, expected)
    try:
        async with source.transaction(write=False) as reading:
            end = _CopyEnd(source, DEFAULT, reading, path)
            payloads = await check_facts(end.run, path)
            async with target.transaction(scope, write=True, alone=True) as writing:
                await writing(check_fence)
                await writing(make_room)
                if await _copy_rows(end, _CopyEnd(target, scope, writing), None, progress) != payloads:
                    raise damaged(path, "not all of its groups can be found")
    finally:
        await source.dispose()


@dataclass(frozen=True, slots=True)
class _CopyEnd:
    """One end of a copy: a buffer, with a transaction of its database. Errors are reported as errors of this end."""

    engine: Database
    scope: Scope
    step: Step
    snapshot: str | None = None  # the path, where a snapshot is read

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        try:
            with translated(self.engine.access):
                return await self.step(function, *args)  # type: ignore[no-any-return]
        except Exception as error:
            if self.snapshot is not None and is_damage(error):
                raise damaged(self.snapshot, error) from error
            raise


async def _copy_rows(
    source: _CopyEnd,
    target: _CopyEnd,
    convert: Callable[[list[Row]], Awaitable[list[Row]]] | None,
    progress: OnProgress | None,
) -> int:
    """Copy a buffer, and return the number of its payloads.

    `convert` returns rows of `rb_payload` as they are stored in a snapshot, and is called without any after the last;
    None where a snapshot is loaded.
    """
    lanes, tallies = await source.run(_read_lanes)
    last, ticket = await source.run(_read_ends)
    shift = await target.run(last_uid)
    if convert is None:
        _clear_races(target.scope.rules, lanes)
    ids = await target.run(write_lanes, lanes)
    await target.run(insert_rows, tally, [{**row, "lane": ids[row["lane"]], "shard": 0} for row in tallies])
    counted = (str(Tally.SIZE), str(Tally.LEASED))
    reporter = ProgressReporter(progress, sum(int(row["amount"]) for row in tallies if row["name"] in counted))
    after, size, copied = 0, 1, 0
    while True:
        groups, payloads = await source.run(_batch, after, size)
        if not groups:
            if convert is not None:
                await convert([])
            break
        after, size = groups[-1]["uid"], _next_size(groups)
        converted = payloads if convert is None else await convert(payloads)
        copied += len(converted)
        for row in groups:
            row["lane"] = ids[row["lane"]]
            row["made_from"], row["since"] = None, 0  # checkpoints aren't copied
            if shift and row["ticket"] is None:
                row["ticket"] = row["uid"]
            row["uid"] += shift
            if row["scoped_key"] is not None:
                row["scoped_key"] = rescoped_key(row["scoped_key"], target.scope.buffer, shift)
        for row in converted:
            row["uid"] += shift
            check_row(f"group {row['uid']}", (row["data"], row["prompt"]))
        await target.run(insert_rows, group, groups)
        await target.run(insert_rows, payload, converted)
        reporter.add(len(groups), _bytes_of(groups))
    await target.run(raise_uid, last + shift)
    await target.run(set_next_ticket, ticket)
    cursors = await source.run(lambda tx: read_cursors(tx, tx.scope.buffer or ""))
    await target.run(write_cursors, cursors)
    for cursor in cursors:
        await _copy_prompts(source, target, cursor.name)
    reporter.finish()
    return copied


async def _copy_prompts(source: _CopyEnd, target: _CopyEnd, name: str) -> None:
    after, shared = -1, {"buffer": target.scope.buffer, "name": name, "since": 0, "changed": 0}
    while rows := await source.run(read_page, name, after):
        after = rows[-1][0]
        await target.run(insert_rows, prompt, [dict(zip(STATE, row, strict=True)) | shared for row in rows])


def _bytes_of(groups: Sequence[Row]) -> int:
    return sum(row["bytes"] for row in groups)


def _next_size(groups: Sequence[Row]) -> int:
    """Return the number of groups of the next batch, from the sizes of these."""
    return max(1, min(_BATCH_GROUPS, int(_BATCH_BYTES * len(groups) / max(_bytes_of(groups), 1))))


def _read_lanes(tx: Transaction) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the lanes of a buffer, and their tallies."""
    lanes = all_lanes(tx)
    return lanes, read_lane_tallies(tx, [row["id"] for row in lanes])


def _read_ends(tx: Transaction) -> tuple[int, int]:
    """Return the last uid, and the ticket of the buffer's next group."""
    join(tx)
    return last_uid(tx), next_ticket(tx)


def _clear_races(rules: Rules, lanes: Sequence[dict[str, Any]]) -> None:
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
    insert_rows(tx, lane, [row | {"buffer": tx.scope.buffer} for row in rows])
    ids = {(row["task_name"], row["status"], row["leased"]): row["id"] for row in all_lanes(tx)}
    return {row["id"]: ids[(row["task_name"], row["status"], row["leased"])] for row in lanes}


def _batch(tx: Transaction, after: int, size: int) -> tuple[list[Row], list[Row]]:
    """Return the next groups as rows of `rb_group` and `rb_payload`."""
    lanes = [row["id"] for row in all_lanes(tx)]
    groups = _rows(tx, group, "g", _GROUPS, after=after, count=size, lanes=lanes)
    if not groups:
        return [], []
    for row in groups:
        row["mixed"] = bool(row["mixed"])
    payloads = _rows(tx, payload, "p", _PAYLOADS, first=groups[0]["uid"], last=groups[-1]["uid"], lanes=lanes)
    for row in payloads:
        if not isinstance(row["data"], bytes):  # changed by hand, or damaged: copied as an undecodable payload
            row["data"] = str(row["data"]).encode()
    return groups, payloads


_OWN_LANES = "g.lane {in:lanes}"
_GROUPS = f"FROM rb_group g WHERE uid > :after AND {_OWN_LANES} ORDER BY uid LIMIT :count"
_PAYLOADS = f"FROM rb_payload p JOIN rb_group g ON g.uid = p.uid WHERE p.uid BETWEEN :first AND :last AND {_OWN_LANES}"


def _rows(tx: Transaction, table: Table, alias: str, source: str, **values: Any) -> list[Row]:
    """Return rows of a table by column, with JSON as text."""
    names = [column.name for column in table.columns]
    rows = tx.tuples(f"SELECT {', '.join(f'{alias}.{name}' for name in names)} {source}", **values)
    return [dict(zip(names, row, strict=True)) for row in rows]


# Whole payloads


class _FileKeeper:
    """Keeps all files of a database, so that payloads can be read that leave meanwhile."""

    def __init__(self, database: Database, scope: Scope) -> None:
        self._database, self._scope = database, scope
        self._renewed_at: float | None = None  # None while there are no files

    async def begin(self) -> None:
        """Keep the existing files from now on, which writes to the database if it has any. Raises AccessError."""
        if (await self._database.read(Transaction.places, self._scope))[0]:
            await self._keep(None)

    async def renew(self, *, at_end: bool = False) -> None:
        """Keep them on if that is due, or at the end.

        Raises SnapshotError if they weren't kept all the time, so that some may have been deleted.
        """
        if self._renewed_at is None or not (at_end or time.monotonic() > self._renewed_at + _RENEW_SECONDS):
            return
        try:
            kept = await self._keep(None if at_end else _BRIEF_SECONDS)
        except ReplayBufError:
            if at_end:
                raise
            return  # the next batch tries again
        if not kept:
            raise SnapshotError(
                f"the database didn't answer for {SILENT_SECONDS:g} s, and what is kept apart of payloads may have "
                "been deleted meanwhile: copy again"
            )

    async def _keep(self, patience: float | None) -> bool:
        access = self._database.access
        writing = open_database(replace(access, read_only=False)) if access.read_only else self._database
        try:
            kept = await writing.write(keep_files, self._scope, patience=patience)
        finally:
            if writing is not self._database:
                await writing.dispose()
        self._renewed_at = time.monotonic()
        return kept


async def _read_whole(payloads: Sequence[bytes], places: Places) -> list[bytes]:
    """Return payloads with their arrays; a payload whose file is damaged is only its head, as stored in the database.

    Raises PayloadStoreError where a place can't be reached.
    """
    whole_payloads = []
    for stored, tail in zip(payloads, await read_tails(payloads, places, _PATIENCE), strict=True):
        try:
            whole_payloads.append(joined(stored, tail))
        except DecodeError:
            whole_payloads.append(stored[:-EXTENT_BYTES] if extent_of(stored) else stored)
    return whole_payloads
