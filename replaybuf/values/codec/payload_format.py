"""The format of payloads: header, checksums, and positions of the parts.

A payload is a *head*, and the *blocks*: the bytes of its arrays.

    magic "RPLB", version (u32), checksum of the rest of the head (u64)
    rollouts, blocks, msgpack, head (u32 each), size (u64)
    size of each block (u64 each), checksum of each block (u64 each), msgpack, padding up to a multiple of 64 bytes
    blocks, each at a multiple of 64 bytes from the end of the head

All numbers are little-endian. `msgpack` and `head` are sizes in bytes, `size` is that of the whole payload. Checksums
are the XXH3 (64 bits). The head and the blocks can be stored in two places, and a block can be read and verified alone.

The msgpack is a list of columns (`codec.packed_columns`), then the table of arrays (`codec.blocks`), if there are any,
and the size of the table (u32).

This module needs neither numpy nor msgpack, whose imports take longer than a check of a database.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import accumulate
from typing import Any, Final, ParamSpec, TypeVar

from xxhash import xxh3_64, xxh3_64_intdigest, xxh3_128

from replaybuf.errors import DecodeError

Buffer = bytes | bytearray | memoryview
P = ParamSpec("P")
T = TypeVar("T")
Hash = TypeVar("Hash", xxh3_64, xxh3_128)

MAGIC: Final = b"RPLB"
VERSION: Final = 1
_FIRST_FIELDS: Final = struct.Struct("<4sIQ")
_NUMBERS: Final = struct.Struct("<IIIIQ")
_HEADER: Final = struct.Struct(_FIRST_FIELDS.format + _NUMBERS.format.removeprefix("<"))
#: The offset of the first byte after the header, and that of the first one of which the checksum is.
BODY_AT: Final = _HEADER.size
_CHECKED_AT: Final = _FIRST_FIELDS.size
#: How a payload begins; and two numbers of the header, for draws, which ask for these alone.
_BEGINNING: Final = _FIRST_FIELDS.pack(MAGIC, VERSION, 0)[:8]
_BLOCKS_AND_SIZE: Final = struct.Struct("<20xI8xQ")
#: The alignment of blocks, in bytes.
ALIGNMENT: Final = 64
#: The most rollouts of a group.
_MOST_ROLLOUTS: Final = 1 << 20
#: The bytes that are hashed at a time.
_PIECE_BYTES: Final = 1 << 16


@dataclass(slots=True)
class Head:
    """The head of a payload: the numbers in its header, and, once it is `opened`, the sizes, checksums and places of
    its blocks. `starts` has the position of each block, from the end of the head, where the size `head` is.
    """

    checksum: int
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
        magic, version, *numbers = _HEADER.unpack_from(payload)
        if magic != MAGIC:
            raise DecodeError(f"not a replaybuf payload: it begins with {magic!r}")
        if version != VERSION:
            raise DecodeError(f"the payload has format {version}, this replaybuf reads {VERSION}: upgrade replaybuf")
        return cls(*numbers)

    @classmethod
    def opened(cls, payload: Any) -> Head:
        """Return the verified head of a payload. Raises DecodeError."""
        if not isinstance(payload, (bytes, bytearray, memoryview)):
            raise DecodeError(f"the payload is damaged: it is no bytes but {type(payload).__name__}")
        head = cls.read(payload)
        end = head.head
        if not BODY_AT <= end <= len(payload) or head.rollouts > _MOST_ROLLOUTS:
            raise DecodeError("the payload is damaged: its lengths don't add up")
        if digest(memoryview(payload)[_CHECKED_AT:end]) != head.checksum:
            raise DecodeError("the payload is damaged: its checksum doesn't match")
        blocks = head.blocks
        if head.msgpack_at + head.msgpack > end:
            raise DecodeError("the payload is damaged: its lengths don't add up")
        if blocks:
            numbers = struct.unpack_from(f"<{2 * blocks}Q", payload, BODY_AT)
            head.sizes, head.digests = numbers[:blocks], numbers[blocks:]
            head.starts = starts_of(head.sizes)
            end += head.starts[-1] + head.sizes[-1]
        if end != head.size:
            raise DecodeError("the payload is damaged: its lengths don't add up")
        return head

    @property
    def msgpack_at(self) -> int:
        """The position of the msgpack in a payload."""
        return BODY_AT + 16 * self.blocks

    def verify(self, blocks: memoryview) -> None:
        """Raise DecodeError unless these are the blocks that were stored."""
        if len(blocks) != self.size - self.head:
            raise DecodeError(
                f"the payload is damaged: its blocks have {len(blocks)} bytes where {self.size - self.head} belong"
            )
        for at, size, expected in zip(self.starts, self.sizes, self.digests):
            block = blocks[at : at + size]  # most are short, and a call costs as much as their hash
            if (xxh3_64_intdigest(block) if size <= _PIECE_BYTES else digest(block)) != expected:
                raise DecodeError("the payload is damaged: the checksum of a block doesn't match")


def starts_of(sizes: Sequence[int], first: int = 0) -> list[int]:
    """Return the position of each block, the first of which is at `first`."""
    return [*accumulate([size + -size % ALIGNMENT for size in sizes[:-1]], initial=first)]


def verify(payload: Buffer, blocks: Buffer | None = None) -> None:
    """Raise DecodeError unless the checksums of a payload are right; decodes nothing.

    The blocks of a head alone are verified only if given.
    """
    head = Head.opened(payload)
    if blocks is not None:
        head.verify(memoryview(blocks))
    elif not head.blocks or len(payload) == head.size:
        head.verify(memoryview(payload)[head.head :])


def is_apart(payload: Any) -> bool:
    """Return whether this is the head of a payload whose blocks are stored separately."""
    try:
        if payload[:8] != _BEGINNING:
            return False
        blocks, size = _BLOCKS_AND_SIZE.unpack_from(payload)
    except (TypeError, struct.error):  # a number, or too short, in a damaged file
        return False
    return blocks > 0 and BODY_AT <= len(payload) != size  # type: ignore[no-any-return]


def has_size(payload: Buffer, size: int) -> bool:
    """Return whether a valid payload, or that of which this is the head, has so many bytes."""
    return len(payload) == size or bool(_BLOCKS_AND_SIZE.unpack_from(payload)[1] == size)


def as_damage(read: Callable[P, T]) -> Callable[P, T]:
    """Return the function with any exception that hostile bytes cause translated to DecodeError."""

    @wraps(read)
    def reading(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return read(*args, **kwargs)
        except DecodeError:
            raise
        except Exception as error:
            raise DecodeError(f"the payload is damaged: {str(error) or type(error).__name__}") from error

    return reading


def digest(buffer: Buffer) -> int:
    """Return the checksum of a block: the XXH3 (64 bits) of its bytes."""
    if len(buffer) <= _PIECE_BYTES:
        return xxh3_64_intdigest(buffer)
    return fed(xxh3_64(), buffer).intdigest()


def fed(state: Hash, buffer: Buffer) -> Hash:
    """Return the state of a hash after these bytes, which it gets in pieces for which xxhash keeps the GIL.

    For 100,000 bytes and more xxhash releases it, and has it back before a thread that waits for it wakes: in takes of
    large groups the caller's event loop would stand still for up to 100 ms.
    """
    view = memoryview(buffer)
    for at in range(0, len(view), _PIECE_BYTES):
        state.update(view[at : at + _PIECE_BYTES])
    return state


def _first_bytes(checksum: int) -> bytes:
    """Return the first bytes of a payload: those before what the checksum covers."""
    return _FIRST_FIELDS.pack(MAGIC, VERSION, checksum)


_PADDING: Final = tuple(map(bytes, range(ALIGNMENT)))
_MOST_MSGPACK: Final = 2**32 - 2**20


@dataclass(slots=True)
class SplitPayload:
    """A payload in two parts: `head`, and the buffers of the `tail`, which are its blocks, with padding in between.

    The tail has `size` bytes, in the memory of the rollouts. Without a tail the head is the whole payload.
    """

    head: bytes
    tail: Sequence[Any] = ()
    size: int = 0

    def joined(self) -> bytes | bytearray:
        """Return the whole payload, with checksums of the copied bytes, even if the arrays are changed meanwhile."""
        if not self.tail:
            return self.head
        payload = bytearray().join((self.head, *self.tail))
        view, end = memoryview(payload), len(self.head)
        sizes = struct.unpack_from(f"<{Head.read(payload).blocks}Q", payload, BODY_AT)
        digests = [digest(view[at : at + size]) for at, size in zip(starts_of(sizes, end), sizes)]
        struct.pack_into(f"<{len(sizes)}Q", view, BODY_AT + 8 * len(sizes), *digests)
        view[:_CHECKED_AT] = _first_bytes(digest(view[_CHECKED_AT:end]))
        return payload


def written(
    rollouts: int,
    packed: Sequence[Buffer],
    blocks: Sequence[Sequence[Any]],
    sizes: Sequence[int],
    *,
    sealed_from: float = 0,
) -> SplitPayload:
    """Return a payload with this msgpack, in parts, and these blocks, each as the buffers that it consists of.

    Of blocks with fewer bytes than `sealed_from` the checksums are computed only by `joined`. Raises ValueError if the
    msgpack is too large.
    """
    length = sum(map(len, packed))
    if length > _MOST_MSGPACK or rollouts > _MOST_ROLLOUTS:
        raise ValueError(f"{rollouts} rollouts with {length} bytes other than arrays; {_MOST_ROLLOUTS} and 4 GiB fit")
    at = BODY_AT + 16 * len(blocks)
    end = at + length
    end += -end % ALIGNMENT
    if not blocks:
        numbers = _NUMBERS.pack(rollouts, 0, length, end, end)
        checked = b"".join((numbers, *packed, bytes(end - at - length)))
        return SplitPayload(_first_bytes(digest(checked)) + checked)
    tail = [part for block, n in zip(blocks, sizes) for part in (*block, _PADDING[-n % ALIGNMENT])][:-1]
    size = starts_of(sizes)[-1] + sizes[-1]
    numbers = _NUMBERS.pack(rollouts, len(blocks), length, end, end + size)
    sealed = size >= sealed_from
    digests = [*map(_digest_of, blocks)] if sealed else [0] * len(sizes)
    table = struct.pack(f"<{2 * len(sizes)}Q", *sizes, *digests)
    checked = b"".join((numbers, table, *packed, bytes(end - at - length)))
    return SplitPayload(_first_bytes(digest(checked) if sealed else 0) + checked, tail, size)


def _digest_of(block: Sequence[Any]) -> int:
    import numpy as np

    return digest(np.frombuffer(block[0], np.uint8).data if len(block) == 1 else b"".join(block))


class Texts:
    """Finds texts in a payload from `Codec.encode`, so that SQL can extract them. Each search scans the payload.

    msgpack stores the UTF-8 of a text contiguously.
    """

    __slots__ = ("_end", "_last_end", "_payload", "_start")

    def __init__(self, payload: bytes | bytearray) -> None:
        self._payload = payload
        self._end = -1  # known when the first text is looked for: most groups have short ones only
        self._start = self._last_end = 0

    def find(self, text: str, since: int | None = None) -> list[int] | None:
        """Return the offset and the length, in bytes, of a text; None if SQL can't extract it.

        That is the case if the text has NUL or lone surrogates. The search may find any equal text. It begins at the
        offset `since`, or behind the last text that was found, and then from the start.
        """
        if self._end < 0:
            head = Head.read(self._payload)
            self._start = self._last_end = head.msgpack_at
            self._end = head.msgpack_at + head.msgpack
        if "\x00" in text:
            return None
        import msgpack  # type: ignore[import-untyped]

        try:
            packed, length = msgpack.packb(text), len(text.encode())
        except UnicodeEncodeError:
            return None
        position = self._find_text(packed, length, self._last_end if since is None else since)
        if position is None and since is None and self._last_end > self._start:
            position = self._find_text(packed, length, self._start)
        if position is not None:
            self._last_end = position[0] + position[1]
        return position

    def _find_text(self, packed: bytes, length: int, at: int) -> list[int] | None:
        at = self._payload.find(packed, at, self._end)
        return None if at < 0 else [at + len(packed) - length, length]
