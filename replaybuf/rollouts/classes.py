"""The classes whose instances a buffer stores: those that its config names, and what their annotations reach."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any

from pydantic import BaseModel

from replaybuf.errors import ConfigError
from replaybuf.rollouts.annotations import hints_of, types_in
from replaybuf.rollouts.shapes import Shape, is_namedtuple, kind_of, shape_of


class Classes:
    """The classes that can be reached from `named` through annotations, by their names in payloads.

    Enums, named tuples, and whatever has a shape are known; other classes in annotations say nothing about how their
    instances could be stored. ConfigError when two of them have the same name.
    """

    def __init__(self, named: Iterable[type[Any]]) -> None:
        self.shapes: dict[type[Any], Shape] = {}
        self.others: set[type[Any]] = set()  # enums and named tuples
        self._by_name: dict[str, type[Any]] = {}
        self._by_qualname: dict[str, list[type[Any]]] = {}
        self._explore(named)

    def __contains__(self, cls: type[Any]) -> bool:
        return cls in self.shapes or cls in self.others

    def find(self, name: Any) -> type[Any] | None:
        """Return the class that a payload calls so.

        A class that has moved to another module since (or was in `__main__` then) is found by the rest of its name, if
        only one class is called so.
        """
        cls = self._by_name.get(name)
        if cls is None and isinstance(name, str):
            alike = self._by_qualname.get(name.partition(":")[2], ())
            cls = alike[0] if len(alike) == 1 else None
        return cls

    def _explore(self, named: Iterable[type[Any]]) -> None:
        pending, seen = list(named), set()
        while pending:
            cls = pending.pop(0)
            if cls in seen:
                continue
            seen.add(cls)
            if issubclass(cls, Enum):
                self._add(cls)
            elif is_namedtuple(cls):
                self._add(cls)
                pending += [kind for hint in hints_of(cls).values() for kind in types_in(hint, cls)]
            elif (shape := shape_of(cls)) is not None:
                if not issubclass(cls, dict):  # a TypedDict's instances are dicts
                    self.shapes[cls] = shape
                    self._add(cls, known=True)
                pending += [kind for field in shape.fields for kind in types_in(field.annotation, cls)]
                pending += _origin(cls)

    def _add(self, cls: type[Any], *, known: bool = False) -> None:
        name = stored_name(cls)
        if name in self._by_name:
            raise ConfigError(
                f"two classes are called {name_of(cls)}: payloads couldn't tell them apart; rename one of them"
            )
        self._by_name[name] = cls
        self._by_name.setdefault(name_of(cls), cls)  # as members of enums were stored by 0.1.0
        self._by_qualname.setdefault(cls.__qualname__, []).append(cls)
        if not known:
            self.others.add(cls)


def name_of(cls: type[Any]) -> str:
    """Return the name of a class for people."""
    return f"{cls.__module__}.{cls.__qualname__}"


def stored_name(cls: type[Any]) -> str:
    """Return the name of a class in payloads, which says where the name of its module ends."""
    return f"{cls.__module__}:{cls.__qualname__}"


def checked(cls: Any, where: str) -> type[Any]:
    """Return a class that a config names. ConfigError unless its instances can be stored by its annotations."""
    if not is_storable(cls) or cls is Enum:
        hint = ""
        if isinstance(cls, type) and kind_of(cls) and cls is not BaseModel:
            hint = ", whose fields aren't its whole content: store it with a converter (converters=)"
        raise ConfigError(
            f"{where} takes enums, named tuples, TypedDicts, pydantic models, dataclasses, attrs classes and msgspec "
            f"Structs, not {cls!r:.200}{hint}"
        )
    return cls  # type: ignore[no-any-return]


def is_storable(cls: Any) -> bool:
    """Return whether this is a class whose instances can be stored by its annotations."""
    if not isinstance(cls, type) or cls is dict:
        return False
    return issubclass(cls, Enum) or is_namedtuple(cls) or shape_of(cls) is not None


def _origin(cls: type[Any]) -> list[type[Any]]:
    """Return the generic model that a parametrised one was made of."""
    origin = getattr(cls, "__pydantic_generic_metadata__", {}).get("origin")
    return [] if origin is None else [origin]
