"""Packing values as msgpack: types that msgpack knows as they are, others behind a mark.

Tuples, sets, enums, datetimes, arrays and the like are stored as a map of one entry whose key is a *mark*, an empty
msgpack extension object whose type says what the value is: `{mark: content}`. msgpack itself packs and unpacks the
content, so nesting costs no Python recursion, and a mark can't be mistaken for a user's key. Only plain arrays are
extension objects that hold their content. `codec.unpack` reverses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from functools import partial
from typing import Any, Final
from uuid import UUID
from zoneinfo import ZoneInfo

import msgpack  # type: ignore[import-untyped]
import numpy as np

from replaybuf.codec import arrays
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
    PLAIN_ARRAY,
    SCALAR,
    SET,
    TIME,
    TIMEDELTA,
    TUPLE,
    UUID_,
    Family,
    Form,
    mark,
)
from replaybuf.errors import EncodeError

_SCALARS: Final = frozenset({type(None), bool, int, float, str, bytes})
_NUMBERS: Final = frozenset({int, float})
_CONTAINERS: Final = frozenset({list, tuple, set, frozenset})
_LONG: Final = 32
_FOREIGN: Final = frozenset({bytearray, memoryview, msgpack.ExtType, msgpack.Timestamp})


class _Foreign:
    """Stands for a value that msgpack would silently store as something else."""

    def __init__(self, value: Any) -> None:
        self.value = value


class _Bytearray(_Foreign):
    """Stands for a bytearray."""


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
        (_Bytearray, BYTEARRAY, lambda stand_in: bytes(stand_in.value)),
        (timedelta, TIMEDELTA, lambda value: [value.days, value.seconds, value.microseconds]),
    )
}
_SCALAR: Final[Form] = (mark(SCALAR), arrays.take_scalar_apart)


class Packing:
    """How one codec packs values; `families` know the forms of values that this module doesn't."""

    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families
        self._forms = dict(_FORMS)  # and those that the families have found

    def pack(self, values: Sequence[Any]) -> tuple[list[int], memoryview]:
        """Return the length of each value's msgpack, and all of it, one after the other.

        Raises TypeError, ValueError, RecursionError or the like for what can't be stored; `explain` then says where it
        is.
        """
        held: list[Any] = []
        packed = self._pack(values, partial(self._stand_in, held))
        # After packing, which made sure that no value contains itself.
        if any(map(_holds_foreign, values)) or any(map(_holds_foreign, held)):
            packed = self._pack([_wrap_foreign(value) for value in values], self._stand_in_wrapped)
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
        except Exception as error:
            return error
        return None

    def _children(self, value: Any) -> Iterable[tuple[str, Any]]:
        form = self._forms.get(type(value))
        if form is None or form[0].code not in HOLDERS:
            yield from _children(value)
            return
        _, content = form[1](value)
        named = content.items() if isinstance(content, dict) else zip(value._fields, content, strict=True)
        for name, item in named:
            yield f".{name}", item

    def _pack(self, values: Sequence[Any], stand_in: Callable[[Any], Any]) -> tuple[list[int], memoryview]:
        # One growing buffer, read in place, halves the copies that packing value by value would make.
        packer = msgpack.Packer(
            default=stand_in, strict_types=True, unicode_errors="surrogatepass", autoreset=False, buf_size=4096
        )
        lengths, end = [], 0
        for value in values:
            packer.pack(value)
            start, end = end, len(packer.getbuffer())
            lengths.append(end - start)
        return lengths, packer.getbuffer()

    def _stand_in(self, held: list[Any], value: Any) -> Any:
        """Return what msgpack packs in place of a value that it has no form for; what users' values hold is `held`."""
        kind = type(value)
        if kind is np.ndarray and (content := arrays.flatten(value)) is not None:
            return msgpack.ExtType(PLAIN_ARRAY, content)
        form = self._forms.get(kind) or self._find(kind)
        if form is None:
            raise TypeError(_refusal(value.value if kind is _Foreign else value))
        content = form[1](value)
        if form[0].code in HOLDERS:
            held.append(content)
        return {form[0]: content}

    def _stand_in_wrapped(self, value: Any) -> Any:
        """Return the same with `_Foreign`s in it."""
        held: list[Any] = []
        stand_in = self._stand_in(held, value)
        return {key: _wrap_foreign(held[0]) for key in stand_in} if held else stand_in

    def _find(self, kind: type) -> Form | None:
        forms = (family.form(kind) for family in self._families)
        form = next((form for form in forms if form is not None), None)
        if form is None and issubclass(kind, np.generic):
            form = _SCALAR
        if form is not None:
            self._forms[kind] = form
        return form


def _holds_foreign(value: Any) -> bool:
    """Return whether a value that packed well holds objects, dict keys aside, that msgpack packs as something else.

    A long list that begins and ends with a number is taken for a list of numbers, because looking at each token would
    cost a third of the whole encoding. In such a list, and only there, a bytearray is restored as bytes.
    """
    stack: list[Iterable[Any]] = [(value,)]
    while stack:
        items = stack.pop()
        kinds = {*map(type, items)} - _SCALARS
        if not kinds:
            continue
        if not kinds.isdisjoint(_FOREIGN):
            return True
        for item in items:
            kind = type(item)
            if kind is dict:
                stack.append(item.values())
            elif kind in _CONTAINERS and not (kind is list and len(item) > _LONG and _looks_numeric(item)):
                stack.append(item)
    return False


def _looks_numeric(items: list[Any]) -> bool:
    return type(items[0]) in _NUMBERS and type(items[-1]) in _NUMBERS


def _wrap_foreign(value: Any) -> Any:
    """Return a copy of the value in which `_Foreign`s stand for the objects that `_holds_foreign` looks for."""
    kind = type(value)
    if kind in _FOREIGN:
        return _Bytearray(value) if kind is bytearray else _Foreign(value)
    if kind is dict:
        return {_wrap_foreign(key): _wrap_foreign(item) for key, item in value.items()}
    if kind in (list, tuple, set, frozenset):
        return kind(map(_wrap_foreign, value))
    return value


def _refusal(value: Any) -> str:
    """Return why a value can't be stored, and what to do about it."""
    kind = type(value)
    name = f"a value of type {kind.__module__}.{kind.__qualname__}".replace("builtins.", "")
    if any(base.__module__.partition(".")[0] == "torch" for base in kind.__mro__):
        return f"{name} can't be stored: convert it with .numpy()"
    for plain in (np.ndarray, dict, list, tuple, set, frozenset, str, bytes, bytearray, int, float, memoryview):
        if isinstance(value, plain):
            plain_name = {np.ndarray: "numpy.ndarray (np.asarray)", memoryview: "bytes"}.get(plain, plain.__name__)
            return f"{name} would not come back as such: convert it to a plain {plain_name}"
    return f"{name} can't be stored"


def _children(value: Any) -> Iterable[tuple[str, Any]]:
    if type(value) is dict:
        for key, item in value.items():
            yield f"[key {key!r:.80}]", key
            yield f"[{key!r:.80}]", item
    elif type(value) in (list, tuple, set, frozenset):
        for index, item in enumerate(value):
            yield f"[{index}]", item
