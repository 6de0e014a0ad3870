"""The interface of places for payloads, and references to bytes in their files (extents).

A file or object is written once, under a random name, before the commit that names it, and never changed. It has the
tails of some payloads, each at a multiple of 64 bytes. The checksums of a tail are in the head of its payload
(`codec.payload`), which is in the database. At the end of that head is the extent of the tail:

    magic "RPLX", place (u32), file (u64), offset of the bytes (u64), their number (u64), XXH3 (u32)

All numbers are little-endian. Ownership of places is in `places.owners`.
"""

from __future__ import annotations

import secrets
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from xxhash import xxh3_64_intdigest

from replaybuf.errors import DecodeError, PayloadStoreError
from replaybuf.values.codec.payload_format import SplitPayload

_FIELDS = struct.Struct("<4sIQQQ")
_CHECKSUM = struct.Struct("<I")
_MAGIC: Final = b"RPLX"
#: The size of an extent behind the head of a payload.
EXTENT_BYTES: Final = _FIELDS.size + _CHECKSUM.size
#: Tails begin at multiples of this many bytes in a file.
ALIGNMENT: Final = 64
#: The size and the number of groups from which a file has no more: it is deleted when its last group has gone.
FILE_BYTES, FILE_GROUPS = 4 << 20, 64
#: Buffers with a smaller average size are joined first: a file takes few calls, each of which waits for the GIL.
_SMALL_BUFFER = 64 << 10


@dataclass(frozen=True, slots=True)
class Extent:
    """A range of bytes in a file: the numbers of the place and of the file, the offset and the size."""

    place: int
    file: int
    at: int
    size: int

    @property
    def name(self) -> str:
        """The name of the file or object."""
        return file_name(self.file)

    def part(self, at: int, size: int) -> Extent:
        """Return the range of `size` bytes that begins `at` bytes into this one."""
        return Extent(self.place, self.file, self.at + at, size)

    def packed(self) -> bytes:
        """Return the encoded extent."""
        fields = _FIELDS.pack(_MAGIC, self.place, self.file, self.at, self.size)
        return fields + _CHECKSUM.pack(_digest(fields))

    @classmethod
    def at_end_of(cls, data: Any) -> Extent:
        """Return the extent behind a head. Raises DecodeError."""
        if len(data) >= EXTENT_BYTES:
            fields = bytes(data[-EXTENT_BYTES : -_CHECKSUM.size])
            (checksum,) = _CHECKSUM.unpack(data[-_CHECKSUM.size :])
            magic, place, file, at, size = _FIELDS.unpack(fields)
            if magic == _MAGIC and _digest(fields) == checksum:
                return cls(place, file, at, size)
        raise DecodeError("the payload is damaged: it doesn't say where its arrays are")


def _digest(fields: bytes) -> int:
    """Return the checksum of an extent: the lower half of its XXH3 (64 bits)."""
    return xxh3_64_intdigest(fields) & 0xFFFFFFFF


def file_name(file: int) -> str:
    """Return the name of a file or object."""
    return f"{file:016x}.bin"


def file_number(name: str) -> int | None:
    """Return the number of the file or object of this name, None if the name isn't one of ours."""
    try:
        number = int(name.partition(".")[0], 16)
    except ValueError:
        return None
    return number if file_name(number) == name else None


#: The name of the marker, which names the owner of a place.
MARKER: Final = "replaybuf.json"
#: The folder of files, beside the marker.
FILES: Final = "files"


class GoneError(DecodeError):
    """The bytes no longer exist: their file was deleted."""


class PlaceStore(ABC):
    """A place for payloads. All calls block, may be made in any thread, and raise PayloadStoreError.

    `url` is for people, without secrets.
    """

    url: str
    #: The exceptions for a place that can't be used.
    errors: tuple[type[Exception], ...] = (OSError,)
    #: The marker, once known: another marker means another place.
    marker: bytes | None = None

    @abstractmethod
    def read_marker(self) -> bytes | None:
        """Return the marker, None where there is none."""

    @abstractmethod
    def write_marker(self, marker: bytes, *, replace: bool = False) -> bool:
        """Write the marker durably, unless there is one that isn't to be replaced; return whether it was written."""

    def prepare(self) -> None:  # noqa: B027
        """Make a new place ready for files. Raises PayloadStoreError, with advice, if it isn't there."""

    @abstractmethod
    def write(self, files: Sequence[tuple[str, Sequence[Any]]], *, sync: bool) -> None:
        """Write new files, given by name and consecutive buffers; with `sync` they are durable when this returns.

        Raises PayloadStoreError and StorageError when not all are written, or would be lost.
        """

    def read(self, extents: Sequence[Extent]) -> list[Any]:
        """Return the bytes of ranges, each in newly allocated memory, or a DecodeError for a damaged one."""
        positions: dict[str, list[int]] = {}
        for position, extent in enumerate(extents):
            positions.setdefault(extent.name, []).append(position)
        contents: list[Any] = [None] * len(extents)
        ranges = [[extents[position] for position in members] for members in positions.values()]
        for members, raws in zip(positions.values(), self.read_files(positions, ranges), strict=True):
            for position, raw in zip(members, raws, strict=True):
                contents[position] = raw
        return contents

    def read_files(self, names: Iterable[str], ranges: Iterable[Sequence[Extent]]) -> Iterable[Sequence[Any]]:
        """Return the answers of `read_file` for each file in turn."""
        return map(self.read_file, names, ranges)

    def read_file(self, name: str, extents: Sequence[Extent]) -> Sequence[Any]:
        """Return the answers of `read` for one file."""
        with self.ours("read"):
            try:
                return self.read_ranges(name, extents)
            except FileNotFoundError:
                self.check_there()
                return [GoneError(f"the file {name} isn't there any more: somebody deleted it")] * len(extents)

    @abstractmethod
    def read_ranges(self, name: str, extents: Sequence[Extent]) -> Sequence[Any]:
        """Return the bytes of ranges of a file as `read` does. Raises FileNotFoundError."""

    @abstractmethod
    def delete(self, names: Iterable[str]) -> None:
        """Delete those of these files that exist."""

    @abstractmethod
    def files(self) -> Iterator[tuple[str, float]]:
        """Yield the name and the last modification, in seconds since the epoch, of all files."""

    def check_there(self) -> None:
        """Raise PayloadStoreError if the place is gone or replaced by another one, as after an unmount."""
        marker = self.read_marker()
        if marker is None:
            raise PayloadStoreError(
                f"{self.url} isn't there, or has lost its {MARKER}: mount it, or put it back (if its files are there, "
                "replaybuf doctor URL --take-over writes it again); nothing is lost as long as its files are"
            )
        if self.marker not in (None, marker):
            raise PayloadStoreError(
                f"{self.url} is another place than before: its {MARKER} has changed; mount or put back the former one, "
                "nothing is lost as long as its files are"
            )

    @contextmanager
    def ours(self, action: str) -> Iterator[None]:
        """Raise PayloadStoreError for `errors` of a place that can't be "read" or "written to", by `error`."""
        try:
            yield
        except PayloadStoreError:
            raise
        except self.errors as error:
            raise self.error(error, action) from None  # its text may contain anything

    @abstractmethod
    def error(self, error: Any, action: str) -> PayloadStoreError:
        """Return the error for a place that can't be "read" or "written to", from one of `errors`."""

    def close(self) -> None:  # noqa: B027
        """Release everything."""


@dataclass(slots=True)
class FileBatch:
    """Payloads to be written together, to a place with this number.

    `threshold` is the tail size from which payloads are kept apart. With `sync`, files are durable once written.
    """

    threshold: int
    _place_number: int
    _store: PlaceStore
    _sync: bool
    _files: dict[int, list[Any]] = field(default_factory=dict)  # the buffers of each
    _end: int = 0  # of the last file, and the number of its groups
    _groups: int = 0

    def add(self, split: SplitPayload) -> Extent:
        """Return the extent of a payload's tail, which is written by `flush`."""
        if not self._files or self._groups == FILE_GROUPS or (self._groups and self._end + split.size > FILE_BYTES):
            self._files[secrets.randbits(63)] = []  # random: of two transactions, none names the same file
            self._end = self._groups = 0
        number, written = next(reversed(self._files.items()))
        extent, padding = Extent(self._place_number, number, self._end, split.size), bytes(-split.size % ALIGNMENT)
        buffers = [*split.tail, padding]
        written += [b"".join(buffers)] if split.size < _SMALL_BUFFER * len(buffers) else buffers
        self._end += split.size + len(padding)
        self._groups += 1
        return extent

    def flush(self) -> None:
        """Write the added tails. Raises PayloadStoreError or StorageError."""
        files, self._files = self._files, {}
        if files:
            self._store.write([(file_name(number), buffers) for number, buffers in files.items()], sync=self._sync)
