"""Resolution of class annotations, and the classes that can be reached through them.

Names that can't be resolved, because they exist only for the type checker or inside a function, count as Any.
"""

from __future__ import annotations

import inspect
import sys
import typing
from collections.abc import Iterable, Iterator
from enum import Enum
from types import UnionType
from typing import Any, Literal, NewType, TypeVar, Union

import typing_extensions

_ANNOTATED = (typing.Annotated, typing_extensions.Annotated)
_LITERAL = (Literal, typing_extensions.Literal)


def hints_of(cls: type[Any]) -> dict[str, Any]:
    """Return a class's annotations by name, including inherited ones, resolved as far as possible."""
    try:
        return typing_extensions.get_type_hints(cls, include_extras=True)
    except Exception:  # an annotation may contain any code
        hints: dict[str, Any] = {}
        for base in reversed(cls.__mro__):
            for name, annotation in raw_hints(base).items():
                hints[name] = _resolve_alone(base, name, annotation)
        return hints


def _resolve_alone(owner: type[Any], name: str, annotation: Any) -> Any:
    """Return one annotation of a class, Any if it can't be resolved."""
    alone = type("_Alone", (), {"__annotations__": {name: annotation}})
    module = vars(sys.modules.get(owner.__module__, typing))
    names = {owner.__name__: owner, **vars(owner), **module}
    try:
        return typing_extensions.get_type_hints(alone, names, names, include_extras=True)[name]
    except Exception:
        return Any


def raw_hints(cls: type[Any]) -> dict[str, Any]:
    """Return the annotations in the body of this class, unresolved."""
    if sys.version_info >= (3, 14):
        import annotationlib

        return dict(annotationlib.get_annotations(cls, format=annotationlib.Format.FORWARDREF))
    return inspect.get_annotations(cls)


def types_in(annotation: Any) -> Iterator[type[Any]]:
    """Yield the classes in an annotation, at any depth, including builtin ones."""
    pending, aliases = [annotation], set()
    while pending:
        part = pending.pop()
        origin = typing.get_origin(part)
        if origin in _ANNOTATED:  # what comes after the type may be any value
            pending.append(typing.get_args(part)[0])
        elif origin in _LITERAL:
            yield from (type(value) for value in typing.get_args(part) if isinstance(value, Enum))
        elif origin is not None:
            pending += () if origin in (Union, UnionType) else (origin,)
            pending += typing.get_args(part)
        elif isinstance(part, list | tuple):  # the arguments of a Callable
            pending += part
        elif isinstance(part, TypeVar):
            pending += [*part.__constraints__, part.__bound__]
        elif isinstance(part, NewType):
            pending.append(part.__supertype__)
        elif isinstance(part, type):
            yield part
        elif hasattr(part, "__value__") and id(part) not in aliases:  # `type X = ...`, which may name itself
            aliases.add(id(part))
            pending.append(part.__value__)


def choices_of(annotation: Any) -> list[Any]:
    """Return the values that an annotation allows: members of its enums, or strings of its literals; else [].

    Other types in the annotation don't matter, except str: with it, literals aren't choices.
    """
    kinds = list(types_in(annotation))
    choices: list[Any] = [member for kind in kinds if issubclass(kind, Enum) for member in kind]
    if not choices and str not in kinds:
        choices = list(_literal_texts(annotation))
    return choices


def _literal_texts(annotation: Any) -> Iterable[str]:
    if typing.get_origin(annotation) in _LITERAL:
        return [value for value in typing.get_args(annotation) if isinstance(value, str)]
    return [text for part in typing.get_args(annotation) for text in _literal_texts(part)]
