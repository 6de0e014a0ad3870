"""One claim of prompts: encoding, putting under a lease while the cursor moves, reading, and undoing."""

from __future__ import annotations

from collections.abc import Sequence

from replaybuf.codec.payload import Codec
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.statements.cursors import claim
from replaybuf.storage.sql.statements.encoded import EncodedGroup, encode_group
from replaybuf.storage.sql.statements.leases import unhold
from replaybuf.storage.sql.statements.rows import GroupRow
from replaybuf.storage.sql.tasks.delivery import Taken
from replaybuf.storage.sql.tasks.port import OpenStore
from replaybuf.storage.values import Cursor, NewGroup, StorageItem


class Claiming:
    """Puts groups that are leased from the beginning, and moves a cursor."""

    def __init__(
        self, store: OpenStore, codec: Codec, groups: Sequence[NewGroup], cursor: Cursor, seconds: float
    ) -> None:
        self._store = store
        self._codec = codec
        self._groups = groups
        self._cursor = cursor
        self._seconds = seconds

    async def run(self) -> Taken | None:
        """Claim; return None when another process has moved the cursor (database's thread)."""
        encoded = await self._store.compute(self._encode, self._groups)

        def claimed(tx: Transaction) -> Taken | None:
            found = claim(tx, encoded, self._cursor, self._seconds)
            if found is None:
                return None
            rows, token, until = found
            return Taken(rows, {}, token, until, tx.scope.epoch, database=tx.scope.database)

        taken: Taken | None = await self._store.write(claimed)
        for new in self._groups:
            self._store.presence.of(new.worker)
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
        """Free prompts that nobody received, for the next claim or lease (database's thread)."""
        if taken is not None:
            lease, uids = taken.lease(), [row.uid for row in taken.rows]
            await self._store.write(lambda tx: unhold(tx, lease, uids))

    def _encode(self, groups: Sequence[NewGroup]) -> list[EncodedGroup]:
        return [encode_group(self._codec, new) for new in groups]

    def _decode(self, rows: Sequence[GroupRow]) -> list[StorageItem]:
        items = [row.decode(self._codec) for row in rows]
        for item in items:
            item.times_sampled, item.deliveries = 1, 1
        return items
