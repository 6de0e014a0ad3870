"""The state of the model, and what all its parts use."""

from __future__ import annotations

import threading
import uuid
from dataclasses import replace

from replaybuf.common.worker_name import worker_name
from replaybuf.errors import ClosedError, DecodeError
from replaybuf.rules.limits import Rules
from replaybuf.storage.reports import Waiting
from replaybuf.storage.sql.tasks.commit_watch import Wakes
from replaybuf.storage.values import Cursor, NewGroup, StorageItem
from replaybuf.values.codec.payload import Codec
from replaybuf.values.rollouts.marks import Marks
from tests.reference.groups import Groups
from tests.reference.items import Items
from tests.reference.loans import Loans
from tests.reference.loans import now as lease_time
from tests.reference.world import Checkpoints


class Memory:
    """The groups and everything about them, behind one lock."""

    name = "default"
    durable = False

    def __init__(self, codec: Codec, rules: Rules | None = None) -> None:
        self.codec = codec
        self.rules = rules or Rules()
        self._lock = threading.RLock()
        self._groups = Groups(Items(), self.rules, codec)
        self._loans = Loans(self._groups)
        self._checkpoints = Checkpoints()
        self._cursors: dict[str, Cursor] = {}
        self._waits: dict[int, Waiting] = {}
        self._next_uid = 1
        self._ticket_shift = 0  # uid minus ticket
        self._epoch = 0
        self._identity = uuid.uuid4().hex
        self._wakes = Wakes()
        self.closed = False

    @property
    def worker(self) -> str:
        return worker_name()

    def check_open(self) -> None:
        if self.closed:
            raise ClosedError

    @property
    def identity(self) -> str:
        """What tells the store from any other, for its leases."""
        return self._identity

    async def open(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        self.closed = True
        self._notify()

    # Waiting

    def version(self) -> int:
        return self._wakes.version

    async def changed(self, timeout: float, since: int) -> None:
        with self._lock:
            lease_ends = self._loans.next_end() - lease_time()
        await self._wakes.wait(min(timeout, max(0.0, lease_ends)), since)

    def _notify(self) -> None:
        self._groups.prune()
        self._wakes.wake()

    # For all parts

    def _new_uid(self) -> int:
        uid = self._next_uid
        self._next_uid += 1
        return uid

    def _end_leases(self) -> None:
        if self._loans.end_overdue():
            self._notify()

    def _encode(self, group: NewGroup) -> bytes:
        if group.payload is not None:
            return group.payload
        return self.codec.encode(group.rollouts, group.fetched or {})

    def _reward(self, group: NewGroup) -> float | None:
        return Marks.of(group.rollouts, self.codec.rollout_type).mean_reward

    def _decode(self, uid: int) -> StorageItem:
        return replace(self._groups.item(uid), item=self.codec.decode(self._groups.payloads[uid]))

    def _decode_leniently(self, item: StorageItem) -> StorageItem:
        try:
            return replace(item, item=self.codec.decode(self._groups.payloads[item.uid]))
        except DecodeError as error:
            return replace(item, error=str(error))
