"""Extension types of payloads: the msgpack extension codes of values that msgpack itself doesn't support.

Such a value is stored as a map of one entry: an empty extension object, its *type tag*, as the key, and the value's
content. The codes are part of the format: never change the meaning of one. `codec.standard_types` has a table of the
types of the standard library and numpy; those of other libraries and users' classes are encoded and decoded by a
`TypeHandler`.

`TaggedValue` is a value as stored in a payload: its code and content. So payloads can be read and written again without
the class of a value or its library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final, Protocol, runtime_checkable

import msgpack  # type: ignore[import-untyped]

TUPLE, SET, FROZENSET, INT, COMPLEX, DECIMAL, UUID_, DATETIME, DATE, TIME, TIMEDELTA = range(1, 12)
DEQUE, PATH, ORDERED_DICT, DEFAULT_DICT, COUNTER = range(12, 17)
ENUM, SCALAR, NUMPY_STR, NUMPY_BYTES, ARRAY, STATUS = range(17, 23)
OBJECT, NAMEDTUPLE, OBJECT_ARRAY, TENSOR, OBJECT_REF, IMAGE, CONVERTED = range(23, 30)

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
        users' values must pass through `checked`.
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
_SEQUENCES: Final = frozenset({list, tuple, set, frozenset})
#: Longer lists of numbers are recognised by their ends.
LONG: Final = 32
#: msgpack packs values of these silently as something else.
_MISREAD: Final = frozenset({bytearray, memoryview, msgpack.ExtType, msgpack.Timestamp})
_LOOKED_INTO: Final = _SEQUENCES | _MISREAD | {dict}


def checked(value: Any) -> Any:
    """Return the value. TypeError if it is or holds one that msgpack would store as something else.

    Keys of dicts aren't looked at. A long list that begins and ends with a number is taken for a list of numbers,
    because checking each token would take a third of the time of encoding: a bytearray or memoryview in it is stored as
    bytes. RecursionError for values that are nested too deeply, or inside themselves.
    """
    check_all((value,))
    return value


def check_all(values: Iterable[Any]) -> None:
    """Do what `checked` does for each of these values."""
    for value in values:
        kind = type(value)
        if kind not in _LOOKED_INTO:
            continue
        if kind in _MISREAD:
            if kind is bytearray or kind is memoryview:
                raise TypeError(f"a {kind.__name__} can't be stored: convert it to bytes, or to an array")
            raise TypeError(f"a value of type msgpack.{kind.__name__} can't be stored: leave it out of the rollout")
        if kind is dict:
            check_all(value.values())
        elif not holds_numbers(value):
            check_all(value)


def holds_numbers(items: Any) -> bool:
    """Return whether a list or the like is taken for one of numbers. No other items have a sum that is a number."""
    if type(items) is not list or not items or type(items[0]) not in _NUMBERS or type(items[-1]) not in _NUMBERS:
        return False
    if len(items) > LONG:
        return True
    try:
        return type(sum(items)) in _NUMBERS
    except Exception:
        return False


class TaggedValue:
    """A value as it is stored: the code of its type tag, and its content."""

    __slots__ = ("code", "content")

    def __init__(self, code: int, content: Any) -> None:
        self.code = code
        self.content = content


class TaggedValueHandler:
    """Reads all values with type tags as `TaggedValue`, and writes them unchanged."""

    decoders: Mapping[int, Decoder] = {
        code: partial(TaggedValue, code)
        for code in range(TUPLE, CONVERTED + 1)
        if code not in (ARRAY, STATUS, TENSOR)  # which are read without a class or library
    }

    def encoder(self, kind: type) -> Encoder | None:
        return (None, lambda tagged: {type_tag(tagged.code): tagged.content}) if kind is TaggedValue else None
