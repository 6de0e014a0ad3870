"""Instances of classes in payloads: the name of their class, and their fields.

A payload's name is looked up among the classes that the reader's own config knows, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, Final

from replaybuf.codec.marks import ENUM, NAMEDTUPLE, OBJECT, Form, Restore, mark
from replaybuf.errors import DecodeError
from replaybuf.rollouts.classes import Classes, is_storable, name_of, stored_name
from replaybuf.rollouts.rollout import Status
from replaybuf.rollouts.shapes import Shape, is_namedtuple, kind_of

#: Part of the format: the name of this class in payloads, wherever its module is.
_STATUS: Final = "replaybuf.rollout.Status"

_MANY: Final = 1000

# Members with other values, tuples of these aside, are stored by their names.
_VALUES: Final = frozenset({type(None), bool, int, float, str, bytes})


class Instances:
    """The family of instances of known classes.

    Those of others are refused, in both directions; with `as_plain`, reading gives enums' values, tuples for named
    tuples, and dicts of fields for the rest.
    """

    def __init__(self, known: Classes, *, as_plain: bool = False) -> None:
        self._known = known
        self._shapes = {stored_name(cls): shape for cls, shape in known.shapes.items()}
        self._members: dict[tuple[Any, ...], Enum] = {}  # that were read before
        self._as_plain = as_plain
        self.restores: Mapping[int, Restore] = {
            ENUM: self._restore_member,
            OBJECT: self._restore_object,
            NAMEDTUPLE: self._restore_tuple,
        }

    def form(self, kind: type) -> Form | None:
        if kind in self._known:
            if issubclass(kind, Enum):
                return mark(ENUM), _member_form(_STATUS if kind is Status else stored_name(kind))
            if is_namedtuple(kind):
                name = stored_name(kind)
                return mark(NAMEDTUPLE), lambda value: [name, list(value)]
            return mark(OBJECT), _object_form(self._known.shapes[kind])
        what = "an enum" if issubclass(kind, Enum) else "a named tuple" if is_namedtuple(kind) else kind_of(kind)
        if what and is_storable(kind):
            raise TypeError(
                f"a value of type {name_of(kind)} ({what}) can't be stored: add types=[{kind.__qualname__}] to the "
                "config, or declare its class in the annotations of the rollout_type"
            )
        return None

    def parts(self, value: Any) -> Iterator[tuple[str, Any]]:
        """Yield the fields of an instance that holds some."""
        shape = self._known.shapes.get(type(value))
        fields = {} if shape is None else shape.read(value)
        if is_namedtuple(type(value)):
            fields = value._asdict()
        for name, item in fields.items():
            yield f".{name}", item

    def _find(self, name: Any) -> Any:
        cls = Status if name == _STATUS else self._known.find(name)
        if cls is None and not self._as_plain:
            shown, short = str(name).replace(":", "."), str(name).rpartition(":" if ":" in str(name) else ".")[2]
            raise DecodeError(
                f"the payload holds a {shown:.200}, a class that this config doesn't know: add types=[{short:.100}] to "
                "it, or use the rollout_type that declares the class"
            )
        return cls

    def _restore_member(self, content: Any) -> Any:
        if len(content) == 2 and type(content[1]) is str and (member := self._members.get(tuple(content))) is not None:
            return member
        name, value, *names = content
        cls = self._find(name)
        if cls is None:
            return names[0] if names else value
        if not issubclass(cls, Enum):
            raise ValueError(f"a member of {name!r:.200}, which is no enum")
        member = cls[names[0]] if names else cls(value)
        if type(value) is str and member._value_ == value and len(self._members) < _MANY:
            self._members[name, value] = member
        return member

    def _restore_object(self, content: Any) -> Any:
        name, fields = content
        if type(fields) is not dict:
            raise ValueError(f"a {type(fields).__name__} where the fields of {name!r:.200} belong")
        shape = self._shapes.get(name) or self._known.shapes.get(self._find(name))
        if shape is None:
            if self._as_plain:
                return _PlainFields(fields)
            raise ValueError(f"fields of {name!r:.200}, which has none")
        if problem := shape.problem(fields):
            raise DecodeError(f"the payload was written for another {name}: {problem}")
        return shape.build(fields)

    def _restore_tuple(self, content: Any) -> Any:
        name, values = content
        if type(values) is not list:
            raise ValueError(f"a {type(values).__name__} where the values of {name!r:.200} belong")
        cls = self._find(name)
        if cls is None:
            return tuple(values)
        if not is_namedtuple(cls):
            raise ValueError(f"values of {name!r:.200}, which is no named tuple")
        missing = cls._fields[len(values) :]
        if len(values) > len(cls._fields) or not cls._field_defaults.keys() >= set(missing):
            raise DecodeError(f"the payload was written for another {name}: this one has {len(cls._fields)} fields")
        return tuple.__new__(cls, (*values, *map(cls._field_defaults.get, missing)))


class _PlainFields(dict[str, Any]):
    """The fields of an instance, which may have been a key of a dict."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def _member_form(name: str) -> Any:
    def content(member: Any) -> list[Any]:
        value = member._value_
        if type(value) is str:  # nearly all are
            return [name, value]
        if _finds_member(value) or (type(value) is tuple and all(map(_finds_member, value))):
            return [name, value]
        return [name, None, member._name_]

    return content


def _finds_member(value: Any) -> bool:
    return type(value) in _VALUES and value == value  # nothing is found by NaN


def _object_form(shape: Shape) -> Any:
    name = stored_name(shape.cls)

    def content(instance: Any) -> list[Any]:
        fields = shape.read(instance)
        if problem := shape.problem(fields):
            raise TypeError(f"this {shape.cls.__qualname__} can't be stored: {problem}")
        return [name, fields]

    return content
