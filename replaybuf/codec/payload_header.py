"""The format of payloads: header, checksums, and positions of the parts.

A payload is a header of 24 bytes and a body:

    magic "RPLB", version, flags (1: zstd), two zero bytes, rollouts (u32), size of the body (u64), checksum (u32)
    length of each rollout's msgpack (u64 each) | the rollouts' msgpack, a map of fields each | bytes of arrays

All numbers are little-endian; the size is the one before compression. The checksum is the lower half of the XXH3 (64
bits) of the body as stored, seeded with the XXH3 of the rest of the header. Each rollout is unpacked by its own call,
so that other threads can run in between.

Payloads with `TAIL_BYTES` of arrays or more have version 3: they can be stored in two parts, and arrays can be read
one by one. The *head* ends before the first array, the *tail* is the arrays. After the rollouts' lengths the body
has the number of arrays (u64), their sizes (u64 each) and their checksums (u64 each: the lower half of the XXH3 of the
array's bytes). The checksum in the header is that of the rest of the head only.

Version 1 has the crc32 of the header and the body as its checksum, and no arrays after the msgpack. It can be read.

This module needs neither numpy nor msgpack, whose imports take longer than a check of a database.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import TracebackType
from typing import Any, Final

from xxhash import xxh3_64, xxh3_64_intdigest

from replaybuf.errors import DecodeError, MissingDriverError

Buffer = bytes | bytearray | memoryview

MAGIC = b"RPLB"
VERSION = 3
WHOLE = 2  # the version whose arrays are part of the checksum
_CRC32 = 1  # the version that has crc32 as its checksum
ZSTD = 1
HEAD = struct.Struct("<4sBBHIQ")
CHECKSUM = struct.Struct("<I")
BODY_AT = HEAD.size + CHECKSUM.size
#: The alignment of arrays, in bytes from the beginning of the payload.
ALIGNMENT: Final = 64
_VERSION_AT, COUNT_AT = 4, 8
LOWER = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class ArrayTable:
    """Positions of the parts of a payload, in bytes from its beginning.

    `rollouts` has the start of the first rollout's msgpack, and the end of each; `end` is the end of the head, and
    `digests_at` the position of the checksums. `sizes` and `digests` describe the arrays in the tail.
    """

    rollouts: list[int]
    end: int
    sizes: tuple[int, ...] = ()
    digests: tuple[int, ...] = ()
    digests_at: int = 0

    @classmethod
    def read(cls, body: Any, base: int, count: int, *, has_arrays: bool) -> ArrayTable:
        """Read the table of a payload whose `body` begins at byte `base`. Raises ValueError or struct.error."""
        lengths = struct.unpack_from(f"<{count}Q", body)
        at = 8 * count
        if not has_arrays:
            rollouts = [*accumulate(lengths, initial=base + at)]
            return cls(rollouts, rollouts[-1])
        (arrays,) = struct.unpack_from("<Q", body, at)
        if arrays > len(body) // 16:
            raise ValueError(f"it can't hold {arrays} arrays")
        sizes = struct.unpack_from(f"<{arrays}Q", body, at + 8)
        digests_at = at + 8 + 8 * arrays
        digests = struct.unpack_from(f"<{arrays}Q", body, digests_at)
        rollouts = [*accumulate(lengths, initial=base + digests_at + 8 * arrays)]
        return cls(rollouts, rollouts[-1] + -rollouts[-1] % ALIGNMENT, sizes, digests, base + digests_at)

    @property
    def msgpack_end(self) -> int:
        """The end of the msgpack, after which the arrays begin."""
        return self.rollouts[-1]

    @property
    def tail_size(self) -> int:
        """The size of the tail."""
        end = 0
        for size in self.sizes:
            end += -end % ALIGNMENT + size
        return end

    def places(self) -> Iterator[tuple[int, int]]:
        """Yield the offset in the tail and the size of each array."""
        at = 0
        for size in self.sizes:
            at += -at % ALIGNMENT
            yield at, size
            at += size

    def verify(self, tail: memoryview) -> None:
        """Raise ValueError unless sizes and checksums of the tail match."""
        if len(tail) != self.tail_size:
            raise ValueError(f"its arrays have {len(tail)} bytes where {self.tail_size} belong")
        at = 0
        for size, digest in zip(self.sizes, self.digests, strict=True):
            at += -at % ALIGNMENT
            if xxh3_64_intdigest(tail[at : at + size]) & LOWER != digest:
                raise ValueError("the checksum of an array doesn't match")
            at += size


@dataclass(slots=True)
class OpenPayload:
    """A payload, or its head, with a parsed header: `count` rollouts, and a body of `size` bytes, `stored` as given."""

    version: int
    flags: int
    count: int
    size: int
    stored: memoryview
    known_table: ArrayTable | None = None

    @property
    def has_tail(self) -> bool:
        """Whether the payload has a head and a tail."""
        return self.version >= VERSION

    def table(self, body: Buffer | None = None) -> ArrayTable:
        """Return the positions of the parts; `body` is the decompressed one. Raises ValueError or struct.error."""
        if self.known_table is None:
            where = self.stored if body is None else body
            self.known_table = ArrayTable.read(where, BODY_AT, self.count, has_arrays=self.has_tail)
        return self.known_table

    def head_digest(self, view: memoryview) -> int | None:
        """Return the expected checksum; None if the table is invalid."""
        if self.version == _CRC32:
            return zlib.crc32(self.stored, zlib.crc32(view[: HEAD.size]))
        if self.version == WHOLE:
            return xxh3(view[: HEAD.size], self.stored)
        try:
            end = self.table().end
        except (ValueError, struct.error):
            return None
        return xxh3(view[: HEAD.size], view[BODY_AT:end]) if end <= len(view) else None


def table_of(payload: Buffer, body: Buffer, count: int) -> ArrayTable:
    """Return the positions of the rollouts and arrays of a payload with this (decompressed) body."""
    return ArrayTable.read(body, BODY_AT, count, has_arrays=has_tail(payload))


def has_tail(payload: Buffer) -> bool:
    """Return whether a payload has a head and a tail."""
    return len(payload) >= BODY_AT and payload[_VERSION_AT] >= VERSION


def head_size(payload: Buffer) -> int:
    """Return the size of the head of a payload with a tail, given at least its table; 0 if the table is damaged."""
    (count,) = struct.unpack_from("<I", payload, COUNT_AT)
    try:
        return table_of(payload, memoryview(payload)[BODY_AT:], count).end
    except (ValueError, struct.error):
        return 0


def is_apart(payload: Buffer) -> bool:
    """Return whether this is the head of a payload whose tail is stored separately."""
    if len(payload) < BODY_AT or not has_tail(payload) or payload[: len(MAGIC)] != MAGIC:
        return False
    return len(payload) != BODY_AT + int(HEAD.unpack_from(payload)[-1])


def parts_of(payload: bytes) -> list[tuple[int, int]]:
    """Return start and end of each rollout's msgpack in a payload or its head; [] if compressed."""
    _, _, flags, _, count, _ = HEAD.unpack_from(payload)
    if flags & ZSTD:
        return []
    return [*pairwise(table_of(payload, memoryview(payload)[BODY_AT:], count).rollouts)]


def opened(payload: Buffer, verified: bool = False) -> OpenPayload:
    """Parse and verify the header of a payload. Raises DecodeError.

    For a payload with a tail only the head is verified, and the tail may be missing.
    """
    try:
        view = memoryview(payload)
    except TypeError:
        raise DecodeError(f"the payload is damaged: it is no bytes but {type(payload).__name__}") from None
    if len(view) < BODY_AT:
        raise DecodeError(f"the payload is damaged: it has {len(view)} bytes, fewer than a header takes")
    magic, version, flags, zero, count, size = HEAD.unpack_from(view)
    if magic != MAGIC:
        raise DecodeError(f"not a replaybuf payload: it begins with {magic!r}")
    if version > VERSION:
        raise DecodeError(f"the payload has format {version}, this replaybuf reads up to {VERSION}: upgrade replaybuf")
    found = OpenPayload(version, flags, count, size, view[BODY_AT:])
    if not verified and found.head_digest(view) != CHECKSUM.unpack_from(view, HEAD.size)[0]:
        raise DecodeError("the payload is damaged: its checksum doesn't match")
    if version < 1 or flags & ~ZSTD or zero or (version >= VERSION and flags):
        raise DecodeError(f"the payload is damaged: no such header (version {version}, flags {flags}, {zero})")
    return found


def verify(payload: Buffer, tail: Buffer | None = None) -> None:
    """Raise DecodeError unless header and checksums are valid; decodes nothing.

    A separate tail is verified only if given.
    """
    found = opened(payload)
    if tail is not None or (found.has_tail and len(found.stored) == found.size):
        with AS_DAMAGE:
            table = found.table()
            table.verify(found.stored[table.end - BODY_AT :] if tail is None else memoryview(tail))


class _AsDamage:
    """A context that translates any exception caused by hostile bytes to DecodeError."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, (DecodeError, MissingDriverError)):
            raise DecodeError(f"the payload is damaged: {str(error) or type(error).__name__}") from error


AS_DAMAGE: Final = _AsDamage()


def xxh3(head: Buffer, *body: Buffer) -> int:
    """Return the checksum of a body, given in parts, seeded with the rest of its header."""
    seed = xxh3_64_intdigest(head)
    if len(body) == 1:
        return xxh3_64_intdigest(body[0], seed) & LOWER
    digest = xxh3_64(seed=seed)
    for part in body:
        digest.update(part)
    return digest.intdigest() & LOWER
