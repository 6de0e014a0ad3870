"""Rollouts of any type: how their fields are read and written, and how they are stored and rebuilt.

Users bring `RolloutState`, their own pydantic model, dataclass, attrs class, msgspec Struct or TypedDict, or plain
`dict`. The rest of replaybuf goes through `get_field`, `set_field`, `has_field` and `RolloutType`, and never asks which
type it has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import ValidationError

from replaybuf.errors import ConfigError, DecodeError, RolloutError
from replaybuf.rollouts.classes import Classes, checked
from replaybuf.rollouts.fields import Fields
from replaybuf.rollouts.rollout import Status
from replaybuf.rollouts.shapes import quoted, shape_of


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

    `cls` is `dict`, a TypedDict, a pydantic model, a dataclass, an attrs class or a msgspec Struct (ConfigError
    otherwise); rollouts of a TypedDict are dicts with its keys. What its annotations declare inside can be stored, too:
    these classes, enums and named tuples at any depth. `types` are further ones, for fields that declare Any.
    `replaybuf.rollouts.shapes` says how instances are rebuilt.
    """

    def __init__(self, cls: type[Any], *, types: Iterable[type[Any]] = ()) -> None:
        self.cls = cls
        shape = shape_of(cls)
        if shape is None:
            raise ConfigError(
                "rollout_type must be dict, a TypedDict, a pydantic model, a dataclass, an attrs class or a msgspec "
                f"Struct, not {cls!r:.200}"
            )
        self._shape = shape
        self.classes = Classes(dict.fromkeys([cls, *(checked(one, "types") for one in types), Status]))
        self.names = shape.names
        self._instances = dict if issubclass(cls, dict) else cls

    def __repr__(self) -> str:
        return f"RolloutType({self.cls.__qualname__})"

    def to_fields(self, rollout: Any) -> Fields:
        """Return the fields of a rollout by name: a new dict of the values themselves, not of copies.

        Fields that hold None and default to it are left out, which keeps payloads small. Extra fields of a pydantic
        model that allows them are kept. RolloutError when the rollout is not exactly of this class (fields that a
        subclass adds would be lost) or lacks a required field.
        """
        self._check_class(rollout)
        fields = self._shape.read(rollout)
        if problem := self._shape.problem(fields):
            raise RolloutError(f"this {self.cls.__qualname__} can't be stored: {problem}")
        return fields

    def from_fields(self, fields: Fields) -> Any:
        """Return the rollout with these fields, defaults filled in, built without validation; `fields` is consumed.

        DecodeError, naming the fields, when the class lacks one of them or a required one is missing: that is how a
        payload of another rollout type is noticed.
        """
        if problem := self._shape.problem(fields):
            raise DecodeError(
                f"the payload was written for another rollout type than {self.cls.__qualname__}: {problem}"
            )
        return self._shape.build(fields)

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
            raise RolloutError(f"{feature} needs {quoted(missing)}, which this {self.cls.__qualname__} doesn't have")

    def _check_class(self, rollout: Any) -> None:
        if type(rollout) is self._instances:
            return
        got, expected = type(rollout).__qualname__, self.cls.__qualname__
        why = ""
        if isinstance(rollout, self._instances):
            why = " (a subclass may have fields that would be lost; name it as rollout_type to store it)"
        raise RolloutError(f"this buffer holds rollouts of exactly {expected}, not {got}{why}")
