"""Packing values as msgpack: types that msgpack knows as they are, others behind a mark.

Tuples, sets, enums, datetimes, arrays and the like are stored as a map of one entry whose key is a *mark*, an empty
msgpack extension object whose type says what the value is: `{mark: content}`. msgpack itself packs and unpacks the
content, so nesting costs no Python recursion, and a mark can't be mistaken for a user's key. Only plain arrays and our
statuses are extension objects that hold something: their bytes, or what says how to read those behind the msgpack
(`codec.behind`); and the status. `codec.unpack` reverses it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from functools import partial
from typing import Any, Final
from uuid import UUID
from zoneinfo import ZoneInfo

import msgpack  # type: ignore[import-untyped]
import numpy as np

from replaybuf.codec import arrays, containers
from replaybuf.codec.behind import Octets, reference
from replaybuf.codec.converters import Converters, name_of
from replaybuf.codec.foreign import Bytearray, Foreign, holds_foreign, wrapped
from replaybuf.codec.marks import (
    ARRAY,
    BYTEARRAY,
    COMPLEX,
    DATE,
    DATETIME,
    DECIMAL,
    FROZENSET,
    HOLDERS,
    INT,
    NUMPY_BYTES,
    NUMPY_STR,
    OBJECT_ARRAY,
    SCALAR,
    SET,
    STATUS,
    TIME,
    TIMEDELTA,
    TUPLE,
    UUID_,
    Family,
    Form,
    Nesting,
    mark,
)
from replaybuf.codec.object_refs import UnfetchedError
from replaybuf.errors import EncodeError
from replaybuf.rollouts.rollout import Status


def _pack_int(value: int) -> bytes:
    return value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)


def _pack_tz(tz: tzinfo | None) -> Any:
    if tz is None:
        return None
    if type(tz) is ZoneInfo and tz.key is not None:
        return tz.key
    if type(tz) is timezone:
        offset, name = tz.utcoffset(None), tz.tzname(None)
        return [offset, None if name == timezone(offset).tzname(None) else name]
    raise TypeError(f"the time zone {tz!r} can't be stored: use zoneinfo.ZoneInfo or datetime.timezone")


def _pack_time(value: datetime | time) -> list[Any]:
    return [value.hour, value.minute, value.second, value.microsecond, value.fold, _pack_tz(value.tzinfo)]


_FORMS: Final[dict[type, Form]] = {
    cls: (mark(number), form)
    for cls, number, form in (
        (tuple, TUPLE, list),
        (set, SET, list),
        (frozenset, FROZENSET, list),
        (int, INT, _pack_int),
        (complex, COMPLEX, lambda value: [value.real, value.imag]),
        (Decimal, DECIMAL, str),
        (UUID, UUID_, lambda value: value.bytes),
        (datetime, DATETIME, lambda value: [value.year, value.month, value.day, *_pack_time(value)]),
        (date, DATE, lambda value: [value.year, value.month, value.day]),
        (time, TIME, _pack_time),
        (np.ndarray, ARRAY, arrays.take_apart),
        (np.str_, NUMPY_STR, lambda value: value[:]),  # str(value) drops trailing zeros
        (np.bytes_, NUMPY_BYTES, bytes),
        (Bytearray, BYTEARRAY, lambda stand_in: bytes(stand_in.value)),
        (timedelta, TIMEDELTA, lambda value: [value.days, value.seconds, value.microseconds]),
    )
} | containers.FORMS
_STATUSES: Final = {status.value: msgpack.ExtType(STATUS, status.value.encode()) for status in Status}
_FORMS[Status] = (None, lambda status: _STATUSES[status._value_])
_ARRAY: Final[Form] = _FORMS[np.ndarray]
_DICTS: Final = frozenset({dict, OrderedDict, defaultdict, Counter})
_SEQUENCES: Final = frozenset({list, tuple, set, frozenset, deque})
_HOLDERS: Final = frozenset(map(mark, HOLDERS))
_OBJECTS: Final[Form] = (mark(OBJECT_ARRAY), arrays.take_objects_apart)
_SCALAR: Final[Form] = (mark(SCALAR), arrays.take_scalar_apart)


@dataclass(slots=True)
class Packed:
    """Packed values: the length of each one's msgpack, the msgpack of all, and the bytes behind it."""

    lengths: list[int]
    msgpack: memoryview
    behind: list[Any]


class Packing:
    """How one codec packs values.

    `families` know the forms of values that this module doesn't; `converters` are asked before all others.
    """

    def __init__(self, families: Sequence[Family], converters: Converters) -> None:
        self._families = (converters, *families)
        self._converters = converters
        self._forms = _FORMS | converters.forms  # and those that the families have found
        self._arrays = frozenset({np.ndarray, Octets} - converters.forms.keys())

    def pack(self, values: Sequence[Any]) -> Packed:
        """Pack values; what is behind the msgpack may be in their own memory.

        Raises TypeError, ValueError, RecursionError or the like for what can't be stored; `explain` then says where it
        is.
        """
        held: list[Any] = []
        packed = self._pack(values, partial(self._stand_in, held))
        # After packing, which made sure that no value contains itself.
        if holds_foreign(values) or (held and holds_foreign(held)):
            packed = self._pack([wrapped(value) for value in values], self._wrapped_stand_in)
        return packed

    def explain(self, value: Any, path: str) -> EncodeError | None:
        """Return the EncodeError that names the innermost culprit in the value at `path`; None when it packs well."""
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
        except UnfetchedError:  # nothing is wrong with it
            return None
        except Exception as error:
            return error
        return None

    def _children(self, value: Any) -> Iterator[tuple[str, Any]]:
        kind = type(value)
        if kind in _DICTS:
            for key, item in list(value.items()):  # packing may call users' code, which may change it
                yield f"[key {key!r:.80}]", key
                yield f"[{key!r:.80}]", item
        elif kind in _SEQUENCES:
            for index, item in enumerate(list(value)):
                yield f"[{index}]", item
        elif kind is np.ndarray and value.dtype.char == "O":
            for place, item in np.ndenumerate(value):
                yield f"[{', '.join(map(str, place))}]", item
        for family in self._families:
            if isinstance(family, Nesting):
                yield from family.parts(value)

    def _pack(self, values: Sequence[Any], stand_in: Callable[[list[Any], Any], Any]) -> Packed:
        behind: list[Any] = []
        # One growing buffer, read in place, halves the copies that packing value by value would make.
        packer = msgpack.Packer(
            default=partial(stand_in, behind),
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
        return Packed(lengths, packer.getbuffer(), behind)

    def _stand_in(self, held: list[Any], behind: list[Any], value: Any) -> Any:
        """Return what msgpack packs in place of a value that it has no form for; what instances hold goes to `held`."""
        kind = type(value)
        if kind in self._arrays and (stands_for_it := reference(value, behind)) is not None:
            return stands_for_it
        form = self._forms.get(kind) or self._find(kind)
        if form is None:
            raise TypeError(self._refusal(value.value if kind is Foreign else value))
        if form is _ARRAY and value.dtype.char == "O":
            form = _OBJECTS
        content = form[1](value)
        if form[0] is None:
            return content
        if form[0] in _HOLDERS:
            held.append(content[1])
        return {form[0]: content}

    def _wrapped_stand_in(self, behind: list[Any], value: Any) -> Any:
        held: list[Any] = []
        stand_in = self._stand_in(held, behind, value)
        return {key: wrapped(content) for key, content in stand_in.items()} if held else stand_in

    def _find(self, kind: type) -> Form | None:
        form = next(filter(None, (family.form(kind) for family in self._families)), None)
        if form is None and issubclass(kind, np.generic):
            form = _SCALAR
        if form is not None:
            self._forms[kind] = form
        return form

    def _refusal(self, value: Any) -> str:
        """Return why a value can't be stored, and what to do about it."""
        kind = type(value)
        name, advice = name_of(kind), self._converters.advice(kind)
        for plain in (np.ndarray, dict, list, tuple, set, frozenset, str, bytes, bytearray, int, float):
            if isinstance(value, plain):
                plain_name = "numpy.ndarray (np.asarray)" if plain is np.ndarray else plain.__name__
                return f"a {name} would not come back as such: convert it to a plain {plain_name}, or {advice}"
        return f"a value of type {name} can't be stored: {advice}"
