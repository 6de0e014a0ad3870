"""A model of the store: dicts, scanned and sorted at every draw, and no SQL.

Random operations must leave a database indistinguishable from it (`tests/side_by_side`), draws included
(`tests/storage/test_same_draws.py`). What happens to a group is decided by `replaybuf.rules`, as in SQL.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from replaybuf.common.progress import OnProgress
from replaybuf.rules.transitions import Tally
from replaybuf.storage.sql.copies.snapshot_file import snapshot_file
from replaybuf.storage.sql.statements.checkpoints import check_empty
from replaybuf.storage.values import Checkpoint, Cursor, Leased, NewGroup
from replaybuf.values.rollouts.rollout import Status
from tests.reference.drawing import Drawing, Drawn, all_of
from tests.reference.loans import now as lease_time
from tests.reference.matching import Matching
from tests.reference.presence import Presence
from tests.reference.putting import Putting
from tests.reference.snapshots import BufferState, read_snapshot
from tests.reference.world import World, add_new, load, state_of


class Reference(Putting, Drawing, Matching, Presence):
    """Groups in dicts of this process."""

    # Checkpoints

    async def check_fence(self) -> None:
        """Do nothing: no other process can restore it."""

    def run_in_background(self, work: object) -> Callable[[], None]:
        """Do nothing: leases are renewed in the database's thread, and those of the model aren't."""
        return lambda: None

    async def fenced_tallies(self) -> dict[tuple[str, Status, Tally], int]:
        return await self.tallies()

    async def checkpoint(self, step: int, keep: int | None) -> Checkpoint:
        with self._lock:
            self._end_leases()
            return self._checkpoints.make(step, self._world(), keep)

    async def restore(self, step: int, *, keep_new: bool) -> Checkpoint:
        with self._lock:
            checkpoint, restored = self._checkpoints.get(step)
            restored.loans.return_all()
            if keep_new:
                self._loans.return_all()
                add_new(self._world(), restored, set(restored.groups.payloads))
            else:
                self._cursors = restored.cursors
                self._ticket_shift = self._next_uid - restored.next_ticket
            for name in self._groups.tallies:  # of tasks and statuses of since, which later refreshes are for, too
                restored.groups.tallies.setdefault(name, 0)
            self._groups, self._loans = restored.groups, restored.loans
            self._epoch += 1
            self._notify()
            return checkpoint

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

    def _move(self, cursor: Cursor) -> bool:
        now = self._cursors.get(cursor.name, Cursor(cursor.name))
        if (now.version, self._epoch) != (cursor.version, cursor.epoch):
            return False
        self._cursors[cursor.name] = replace(cursor, version=cursor.version + 1)
        return True

    async def claim(
        self, groups: Sequence[NewGroup], cursor: Cursor, seconds: float, epochs: object = None
    ) -> Leased | None:
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

    # Copies

    def state(self) -> BufferState:
        """All that the store holds."""
        with self._lock:
            return state_of(self._world(), self._next_uid)

    def snapshot(self, about: Mapping[str, str]) -> bytes:
        return pickle.dumps(self.state())

    def load_snapshot(self, snapshot: bytes, expected: Mapping[str, str]) -> None:
        """Load a snapshot of this class, or of a database."""
        is_file = snapshot.startswith(b"SQLite format 3")
        loaded = read_snapshot(snapshot, self.codec) if is_file else pickle.loads(snapshot)
        with self._lock:
            check_empty(len(self._groups.payloads), [checkpoint.step for checkpoint in self._checkpoints.all()])
            load(self._groups, loaded)
            self._next_uid = max(self._next_uid, loaded.next_uid)
            self._ticket_shift = self._next_uid - loaded.next_ticket
            self._cursors = {cursor.name: cursor for cursor in loaded.cursors}
            self._wakes.wake()

    async def save(
        self, folder: Path, about: Mapping[str, str], progress: OnProgress | None = None, *, whole: bool = True
    ) -> Path:
        file = snapshot_file(folder, make=True)
        await asyncio.to_thread(file.write_bytes, self.snapshot(about))
        return file

    async def resume(self, folder: Path, expected: Mapping[str, str], progress: OnProgress | None = None) -> None:
        self.load_snapshot(await asyncio.to_thread(snapshot_file(folder).read_bytes), expected)
