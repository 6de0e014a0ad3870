"""Replaces values inside rollouts, at any depth: handles by loaded arrays, stored ObjectRefs by None."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Container, Iterable
from functools import partial
from typing import Any

import numpy as np
from pydantic import BaseModel

from replaybuf.values.codec.value_types import SCALARS


@dataclasses.dataclass(frozen=True, slots=True)
class Replacing:
    """Replaces the values that `is_one` recognises by `instead(value)`.

    Instances of `opaque` classes are left unchanged.
    """

    is_one: Callable[[Any], bool]
    instead: Callable[[Any], Any]
    opaque: Container[type] = ()

    def replace(self, value: Any) -> Any:
        """Return the value with replacements in it, at any depth; only immutable containers are copied."""
        kind = type(value)
        if kind in SCALARS or kind in self.opaque:
            return value
        if self.is_one(value):
            return self.instead(value)
        if isinstance(value, dict):
            self._replace(value.__setitem__, list(value.items()))
        elif isinstance(value, list):
            if not SCALARS.issuperset(map(type, value)):
                self._replace(value.__setitem__, enumerate(value))
        elif isinstance(value, (tuple, set, frozenset)):
            return self._made_anew(value)
        elif isinstance(value, np.ndarray):
            if kind is np.ndarray and value.dtype.char == "O":
                self._replace(value.__setitem__, list(np.ndenumerate(value)))
        elif isinstance(value, BaseModel):
            self.replace(value.__dict__)  # bypasses validators and frozen models
            self.replace(value.__pydantic_extra__)
        else:
            if dataclasses.is_dataclass(kind):
                fields = {one.name: getattr(value, one.name, None) for one in dataclasses.fields(kind)}
                self._replace(partial(_set_attribute, value), fields.items())
        return value

    def _replace(self, put: Callable[[Any, Any], None], items: Iterable[tuple[Any, Any]]) -> None:
        for place, item in items:
            if (replaced := self.replace(item)) is not item:
                put(place, replaced)

    def _made_anew(self, value: Any) -> Any:
        replaced = [self.replace(item) for item in value]
        if all(new is old for new, old in zip(replaced, value, strict=True)):
            return value
        return value._make(replaced) if hasattr(value, "_make") else type(value)(replaced)


def _set_attribute(instance: Any, name: str, value: Any) -> None:
    with contextlib.suppress(AttributeError, TypeError):  # an immutable instance keeps its value
        object.__setattr__(instance, name, value)
