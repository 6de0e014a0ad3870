"""Where the tail of a payload is, as it stands at the end of the payload's head in the database.

    magic "RPLX", place (u32), segment (u64), file (u64), place of the bytes (u64), their number (u64), XXH3 (u32)

All numbers are little-endian.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Final

from xxhash import xxh3_64_intdigest

from replaybuf.errors import DecodeError

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
