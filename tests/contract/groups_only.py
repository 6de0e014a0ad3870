"""A backend that has groups, and nothing else: the groups of another one."""

from collections.abc import Callable
from typing import Any

from replaybuf.codec.payload import Codec
from replaybuf.rules.limits import Rules
from replaybuf.storage.contract import GroupStorage
from replaybuf.storage.memory.backend import MemoryStorage


def _of_inner(name: str) -> Callable[..., Any]:
    return lambda self, *args, **options: getattr(self.inner, name)(*args, **options)


class _Named(GroupStorage):
    def __init__(self, codec: Codec, rules: Rules) -> None:
        self.codec, self.rules, self.inner = codec, rules, MemoryStorage(codec, rules)

    async def close(self) -> None:
        await self.inner.close()


GroupsOnly = type("GroupsOnly", (_Named,), {name: _of_inner(name) for name in GroupStorage.__abstractmethods__})
