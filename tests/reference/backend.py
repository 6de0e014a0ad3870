"""A model of the store: dicts, scanned and sorted at every draw, and no SQL.

Random operations must leave a database indistinguishable from it (`tests/side_by_side`), draws included
(`tests/storage/test_same_draws.py`). What happens to a group is decided by `replaybuf.rules`, as in SQL.
"""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import AsyncMock, MagicMock

from replaybuf.rules.circumstances import Circumstances
from replaybuf.rules.transitions import Tally
from replaybuf.storage.sql.copies.snapshot_file import snapshot_file
from replaybuf.storage.sql.statements.checkpoints import check_empty
from replaybuf.storage.values import Checkpoint, Cursor, Leased, NewGroup
from replaybuf.values.rollouts.rollout import Status
from tests.reference.drawing import Drawing, Drawn
from tests.reference.matching import Matching
from tests.reference.putting import Putting
from tests.reference.snapshots import BufferState, read_snapshot
from tests.reference.world import World, load, state_of


class Reference(Putting, Drawing, Matching):
    """Groups in dicts of this process. Nobody asks it later who has waited."""

    presence, flush = MagicMock(), AsyncMock()

    def run_in_background(self, work: object) -> Callable[[], None]:
        """Do nothing: leases are renewed in the database's thread, and those of the model aren't."""
        return lambda: None

    async def fenced_tallies(self) -> dict[tuple[str, Status, Tally], int]:
        return await self.tallies()

    async def circumstances(self) -> Circumstances:
        return Circumstances(time.time(), await self.tallies())

    # Checkpoints

    async def checkpoint(self, step: int, keep: int | None) -> Checkpoint:
        return self._checkpoints.make(step, self._world(), keep)

    async def restore(self, step: int) -> Checkpoint:
        checkpoint, restored = self._checkpoints.get(step)
        restored.loans.return_all()
        self._cursors = restored.cursors
        self._ticket_shift = self._next_uid - restored.next_ticket
        for name in self._groups.tallies:  # of tasks and statuses of since, which later refreshes are for, too
            restored.groups.tallies.setdefault(name, 0)
        self._groups, self._loans = restored.groups, restored.loans
        self._epoch += 1
        return checkpoint

    def _world(self) -> World:
        return World(self._groups, self._loans, self._next_uid - self._ticket_shift, self._cursors)

    async def checkpoints(self) -> list[Checkpoint]:
        return self._checkpoints.all()

    async def drop_checkpoint(self, step: int) -> None:
        self._checkpoints.drop(step)

    # Prompts

    async def cursor(self, name: str) -> Cursor:
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
        if not self._move(cursor):
            return None
        claimed: Drawn = {}
        for group in groups:
            claimed.setdefault(group.task_name, []).append(self._decode(self._add(group)))
        return self._lend(claimed)

    # Copies

    def state(self) -> BufferState:
        """All that the store holds."""
        return state_of(self._world(), self._next_uid)

    async def save(self, folder: Path, *_: object, **__: object) -> Path:
        file = snapshot_file(folder, make=True)
        await asyncio.to_thread(file.write_bytes, pickle.dumps(self.state()))
        return file

    async def resume(self, folder: Path, *_: object, **__: object) -> None:
        """Load a snapshot of this class, or of a database."""
        content = await asyncio.to_thread(snapshot_file(folder).read_bytes)
        is_file = content.startswith(b"SQLite format 3")
        loaded = read_snapshot(content, self.codec) if is_file else pickle.loads(content)
        check_empty(len(self._groups.payloads), [checkpoint.step for checkpoint in self._checkpoints.all()])
        load(self._groups, loaded)
        self._next_uid = max(self._next_uid, loaded.next_uid)
        self._ticket_shift = self._next_uid - loaded.next_ticket
        self._cursors = {cursor.name: cursor for cursor in loaded.cursors}
