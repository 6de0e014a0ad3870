"""Payloads that are kept apart: written by this process before their commit, read after it, and tidied up.

A process has one segment open for writing, and registers the next one before it needs it. Segments in a folder are
rolled at a size, and written over once nothing names what is in them. In an object store each commit has its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from replaybuf.codec.payload import Codec, SplitPayload, is_apart
from replaybuf.codec.stored import Deferral
from replaybuf.errors import DecodeError, PayloadStoreError, ReplayBufError
from replaybuf.segments.extents import EXTENT_BYTES, Extent
from replaybuf.segments.frames import ALIGNMENT, Frame, GoneError
from replaybuf.segments.places import open_place
from replaybuf.segments.store import (
    Range,
    SegmentLostError,
    SegmentStore,
    SegmentWriter,
    TakenError,
    claim,
    in_frames,
    recognise,
)
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
#: Arrays that are smaller on average are copied together first: a system call takes longer for many small buffers.
_JOINED = 32 << 10
_MOVED_BYTES = 8 << 20
_MOVED_GROUPS = 64
_DELETED = 64
#: How long closing waits for a place that doesn't answer; others delete what is left.
_CLOSING_SECONDS = 3.0
#: How often others may move a payload while it is being read.
_MOVES = 5
#: How often so many, and each time twice as many, new segments are registered where files have their names.
_REGISTERED = 8

_logger = logging.getLogger("replaybuf.segments")

T = TypeVar("T")


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
    _refusal: PayloadStoreError | None = None
    _writing_since: float | None = None
    _pending: list[_Written] = field(default_factory=list)

    def add(self, split: SplitPayload) -> Extent:
        """Return where the tail of a payload will be; it is there after `flush`. Raises PayloadStoreError."""
        if self._refusal is not None:
            raise PayloadStoreError(str(self._refusal))
        own = self._pending[-1].segment if self._pending else None
        segment, extent = self._segments.reserve(split.size, own)
        frame = Frame(extent.segment, extent.at, extent.size, self._segments.database, time.time())
        buffers = [frame.packed(), *split.tail, bytes(-extent.size % ALIGNMENT)]
        if split.size < _JOINED * len(split.tail):
            buffers = [b"".join(buffers)]
        self._pending.append(_Written(segment, extent, frame.end, buffers))
        return extent

    def flush(self) -> None:
        """Write what was added. Raises PayloadStoreError, DiskFullError or SegmentLostError."""
        pending, self._pending = self._pending, []
        self._writing_since = time.monotonic() if pending else None
        by_segment: dict[int, list[_Written]] = {}
        for one in pending:
            by_segment.setdefault(one.segment.id, []).append(one)
        for members in by_segment.values():
            self._segments.write(members)
        self._writing_since = None

    def hangs(self, patience: float) -> bool:
        """Return whether writing has taken longer than that, and isn't over."""
        since = self._writing_since
        return since is not None and time.monotonic() - since >= patience


@dataclass(frozen=True, slots=True)
class _Written:
    """A frame to be written, up to `end` with its padding. Its segment is open as long as the extent is referred to."""

    segment: _OpenSegment
    extent: Extent
    end: int
    buffers: list[Any]


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
        self._threshold = max(threshold, 1)  # a payload without a tail stays in the database
        self._sync = sync
        self._patience = min(patience, READING_SECONDS / 2)
        self._lock = threading.Lock()
        self._stores: dict[int, SegmentStore] = {}
        self._here: tuple[int, SegmentStore] | None = None
        self._user: int | None = None
        self._current: _OpenSegment | None = None
        self._spare: list[_OpenSegment] = []
        self._rolled: list[_OpenSegment] = []
        self._lost: list[_OpenSegment] = []  # to be closed when nobody writes to them
        self._registered: list[tuple[Segment, bool]] = []  # not open yet; whether they are to be written over
        self._unmovable: set[int] = set()  # segments and, below, places that come last
        self._unreachable: set[int] = set()
        self._tidying: asyncio.Task[bool] | None = None
        self._registering = asyncio.Lock()
        self._read: list[int] = []  # groups that have left, whose payloads were read
        self._renew_at = 0.0
        self.database = b""
        #: Called when threads that encode or read hang in a place: others have to take their work over.
        self.on_hang: Callable[[], object] = lambda: None
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
        self.database = in_frames(scope.database or "")
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
        except (ReplayBufError, TimeoutError) as error:  # others find them when this process has been silent for long
            _logger.debug("segments were left open: %s", error)
        self._lose()
        closing = asyncio.to_thread(_close_all, [*self._lost], [*self._stores.values()])
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(closing, _CLOSING_SECONDS)

    # Writing

    async def ready(self) -> SegmentBatch | None:
        """Return the batch for payloads that are to be written now, None where they stay in the database."""
        if self._here is None:
            return None
        number, store = self._here
        if len(self._spare) < _SPARE:
            try:
                async with self._registering:
                    await self._register(number, store)
            except PayloadStoreError as error:  # what stays in the database is stored all the same
                return SegmentBatch(self._threshold, self, error)
        return SegmentBatch(self._threshold, self)

    async def _register(self, number: int, store: SegmentStore) -> None:
        for attempt in range(_REGISTERED):
            if len(self._spare) >= _SPARE:
                return
            if not self._registered:
                wanted = _SPARE_OBJECTS if store.one_write_each else _SPARE
                await self._register_more(number, store, wanted << attempt)
            taken: list[int] = []
            await self._in_thread(partial(self._open, store, taken))
            if taken and self._user is not None:
                await self._write(partial(statements.disclaim, owner=self._user, numbers=taken))
        raise PayloadStoreError(
            f"{store.url} has segments of a later state of this database, which was taken back: name another place for "
            "new ones (payloads=), what is here can still be read"
        )

    async def _register_more(self, number: int, store: SegmentStore, wanted: int) -> None:
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
        with self._lock:
            self._registered += [*((one, True) for one in old), *((one, False) for one in new)]

    def _open(self, store: SegmentStore, taken: list[int]) -> None:
        """Open what is registered; note in `taken` what can't be, because the files aren't as the database says."""
        while True:
            with self._lock:
                if not self._registered:
                    return
                segment, anew = self._registered.pop(0)
            try:
                opened = _OpenSegment(segment, store.writer(_name(segment), anew=anew))
            except TakenError:
                taken.append(segment.id)
            except BaseException:
                with self._lock:
                    self._registered.insert(0, (segment, anew))
                raise
            else:
                with self._lock:
                    self._spare.append(opened)

    def _lose(self) -> None:
        """Forget all segments of this process."""
        with self._lock:
            self._lost += [*self._spare, *self._rolled, *filter(None, [self._current])]
            self._current, self._spare, self._rolled, self._registered = None, [], [], []

    def lost(self) -> None:
        """Note that others have taken segments of this process away, because it was silent for long."""
        self._lose()
        self._user = None

    def reserve(self, size: int, own: _OpenSegment | None) -> tuple[_OpenSegment, Extent]:
        """Reserve a place for the tail of a payload (any thread).

        It is in the segment that is being written or, where each write needs one of its own, in that of the caller.
        """
        assert self._here is not None
        number, store = self._here
        with self._lock:
            segment = own if store.one_write_each else self._current
            over = segment is not None and segment.end > 0 and segment.end + size > SEGMENT_BYTES
            if (segment is None or over) and self._spare:
                before, segment = self._current, self._spare.pop(0)
                if store.one_write_each:
                    self._rolled.append(segment)
                else:
                    self._rolled += filter(None, [before])
                    self._current = segment
            if segment is None:
                raise SegmentLostError  # since the caller was ready
            extent = Extent(number, segment.id, segment.file, segment.end + ALIGNMENT, size)
            segment.end = extent.at + size + -(extent.at + size) % ALIGNMENT
            segment.users.add(extent)
            return segment, extent

    async def written(self, batch: SegmentBatch | None, work: Awaitable[T]) -> T:
        """Return what `work` returns, which encodes groups and writes a batch in another thread.

        Raises PayloadStoreError where writing hangs, as on a mount whose server is away; that thread goes on hanging.
        """
        if batch is None:
            return await work
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait([task], timeout=self._patience))[0]:
                if batch.hangs(self._patience):
                    self.lost()
                    self.on_hang()
                    raise PayloadStoreError(
                        f"payloads could not be written within {self._patience:g} s to {self._place}; nothing of the "
                        "put was stored: see that it is mounted and answers"
                    )
            return task.result()
        finally:
            task.cancel()

    def write(self, members: Sequence[_Written]) -> None:
        """Write frames into one segment (any thread)."""
        segment, runs = members[0].segment, _runs(members)
        try:
            for place, (at, buffers) in enumerate(runs, 1):
                segment.writer.write(at, buffers, sync=self._sync and place == len(runs))
        except BaseException:
            segment.broken = True
            with self._lock:
                if self._current is segment:
                    self._current = None
                    self._rolled.append(segment)
            raise

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
        for _ in range(_MOVES):
            await self._reach(apart)
            try:
                await asyncio.wait_for(compute(partial(self._fetch, codec, frozenset(deferred)), apart), self._patience)
            except TimeoutError as error:
                self.on_hang()
                raise PayloadStoreError(
                    f"payloads could not be read within {self._patience:g} s from {self._names(apart)}; nothing was "
                    "taken"
                ) from error
            apart = await self._moved([row for row in apart if isinstance(row.tail, GoneError)])
            if not apart:
                return

    async def _moved(self, gone: Sequence[GroupRow]) -> list[GroupRow]:
        """Return those of the rows whose payloads are elsewhere by now, with their present heads."""
        if not gone:
            return []
        heads = await self._engine.read(partial(statements.read_data, uids=[row.uid for row in gone]), self._scope)
        moved = [row for row in gone if heads.get(row.uid, row.payload) != row.payload]
        for row in moved:
            row.payload, row.tail = heads[row.uid], None
        return moved

    async def _reach(self, rows: Sequence[GroupRow]) -> None:
        """Open the places that payloads are in."""
        await self._open_places(_places(rows))

    async def _open_places(self, wanted: Collection[int]) -> None:
        """Open those of the places that the database knows."""
        unknown = set(wanted) - self._stores.keys()
        if not unknown:
            return
        places = await self._engine.read(statements.read_places, self._scope)
        for number in unknown:
            if number in places:
                self._stores[number] = await self._in_thread(partial(self._open_place, number, places[number]))

    def _open_place(self, number: int, url: str) -> SegmentStore:
        store = open_place(url, self._patience)
        recognise(store, self._scope.database or "", number)
        return store

    async def check_places(self, rows: Iterable[GroupRow]) -> None:
        """Make sure that what is damaged isn't that of another place in the stead of ours. Raises PayloadStoreError."""
        for number in _places(rows) & self._stores.keys():
            await self._in_thread(self._stores[number].check_there)

    def _names(self, rows: Iterable[GroupRow]) -> str:
        return ", ".join(sorted(self._stores[one].url for one in _places(rows) if one in self._stores))

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

    def unread(self, uids: Iterable[int]) -> None:
        """Note that groups are put back: whoever takes them next needs their payloads for as long as the first."""
        back = set(uids)
        self._read = [uid for uid in self._read if uid not in back]

    # Tidying up (database's thread)

    async def tend(self, compute: Callable[[Callable[[Any], Any], Any], Any], codec: Codec) -> bool:
        """Do one small step of what is due; return whether more is."""
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
        """Return whether there was more to tidy up than was done."""
        if self._tidying is None or self._tidying.cancelled():
            return False
        error = self._tidying.exception()
        if error is not None:
            _logger.debug("segments were not tidied up: %s", error, exc_info=not isinstance(error, ReplayBufError))
        return error is None and self._tidying.result()

    async def _tidy(self, compute: Callable[[Callable[[Any], Any], Any], Any], codec: Codec) -> bool:
        """Tidy up a little, beside the sweeps: they don't wait for a place that doesn't answer."""
        for store in self._stores.values():
            await self._in_thread(store.forget)
        deleted = await self._delete()
        moved = self.writes and await self._empty_one(compute, codec)
        return deleted or moved

    async def _release_read(self) -> bool:
        """Let the payloads be swept that were read; return whether there were any."""
        read, self._read = self._read, []
        if read:
            try:
                await self._write(partial(statements.keep_for_reading, uids=read, until=time.time()))
            except ReplayBufError:
                self._read += read
                raise
        return bool(read)

    async def tend_written(self, *, closing: bool = False) -> None:
        """Seal segments that nobody writes to any more."""
        with self._lock:
            unused = [one for one in self._lost if not one.users]
            self._lost = [one for one in self._lost if one not in unused]
        self._close_soon(unused)
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
        self._close_soon(done)

    def _close_soon(self, closing: Sequence[_OpenSegment]) -> None:
        """Close segments in another thread: where their place doesn't answer, that hangs as a write does."""
        if closing:
            asyncio.get_running_loop().run_in_executor(None, _close_all, closing)

    async def _renew(self) -> None:
        self._renew_at = time.monotonic() + _RENEW_SECONDS
        self._unmovable.clear()
        self._unreachable.clear()
        user = self._user

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
        """Delete empty segments of nobody; return whether there may be more."""
        deletable = partial(statements.deletable, limit=_DELETED, but=sorted(self._unreachable))
        by_place: dict[int, list[Segment]] = {}
        for number, segment in await self._engine.read(deletable, self._scope):
            by_place.setdefault(number, []).append(segment)
        for number, found in by_place.items():
            try:
                await self._open_places({number})
                for segment in found:
                    await self._in_thread(partial(self._stores[number].delete, _name(segment)))
            except (ReplayBufError, KeyError) as error:  # the other places come first, and this one again later
                _logger.debug("segments were not deleted: %s", error)
                self._unreachable.add(number)
            else:
                await self._write(partial(statements.forget, numbers=[segment.id for segment in found]))
        return sum(map(len, by_place.values())) == _DELETED

    async def _empty_one(self, compute: Callable[[Callable[[Any], Any], Any], Any], codec: Codec) -> bool:
        """Move some payloads out of a segment that is nearly empty; return whether any was."""
        assert self._here is not None
        number, _ = self._here
        sparse = partial(statements.sparse, number=number, least=_SPARSE, but=sorted(self._unmovable))
        old = await self._engine.read(sparse, self._scope)
        if old is None:
            return False
        moved = await self._move_some(old, compute, codec)
        if not moved:  # its groups are leased, or damaged
            self._unmovable.add(old)
        return moved

    async def _move_some(self, old: int, compute: Callable[[Callable[[Any], Any], Any], Any], codec: Codec) -> bool:
        found = await self._engine.read(lambda tx: statements.movable(tx, old, 0, _MOVED_GROUPS), self._scope)
        rows, size = [], 0
        for uid, data in found:
            if size > _MOVED_BYTES:
                break
            with contextlib.suppress(DecodeError):
                size += Extent.at_end_of(data).size
                rows.append(GroupRow.unread(uid, bytes(data)))
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
        # The extents are referred to until the transaction has ended, and with that their segments are open.
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


def _close_all(segments: Iterable[_OpenSegment], stores: Iterable[SegmentStore] = ()) -> None:
    for segment in segments:
        segment.writer.close()
    for store in stores:
        store.close()


def _name(segment: Segment) -> str:
    return Extent(0, segment.id, segment.file, 0, 0).name


def _places(rows: Iterable[GroupRow]) -> set[int]:
    """Return the places in which groups have arrays."""
    places = set()
    for row in rows:
        with contextlib.suppress(DecodeError):
            places.add(Extent.at_end_of(row.payload or b"").place)
    return places


def _runs(members: Sequence[_Written]) -> list[tuple[int, list[Any]]]:
    """Join what follows one another in a segment; return where each run begins, and its buffers."""
    runs: list[tuple[int, list[Any]]] = []
    end = -1
    for one in members:
        if (at := one.extent.at - ALIGNMENT) == end:
            runs[-1][1].extend(one.buffers)
        else:
            runs.append((at, [*one.buffers]))
        end = one.end
    return runs


def _ranges(codec: Codec, payload: bytes, extent: Extent, deferred: frozenset[str]) -> list[tuple[int | None, Range]]:
    """Return what has to be read of a tail: all of it, or the arrays outside these fields, by number."""
    if not deferred:
        return [(None, Range.whole(extent))]
    return [(number, Range(extent, at, size)) for number, at, size in codec.wanted(payload, deferred)]
