"""What the tasks need from their open store."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from replaybuf.storage.sql.engine.port import Engine
from replaybuf.storage.sql.engine.thread import DatabaseThread
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.statements.lanes import KnownLanes
from replaybuf.storage.sql.tasks.presence import Presence

S = TypeVar("S")
T = TypeVar("T")


@dataclass(slots=True)
class LastDraw:
    """The bytes of a group in the last draw of a store, and the seconds that decoding one took."""

    bytes: float = math.inf
    seconds: float = math.inf


class OpenStore(Protocol):
    """An open store (`storage.sql.store`)."""

    thread: DatabaseThread
    last_draw: LastDraw
    engine: Engine
    lanes: KnownLanes
    history: int | None
    presence: Presence

    async def read(self, function: Callable[[Transaction], T]) -> T:
        """Run `function(tx)` in a read transaction."""
        ...

    async def write(
        self,
        function: Callable[[Transaction], T],
        *,
        fenced: bool = ...,
        brief: bool = ...,
        announce: Callable[[], bool] = ...,
    ) -> T:
        """Run `function(tx)` in a write transaction behind the fence, and wake waiting callers if `announce()`.

        `brief` as in `Engine.write`. With `fenced=False` the function checks the fence itself.
        """
        ...

    async def compute(self, function: Callable[[S], T], argument: S) -> T:
        """Run CPU work in another thread and return its result."""
        ...
