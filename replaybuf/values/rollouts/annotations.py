"""Resolution of class annotations, and the classes that can be reached through them.

Names that can't be resolved, because they exist only for the type checker or inside a function, count as Any.
"""

from __future__ import annotations

import inspect
import sys
import typing
from collections.abc import Iterator
from typing import Any

import typing_extensions


def hints_of(cls: type[Any]) -> dict[str, Any]:
    """Return a class's annotations by name, including inherited ones; Any for each that can't be resolved."""
    hints: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        names = {base.__name__: base, **vars(base), **vars(sys.modules.get(base.__module__, typing))}
        for name, annotation in _raw_hints(base).items():
            alone = type("_Alone", (), {"__annotations__": {name: annotation}})
            try:
                hints |= typing_extensions.get_type_hints(alone, names, names, include_extras=True)
            except Exception:  # an annotation may contain any code
                hints[name] = Any
    return hints


def _raw_hints(cls: type[Any]) -> dict[str, Any]:
    """Return the annotations in the body of this class, unresolved."""
    if sys.version_info >= (3, 14):
        import annotationlib

        return dict(annotationlib.get_annotations(cls, format=annotationlib.Format.FORWARDREF))
    return inspect.get_annotations(cls)


def types_in(annotation: Any) -> Iterator[type[Any]]:
    """Yield the classes in an annotation, at any depth."""
    origin = typing.get_origin(annotation)
    if origin is None:
        if isinstance(annotation, type):
            yield annotation
        return
    parts = typing.get_args(annotation)
    # What comes after the type in Annotated may be any value.
    for part in parts[:1] if origin is typing.Annotated else (origin, *parts):
        yield from types_in(part)
