"""The reference backend: dicts, and the simplest implementation of the contract.

It scans and sorts at every take, like other in-memory buffers, and rewrites every rollout at every refresh. The SQL
backends must be indistinguishable from it. Payloads are encoded as on disk, so that the same values can be stored
everywhere, and are read back the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from replaybuf.storage.contract import StorageBackend
from replaybuf.storage.memory.drawing import Drawing, Drawn, all_of
from replaybuf.storage.memory.loans import now as lease_time
from replaybuf.storage.memory.matching import Matching
from replaybuf.storage.memory.presence import Presence
from replaybuf.storage.memory.putting import Putting
from replaybuf.storage.memory.world import World, add_new, load, state_of
from replaybuf.storage.portable import check_empty, pack_state, unpack_state
from replaybuf.storage.state_copies import StateCopies
from replaybuf.storage.values import Checkpoint, Cursor, Leased, NewGroup


class MemoryStorage(StateCopies, Putting, Drawing, Matching, Presence, StorageBackend):
    """Groups in a dict of this process; they are lost when it ends. Threads share it, one operation at a time."""

    # Checkpoints

    async def check_fence(self) -> None:
        """Do nothing: no other process can restore a buffer in memory."""

    async def checkpoint(self, step: int, keep: int | None) -> Checkpoint:
        with self._lock:
            self._end_leases()
            return self._checkpoints.make(step, self._world(), keep)

    async def restore(self, step: int, *, keep_new: bool) -> Checkpoint:
        with self._lock:
            made, restored = self._checkpoints.get(step)
            restored.loans.return_all()
            if keep_new:
                self._loans.return_all()
                add_new(self._world(), restored, set(restored.groups.payloads))
            else:
                self._cursors = restored.cursors
                self._ticket_shift = self._next_uid - restored.next_ticket
            self._groups, self._loans = restored.groups, restored.loans
            self._epoch += 1
            self._notify()
            return made

    def _world(self) -> World:
        return World(self._groups, self._loans, self._next_uid - self._ticket_shift, self._cursors)

    async def checkpoints(self) -> list[Checkpoint]:
        with self._lock:
            return self._checkpoints.all()

    async def drop_checkpoint(self, step: int) -> None:
        with self._lock:
            self._checkpoints.drop(step)

    # Prompts

    async def cursor(self, name: str) -> Cursor:
        with self._lock:
            return replace(self._cursors.get(name, Cursor(name)), epoch=self._epoch)

    async def move_cursor(self, cursor: Cursor) -> bool:
        with self._lock:
            moved = self._move(cursor)
            self._notify()
            return moved

    def _move(self, cursor: Cursor) -> bool:
        now = self._cursors.get(cursor.name, Cursor(cursor.name))
        if (now.version, self._epoch) != (cursor.version, cursor.epoch):
            return False
        self._cursors[cursor.name] = replace(cursor, version=cursor.version + 1)
        return True

    async def claim(self, groups: Sequence[NewGroup], cursor: Cursor, seconds: float) -> Leased | None:
        encoded = [(group, self._encode(group)) for group in groups]
        with self._lock:
            if not self._move(cursor):
                return None
            items = [self._add(group, payload, self._reward(group)) for group, payload in encoded]
            token, until = self._new_uid(), lease_time() + seconds
            claimed: Drawn = {}
            for item in items:
                claimed.setdefault(item.task_name, []).append(self._decode(item.uid))
            self._loans.lend(all_of(claimed), token, until)
            self._notify()
            return Leased(token, until, claimed, self._epoch, database=self.identity)

    async def put_behind(self, groups: Sequence[NewGroup], cursor: Cursor) -> bool:
        encoded = [(group, self._encode(group)) for group in groups]
        with self._lock:
            before, cursors = self._groups.copy(), dict(self._cursors)
            loans = self._loans.copy(before)
            if not self._move(cursor):
                return False
            try:
                for group, payload in encoded:
                    self._store(group, payload, self._reward(group))
            except BaseException:
                self._groups, self._loans, self._cursors = before, loans, cursors
                raise
            self._notify()
            return True

    # Persistence

    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            return pack_state(state_of(self._world(), self._next_uid))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with self._lock:
            check_empty(len(self._groups.payloads), [made.step for made in self._checkpoints.all()])
            loaded = unpack_state(state)
            load(self._groups, loaded)
            self._next_uid = max(self._next_uid, loaded.next_uid)
            self._ticket_shift = self._next_uid - loaded.next_ticket
            self._cursors = {one.name: one for one in loaded.cursors}
            self._wakes.wake()
