"""The state of the model, and what all its parts use."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import replace

from replaybuf.common.worker_name import worker_name
from replaybuf.errors import ClosedError
from replaybuf.rules.limits import Rules
from replaybuf.storage.values import Cursor, StorageItem
from replaybuf.values.codec.payload import Codec
from tests.reference.groups import Groups
from tests.reference.loans import Loans
from tests.reference.world import Checkpoints


class Memory:
    """The groups and everything about them."""

    name = "default"
    durable = False

    def __init__(self, codec: Codec, rules: Rules | None = None) -> None:
        self.codec = codec
        self.rules = rules or Rules()
        self._groups = Groups(self.rules, codec)
        self._loans = Loans(self._groups)
        self._checkpoints = Checkpoints()
        self._cursors: dict[str, Cursor] = {}
        self._next_uid = 1
        self._ticket_shift = 0  # uid minus ticket
        self._epoch = 0
        self.identity = uuid.uuid4().hex
        self.closed = False

    @property
    def worker(self) -> str:
        return worker_name()

    def check_open(self) -> None:
        if self.closed:
            raise ClosedError

    async def open(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        self.closed = True

    # Nobody else changes it

    def version(self) -> int:
        return 0

    async def changed(self, timeout: float, since: int) -> None:
        await asyncio.sleep(timeout)

    def _new_uid(self) -> int:
        uid = self._next_uid
        self._next_uid += 1
        return uid

    def _decode(self, item: StorageItem) -> StorageItem:
        return replace(item, item=self.codec.decode(self._groups.payloads[item.uid]))
