"""Cursors: small versioned values stored with the groups, for places in datasets and what trainers publish."""

from __future__ import annotations

from collections.abc import Sequence

from replaybuf.buffer.lease import Lease
from replaybuf.buffer.putting import Putting
from replaybuf.storage.contract import CursorStorage, require
from replaybuf.storage.values import Cursor, NewGroup


class Cursors:
    """The cursors of a buffer. They are part of its checkpoints and snapshots, and fenced like everything else."""

    def __init__(self, putting: Putting) -> None:
        self._putting = putting

    async def read(self, name: str) -> Cursor:
        """Return the current cursor; its version is 0 if there is none yet."""
        return await self._storage("a cursor").cursor(name)

    async def move(self, cursor: Cursor) -> bool:
        """Write a cursor that was read and changed. Return False if another process has moved it since."""
        return await self._storage("a cursor").move_cursor(cursor)

    async def claim(self, groups: Sequence[NewGroup], cursor: Cursor, seconds: float) -> Lease | None:
        """Move a cursor and put groups that are leased from the beginning, in one transaction.

        Return None if another process has moved the cursor since it was read.
        """
        storage = self._storage("a claim")
        for new in groups:
            new.worker = new.worker or self._putting.worker
        claimed = await self._putting.fetching(groups, lambda: storage.claim(groups, cursor, seconds))
        return None if claimed is None else Lease(storage, self._putting, claimed, seconds)

    def _storage(self, call: str) -> CursorStorage:
        return require(self._putting.storage, CursorStorage, call)
