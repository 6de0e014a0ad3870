"""Writing payloads in the format of `codec.payload_header`, and compression."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from replaybuf.errors import MissingDriverError
from replaybuf.values.codec.blocks import as_writable
from replaybuf.values.codec.payload_header import (
    ALIGNMENT,
    BODY_AT,
    CHECKSUM,
    HEADER,
    MAGIC,
    MOST_VALUES,
    VERSION,
    ZSTD,
    Buffer,
    Head,
    digest,
    head_digest,
    starts_of,
)

Compression = Literal["none", "zstd"]

# The bound of the decompressed size: a hostile body can't make the reader allocate more. Bodies that compress better
# than this are stored uncompressed, so that everything written can be read.
_MAX_RATIO = 1000
_ALWAYS_ALLOWED = 64 << 20
_PADDING: Final = tuple(map(bytes, range(ALIGNMENT)))
_MOST_MSGPACK: Final = 2**32 - 2**20


@dataclass(slots=True)
class SplitPayload:
    """A payload in two parts: `head`, and the buffers of the `tail`, which are its blocks, with padding in between.

    The tail has `size` bytes, in the memory of the rollouts. Without a tail the head is the whole payload. `blocks`
    are the sizes of the blocks, if known.
    """

    head: bytes
    tail: Sequence[Any] = ()
    size: int = 0
    blocks: Sequence[int] = ()

    @property
    def nbytes(self) -> int:
        """The size of the whole payload."""
        return len(self.head) + self.size

    def joined(self) -> bytes:
        """Return the whole payload, with checksums of the copied bytes, even if the arrays are changed meanwhile."""
        if not self.tail:
            return self.head
        payload = b"".join((self.head, *self.tail))
        view, end = as_writable(payload).data, len(self.head)
        sizes = self.blocks or Head.opened(payload).sizes
        digests = [digest(view[at : at + size]) for at, size in zip(starts_of(sizes, end), sizes, strict=True)]
        struct.pack_into(f"<{len(sizes)}Q", view, BODY_AT + 8 * len(sizes), *digests)
        CHECKSUM.pack_into(view, HEADER.size, head_digest(view[: HEADER.size], view[BODY_AT:end]))
        return payload


def written(
    rollouts: int, packed: Sequence[Buffer], blocks: Sequence[Any], sizes: Sequence[int], values: int, *, sealed: bool
) -> SplitPayload:
    """Return a payload with this msgpack, in parts, and these blocks.

    `values` is the number of values of its columns. Unless `sealed`, only `joined` computes the checksums of a payload
    with blocks. Raises ValueError if the msgpack is too large.
    """
    length = sum(map(len, packed))
    if length > _MOST_MSGPACK:
        raise ValueError(f"its values other than arrays have {length} bytes, and 4 GiB is the most")
    at = BODY_AT + 16 * len(blocks)
    end = max(at + length, values // MOST_VALUES + 1)
    end += -end % ALIGNMENT
    if not blocks:
        header = HEADER.pack(MAGIC, VERSION, 0, 0, rollouts, 0, length, end, end)
        body = b"".join((*packed, bytes(end - at - length)))
        return SplitPayload(b"".join((header, CHECKSUM.pack(head_digest(header, body)), body)))
    tail = [part for block, n in zip(blocks, sizes, strict=True) for part in (block, _PADDING[-n % ALIGNMENT])][:-1]
    size = starts_of(sizes)[-1] + sizes[-1]
    header = HEADER.pack(MAGIC, VERSION, 0, 0, rollouts, len(blocks), length, end, end + size)
    digests = [*map(digest, blocks)] if sealed else [0] * len(sizes)
    table = struct.pack(f"<{2 * len(sizes)}Q", *sizes, *digests)
    body = b"".join((table, *packed, bytes(end - at - length)))
    checksum = head_digest(header, body) if sealed else 0
    return SplitPayload(b"".join((header, CHECKSUM.pack(checksum), body)), tail, size, sizes)


def compressed(payload: SplitPayload) -> SplitPayload:
    """Return a payload compressed and without blocks of its own, or unchanged if that would not be smaller."""
    whole = payload.joined()
    stored: bytes = zstandard_module().ZstdCompressor().compress(memoryview(whole)[BODY_AT:])
    if BODY_AT + len(stored) >= len(whole) or len(whole) > _allowed_size(len(stored)):
        return payload
    header = replace(Head.read(whole), flags=ZSTD).packed()
    return SplitPayload(b"".join((header, CHECKSUM.pack(head_digest(header, stored)), stored)))


def decompressed(payload: Buffer) -> memoryview:
    """Return a compressed payload as it was before, without checksums.

    Raises ValueError, before any allocation, when the claimed size is implausible.
    """
    head, stored = Head.read(payload), memoryview(payload)[BODY_AT:]
    size = head.size - BODY_AT
    zstandard = zstandard_module()
    if size > _allowed_size(len(stored)):
        raise ValueError(f"it claims {size} bytes, too many for {len(stored)} compressed ones")
    if zstandard.frame_content_size(stored) != size:  # trusted by the decompressor
        raise ValueError("its sizes before compression don't agree")
    body = zstandard.ZstdDecompressor().decompress(stored, max_output_size=size)
    return memoryview(b"".join((replace(head, flags=0).packed(), bytes(CHECKSUM.size), body)))


def _allowed_size(size: int) -> int:
    return _ALWAYS_ALLOWED + _MAX_RATIO * size


def zstandard_module(what: str = "zstd compression") -> Any:
    """Return the module zstandard. Raises MissingDriverError, naming `what` needs it."""
    try:
        import zstandard
    except ImportError as error:
        raise MissingDriverError(f"{what} needs the package zstandard: pip install zstandard") from error
    return zstandard
