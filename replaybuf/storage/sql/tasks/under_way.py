"""Commits under way at the same time, which begin in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

#: What a commit calls when the next one may begin; otherwise that begins when it ends.
Passed = Callable[[], None]


class UnderWay:
    """The commits under way, at most so many (database's thread). `news` is set whenever one ends."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._tasks: set[asyncio.Task[None]] = set()
        self._passed = asyncio.Event()
        self.news = asyncio.Event()

    def __bool__(self) -> bool:
        return bool(self._tasks)

    async def begin(self, commit: Callable[[Passed], Coroutine[Any, Any, None]]) -> None:
        """Begin `commit(passed)` when there is room for it, and its predecessor has called its `passed`."""
        while len(self._tasks) >= self._most:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        if self._tasks:
            await self._passed.wait()
        self._passed = passed = asyncio.Event()
        task = asyncio.get_running_loop().create_task(commit(passed.set))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        task.add_done_callback(lambda _: passed.set())

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self.news.set()
