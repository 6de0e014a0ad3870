"""The form of a payload: header, checksums, compression, and where its parts are.

A payload is a header of 24 bytes and a body:

    magic "RPLB", version, flags (1: zstd), two zero bytes, rollouts (u32), size of the body (u64), checksum (u32)
    length of each rollout's msgpack (u64 each) | the rollouts' msgpack, a map of fields each | bytes of arrays

All numbers are little-endian; the size is the one before compression. The checksum is the lower half of the XXH3 (64
bits) of the body as stored, seeded with the XXH3 of the rest of the header. Each rollout is unpacked by its own call:
other threads run in between.

Payloads with `TAIL_BYTES` of arrays or more have version 3: they can be stored in two parts, and each array can be read
by itself. The *head* is all up to the first array, the *tail* the arrays. After the lengths of the rollouts the body
has the number of arrays (u64), their sizes (u64 each) and their checksums (u64 each: the lower half of the XXH3 of the
array's bytes). The checksum in the header is that of the rest of the head only.

Version 1 had the crc32 of the header and the body as its checksum, and no arrays after the msgpack. It is read.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Literal

from xxhash import xxh3_64, xxh3_64_intdigest

from replaybuf.codec.arrays_apart import ArrayTable
from replaybuf.codec.msgpack_values import Packed
from replaybuf.codec.numpy_arrays import ALIGNMENT, aligned, as_writable
from replaybuf.errors import DecodeError, MissingDriverError

Compression = Literal["none", "zstd"]
Buffer = bytes | bytearray | memoryview
#: bytes, or what gives its memory: of the group or of msgpack.
Parts = Sequence[Any]

MAGIC = b"RPLB"
VERSION = 3
_WHOLE = 2  # the version whose arrays are part of the checksum
_CRC32 = 1  # the version that has crc32 as its checksum
#: Payloads with so many bytes of arrays have a head and a tail.
TAIL_BYTES: Final = 16 << 10
ZSTD = 1
_HEAD = struct.Struct("<4sBBHIQ")
_CHECKSUM = struct.Struct("<I")
BODY_AT = _HEAD.size + _CHECKSUM.size
_VERSION_AT, _COUNT_AT = 4, 8
_LOWER = 0xFFFFFFFF
# The largest size that a compressed body may claim: a hostile one can't make the reader allocate more. Bodies that
# compress better than this are stored uncompressed, so that everything written can be read.
_MAX_RATIO = 1000
_ALWAYS_ALLOWED = 64 << 20


@dataclass(frozen=True, slots=True)
class SplitPayload:
    """A payload in two parts: `head`, and the buffers of the `tail`, which are those of the rollouts' arrays.

    Both together, `size` bytes of tail, are the payload. Without a tail the head is all of it.
    """

    head: bytes
    tail: Sequence[Any] = ()
    size: int = 0

    @property
    def nbytes(self) -> int:
        """The size of the whole payload."""
        return len(self.head) + self.size

    def joined(self) -> bytes:
        """Return the whole payload, whose checksums are those of its own bytes, whatever happens to the arrays."""
        if not self.tail:
            return self.head
        payload = b"".join((self.head, *self.tail))
        _seal(as_writable(payload).data)
        return payload


def in_one_part(
    count: int, lengths: bytes, packed: Packed, sizes: Sequence[int], compression: Compression
) -> SplitPayload:
    """Return a payload without a tail, compressed when that was asked for and saves space."""
    out_of_band, end = aligned(packed.out_of_band, sizes, BODY_AT + len(lengths) + len(packed.msgpack))
    size = end - BODY_AT
    flags, stored = _compressed((lengths, packed.msgpack, *out_of_band), size, compression)
    head = _HEAD.pack(MAGIC, _WHOLE, flags, 0, count, size)
    if flags or not out_of_band:
        return SplitPayload(b"".join((head, _CHECKSUM.pack(xxh3(head, *stored)), *stored)))
    # The checksum is that of these bytes, not of the users' arrays, which their threads may be changing.
    payload = b"".join((head, bytes(_CHECKSUM.size), *stored))
    _CHECKSUM.pack_into(as_writable(payload).data, _HEAD.size, xxh3(head, memoryview(payload)[BODY_AT:]))
    return SplitPayload(payload)


def in_two_parts(count: int, lengths: bytes, packed: Packed, sizes: Sequence[int], sealed: bool) -> SplitPayload:
    """Return a payload with a tail, with its checksums if it is to be `sealed`."""
    arrays = packed.out_of_band
    digests = [xxh3_64_intdigest(one) & _LOWER for one in arrays] if sealed else [0] * len(arrays)
    table = struct.pack(f"<Q{2 * len(arrays)}Q", len(arrays), *sizes, *digests)
    start = BODY_AT + len(lengths) + len(table) + len(packed.msgpack)
    padding = bytes(-start % ALIGNMENT)
    tail, end = aligned(arrays, sizes, start + len(padding))
    head = _HEAD.pack(MAGIC, VERSION, 0, 0, count, end - BODY_AT)
    body = (lengths, table, packed.msgpack, padding)
    checksum = xxh3(head, *body) if sealed else 0
    return SplitPayload(b"".join((head, _CHECKSUM.pack(checksum), *body)), tail, end - start - len(padding))


def _seal(payload: memoryview) -> None:
    """Write the checksums into a whole payload with a tail, those of its own bytes."""
    (count,) = struct.unpack_from("<I", payload, _COUNT_AT)
    table = table_of(payload, payload[BODY_AT:], count)
    tail = payload[table.end :]
    digests = [xxh3_64_intdigest(tail[at : at + size]) & _LOWER for at, size in table.places()]
    struct.pack_into(f"<{len(digests)}Q", payload, table.digests_at, *digests)
    _CHECKSUM.pack_into(payload, _HEAD.size, xxh3(payload[: _HEAD.size], payload[BODY_AT : table.end]))


def table_of(payload: Buffer, body: Buffer, count: int) -> ArrayTable:
    """Return where the rollouts and the arrays of a payload are, whose body may be decompressed."""
    return ArrayTable.read(body, BODY_AT, count, has_arrays=has_tail(payload))


def has_tail(payload: Buffer) -> bool:
    """Return whether a payload has a head and a tail."""
    return len(payload) >= BODY_AT and payload[_VERSION_AT] >= VERSION


def head_size(payload: Buffer) -> int:
    """Return the size of the head of a payload with a tail, given at least its table; 0 if that is damaged."""
    (count,) = struct.unpack_from("<I", payload, _COUNT_AT)
    try:
        return table_of(payload, memoryview(payload)[BODY_AT:], count).end
    except (ValueError, struct.error):
        return 0


def is_apart(payload: Buffer) -> bool:
    """Return whether this is the head of a payload whose tail is elsewhere."""
    if len(payload) < BODY_AT or not has_tail(payload) or payload[: len(MAGIC)] != MAGIC:
        return False
    return len(payload) != BODY_AT + int(_HEAD.unpack_from(payload)[-1])


def parts_of(payload: bytes) -> list[tuple[int, int]]:
    """Return where in a payload, or its head, the msgpack of each rollout begins and ends; nothing if compressed."""
    _, _, flags, _, count, _ = _HEAD.unpack_from(payload)
    if flags & ZSTD:
        return []
    return [*pairwise(table_of(payload, memoryview(payload)[BODY_AT:], count).rollouts)]


def opened(payload: Buffer, verified: bool = False) -> tuple[int, int, int, memoryview]:
    """Return flags, number of rollouts, size of the body, and the stored body; DecodeError if they can't be trusted.

    Of a payload with a tail only the head is verified, which may be all that is given.
    """
    try:
        view = memoryview(payload)
    except TypeError:
        raise DecodeError(f"the payload is damaged: it is no bytes but {type(payload).__name__}") from None
    if len(view) < BODY_AT:
        raise DecodeError(f"the payload is damaged: it has {len(view)} bytes, fewer than a header takes")
    magic, version, flags, zero, count, size = _HEAD.unpack_from(view)
    if magic != MAGIC:
        raise DecodeError(f"not a replaybuf payload: it begins with {magic!r}")
    if version > VERSION:
        raise DecodeError(f"the payload has format {version}, this replaybuf reads up to {VERSION}: upgrade replaybuf")
    (checksum,) = _CHECKSUM.unpack_from(view, _HEAD.size)
    body = view[BODY_AT:]
    if not verified and _checksum(view, version, count) != checksum:
        raise DecodeError("the payload is damaged: its checksum doesn't match")
    if version < 1 or flags & ~ZSTD or zero or (version >= VERSION and flags):
        raise DecodeError(f"the payload is damaged: no such header (version {version}, flags {flags}, {zero})")
    return flags, count, size, body


def _checksum(view: memoryview, version: int, count: int) -> int | None:
    """Return the checksum that the header should have; None if there can't be one."""
    head, body = view[: _HEAD.size], view[BODY_AT:]
    if version == _CRC32:
        return _crc32(head, body)
    if version == _WHOLE:
        return xxh3(head, body)
    try:
        end = table_of(view, body, count).end
    except (ValueError, struct.error):
        return None
    return xxh3(head, view[BODY_AT:end]) if end <= len(view) else None


@contextmanager
def as_damage() -> Iterator[None]:
    """Raise DecodeError for whatever hostile bytes raise."""
    try:
        yield
    except (DecodeError, MissingDriverError):
        raise
    except Exception as error:
        raise DecodeError(f"the payload is damaged: {str(error) or type(error).__name__}") from error


def _crc32(head: memoryview, body: memoryview) -> int:
    return zlib.crc32(body, zlib.crc32(head))


def xxh3(head: Buffer, *body: Buffer) -> int:
    digest = xxh3_64(seed=xxh3_64_intdigest(head))
    for part in body:
        digest.update(part)
    return digest.intdigest() & _LOWER


def zstandard_module(what: str = "zstd compression") -> Any:
    """Return the module zstandard, which something needs. Raises MissingDriverError."""
    try:
        import zstandard
    except ImportError as error:
        raise MissingDriverError(f"{what} needs the package zstandard: pip install zstandard") from error
    return zstandard


def _compressed(body: Parts, size: int, compression: Compression) -> tuple[int, Parts]:
    """Return the flags, and the body of this size as stored."""
    if compression == "none":
        return 0, body
    stored: bytes = zstandard_module().ZstdCompressor().compress(b"".join(body))
    if len(stored) >= size or size > _allowed_size(len(stored)):
        return 0, body
    return ZSTD, (stored,)


def _allowed_size(compressed: int) -> int:
    return _ALWAYS_ALLOWED + _MAX_RATIO * compressed


def decompress(stored: memoryview, size: int) -> bytes:
    """Return the body of `size` bytes; ValueError, before anything is allocated, when the claimed size doesn't fit."""
    zstandard = zstandard_module()
    if size > _allowed_size(len(stored)):
        raise ValueError(f"it claims {size} bytes, too many for {len(stored)} compressed ones")
    if zstandard.frame_content_size(stored) != size:  # the decompressor relies on it
        raise ValueError("its sizes before compression don't agree")
    body: bytes = zstandard.ZstdDecompressor().decompress(stored, max_output_size=size)
    return body
