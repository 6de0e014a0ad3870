"""Payloads that are kept apart: written by this process before their commit, read after it, and tidied up.

A process has one segment open for writing, and registers the next one before it needs it. Segments in a folder are
rolled at a size, and written over once nothing names what is in them. In an object store each commit has its own.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from replaybuf.codec.payload import Codec, SplitPayload, is_apart
from replaybuf.codec.stored import Deferral
from replaybuf.errors import DecodeError, PayloadStoreError, ReplayBufError
from replaybuf.segments.extents import EXTENT_BYTES, Extent
from replaybuf.segments.frames import ALIGNMENT, Frame
from replaybuf.segments.places import open_place
from replaybuf.segments.store import Range, SegmentStore, SegmentWriter, claim
from replaybuf.storage.sql.engine.database import Database
from replaybuf.storage.sql.engine.transaction import Scope, Transaction
from replaybuf.storage.sql.statements import segments as statements
from replaybuf.storage.sql.statements.rows import GroupRow
from replaybuf.storage.sql.statements.segments import READING_SECONDS, SILENT_SECONDS, Segment
from replaybuf.storage.sql.tasks.handles import database_url, handles_of

#: A segment in a folder takes no more payloads when it has so many bytes.
SEGMENT_BYTES = 128 << 20
_SPARE = 2
_SPARE_OBJECTS = 64
_RENEW_SECONDS = SILENT_SECONDS / 6
#: Empty segments that are kept to be written over.
_MOST_KEPT = 8
#: A segment with a smaller part of live bytes is emptied, so many bytes at a time.
_SPARSE = 0.25
_MOVED_BYTES = 8 << 20
_MOVED_GROUPS = 64
_DELETED = 64

_logger = logging.getLogger("replaybuf.segments")


class _OpenSegment:
    """A segment that this process writes to. `users` are the extents in it whose payloads are on their way."""

    def __init__(self, segment: Segment, writer: SegmentWriter) -> None:
        self.id, self.file = segment.id, segment.file
        self.writer = writer
        self.end = 0
        self.users: weakref.WeakSet[Extent] = weakref.WeakSet()
        self.broken = False


@dataclass(slots=True)
class SegmentBatch:
    """Payloads that are written together, before the transaction that names them (any one thread).

    `threshold` is the size from which the tail of a payload is kept apart.
    """

    threshold: int
    _segments: Segments
    _pending: list[tuple[_OpenSegment, int, list[Any]]] = field(default_factory=list)

    def add(self, split: SplitPayload) -> Extent:
        """Return where the tail of a payload will be; it is there after `flush`."""
        segment, extent = self._segments.reserve(split.size)
        frame = Frame(extent.segment, extent.at, extent.size, self._segments.database, time.time())
        buffers = [frame.packed(), *split.tail, bytes(-extent.size % ALIGNMENT)]
        self._pending.append((segment, extent.at - ALIGNMENT, buffers))
        return extent

    def flush(self) -> None:
        """Write what was added. Raises PayloadStoreError or DiskFullError."""
        pending, self._pending = self._pending, []
        by_segment: dict[int, list[tuple[_OpenSegment, int, list[Any]]]] = {}
        for one in pending:
            by_segment.setdefault(one[0].id, []).append(one)
        for members in by_segment.values():
            self._segments.write(members)


class Segments:
    """The segments of an open buffer.

    `place` is where this process keeps payloads from now on, None for the database; those that are elsewhere are read
    from where they are. With `sync` they are on the disk before the transaction that names them begins. Reads and
    writes are given up after `patience` seconds.
    """

    def __init__(self, engine: Database, place: str | None, threshold: int, *, sync: bool, patience: float) -> None:
        self._engine = engine
        self._scope = Scope()
        self._place = place
        self._threshold = threshold
        self._sync = sync
        self._patience = min(patience, READING_SECONDS / 2)
        self._lock = threading.Lock()
        self._stores: dict[int, SegmentStore] = {}
        self._here: tuple[int, SegmentStore] | None = None
        self._user: int | None = None
        self._current: _OpenSegment | None = None
        self._spare: list[_OpenSegment] = []
        self._rolled: list[_OpenSegment] = []
        self._registering = asyncio.Lock()
        self._read: list[int] = []  # groups that have left, whose payloads were read
        self._renew_at = 0.0
        self.database = b""
        #: The database, as handles name it; one in memory has no name that others could use.
        self.url = database_url(engine)

    @property
    def writes(self) -> bool:
        """Whether this process keeps payloads apart."""
        return self._here is not None

    # Beginning and end (database's thread)

    async def prepare(self, scope: Scope, *, writes: bool) -> None:
        """Open the place for payloads if anything is to be written; mark it as that of this database if it is new."""
        self._scope = scope
        self.database = bytes.fromhex(scope.database or "")[:16].ljust(16, b"\0")
        if self._place is None or self._here is not None or not writes:
            return
        store = open_place(self._place, self._patience)
        await self._in_thread(store.check_writable)
        owner = scope.database or ""
        number = await self._in_thread(partial(claim, store, owner, None))
        if number is None:
            new = await self._write(partial(statements.add_place, url=store.url))
            number = await self._in_thread(partial(claim, store, owner, new))
            assert number is not None
        else:
            await self._write(partial(statements.move_place, number=number, url=store.url))
        self._stores[number] = store
        self._here = number, store

    async def close(self) -> None:
        """Leave this process's segments to others, and release everything."""
        user, self._user = self._user, None
        if user is not None:
            try:
                await self.tend_written(closing=True)
                await self._write(partial(statements.end_use, user=user))
                while await self._delete():
                    pass
            except ReplayBufError as error:  # others find them when this process has been silent for long
                _logger.debug("segments were left open: %s", error)
        for segment in [*self._spare, *self._rolled, *filter(None, [self._current])]:
            segment.writer.close()
        self._current, self._spare, self._rolled = None, [], []
        for store in self._stores.values():
            store.close()

    # Writing

    async def ready(self) -> SegmentBatch | None:
        """Return the batch for payloads that are to be written now, None where they stay in the database."""
        if self._here is None:
            return None
        number, store = self._here
        if len(self._spare) < _SPARE:
            async with self._registering:
                await self._register(number, store)
        return SegmentBatch(self._threshold, self)

    async def _register(self, number: int, store: SegmentStore) -> None:
        if len(self._spare) >= _SPARE:
            return
        wanted = _SPARE_OBJECTS if store.one_write_each else _SPARE

        def register(tx: Transaction) -> tuple[int, list[Segment], list[Segment]]:
            user = self._user
            if user is None or not statements.renew_use(tx, user):
                user = statements.begin_use(tx, keeps=False)
            old = statements.reuse(tx, number, user, wanted) if store.reuses else []
            return user, old, statements.register(tx, number, user, wanted - len(old))

        user, old, new = await self._write(register)
        if self._user not in (None, user):
            self._lose()
        self._user, self._renew_at = user, time.monotonic() + _RENEW_SECONDS

        def begin() -> list[_OpenSegment]:
            opened = [_OpenSegment(one, store.writer(_name(one), anew=True)) for one in old]
            return opened + [_OpenSegment(one, store.writer(_name(one), anew=False)) for one in new]

        opened = await self._in_thread(begin)
        with self._lock:
            self._spare += opened

    def _lose(self) -> None:
        """Forget the segments that others have taken away because this process was silent for long."""
        with self._lock:
            lost = [*self._spare, *self._rolled, *filter(None, [self._current])]
            self._current, self._spare, self._rolled = None, [], []
        for one in lost:
            one.writer.close()

    def lost(self) -> None:
        """Note that others have taken segments of this process away."""
        self._lose()
        self._user = None

    def reserve(self, size: int) -> tuple[_OpenSegment, Extent]:
        """Reserve a place for the tail of a payload in the segment that is being written (any thread)."""
        assert self._here is not None
        number, store = self._here
        with self._lock:
            segment = self._current
            over = segment is not None and (segment.end + size > SEGMENT_BYTES or segment.broken) and segment.end > 0
            if (segment is None or over) and self._spare:
                if segment is not None:
                    self._rolled.append(segment)
                segment = self._current = self._spare.pop(0)
            if segment is None:
                raise PayloadStoreError(f"no segment is open in {store.url}: put again")
            extent = Extent(number, segment.id, segment.file, segment.end + ALIGNMENT, size)
            segment.end = extent.at + size + -(extent.at + size) % ALIGNMENT
            segment.users.add(extent)
            return segment, extent

    def write(self, members: Sequence[tuple[_OpenSegment, int, list[Any]]]) -> None:
        """Write buffers into one segment (any thread)."""
        segment = members[0][0]
        one_write = self._here is not None and self._here[1].one_write_each
        try:
            for place, (_, at, buffers) in enumerate(_runs(members)):
                last = place == len(members) - 1
                segment.writer.write(at, buffers, sync=self._sync and last)
        except BaseException:
            segment.broken = True
            raise
        finally:
            if one_write or segment.broken:
                with self._lock:
                    if self._current is segment:
                        self._current = None
                        self._rolled.append(segment)

    # Reading

    async def fetch(
        self,
        rows: Iterable[GroupRow],
        codec: Codec,
        compute: Callable[[Callable[[Any], Any], Any], Any],
        deferred: Collection[str] = (),
    ) -> None:
        """Read the tails of the groups whose payloads are kept apart; `compute` runs a function in another thread.

        Of arrays in the fields `deferred` only the places are noted. Those that are damaged are errors when they are
        decoded. Raises PayloadStoreError where a place doesn't answer in time.
        """
        apart = [row for row in rows if row.payload is not None and row.tail is None and is_apart(row.payload)]
        if not apart:
            return
        await self._reach(apart)
        try:
            await asyncio.wait_for(compute(partial(self._fetch, codec, frozenset(deferred)), apart), self._patience)
        except TimeoutError as error:
            raise PayloadStoreError(
                f"payloads could not be read within {self._patience:g} s from {self._names(apart)}; nothing was taken"
            ) from error

    async def _reach(self, rows: Sequence[GroupRow]) -> None:
        """Open the places that payloads are in."""
        wanted = set()
        for row in rows:
            try:
                wanted.add(Extent.at_end_of(row.payload).place)
            except DecodeError:
                continue
        if wanted <= self._stores.keys():
            return
        places = await self._engine.read(statements.read_places, self._scope)
        for number in wanted - self._stores.keys():
            if number in places:
                self._stores[number] = await self._in_thread(partial(open_place, places[number], self._patience))

    def _names(self, rows: Sequence[GroupRow]) -> str:
        places = {Extent.at_end_of(row.payload).place for row in rows}
        return ", ".join(sorted(self._stores[one].url for one in places if one in self._stores))

    def _fetch(self, codec: Codec, deferred: frozenset[str], rows: Sequence[GroupRow]) -> None:
        by_place: dict[int, list[tuple[GroupRow, Any, Range]]] = {}
        for row in rows:
            assert row.payload is not None
            try:
                extent = Extent.at_end_of(row.payload)
                if extent.place not in self._stores:
                    raise DecodeError(f"the database doesn't know the place {extent.place} of its arrays")
                for key, one in _ranges(codec, row.payload, extent, deferred):
                    by_place.setdefault(extent.place, []).append((row, key, one))
            except DecodeError as error:
                row.tail = error
            else:
                row.tail = {} if deferred else None
        for number, wanted in by_place.items():
            found = self._stores[number].read([one for _, _, one in wanted], self._patience)
            for (row, key, _), raw in zip(wanted, found, strict=True):
                if isinstance(raw, DecodeError) or key is None:
                    row.tail = raw
                elif isinstance(row.tail, dict):
                    row.tail[key] = raw

    def deferral(self, deferred: frozenset[str]) -> Deferral | None:
        """Return what makes handles of the arrays in these fields, None where there are none."""
        if not deferred:
            return None
        places = {number: store.url for number, store in self._stores.items()}
        return Deferral(deferred, partial(handles_of, self.url, places))

    def read(self, uids: Iterable[int]) -> None:
        """Note that the payloads of groups that have left were read: they may be swept."""
        self._read += uids

    # Tidying up (database's thread)

    async def tend(self, compute: Callable[[Callable[[Any], Any], Any], Any], codec: Codec) -> bool:
        """Do one small step of what is due; return whether more is."""
        read, self._read = self._read, []
        if read:
            try:
                await self._write(partial(statements.keep_for_reading, uids=read, until=time.time()))
            except ReplayBufError:
                self._read += read
                raise
        if not self.writes and not read and time.monotonic() < self._renew_at:
            return False
        await self.tend_written()
        if time.monotonic() >= self._renew_at:
            await self._renew()
        for store in self._stores.values():
            store.forget()
        deleted = await self._delete()
        moved = self.writes and await self._empty_one(compute, codec)
        return deleted or moved

    async def tend_written(self, *, closing: bool = False) -> None:
        """Seal segments that nobody writes to any more."""
        if self._user is None or self._here is None:
            return
        with self._lock:
            if closing and self._current is not None:
                self._rolled.append(self._current)
                self._current = None
            done = [one for one in self._rolled if not one.users]
        if not done:
            return
        store, user = self._here[1], self._user
        keep = store.reuses and not closing and not any(one.broken for one in done)
        await self._write(lambda tx: statements.seal(tx, user, {one.id: max(one.end, 1) for one in done}, keep=keep))
        with self._lock:
            self._rolled = [one for one in self._rolled if one not in done]
        for one in done:
            one.writer.close()

    async def _renew(self) -> None:
        self._renew_at = time.monotonic() + _RENEW_SECONDS
        user = self._user

        def renew(tx: Transaction) -> bool:
            known = user is None or statements.renew_use(tx, user)
            statements.end_dead_users(tx)
            if user is not None:
                statements.give_up(tx, user, _MOST_KEPT)
            return known

        if self._stores and not await self._write(renew):
            self.lost()

    async def _delete(self) -> bool:
        """Delete empty segments of nobody; return whether there may be more."""
        if not self._stores:
            return False
        found = await self._engine.read(partial(statements.deletable, limit=_DELETED), self._scope)
        gone = []
        for number, segment in found:
            store = self._stores.get(number)
            if store is not None:
                await self._in_thread(partial(store.delete, _name(segment)))
                gone.append(segment.id)
        if gone:
            await self._write(partial(statements.forget, numbers=gone))
        return len(gone) == _DELETED

    async def _empty_one(self, compute: Callable[[Callable[[Any], Any], Any], Any], codec: Codec) -> bool:
        """Move some payloads out of a segment that is nearly empty; return whether any was."""
        assert self._here is not None
        number, _ = self._here
        old = await self._engine.read(partial(statements.sparse, number=number, least=_SPARSE), self._scope)
        if old is None:
            return False
        found = await self._engine.read(lambda tx: statements.movable(tx, old, 0, _MOVED_GROUPS), self._scope)
        rows, size = [], 0
        for uid, data in found:
            if size and size > _MOVED_BYTES:
                break
            rows.append(GroupRow.unread(uid, bytes(data)))
            size += Extent.at_end_of(data).size
        if not rows:
            return False
        await self.fetch(rows, codec, compute)
        batch = await self.ready()
        assert batch is not None

        def copy(_: None) -> dict[int, tuple[bytes, Extent]]:
            heads = {}
            for row in rows:
                if row.tail is None or isinstance(row.tail, DecodeError):
                    continue  # a draw sets it aside
                head = bytes(row.payload or b"")[:-EXTENT_BYTES]
                extent = batch.add(SplitPayload(head, (row.tail,), len(row.tail)))
                heads[row.uid] = head + extent.packed(), extent
            batch.flush()
            return heads

        heads = await compute(copy, None)
        if not heads:
            return False
        move = partial(statements.move, heads=heads, old=old)
        return await self._engine.write(move, self._scope, alone=True, fenced=False) > 0

    # Users that keep segments

    async def keep(self) -> int:
        """Keep all segments that are there from now on, for at most a minute without `renew_keeping`."""
        return int(await self._write(partial(statements.begin_use, keeps=True)))

    async def renew_keeping(self, user: int) -> None:
        """Keep them for another minute."""
        await self._write(partial(statements.renew_use, user=user))

    async def end_keeping(self, user: int) -> None:
        """Keep them no longer."""
        await self._write(partial(statements.end_use, user=user))

    async def _write(self, function: Callable[[Transaction], Any]) -> Any:
        return await self._engine.write(function, self._scope, fenced=False)

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        """Return `function()`, run in a thread of its own, which may hang as long as a mount does."""
        try:
            return await asyncio.wait_for(asyncio.to_thread(function), self._patience)
        except TimeoutError as error:
            raise PayloadStoreError(
                f"the place for payloads {self._place or ''} didn't answer within {self._patience:g} s"
            ) from error


def _name(segment: Segment) -> str:
    return Extent(0, segment.id, segment.file, 0, 0).name


def _runs(
    members: Sequence[tuple[_OpenSegment, int, list[Any]]],
) -> list[tuple[_OpenSegment, int, list[Any]]]:
    """Join what follows one another in a segment."""
    runs: list[tuple[_OpenSegment, int, list[Any]]] = []
    end = -1
    for segment, at, buffers in members:
        size = sum(memoryview(one).nbytes for one in buffers)
        if at == end:
            runs[-1][2].extend(buffers)
        else:
            runs.append((segment, at, [*buffers]))
            end = at
        end += size
    return runs


def _ranges(codec: Codec, payload: bytes, extent: Extent, deferred: frozenset[str]) -> list[tuple[int | None, Range]]:
    """Return what has to be read of a tail: all of it, or the arrays outside these fields, by number."""
    if not deferred:
        return [(None, Range.whole(extent))]
    return [(number, Range(extent, at, size)) for number, at, size in codec.wanted(payload, deferred)]
