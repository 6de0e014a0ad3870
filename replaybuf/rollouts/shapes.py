"""Shapes: conversion between instances of a class and their fields, for each kind of class.

The round trip `build(read(instance))` gives an equal instance that shares no mutable default with another. It runs no
validator, no `__init__` and no `__post_init__`, so that values are restored as stored. Attributes that aren't fields
are not stored; private attributes of pydantic models get their defaults. Classes of other kinds need a converter.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import repeat
from typing import Any

import typing_extensions
from pydantic import BaseModel, ValidationError

from replaybuf.rollouts.fields import (
    Defaults,
    Field,
    Fields,
    dataclass_fields,
    private_defaults,
    pydantic_fields,
    typed_dict_fields,
)

#: The attribute of a model's `__setattr__` with the fields for which it does more than pydantic's.
SETS_MORE = "__sets_more__"
_PARTS = ("__dict__", "__pydantic_fields_set__", "__pydantic_extra__", "__pydantic_private__")
_SEEN_LIMIT = 1024  # extra fields allow any number of name sets

_ONLY_STR = frozenset({str})
# Subclasses of these have content besides their fields.
_VALUES = (dict, list, tuple, set, frozenset, str, bytes, bytearray, int, float, complex, BaseException)


class Shape(ABC):
    """The fields of a class, and the conversion of instances to fields and back.

    With `extra`, instances may have undeclared fields. `required` are the mandatory fields. With `runs_code`, `build`
    or `set` runs code of the class, which may change values in place.
    """

    runs_code = False

    def __init__(self, cls: type[Any], fields: Iterable[Field], *, extra: bool = False) -> None:
        self.cls = cls
        self.fields = tuple(fields)
        self.extra = extra
        self.names = frozenset(field.name for field in self.fields)
        self.required = frozenset(field.name for field in self.fields if not field.optional)
        # None is left out of payloads if it is the default.
        self._keep_none = frozenset(f.name for f in self.fields if not (f.has_default and _default_is_none(f)))
        #: The fields that are left out of payloads when they are None.
        self.omitted = self.names - self._keep_none
        self._defaults = Defaults(self.fields)
        self._seen: set[tuple[str, ...]] = set()

    @abstractmethod
    def read(self, instance: Any) -> Fields:
        """Return the fields of an instance as a new dict; values aren't copied."""

    def rows(self, instances: Sequence[Any]) -> list[Fields]:
        """Return the fields of instances, which aren't to be changed; those that are None may be left out or not."""
        return [*map(self.read, instances)]

    @abstractmethod
    def build(self, fields: Fields) -> Any:
        """Build an instance from fields without a `problem`, with defaults filled in; `fields` is consumed."""

    def build_all(self, columns: Mapping[str, Sequence[Any]], rows: int) -> list[Any]:
        """Build instances from the values of each field, which are without a `problem`."""
        return [self.build(dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]

    def set(self, instance: Any, name: str, value: Any) -> None:
        """Set a field, in place; the class's own `__setattr__` and validators run. Works on frozen instances, too.

        Errors of the class, for a refused name or value, aren't translated.
        """
        try:
            setattr(instance, name, value)
        except (AttributeError, ValidationError) as error:
            if not _is_frozen(error):
                raise
            object.__setattr__(instance, name, value)

    def set_directly(self, instances: Sequence[Any], name: str, values: Sequence[Any]) -> bool:
        """Set a field of instances and return True, if that runs no code of their class."""
        return False

    def problem(self, fields: Fields) -> str:
        """Describe unknown and missing fields; "" if there are none."""
        # Cache of valid tuples of names.
        if (names := tuple(fields)) in self._seen:
            return ""
        unknown = [name for name in fields if not (name in self.names or (self.extra and isinstance(name, str)))]
        missing = sorted(self.required - fields.keys())
        if not unknown and not missing:
            if len(self._seen) >= _SEEN_LIMIT:
                self._seen.clear()
            self._seen.add(names)
        problems = [f"it has no {quoted(unknown)}"] if unknown else []
        return " and ".join(problems + ([f"{quoted(missing)} must be there"] if missing else []))


class _DictShape(Shape):
    """A dict with any keys, or with the keys of a TypedDict."""

    def read(self, instance: Any) -> Fields:
        return dict(instance)

    def rows(self, instances: Sequence[Any]) -> list[Fields]:
        return [*instances]

    def build(self, fields: Fields) -> Any:
        return fields

    def set(self, instance: Any, name: str, value: Any) -> None:
        instance[name] = value

    def problem(self, fields: Fields) -> str:
        if self.cls is not dict:
            return super().problem(fields)
        return "" if _ONLY_STR.issuperset(map(type, fields)) else "the names of its fields must be texts"


class _ModelShape(Shape):
    """A pydantic model."""

    cls: Any

    def __init__(self, cls: type[BaseModel]) -> None:
        if not cls.__pydantic_complete__:
            cls.model_rebuild(raise_errors=False)
        super().__init__(cls, pydantic_fields(cls.model_fields), extra=cls.model_config.get("extra") == "allow")
        self._private = private_defaults(cls)
        self.runs_code = bool(cls.model_config.get("validate_assignment"))
        self._cached = any(isinstance(one, cached_property) for base in cls.__mro__ for one in vars(base).values())
        omitted = tuple(self.omitted)
        self._few_omitted = None if self._cached or 4 * len(omitted) > len(self.names) else omitted
        self._set_directly = self._plainly_set()

    def _plainly_set(self) -> frozenset[str]:
        """Return the fields whose assignment by pydantic's `__setattr__` only sets the value."""
        config, sets = self.cls.model_config, self.cls.__setattr__
        plain = sets is BaseModel.__setattr__ or hasattr(sets, SETS_MORE)
        if not plain or config.get("validate_assignment") or config.get("frozen"):
            return frozenset()
        fields = self.cls.model_fields
        return frozenset(name for name in self.names if not fields[name].frozen) - getattr(sets, SETS_MORE, frozenset())

    def set(self, instance: Any, name: str, value: Any) -> None:
        if name in self._set_directly:
            instance.__dict__[name] = value
            instance.__pydantic_fields_set__.add(name)
        else:
            super().set(instance, name, value)

    def set_directly(self, instances: Sequence[Any], name: str, values: Sequence[Any]) -> bool:
        if name not in self._set_directly:
            return False
        for instance, value in zip(instances, values, strict=True):
            instance.__dict__[name] = value
            instance.__pydantic_fields_set__.add(name)
        return True

    def read(self, instance: Any) -> Fields:
        if self._few_omitted is not None:
            fields: Fields = instance.__dict__.copy()
            for name in self._few_omitted:
                if fields.get(name, self) is None:
                    del fields[name]
        else:
            keep_none, values = self._keep_none, instance.__dict__.items()
            fields = {name: v for name, v in values if v is not None or name in keep_none}
            if self._cached:  # values of cached properties are in `__dict__`, too
                fields = {name: value for name, value in fields.items() if name in self.names}
        if extra := instance.__pydantic_extra__:
            fields.update(extra)
        return fields

    def rows(self, instances: Sequence[Any]) -> list[Fields]:
        if self._cached or self.extra:
            return [*map(self.read, instances)]
        return [instance.__dict__ for instance in instances]

    def build_all(self, columns: Mapping[str, Sequence[Any]], rows: int) -> list[Any]:
        if self.extra or self._private or not columns.keys() >= self._defaults.made:
            return super().build_all(columns, rows)
        template, given = self._defaults.template, {*columns}
        whole = [columns[name] if name in given else [value] * rows for name, value in template.items()]
        values = [dict(zip(template, row, strict=True)) for row in zip(*whole, strict=True)]
        found = [*map(self.cls.__new__, repeat(self.cls, rows))]
        parts: tuple[Iterable[Any], ...] = (values, [given.copy() for _ in values], repeat(None), repeat(None))
        for name, part in zip(_PARTS, parts, strict=True):  # in C: a call a rollout takes a third of a take
            deque(map(object.__setattr__, found, repeat(name), part), 0)
        return found

    def build(self, fields: Fields) -> Any:
        extra: Fields | None = None
        names = set(fields)
        if self.extra:
            extra = {name: fields.pop(name) for name in names - self.names}
        instance = self.cls.__new__(self.cls)
        put = object.__setattr__
        values = self._defaults.fill(fields)
        put(instance, "__dict__", values)
        put(instance, "__pydantic_fields_set__", names)
        put(instance, "__pydantic_extra__", extra)
        put(instance, "__pydantic_private__", self._private.fill({}, values) if self._private else None)
        return instance


class _DataclassShape(Shape):
    """A dataclass: its fields are attributes, possibly unset."""

    def __init__(self, cls: type[Any]) -> None:
        config = getattr(cls, "__pydantic_config__", {})  # extra fields of a pydantic dataclass are attributes
        super().__init__(cls, dataclass_fields(cls), extra=config.get("extra") == "allow")
        # Slots and other descriptors aren't set through `__dict__`.
        self._set_each = any(vars(base).get("__slots__") for base in cls.__mro__) or any(
            hasattr(vars(base).get(name), "__set__") for base in cls.__mro__ for name in self.names
        )

    def read(self, instance: Any) -> Fields:
        fields: Fields = {}
        for field in self.fields:
            value = getattr(instance, field.name, dataclasses.MISSING)
            if value is None and field.name not in self._keep_none:
                continue
            if value is not dataclasses.MISSING:
                fields[field.name] = value
        if self.extra:
            for name, value in getattr(instance, "__dict__", {}).items():
                if name not in self.names and name[:1] != "_" and not hasattr(self.cls, name):
                    fields[name] = value
        return fields

    def build(self, fields: Fields) -> Any:
        instance = _new(self.cls)
        values = self._defaults.fill(fields)
        if not self._set_each:
            instance.__dict__.update(values)
            return instance
        for name, value in values.items():
            object.__setattr__(instance, name, value)
        return instance


def shape_of(cls: Any) -> Shape | None:
    """Return the shape of a class; None if its annotations don't declare its content."""
    if not isinstance(cls, type):
        return None
    if cls is dict:
        return _DictShape(cls, (), extra=True)
    if typing_extensions.is_typeddict(cls):
        return _DictShape(cls, typed_dict_fields(cls), extra=_has_extra_items(cls))
    if issubclass(cls, BaseModel):
        return None if cls is BaseModel else _ModelShape(cls)
    if issubclass(cls, _VALUES):
        return None
    return _DataclassShape(cls) if kind_of(cls) else None


def kind_of(cls: type[Any]) -> str:
    """Return the kind of a class whose annotations declare its content, or ""."""
    if issubclass(cls, BaseModel):
        return "a pydantic model"
    # An attrs class may inherit from a dataclass, whose fields aren't all of it, and the other way round.
    return "a dataclass" if dataclasses.is_dataclass(cls) and not hasattr(cls, "__attrs_attrs__") else ""


def is_namedtuple(cls: Any) -> bool:
    """Return whether this is a named tuple class."""
    return isinstance(cls, type) and issubclass(cls, tuple) and hasattr(cls, "_fields") and hasattr(cls, "_make")


def _has_extra_items(cls: type[Any]) -> bool:
    items = getattr(cls, "__extra_items__", None)
    return items is not None and items is not getattr(typing_extensions, "NoExtraItems", None)


def _new(cls: Any) -> Any:
    try:
        return cls.__new__(cls)
    except TypeError:  # its `__new__` needs arguments
        return object.__new__(cls)


def _is_frozen(error: Exception) -> bool:
    if isinstance(error, ValidationError):
        return error.errors()[0]["type"] in ("frozen_instance", "frozen_field")
    return isinstance(error, dataclasses.FrozenInstanceError)


def _default_is_none(field: Field) -> bool:
    return field.make is None and field.default is None


def quoted(names: Iterable[Any]) -> str:
    """Return the names of fields for a message."""
    names = [repr(name) for name in names]
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return f"{'field' if len(names) == 1 else 'fields'} {shown}"
