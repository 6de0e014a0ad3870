"""Rollouts of any type: how their fields are read and written, and how they are stored and rebuilt.

Users bring `RolloutState`, their own pydantic model, a dataclass, or plain `dict`. The rest of replaybuf goes through
`get_field`, `set_field`, `has_field` and `RolloutType`, and never asks which type it has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any

from pydantic import BaseModel, ValidationError

from replaybuf.errors import ConfigError, DecodeError, RolloutError
from replaybuf.rollouts.fields import (
    Defaults,
    Field,
    Fields,
    dataclass_fields,
    enums_in,
    private_defaults,
    pydantic_fields,
)

_SEEN_LIMIT = 1024  # extra fields could make any number of sets of names


def get_field(rollout: Any, name: str, default: Any = None) -> Any:
    """Return the rollout's field `name`, or `default` where it has no such field."""
    if isinstance(rollout, dict):
        return rollout.get(name, default)
    return getattr(rollout, name, default)


def has_field(rollout: Any, name: str) -> bool:
    """Return whether the rollout has a field `name` (which may hold None)."""
    return name in rollout if isinstance(rollout, dict) else hasattr(rollout, name)


def set_field(rollout: Any, name: str, value: Any) -> None:
    """Set the rollout's field `name`, in place; the class's own `__setattr__` and validators run.

    A frozen dataclass or model is changed too: put normalises rollouts in place, and frozen ones are no exception.
    RolloutError when the class refuses the name or the value.
    """
    if isinstance(rollout, dict):
        rollout[name] = value
        return
    try:
        setattr(rollout, name, value)
    except (AttributeError, TypeError, ValueError) as error:
        if not _is_frozen(error):
            raise RolloutError(f"can't set {name!r} of a {type(rollout).__qualname__}: {error}") from error
        object.__setattr__(rollout, name, value)


def _is_frozen(error: Exception) -> bool:
    if isinstance(error, ValidationError):
        return error.errors()[0]["type"] in ("frozen_instance", "frozen_field")
    return isinstance(error, dataclasses.FrozenInstanceError)


class RolloutType:
    """A class of rollouts, with the conversion between its instances and the stored fields.

    `cls` is `dict`, a pydantic model or a dataclass (ConfigError otherwise). The round trip `from_fields(to_fields(r))`
    gives an equal rollout that shares no mutable default with another. It runs no validator, no `__init__` and no
    `__post_init__`: the rollout is exactly what was stored. Attributes that aren't fields are not stored; private
    attributes of pydantic models start from their defaults.
    """

    def __init__(self, cls: type[Any]) -> None:
        self.cls = cls
        self._fields: tuple[Field, ...] = ()
        self._private: Defaults | None = None
        self._open = False  # accepts undeclared fields
        self._read: Callable[[Any], Fields]
        self._build: Callable[[Fields], Any]
        if cls is dict:
            self._open, self._read, self._build = True, dict, _as_is
        elif isinstance(cls, type) and issubclass(cls, BaseModel):
            self._fields = tuple(pydantic_fields(cls.model_fields))
            self._open = cls.model_config.get("extra") == "allow"
            self._private = private_defaults(cls)
            self._read, self._build = self._read_model, self._build_model
        elif isinstance(cls, type) and dataclasses.is_dataclass(cls):
            self._fields = tuple(dataclass_fields(cls))
            self._read, self._build = self._read_dataclass, self._build_dataclass
        else:
            raise ConfigError(f"rollout_type must be dict, a pydantic model or a dataclass, not {cls!r}")
        self.names = frozenset(field.name for field in self._fields)
        self._required = frozenset(field.name for field in self._fields if not field.optional)
        # None is left out of payloads where the default restores it.
        self._keep_none = frozenset(f.name for f in self._fields if not (f.has_default and _default_is_none(f)))
        self._defaults = Defaults(self._fields)
        self._slots = any("__slots__" in vars(base) and base.__slots__ for base in getattr(cls, "__mro__", ()))
        self._seen: set[tuple[str, ...]] = set()

    def __repr__(self) -> str:
        return f"RolloutType({self.cls.__qualname__})"

    def to_fields(self, rollout: Any) -> Fields:
        """Return the fields of a rollout by name: a new dict of the values themselves, not of copies.

        Fields that hold None and default to it are left out, which keeps payloads small. Extra fields of a pydantic
        model that allows them are kept. RolloutError when the rollout is not exactly of this class (fields that a
        subclass adds would be lost) or lacks a required field.
        """
        self._check_class(rollout)
        fields = self._read(rollout)
        if not self._known(fields) and (problem := self._problem(fields)):
            raise RolloutError(f"this {self.cls.__qualname__} can't be stored: {problem}")
        return fields

    def from_fields(self, fields: Fields) -> Any:
        """Return the rollout with these fields, defaults filled in, built without validation; `fields` is consumed.

        DecodeError, naming the fields, when the class lacks one of them or a required one is missing: that is how a
        payload of another rollout type is noticed.
        """
        if not self._known(fields) and (problem := self._problem(fields)):
            raise DecodeError(
                f"the payload was written for another rollout type than {self.cls.__qualname__}: {problem}"
            )
        return self._build(fields)

    def require_all(self, rollout: Any, features: Iterable[tuple[str, Sequence[str]]]) -> None:
        """Call `require` for several features, each with the names of the fields that it needs."""
        self._check_class(rollout)
        for feature, names in features:
            if not self.names.issuperset(names):
                self.require(rollout, names, feature)

    def require(self, rollout: Any, names: Iterable[str], feature: str) -> None:
        """Raise RolloutError, naming the missing fields and the `feature` that needs them, unless all are there."""
        self._check_class(rollout)
        missing = [name for name in names if name not in self.names and not has_field(rollout, name)]
        if missing:
            raise RolloutError(f"{feature} needs {_quoted(missing)}, which this {self.cls.__qualname__} doesn't have")

    def enums(self) -> frozenset[type[Enum]]:
        """Return the enum classes in the annotations, also inside unions, lists, dicts and the like."""
        found: set[type[Enum]] = set()
        for field in self._fields:
            found.update(enums_in(field.annotation))
        return frozenset(found)

    def _check_class(self, rollout: Any) -> None:
        if type(rollout) is self.cls:
            return
        got, expected = type(rollout).__qualname__, self.cls.__qualname__
        why = ""
        if isinstance(rollout, self.cls):
            why = " (a subclass may have fields that would be lost; name it as rollout_type to store it)"
        raise RolloutError(f"this buffer holds rollouts of exactly {expected}, not {got}{why}")

    def _known(self, fields: Fields) -> bool:
        """Return whether exactly these names, in this order, were found valid before; a dict may have any."""
        return self.cls is dict or tuple(fields) in self._seen

    def _problem(self, fields: Fields) -> str:
        """Return what is wrong with these names, or ""; valid names are remembered."""
        unknown = [name for name in fields if not self._accepts(name)]
        missing = sorted(self._required - fields.keys())
        if not unknown and not missing:
            if len(self._seen) >= _SEEN_LIMIT:
                self._seen.clear()
            self._seen.add(tuple(fields))
        problems = [f"it has no {_quoted(unknown)}"] if unknown else []
        return " and ".join(problems + ([f"{_quoted(missing)} must be there"] if missing else []))

    def _accepts(self, name: Any) -> bool:
        return name in self.names or (self._open and isinstance(name, str))

    def _read_model(self, rollout: Any) -> Fields:
        names, keep_none = self.names, self._keep_none  # __dict__ also holds cached properties, which aren't fields
        values = rollout.__dict__.items()
        fields = {name: v for name, v in values if (name in keep_none if v is None else name in names)}
        if extra := rollout.__pydantic_extra__:
            fields.update(extra)
        return fields

    def _build_model(self, fields: Fields) -> Any:
        extra: Fields | None = None
        names = set(fields)
        if self._open:
            extra = {name: fields.pop(name) for name in names - self.names}
        rollout = _new(self.cls)
        put = object.__setattr__
        values = self._defaults.fill(fields)
        put(rollout, "__dict__", values)
        put(rollout, "__pydantic_fields_set__", names)
        put(rollout, "__pydantic_extra__", extra)
        put(rollout, "__pydantic_private__", self._private.fill({}, values) if self._private else None)
        return rollout

    def _read_dataclass(self, rollout: Any) -> Fields:
        fields: Fields = {}
        for name in (field.name for field in self._fields):
            value = getattr(rollout, name, dataclasses.MISSING)  # an init=False field may never have been set
            if value is None and name not in self._keep_none:
                continue
            if value is not dataclasses.MISSING:
                fields[name] = value
        return fields

    def _build_dataclass(self, fields: Fields) -> Any:
        rollout = _new(self.cls)
        values = self._defaults.fill(fields)
        if not self._slots:
            rollout.__dict__.update(values)
            return rollout
        for name, value in values.items():
            object.__setattr__(rollout, name, value)
        return rollout


def _new(cls: Any) -> Any:
    return cls.__new__(cls)


def _as_is(fields: Fields) -> Fields:
    return fields


def _default_is_none(field: Field) -> bool:
    return field.make is None and field.default is None


def _quoted(names: Iterable[Any]) -> str:
    names = [repr(name) for name in names]
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return f"{'field' if len(names) == 1 else 'fields'} {shown}"
