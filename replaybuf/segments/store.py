"""The interface of places for segments, the format of segments (frames), and references to payloads (extents).

A segment is a sequence of frames. Each begins at a multiple of 64 bytes and is a header of 64 bytes, then the bytes:

    magic "RPSG", version, three zero bytes, segment (u64), offset of the bytes (u64), their number (u64),
    number of the database (16 bytes), seconds since the epoch (f64), XXH3 of all that (u32), four zero bytes

An overwritten segment gets a new number, which distinguishes frames of its old content from new ones. The checksums of
the bytes are in the head of their payload (`codec.payload`), which is in the database. At the end of that head is the
extent of the bytes:

    magic "RPLX", place (u32), segment (u64), file (u64), offset of the bytes (u64), their number (u64), XXH3 (u32)

All numbers are little-endian. Ownership of places is in `segments.places`.
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
#: The size of an extent behind the head of a payload.
EXTENT_BYTES: Final = _FIELDS.size + _CHECKSUM.size


def _digest(fields: bytes) -> int:
    """Return the checksum of a header or an extent: the lower half of its XXH3 (64 bits)."""
    return xxh3_64_intdigest(fields) & 0xFFFFFFFF


@dataclass(frozen=True)
class Extent:
    """A range of bytes in a segment: the numbers of the place, the segment and its file, the offset and the size."""

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
        """Return the encoded extent."""
        fields = _FIELDS.pack(_MAGIC, self.place, self.segment, self.file, self.at, self.size)
        return fields + _CHECKSUM.pack(_digest(fields))

    @classmethod
    def at_end_of(cls, data: Any) -> Extent:
        """Return the extent behind a head. Raises DecodeError."""
        if len(data) >= EXTENT_BYTES:
            fields = bytes(data[-EXTENT_BYTES : -_CHECKSUM.size])
            (checksum,) = _CHECKSUM.unpack(data[-_CHECKSUM.size :])
            magic, place, segment, file, at, size = _FIELDS.unpack(fields)
            if magic == _MAGIC and _digest(fields) == checksum:
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
    """The header of a frame: the range of its bytes, the database that owns them, and when they were written."""

    segment: int
    at: int
    size: int
    database: bytes
    written_at: float

    def packed(self) -> bytes:
        """Return the encoded header."""
        fields = _HEADER.pack(MAGIC, VERSION, self.segment, self.at, self.size, self.database, self.written_at)
        return fields + _HEADER_CHECKSUM.pack(_digest(fields))

    @property
    def end(self) -> int:
        """The lowest offset for the next frame."""
        return self.at + self.size + -(self.at + self.size) % ALIGNMENT

    @classmethod
    def parsed(cls, header: Any) -> Frame | None:
        """Return the parsed header of a frame, None if it is invalid."""
        if len(header) != ALIGNMENT:
            return None
        magic, version, segment, at, size, database, written_at = _HEADER.unpack_from(header)
        (checksum,) = _HEADER_CHECKSUM.unpack_from(header, _HEADER.size)
        if magic != MAGIC or version != VERSION or _digest(bytes(header[: _HEADER.size])) != checksum:
            return None
        return cls(segment, at, size, database, written_at)


class GoneError(DecodeError):
    """The bytes no longer exist: their segment was deleted or overwritten."""


def check_frame(header: Any, extent: Extent, database: bytes | None) -> None:
    """Raise DecodeError, or GoneError if they were overwritten, unless the header is that of these bytes."""
    found = Frame.parsed(header)
    if found is None:
        raise DecodeError(f"segment {extent.name}: no payload begins at byte {extent.at}; it was damaged or cut short")
    if database not in (None, found.database):
        raise DecodeError(f"segment {extent.name}: the payload at byte {extent.at} is that of another database")
    if found.segment != extent.segment or (found.at, found.size) != (extent.at, extent.size):
        raise GoneError(f"segment {extent.name}: another payload is at byte {extent.at}; it was written over")


#: The name of the marker, which names the owner of a place.
MARKER: Final = "replaybuf.json"
#: The folder of segments, beside the marker.
SEGMENTS: Final = "segments"


class SegmentLostError(Exception):
    """The segment was taken from this process, or its file is gone: data written to it must be written again."""


class TakenError(Exception):
    """The name of a new segment is in use: the database was restored to a time before that segment."""


@dataclass(frozen=True, slots=True)
class Range:
    """A range of a payload's tail to read."""

    extent: Extent
    at: int
    size: int

    @classmethod
    def whole(cls, extent: Extent) -> Range:
        """Return the range of the whole tail."""
        return cls(extent, 0, extent.size)


@dataclass(frozen=True, slots=True)
class StoredSegment:
    """A segment in a place's listing: its name, size, and last modification (seconds since the epoch)."""

    name: str
    nbytes: int
    written_at: float


class SegmentStore(ABC):
    """A place for segments. All calls block, may be made in any thread, and raise PayloadStoreError.

    `url` is for people, without secrets. `reuses` says whether segments can be overwritten.
    """

    url: str
    reuses: bool
    #: Whether each write needs a segment of its own.
    one_write_each: bool
    #: The marker, once known, and the database that it names: another marker means another place.
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
        """Overwrite the marker."""

    @abstractmethod
    def check_writable(self) -> None:
        """Raise PayloadStoreError, with advice, if segments can't be written."""

    @abstractmethod
    def check_may_write(self) -> None:
        """Raise PayloadStoreError if this process may not write to a marked place; changes nothing."""

    def free_bytes(self) -> int | None:
        """Return the free bytes, None if unknown."""
        return None

    @abstractmethod
    def writer(self, name: str, *, anew: bool) -> SegmentWriter:
        """Return the only writer of a segment, which is new or overwritten (`anew`).

        Raises TakenError if the name of a new segment is in use.
        """

    @abstractmethod
    def read(self, ranges: Sequence[Range], timeout: float) -> list[Any]:
        """Return the bytes of ranges, each in newly allocated memory, or a DecodeError for a damaged one.

        PayloadStoreError when the place doesn't answer within `timeout` seconds.
        """

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete a segment if it exists."""

    @abstractmethod
    def segments(self) -> Iterator[StoredSegment]:
        """Yield all segments."""

    @abstractmethod
    def read_raw(self, name: str, at: int, size: int) -> bytes:
        """Return unchecked bytes of a segment, fewer at its end."""

    def check_there(self) -> None:
        """Raise PayloadStoreError if the place is gone or replaced by another one, as after an unmount."""
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
        """Close deleted segments."""

    def close(self) -> None:  # noqa: B027
        """Release everything."""


class SegmentWriter(ABC):
    """Writes one segment, in one thread at a time."""

    @abstractmethod
    def write(self, at: int, buffers: Sequence[Any], *, sync: bool) -> None:
        """Write consecutive buffers at an offset; with `sync` they are durable when this returns.

        Raises PayloadStoreError and DiskFullError when not all are written, and SegmentLostError when they would be
        lost, because the segment was deleted or this writer closed.
        """

    def close(self) -> None:  # noqa: B027
        """Release the segment."""
