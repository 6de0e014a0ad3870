"""Values of users' classes in payloads: the name of a class and the fields that its shape reads; converters.

Reading looks up names of classes in the reader's own config, and names of converters among its converters. Nothing else
is imported or called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import numpy as np

from replaybuf.errors import ConfigError, DecodeError
from replaybuf.values.codec.blocks import StandIn
from replaybuf.values.codec.value_types import CONVERTED, ENUM, OBJECT, SCALARS, Decoders, Encoder, type_tag
from replaybuf.values.rollouts.rollout_type import Classes, is_storable, name_of, stored_name
from replaybuf.values.rollouts.shapes import Shape, kind_of


class Instances:
    """Encodes and decodes instances of known classes.

    Other classes are refused in both directions; with `as_plain`, they are read as enums' values, and as dicts of
    fields.
    """

    def __init__(self, known: Classes, *, as_plain: bool = False) -> None:
        self._known_classes = known
        self._shapes = {stored_name(cls): shape for cls, shape in known.shapes.items()}
        self._as_plain = as_plain
        self.decoders: Decoders = {ENUM: self._restore_member, OBJECT: self._restore_object}

    def encoder(self, kind: type) -> Encoder | None:
        if issubclass(kind, StandIn):
            raise TypeError(
                "the handle of an array can't be stored, because the array may be gone by the time it is read: put "
                "arrays in the place of all handles first, with replaybuf.load_into(rollouts)"
            )
        if kind in self._known_classes:
            if issubclass(kind, Enum):
                return type_tag(ENUM), _member_encoder(stored_name(kind))
            return type_tag(OBJECT), _object_encoder(self._known_classes.shapes[kind])
        label = "an enum" if issubclass(kind, Enum) else kind_of(kind)
        if label and is_storable(kind):
            raise TypeError(
                f"a value of type {name_of(kind)} ({label}) can't be stored: add types=[{kind.__qualname__}] to the "
                "config, or declare its class in the annotations of the rollout_type"
            )
        return None

    def parts(self, value: Any) -> Iterator[tuple[str, Any]]:
        """Yield the fields of an instance that has some."""
        shape = self._known_classes.shapes.get(type(value))
        for name, item in shape.read(value).items() if shape is not None else ():
            yield f".{name}", item

    def _find_class(self, name: Any) -> Any:
        cls = self._known_classes.find(name)
        if cls is None and not self._as_plain:
            shown, short = str(name).replace(":", "."), str(name).rpartition(":" if ":" in str(name) else ".")[2]
            raise DecodeError(
                f"the payload holds a {shown:.200}, a class that this config doesn't know: add types=[{short:.100}] to "
                "it, or use the rollout_type that declares the class"
            )
        return cls

    def _restore_member(self, content: Any) -> Any:
        name, value, *names = content
        cls = self._find_class(name)
        if cls is None:
            return names[0] if names else value
        if not issubclass(cls, Enum):
            raise ValueError(f"a member of {name!r:.200}, which is no enum")
        return cls[names[0]] if names else cls(value)

    def _restore_object(self, content: Any) -> Any:
        name, fields = content
        if type(fields) is not dict:
            raise ValueError(f"a {type(fields).__name__} where the fields of {name!r:.200} belong")
        shape = self._shapes.get(name) or self._known_classes.shapes.get(self._find_class(name))
        if shape is None:
            if self._as_plain:
                return _PlainFields(fields)
            raise ValueError(f"fields of {name!r:.200}, which has none")
        if problem := shape.problem(fields):
            raise DecodeError(f"the payload was written for another {name}: {problem}")
        return shape.build(fields)


class _PlainFields(dict[str, Any]):
    """The fields of an instance that may have been a key of a dict."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def _member_encoder(name: str) -> Any:
    def content(member: Any) -> list[Any]:
        value = member._value_
        if type(value) in SCALARS and value == value:  # NaN finds no member
            return [name, value]
        return [name, None, member._name_]

    return content


def _object_encoder(shape: Shape) -> Any:
    name = stored_name(shape.cls)

    def content(instance: Any) -> list[Any]:
        fields = shape.read(instance)
        if problem := shape.problem(fields):
            raise TypeError(f"this {shape.cls.__qualname__} can't be stored: {problem}")
        return [name, fields]

    return content


#: By class: the name in payloads, `encode(value)`, which returns a storable value, and `decode(stored)`.
ConverterMap = Mapping[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]]

# These are packed without calling a converter.
_NATIVE_TYPES: Final = SCALARS | {bytearray, memoryview, list, dict, np.ndarray, np.memmap}


@dataclass(frozen=True, slots=True)
class _Converter:
    cls: type
    name: str
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]

    def take_apart(self, value: Any) -> list[Any]:
        """Return the content for a value. TypeError when the user's function fails, or returns the value itself."""
        try:
            encoded = self.encode(value)
        except Exception as error:
            raise TypeError(f"{self} raised {_error_text(error)}") from error
        if type(encoded) is self.cls:
            raise TypeError(f"{self} returned a {self.cls.__qualname__} again: it has to return what can be stored")
        return [self.name, encoded]

    def build(self, encoded: Any) -> Any:
        """Return the value. Raises DecodeError when the user's function fails."""
        try:
            return self.decode(encoded)
        except Exception as error:
            raise DecodeError(f"a value can't be rebuilt: {self} raised {_error_text(error)}") from error

    def __str__(self) -> str:
        return f"the converter {self.name!r} of {name_of(self.cls)}"


class Converters:
    """Encodes and decodes values that have converters, by their exact class.

    Raises ConfigError for an invalid entry. With `as_plain`, values of unknown converters are read as stored.
    """

    def __init__(self, converters: ConverterMap, *, as_plain: bool = False) -> None:
        self._by_class = {cls: _check_converter(cls, entry) for cls, entry in converters.items()}
        self._by_name: dict[str, _Converter] = {}
        for other in self._by_class.values():
            if (first := self._by_name.setdefault(other.name, other)) is not other:
                raise ConfigError(
                    f"converters: {name_of(first.cls)} and {name_of(other.cls)} have the same name {other.name!r}, by "
                    "which payloads call them"
                )
        self._as_plain = as_plain
        self.encoders: dict[type, Encoder] = {
            cls: (type_tag(CONVERTED), converter.take_apart) for cls, converter in self._by_class.items()
        }
        self.decoders: Decoders = {CONVERTED: self._restore}

    def _restore(self, content: Any) -> Any:
        name, encoded = content
        converter = self._by_name.get(name)
        if converter is not None:
            return converter.build(encoded)
        if self._as_plain:
            return encoded
        raise DecodeError(
            f"the payload holds a value of the converter {name!r:.220}, which the buffer's config doesn't name: add "
            f"converters={{ITS_CLASS: ({name!r:.220}, encode, decode)}}"
        )


def _check_converter(cls: Any, entry: Any) -> _Converter:
    """Return the converter of an entry of the config. Raises ConfigError."""
    if not isinstance(cls, type) or cls in _NATIVE_TYPES:
        raise ConfigError(f"converters: {cls!r:.100} is no class, or one whose values are stored as they are")
    if isinstance(entry, (tuple, list)) and len(entry) == 3:
        name, encode, decode = entry
        if isinstance(name, str) and name and callable(encode) and callable(decode):
            return _Converter(cls, name, encode, decode)
    raise ConfigError(
        f"converters: {name_of(cls)} needs (name, encode, decode), a text and two functions, not {entry!r:.100}"
    )


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:500]}"
