"""Payloads: groups of rollouts as bytes, and back.

A payload is a header of 24 bytes and a body:

    magic "RPLB", version, flags (1: zstd), two zero bytes, rollouts (u32), size of the body (u64), checksum (u32)
    length of each rollout's msgpack (u64 each) | the rollouts' msgpack, a map of fields each | bytes of arrays

All numbers are little-endian; the size is the one before compression. The checksum is the lower half of the XXH3 (64
bits) of the body as stored, seeded with the XXH3 of the rest of the header. Each rollout is unpacked by its own call:
other threads run in between. Types that msgpack doesn't know are described in `codec.msgpack_values`,
`codec.numpy_arrays` and the type handlers (`codec.extension_types`). Nothing is pickled, and nothing that a payload
names is imported or called.

Version 1 had the crc32 of the header and the body as its checksum, and no arrays after the msgpack. It is read.
"""

from __future__ import annotations

import copy
import struct
import zlib
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, Final, Literal

from xxhash import xxh3_64, xxh3_64_intdigest

from replaybuf.codec.extension_types import TaggedValueHandler, TypeHandler
from replaybuf.codec.images import Images
from replaybuf.codec.msgpack_values import Packed, Packing, Unpacking, type_tags
from replaybuf.codec.numpy_arrays import OutOfBandReader, aligned, as_writable
from replaybuf.codec.object_refs import Fetched, ObjectRefs, Releasing, RestoreRefs, UnfetchedError, at_hand, is_ref
from replaybuf.codec.torch_tensors import RestoreTensors, Tensors
from replaybuf.codec.user_classes import ConverterMap, Converters, Instances
from replaybuf.errors import ConfigError, DecodeError, EncodeError, MissingDriverError
from replaybuf.rollouts.rollout_type import RolloutType

Compression = Literal["none", "zstd"]
Buffer = bytes | bytearray | memoryview
#: bytes, or what gives its memory: of the group or of msgpack.
Parts = Sequence[Any]

MAGIC = b"RPLB"
VERSION = 2
_CRC32 = 1  # the version that has crc32 as its checksum
_ZSTD = 1
_HEAD = struct.Struct("<4sBBHIQ")
_CHECKSUM = struct.Struct("<I")
_BODY_AT = _HEAD.size + _CHECKSUM.size
# The largest size that a compressed body may claim: a hostile one can't make the reader allocate more. Bodies that
# compress better than this are stored uncompressed, so that everything written can be read.
_MAX_RATIO = 1000
_ALWAYS_ALLOWED = 64 << 20


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
        fields = [self.rollout_type.to_fields(rollout) for rollout in rollouts]
        try:
            plain = None if fetched else self._pack(fields)
        except UnfetchedError:
            plain = None
        packed = plain or self._pack_refs(fields, fetched or {}, wait=fetched is None)
        table = struct.pack(f"<{len(fields)}Q", *packed.lengths)
        out_of_band, end = aligned(packed.out_of_band, _BODY_AT + len(table) + len(packed.msgpack))
        size = end - _BODY_AT
        flags, stored = self._compress((table, packed.msgpack, *out_of_band), size)
        head = _HEAD.pack(MAGIC, VERSION, flags, 0, len(fields), size)
        if flags or not out_of_band:
            return b"".join((head, _CHECKSUM.pack(_xxh3(head, *stored)), *stored))
        # The checksum is that of these bytes, not of the users' arrays, which their threads may be changing.
        payload = b"".join((head, bytes(_CHECKSUM.size), *stored))
        _CHECKSUM.pack_into(as_writable(payload).data, _HEAD.size, _xxh3(head, memoryview(payload)[_BODY_AT:]))
        return payload

    def decode(self, payload: Buffer, *, verified: bool = False, owned: bool = False) -> list[Any]:
        """Return the rollouts of a payload, independent of its memory. `verified` means that it has passed `verify`.

        `owned` means that there is no other reference to the payload: large arrays live in its memory then, each at its
        own place, and change it when they are written to, which this itself does not. One that is kept keeps all of it,
        so those that would keep more than 64 times their size are copied.

        DecodeError when it is damaged, of a newer version, or was written for another rollout type; MissingDriverError
        when it is compressed with zstd and zstd is not installed. Takes memory in proportion to the payload.
        """
        flags, count, size, stored = _open(payload, verified)
        lends = owned and not self.runs_code and not flags & _ZSTD  # the payload may be needed again
        own = payload if lends and type(payload) is bytes else None
        try:
            body = memoryview(_decompress(stored, size)) if flags & _ZSTD else stored
            if len(body) != size:
                raise ValueError(f"it holds {len(body)} bytes where {size} belong")
            return self._unpack(body, count, own)
        except (DecodeError, MissingDriverError):
            raise
        except Exception as error:  # hostile bytes can raise anything
            raise DecodeError(f"the payload is damaged: {str(error) or type(error).__name__}") from error

    def fetch(self, refs: Sequence[Any]) -> Fetched:
        """Return the values of Ray ObjectRefs, for `encode`; blocks for up to `object_ref_timeout`, raises nothing."""
        return self._refs.fetch(refs)

    def release(self, rollouts: Sequence[Any]) -> None:
        """Replace the ObjectRefs in rollouts by None, in place, so that Ray can delete their objects."""
        releasing = Releasing(is_ref, self._converters.encoders)
        for rollout in rollouts:
            releasing.release(rollout)

    def verify(self, payload: Buffer) -> None:
        """Raise DecodeError when the header is not a payload's or the checksum doesn't match; decodes nothing."""
        _open(payload)

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

    def _unpack(self, body: memoryview, count: int, own: bytes | None) -> list[Any]:
        lengths = struct.unpack_from(f"<{count}Q", body)
        start = 8 * count
        unpacking = Unpacking(self._tags, OutOfBandReader(body, _BODY_AT, start + sum(lengths), own))
        rollouts = []
        for length in lengths:
            fields = unpacking.unpack(body[start : start + length])
            if type(fields) is not dict:
                raise ValueError(f"a {type(fields).__name__} where a rollout belongs")
            rollouts.append(self.rollout_type.from_fields(fields))
            start += length
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


def parts_of(payload: bytes) -> list[tuple[int, int]]:
    """Return where in a whole payload the msgpack of each rollout begins and ends; nothing where it is compressed."""
    _, _, flags, _, count, _ = _HEAD.unpack_from(payload)
    if flags & _ZSTD:
        return []
    lengths = struct.unpack_from(f"<{count}Q", payload, _BODY_AT)
    return [*pairwise(accumulate(lengths, initial=_BODY_AT + 8 * count))]


def _open(payload: Buffer, verified: bool = False) -> tuple[int, int, int, memoryview]:
    """Return flags, number of rollouts, size of the body, and the stored body; DecodeError if they can't be trusted."""
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
    if not verified and (_crc32 if version == _CRC32 else _xxh3)(view[: _HEAD.size], body) != checksum:
        raise DecodeError("the payload is damaged: its checksum doesn't match")
    if version < 1 or flags & ~_ZSTD or zero:
        raise DecodeError(f"the payload is damaged: no such header (version {version}, flags {flags}, {zero})")
    return flags, count, size, body


def _crc32(head: memoryview, body: memoryview) -> int:
    return zlib.crc32(body, zlib.crc32(head))


def _xxh3(head: Buffer, *body: Buffer) -> int:
    digest = xxh3_64(seed=xxh3_64_intdigest(head))
    for part in body:
        digest.update(part)
    return digest.intdigest() & 0xFFFFFFFF


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
