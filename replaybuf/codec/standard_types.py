"""Values of the standard library and numpy in payloads: one table with both directions of each type.

Contents may be hostile, and are checked before use; names in them are looked up in the tables below.
"""

from __future__ import annotations

import os
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from pathlib import PosixPath, PurePath, PurePosixPath
from typing import Any, Final
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np

from replaybuf.codec import extension_types as ext
from replaybuf.codec.extension_types import Decoder, Encoder, checked, type_tag
from replaybuf.codec.numpy_arrays import decode_objects, decode_scalar, encode_objects, encode_scalar

#: The default factories that a defaultdict may have; the names are part of the format.
_FACTORIES: Final[dict[str, Callable[[], Any]]] = {
    cls.__name__: cls for cls in (bool, bytes, dict, float, int, list, set, str, tuple)
}
_PATHS: Final[dict[str, type[PurePath]]] = {cls.__name__: cls for cls in (PurePosixPath, PosixPath)}


def _spread(cls: Callable[..., Any]) -> Decoder:
    """Return the decoder that calls `cls` with a list of arguments."""
    return lambda arguments: cls(*arguments)


def _encode_int(value: int) -> bytes:
    return value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)


def _encode_tz(tz: tzinfo | None) -> Any:
    if tz is None:
        return None
    if type(tz) is ZoneInfo and tz.key is not None:
        return tz.key
    if type(tz) is timezone:
        offset, name = tz.utcoffset(None), tz.tzname(None)
        return [offset, None if name == timezone(offset).tzname(None) else name]
    raise TypeError(f"the time zone {tz!r} can't be stored: use zoneinfo.ZoneInfo or datetime.timezone")


def _decode_tz(content: Any) -> tzinfo | None:
    if content is None:
        return None
    if isinstance(content, str):
        return ZoneInfo(content)  # refuses paths outside of the time zone database
    offset, name = content
    return timezone(offset) if name is None else timezone(offset, name)


def _encode_date(value: date) -> list[Any]:
    return [value.year, value.month, value.day]


def _encode_time(value: datetime | time) -> list[Any]:
    return [value.hour, value.minute, value.second, value.microsecond, value.fold, _encode_tz(value.tzinfo)]


def _decode_datetime(content: list[Any]) -> datetime:
    year, month, day, hour, minute, second, microsecond, fold, tz = content
    return datetime(year, month, day, hour, minute, second, microsecond, _decode_tz(tz), fold=fold)


def _decode_time(content: list[Any]) -> time:
    hour, minute, second, microsecond, fold, tz = content
    return time(hour, minute, second, microsecond, _decode_tz(tz), fold=fold)


def _encode_dict(value: dict[Any, Any]) -> Any:
    return checked(dict(value))


def _encode_defaultdict(value: defaultdict[Any, Any]) -> list[Any]:
    factory: Any = value.default_factory
    name = None if factory is None else getattr(factory, "__name__", "")
    if name is not None and _FACTORIES.get(name) is not factory:
        raise TypeError(
            f"a defaultdict whose missing keys are made by {factory!r:.100} can't be stored: there are "
            f"{', '.join(_FACTORIES)}; or use a plain dict"
        )
    return [name, _encode_dict(value)]


def _decode_defaultdict(content: list[Any]) -> defaultdict[Any, Any]:
    name, items = content
    if type(items) is not dict:
        raise ValueError(f"a {type(items).__name__} where a dict belongs")
    return defaultdict(None if name is None else _FACTORIES[name], items)


def _decode_path(content: list[Any]) -> PurePath:
    name, text = content
    if type(text) is not str:
        raise ValueError(f"a {type(text).__name__} where a path belongs")
    cls = _PATHS[name]
    return cls(text) if cls is PurePosixPath or os.name == "posix" else PurePosixPath(text)


def _decode_deque(content: list[Any]) -> deque[Any]:
    maxlen, items = content
    if type(items) is not list or not (maxlen is None or len(items) <= maxlen):
        raise ValueError(f"no items of a deque with maxlen {maxlen!r:.80}")
    return deque(items, maxlen)


# Class, code, encoder, type of the content, decoder.
_TYPES: Final[tuple[tuple[Any, int, Callable[[Any], Any], type, Decoder], ...]] = (
    (tuple, ext.TUPLE, list, list, tuple),
    (set, ext.SET, list, list, set),
    (frozenset, ext.FROZENSET, list, list, frozenset),
    (int, ext.INT, _encode_int, bytes, lambda raw: int.from_bytes(raw, "little", signed=True)),
    (complex, ext.COMPLEX, lambda value: [value.real, value.imag], list, _spread(complex)),
    (Decimal, ext.DECIMAL, str, str, Decimal),
    (UUID, ext.UUID_, lambda value: value.bytes, bytes, lambda raw: UUID(bytes=raw)),
    (datetime, ext.DATETIME, lambda value: [*_encode_date(value), *_encode_time(value)], list, _decode_datetime),
    (date, ext.DATE, _encode_date, list, _spread(date)),
    (time, ext.TIME, _encode_time, list, _decode_time),
    (timedelta, ext.TIMEDELTA, lambda value: [value.days, value.seconds, value.microseconds], list, _spread(timedelta)),
    (deque, ext.DEQUE, lambda value: [value.maxlen, checked(list(value))], list, _decode_deque),
    (OrderedDict, ext.ORDERED_DICT, _encode_dict, dict, OrderedDict),
    (Counter, ext.COUNTER, _encode_dict, dict, Counter),
    (defaultdict, ext.DEFAULT_DICT, _encode_defaultdict, list, _decode_defaultdict),
    *((cls, ext.PATH, lambda path: [type(path).__name__, str(path)], list, _decode_path) for cls in _PATHS.values()),
    (np.ndarray, ext.OBJECT_ARRAY, encode_objects, list, decode_objects),  # others: `codec.blocks`
    (np.generic, ext.SCALAR, encode_scalar, list, decode_scalar),
    (np.str_, ext.NUMPY_STR, lambda value: value[:], str, np.str_),  # str(value) drops trailing zeros
    (np.bytes_, ext.NUMPY_BYTES, bytes, bytes, np.bytes_),
)


def _checking(kind: type, decode: Decoder) -> Decoder:
    """Return the decoder, limited to content of this type: `bytearray(10**12)` would not be a conversion."""

    def checked(content: Any) -> Any:
        if type(content) is not kind:
            raise ValueError(f"a {type(content).__name__} where a {kind.__name__} belongs")
        return decode(content)

    return checked


#: Encoders by class; that of `np.generic` is for all numpy scalars but `np.str_` and `np.bytes_`.
ENCODERS: Final[dict[type, Encoder]] = {cls: (type_tag(code), encode) for cls, code, encode, _, _ in _TYPES}
#: Decoders by code.
DECODERS: Final[dict[int, Decoder]] = {code: _checking(kind, decode) for _, code, _, kind, decode in _TYPES}
