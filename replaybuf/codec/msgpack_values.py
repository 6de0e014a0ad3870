"""Values as msgpack, and back: native types of msgpack directly, others with a type tag.

Tuples, sets, enums, datetimes, arrays and the like are stored as a map of one entry whose key is a *type tag*, an empty
msgpack extension object with the code of the type: `{tag: content}`. msgpack itself packs and unpacks the content, so
nesting costs no Python recursion, and a tag can't be mistaken for a user's key. Only plain arrays and our statuses are
extension objects with content: the array's head and bytes, or only its head if the bytes are out of band
(`codec.numpy_arrays`); and the status.

Payloads may be damaged or hostile: content is checked before it reaches a constructor that could allocate more memory
than the payload, and nothing named in a payload is imported or called.
"""

from __future__ import annotations

import ctypes
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import msgpack  # type: ignore[import-untyped]
import numpy as np

from replaybuf.codec import extension_types as ext
from replaybuf.codec.extension_types import (
    HOLDERS,
    LONG,
    Decoder,
    Encoder,
    NestingHandler,
    PackedStandIn,
    TypeHandler,
    holds_numbers,
    needs_wrapping,
    type_tag,
    wrapped,
)
from replaybuf.codec.numpy_arrays import (
    RawBytes,
    array_reference,
    decode_plain_array,
    encode_objects,
)
from replaybuf.codec.object_refs import UnfetchedError
from replaybuf.codec.standard_types import DECODERS, ENCODERS
from replaybuf.codec.user_classes import Converters, name_of
from replaybuf.errors import EncodeError
from replaybuf.rollouts.rollout import Status

_STATUS_EXTENSIONS: Final = {status.value: msgpack.ExtType(ext.STATUS, status.value.encode()) for status in Status}
_ENCODERS: Final = ENCODERS | {Status: (None, lambda status: _STATUS_EXTENSIONS[status._value_])}
_ARRAY: Final = ENCODERS[np.ndarray]
_OBJECT_ARRAY: Final[Encoder] = (type_tag(ext.OBJECT_ARRAY), encode_objects)
_DICTS: Final = frozenset({dict, OrderedDict, defaultdict, Counter})
_SEQUENCES: Final = frozenset({list, tuple, set, frozenset, deque})
_HOLDERS: Final = frozenset(map(type_tag, HOLDERS))
# Module globals, since they are compared for every extension object.
_PLAIN_ARRAY: Final = ext.PLAIN_ARRAY
_OUT_OF_BAND_ARRAY: Final = ext.OUT_OF_BAND_ARRAY
_STATUS: Final = ext.STATUS
_STATUSES: Final = {status.value.encode(): status for status in Status}


@dataclass(slots=True)
class Packed:
    """Packed values: the msgpack length of each, the msgpack of all, and the out-of-band buffers of arrays."""

    lengths: list[int]
    msgpack: memoryview
    out_of_band: list[Any]


class Packing:
    """Packs the values of one codec.

    `handlers` encode types that `standard_types` lacks; `converters` have precedence over all others.
    """

    def __init__(self, handlers: Sequence[TypeHandler], converters: Converters) -> None:
        self._handlers = (converters, *handlers)
        self._converters = converters
        self._encoders = _ENCODERS | converters.encoders  # extended by `_find`
        self._arrays = frozenset({np.ndarray, RawBytes} - converters.encoders.keys())

    def pack(self, values: Sequence[Any]) -> Packed:
        """Pack values; out-of-band buffers may share their memory.

        Raises TypeError, ValueError, RecursionError or the like for a value that can't be stored; `explain` then
        locates it.
        """
        held: list[Any] = []
        packed = self._pack(values, partial(self._stand_in, held))
        # After packing, which would have failed on a value that contains itself.
        if needs_wrapping(values) or (held and needs_wrapping(held)):
            packed = self._pack([wrapped(value) for value in values], self._wrapped_stand_in)
        return packed

    def explain(self, value: Any, path: str) -> EncodeError | None:
        """Return the EncodeError of the innermost unstorable part of the value at `path`; None if it can be packed."""
        error = self._packing_error(value)
        if error is None:
            return None
        while not (isinstance(error, RecursionError) or "recursion limit" in str(error)):
            for step, child in self._children(value):
                if (child_error := self._packing_error(child)) is not None:
                    value, path, error = child, path + step, child_error
                    break
            else:
                return EncodeError(f"{path}: {error}")
        return EncodeError(f"{path}: nested too deeply, or holds itself")

    def _packing_error(self, value: Any) -> Exception | None:
        try:
            self.pack([value])
        except UnfetchedError:  # only not fetched yet
            return None
        except Exception as error:
            return error
        return None

    def _children(self, value: Any) -> Iterator[tuple[str, Any]]:
        kind = type(value)
        if kind in _DICTS:
            for key, item in list(value.items()):  # copied: packing may run users' code that changes it
                yield f"[key {key!r:.80}]", key
                yield f"[{key!r:.80}]", item
        elif kind in _SEQUENCES:
            for index, item in enumerate(list(value)):
                yield f"[{index}]", item
        elif kind is np.ndarray and value.dtype.char == "O":
            for place, item in np.ndenumerate(value):
                yield f"[{', '.join(map(str, place))}]", item
        for handler in self._handlers:
            if isinstance(handler, NestingHandler):
                yield from handler.parts(value)

    def _pack(self, values: Sequence[Any], stand_in: Callable[[list[Any], Any], Any]) -> Packed:
        out_of_band: list[Any] = []
        # One growing buffer, read in place, halves the copies that packing value by value would make.
        packer = msgpack.Packer(
            default=partial(stand_in, out_of_band),
            strict_types=True,
            unicode_errors="surrogatepass",
            autoreset=False,
            buf_size=4096,
        )
        lengths, end = [], 0
        for value in values:
            packer.pack(value)
            start, end = end, len(packer.getbuffer())
            lengths.append(end - start)
        return Packed(lengths, packer.getbuffer(), out_of_band)

    def _stand_in(self, held: list[Any], out_of_band: list[Any], value: Any) -> Any:
        """Return the object packed in place of a value; the content of instances is appended to `held`."""
        kind = type(value)
        if kind in self._arrays and (reference := array_reference(value, out_of_band)) is not None:
            return reference
        encoder = self._encoders.get(kind) or self._find(kind)
        if encoder is None:
            raise TypeError(self._refusal(value.value if kind is PackedStandIn else value))
        if encoder is _ARRAY and value.dtype.char == "O":
            encoder = _OBJECT_ARRAY
        tag, encode = encoder
        content = encode(value)
        if tag is None:
            return content
        if tag in _HOLDERS:
            held.append(content[1])
        return {tag: content}

    def _wrapped_stand_in(self, out_of_band: list[Any], value: Any) -> Any:
        held: list[Any] = []
        stand_in = self._stand_in(held, out_of_band, value)
        return {key: wrapped(content) for key, content in stand_in.items()} if held else stand_in

    def _find(self, kind: type) -> Encoder | None:
        encoder = next(filter(None, (handler.encoder(kind) for handler in self._handlers)), None)
        if encoder is None and issubclass(kind, np.generic):
            encoder = _ENCODERS[np.generic]
        if encoder is not None:
            self._encoders[kind] = encoder
        return encoder

    def _refusal(self, value: Any) -> str:
        """Return the reason why a value can't be stored, with advice."""
        kind = type(value)
        name, advice = name_of(kind), self._converters.advice(kind)
        for plain in (np.ndarray, dict, list, tuple, set, frozenset, str, bytes, bytearray, int, float):
            if isinstance(value, plain):
                plain_name = "numpy.ndarray (np.asarray)" if plain is np.ndarray else plain.__name__
                return f"a {name} would not come back as such: convert it to a plain {plain_name}, or {advice}"
        return f"a value of type {name} can't be stored: {advice}"


class _TypeTag:
    """A type tag in unpacked data; `decode(content)` returns the value."""

    __slots__ = ("decode",)

    def __init__(self, decode: Decoder) -> None:
        self.decode = decode


#: Type tags by their codes.
TypeTags = Mapping[int, _TypeTag]


def type_tags(handlers: Iterable[TypeHandler]) -> TypeTags:
    """Return all type tags of payloads by code, including the tags of these handlers."""
    decoders = dict(DECODERS)
    for handler in handlers:
        decoders.update(handler.decoders)
    return {code: _TypeTag(decode) for code, decode in decoders.items()}


def lenient(tags: TypeTags) -> TypeTags:
    """Return type tags for incomplete contents, which decode to None instead of raising."""

    def or_none(decode: Callable[[Any], Any], content: Any) -> Any:
        try:
            return decode(content)
        except Exception:
            return None

    return {code: _TypeTag(partial(or_none, tag.decode)) for code, tag in tags.items()}


class ArrayReader(Protocol):
    """Reads out-of-band arrays, in the order of their references in the msgpack."""

    def read(self, head: bytes) -> Any:
        """Return the next array, with the dtype and shape in `head`."""

    def small(self, array: Any) -> Any:
        """Return the replacement of an array stored in the msgpack."""

    def defer(self, deferred: bool) -> None:
        """Switch handles in place of the following arrays on or off."""

    def finish(self) -> None:
        """Raise ValueError unless all arrays were read."""


def _untracking() -> Callable[[list[Any]], object] | None:
    """Return CPython's function that untracks an object from the garbage collector."""
    function = getattr(getattr(ctypes, "pythonapi", None), "PyObject_GC_UnTrack", None)
    return function and ctypes.PYFUNCTYPE(None, ctypes.py_object)(("PyObject_GC_UnTrack", ctypes.pythonapi))


_untrack: Final = _untracking()


def _left_alone(items: list[Any]) -> list[Any]:
    """Return an unpacked list, untracked from the garbage collector if it is a long list of numbers.

    The collector would traverse all tokens in memory again and again: a quarter of the time of taking lists, and pauses
    of the event loop. A cycle that a user later makes through such a list is never freed.
    """
    if len(items) > LONG and _untrack is not None and holds_numbers(items):
        _untrack(items)
    return items


class Unpacking:
    """Unpacks one payload: `unpack` the fields of each rollout in order, then `finish`. Invalid data raises."""

    __slots__ = ("_open_tags", "_out_of_band", "_tags")

    def __init__(self, tags: TypeTags, out_of_band: ArrayReader) -> None:
        self._tags = tags
        self._out_of_band = out_of_band
        self._open_tags = 0

    def unpack(self, packed: memoryview) -> Any:
        """Return the next value."""
        return msgpack.unpackb(
            packed,
            object_hook=self._decode_map,
            ext_hook=self._extension,
            list_hook=_left_alone,
            strict_map_key=False,
            unicode_errors="surrogatepass",
        )

    def finish(self) -> None:
        """Raise ValueError if there were type tags without content, or unreferenced buffers."""
        if self._open_tags:
            raise ValueError("it holds type tags without content")
        self._out_of_band.finish()

    def _extension(self, code: int, content: bytes) -> Any:
        if code == _OUT_OF_BAND_ARRAY:
            return self._out_of_band.read(content)
        if code == _PLAIN_ARRAY:
            return self._out_of_band.small(decode_plain_array(content))
        if code == _STATUS:
            return _STATUSES[content]
        tag = self._tags.get(code)
        if tag is None or content:
            raise ValueError(f"unknown kind of value ({code}); was it written by a newer replaybuf?")
        self._open_tags += 1
        return tag

    def _decode_map(self, fields: dict[Any, Any]) -> Any:
        if len(fields) == 1:
            for tag in fields:
                if type(tag) is _TypeTag:
                    self._open_tags -= 1
                    return tag.decode(fields[tag])
        return fields


class DeferredUnpacking(Unpacking):
    """Unpacks one payload with handles in place of the arrays in the fields `deferred` of its rollouts.

    Converters get arrays, since users' code doesn't support handles. ObjectRefs are replaced by their values, since a
    handle serves the same purpose.
    """

    __slots__ = ("_arrays", "_converted", "_converters", "_deferred", "_deferring", "_refs")

    def __init__(self, tags: Mapping[int, _TypeTag], out_of_band: ArrayReader, deferred: Collection[str]) -> None:
        super().__init__(tags, out_of_band)
        self._deferred = deferred
        self._deferring = False
        self._converters, self._arrays, self._refs = map(tags.get, (ext.CONVERTED, ext.ARRAY, ext.OBJECT_REF))
        self._converted = 0  # nesting depth of converters' values

    def unpack(self, packed: memoryview) -> Any:
        unpacker = msgpack.Unpacker(
            object_hook=self._decode_map,
            ext_hook=self._extension,
            list_hook=_left_alone,
            strict_map_key=False,
            unicode_errors="surrogatepass",
            max_buffer_size=len(packed),
        )
        unpacker.feed(packed)
        fields = {}
        for _ in range(unpacker.read_map_header()):
            name = unpacker.unpack()
            self._defer(name in self._deferred)
            fields[name] = unpacker.unpack()
        self._defer(False)
        return fields

    def _defer(self, deferring: bool) -> None:
        self._deferring = deferring
        self._out_of_band.defer(deferring)

    def _extension(self, code: int, content: bytes) -> Any:
        found = super()._extension(code, content)
        if code == ext.CONVERTED and self._deferring:  # the tag is read before its content
            self._converted += 1
            self._out_of_band.defer(False)
        return found

    def _decode_map(self, fields: dict[Any, Any]) -> Any:
        tag = next(iter(fields)) if self._deferring and len(fields) == 1 else None
        if type(tag) is not _TypeTag:
            return super()._decode_map(fields)
        if tag is self._refs and not self._converted:
            self._open_tags -= 1
            return fields[tag]
        found = super()._decode_map(fields)
        if tag is self._converters:
            self._converted -= 1
            self._out_of_band.defer(not self._converted)
        elif tag is self._arrays and not self._converted:
            return self._out_of_band.small(found)
        return found
