"""The place that an open buffer keeps payloads in: claimed for its database, and noted where others find it."""

from __future__ import annotations

import contextlib
from functools import partial

from replaybuf.errors import ConfigError, PayloadStoreError
from replaybuf.segments.places import (
    CopyError,
    check_unclaimed,
    claim,
    described,
    forget_place,
    know_place,
    open_place,
    recognise,
    take_over,
)
from replaybuf.segments.store import MARKER, SegmentStore
from replaybuf.storage.sql.engine.database import Database
from replaybuf.storage.sql.engine.transaction import Scope
from replaybuf.storage.sql.statements import segments as statements
from replaybuf.storage.sql.statements.homes import has_left, home_of
from replaybuf.storage.sql.tasks.segment_reader import in_thread

#: How long is waited for a place where others have it.
_LOOKING_SECONDS = 5.0


class OwnPlace:
    """A place that the config names.

    What the config says holds for this process. Others, who aren't told, find the place where the database has noted
    it. Calls are given up after `patience` seconds.
    """

    def __init__(self, engine: Database, url: str, patience: float) -> None:
        self._engine = engine
        self._url = url
        self._patience = patience
        self._scope = Scope()
        self._number: int | None = None
        self._is_noted = True

    async def check_new(self) -> None:
        """Make sure that a database that isn't there yet may have it. Raises PayloadStoreError and ConfigError."""
        store = open_place(self._url, self._patience)
        try:
            await in_thread(partial(check_unclaimed, store), self._patience, self._url)
            await in_thread(store.check_writable, self._patience, self._url)
        finally:
            store.close()

    async def open(self, scope: Scope) -> tuple[int, SegmentStore]:
        """Return its number and the place, which is marked as that of this database if it is new."""
        self._scope = scope
        store = open_place(self._url, self._patience)
        await in_thread(store.check_writable, self._patience, self._url)
        number = await claimed(self._engine, scope, store, None, self._patience)
        if number is None:
            adding = partial(statements.add_place, url=store.url)
            new = await self._engine.write(adding, scope, fenced=False)
            number = await claimed(self._engine, scope, store, new, self._patience)  # or that of who was faster
            if number is None:
                raise PayloadStoreError(
                    f"{store.url} has lost its {MARKER}, and this database has payloads there: put it back, or mount "
                    "the place that it wrote to; to keep new ones elsewhere, name another place (payloads=)"
                )
        self._url, self._number, self._is_noted = store.url, number, False
        know_place(scope.database or "", number, store.url)
        await self.note_where(None)
        return number, store

    def close(self) -> None:
        """Forget where it is for this process."""
        if self._number is not None:
            forget_place(self._scope.database or "", self._number, self._url)

    async def note_where(self, user: int | None) -> None:
        """Note in the database where it is, unless others have it elsewhere; `user` is this process.

        Hosts may have it under different names: the one that was noted first stays as long as the place is seen there
        from here, or others use it. Otherwise it was moved.
        """
        number = self._number
        if self._is_noted or number is None:
            return
        noted = (await self._engine.read(statements.read_places, self._scope)).get(number)
        if noted != self._url and (noted is None or not await self._is_seen(number, noted)):
            moving = partial(statements.move_place, number=number, url=self._url, user=user)
            self._is_noted = await self._engine.write(moving, self._scope, fenced=False)
        else:
            self._is_noted = True

    async def _is_seen(self, number: int, url: str) -> bool:
        """Return whether the place is at this URL, too."""
        patience = min(self._patience, _LOOKING_SECONDS)

        def look() -> None:
            with contextlib.closing(open_place(url, patience)) as store:
                recognise(store, self._scope.database or "", number)

        try:
            await in_thread(look, patience, url)
        except (PayloadStoreError, ConfigError):
            return False
        return True


async def claimed(
    engine: Database, scope: Scope, store: SegmentStore, number: int | None, patience: float
) -> int | None:
    """Return the number of a place; it becomes that of this database where nobody else can have it.

    None where it has none yet and `number` is None. Raises ConfigError where a copy of this database has it.
    """
    home = await engine.read(home_of, scope)
    claiming = partial(claim, store, scope.database or "", number, home)
    try:
        return await in_thread(claiming, patience, store.url)
    except CopyError as error:
        if not await engine.read(partial(has_left, home=error.home), scope):
            raise ConfigError(
                f"{store.url} has the payloads of {described(error.home)}, and {engine.where} is a copy of that: both "
                "would delete what the other needs. Name another place for new ones (payloads=), those that are here "
                "can still be read; or, once nobody uses the other any more, make the place this one's: replaybuf "
                "doctor URL --take-over"
            ) from error
        await in_thread(partial(take_over, store, home), patience, store.url)
        return await in_thread(claiming, patience, store.url)
