"""Places for segments: their interface, how payloads lie in a segment (frames), and where one is (extents).

A segment is a sequence of frames. Each begins at a multiple of 64 bytes and is a header of 64 bytes, then the bytes:

    magic "RPSG", version, three zero bytes, segment (u64), place of the bytes (u64), their number (u64),
    number of the database (16 bytes), seconds since the epoch (f64), XXH3 of all that (u32), four zero bytes

A segment that is written over has a new number, so that a frame of its former content is told from those of the present
one. The bytes have their checksums in the head of their payload (`codec.payload`), which is in the database. At the end
of that head an extent says where they are:

    magic "RPLX", place (u32), segment (u64), file (u64), place of the bytes (u64), their number (u64), XXH3 (u32)

All numbers are little-endian. `segments.places` has whose a place is.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from xxhash import xxh3_64_intdigest

from replaybuf.errors import DecodeError, PayloadStoreError

_FIELDS = struct.Struct("<4sIQQQQ")
_CHECKSUM = struct.Struct("<I")
_MAGIC: Final = b"RPLX"
#: The bytes that an extent takes behind the head of a payload.
EXTENT_BYTES: Final = _FIELDS.size + _CHECKSUM.size


@dataclass(frozen=True)
class Extent:
    """Bytes in a segment: the number of its place, of the segment and of its file, and where in it they are."""

    place: int
    segment: int
    file: int
    at: int
    size: int

    @property
    def name(self) -> str:
        """The name of the segment's file or object."""
        return file_name(self.file)

    def packed(self) -> bytes:
        """Return the extent as it stands behind a head."""
        fields = _FIELDS.pack(_MAGIC, self.place, self.segment, self.file, self.at, self.size)
        return fields + _CHECKSUM.pack(xxh3_64_intdigest(fields) & 0xFFFFFFFF)

    @classmethod
    def at_end_of(cls, data: Any) -> Extent:
        """Return the extent behind a head. Raises DecodeError."""
        if len(data) >= EXTENT_BYTES:
            fields = bytes(data[-EXTENT_BYTES : -_CHECKSUM.size])
            (checksum,) = _CHECKSUM.unpack(data[-_CHECKSUM.size :])
            magic, place, segment, file, at, size = _FIELDS.unpack(fields)
            if magic == _MAGIC and xxh3_64_intdigest(fields) & 0xFFFFFFFF == checksum:
                return cls(place, segment, file, at, size)
        raise DecodeError("the payload is damaged: it doesn't say where its arrays are")


def file_name(file: int) -> str:
    """Return the name of a segment's file or object."""
    return f"{file}.seg"


MAGIC: Final = b"RPSG"
VERSION: Final = 1
#: Frames begin at multiples of this many bytes, and their headers are as long.
ALIGNMENT: Final = 64
_HEADER = struct.Struct("<4sB3xQQQ16sd")
_HEADER_CHECKSUM = struct.Struct("<I4x")
assert _HEADER.size + _HEADER_CHECKSUM.size == ALIGNMENT


@dataclass(frozen=True, slots=True)
class Frame:
    """The header of a frame: where its bytes are, the database that names them, and when they were written."""

    segment: int
    at: int
    size: int
    database: bytes
    written_at: float

    def packed(self) -> bytes:
        """Return the header as it is written."""
        fields = _HEADER.pack(MAGIC, VERSION, self.segment, self.at, self.size, self.database, self.written_at)
        return fields + _HEADER_CHECKSUM.pack(xxh3_64_intdigest(fields) & 0xFFFFFFFF)

    @property
    def end(self) -> int:
        """Where the next frame may begin."""
        return self.at + self.size + -(self.at + self.size) % ALIGNMENT

    @classmethod
    def parsed(cls, header: Any) -> Frame | None:
        """Return the frame of a header, None where there is none."""
        if len(header) != ALIGNMENT:
            return None
        magic, version, segment, at, size, database, written_at = _HEADER.unpack_from(header)
        (checksum,) = _HEADER_CHECKSUM.unpack_from(header, _HEADER.size)
        if (
            magic != MAGIC
            or version != VERSION
            or xxh3_64_intdigest(bytes(header[: _HEADER.size])) & 0xFFFFFFFF != checksum
        ):
            return None
        return cls(segment, at, size, database, written_at)


class GoneError(DecodeError):
    """Bytes aren't there any more: their segment was deleted, or written over."""


def check_frame(header: Any, extent: Extent, database: bytes | None) -> None:
    """Raise DecodeError, or GoneError where others are there, unless the header is that of these bytes."""
    found = Frame.parsed(header)
    if found is None:
        raise DecodeError(f"segment {extent.name}: no payload begins at byte {extent.at}; it was damaged or cut short")
    if database not in (None, found.database):
        raise DecodeError(f"segment {extent.name}: the payload at byte {extent.at} is that of another database")
    if found.segment != extent.segment or (found.at, found.size) != (extent.at, extent.size):
        raise GoneError(f"segment {extent.name}: another payload is at byte {extent.at}; it was written over")


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
