"""The declared fields of a class and their defaults, in one form for all kinds of classes."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from typing import Any

import numpy as np
import typing_extensions
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from replaybuf.rollouts.annotations import hints_of, raw_hints

Fields = dict[str, Any]

_ATOMS = (type(None), bool, int, float, complex, str, bytes, Enum)  # defaults that can be shared, not copied


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """One field of a class.

    `make(values)` returns a new default, given the preceding fields; if it is None, `default` is shared. An `optional`
    field may be absent, and stays unset without a default.
    """

    name: str
    annotation: Any
    optional: bool
    has_default: bool = False
    default: Any = None
    make: Callable[[Fields], Any] | None = None


class Defaults:
    """Fills in the missing fields."""

    def __init__(self, fields: Iterable[Field]) -> None:
        fields = tuple(fields)
        # Includes required fields, so that the result is in the order of declaration.
        self.template = {field.name: field.default for field in fields if field.has_default or not field.optional}
        self._makers = tuple((field.name, field.make) for field in fields if field.make is not None)
        #: The fields whose default is made for each instance.
        self.made = frozenset(name for name, _ in self._makers)

    def fill(self, given: Fields, context: Fields | None = None) -> Fields:
        """Return a new dict of all fields; factories that take preceding fields also get `context`."""
        values = {**self.template, **given}
        for name, make in self._makers:
            if name not in given:
                values[name] = make(values if context is None else {**context, **values})
        return values


def private_defaults(cls: type[BaseModel]) -> Defaults | None:
    """Return the defaults of a model's private attributes; None if it has none."""
    if not cls.__private_attributes__:
        return None
    return Defaults(
        [
            _with_default(name, None, info.default, info.default_factory, _takes_values(info))
            for name, info in cls.__private_attributes__.items()
            if info.default is not PydanticUndefined or info.default_factory is not None
        ]
    )


def _takes_values(info: Any) -> bool:
    return bool(getattr(info, "default_factory_takes_validated_data", False))  # pydantic 2.9 doesn't have it


def pydantic_fields(infos: Mapping[str, FieldInfo]) -> Iterator[Field]:
    """Yield the fields of a pydantic model or dataclass, from its `model_fields`."""
    for name, info in infos.items():
        if info.is_required():
            yield Field(name, info.annotation, optional=info.init is False)
        else:
            yield _with_default(name, info.annotation, info.default, info.default_factory, _takes_values(info))


def dataclass_fields(cls: type[Any]) -> Iterator[Field]:
    """Yield the fields of a dataclass; those with init=False and no default are optional."""
    # In a pydantic dataclass the standard library's fields may have FieldInfo as defaults. A dataclass that inherits
    # from one has further fields.
    infos: Mapping[str, FieldInfo] = getattr(cls, "__pydantic_fields__", {})
    below = itertools.takewhile(lambda base: "__pydantic_fields__" not in vars(base), cls.__mro__) if infos else ()
    further = {name for base in below for name in raw_hints(base)}
    hints = hints_of(cls)
    for field in dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ():
        if field.name in infos and field.name not in further:
            yield from pydantic_fields({field.name: infos[field.name]})
            continue
        annotation = hints.get(field.name, field.type)
        if field.default is not dataclasses.MISSING:
            yield _with_default(field.name, annotation, field.default, None)
        elif field.default_factory is not dataclasses.MISSING:
            yield _with_default(field.name, annotation, None, field.default_factory)
        else:
            yield Field(field.name, annotation, optional=not field.init)


def typed_dict_fields(cls: type[Any]) -> Iterator[Field]:
    """Yield the keys of a TypedDict."""
    required: frozenset[str] = getattr(cls, "__required_keys__", frozenset())
    for name, annotation in hints_of(cls).items():
        # Annotations in string form hide NotRequired from the class itself.
        qualifiers = _qualifiers(annotation)
        needed = typing_extensions.Required in qualifiers or name in required
        yield Field(name, annotation, optional=not needed or typing_extensions.NotRequired in qualifiers)


def _qualifiers(annotation: Any) -> list[Any]:
    found = []
    while (origin := typing_extensions.get_origin(annotation)) is not None:
        found.append(origin)
        annotation = typing_extensions.get_args(annotation)[0]
    return found


def _with_default(
    name: str, annotation: Any, default: Any, factory: Callable[..., Any] | None, takes_values: bool = False
) -> Field:
    make: Callable[[Fields], Any] | None = None
    if factory is not None:
        make = factory if takes_values else lambda _: factory()
    elif not isinstance(default, _ATOMS):
        make = lambda _: copy.deepcopy(default)  # noqa: E731
    return Field(name, annotation, optional=True, has_default=True, default=default, make=make)


_NUMBERS = (list, np.ndarray)


def is_tensor(values: Any) -> bool:
    """Return whether this is a torch tensor, or a stand-in for one."""
    return type(values) is not list and hasattr(values, "detach") and hasattr(values, "new_full")


def as_array(values: Any) -> Any:
    """Return a tensor or another object with `__array__` as a numpy array; other values unchanged.

    Raises ValueError for a tensor that can't be read.
    """
    if values is None or isinstance(values, _NUMBERS):
        return values
    if is_tensor(values):
        try:
            return _numbers(values.detach().cpu())
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"a tensor of {values.dtype} can't be read: {error}") from error
    return np.asarray(values) if hasattr(values, "__array__") else values


def _numbers(tensor: Any) -> Any:
    try:
        return tensor.numpy()
    except TypeError:  # a float type unknown to numpy
        return tensor.float().numpy()


def extended(tokens: Any, count: int, number: int) -> Any:
    """Return a tensor of tokens with `number` appended `count` times. Raises ValueError unless it is 1-dimensional."""
    try:
        return sys.modules["torch"].cat([tokens, tokens.new_full((count,), number)])
    except RuntimeError as error:
        raise ValueError(str(error)) from error


def repeated(number: int, count: int, like: Any) -> Any:
    """Return an int32 tensor that repeats `number` `count` times, on the device of `like`."""
    return like.new_full((count,), number, dtype=getattr(sys.modules.get("torch"), "int32", None))


def copied(values: Any) -> Any:
    """Return an independent copy of tokens, of the same type; None for None."""
    if values is None:
        return None
    if is_tensor(values):
        return values.detach().clone()
    return values.copy() if hasattr(values, "copy") else list(values)
