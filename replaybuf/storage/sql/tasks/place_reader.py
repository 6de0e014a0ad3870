"""Places of an open buffer's payloads: its own is claimed, and recorded for other processes; all can be read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Iterable
from functools import partial
from pathlib import Path

from replaybuf.common.atomic_file import sync_folder
from replaybuf.errors import PayloadStoreError
from replaybuf.storage.decoding import Deferral, in_thread, places_of, tails_of
from replaybuf.storage.places.owners import claim, local_url, open_place, recognise, register_url
from replaybuf.storage.places.store import MARKER, PlaceStore
from replaybuf.storage.sql.engine.database import Database
from replaybuf.storage.sql.engine.sqlite import sync_wal
from replaybuf.storage.sql.engine.transaction import Scope, Transaction
from replaybuf.storage.sql.statements import files as statements
from replaybuf.storage.sql.statements.files import READING_SECONDS, home_of
from replaybuf.storage.sql.statements.rows import GroupRow
from replaybuf.storage.sql.tasks.handles import database_url, handles_of
from replaybuf.values.codec.payload import Codec


class PlaceReader:
    """Reads payloads from the places known to the database, which are opened on demand.

    Reads and writes time out after the reconnect timeout.
    """

    def __init__(self, engine: Database, codec: Codec) -> None:
        self._codec = codec
        self._engine = engine
        self.scope = Scope()
        self.patience = min(engine.access.reconnect_timeout, READING_SECONDS / 2)
        self.stores: dict[int, PlaceStore] = {}
        #: The database's URL in handles; a database in memory has none that other processes could use.
        self.url = database_url(engine)

    async def fetch(self, rows: Iterable[GroupRow], deferred: frozenset[str] = frozenset()) -> None:
        """Read the tails of groups whose payloads are kept apart, in another thread.

        Arrays in the fields `deferred` are left out. A damaged tail becomes an error when it is decoded. Raises
        PayloadStoreError if a place doesn't answer in time.
        """
        apart = [row for row in rows if row.tail is None and row.is_apart]
        if not apart:
            return
        payloads = [row.payload for row in apart]
        await self.open(places := places_of(payloads))
        parts = partial(self._codec.wanted, deferred=deferred) if deferred else None
        read = partial(tails_of, payloads, self.stores, self.patience, parts)
        names = ", ".join(sorted(self.stores[one].url for one in places if one in self.stores))
        for row, tail in zip(apart, await in_thread(read, self.patience, names), strict=True):
            row.tail = tail

    async def open(self, wanted: Collection[int]) -> None:
        """Open the places of these ids that the database knows. Raises PayloadStoreError."""
        unknown = set(wanted) - self.stores.keys()
        if not unknown:
            return
        places, _ = await self._engine.read(Transaction.places, self.scope)
        for number in unknown:
            if number in places:
                url = local_url(self.scope.database or "", number, places[number])
                self.stores[number] = await in_thread(partial(self._open_place, number, url), self.patience, url)

    def _open_place(self, number: int, url: str) -> PlaceStore:
        store = open_place(url, self.patience)
        recognise(store, self.scope.database or "", number)
        return store

    async def check_places(self, rows: Iterable[GroupRow]) -> None:
        """Check that damaged payloads weren't read from another place at our place's URL. Raises PayloadStoreError."""
        for number in places_of(row.payload for row in rows) & self.stores.keys():
            store = self.stores[number]
            await in_thread(store.check_there, self.patience, store.url)

    def deferral(self, deferred: frozenset[str]) -> Deferral | None:
        """Return the maker of handles for the arrays in these fields, None if there are no fields."""
        if not deferred:
            return None
        places = {number: store.url for number, store in self.stores.items()}
        return Deferral(deferred, partial(handles_of, self.url, self.scope.database or "", places))

    # The place of this process

    async def open_own(self, url: str) -> tuple[int, PlaceStore]:
        """Return the id of the place at a configured URL, and the place, claimed for this database if it is new.

        The URL is this process's own, and is recorded for processes without one, which use the last one recorded.
        """
        engine, scope, store = self._engine, self.scope, open_place(url, self.patience)
        await in_thread(store.check_writable, self.patience, url)
        number = await self.claimed(store)
        if number is None:
            new = await engine.write(partial(statements.add_place, url=store.url), scope)
            if engine.path is not None:
                await asyncio.to_thread(_make_durable, engine.path)
            number = await self.claimed(store, new)  # or that of a faster process
            if number is None:
                raise PayloadStoreError(
                    f"{store.url} has lost its {MARKER}, and this database has payloads there: mount the place that it "
                    "wrote to or, if this is it, write the marker again (replaybuf doctor URL --take-over); to keep "
                    "new ones elsewhere, name another place (payloads=)"
                )
        if (await engine.read(Transaction.places, scope))[0].get(number) != store.url:
            await engine.write(partial(statements.record_url, number=number, url=store.url), scope)
        register_url(scope.database or "", number, store.url)
        self.stores[number] = store
        return number, store

    async def claimed(self, store: PlaceStore, number: int | None = None) -> int | None:
        """Return the id of a place, which is claimed for this database unless another one, or a copy of it, has it.

        None if it has none yet and `number` is None. Raises ConfigError.
        """
        home = await self._engine.read(home_of, self.scope)
        return await in_thread(partial(claim, store, self.scope.database or "", number, home), self.patience, store.url)


def _make_durable(path: str) -> None:
    """Sync what was committed to a SQLite file: else a power cut might leave a place of a database that never was."""
    with contextlib.suppress(FileNotFoundError):  # there is no WAL: all was copied, and synced
        sync_wal(f"{path}-wal")
    sync_folder(Path(path).absolute().parent)
