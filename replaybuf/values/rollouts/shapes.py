"""Shapes: conversion between instances of a class and their fields, for each kind of class.

The round trip `build(read(instance))` gives an equal instance that shares no mutable default with another. It runs no
validator, no `__init__` and no `__post_init__`, so that values are restored as stored. Attributes that aren't fields
are not stored; private attributes of pydantic models get their defaults. Classes of other kinds need a converter.
"""

from __future__ import annotations

import copy
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import cached_property, partial
from typing import Any

import typing_extensions
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from replaybuf.values.rollouts.annotations import hints_of

Fields = dict[str, Any]
Names = set[str]

_ATOMS = (type(None), bool, int, float, complex, str, bytes, Enum)  # defaults that can be shared, not copied


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """One field of a class.

    `make()` returns a new default; if it is None, `default` is shared. An `optional` field may be absent, and stays
    unset without a default.
    """

    name: str
    annotation: Any
    optional: bool
    has_default: bool = False
    default: Any = None
    make: Callable[[], Any] | None = None


class Defaults:
    """Fills in the missing fields."""

    def __init__(self, fields: Iterable[Field]) -> None:
        fields = tuple(fields)
        # Includes required fields, so that the result is in the order of declaration.
        self.template = {field.name: field.default for field in fields if field.has_default or not field.optional}
        self._makers = tuple((field.name, field.make) for field in fields if field.make is not None)
        #: The fields whose default is made anew for each instance.
        self.made = frozenset(name for name, _ in self._makers)

    def fill(self, given: Fields) -> Fields:
        """Return a new dict of all fields."""
        values = {**self.template, **given}
        if self.made.issubset(given):
            return values
        for name, make in self._makers:
            if name not in given:
                values[name] = make()
        return values


def pydantic_fields(infos: Mapping[str, FieldInfo]) -> Iterator[Field]:
    """Yield the fields of a pydantic model or dataclass, from its `model_fields`.

    One whose default depends on other fields (since pydantic 2.10) has to be there.
    """
    for name, info in infos.items():
        if info.is_required() or getattr(info, "default_factory_takes_validated_data", False):
            yield Field(name, info.annotation, optional=info.init is False)
        else:
            yield _with_default(name, info.annotation, info.default, info.default_factory)


def dataclass_fields(cls: type[Any]) -> Iterator[Field]:
    """Yield the fields of a dataclass; those with init=False and no default are optional."""
    hints = hints_of(cls)
    for field in dataclasses.fields(cls):
        if isinstance(field.default, FieldInfo):  # of a pydantic dataclass
            yield from pydantic_fields({field.name: field.default})
            continue
        annotation = hints.get(field.name, field.type)
        if field.default is not dataclasses.MISSING:
            yield _with_default(field.name, annotation, field.default, None)
        elif field.default_factory is not dataclasses.MISSING:
            yield _with_default(field.name, annotation, None, field.default_factory)
        else:
            yield Field(field.name, annotation, optional=not field.init)


def _with_default(name: str, annotation: Any, default: Any, factory: Callable[..., Any] | None) -> Field:
    make = factory
    if factory is None and not isinstance(default, _ATOMS):
        make = partial(copy.deepcopy, default)
    return Field(name, annotation, optional=True, has_default=True, default=default, make=make)


#: The attribute of a model's `__setattr__` with the fields for which it does more than pydantic's.
SETS_MORE = "__sets_more__"

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

    @abstractmethod
    def read(self, instance: Any) -> Fields:
        """Return the fields of an instance as a new dict; values aren't copied."""

    def rows(self, instances: Sequence[Any]) -> list[Fields]:
        """Return the fields of instances, which aren't to be changed; those that are None may be left out or not."""
        return [*map(self.read, instances)]

    @abstractmethod
    def build(self, fields: Fields) -> Any:
        """Build an instance from fields without a `problem`, with defaults filled in; `fields` is consumed."""

    def build_all(self, columns: Mapping[str, Sequence[Any]]) -> list[Any]:
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

    def problem(self, fields: Mapping[str, Any]) -> str:
        """Describe unknown and missing fields; "" if there are none."""
        if self.required.issubset(fields) and self.names.issuperset(fields):
            return ""
        unknown = [name for name in fields if not (name in self.names or (self.extra and isinstance(name, str)))]
        missing = sorted(self.required - fields.keys())
        problems = [f"it has no {quoted(unknown)}"] if unknown else []
        return " and ".join(problems + ([f"{quoted(missing)} must be there"] if missing else []))


class _DictShape(Shape):
    """A dict with any keys; those of a TypedDict are declared, which nothing checks."""

    def read(self, instance: Any) -> Fields:
        return dict(instance)

    def rows(self, instances: Sequence[Any]) -> list[Fields]:
        return [*instances]

    def build(self, fields: Fields) -> Any:
        return fields

    def set(self, instance: Any, name: str, value: Any) -> None:
        instance[name] = value

    def problem(self, fields: Mapping[str, Any]) -> str:
        return "" if _ONLY_STR.issuperset(map(type, fields)) else "the names of its fields must be texts"


# How the slots of a model are set without its `__setattr__`: in half the time of `object.__setattr__`.
_set_values, _set_names, _set_extra, _set_private = (
    vars(BaseModel)[name].__set__
    for name in ("__dict__", "__pydantic_fields_set__", "__pydantic_extra__", "__pydantic_private__")
)


class _ModelShape(Shape):
    """A pydantic model."""

    cls: Any

    def __init__(self, cls: type[BaseModel]) -> None:
        if not cls.__pydantic_complete__:
            cls.model_rebuild(raise_errors=False)
        super().__init__(cls, pydantic_fields(cls.model_fields), extra=cls.model_config.get("extra") == "allow")
        private = cls.__private_attributes__.items()
        self._has_private = bool(private)
        self._private_makers: list[tuple[str, Any]] = [
            (name, attribute.default_factory or partial(copy.deepcopy, attribute.default))
            for name, attribute in private
            if attribute.default_factory is not None or attribute.default is not PydanticUndefined
        ]
        self.runs_code = bool(cls.model_config.get("validate_assignment"))
        self._caches = any(isinstance(value, cached_property) for base in cls.__mro__ for value in vars(base).values())
        self._set_directly = self._plainly_set()

    def _plainly_set(self) -> frozenset[str]:
        """Return the fields whose assignment by pydantic's `__setattr__` only sets the value."""
        config, sets = self.cls.model_config, self.cls.__setattr__
        plain = sets is BaseModel.__setattr__ or hasattr(sets, SETS_MORE)
        if not plain or config.get("validate_assignment") or config.get("frozen"):
            return frozenset()
        fields = self.cls.model_fields
        return frozenset(name for name in self.names if not fields[name].frozen) - getattr(sets, SETS_MORE, frozenset())

    def set_directly(self, instances: Sequence[Any], name: str, values: Sequence[Any]) -> bool:
        if name not in self._set_directly:
            return False
        for instance, value in zip(instances, values):
            instance.__dict__[name] = value
            instance.__pydantic_fields_set__.add(name)
        return True

    def read(self, instance: Any) -> Fields:
        keep_none, values = self._keep_none, instance.__dict__.items()
        fields = {name: value for name, value in values if value is not None or name in keep_none}
        if self._caches:  # values of cached properties are in `__dict__`, too
            fields = {name: value for name, value in fields.items() if name in self.names}
        if extra := instance.__pydantic_extra__:
            fields.update(extra)
        return fields

    def rows(self, instances: Sequence[Any]) -> list[Fields]:
        if self._caches or self.extra:
            return [*map(self.read, instances)]
        return [instance.__dict__ for instance in instances]

    def build(self, fields: Fields) -> Any:
        names, extra = {*fields}, None
        if self.extra:
            extra = {name: fields.pop(name) for name in names - self.names}
        return self._make_instance(self._defaults.fill(fields), names, extra)

    def build_all(self, columns: Mapping[str, Sequence[Any]]) -> list[Any]:
        if self.extra or not self._defaults.made.issubset(columns):
            return super().build_all(columns)
        template, names = self._defaults.template, {*columns}
        filled = [template.copy() for _ in next(iter(columns.values()))]
        for name, column in columns.items():  # half the time of a dict for each row
            for values, value in zip(filled, column):
                values[name] = value
        return [self._make_instance(values, names.copy(), None) for values in filled]

    def _make_instance(self, values: Fields, names: Names, extra: Fields | None) -> Any:
        """Return an instance with all fields, of which `names` were set."""
        instance = self.cls.__new__(self.cls)
        _set_values(instance, values)
        _set_names(instance, names)
        _set_extra(instance, extra)
        _set_private(instance, {name: make() for name, make in self._private_makers} if self._has_private else None)
        return instance


class _DataclassShape(Shape):
    """A dataclass: its fields are attributes, possibly unset."""

    def __init__(self, cls: type[Any]) -> None:
        super().__init__(cls, dataclass_fields(cls))
        # Slots and other descriptors aren't set through `__dict__`.
        self._sets_each = any(vars(base).get("__slots__") for base in cls.__mro__) or any(
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
        return fields

    def build(self, fields: Fields) -> Any:
        instance: Any = object.__new__(self.cls)
        values = self._defaults.fill(fields)
        if not self._sets_each:
            instance.__dict__.update(values)
            return instance
        for name, value in values.items():
            object.__setattr__(instance, name, value)
        return instance


class _TupleShape(Shape):
    """A named tuple."""

    cls: Any

    def __init__(self, cls: Any) -> None:
        hints, defaults = hints_of(cls), cls._field_defaults
        super().__init__(
            cls,
            [
                Field(name, hints.get(name, Any), name in defaults, name in defaults, defaults.get(name))
                for name in cls._fields
            ],
        )

    def read(self, instance: Any) -> Fields:
        return dict(zip(self.cls._fields, instance, strict=True))

    def build(self, fields: Fields) -> Any:
        return tuple.__new__(self.cls, self._defaults.fill(fields).values())


def shape_of(cls: Any) -> Shape | None:
    """Return the shape of a class; None if its annotations don't declare its content."""
    if not isinstance(cls, type):
        return None
    if cls is dict:
        return _DictShape(cls, (), extra=True)
    if typing_extensions.is_typeddict(cls):
        return _DictShape(cls, (Field(name, hint, optional=True) for name, hint in hints_of(cls).items()))
    if issubclass(cls, BaseModel):
        if cls is BaseModel:
            return None
        return _ModelShape(cls)
    if issubclass(cls, tuple) and kind_of(cls):
        return _TupleShape(cls)
    if issubclass(cls, _VALUES):
        return None
    return _DataclassShape(cls) if kind_of(cls) else None


def kind_of(cls: type[Any]) -> str:
    """Return the kind of a class whose annotations declare its content, or ""."""
    if issubclass(cls, BaseModel):
        return "a pydantic model"
    if issubclass(cls, tuple):
        return "a named tuple" if hasattr(cls, "_fields") and hasattr(cls, "_make") else ""
    # An attrs class may inherit from a dataclass, whose fields aren't all of it, and the other way round.
    return "a dataclass" if dataclasses.is_dataclass(cls) and not hasattr(cls, "__attrs_attrs__") else ""


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
