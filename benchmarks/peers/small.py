"""diskcache and persist-queue: queues of pickled values in SQLite files."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.floor import copy_log_back
from benchmarks.peers.adapter import Adapter


class DiskCache(Adapter):
    """`Cache.push` and `Cache.pull`, each put in a transaction of its own, a batch taken in one."""

    async def open(self) -> None:
        import diskcache

        self._cache = diskcache.Cache(self.place.folder, size_limit=1 << 40, eviction_policy="none")

    async def close(self) -> None:
        self._cache.close()

    async def put(self, prepared: Sequence[Any]) -> None:
        for group in prepared:
            self._cache.push(group)

    async def take(self, count: int) -> Sequence[Any]:
        with self._cache.transact():
            pulled_groups = [self._cache.pull()[1] for _ in range(count)]
        return [group for group in pulled_groups if group is not None]

    async def wait_for_one(self) -> None:
        while self._cache.pull()[1] is None:  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    def settle(self) -> None:
        copy_log_back(f"{self.place.folder}/cache.db")


class DiskCacheMany(DiskCache):
    """The same with 64 puts in a transaction."""

    async def put(self, prepared: Sequence[Any]) -> None:
        for start in range(0, len(prepared), self.batch):
            with self._cache.transact():
                for group in prepared[start : start + self.batch]:
                    self._cache.push(group)


class PersistQueue(Adapter):
    """`SQLiteQueue` with auto_commit, a transaction for each put and each group taken."""

    shared = False

    async def open(self) -> None:
        import persistqueue

        self._queue = persistqueue.SQLiteQueue(self.place.folder, multithreading=True, auto_commit=True)

    async def close(self) -> None:
        self._queue.close()

    async def put(self, prepared: Sequence[Any]) -> None:
        for group in prepared:
            self._queue.put(group)

    async def take(self, count: int) -> Sequence[Any]:
        return [self._queue.get(block=False) for _ in range(min(count, self._queue.qsize()))]

    def settle(self) -> None:
        [file] = Path(self.place.folder).glob("*.db")
        copy_log_back(str(file))
