"""Objects that msgpack would silently store as something else, and what stands for them while they are packed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgpack  # type: ignore[import-untyped]

#: What holds nothing else, and msgpack packs as it is.
SCALARS: Final = frozenset({type(None), bool, int, float, str, bytes})
_NUMBERS: Final = frozenset({int, float})
_CONTAINERS: Final = frozenset({list, tuple, set, frozenset})
_LONG: Final = 32
_FOREIGN: Final = frozenset({bytearray, memoryview, msgpack.ExtType, msgpack.Timestamp})


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
        items = stack.pop()
        if SCALARS.issuperset(map(type, items)):
            continue
        for item in items:
            kind = type(item)
            if kind in SCALARS:
                continue
            if kind is dict:
                stack.append(item.values())
            elif kind in _CONTAINERS:
                if not (kind is list and len(item) > _LONG and _looks_numeric(item)):
                    stack.append(item)
            elif kind in _FOREIGN:
                return True
    return False


def _looks_numeric(items: list[Any]) -> bool:
    return type(items[0]) in _NUMBERS and type(items[-1]) in _NUMBERS


def wrapped(value: Any) -> Any:
    """Return the value with stand-ins for such objects, as far as it consists of dicts, lists, tuples and sets.

    What holds none may be returned itself. RecursionError for what is nested too deeply, or holds itself.
    """
    kind = type(value)
    if kind in _FOREIGN:
        return _STAND_INS.get(kind, Foreign)(value)
    if kind is dict:
        return {wrapped(key): wrapped(item) for key, item in value.items()}
    if kind in _CONTAINERS:
        return value if SCALARS.issuperset(map(type, value)) else kind(map(wrapped, value))
    return value
