"""Values of users' classes in payloads, by the converters of the config: their name, and what they made of the value.

A payload says which converter it needs by the name that the config gave it. Reading calls the functions of the reader's
own config, and no others.
"""

from __future__ import annotations

import builtins
import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgpack  # type: ignore[import-untyped]

from replaybuf.codec.foreign import wrapped
from replaybuf.codec.marks import CONVERTED, Form, Restore, mark
from replaybuf.errors import ConfigError, DecodeError

#: By class: the name that stands in payloads, `encode(value)`, which returns what can be stored, and `decode(stored)`.
ConverterMap = Mapping[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]]

# msgpack packs these itself, without calling a converter.
_NATIVE: Final = frozenset(
    {type(None), bool, int, float, str, bytes, bytearray, memoryview, list, dict, msgpack.ExtType, msgpack.Timestamp}
)
_LONGEST_NAME = 200


@dataclass(frozen=True, slots=True)
class _Converter:
    cls: type
    name: str
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]

    def take_apart(self, value: Any) -> list[Any]:
        """Return the content for a value. TypeError when the user's function fails, or gives the value back."""
        try:
            encoded = self.encode(value)
        except Exception as error:
            raise TypeError(f"{self} raised {_described(error)}") from error
        if type(encoded) is self.cls:
            raise TypeError(f"{self} returned a {self.cls.__qualname__} again: it has to return what can be stored")
        return [self.name, wrapped(encoded)]

    def build(self, encoded: Any) -> Any:
        """Return the value. Raises DecodeError when the user's function fails."""
        try:
            return self.decode(encoded)
        except Exception as error:
            raise DecodeError(f"a value can't be rebuilt: {self} raised {_described(error)}") from error

    def __str__(self) -> str:
        return f"the converter {self.name!r} of {name_of(self.cls)}"


@dataclass(frozen=True, slots=True)
class _StoredValue:
    """A value as its payload has it, for copies of payloads: written as it was read."""

    name: str
    encoded: Any


class Converters:
    """The family of values that have converters, by their exact class.

    ConfigError for what is no converter. With `as_plain` values of unknown converters are read as what is stored.
    """

    _keeps_unknown = False

    def __init__(self, converters: ConverterMap, *, as_plain: bool = False) -> None:
        self._by_class = {cls: _checked(cls, entry) for cls, entry in converters.items()}
        self._by_name: dict[str, _Converter] = {}
        for one in self._by_class.values():
            if (other := self._by_name.setdefault(one.name, one)) is not one:
                raise ConfigError(
                    f"converters: {name_of(other.cls)} and {name_of(one.cls)} have the same name {one.name!r}, by "
                    "which payloads call them"
                )
        self._as_plain = as_plain
        self.forms: dict[type, Form] = {cls: (mark(CONVERTED), one.take_apart) for cls, one in self._by_class.items()}
        self.restores: Mapping[int, Restore] = {CONVERTED: self._restore}

    def as_stored(self) -> Converters:
        """Return converters for copies of payloads: what can't be rebuilt is kept, and written as it was read."""
        other = copy.copy(self)
        other._keeps_unknown = True
        other.forms = self.forms | {
            _StoredValue: (mark(CONVERTED), lambda stored: [stored.name, wrapped(stored.encoded)])
        }
        other.restores = {CONVERTED: other._restore}
        return other

    def form(self, kind: type) -> Form | None:
        return self.forms.get(kind)

    def parts(self, value: Any) -> Iterator[tuple[str, Any]]:
        """Yield what the value's converter makes of it, unless it fails."""
        if (one := self._by_class.get(type(value))) is not None:
            with contextlib.suppress(TypeError):
                _, encoded = one.take_apart(value)
                yield f" ({name_of(one.cls)}, as stored by its converter {one.name!r})", encoded

    def advice(self, kind: type) -> str:
        """Return the line of config with which a value of this class could be stored, or else other advice."""
        if kind is type or (kind.__module__ == "builtins" and not hasattr(builtins, kind.__qualname__)):
            return "leave it out of the rollout"  # functions, generators, modules: their classes have no names in code
        name = kind.__qualname__
        line = f'converters={{{name}: ("{name}", encode, decode)}}'
        base = next((base for base in kind.__mro__ if base in self._by_class), None)
        if base is None:
            return f"add {line} to the config"
        return (
            f"the converter {self._by_class[base].name!r} is for exactly {base.__qualname__}; add {line} to the config"
        )

    def _restore(self, content: Any) -> Any:
        name, encoded = content
        one = self._by_name.get(name)
        if one is not None:
            try:
                return one.build(encoded)
            except DecodeError:
                if not self._keeps_unknown:
                    raise
        if self._keeps_unknown and type(name) is str:
            return _StoredValue(name, encoded)
        if self._as_plain:
            return encoded
        raise DecodeError(
            f"the payload holds a value of the converter {name!r:.220}, which the buffer's config doesn't name: add "
            f"converters={{ITS_CLASS: ({name!r:.220}, encode, decode)}}"
        )


def name_of(kind: type) -> str:
    """Return the name of a class for messages: with its module, unless that is builtins."""
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


def _checked(cls: Any, entry: Any) -> _Converter:
    """Return the converter of an entry of the config. Raises ConfigError."""
    if not isinstance(cls, type):
        raise ConfigError(f"converters: {cls!r:.100} is no class")
    if cls in _NATIVE:
        raise ConfigError(f"converters: {name_of(cls)} is stored as it is; a converter would not be asked")
    if not isinstance(entry, (tuple, list)) or len(entry) != 3:
        raise ConfigError(f"converters: {name_of(cls)} needs (name, encode, decode), not {entry!r:.100}")
    name, encode, decode = entry
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME:
        raise ConfigError(f"converters: the name of {name_of(cls)} must be a text, not {name!r:.100}")
    if not callable(encode) or not callable(decode):
        raise ConfigError(f"converters: encode and decode of {name_of(cls)} must be functions")
    return _Converter(cls, name, encode, decode)


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:500]}"
