"""The interface of places for segments. `segments.markers` has what their markers say."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from replaybuf.errors import PayloadStoreError
from replaybuf.segments.extents import Extent

#: The name of the marker: whose segments are here.
MARKER: Final = "replaybuf.json"
#: Where segments are, beside the marker.
SEGMENTS: Final = "segments"


class SegmentLostError(Exception):
    """A segment is no longer this process's, or its file is gone: what was written there has to be written anew."""


class TakenError(Exception):
    """There is something under the name of a new segment: the database was taken back to a time before it."""


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes to be read: the payload that they belong to, and their place in it."""

    extent: Extent
    at: int
    size: int

    @classmethod
    def whole(cls, extent: Extent) -> Range:
        """Return all of a payload."""
        return cls(extent, 0, extent.size)


@dataclass(frozen=True, slots=True)
class StoredSegment:
    """A segment as the place lists it: its name, its size, and when it was written last (seconds since the epoch)."""

    name: str
    nbytes: int
    written_at: float


class SegmentStore(ABC):
    """A place for segments. All calls block and may be made in any thread; they raise PayloadStoreError.

    `url` is shown to people, and has no secrets. `reuses` says whether segments can be written over.
    """

    url: str
    reuses: bool
    #: Whether each write needs a segment of its own.
    one_write_each: bool
    #: The marker, once it is known, and the database that it names: with another one, this is another place.
    marker: bytes | None = None
    database: bytes | None = None

    @abstractmethod
    def read_marker(self) -> bytes | None:
        """Return the marker, None where there is none."""

    @abstractmethod
    def write_marker(self, marker: bytes) -> bool:
        """Write the marker unless there is one; return whether it was written."""

    @abstractmethod
    def replace_marker(self, marker: bytes) -> None:
        """Write the marker in place of the one that is there."""

    @abstractmethod
    def check_writable(self) -> None:
        """Raise PayloadStoreError, saying what to do, where segments can't be written."""

    @abstractmethod
    def check_may_write(self) -> None:
        """Raise PayloadStoreError where this process may not write to a place that is marked; changes nothing."""

    def free_bytes(self) -> int | None:
        """Return how many bytes there is room for, None where nobody knows."""
        return None

    @abstractmethod
    def writer(self, name: str, *, anew: bool) -> SegmentWriter:
        """Return the writer of a segment, which is new or (`anew`) written over; nobody else may write to it.

        Raises TakenError where there is something under the name of a new one.
        """

    @abstractmethod
    def read(self, ranges: Sequence[Range], timeout: float) -> list[Any]:
        """Return bytes of payloads, each in memory of its own, or a DecodeError in place of those that are damaged.

        PayloadStoreError when the place doesn't answer within `timeout` seconds.
        """

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete a segment, if it is there."""

    @abstractmethod
    def segments(self) -> Iterator[StoredSegment]:
        """Yield all segments that are there."""

    @abstractmethod
    def read_raw(self, name: str, at: int, size: int) -> bytes:
        """Return bytes of a segment as they are, fewer at its end."""

    def check_there(self) -> None:
        """Raise PayloadStoreError where the place is gone, or another one is in its stead, as after an unmount."""
        found = self.read_marker()
        if found is None:
            raise PayloadStoreError(
                f"{self.url} isn't there, or has lost its {MARKER}: mount it, or put it back; nothing is lost as long "
                "as its files are"
            )
        if self.marker not in (None, found):
            raise PayloadStoreError(
                f"{self.url} is another place than before: its {MARKER} has changed; mount or put back the former one, "
                "nothing is lost as long as its files are"
            )

    def forget(self) -> None:  # noqa: B027
        """Release what is kept open of segments that were deleted."""

    def close(self) -> None:  # noqa: B027
        """Release everything."""


class SegmentWriter(ABC):
    """Writes one segment, in one thread at a time."""

    @abstractmethod
    def write(self, at: int, buffers: Sequence[Any], *, sync: bool) -> None:
        """Write buffers one after the other from a place on; with `sync` they are on the disk when this returns.

        Raises PayloadStoreError, and DiskFullError, when they aren't all written, and SegmentLostError when nobody
        would find them, because the segment was deleted or this writer closed.
        """

    def close(self) -> None:  # noqa: B027
        """Release the segment."""
