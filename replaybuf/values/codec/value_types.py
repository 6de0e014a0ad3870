"""Types of values that msgpack lacks: their extension codes, those of the standard library, and numpy's dtypes.

Such a value is stored as a map of one entry: an empty extension object, its *type tag*, as the key, and the value's
content. Contents may be hostile, and are checked before use. Types of other libraries and users' classes are encoded
and decoded in modules of their own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from datetime import date, datetime, timedelta, timezone, tzinfo
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any, Final
from uuid import UUID
from zoneinfo import ZoneInfo

import msgpack  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt

from replaybuf.values.rollouts.rollout import Status

TUPLE, SET, FROZENSET, INT, COMPLEX, DECIMAL, UUID_, DATETIME, DATE, TIMEDELTA, PATH, SCALAR = range(1, 13)
NUMPY_STR, NUMPY_BYTES, OBJECT_ARRAY, ARRAY, STATUS = range(13, 18)
ENUM, OBJECT, TENSOR, OBJECT_REF, IMAGE, CONVERTED = range(18, 24)

#: A type tag, and the function that returns a value's content. If the tag is None, the content replaces the value.
Encoder = tuple[Any, Callable[[Any], Any]]
#: Returns the encoder of a class's instances, None for a class of others; called once for each class. A TypeError, of
#: this or of the encoder's function, says why a value can't be stored, with advice.
EncoderOf = Callable[[type], Encoder | None]
#: Returns the value for a content, which may be damaged or hostile.
Decoder = Callable[[Any], Any]
#: Decoders by the codes of their type tags.
Decoders = dict[int, Decoder]
AnyArray = npt.NDArray[Any]

#: Types that hold no other values and that msgpack packs unchanged.
SCALARS: Final = frozenset({type(None), bool, int, float, str, bytes})
_ONLY_INT: Final = frozenset({int})


@lru_cache(maxsize=32)
def type_tag(code: int) -> Any:
    """Return the type tag with this code, as msgpack packs it."""
    return msgpack.ExtType(code, b"")


def are_counts(values: Any) -> bool:
    """Return whether this is a list of integers, none of them negative."""
    return type(values) is list and _ONLY_INT.issuperset(map(type, values)) and not (values and min(values) < 0)


# The standard library


def _encode_int(value: int) -> bytes:
    return value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)


def _encode_tz(tz: tzinfo | None) -> Any:
    if tz is None:
        return None
    if type(tz) is ZoneInfo and tz.key is not None:
        return tz.key
    if type(tz) is timezone:
        return tz.utcoffset(None)
    raise TypeError(f"the time zone {tz!r} can't be stored: use zoneinfo.ZoneInfo or datetime.timezone")


def _encode_datetime(value: datetime) -> list[Any]:
    return [value.replace(tzinfo=None).isoformat(), value.fold, _encode_tz(value.tzinfo)]


def _decode_datetime(content: list[Any]) -> datetime:
    text, fold, tz = content
    if tz is not None:
        tz = ZoneInfo(tz) if type(tz) is str else timezone(tz)  # ZoneInfo refuses paths outside of its database
    return datetime.fromisoformat(text).replace(fold=fold, tzinfo=tz)


# numpy: dtypes are stored as their `str` ("<i8", ">f4"), and passed to `np.dtype` only after matching this grammar.

_SIMPLE_DTYPE = re.compile(r"[<>|](b1|[iu][1248]|f[248]|c(8|16)|[SU]\d{1,9})")
MOST_DIMENSIONS: Final = 64  # numpy's limit


@lru_cache(maxsize=512)
def describe_dtype(dtype: np.dtype[Any]) -> str:
    """Return the stored form of a dtype. TypeError, with advice, when `simple_dtype` could not restore it."""
    if _SIMPLE_DTYPE.fullmatch(dtype.str) and dtype.itemsize and np.dtype(dtype.str).type is dtype.type:
        return dtype.str
    raise TypeError(
        f"a numpy dtype {dtype} can't be stored: convert it, with .astype(), to one of numbers, booleans or texts of a "
        "fixed width, or store a dict of arrays"
    )


@lru_cache(maxsize=512)
def simple_dtype(description: str) -> np.dtype[Any]:
    """Return the dtype with this description. ValueError when the description is outside the grammar."""
    good = type(description) is str and _SIMPLE_DTYPE.fullmatch(description)
    if not good or (dtype := np.dtype(description)).itemsize == 0:  # of any number of items
        raise ValueError(f"unknown dtype {description!r:.80}")
    return dtype


def _decode_objects(content: list[Any]) -> AnyArray:
    shape, items = content
    good = type(items) is list and are_counts(shape) and len(shape) <= MOST_DIMENSIONS
    if not good or math.prod(shape) != len(items):
        raise ValueError(f"no array of objects of shape {shape!r:.80}")
    array: AnyArray = np.empty(shape, object)
    flat = array.reshape(-1)
    for place, item in enumerate(items):  # one by one: numpy would unpack items that are lists
        flat[place] = item
    return array


def _decode_scalar(content: Any) -> Any:
    description, raw = content
    dtype = simple_dtype(description)
    if len(raw) != dtype.itemsize:
        raise ValueError(f"a {description} can't have {len(raw)} bytes")
    return np.frombuffer(raw, dtype)[0]


# Class, code, encoder, type of the content, decoder.
_TYPES: Final[tuple[tuple[Any, int, Callable[[Any], Any], type, Decoder], ...]] = (
    (tuple, TUPLE, list, list, tuple),
    (set, SET, list, list, set),
    (frozenset, FROZENSET, list, list, frozenset),
    (int, INT, _encode_int, bytes, lambda raw: int.from_bytes(raw, "little", signed=True)),
    (complex, COMPLEX, lambda value: [value.real, value.imag], list, lambda parts: complex(*parts)),
    (Decimal, DECIMAL, str, str, Decimal),
    (UUID, UUID_, lambda value: value.bytes, bytes, lambda raw: UUID(bytes=raw)),
    (datetime, DATETIME, _encode_datetime, list, _decode_datetime),
    (date, DATE, date.isoformat, str, date.fromisoformat),
    (timedelta, TIMEDELTA, lambda v: [v.days, v.seconds, v.microseconds], list, lambda parts: timedelta(*parts)),
    (type(Path()), PATH, str, str, Path),
    (Status, STATUS, lambda status: status._value_, str, {status.value: status for status in Status}.__getitem__),
    (np.ndarray, OBJECT_ARRAY, lambda array: [list(array.shape), array.ravel().tolist()], list, _decode_objects),
    (np.generic, SCALAR, lambda value: [describe_dtype(value.dtype), value.tobytes()], list, _decode_scalar),
    (np.str_, NUMPY_STR, lambda value: value[:], str, np.str_),  # str(value) drops trailing zeros
    (np.bytes_, NUMPY_BYTES, bytes, bytes, np.bytes_),
)


def _with_type_check(kind: type, decode: Decoder) -> Decoder:
    """Return the decoder, limited to content of this type: `bytearray(10**12)` would not be a conversion."""

    def checked(content: Any) -> Any:
        if type(content) is not kind:
            raise ValueError(f"a {type(content).__name__} where a {kind.__name__} belongs")
        return decode(content)

    return checked


#: Encoders by class; that of `np.generic` is for all numpy scalars but `np.str_` and `np.bytes_`.
ENCODERS: Final[dict[type, Encoder]] = {cls: (type_tag(code), encode) for cls, code, encode, _, _ in _TYPES}
#: Decoders by code.
DECODERS: Final[dict[int, Decoder]] = {code: _with_type_check(kind, decode) for _, code, _, kind, decode in _TYPES}
