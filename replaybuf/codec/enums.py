"""Members of enums in payloads: the name of their class, and their value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, Final

from replaybuf.codec.marks import ENUM, Form, Restore, mark
from replaybuf.rollouts.rollout import Status

#: Part of the format: payloads call this class so, wherever its module is.
_OWN_NAMES: Final[dict[type[Enum], str]] = {Status: "replaybuf.rollout.Status"}


class Enums:
    """The family of enums. Those of the given classes are restored, members of others as their bare values."""

    def __init__(self, classes: Iterable[type[Enum]]) -> None:
        self._classes = {_name(cls): cls for cls in classes}
        self.restores: Mapping[int, Restore] = {ENUM: self._restore}

    def form(self, kind: type) -> Form | None:
        if not issubclass(kind, Enum):
            return None
        name = _name(kind)
        return mark(ENUM), lambda member: [name, member.value]

    def _restore(self, content: Any) -> Any:
        name, value = content
        cls = self._classes.get(name)
        return value if cls is None else cls(value)


def _name(cls: type[Enum]) -> str:
    return _OWN_NAMES.get(cls) or f"{cls.__module__}.{cls.__qualname__}"
