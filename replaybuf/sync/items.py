"""Iterating over what a query finds, a few groups ahead of the caller."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from typing import Generic, Self, TypeVar

from replaybuf.sync.loop import end, run

T = TypeVar("T")

# Large groups come one by one; of small ones as many as make the way to the background thread worth its time.
_AHEAD_SECONDS = 0.001


class Items(Iterator[T], Generic[T]):
    """The groups that `find` yields: read from the store while they are iterated over, never all at once.

    It may be left at any time. `close` ends it at once; otherwise that happens when it is garbage-collected.
    """

    def __init__(self, found: AsyncIterator[T]) -> None:
        self._found = found
        self._ahead: deque[T] = deque()
        self._error: Exception | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        if not self._ahead:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            run(self._read())
        if not self._ahead:
            raise StopIteration
        return self._ahead.popleft()

    def close(self) -> None:
        """End the iteration."""
        self._ahead.clear()
        self._error = None
        end(self._close())

    async def _read(self) -> None:
        """Read the next groups. An error after some of them waits for its turn."""
        until = time.monotonic() + _AHEAD_SECONDS
        try:
            while not self._ahead or time.monotonic() < until:
                self._ahead.append(await anext(self._found))
        except StopAsyncIteration:
            pass
        except Exception as error:
            if not self._ahead:
                raise
            self._error = error

    async def _close(self) -> None:
        if (close := getattr(self._found, "aclose", None)) is not None:
            await close()
