"""The format of payloads: header, checksums, and positions of the parts.

A payload is a *head*, and the *blocks*: the bytes of its arrays.

    magic "RPLB", version, flags (1: zstd), two zero bytes, rollouts, blocks, msgpack, head (u32 each), size (u64)
    checksum of the rest of the head (u64)
    size of each block (u64 each), checksum of each block (u64 each), msgpack, padding up to a multiple of 64 bytes
    blocks, each at a multiple of 64 bytes from the end of the head

All numbers are little-endian. `msgpack` and `head` are sizes in bytes, `size` is that of the whole payload. Checksums
are the XXH3 (64 bits); the one in the header is seeded with the XXH3 of the bytes before it. The head and the blocks
can be stored in two places, and a block can be read and verified alone.

The msgpack is one list of columns (`codec.columns`); in a payload with blocks also the table of their arrays
(`codec.blocks`), and its size (u32). A compressed payload is a header, with the sizes before the
compression, and the zstd frame of all that follows; its checksum is that of the frame.

This module needs neither numpy nor msgpack, whose imports take longer than a check of a database.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import TracebackType
from typing import Any, Final

from xxhash import xxh3_64_intdigest

from replaybuf.errors import DecodeError, MissingDriverError

Buffer = bytes | bytearray | memoryview

MAGIC: Final = b"RPLB"
VERSION: Final = 1
ZSTD: Final = 1
HEADER: Final = struct.Struct("<4sBBHIIIIQ")
CHECKSUM: Final = struct.Struct("<Q")
#: The position of what follows the header.
BODY_AT: Final = HEADER.size + CHECKSUM.size
#: How a payload begins that isn't compressed; and two numbers of the header, for draws, which ask for these alone.
_BEGINNING: Final = HEADER.pack(MAGIC, VERSION, 0, 0, 0, 0, 0, 0, 0)[:8]
_BLOCKS_AND_SIZE: Final = struct.Struct("<12xI8xQ")
#: The alignment of blocks, in bytes.
ALIGNMENT: Final = 64
#: The most values of columns for each byte of a head: a few bytes can't claim any number of rollouts.
MOST_VALUES: Final = 8


@dataclass(slots=True)
class Head:
    """The head of a payload: the numbers in its header, and, once it is `opened`, the sizes, checksums and places of
    its blocks. `starts` has the position of each block, from the end of the head, where the size `head` is.
    """

    flags: int
    rollouts: int
    blocks: int
    msgpack: int
    head: int
    size: int
    sizes: Sequence[int] = ()
    digests: Sequence[int] = ()
    starts: Sequence[int] = ()

    @classmethod
    def read(cls, payload: Buffer) -> Head:
        """Return the numbers in the header of a payload or a head. Raises DecodeError."""
        if len(payload) < BODY_AT:
            raise DecodeError(f"the payload is damaged: it has {len(payload)} bytes, fewer than a header takes")
        magic, version, flags, zero, *numbers = HEADER.unpack_from(payload)
        if magic != MAGIC:
            raise DecodeError(f"not a replaybuf payload: it begins with {magic!r}")
        if version > VERSION:
            raise DecodeError(
                f"the payload has format {version}, this replaybuf reads up to {VERSION}: upgrade replaybuf"
            )
        if version != VERSION or flags & ~ZSTD or zero:
            raise DecodeError(f"the payload is damaged: no such header (version {version}, flags {flags}, {zero})")
        return cls(flags, *numbers)

    @classmethod
    def opened(cls, payload: Buffer, *, verified: bool = True) -> Head:
        """Return the head of a payload, of which only the sizes are verified if it was `verified` before.

        A compressed payload has only the numbers. Raises DecodeError.
        """
        found = cls.read(payload)
        if not verified:
            verify_head(found, payload)
        if found.flags:
            return found
        blocks, head = found.blocks, found.head
        if not found.msgpack_at + found.msgpack <= head <= len(payload):
            raise DecodeError("the payload is damaged: its lengths don't add up")
        end = head
        if blocks:
            numbers = struct.unpack_from(f"<{2 * blocks}Q", payload, BODY_AT)
            found.sizes, found.digests = numbers[:blocks], numbers[blocks:]
            found.starts = starts_of(found.sizes)
            end += found.starts[-1] + found.sizes[-1]
        if end != found.size:
            raise DecodeError("the payload is damaged: its lengths don't add up")
        return found

    def packed(self) -> bytes:
        """Return the header as stored, without its checksum."""
        return HEADER.pack(
            MAGIC, VERSION, self.flags, 0, self.rollouts, self.blocks, self.msgpack, self.head, self.size
        )

    @property
    def has_blocks(self) -> bool:
        """Whether the payload has blocks, which can be stored and read apart from its head."""
        return self.blocks > 0 and not self.flags

    @property
    def msgpack_at(self) -> int:
        """The position of the msgpack, in a payload that isn't compressed."""
        return BODY_AT + 16 * self.blocks

    def places(self) -> Iterator[tuple[int, int]]:
        """Yield the position in the blocks and the size of each block."""
        return zip(self.starts, self.sizes, strict=True)

    def verify(self, blocks: memoryview) -> None:
        """Raise DecodeError unless these are the blocks that were stored."""
        if len(blocks) != self.size - self.head:
            raise DecodeError(
                f"the payload is damaged: its blocks have {len(blocks)} bytes where {self.size - self.head} belong"
            )
        for (at, size), expected in zip(self.places(), self.digests, strict=True):
            if xxh3_64_intdigest(blocks[at : at + size]) != expected:
                raise DecodeError("the payload is damaged: the checksum of a block doesn't match")


def starts_of(sizes: Sequence[int], first: int = 0) -> list[int]:
    """Return the position of each block, the first of which is at `first`."""
    return [*accumulate([size + -size % ALIGNMENT for size in sizes[:-1]], initial=first)]


def verify_head(head: Head, payload: Buffer) -> None:
    """Raise DecodeError unless the checksum in the header is right; that of a compressed payload is of all of it."""
    end = len(payload) if head.flags & ZSTD else head.head
    if not BODY_AT <= end <= len(payload):
        raise DecodeError("the payload is damaged: its lengths don't add up")
    view = memoryview(payload)
    if head_digest(view[: HEADER.size], view[BODY_AT:end]) != CHECKSUM.unpack_from(view, HEADER.size)[0]:
        raise DecodeError("the payload is damaged: its checksum doesn't match")


def verify(payload: Buffer, blocks: Buffer | None = None) -> None:
    """Raise DecodeError unless the checksums of a payload are right; decodes nothing.

    The blocks of a head alone are verified only if given.
    """
    head = Head.read(as_buffer(payload))
    verify_head(head, payload)
    if head.flags & ZSTD or (not head.blocks and head.head == head.size == len(payload)):
        return
    head = Head.opened(payload)
    if blocks is not None:
        head.verify(memoryview(blocks))
    elif not head.blocks or len(payload) == head.size:
        head.verify(memoryview(payload)[head.head :])


def as_buffer(payload: Any) -> Buffer:
    """Return a payload. Raises DecodeError if it is no bytes."""
    if not isinstance(payload, (bytes, bytearray, memoryview)):
        raise DecodeError(f"the payload is damaged: it is no bytes but {type(payload).__name__}")
    return payload


def has_blocks(payload: Buffer) -> bool:
    """Return whether a payload has blocks, given at least its header."""
    try:
        return Head.read(payload).has_blocks
    except DecodeError:
        return False


def head_size(payload: Buffer) -> int:
    """Return the size of the head of a payload with blocks, given at least its header. Raises DecodeError."""
    return Head.read(payload).head


def is_apart(payload: Buffer) -> bool:
    """Return whether this is the head of a payload whose blocks are stored separately."""
    if len(payload) < BODY_AT or payload[: len(_BEGINNING)] != _BEGINNING:
        return False
    blocks, size = _BLOCKS_AND_SIZE.unpack_from(payload)
    return bool(blocks > 0 and len(payload) != size)


def texts_of(payload: bytes) -> tuple[int, int]:
    """Return the start and the end of the part of a payload or head where texts are; (0, 0) if it is compressed."""
    head = Head.read(payload)
    return (0, 0) if head.flags & ZSTD else (head.msgpack_at, head.msgpack_at + head.msgpack)


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


def digest(buffers: Any) -> int:
    """Return the checksum of a block: the XXH3 (64 bits) of its bytes."""
    return xxh3_64_intdigest(buffers)


def head_digest(header: Buffer, body: Buffer) -> int:
    """Return the checksum of what follows a header, seeded with the rest of that header."""
    return xxh3_64_intdigest(body, xxh3_64_intdigest(header))
