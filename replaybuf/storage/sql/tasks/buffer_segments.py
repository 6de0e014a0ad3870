"""Segments of an open buffer, for payloads that are kept apart: registered, sealed, compacted and deleted here.

A process has one segment open for writing, and registers the next one in advance. Segments in a folder are rolled at a
size, and overwritten once no payload refers to them. In an object store each commit has its own. `open_segments` writes
payloads before their commit, and `segment_reader` reads them after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from replaybuf.codec.payload import Codec
from replaybuf.codec.payload_format import SplitPayload
from replaybuf.errors import ConfigError, DecodeError, PayloadStoreError, ReplayBufError
from replaybuf.segments.places import in_frames
from replaybuf.segments.store import EXTENT_BYTES, MARKER, Extent, SegmentStore, file_name
from replaybuf.storage.sql.engine.database import Database
from replaybuf.storage.sql.engine.transaction import Scope, Transaction
from replaybuf.storage.sql.statements import segments as statements
from replaybuf.storage.sql.statements.rows import GroupRow
from replaybuf.storage.sql.statements.segments import READING_SECONDS, SILENT_SECONDS, Segment
from replaybuf.storage.sql.tasks.open_segments import OpenSegment, OpenSegments, SegmentBatch
from replaybuf.storage.sql.tasks.segment_reader import Compute, OwnPlace, SegmentReader, claimed, in_thread

_SPARE = 2
_SPARE_OBJECTS = 64
_RENEW_SECONDS = SILENT_SECONDS / 6
#: Empty segments that are kept to be overwritten.
_MOST_KEPT = 8
#: A segment with a smaller ratio of live bytes is compacted, by so many bytes at a time.
_SPARSE = 0.25
_MOVED_BYTES = 8 << 20
_MOVED_GROUPS = 64
_DELETED = 64
#: How long closing waits for a place that doesn't answer; other processes delete the rest.
_CLOSING_SECONDS = 3.0
#: How often, each time twice as many, new segments are registered if their files exist already.
_REGISTERED = 8

_logger = logging.getLogger("replaybuf.segments")

T = TypeVar("T")


class Segments:
    """The segments of an open buffer.

    `place` is where this process stores new payloads, None for the database; existing payloads are read from their own
    places, by the `reader`. With `sync`, payloads are fsynced before the transaction that refers to them begins. Reads
    and writes time out after `patience` seconds.
    """

    def __init__(self, engine: Database, place: str | None, threshold: int, *, sync: bool, patience: float) -> None:
        self._engine = engine
        self._scope = Scope()
        self._place = place
        self._threshold = max(threshold, 1)  # a payload without a tail stays in the database
        self._sync = sync
        self._patience = min(patience, READING_SECONDS / 2)
        self.reader = SegmentReader(engine, self._patience)
        self._own = None if place is None else OwnPlace(engine, place, self._patience)
        self._here: OpenSegments | None = None
        self._user: int | None = None
        self._unmovable: set[int] = set()  # segments and, below, places that are tried last
        self._unreachable: set[int] = set()
        self._not_ours: set[int] = set()  # places for which this was logged
        self._tidying: asyncio.Task[bool] | None = None
        self._registering = asyncio.Lock()
        self._read: list[int] = []  # removed groups, whose payloads were read
        self._renew_at = 0.0

    @property
    def writes(self) -> bool:
        """Whether this process keeps payloads apart."""
        return self._here is not None

    # Beginning and end (database's thread)

    async def check_new(self) -> None:
        """Check that a new database may use the place. Raises PayloadStoreError, ConfigError."""
        if self._own is not None:
            await self._own.check_new()

    async def prepare(self, scope: Scope, *, writes: bool) -> None:
        """Open the place for payloads if any is to be written; a new place is claimed for this database."""
        self._scope = self.reader.scope = scope
        if self._own is None or self._here is not None or not writes:
            return
        number, store = await self._own.open(scope)
        self.reader.stores[number] = store
        self._here = OpenSegments(number, store, in_frames(scope.database or ""), sync=self._sync)

    async def close(self) -> None:
        """Leave this process's segments to other processes, and close everything."""
        try:
            await self._release_read()
            await self.tend_written(closing=True)
            user, self._user = self._user, None
            if user is not None:
                await self._write(partial(statements.end_use, user=user))
            if self._tidying is not None:
                await asyncio.wait([self._tidying], timeout=_CLOSING_SECONDS)
                self._tidied() if self._tidying.done() else self._tidying.cancel()
            async with asyncio.timeout(_CLOSING_SECONDS):
                while user is not None and await self._delete():
                    pass
        except (ReplayBufError, TimeoutError) as error:  # other processes find them when this one's lease has lapsed
            _logger.debug("segments were left open: %s", error)
        if self._here is not None:
            self._here.lose()
        if self._own is not None:
            self._own.close()
        stores = [*self.reader.stores.values()]
        if stores:  # at the end of the interpreter no thread can be started
            with contextlib.suppress(TimeoutError, RuntimeError):
                await asyncio.wait_for(asyncio.to_thread(_close_all, self._here, stores), _CLOSING_SECONDS)

    # Writing

    async def ready(self) -> SegmentBatch | None:
        """Return a batch for payloads to be written now, None if they stay in the database."""
        here = self._here
        if here is None:
            return None
        if here.spare < _SPARE:
            try:
                async with self._registering:
                    await self._register(here)
            except PayloadStoreError as error:  # smaller payloads are stored in the database all the same
                return SegmentBatch(self._threshold, here, error)
        return SegmentBatch(self._threshold, here)

    async def _register(self, here: OpenSegments) -> None:
        for attempt in range(_REGISTERED):
            if here.spare >= _SPARE:
                return
            if not here.registered:
                wanted = _SPARE_OBJECTS if here.store.one_write_each else _SPARE
                await self._register_more(here, wanted << attempt)
            taken = await self._in_thread(here.open)
            if taken and self._user is not None:
                await self._write(partial(statements.disclaim, owner=self._user, numbers=taken))
        raise PayloadStoreError(
            f"{here.store.url} has segments of a later state of this database, which was taken back: name another "
            "place for new ones (payloads=), what is here can still be read"
        )

    async def _register_more(self, here: OpenSegments, wanted: int) -> None:
        def register(tx: Transaction) -> tuple[int, list[Segment], list[Segment]]:
            user = self._user
            if user is None or not statements.renew_use(tx, user):
                user = statements.begin_use(tx, keeps=False)
            old = statements.reuse(tx, here.number, user, wanted) if here.store.reuses else []
            return user, old, statements.register(tx, here.number, user, wanted - len(old))

        user, old, new = await self._write(register)
        if self._user not in (None, user):
            here.lose()
        self._user, self._renew_at = user, time.monotonic() + _RENEW_SECONDS
        here.register(old, new)

    def lost(self) -> None:
        """Forget segments that other processes have taken over, because this process's lease lapsed."""
        if self._here is not None:
            self._here.lose()
        self._user = None

    async def written(self, batch: SegmentBatch | None, work: Awaitable[T]) -> T:
        """Return the result of `work`, which encodes groups and writes a batch in another thread.

        Raises PayloadStoreError if writing hangs, as on a mount with an unreachable server; that thread keeps hanging.
        """
        if batch is None:
            return await work
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait([task], timeout=self._patience))[0]:
                if batch.hangs(self._patience):
                    self.lost()
                    self.reader.on_hang()
                    raise PayloadStoreError(
                        f"payloads could not be written within {self._patience:g} s to {self._place}; nothing of the "
                        "put was stored: see that it is mounted and answers"
                    )
            return task.result()
        finally:
            task.cancel()

    def read(self, uids: Iterable[int]) -> None:
        """Record that payloads of removed groups were read, so that they may be swept."""
        self._read += uids

    def unread(self, uids: Iterable[int]) -> None:
        """Record that groups are returned, so that the payloads are kept until the next reader has them."""
        back = set(uids)
        self._read = [uid for uid in self._read if uid not in back]

    # Maintenance (database's thread)

    async def tend(self, compute: Compute, codec: Codec) -> bool:
        """Do one small step of due maintenance; return whether more is due."""
        read = await self._release_read()
        renews = time.monotonic() >= self._renew_at
        if not (self.writes or read or renews):
            return False
        await self.tend_written()
        if renews:
            await self._renew()
        if self._tidying is not None and not self._tidying.done():
            return False
        more = self._tidied()
        self._tidying = asyncio.get_running_loop().create_task(self._tidy(compute, codec))
        return more

    def _tidied(self) -> bool:
        """Return whether the last maintenance left more to do."""
        if self._tidying is None or self._tidying.cancelled():
            return False
        error = self._tidying.exception()
        if error is not None:
            _logger.debug("segments were not tidied up: %s", error, exc_info=not isinstance(error, ReplayBufError))
        return error is None and self._tidying.result()

    async def _tidy(self, compute: Compute, codec: Codec) -> bool:
        """Do some maintenance beside the sweeps, which don't wait for a place that doesn't answer."""
        for store in [*self.reader.stores.values()]:
            await self._in_thread(store.forget)
        deleted = await self._delete()
        moved = self.writes and await self._empty_one(compute, codec)
        return deleted or moved

    async def _release_read(self) -> bool:
        """Let the sweep delete payloads that were read; return whether there were any."""
        read, self._read = self._read, []
        if read:
            try:
                await self._write(partial(statements.keep_for_reading, uids=read, seconds=0.0))
            except ReplayBufError:
                self._read += read
                raise
        return bool(read)

    async def tend_written(self, *, closing: bool = False) -> None:
        """Seal segments without writers."""
        here, user = self._here, self._user
        if here is None:
            return
        self._close_soon(here.take_lost())
        done = here.finished(closing=closing) if user is not None else []
        if not done or user is None:
            return
        keep = here.store.reuses and not closing and not any(one.broken for one in done)
        sizes = {one.id: max(one.end, 1) for one in done}
        await self._write(lambda tx: statements.seal(tx, user, sizes, keep=keep))
        here.sealed(done)
        self._close_soon(done)

    def _close_soon(self, closing: Sequence[OpenSegment]) -> None:
        """Close segments in another thread: with an unreachable place, a close hangs like a write."""

        def close() -> None:
            for segment in closing:
                segment.writer.close()

        if closing:
            asyncio.get_running_loop().run_in_executor(None, close)

    async def _renew(self) -> None:
        self._renew_at = time.monotonic() + _RENEW_SECONDS
        self._unmovable.clear()
        self._unreachable.clear()
        user = self._user
        if self._own is not None:
            await self._own.note_where(user)

        def renew(tx: Transaction) -> bool:
            known = user is None or statements.renew_use(tx, user)
            statements.end_dead_users(tx)
            if user is not None:
                statements.give_up(tx, user, _MOST_KEPT)
            return known

        needed = user is not None or await self._engine.read(statements.any_dead_users, self._scope)
        if needed and not await self._write(renew):
            self.lost()

    async def _delete(self) -> bool:
        """Delete empty segments without an owner; return whether there may be more."""
        deletable = partial(statements.deletable, limit=_DELETED, but=sorted(self._unreachable))
        by_place: dict[int, list[Segment]] = {}
        for number, segment in await self._engine.read(deletable, self._scope):
            by_place.setdefault(number, []).append(segment)
        for number, found in by_place.items():
            try:
                await self.reader.open({number})
                store = self.reader.stores[number]
                if await claimed(self._engine, self._scope, store, None, self._patience) != number:
                    raise PayloadStoreError(f"{store.url} has lost its {MARKER}")
                for segment in found:
                    await self._in_thread(partial(store.delete, file_name(segment.file)))
            except (ReplayBufError, KeyError) as error:  # other places come first, and this one again later
                copied = isinstance(error, ConfigError) and number not in self._not_ours
                _logger.log(logging.WARNING if copied else logging.DEBUG, "segments were not deleted: %s", error)
                self._not_ours |= {number} if copied else set()
                self._unreachable.add(number)
            else:
                await self._write(partial(statements.forget, numbers=[segment.id for segment in found]))
        return sum(map(len, by_place.values())) == _DELETED

    async def _empty_one(self, compute: Compute, codec: Codec) -> bool:
        """Move some payloads out of a sparse segment; return whether any was moved."""
        assert self._here is not None
        sparse = partial(statements.sparse, number=self._here.number, least=_SPARSE, but=sorted(self._unmovable))
        old = await self._engine.read(sparse, self._scope)
        if old is None:
            return False
        moved = await self._move_some(old, compute, codec)
        if not moved:  # its groups are leased, or damaged
            self._unmovable.add(old)
        return moved

    async def _move_some(self, old: int, compute: Compute, codec: Codec) -> bool:
        found = await self._engine.read(lambda tx: statements.movable(tx, old, _MOVED_GROUPS), self._scope)
        rows, size = [], 0
        for uid, data in found:
            if size > _MOVED_BYTES:
                break
            with contextlib.suppress(DecodeError):
                size += Extent.at_end_of(data).size
                rows.append(GroupRow.unread(uid, bytes(data)))
        await self.reader.fetch(rows, codec, compute)
        batch = await self.ready()
        assert batch is not None

        def copy(_: None) -> dict[int, tuple[bytes, Extent]]:
            heads = {}
            for row in rows:
                if row.tail is None or isinstance(row.tail, DecodeError):
                    continue  # a draw sets the group aside
                head = bytes(row.payload or b"")[:-EXTENT_BYTES]
                extent = batch.add(SplitPayload(head, (row.tail,), len(row.tail)))
                heads[row.uid] = head + extent.packed(), extent
            batch.flush()
            return heads

        heads = await compute(copy, None)
        if not heads:
            return False
        # The extents are referenced until the end of the transaction, which keeps their segments open.
        move = partial(statements.move, heads=heads, old=old)
        return await self._engine.write(move, self._scope, alone=True, fenced=False) > 0

    async def _write(self, function: Callable[[Transaction], Any]) -> Any:
        return await self._engine.write(function, self._scope, fenced=False)

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await in_thread(function, self._patience, self._place or "")


def _close_all(here: OpenSegments | None, stores: Iterable[SegmentStore]) -> None:
    if here is not None:
        here.close()
    for store in stores:
        store.close()
