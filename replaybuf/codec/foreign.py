"""Objects that msgpack would silently store as something else, and what stands for them while they are packed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgpack  # type: ignore[import-untyped]

#: Types that hold no other values and that msgpack packs unchanged.
SCALARS: Final = frozenset({type(None), bool, int, float, str, bytes})
_NUMBERS: Final = frozenset({int, float})
_CONTAINERS: Final = frozenset({list, tuple, set, frozenset})
_LONG: Final = 32
_FOREIGN: Final = frozenset({bytearray, memoryview, msgpack.ExtType, msgpack.Timestamp})
_LOOKED_INTO: Final = _CONTAINERS | _FOREIGN | {dict}


class Foreign:
    """Stands for such an object."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Bytearray(Foreign):
    """Stands for a bytearray."""


class Memoryview(Foreign):
    """Stands for a memoryview."""


_STAND_INS: Final[dict[type, type[Foreign]]] = {bytearray: Bytearray, memoryview: Memoryview}


def holds_foreign(values: Iterable[Any]) -> bool:
    """Return whether values that packed well hold such objects, dict keys aside.

    A long list that begins and ends with a number is taken for a list of numbers, because looking at each token would
    cost a third of the whole encoding. In such a list, and only there, a bytearray or memoryview is restored as bytes.
    """
    stack = [values]
    while stack:
        for item in stack.pop():
            kind = type(item)
            if kind not in _LOOKED_INTO:
                continue
            if kind is dict:
                stack.append(item.values())
            elif kind in _FOREIGN:
                return True
            elif not (kind is list and _holds_numbers(item)) and not SCALARS.issuperset(map(type, item)):
                stack.append(item)
    return False


def _holds_numbers(items: list[Any]) -> bool:
    """Return whether a list is taken for one of numbers. Nothing else adds up to one, even where it can be added."""
    if not items or type(items[0]) not in _NUMBERS or type(items[-1]) not in _NUMBERS:
        return False
    if len(items) > _LONG:
        return True
    try:
        return type(sum(items)) in _NUMBERS
    except Exception:
        return False


def wrapped(value: Any) -> Any:
    """Return the value with stand-ins for such objects, as far as it consists of dicts, lists, tuples and sets.

    A value without any may be returned itself. RecursionError for values nested too deeply, or inside themselves.
    """
    kind = type(value)
    if kind in _FOREIGN:
        return _STAND_INS.get(kind, Foreign)(value)
    if kind is dict:
        return {wrapped(key): wrapped(item) for key, item in value.items()}
    if kind in _CONTAINERS:
        return value if SCALARS.issuperset(map(type, value)) else kind(map(wrapped, value))
    return value
