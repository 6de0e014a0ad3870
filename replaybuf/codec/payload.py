"""Payloads: groups of rollouts as bytes, and back.

A payload is a header of 24 bytes and a body:

    magic "RPLB", version, flags (1: zstd), two zero bytes, rollouts (u32), size of the body (u64), checksum (u32)
    length of each rollout's msgpack (u64 each) | the rollouts' msgpack, a map of fields each | bytes of arrays

All numbers are little-endian; the size is the one before compression. The checksum is the lower half of the XXH3 (64
bits) of the body as stored, seeded with the XXH3 of the rest of the header. Each rollout is unpacked by its own call:
other threads run in between. Types that msgpack doesn't know are described in `codec.msgpack_values`,
`codec.numpy_arrays` and the type handlers (`codec.extension_types`). Nothing is pickled, and nothing that a payload
names is imported or called.

Payloads with `TAIL_BYTES` of arrays or more have version 3: they can be stored in two parts, and each array can be read
by itself. The *head* is all up to the first array, the *tail* the arrays. After the lengths of the rollouts the body
has the number of arrays (u64), their sizes (u64 each) and their checksums (u64 each: the lower half of the XXH3 of the
array's bytes). The checksum in the header is that of the rest of the head only.

Version 1 had the crc32 of the header and the body as its checksum, and no arrays after the msgpack. It is read.
"""

from __future__ import annotations

import copy
import struct
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Literal

from xxhash import xxh3_64, xxh3_64_intdigest

from replaybuf.codec.arrays_apart import (
    ArrayTable,
    DeferredReader,
    Deferring,
    FactsReader,
    HoldingReader,
    MissingReader,
    Pieces,
)
from replaybuf.codec.extension_types import TaggedValueHandler, TypeHandler
from replaybuf.codec.images import Images
from replaybuf.codec.msgpack_values import (
    ArrayReader,
    DeferredUnpacking,
    Packed,
    Packing,
    TypeTags,
    Unpacking,
    lenient,
    type_tags,
)
from replaybuf.codec.numpy_arrays import ALIGNMENT, OutOfBandReader, aligned, as_writable, sizes_of
from replaybuf.codec.object_refs import Fetched, ObjectRefs, RestoreRefs, UnfetchedError, at_hand, is_ref
from replaybuf.codec.replacing import Replacing
from replaybuf.codec.torch_tensors import RestoreTensors, Tensors
from replaybuf.codec.user_classes import ConverterMap, Converters, Instances
from replaybuf.errors import ConfigError, DecodeError, EncodeError, MissingDriverError
from replaybuf.rollouts.rollout_type import RolloutType

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
_ZSTD = 1
_HEAD = struct.Struct("<4sBBHIQ")
_CHECKSUM = struct.Struct("<I")
_BODY_AT = _HEAD.size + _CHECKSUM.size
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


class Codec:
    """Encodes groups of rollouts of one type.

    `compression` is what `encode` does; `decode` reads either. ConfigError for an unknown compression,
    MissingDriverError when zstd is asked for and not installed. Safe to share among threads.

    Values keep their types: None, bool, int of any size, float (bit for bit), str (lone surrogates too), bytes,
    bytearray, memoryview (read-only), list, tuple, set, frozenset, dict (order and any hashable keys), OrderedDict,
    defaultdict (of a built-in type), Counter, deque, range, complex, Decimal, UUID, datetime, date, time, timedelta,
    paths, numpy arrays (of objects too) and scalars, torch tensors, PIL images, Ray ObjectRefs, instances of the
    classes that `rollout_type` knows (enums, named tuples, pydantic models, dataclasses, attrs classes, msgspec
    Structs), and of the exact classes that have `converters`. Anything else is refused. One exception: a bytearray or
    memoryview inside a list of more than 32 items that begins and ends with a number is restored as bytes.

    `tensors`: restore them as such ("torch") or as arrays ("numpy"). `object_refs`: restore them as new ObjectRefs
    ("ref") or as the values of their objects ("value"); `object_ref_timeout` bounds the wait for the objects of a
    group, in seconds. With `as_plain` instances of unknown classes can be read: as dicts of their fields, tuples, and
    values of enums; and what needs an unknown converter, as it is stored.
    """

    def __init__(
        self,
        rollout_type: RolloutType,
        *,
        compression: Compression = "none",
        tensors: RestoreTensors = "torch",
        object_refs: RestoreRefs = "ref",
        object_ref_timeout: float = 60.0,
        converters: ConverterMap | None = None,
        as_plain: bool = False,
    ) -> None:
        if compression not in ("none", "zstd"):
            raise ConfigError(f"compression must be 'none' or 'zstd', not {compression!r}")
        if compression == "zstd":
            zstandard_module()
        self.rollout_type = rollout_type
        self.compression = compression
        self._converters = Converters(converters or {}, as_plain=as_plain)
        #: Whether encoding or decoding runs users' code, which may take its time, and may change arrays in place.
        self.runs_code = bool(converters) or any(shape.runs_code for shape in rollout_type.classes.shapes.values())
        self._others: tuple[TypeHandler, ...] = (
            Images(as_plain=as_plain),
            Instances(rollout_type.classes, as_plain=as_plain),  # the last, since it refuses unknown classes
        )
        self._use(Tensors(tensors), ObjectRefs(object_refs, object_ref_timeout))

    def _use(self, tensors: Tensors, refs: ObjectRefs) -> None:
        handlers: tuple[TypeHandler, ...] = (tensors, refs, *self._others)
        self._refs = refs
        self._packing = Packing(handlers, self._converters)
        self._tags = type_tags((self._converters, *handlers))

    def as_stored(self) -> Codec:
        """Return a codec for rewriting payloads: it needs neither torch nor Ray.

        It reads tensors, objects of Ray and what no converter can rebuild as stand-ins, and writes these as they were.
        """
        other = copy.copy(self)
        other._converters = self._converters.as_stored()
        other._use(Tensors("stored"), ObjectRefs("stored", 0.0))
        return other

    def as_trees(self) -> Codec:
        """Return a codec for rollouts as trees: dicts of plain values, arrays, and `TaggedValue` for the rest.

        It reads and writes payloads of any rollout type, knows no class, and imports nothing.
        """
        other = copy.copy(self)
        other.rollout_type = RolloutType(dict)
        other._converters = Converters({}, as_plain=True)
        other._others = (TaggedValueHandler(),)
        other.runs_code = False
        other._use(Tensors("stored"), ObjectRefs("stored", 0.0))
        return other

    def encode(self, rollouts: Sequence[Any], fetched: Fetched | None = None) -> bytes:
        """Return the payload of a group; it shares nothing with the rollouts, which are left unchanged.

        `fetched` has the values of the Ray ObjectRefs in it; UnfetchedError says which are missing. Without it this
        waits for them itself. RolloutError when a rollout is not of this codec's type; EncodeError, naming the path
        (`rollouts[1].extra_fields['a'][3]`), when it holds a value that can't be stored.
        """
        return self.encode_split(rollouts, fetched, sealed=False).joined()

    def encode_split(
        self, rollouts: Sequence[Any], fetched: Fetched | None = None, *, sealed: bool = True
    ) -> SplitPayload:
        """Return the payload of a group as `encode` does, in two parts. The tail is in the memory of the rollouts.

        Without `sealed`, the checksums of a payload with a tail are left to `joined`.
        """
        fields = [self.rollout_type.to_fields(rollout) for rollout in rollouts]
        try:
            plain = None if fetched else self._pack(fields)
        except UnfetchedError:
            plain = None
        packed = plain or self._pack_refs(fields, fetched or {}, wait=fetched is None)
        lengths = struct.pack(f"<{len(fields)}Q", *packed.lengths)
        sizes = sizes_of(packed.out_of_band)
        if self.compression == "none" and sum(sizes) >= TAIL_BYTES:
            return _split(len(fields), lengths, packed, sizes, sealed)
        out_of_band, end = aligned(packed.out_of_band, sizes, _BODY_AT + len(lengths) + len(packed.msgpack))
        size = end - _BODY_AT
        flags, stored = self._compress((lengths, packed.msgpack, *out_of_band), size)
        head = _HEAD.pack(MAGIC, _WHOLE, flags, 0, len(fields), size)
        if flags or not out_of_band:
            return SplitPayload(b"".join((head, _CHECKSUM.pack(_xxh3(head, *stored)), *stored)))
        # The checksum is that of these bytes, not of the users' arrays, which their threads may be changing.
        payload = b"".join((head, bytes(_CHECKSUM.size), *stored))
        _CHECKSUM.pack_into(as_writable(payload).data, _HEAD.size, _xxh3(head, memoryview(payload)[_BODY_AT:]))
        return SplitPayload(payload)

    def decode(
        self, payload: Buffer, *, verified: bool = False, owned: bool = False, tail: Buffer | None = None
    ) -> list[Any]:
        """Return the rollouts of a payload, independent of its memory. `verified` means that it has passed `verify`.

        `owned` means that there is no other reference to the payload: large arrays live in its memory then, each at its
        own place, and change it when they are written to, which this itself does not. One that is kept keeps all of it,
        so those that would keep more than 64 times their size are copied.

        A payload that is stored in two parts is given as its head and its `tail`, which is always verified.

        DecodeError when it is damaged, of a newer version, or was written for another rollout type; MissingDriverError
        when it is compressed with zstd and zstd is not installed. Takes memory in proportion to the payload.
        """
        flags, count, size, stored = _open(payload, verified)
        lends = owned and not self.runs_code and not flags & _ZSTD  # the payload may be needed again
        with _as_damage():
            body = memoryview(_decompress(stored, size)) if flags & _ZSTD else stored
            table = _table(payload, body, count)
            if len(body) + (0 if tail is None else len(tail)) != size:
                there = len(body) + (0 if tail is None else len(tail))
                raise ValueError(f"it holds {there} bytes where {size} belong")
            if tail is not None:
                table.verify(memoryview(tail))
                reader = OutOfBandReader(tail, table.end, table.end, lends=lends and type(tail) is not memoryview)
            else:
                if has_tail(payload) and not verified:
                    table.verify(body[table.end - _BODY_AT :])
                own = lends and type(payload) is bytes and table.msgpack_end < _BODY_AT + len(body)
                memory, base = (payload, 0) if own else (body, _BODY_AT)
                reader = OutOfBandReader(memory, base, table.msgpack_end, lends=own)
            return self._unpack(body, table, reader)

    def decode_deferred(self, head: Buffer, deferred: Collection[str], pieces: Pieces, handles: Deferring) -> list[Any]:
        """Return the rollouts of a payload with handles in place of the arrays in these fields, at any depth.

        Of a payload with a tail, only the head is given, and `pieces` has the bytes of the other arrays (`wanted`),
        which are verified. Others are given whole. Errors as those of `decode`.
        """
        flags, count, size, body = _open(head)
        reader: ArrayReader
        with _as_damage():
            if has_tail(head):
                table = _table(head, body, count)
                if table.end + table.tail_size != _BODY_AT + size:
                    raise ValueError("its lengths don't add up")
                reader = DeferredReader(table, pieces, handles)
            else:
                body = memoryview(_decompress(body, size)) if flags & _ZSTD else body
                table = _table(head, body, count)
                reader = HoldingReader(body, _BODY_AT, table.msgpack_end, handles)
            return self._unpack(body, table, reader, frozenset(deferred))

    def decode_head(self, head: Buffer) -> list[Any]:
        """Return the rollouts of a payload whose tail is missing, with None for what is in it. Raises DecodeError."""
        _, count, _, body = _open(head)
        with _as_damage():
            table = _table(head, body, count)
            return self._unpack(body, table, MissingReader(), tags=lenient(self._tags))

    def decode_facts(self, payload: Buffer) -> list[Any]:
        """Return the rollouts of a payload, or of its head, with ArrayFacts for its arrays. Raises DecodeError."""
        flags, count, size, body = _open(payload)
        with _as_damage():
            body = memoryview(_decompress(body, size)) if flags & _ZSTD else body
            return self._unpack(body, _table(payload, body, count), FactsReader(), tags=lenient(self._tags))

    def split(self, payload: bytes) -> SplitPayload:
        """Return a whole payload in two parts, the tail in its memory."""
        table = self.array_table(payload) if len(payload) > _BODY_AT else None
        if table is None:
            return SplitPayload(payload)
        tail = memoryview(payload)[table.end :]
        return SplitPayload(payload[: table.end], (tail,), len(tail))

    def wanted(self, head: Buffer, deferred: Collection[str]) -> list[tuple[int, int, int]]:
        """Return the arrays outside the fields `deferred`: their numbers, places in the tail, and sizes.

        Raises DecodeError when the head is damaged.
        """
        _, count, _, body = _open(head)
        with _as_damage():
            return _table(head, body, count).wanted(head, deferred)

    def array_table(self, head: Buffer) -> ArrayTable | None:
        """Return the table of the arrays of a payload, None where it has no tail. Raises DecodeError."""
        flags, count, _, body = _open(head, verified=True)
        if flags or not has_tail(head):
            return None
        with _as_damage():
            return _table(head, body, count)

    def fetch(self, refs: Sequence[Any]) -> Fetched:
        """Return the values of Ray ObjectRefs, for `encode`; blocks for up to `object_ref_timeout`, raises nothing."""
        return self._refs.fetch(refs)

    def release(self, rollouts: Sequence[Any]) -> None:
        """Replace the ObjectRefs in rollouts by None, in place, so that Ray can delete their objects."""
        releasing = Replacing(is_ref, lambda _: None, self._converters.encoders)
        for rollout in rollouts:
            releasing.replace(rollout)

    def verify(self, payload: Buffer, tail: Buffer | None = None) -> None:
        """Raise DecodeError when the header is not a payload's or a checksum doesn't match; decodes nothing.

        A tail that is elsewhere is verified when it is given, or decoded.
        """
        _, count, _, body = _open(payload)
        if tail is not None or (has_tail(payload) and not is_apart(payload)):
            with _as_damage():
                table = _table(payload, body, count)
                table.verify(body[table.end - _BODY_AT :] if tail is None else memoryview(tail))

    def _pack(self, fields: list[dict[str, Any]]) -> Packed:
        try:
            return self._packing.pack(fields)
        except UnfetchedError:
            raise
        except Exception as error:
            raise self._explain(fields, error) from error

    def _pack_refs(self, fields: list[dict[str, Any]], fetched: Fetched, *, wait: bool = False) -> Packed:
        """Pack with the values of ObjectRefs; these may hold further ones."""
        while True:
            with at_hand(fetched) as missing:
                packed = self._pack(fields)
            if not missing:
                return packed
            if not wait:
                raise UnfetchedError(tuple(missing))
            fetched = fetched | self.fetch(tuple(missing))

    def _explain(self, group: list[dict[str, Any]], error: Exception) -> EncodeError:
        for index, fields in enumerate(group):
            for name, value in fields.items():
                step = f"[{name!r}]" if issubclass(self.rollout_type.cls, dict) else f".{name}"
                path = f"rollouts[{index}]{step}"
                if (problem := self._packing.explain(name, path) or self._packing.explain(value, path)) is not None:
                    return problem
        return EncodeError(f"the rollouts can't be stored: {error}")

    def _unpack(
        self,
        body: memoryview,
        table: ArrayTable,
        reader: ArrayReader,
        deferred: Collection[str] = (),
        tags: TypeTags | None = None,
    ) -> list[Any]:
        known = tags or self._tags
        unpacking = DeferredUnpacking(known, reader, deferred) if deferred else Unpacking(known, reader)
        rollouts = []
        for start, end in pairwise(table.rollouts):
            fields = unpacking.unpack(body[start - _BODY_AT : end - _BODY_AT])
            if type(fields) is not dict:
                raise ValueError(f"a {type(fields).__name__} where a rollout belongs")
            rollouts.append(self.rollout_type.from_fields(fields))
        unpacking.finish()
        return rollouts

    def _compress(self, body: Parts, size: int) -> tuple[int, Parts]:
        """Return the flags, and the body of this size as stored: compressed when that was asked for and saves space."""
        if self.compression == "none":
            return 0, body
        stored: bytes = zstandard_module().ZstdCompressor().compress(b"".join(body))
        if len(stored) >= size or size > _allowed_size(len(stored)):
            return 0, body
        return _ZSTD, (stored,)


def _split(count: int, lengths: bytes, packed: Packed, sizes: Sequence[int], sealed: bool) -> SplitPayload:
    """Return a payload with a tail, with its checksums if it is to be `sealed`."""
    arrays = packed.out_of_band
    digests = [xxh3_64_intdigest(one) & _LOWER for one in arrays] if sealed else [0] * len(arrays)
    table = struct.pack(f"<Q{2 * len(arrays)}Q", len(arrays), *sizes, *digests)
    start = _BODY_AT + len(lengths) + len(table) + len(packed.msgpack)
    padding = bytes(-start % ALIGNMENT)
    tail, end = aligned(arrays, sizes, start + len(padding))
    head = _HEAD.pack(MAGIC, VERSION, 0, 0, count, end - _BODY_AT)
    body = (lengths, table, packed.msgpack, padding)
    checksum = _xxh3(head, *body) if sealed else 0
    return SplitPayload(b"".join((head, _CHECKSUM.pack(checksum), *body)), tail, end - start - len(padding))


def _seal(payload: memoryview) -> None:
    """Write the checksums into a whole payload with a tail, those of its own bytes."""
    (count,) = struct.unpack_from("<I", payload, _COUNT_AT)
    table = _table(payload, payload[_BODY_AT:], count)
    tail = payload[table.end :]
    digests = [xxh3_64_intdigest(tail[at : at + size]) & _LOWER for at, size in table.places()]
    struct.pack_into(f"<{len(digests)}Q", payload, table.digests_at, *digests)
    _CHECKSUM.pack_into(payload, _HEAD.size, _xxh3(payload[: _HEAD.size], payload[_BODY_AT : table.end]))


def _table(payload: Buffer, body: Buffer, count: int) -> ArrayTable:
    """Return where the rollouts and the arrays of a payload are, whose body may be decompressed."""
    return ArrayTable.read(body, _BODY_AT, count, has_arrays=has_tail(payload))


def has_tail(payload: Buffer) -> bool:
    """Return whether a payload has a head and a tail."""
    return len(payload) >= _BODY_AT and payload[_VERSION_AT] >= VERSION


def head_size(payload: Buffer) -> int:
    """Return the size of the head of a payload with a tail, given at least its table; 0 if that is damaged."""
    (count,) = struct.unpack_from("<I", payload, _COUNT_AT)
    try:
        return _table(payload, memoryview(payload)[_BODY_AT:], count).end
    except (ValueError, struct.error):
        return 0


def is_apart(payload: Buffer) -> bool:
    """Return whether this is the head of a payload whose tail is elsewhere."""
    if len(payload) < _BODY_AT or not has_tail(payload) or payload[: len(MAGIC)] != MAGIC:
        return False
    return len(payload) != _BODY_AT + int(_HEAD.unpack_from(payload)[-1])


def parts_of(payload: bytes) -> list[tuple[int, int]]:
    """Return where in a payload, or its head, the msgpack of each rollout begins and ends; nothing if compressed."""
    _, _, flags, _, count, _ = _HEAD.unpack_from(payload)
    if flags & _ZSTD:
        return []
    return [*pairwise(_table(payload, memoryview(payload)[_BODY_AT:], count).rollouts)]


def _open(payload: Buffer, verified: bool = False) -> tuple[int, int, int, memoryview]:
    """Return flags, number of rollouts, size of the body, and the stored body; DecodeError if they can't be trusted.

    Of a payload with a tail only the head is verified, which may be all that is given.
    """
    try:
        view = memoryview(payload)
    except TypeError:
        raise DecodeError(f"the payload is damaged: it is no bytes but {type(payload).__name__}") from None
    if len(view) < _BODY_AT:
        raise DecodeError(f"the payload is damaged: it has {len(view)} bytes, fewer than a header takes")
    magic, version, flags, zero, count, size = _HEAD.unpack_from(view)
    if magic != MAGIC:
        raise DecodeError(f"not a replaybuf payload: it begins with {magic!r}")
    if version > VERSION:
        raise DecodeError(f"the payload has format {version}, this replaybuf reads up to {VERSION}: upgrade replaybuf")
    (checksum,) = _CHECKSUM.unpack_from(view, _HEAD.size)
    body = view[_BODY_AT:]
    if not verified and _checksum(view, version, count) != checksum:
        raise DecodeError("the payload is damaged: its checksum doesn't match")
    if version < 1 or flags & ~_ZSTD or zero or (version >= VERSION and flags):
        raise DecodeError(f"the payload is damaged: no such header (version {version}, flags {flags}, {zero})")
    return flags, count, size, body


def _checksum(view: memoryview, version: int, count: int) -> int | None:
    """Return the checksum that the header should have; None if there can't be one."""
    head, body = view[: _HEAD.size], view[_BODY_AT:]
    if version == _CRC32:
        return _crc32(head, body)
    if version == _WHOLE:
        return _xxh3(head, body)
    try:
        end = _table(view, body, count).end
    except (ValueError, struct.error):
        return None
    return _xxh3(head, view[_BODY_AT:end]) if end <= len(view) else None


@contextmanager
def _as_damage() -> Iterator[None]:
    """Raise DecodeError for whatever hostile bytes raise."""
    try:
        yield
    except (DecodeError, MissingDriverError):
        raise
    except Exception as error:
        raise DecodeError(f"the payload is damaged: {str(error) or type(error).__name__}") from error


def _crc32(head: memoryview, body: memoryview) -> int:
    return zlib.crc32(body, zlib.crc32(head))


def _xxh3(head: Buffer, *body: Buffer) -> int:
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


def _allowed_size(compressed: int) -> int:
    return _ALWAYS_ALLOWED + _MAX_RATIO * compressed


def _decompress(stored: memoryview, size: int) -> bytes:
    """Return the body of `size` bytes; ValueError, before anything is allocated, when the claimed size doesn't fit."""
    zstandard = zstandard_module()
    if size > _allowed_size(len(stored)):
        raise ValueError(f"it claims {size} bytes, too many for {len(stored)} compressed ones")
    if zstandard.frame_content_size(stored) != size:  # the decompressor relies on it
        raise ValueError("its sizes before compression don't agree")
    body: bytes = zstandard.ZstdDecompressor().decompress(stored, max_output_size=size)
    return body


# The search is for the length and this many bytes of a text, because searches for whole texts are slow.
_BEGINNING: Final = 64
# False matches of a text's beginning, after which the search ends: more of them are no accident.
_ATTEMPTS: Final = 100


class Texts:
    """Finds texts in a payload from `Codec.encode`, for SQL, which cuts them out. The first search reads the payload.

    msgpack keeps the UTF-8 of a text in one piece.
    """

    __slots__ = ("_parts", "_payload")

    def __init__(self, payload: bytes) -> None:
        self._payload = payload
        self._parts: Sequence[tuple[int, int]] | None = None

    def find(self, rollout: int, text: str, since: int = 0) -> list[int] | None:
        """Return the offset and the length, in bytes, of a text of this rollout; None where SQL can't have it.

        That is the case if the payload is compressed, or the text holds NUL or lone surrogates. The search begins at
        the offset `since`. Any equal text of the rollout will do.
        """
        if self._parts is None:
            self._parts = parts_of(self._payload)
        if not self._parts or "\x00" in text:
            return None
        try:
            wanted = text.encode()
        except UnicodeEncodeError:
            return None
        head = _head(len(wanted))
        beginning = head + wanted[:_BEGINNING]
        start, end = self._parts[rollout]
        at = max(start, since)
        for _ in range(_ATTEMPTS):
            at = self._payload.find(beginning, at, end)
            if at < 0:
                return None
            if self._payload.startswith(wanted, at + len(head)):
                return [at + len(head), len(wanted)]
            at += 1
        return None


def _head(length: int) -> bytes:
    """Return msgpack's head of a text of this many bytes."""
    if length < 1 << 5:
        return bytes((0xA0 | length,))
    if length < 1 << 8:
        return bytes((0xD9, length))
    if length < 1 << 16:
        return struct.pack(">BH", 0xDA, length)
    return struct.pack(">BI", 0xDB, length)
