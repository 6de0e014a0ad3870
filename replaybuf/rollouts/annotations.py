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
from typing import Any, ForwardRef, Literal, NewType, TypeVar, Union

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
                hints[name] = _resolved(annotation, base) if isinstance(annotation, str) else annotation
        return hints


def raw_hints(cls: type[Any]) -> dict[str, Any]:
    """Return the annotations in the body of this class, unresolved."""
    if sys.version_info >= (3, 14):
        import annotationlib

        return dict(annotationlib.get_annotations(cls, format=annotationlib.Format.FORWARDREF))
    return inspect.get_annotations(cls)


def types_in(annotation: Any, owner: type[Any]) -> Iterator[type[Any]]:
    """Yield the classes in an annotation of the class `owner`, at any depth, including builtin ones."""
    pending, aliases = [annotation], set()
    while pending:
        one = pending.pop()
        origin = typing.get_origin(one)
        if isinstance(one, str | ForwardRef):
            pending.append(_resolved(one.__forward_arg__ if isinstance(one, ForwardRef) else one, owner))
        elif origin in _ANNOTATED:  # what comes after the type may be any value
            pending.append(typing.get_args(one)[0])
        elif origin in _LITERAL:
            yield from (type(value) for value in typing.get_args(one) if isinstance(value, Enum))
        elif origin is not None:
            pending += () if origin in (Union, UnionType) else (origin,)
            pending += typing.get_args(one)
        elif isinstance(one, list | tuple):  # the arguments of a Callable
            pending += one
        elif isinstance(one, TypeVar):
            pending += [*one.__constraints__, one.__bound__]
        elif isinstance(one, NewType):
            pending.append(one.__supertype__)
        elif isinstance(one, type):
            yield one
        elif hasattr(one, "__value__") and id(one) not in aliases:  # `type X = ...`, which may name itself
            aliases.add(id(one))
            pending.append(one.__value__)


def choices_of(annotation: Any, owner: type[Any]) -> list[Any]:
    """Return the values that an annotation allows: members of its enums, or strings of its literals; else [].

    Other types in the annotation don't matter, except str: with it, literals aren't choices.
    """
    kinds = list(types_in(annotation, owner))
    choices: list[Any] = [member for kind in kinds if issubclass(kind, Enum) for member in kind]
    if not choices and str not in kinds:
        choices = list(_literal_texts(annotation))
    return choices


def _literal_texts(annotation: Any) -> Iterable[str]:
    if typing.get_origin(annotation) in _LITERAL:
        return [value for value in typing.get_args(annotation) if isinstance(value, str)]
    return [text for part in typing.get_args(annotation) for text in _literal_texts(part)]


class _Unknown:
    """A placeholder for an unresolvable name, valid in any expression."""

    def __getattr__(self, name: str) -> _Unknown:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, item: Any) -> Any:
        return typing.Tuple[item] if item is not Ellipsis else self  # noqa: UP006  # its arguments may be known

    def __call__(self, *args: Any, **kwargs: Any) -> _Unknown:
        return self

    def __or__(self, other: Any) -> Any:
        return Union[Any, other]  # noqa: UP007

    __ror__ = __or__


_UNKNOWN = _Unknown()


class _Names(dict[str, Any]):
    """The namespace of a class's annotations; missing names are unknown."""

    def __missing__(self, name: str) -> Any:
        return _UNKNOWN


def _resolved(text: str, owner: type[Any]) -> Any:
    """Evaluate an annotation of a class given as source text."""
    module = sys.modules.get(owner.__module__)
    builtins = vars(sys.modules["builtins"])
    names = _Names({**builtins, **(vars(module) if module else {}), **vars(owner), owner.__name__: owner})
    try:
        return eval(text, {}, names)
    except Exception:  # an annotation may contain any code
        return _UNKNOWN
