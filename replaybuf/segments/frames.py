"""Frames: how payloads lie in a segment.

A segment is a sequence of frames. Each begins at a multiple of 64 bytes and is a header of 64 bytes, then the bytes:

    magic "RPSG", version, three zero bytes, segment (u64), place of the bytes (u64), their number (u64),
    number of the database (16 bytes), seconds since the epoch (f64), XXH3 of all that (u32), four zero bytes

All numbers are little-endian. A segment that is written over has a new number, so that a frame of its former content is
told from those of the present one. The bytes have their checksums in the head of their payload (`codec.payload`), which
is in the database.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from xxhash import xxh3_64_intdigest

from replaybuf.errors import DecodeError
from replaybuf.segments.extents import Extent

MAGIC: Final = b"RPSG"
VERSION: Final = 1
#: Frames begin at multiples of this many bytes, and their headers are as long.
ALIGNMENT: Final = 64
_HEADER = struct.Struct("<4sB3xQQQ16sd")
_CHECKSUM = struct.Struct("<I4x")
assert _HEADER.size + _CHECKSUM.size == ALIGNMENT


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
        return fields + _CHECKSUM.pack(xxh3_64_intdigest(fields) & 0xFFFFFFFF)

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
        (checksum,) = _CHECKSUM.unpack_from(header, _HEADER.size)
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


def scan(read: Callable[[int, int], bytes], size: int) -> Iterator[Frame]:
    """Yield the frames of a segment of this size, as far as they follow one another; `read(at, size)` reads from it."""
    at, segment = 0, None
    while at + ALIGNMENT <= size:
        frame = Frame.parsed(read(at, ALIGNMENT))
        if frame is None or frame.at != at + ALIGNMENT or frame.segment != (segment or frame.segment):
            return
        segment, at = frame.segment, frame.end
        yield frame
