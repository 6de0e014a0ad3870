"""Extension types of payloads: the msgpack extension codes of values that msgpack itself doesn't support.

Such a value is stored as a map of one entry: an empty extension object, its *type tag*, as the key, and the value's
content. The codes are part of the format: never change the meaning of one. A module that stores a library's values
implements `TypeHandler`; `wrapped` protects values that msgpack would silently store as something else.

`TaggedValue` is a value as stored in a payload: its code and content. Files of rollouts are written from trees of such
values and read into them, so they hold everything that a payload can, without the class of a value or its library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final, Protocol, runtime_checkable

import msgpack  # type: ignore[import-untyped]

TUPLE, SET, FROZENSET, BYTEARRAY, INT, COMPLEX, DECIMAL, UUID_, DATETIME, DATE, TIME, TIMEDELTA = range(1, 13)
DEQUE, PATH, MEMORYVIEW, ORDERED_DICT, DEFAULT_DICT, COUNTER = range(13, 19)
ENUM, SCALAR, NUMPY_STR, NUMPY_BYTES, SMALL_ARRAY, ARRAY_IN_BLOCK, STATUS = range(19, 26)
OBJECT, NAMEDTUPLE = range(30, 32)
OBJECT_ARRAY, TENSOR, OBJECT_REF, IMAGE, CONVERTED = range(40, 45)

#: Codes whose contents hold users' values, unchanged.
HOLDERS = frozenset({OBJECT, NAMEDTUPLE})

#: A type tag, and the function that returns a value's content. If the tag is None, the content replaces the value.
Encoder = tuple[Any, Callable[[Any], Any]]
#: Returns the value for a content, which may be damaged or hostile.
Decoder = Callable[[Any], Any]


class TypeHandler(Protocol):
    """Encodes and decodes types that only some codecs support: tensors, images, instances of classes, ..."""

    @property
    def decoders(self) -> Mapping[int, Decoder]:
        """The decoders by the codes of their type tags."""

    def encoder(self, kind: type) -> Encoder | None:
        """Return the encoder of a class's instances, None for a class of other handlers. Called once for each class.

        A TypeError, of this or of the encoder's function, says why a value can't be stored, with advice. Contents with
        users' values must pass through `wrapped`, unless their code is one of HOLDERS.
        """


@runtime_checkable
class NestingHandler(Protocol):
    """A handler of values that hold others: it locates values inside them for errors."""

    def parts(self, value: Any) -> Iterable[tuple[str, Any]]:
        """Yield the values inside a value, each with its accessor (`.field`, `[0]`); none for other types."""


class _Missing:
    """The type of MISSING."""


#: Marks a field that a rollout doesn't have, unlike others of its group: stored as the status without a name.
MISSING: Final = _Missing()


def type_tag(code: int) -> Any:
    """Return the type tag with this code, as msgpack packs it."""
    return msgpack.ExtType(code, b"")


#: Types that hold no other values and that msgpack packs unchanged.
SCALARS: Final = frozenset({type(None), bool, int, float, str, bytes})
_NUMBERS: Final = frozenset({int, float})
_CONTAINERS: Final = frozenset({list, tuple, set, frozenset})
#: Longer lists of numbers are recognised by their ends.
LONG: Final = 32
_MISREAD: Final = frozenset({bytearray, memoryview, msgpack.ExtType, msgpack.Timestamp})
_LOOKED_INTO: Final = _CONTAINERS | _MISREAD | {dict}


class PackedStandIn:
    """Replaces, during packing, an object that msgpack would silently store as something else."""

    def __init__(self, value: Any) -> None:
        self.value = value


class BytearrayStandIn(PackedStandIn):
    """Replaces a bytearray."""


class MemoryviewStandIn(PackedStandIn):
    """Replaces a memoryview."""


_STAND_INS: Final[dict[type, type[PackedStandIn]]] = {
    bytearray: BytearrayStandIn,
    memoryview: MemoryviewStandIn,
}


def needs_wrapping(values: Iterable[Any]) -> bool:
    """Return whether packable values hold objects that need a stand-in, ignoring dict keys.

    A long list that begins and ends with a number is taken for a list of numbers, because checking each token would
    take a third of the time of encoding. Only in such a list a bytearray or memoryview is restored as bytes.
    """
    stack = [values]
    while stack:
        for item in stack.pop():
            kind = type(item)
            if kind not in _LOOKED_INTO:
                continue
            if kind is list:
                if item and not (type(item[0]) in _NUMBERS and holds_numbers(item)):
                    stack.append(item)
            elif kind is dict:
                stack.append(item.values())
            elif kind in _MISREAD:
                return True
            else:
                stack.append(item)
    return False


def holds_numbers(items: list[Any]) -> bool:
    """Return whether a list is taken for one of numbers. No other items have a sum that is a number."""
    if not items or type(items[0]) not in _NUMBERS or type(items[-1]) not in _NUMBERS:
        return False
    if len(items) > LONG:
        return True
    try:
        return type(sum(items)) in _NUMBERS
    except Exception:
        return False


def wrapped(value: Any) -> Any:
    """Return the value with stand-ins where needed, inside dicts, lists, tuples and sets.

    A value without any may be returned itself. RecursionError for values nested too deeply, or inside themselves.
    """
    kind = type(value)
    if kind in _MISREAD:
        return _STAND_INS.get(kind, PackedStandIn)(value)
    if kind is dict:
        return {wrapped(key): wrapped(item) for key, item in value.items()}
    if kind in _CONTAINERS:
        return value if SCALARS.issuperset(map(type, value)) else kind(map(wrapped, value))
    return value


#: The names of codes in files, except arrays, tensors and our statuses, which have forms of their own there.
TAG_NAMES: Final[dict[int, str]] = {
    code: name.strip("_").lower()
    for name, code in list(globals().items())
    if type(code) is int and name[0] != "_" and code not in (SMALL_ARRAY, ARRAY_IN_BLOCK, STATUS, TENSOR)
}


class TaggedValue:
    """A value as it is stored: the code of its type tag, and its content."""

    __slots__ = ("code", "content")

    def __init__(self, code: int, content: Any) -> None:
        self.code = code
        self.content = content


class TaggedValueHandler:
    """Reads all values with type tags as `TaggedValue`, and writes them unchanged."""

    decoders: Mapping[int, Decoder] = {code: partial(TaggedValue, code) for code in TAG_NAMES}

    def encoder(self, kind: type) -> Encoder | None:
        return (None, lambda tagged: {type_tag(tagged.code): tagged.content}) if kind is TaggedValue else None
