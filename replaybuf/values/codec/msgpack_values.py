"""Values as msgpack, and back: native types of msgpack directly, others with a type tag.

Tuples, sets, enums, datetimes and the like are stored as a map of one entry whose key is a *type tag*, an empty msgpack
extension object with the code of the type: `{tag: content}`. msgpack itself packs and unpacks the content, so nesting
costs no Python recursion, and a tag can't be mistaken for a user's key. Only arrays are extension
objects with content: a reference to the table of arrays (`codec.blocks`).

Payloads may be damaged or hostile: content is checked before it reaches a constructor, and nothing that a payload names
is imported or called.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import msgpack  # type: ignore[import-untyped]
import numpy as np

from replaybuf.errors import RolloutError
from replaybuf.values.codec import value_types as types
from replaybuf.values.codec.blocks import BlockReader, BlockWriter, PartReader
from replaybuf.values.codec.library_values import RefValues
from replaybuf.values.codec.packed_columns import SHARED, ColumnReader, ColumnWriter, Parents, leave_alone
from replaybuf.values.codec.payload_format import Buffer, Head
from replaybuf.values.codec.user_classes import Converters, Instances
from replaybuf.values.codec.value_types import ENCODERS, Decoder, Decoders, Encoder, EncoderOf, type_tag
from replaybuf.values.rollouts.rollout_type import name_of

_SEQUENCES: Final = frozenset({list, tuple, set, frozenset})
#: Classes whose subclasses are refused, since they may have more content.
_PLAIN: Final = (np.ndarray, dict, list, tuple, set, frozenset, str, bytes, int, float)
_ARRAY: Final = types.ARRAY  # a module global, since it is compared for every extension object

#: Values that consist of one array, the third part of their content: one object comes back as one.
_ONE_ARRAY_TAGS: Final = frozenset({types.TENSOR, types.IMAGE})
#: Values that are made of arrays by code which doesn't support handles.
_EAGER_TAGS: Final = frozenset({types.CONVERTED, types.IMAGE})
_ARRAY_TAGS: Final = _ONE_ARRAY_TAGS | _EAGER_TAGS | {types.OBJECT_REF}


_TAG: Final = msgpack.ExtType
_TABLE_SIZE: Final = struct.Struct("<I")


#: A packed group: the parts of its msgpack, and its blocks.
Packed = tuple[Sequence[Any], BlockWriter]


class Packing:
    """Packs the values of one codec.

    `others` find encoders of types that `value_types` lacks; `converters` have precedence over all others.
    """

    def __init__(self, others: Sequence[EncoderOf], converters: Converters, instances: Instances) -> None:
        self._encoder_finders = (*others, instances.encoder)  # the last one refuses unknown classes
        self._instances = instances
        self._encoders = ENCODERS | converters.encoders  # extended by `encoder`

    def pack(
        self,
        rows: Sequence[dict[str, Any]],
        omitted: frozenset[str],
        refs: RefValues,
        parents: Parents = None,
    ) -> Packed:
        """Pack the fields of rollouts, without those `omitted` that are None; blocks may share their memory.

        Raises TypeError, ValueError, RecursionError or the like for a value that can't be stored, which `explain` then
        locates.
        """
        blocks = BlockWriter()
        columns = ColumnWriter(blocks, parents)
        # One growing buffer, read in place, halves the copies that msgpack.packb would make.
        packer = msgpack.Packer(
            default=partial(self._stand_in, blocks, {}, refs),
            strict_types=True,
            unicode_errors="surrogatepass",
            autoreset=False,
            buf_size=4096,
        )
        packer.pack(columns.rollouts(rows, omitted) if rows else [])
        end = len(packer.getbuffer())
        _check_whole(packer.getbuffer())
        if blocks.table:
            packer.pack(blocks.table)
        packed = packer.getbuffer()
        return (packed, _TABLE_SIZE.pack(len(packed) - end)), blocks

    def _stand_in(self, blocks: BlockWriter, contents: dict[int, tuple[Any, Any]], refs: RefValues, value: Any) -> Any:
        """Return the object packed in place of a value.

        `contents` has, by id, the contents of tensors and images, and the values themselves.
        """
        kind = type(value)
        if (kind is np.ndarray or kind is np.memmap) and value.dtype.char != "O":
            return blocks.reference(value)
        earlier = contents.get(id(value))
        if earlier is not None:
            return earlier[0]
        encoder = self._encoders.get(kind) or self._encoder(kind)
        if encoder is None:
            raise TypeError(_refusal(kind))
        tag, encode = encoder
        if tag.code == types.OBJECT_REF:
            return {tag: refs.of(value)}
        content = {tag: encode(value)}
        if tag.code in _ONE_ARRAY_TAGS:
            contents[id(value)] = content, value
        return content

    def _encoder(self, kind: type) -> Encoder | None:
        """Return the encoder of a class that wasn't met before; None if its instances can't be stored."""
        encoder = next(filter(None, (encoder_of(kind) for encoder_of in self._encoder_finders)), None)
        if encoder is None and issubclass(kind, np.generic):
            encoder = ENCODERS[np.generic]
        if encoder is not None:
            self._encoders[kind] = encoder
        return encoder

    def explain(self, parts: Iterable[tuple[str, Any]], refs: RefValues, path: str = "") -> RolloutError | None:
        """Return the RolloutError of the innermost unstorable value among the parts of `path`; None without one."""
        for step, value in parts:
            try:
                self.pack([{"": value}], frozenset(), refs)
            except Exception as error:
                path += step
                if isinstance(error, RecursionError) or "recursion limit" in str(error):
                    return RolloutError(f"{path}: nested too deeply, or holds itself")
                return self.explain(self._children(value), refs, path) or RolloutError(f"{path}: {error}")
        return None

    def _children(self, value: Any) -> Iterator[tuple[str, Any]]:
        kind = type(value)
        if kind is dict:
            for key, item in list(value.items()):  # copied: packing may run users' code that changes it
                yield f"[key {key!r:.80}]", key
                yield f"[{key!r:.80}]", item
        elif kind in _SEQUENCES:
            for index, item in enumerate(list(value)):
                yield f"[{index}]", item
        elif kind is np.ndarray and value.dtype.char == "O":
            for place, item in np.ndenumerate(value):
                yield f"[{', '.join(map(str, place))}]", item
        yield from self._instances.parts(value)


def _refusal(kind: type) -> str:
    """Return the reason why a value of this class can't be stored, with advice."""
    name = kind.__qualname__
    line = f'add converters={{{name}: ("{name}", encode, decode)}} to the config'
    for plain in _PLAIN:
        if issubclass(kind, plain):
            return f"a {name_of(kind)} would not come back as such: convert it to a plain {name_of(plain)}, or {line}"
    return f"a value of type {name_of(kind)} can't be stored: {line}, or leave it out of the rollout"


def _check_whole(packed: Buffer) -> None:
    """Raise RolloutError unless this is one whole value: msgpack writes the length of a list before its items."""
    unpacker = msgpack.Unpacker(max_buffer_size=len(packed))
    unpacker.feed(packed)
    try:
        unpacker.skip()
        whole = unpacker.tell() == len(packed)
    except msgpack.OutOfData:
        whole = False
    if not whole:
        raise RolloutError("a list in the rollouts was changed while it was stored, as by another thread: put a copy")


def lenient(decoders: Decoders) -> Decoders:
    """Return decoders for incomplete contents, which return None instead of raising."""

    def or_none(decode: Decoder, content: Any) -> Any:
        try:
            return decode(content)
        except Exception:
            return None

    return {code: partial(or_none, decode) for code, decode in decoders.items()}


_UNPACKING: Final[dict[str, Any]] = {"strict_map_key": False, "unicode_errors": "surrogatepass"}

#: The values of each field.
Columns = dict[str, Sequence[Any]]


class Unpacking:
    """Unpacks one payload: the columns of its rollouts, or the rollouts as dicts. Invalid data raises any exception.

    In the fields `deferred`, a reader of parts puts handles in the place of arrays, except in what users' converters
    get. ObjectRefs there are replaced by their values, since a handle serves the same purpose.
    """

    __slots__ = ("_blocks", "_decoded_values", "_decoders", "_open_tags")

    def __init__(self, decoders: Decoders, blocks: BlockReader) -> None:
        self._decoders = decoders
        self._blocks = blocks
        self._open_tags = 0
        self._decoded_values: dict[int, Any] = {}  # tensors and images, by the id of their array

    def rollouts(
        self, head: Head, payload: Buffer, deferred: Collection[str] = frozenset()
    ) -> Columns | list[dict[str, Any]]:
        """Return the values of each field, or the rollouts as dicts if some lack a field."""
        rows, begin = head.rollouts, head.msgpack_at
        end = begin + head.msgpack - _TABLE_SIZE.size
        (size,) = _TABLE_SIZE.unpack_from(payload, end)
        if size > end - begin:
            raise ValueError("no table of arrays")
        if size:
            self._blocks.read_table(msgpack.unpackb(payload[end - size : end]))
        packed = memoryview(payload)[begin : end - size]
        columns = ColumnReader(self._blocks.column)
        if isinstance(self._blocks, PartReader):
            values = self._read_parts(packed, rows, columns, deferred, self._blocks)
        else:
            flat = msgpack.unpackb(packed, object_hook=self._decode_map, ext_hook=self._extension, **_UNPACKING)
            if rows == 1 and type(flat) is list and not self._open_tags and {*flat[1::3]} == {SHARED}:
                fields = dict(zip(flat[::3], flat[2::3], strict=True))  # as of most lone rollouts
                if 3 * len(fields) == len(flat):
                    leave_alone(fields.values())
                    return [fields]
            values = columns.columns(flat, rows)
        if self._open_tags:
            raise ValueError("it holds type tags without content")
        return columns.dicts(values, rows) if columns.partial else values

    def _read_parts(
        self, packed: memoryview, rows: int, columns: ColumnReader, deferred: Collection[str], blocks: PartReader
    ) -> Columns:
        unpacker = msgpack.Unpacker(
            max_buffer_size=len(packed), object_hook=self._decode_map, ext_hook=self._extension, **_UNPACKING
        )
        unpacker.feed(packed)
        values: Columns = {}
        count = unpacker.read_array_header()
        for _ in range(0, count, 3):
            name = unpacker.unpack()
            blocks.deferring = name in deferred
            values |= columns.columns([name, unpacker.unpack(), unpacker.unpack()], rows)
        if 3 * len(values) != count or unpacker.tell() != len(packed):
            raise ValueError("its fields are incomplete, or there twice")
        return values

    def _extension(self, code: int, content: bytes) -> Any:
        if code == _ARRAY:
            return self._blocks.referred(content)
        if code not in self._decoders or content:
            raise ValueError(f"unknown kind of value ({code}); was it written by a newer replaybuf?")
        self._open_tags += 1
        if code in _EAGER_TAGS:  # the tag is read before its content
            self._blocks.eager += 1
        return type_tag(code)

    def _decode_map(self, fields: dict[Any, Any]) -> Any:
        if len(fields) == 1:
            for tag in fields:
                if type(tag) is _TAG:
                    self._open_tags -= 1
                    if tag.code in _ARRAY_TAGS:
                        return self._decode_once(tag.code, fields[tag])
                    return self._decoders[tag.code](fields[tag])
        return fields

    def _decode_once(self, code: int, content: Any) -> Any:
        self._blocks.eager -= code in _EAGER_TAGS
        if code == types.OBJECT_REF and self._blocks.deferring and not self._blocks.eager:
            return content
        if code not in _ONE_ARRAY_TAGS or type(content) is not list or len(content) < 3 or content[2] is None:
            return self._decoders[code](content)
        key = id(content[2])
        if key not in self._decoded_values:
            self._decoded_values[key] = self._decoders[code](content), content[2]
        return self._decoded_values[key][0]
