"""Files of an open buffer's payloads that are kept apart: written before their commit, deleted when no group is left.

The place of this process is claimed, and recorded for other processes; all places can be read. Once in a while a place
is listed for files that no commit named.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from replaybuf.common.file_systems import sync_folder
from replaybuf.errors import PayloadStoreError, ReplayBufError
from replaybuf.storage.decoding import PATIENCE, Deferral, in_thread, places_of, tails_of
from replaybuf.storage.places.owners import claim, open_known, open_place
from replaybuf.storage.places.store import MARKER, Extent, FileBatch, PlaceStore, file_name, file_number
from replaybuf.storage.sql.engine.database import Database
from replaybuf.storage.sql.engine.sqlite import sync_wal
from replaybuf.storage.sql.engine.transaction import Scope, Transaction
from replaybuf.storage.sql.statements import files as statements
from replaybuf.storage.sql.statements.files import READING_SECONDS, home_of
from replaybuf.storage.sql.statements.new_rows import EncodedGroup
from replaybuf.storage.sql.statements.rows import GroupRow
from replaybuf.storage.sql.tasks.handles import handles_of
from replaybuf.values.codec.payload import Codec

#: Files that are deleted at once.
_DELETED_AT_ONCE = 256
#: How often a process that doesn't write looks for files to delete, and all try places again that didn't answer.
_CHECK_SECONDS = 10.0
#: How often a place is listed; files that were written in the last day may yet be named.
LISTING_SECONDS, YOUNG_SECONDS = 3600.0, 86_400.0
#: How long closing waits for a place that doesn't answer; other processes delete the rest.
_CLOSING_SECONDS = 3.0

_logger = logging.getLogger("replaybuf.storage.places")

T = TypeVar("T")


class PayloadFiles:
    """The files of an open buffer.

    `place` is where this process stores new payloads, None for the database; existing payloads are read from their own
    places, which are opened on demand. Where commits are fsynced, so are payloads, before the transaction that names
    them begins. Reads and writes time out after the reconnect timeout, or `PATIENCE` if that is 0.
    """

    def __init__(self, engine: Database, codec: Codec, place: str | None, threshold: int) -> None:
        self._engine = engine
        self._codec = codec
        self._place = place
        self._threshold = max(threshold, 1)  # a payload without a tail stays in the database
        self._sync = engine.dialect.is_remote or engine.access.durability == "full"
        self._scope = Scope()
        self._patience = min(engine.access.reconnect_timeout or PATIENCE, READING_SECONDS / 2)
        self._stores: dict[int, PlaceStore] = {}
        self._own_store: tuple[int, PlaceStore] | None = None
        self._unreachable_places: set[int] = set()
        self._is_due = False  # there may be files to delete
        self._tidy_task: asyncio.Task[None] | None = None
        self._read_uids: list[int] = []  # removed groups, whose payloads were read
        self._unnamed_files: set[int] = set()  # files that this process wrote for nothing
        self._check_at = 0.0
        self._list_at = time.monotonic() + LISTING_SECONDS

    @property
    def writes(self) -> bool:
        """Whether this process keeps payloads apart."""
        return self._own_store is not None

    # Beginning and end (database's thread)

    async def prepare(self, scope: Scope, *, writes: bool) -> None:
        """Open the place for payloads if any is to be written; a new place is claimed for this database."""
        self._scope = scope
        if self._place is not None and self._own_store is None and writes:
            self._own_store = await self._open_own(self._place)

    async def close(self) -> None:
        """Release everything; other processes delete what is left to be deleted."""
        try:
            await self._release_read()
            if self._tidy_task is not None:
                await asyncio.wait([self._tidy_task], timeout=_CLOSING_SECONDS)
                self._tidy_task.cancel()
            async with asyncio.timeout(_CLOSING_SECONDS):
                while self.writes and await self._delete():
                    pass
        except (ReplayBufError, TimeoutError) as error:
            _logger.debug("files were left: %s", error)
        stores = [*self._stores.values()]
        if stores:  # at the end of the interpreter no thread can be started
            with contextlib.suppress(TimeoutError, RuntimeError):
                await asyncio.wait_for(asyncio.to_thread(_close_all, stores), _CLOSING_SECONDS)

    # Writing

    def batch(self) -> FileBatch | None:
        """Return a batch for payloads to be written now, None if they stay in the database."""
        return None if self._own_store is None else FileBatch(self._threshold, *self._own_store, self._sync)

    async def write(self, batch: FileBatch | None) -> None:
        """Write a batch, in another thread. Raises PayloadStoreError, also if that hangs, and StorageError."""
        if batch is not None:
            await self._in_thread(batch.flush)

    def discard(self, groups: Iterable[EncodedGroup], stored: Iterable[EncodedGroup] = ()) -> None:
        """Let the files of groups be deleted that only some of them were stored; their transaction must have ended."""
        self._unnamed_files |= _files_of(groups) - _files_of(stored)

    def read(self, uids: Iterable[int]) -> None:
        """Record that payloads of removed groups were read, so that they may be swept."""
        self._read_uids += uids

    def unread(self, uids: Iterable[int]) -> None:
        """Record that groups are returned, so that the payloads are kept until the next reader has them."""
        returned = set(uids)
        self._read_uids = [uid for uid in self._read_uids if uid not in returned]

    # Maintenance (database's thread)

    async def maintain(self, changed: bool) -> bool:
        """Do one small step of due maintenance; return whether more is due, also for the sweep.

        `changed`: files may be empty by now. They are deleted in a task, since sweeps go on though a place hangs.
        """
        released, now = await self._release_read(), time.monotonic()
        if now >= self._check_at:
            self._check_at = now + _CHECK_SECONDS
            self._unreachable_places.clear()
            self._is_due = True
        self._is_due |= released or (changed and self.writes)
        if self._is_due and (self._tidy_task is None or self._tidy_task.done()):
            self._is_due = False
            self._tidy_task = asyncio.get_running_loop().create_task(self._tidy())
        return released or self._is_due

    async def _tidy(self) -> None:
        """Delete what can be deleted. Raises nothing: the next time may succeed."""
        try:
            if self.writes and time.monotonic() >= self._list_at:
                self._list_at = time.monotonic() + LISTING_SECONDS
                await self._delete_orphans()
            self._is_due |= await self._delete()
        except Exception as error:
            _logger.debug("files were not deleted: %s", error, exc_info=not isinstance(error, ReplayBufError))

    async def _release_read(self) -> bool:
        """Let the sweep delete payloads that were read; return whether there were any."""
        uids, self._read_uids = self._read_uids, []
        if uids:
            try:
                await self._write(partial(statements.keep_for_reading, uids=uids, seconds=0.0))
            except BaseException:
                self._read_uids += uids
                raise
        return bool(uids)

    async def _delete(self) -> bool:
        """Delete files that no group has any more; return whether there may be more."""
        empty = partial(statements.empty_files, limit=_DELETED_AT_ONCE, but=sorted(self._unreachable_places))
        by_place = await self._engine.read(empty, self._scope)
        unnamed, self._unnamed_files = self._unnamed_files, set()
        if unnamed and self._own_store is not None:
            by_place.setdefault(self._own_store[0], []).extend(unnamed)
        for number, files in by_place.items():
            try:
                await self._delete_from(number, files)
            except (ReplayBufError, KeyError) as error:  # other places come first, and this one again later
                _logger.debug("files were not deleted: %s", error)
                self._unreachable_places.add(number)
            else:
                await self._write(partial(statements.forget, numbers=files))
        return sum(map(len, by_place.values())) >= _DELETED_AT_ONCE

    async def _delete_from(self, number: int, files: Iterable[int]) -> None:
        """Delete files in a place, if it is this database's. Raises PayloadStoreError, ConfigError."""
        await self._open_places({number})
        store = self._stores[number]
        if await self._claimed(store) != number:
            raise PayloadStoreError(f"{store.url} has lost its {MARKER}")
        await self._in_thread(partial(store.delete, [file_name(file) for file in files]))

    async def _delete_orphans(self) -> None:
        """Delete files that no commit named, and were written long ago: their writers died, or are about to commit."""
        assert self._own_store is not None
        number, store = self._own_store
        latest = time.time() - YOUNG_SECONDS

        def list_old() -> list[str]:
            store.check_there()
            return [name for name, written_at in store.files() if written_at <= latest]

        listed = await self._in_thread(list_old)
        old = [file for name in listed if (file := file_number(name)) is not None]
        unknown = await self._engine.read(partial(statements.unknown, files=old), self._scope)
        orphans = await self._write(partial(statements.record_orphans, number=number, files=unknown)) if unknown else []
        if orphans:
            await self._delete_from(number, orphans)
            _logger.info("%d files in %s that no commit had named were deleted", len(orphans), store.url)

    async def _write(self, function: Callable[[Transaction], Any]) -> Any:
        return await self._engine.write(function, self._scope)

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await in_thread(function, self._patience, self._place or "")

    # Reading

    async def fetch(self, rows: Iterable[GroupRow], deferred: frozenset[str] = frozenset()) -> None:
        """Read the tails of groups whose payloads are kept apart, in another thread.

        Arrays in the fields `deferred` are left out. A damaged tail becomes an error when it is decoded. Raises
        PayloadStoreError if a place doesn't answer in time.
        """
        apart = [row for row in rows if row.tail is None and row.is_apart]
        if not apart:
            return
        payloads = [row.payload for row in apart]
        await self._open_places(places := places_of(payloads))
        parts = partial(self._codec.wanted, deferred=deferred) if deferred else None
        read = partial(tails_of, payloads, self._stores, parts)
        names = ", ".join(sorted(self._stores[place].url for place in places if place in self._stores))
        for row, tail in zip(apart, await in_thread(read, self._patience, names), strict=True):
            row.tail = tail

    async def _open_places(self, numbers: Collection[int]) -> None:
        """Open the places of these ids that the database knows. Raises PayloadStoreError."""
        unopened = set(numbers) - self._stores.keys()
        if not unopened:
            return
        places, _ = await self._engine.read(Transaction.places, self._scope)
        for number in unopened:
            if number in places:
                url, database = places[number], self._scope.database or ""
                reach = partial(open_known, url, database, number, self._patience)
                self._stores[number] = await in_thread(reach, self._patience, url)

    async def check_places(self, rows: Iterable[GroupRow]) -> None:
        """Check that damaged payloads weren't read from another place at our place's URL. Raises PayloadStoreError."""
        for number in places_of(row.payload for row in rows) & self._stores.keys():
            store = self._stores[number]
            await in_thread(store.check_there, self._patience, store.url)

    def deferral(self, deferred: frozenset[str]) -> Deferral | None:
        """Return the maker of handles for the arrays in these fields, None if there are no fields."""
        if not deferred:
            return None
        places = {number: store.url for number, store in self._stores.items()}
        return Deferral(deferred, partial(handles_of, places))

    # The place of this process

    async def _open_own(self, url: str) -> tuple[int, PlaceStore]:
        """Return the id of the place at a configured URL, and the place, claimed for this database if it is new.

        The URL is recorded for processes without one, which use the last one recorded.
        """
        engine, scope, store = self._engine, self._scope, open_place(url, self._patience)
        await in_thread(store.prepare, self._patience, url)
        number = await self._claimed(store)
        if number is None:
            new = await engine.write(partial(statements.add_place, url=store.url), scope)
            if engine.path is not None:
                await asyncio.to_thread(_make_durable, engine.path)
            number = await self._claimed(store, new)  # or that of a faster process
            if number is None:
                raise PayloadStoreError(
                    f"{store.url} has lost its {MARKER}, and this database has payloads there: mount the place that it "
                    "wrote to or, if this is it, write the marker again (replaybuf doctor URL --take-over); to keep "
                    "new ones elsewhere, name another place (payloads=)"
                )
        if (await engine.read(Transaction.places, scope))[0].get(number) != store.url:
            await engine.write(partial(statements.record_url, number=number, url=store.url), scope)
        self._stores[number] = store
        return number, store

    async def _claimed(self, store: PlaceStore, number: int | None = None) -> int | None:
        """Return the id of a place, which is claimed for this database unless another one, or a copy of it, has it.

        None if it has none yet and `number` is None. Raises ConfigError.
        """
        home = await self._engine.read(home_of, self._scope)
        return await in_thread(
            partial(claim, store, self._scope.database or "", number, home), self._patience, store.url
        )


def _files_of(groups: Iterable[EncodedGroup]) -> set[int]:
    extents: Iterable[Extent | None] = (encoded.extent for encoded in groups)
    return {extent.file for extent in extents if extent is not None}


def _close_all(stores: Iterable[PlaceStore]) -> None:
    for store in stores:
        store.close()


def _make_durable(path: str) -> None:
    """Sync what was committed to a SQLite file: else a power cut might leave a place of a database that never was."""
    with contextlib.suppress(FileNotFoundError):  # there is no WAL: all was copied, and synced
        sync_wal(f"{path}-wal")
    sync_folder(Path(path).absolute().parent)
