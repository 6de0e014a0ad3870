"""One claim of prompts: they are encoded, put under a lease while the cursor moves, and read back; and the way back."""

from __future__ import annotations

import time
from collections.abc import Sequence

from sqlalchemy import Connection

from replaybuf.codec.payload import Codec
from replaybuf.storage.sql.statements.cursors import claim
from replaybuf.storage.sql.statements.lanes import Scope
from replaybuf.storage.sql.statements.leases import unhold
from replaybuf.storage.sql.statements.rows import EncodedGroup, GroupRow, encode_group
from replaybuf.storage.sql.tasks.delivery import Store, Taken
from replaybuf.storage.values import Cursor, NewGroup, StorageItem


class Claiming:
    """Puts groups that are leased from the beginning, and moves a cursor."""

    def __init__(self, store: Store, codec: Codec, groups: Sequence[NewGroup], cursor: Cursor, seconds: float) -> None:
        self._store = store
        self._codec = codec
        self._groups = groups
        self._cursor = cursor
        self._seconds = seconds

    async def run(self) -> Taken | None:
        """Claim; None where somebody else has moved the cursor (database's thread)."""
        encoded = await self._store.compute(self._encode, self._groups)

        def transaction(connection: Connection, scope: Scope) -> Taken | None:
            claimed = claim(connection, scope, encoded, self._cursor, self._seconds, time.time())
            return None if claimed is None else Taken(claimed[0], {}, claimed[1], claimed[2], scope.epoch)

        taken: Taken | None = await self._store.write(transaction)
        if taken is not None:
            try:
                items = await self._store.compute(self._decode, taken.rows)
            except BaseException:
                await self.undo(taken)
                raise
            for item in items:
                taken.items.setdefault(item.task_name, []).append(item)
        return taken

    async def undo(self, taken: Taken | None) -> None:
        """Nobody received them: they are there for the next who asks (database's thread)."""
        if taken is not None:
            lease, uids = taken.lease(), [row.uid for row in taken.rows]
            await self._store.write(lambda connection, scope: unhold(connection, scope, lease, uids))

    def _encode(self, groups: Sequence[NewGroup]) -> list[EncodedGroup]:
        return [encode_group(self._codec, new) for new in groups]

    def _decode(self, rows: Sequence[GroupRow]) -> list[StorageItem]:
        items = [row.decode(self._codec) for row in rows]
        for item in items:
            item.times_sampled, item.deliveries = 1, 1
        return items
