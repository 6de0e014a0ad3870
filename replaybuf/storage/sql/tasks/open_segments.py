"""Segments open for writing by this process: ranges are reserved, then written; unused segments are sealed."""

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

#: Size in bytes at which a segment in a folder is rolled.
SEGMENT_BYTES = 128 << 20
#: Buffers with a smaller average size are joined first: a system call is slower for many small buffers.
_JOINED = 8 << 10


class OpenSegment:
    """A segment open for writing. `users` are its extents with a payload in flight."""

    def __init__(self, segment: Segment, writer: SegmentWriter) -> None:
        self.id, self.file = segment.id, segment.file
        self.writer = writer
        self.end = 0
        self.users: weakref.WeakSet[Extent] = weakref.WeakSet()
        self.broken = False


@dataclass(slots=True)
class SegmentBatch:
    """Payloads to be written together, before the transaction that refers to them (in any one thread).

    `threshold` is the tail size from which payloads are kept apart.
    """

    threshold: int
    _segments: OpenSegments
    _refusal: PayloadStoreError | None = None
    _writing_since: float | None = None
    _pending: list[_Written] = field(default_factory=list)

    def add(self, split: SplitPayload) -> Extent:
        """Return the extent of a payload's tail, which is written by `flush`. Raises PayloadStoreError."""
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
        """Write the added tails. Raises PayloadStoreError, DiskFullError or SegmentLostError."""
        pending, self._pending = self._pending, []
        self._writing_since = time.monotonic() if pending else None
        by_segment: dict[int, list[_Written]] = {}
        for one in pending:
            by_segment.setdefault(one.segment.id, []).append(one)
        for members in by_segment.values():
            self._segments.write(members)
        self._writing_since = None

    def hangs(self, patience: float) -> bool:
        """Return whether a write in progress has taken longer than `patience` seconds."""
        since = self._writing_since
        return since is not None and time.monotonic() - since >= patience


@dataclass(frozen=True, slots=True)
class _Written:
    """A frame to be written, up to `end` with its padding. Its extent keeps the segment open."""

    segment: OpenSegment
    extent: Extent
    end: int
    buffers: list[Any]


class OpenSegments:
    """The segments of one process in a place: the current one, spare ones, and rolled ones not sealed yet.

    `number` is the id of the place, `database` that of the database, for frames. With `sync`, writes are fsynced.
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
        self._lost: list[OpenSegment] = []  # to be closed when no extent is in use
        self._registered: list[tuple[Segment, bool]] = []  # not open yet; whether to overwrite a file

    @property
    def spare(self) -> int:
        """The number of open, empty segments."""
        return len(self._spare)

    @property
    def registered(self) -> int:
        """The number of registered segments that aren't open yet."""
        return len(self._registered)

    def register(self, old: Iterable[Segment], new: Iterable[Segment]) -> None:
        """Add registered segments: `old` ones, whose files are overwritten, and `new` ones."""
        with self._lock:
            self._registered += [*((one, True) for one in old), *((one, False) for one in new)]

    def open(self) -> list[int]:
        """Open registered segments; return those that can't be, because their files don't match the database."""
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
        """Reserve a range for the tail of a payload (any thread).

        It is in the current segment or, where each write needs its own segment, in the caller's.
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
                raise SegmentLostError  # lost after the caller's `ready`
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
        """Forget all segments, after other processes have taken them over."""
        with self._lock:
            self._lost += [*self._spare, *self._rolled, *filter(None, [self._current])]
            self._current, self._spare, self._rolled, self._registered = None, [], [], []

    def take_lost(self) -> list[OpenSegment]:
        """Return lost segments without extents in use, and forget them."""
        with self._lock:
            unused = [one for one in self._lost if not one.users]
            self._lost = [one for one in self._lost if one not in unused]
        return unused

    def finished(self, *, closing: bool) -> list[OpenSegment]:
        """Return rolled segments without extents in use; with `closing`, also the current one."""
        with self._lock:
            if closing and self._current is not None:
                self._rolled.append(self._current)
                self._current = None
            return [one for one in self._rolled if not one.users]

    def sealed(self, done: Sequence[OpenSegment]) -> None:
        """Forget segments that were sealed."""
        with self._lock:
            self._rolled = [one for one in self._rolled if one not in done]

    def close(self) -> None:
        """Close all lost segments."""
        for segment in self._lost:
            segment.writer.close()


def _runs(members: Sequence[_Written]) -> list[tuple[int, list[Any]]]:
    """Join adjacent frames of a segment; return the offset of each run, and its buffers."""
    runs: list[tuple[int, list[Any]]] = []
    end = -1
    for one in members:
        if (at := one.extent.at - ALIGNMENT) == end:
            runs[-1][1].extend(one.buffers)
        else:
            runs.append((at, [*one.buffers]))
        end = one.end
    return runs
