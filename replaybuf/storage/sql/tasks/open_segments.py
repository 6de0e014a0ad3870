"""Segments that this process writes to: a place is reserved, then written; they are sealed when nobody does."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from replaybuf.codec.payload_format import SplitPayload
from replaybuf.errors import PayloadStoreError
from replaybuf.segments.store import (
    ALIGNMENT,
    Extent,
    Frame,
    SegmentLostError,
    SegmentStore,
    SegmentWriter,
    TakenError,
    file_name,
)
from replaybuf.storage.sql.statements.segments import Segment

#: A segment in a folder takes no more payloads when it has so many bytes.
SEGMENT_BYTES = 128 << 20
#: Arrays that are smaller on average are copied together first: a system call takes longer for many small buffers.
_JOINED = 8 << 10


class OpenSegment:
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
    _segments: OpenSegments
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

    segment: OpenSegment
    extent: Extent
    end: int
    buffers: list[Any]


class OpenSegments:
    """The segments of one process in a place: the one that is being written, those that come next, and those before.

    `number` is that of the place, `database` that of the database, for frames. With `sync`
    payloads are on the disk once they are written.
    """

    def __init__(self, number: int, store: SegmentStore, database: bytes, *, sync: bool) -> None:
        self.number = number
        self.store = store
        self.database = database
        self._sync = sync
        self._lock = threading.Lock()
        self._current: OpenSegment | None = None
        self._spare: list[OpenSegment] = []
        self._rolled: list[OpenSegment] = []
        self._lost: list[OpenSegment] = []  # to be closed when nobody writes to them
        self._registered: list[tuple[Segment, bool]] = []  # not open yet; whether they are to be written over

    @property
    def spare(self) -> int:
        """The number of segments that are open and empty."""
        return len(self._spare)

    @property
    def registered(self) -> int:
        """The number of segments that are registered, and not open yet."""
        return len(self._registered)

    def register(self, old: Iterable[Segment], new: Iterable[Segment]) -> None:
        """Note segments that are registered, in files that are written over, and in new ones."""
        with self._lock:
            self._registered += [*((one, True) for one in old), *((one, False) for one in new)]

    def open(self) -> list[int]:
        """Open what is registered; return those that can't be, because the files aren't as the database says."""
        taken: list[int] = []
        while True:
            with self._lock:
                if not self._registered:
                    return taken
                segment, anew = self._registered.pop(0)
            try:
                opened = OpenSegment(segment, self.store.writer(file_name(segment.file), anew=anew))
            except TakenError:
                taken.append(segment.id)
            except BaseException:
                with self._lock:
                    self._registered.insert(0, (segment, anew))
                raise
            else:
                with self._lock:
                    self._spare.append(opened)

    def reserve(self, size: int, own: OpenSegment | None) -> tuple[OpenSegment, Extent]:
        """Reserve a place for the tail of a payload (any thread).

        It is in the segment that is being written or, where each write needs one of its own, in that of the caller.
        """
        with self._lock:
            segment = own if self.store.one_write_each else self._current
            over = segment is not None and segment.end > 0 and segment.end + size > SEGMENT_BYTES
            if (segment is None or over) and self._spare:
                before, segment = self._current, self._spare.pop(0)
                if self.store.one_write_each:
                    self._rolled.append(segment)
                else:
                    self._rolled += filter(None, [before])
                    self._current = segment
            if segment is None:
                raise SegmentLostError  # since the caller was ready
            extent = Extent(self.number, segment.id, segment.file, segment.end + ALIGNMENT, size)
            segment.end = extent.at + size + -(extent.at + size) % ALIGNMENT
            segment.users.add(extent)
            return segment, extent

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

    def lose(self) -> None:
        """Forget all segments: others have taken them away."""
        with self._lock:
            self._lost += [*self._spare, *self._rolled, *filter(None, [self._current])]
            self._current, self._spare, self._rolled, self._registered = None, [], [], []

    def take_lost(self) -> list[OpenSegment]:
        """Return those that were lost and that nobody writes to, and forget them."""
        with self._lock:
            unused = [one for one in self._lost if not one.users]
            self._lost = [one for one in self._lost if one not in unused]
        return unused

    def finished(self, *, closing: bool) -> list[OpenSegment]:
        """Return those that nobody writes to any more; when `closing`, nobody will to the present one."""
        with self._lock:
            if closing and self._current is not None:
                self._rolled.append(self._current)
                self._current = None
            return [one for one in self._rolled if not one.users]

    def sealed(self, done: Sequence[OpenSegment]) -> None:
        """Forget those that were sealed."""
        with self._lock:
            self._rolled = [one for one in self._rolled if one not in done]

    def close(self) -> None:
        """Close all that were lost."""
        for segment in self._lost:
            segment.writer.close()


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
