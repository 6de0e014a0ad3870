"""Writing payloads in the format of `codec.payload_header`, and compression."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from xxhash import xxh3_64_intdigest

from replaybuf.codec.msgpack_values import Packed
from replaybuf.codec.numpy_arrays import aligned, as_writable
from replaybuf.codec.payload_header import (
    ALIGNMENT,
    BODY_AT,
    CHECKSUM,
    COUNT_AT,
    HEAD,
    LOWER,
    MAGIC,
    VERSION,
    WHOLE,
    ZSTD,
    OpenPayload,
    table_of,
    xxh3,
)
from replaybuf.errors import MissingDriverError

Compression = Literal["none", "zstd"]
#: bytes, or objects with the buffer protocol, in the memory of the group or of msgpack.
Parts = Sequence[Any]

#: The bytes of arrays from which payloads have a head and a tail.
TAIL_BYTES: Final = 16 << 10
# The bound of the decompressed size: a hostile body can't make the reader allocate more. Bodies that compress better
# than this are stored uncompressed, so that everything written can be read.
_MAX_RATIO = 1000
_ALWAYS_ALLOWED = 64 << 20


@dataclass(frozen=True, slots=True)
class SplitPayload:
    """A payload in two parts: `head`, and the buffers of the `tail`, which are the rollouts' arrays.

    The tail has `size` bytes. Without a tail the head is the whole payload.
    """

    head: bytes
    tail: Sequence[Any] = ()
    size: int = 0

    @property
    def nbytes(self) -> int:
        """The size of the whole payload."""
        return len(self.head) + self.size

    def joined(self) -> bytes:
        """Return the whole payload, with checksums of the copied bytes, even if the arrays are changed meanwhile."""
        if not self.tail:
            return self.head
        payload = b"".join((self.head, *self.tail))
        _seal(as_writable(payload).data)
        return payload


def in_one_part(
    count: int, lengths: bytes, packed: Packed, sizes: Sequence[int], compression: Compression
) -> SplitPayload:
    """Return a payload without a tail, compressed if requested and smaller."""
    out_of_band: Parts = ()
    end = BODY_AT + len(lengths) + len(packed.msgpack)
    if packed.out_of_band:
        out_of_band, end = aligned(packed.out_of_band, sizes, end)
    size = end - BODY_AT
    flags, stored = _compressed((lengths, packed.msgpack, *out_of_band), size, compression)
    head = HEAD.pack(MAGIC, WHOLE, flags, 0, count, size)
    if flags or not out_of_band:
        return SplitPayload(b"".join((head, CHECKSUM.pack(xxh3(head, *stored)), *stored)))
    # The checksum is computed from the copy, since users' threads may be changing the arrays.
    payload = b"".join((head, bytes(CHECKSUM.size), *stored))
    CHECKSUM.pack_into(as_writable(payload).data, HEAD.size, xxh3(head, memoryview(payload)[BODY_AT:]))
    return SplitPayload(payload)


def in_two_parts(count: int, lengths: bytes, packed: Packed, sizes: Sequence[int], sealed: bool) -> SplitPayload:
    """Return a payload with a tail, with checksums if `sealed`."""
    arrays = packed.out_of_band
    digests = [xxh3_64_intdigest(one) & LOWER for one in arrays] if sealed else [0] * len(arrays)
    table = struct.pack(f"<Q{2 * len(arrays)}Q", len(arrays), *sizes, *digests)
    start = BODY_AT + len(lengths) + len(table) + len(packed.msgpack)
    padding = bytes(-start % ALIGNMENT)
    tail, end = aligned(arrays, sizes, start + len(padding))
    head = HEAD.pack(MAGIC, VERSION, 0, 0, count, end - BODY_AT)
    body = (lengths, table, packed.msgpack, padding)
    checksum = xxh3(head, *body) if sealed else 0
    return SplitPayload(b"".join((head, CHECKSUM.pack(checksum), *body)), tail, end - start - len(padding))


def _seal(payload: memoryview) -> None:
    """Write the checksums into a whole payload with a tail."""
    (count,) = struct.unpack_from("<I", payload, COUNT_AT)
    table = table_of(payload, payload[BODY_AT:], count)
    tail = payload[table.end :]
    digests = [xxh3_64_intdigest(tail[at : at + size]) & LOWER for at, size in table.places()]
    struct.pack_into(f"<{len(digests)}Q", payload, table.digests_at, *digests)
    CHECKSUM.pack_into(payload, HEAD.size, xxh3(payload[: HEAD.size], payload[BODY_AT : table.end]))


def zstandard_module(what: str = "zstd compression") -> Any:
    """Return the module zstandard. Raises MissingDriverError, naming `what` needs it."""
    try:
        import zstandard
    except ImportError as error:
        raise MissingDriverError(f"{what} needs the package zstandard: pip install zstandard") from error
    return zstandard


def _compressed(body: Parts, size: int, compression: Compression) -> tuple[int, Parts]:
    """Return the flags and the stored form of a body of this size."""
    if compression == "none":
        return 0, body
    stored: bytes = zstandard_module().ZstdCompressor().compress(b"".join(body))
    if len(stored) >= size or size > _allowed_size(len(stored)):
        return 0, body
    return ZSTD, (stored,)


def _allowed_size(compressed: int) -> int:
    return _ALWAYS_ALLOWED + _MAX_RATIO * compressed


def plain_body(payload: OpenPayload) -> memoryview:
    """Return the decompressed body of a payload.

    Raises ValueError, before any allocation, when the claimed size is implausible.
    """
    stored, size = payload.stored, payload.size
    if not payload.flags & ZSTD:
        return stored
    zstandard = zstandard_module()
    if size > _allowed_size(len(stored)):
        raise ValueError(f"it claims {size} bytes, too many for {len(stored)} compressed ones")
    if zstandard.frame_content_size(stored) != size:  # trusted by the decompressor
        raise ValueError("its sizes before compression don't agree")
    return memoryview(zstandard.ZstdDecompressor().decompress(stored, max_output_size=size))
