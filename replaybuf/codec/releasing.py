"""Letting go of Ray objects: ObjectRefs in rollouts that are stored are replaced by None.

Ray deletes an object when nobody holds an ObjectRef to it; those of others stay good.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Callable, Container, Iterable
from functools import partial
from typing import Any

import numpy as np
from pydantic import BaseModel

from replaybuf.codec.foreign import SCALARS


@dataclasses.dataclass(frozen=True, slots=True)
class Releasing:
    """What is released: `is_ref` knows ObjectRefs; `opaque` are classes whose instances are left alone."""

    is_ref: Callable[[Any], bool]
    opaque: Container[type] = ()

    def release(self, value: Any) -> Any:
        """Return the value with None in place of ObjectRefs, at any depth; only what can't change is made anew."""
        kind = type(value)
        if kind in SCALARS or kind in self.opaque:
            return value
        if self.is_ref(value):
            return None
        if isinstance(value, dict):
            self._replace(value.__setitem__, list(value.items()))
        elif isinstance(value, (list, deque)):
            if not SCALARS.issuperset(map(type, value)):
                self._replace(value.__setitem__, enumerate(value))
        elif isinstance(value, (tuple, set, frozenset)):
            return self._made_anew(value)
        elif isinstance(value, np.ndarray):
            if kind is np.ndarray and value.dtype.char == "O":
                self._replace(value.__setitem__, list(np.ndenumerate(value)))
        elif isinstance(value, BaseModel):
            self.release(value.__dict__)  # validators and frozen models have nothing to say here
            self.release(value.__pydantic_extra__)
        else:
            fields = {name: getattr(value, name, None) for name in _field_names(kind)}
            self._replace(partial(_set_attribute, value), fields.items())
        return value

    def _replace(self, put: Callable[[Any, Any], None], items: Iterable[tuple[Any, Any]]) -> None:
        for place, item in items:
            if (released := self.release(item)) is not item:
                put(place, released)

    def _made_anew(self, value: Any) -> Any:
        released = [self.release(item) for item in value]
        if all(new is old for new, old in zip(released, value, strict=True)):
            return value
        return value._make(released) if hasattr(value, "_make") else type(value)(released)


def _field_names(kind: type) -> Iterable[str]:
    """Return the names of the fields of a dataclass, an attrs class or a msgspec Struct."""
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    attributes = getattr(kind, "__attrs_attrs__", ())
    return [attribute.name for attribute in attributes] or getattr(kind, "__struct_fields__", ())


def _set_attribute(instance: Any, name: str, value: Any) -> None:
    with contextlib.suppress(AttributeError, TypeError):  # one that can't be changed at all keeps its ObjectRef
        object.__setattr__(instance, name, value)
