"""The SQL backend: one implementation for SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, TypeVar

from sqlalchemy import Connection

from replaybuf.codec.payload import Codec
from replaybuf.errors import ClosedError, DecodeError, StorageError
from replaybuf.progress import OnProgress
from replaybuf.query import Node
from replaybuf.rollouts.rollout import Status
from replaybuf.rules.limits import Rules
from replaybuf.rules.policies import Order
from replaybuf.rules.tallies import LaneName, Tally
from replaybuf.storage.contract import StorageBackend
from replaybuf.storage.sql.copies.snapshot import copy_from, copy_to
from replaybuf.storage.sql.copies.state_dict import load_state, read_state
from replaybuf.storage.sql.engine.sqlite import is_memory
from replaybuf.storage.sql.engine.urls import parse_url, public_url
from replaybuf.storage.sql.statements import leases as leasing
from replaybuf.storage.sql.statements import matching as selecting
from replaybuf.storage.sql.statements import put, refresh
from replaybuf.storage.sql.statements.checkpoints import drop_checkpoint, make_checkpoint, read_checkpoints
from replaybuf.storage.sql.statements.counts import read_tallies
from replaybuf.storage.sql.statements.cursors import move_cursor, read_cursor
from replaybuf.storage.sql.statements.fence import check_fence
from replaybuf.storage.sql.statements.lanes import Scope
from replaybuf.storage.sql.statements.rows import GroupRow
from replaybuf.storage.sql.store import Opened, Options
from replaybuf.storage.sql.tasks.claims import Claiming
from replaybuf.storage.sql.tasks.delivery import Drawing
from replaybuf.storage.values import Changes, Checkpoint, Cursor, Draw, Leased, NewGroup, Refresh, StorageItem

S = TypeVar("S")
T = TypeVar("T")

FIND_CHUNK_BYTES = 8 * 1024 * 1024
FIND_CHUNK_GROUPS = 256
_inherited: list[Opened | None] = []


class SQLStorage(StorageBackend):
    """Groups in a SQLite file or a PostgreSQL database, shared with whoever opens the same URL.

    A database holds any number of buffers, each under its `name`, that know nothing of each other.

    `durability="full"` makes SQLite wait for the disk at every commit, so that not even a power cut loses one; "normal"
    survives a crash of the process. PostgreSQL always waits. `lock_timeout` bounds the wait for a lock, in seconds;
    `reconnect_timeout` for how long an operation goes on that lost its connection to PostgreSQL.
    A SQLite file on a network file system is refused at first use (NetworkFilesystemError), unless
    `allow_network_filesystem`.
    """

    def __init__(
        self,
        url: str,
        codec: Codec,
        rules: Rules | None = None,
        *,
        name: str = "default",
        durability: str = "normal",
        lock_timeout: float = 30.0,
        reconnect_timeout: float = 60.0,
        read_only: bool = False,
        allow_network_filesystem: bool = False,
    ) -> None:
        self.url = parse_url(url)
        self.durable = not is_memory(self.url)
        self.codec = codec
        self.rules = rules or Rules()
        self.scope = Scope(name, self.rules)
        self._options = Options(
            self.url, codec, durability, lock_timeout, reconnect_timeout, read_only, allow_network_filesystem
        )
        self._closed = False
        self._opening = threading.Lock()
        self._open: Opened | None = None

    def __repr__(self) -> str:
        name = "" if self.scope.buffer == "default" else f", name={self.scope.buffer!r}"
        return f"{type(self).__name__}({public_url(self.url)!r}{name})"

    # Opening and closing

    async def open(self) -> None:
        state = self._state()
        if not state.ready:
            await state.thread.run(state.prepare)

    async def close(self) -> None:
        with self._opening:
            state, self._closed = self._open, True
        if state is not None and state.thread.pid == os.getpid():
            # In a thread, and shielded: a cancelled close still commits what waits.
            try:
                closing = asyncio.get_running_loop().run_in_executor(None, state.close)
            except RuntimeError:  # the interpreter is being shut down: no thread can be had any more
                state.close()
            else:
                await asyncio.shield(closing)

    def _state(self) -> Opened:
        with self._opening:
            if self._closed:
                raise ClosedError
            if self._open is None or self._open.thread.pid != os.getpid():
                # Threads and connections don't survive a fork; the child opens its own, and keeps those of the parent
                # as they are: to let go of them would disturb what they share with the parent.
                if self._open is not None:
                    _inherited.append(self._open)
                    if not self.durable:
                        raise StorageError(
                            "this buffer is in the memory of the process that was forked; use a file or a server"
                        )
                self._open = Opened(self._options, self.scope)
                weakref.finalize(self, self._open.abandon).atexit = False
            return self._open

    async def _read(self, function: Callable[[Connection], T]) -> T:
        state = await self._ready()
        return await state.thread.run(lambda: state.database.read(function))

    async def _write(self, function: Callable[[Connection, Scope], T], *, alone: bool = False) -> T:
        state = await self._ready()
        return await state.thread.run(lambda: state.write(function, alone=alone))

    async def _ready(self) -> Opened:
        state = self._state()
        if not state.ready:
            await state.thread.run(state.prepare)
        return state

    # Putting and taking

    async def put(self, group: NewGroup) -> int:
        state = self._open
        if state is None or not state.ready or self._closed or state.thread.pid != os.getpid():
            state = await self._ready()
        return await state.commits.put(group)

    async def drop(self, group: NewGroup) -> None:
        await self._write(lambda connection, scope: put.drop(connection, scope, group, time.time()))

    async def refuse(self, group: NewGroup) -> None:
        await self._write(lambda connection, scope: put.refuse(connection, scope, group))

    async def take(self, draw: Draw) -> dict[str, list[StorageItem]] | None:
        state = await self._ready()
        drawing = Drawing(state, self.codec, draw)
        taken = await state.thread.run(drawing.run, undo=drawing.undo)
        return None if taken is None else taken.items

    async def lease(self, draw: Draw, seconds: float) -> Leased | None:
        state = await self._ready()
        drawing = Drawing(state, self.codec, draw, seconds)
        taken = await state.thread.run(drawing.run, undo=drawing.undo)
        return None if taken is None else taken.lease()

    async def acknowledge(self, lease: Leased, uids: Sequence[int]) -> None:
        await self._write(lambda connection, scope: leasing.acknowledge(connection, scope, lease, uids, time.time()))

    async def give_back(self, lease: Leased, uids: Sequence[int], *, counts: bool, reason: str = "") -> int:
        return await self._write(
            lambda connection, scope: leasing.give_back(connection, scope, lease, uids, counts=counts, reason=reason)
        )

    async def extend(self, lease: Leased, uids: Sequence[int], seconds: float) -> float:
        return await self._write(lambda connection, scope: leasing.extend(connection, scope, lease, uids, seconds))

    # Reading

    async def find(self, query: Node, *, order: Order, limit: int | None = None) -> AsyncIterator[StorageItem]:
        found = await self._read(lambda connection: selecting.find_uids(connection, self.scope, query, order, limit))
        for uids in _chunks(found):
            for item in await self._read_items(uids, query):
                yield item

    async def _read_items(self, uids: list[int], query: Node) -> list[StorageItem]:
        state = await self._ready()

        async def work() -> list[StorageItem]:
            rows = await state.database.read(
                lambda connection: selecting.read_groups(connection, self.scope, uids, query)
            )
            return await state.compute(self._decode_leniently, rows)

        return await state.thread.run(work)

    def _decode_leniently(self, rows: list[GroupRow]) -> list[StorageItem]:
        items = []
        for row in rows:
            try:
                items.append(row.decode(self.codec))
            except DecodeError as error:
                items.append(row.item([], str(error)))
        return items

    async def count(self, query: Node, *, at_most: int | None = None) -> int:
        return await self._read(lambda connection: selecting.count_groups(connection, self.scope, query, at_most))

    async def tallies(self) -> dict[tuple[str, Status, Tally], int]:
        return await self._read(lambda connection: read_tallies(connection, self.scope))

    async def histogram(self, field: str) -> dict[LaneName, dict[int, int]]:
        return await self._read(lambda connection: selecting.read_histogram(connection, self.scope, field))

    def __len__(self) -> int:
        tallies = self._blocking(lambda connection: read_tallies(connection, self.scope))
        return sum(n for (_, status, name), n in tallies.items() if name == Tally.SIZE and status != Status.ARCHIVED)

    # Changing

    async def delete(self, query: Node) -> int:
        return await self._write(
            lambda connection, scope: selecting.delete_groups(connection, scope, query, time.time())
        )

    async def update(self, query: Node, changes: Changes) -> int:
        return await self._write(
            lambda connection, scope: selecting.update_groups(connection, scope, query, changes, time.time())
        )

    async def update_priorities(self, priorities: Mapping[int, float]) -> int:
        return await self._write(lambda connection, scope: selecting.update_priorities(connection, scope, priorities))

    async def refresh(self, refresh_: Refresh) -> dict[str, int]:
        return await self._write(
            lambda connection, scope: refresh.refresh_staleness(connection, scope, refresh_, time.time()), alone=True
        )

    # Checkpoints and prompts

    async def check_fence(self) -> None:
        state = await self._ready()

        async def work(scope: Scope) -> None:
            await state.database.read(lambda connection: check_fence(connection, scope))

        await state.thread.run(lambda: state.in_epoch(work))

    async def checkpoint(self, step: int, keep: int | None) -> Checkpoint:
        state = await self._ready()

        async def work(scope: Scope) -> Checkpoint:
            return await make_checkpoint(state.database, scope, step, keep)

        return await state.thread.run(lambda: state.in_epoch(work))

    async def restore(self, step: int, *, keep_new: bool) -> Checkpoint:
        state = await self._ready()
        return await state.thread.run(lambda: state.restore(step, keep_new=keep_new))

    async def checkpoints(self) -> list[Checkpoint]:
        return await self._read(lambda connection: read_checkpoints(connection, self.scope))

    async def drop_checkpoint(self, step: int) -> None:
        await self._write(lambda connection, scope: drop_checkpoint(connection, scope, step))

    async def cursor(self, name: str) -> Cursor:
        return await self._read(lambda connection: read_cursor(connection, self.scope, name))

    async def move_cursor(self, cursor: Cursor) -> bool:
        return await self._write(lambda connection, scope: move_cursor(connection, scope, cursor))

    async def claim(self, groups: Sequence[NewGroup], cursor: Cursor, seconds: float) -> Leased | None:
        state = await self._ready()
        claiming = Claiming(state, self.codec, groups, cursor, seconds)
        taken = await state.thread.run(claiming.run, undo=claiming.undo)
        return None if taken is None else taken.lease()

    # Waiting

    def version(self) -> int:
        return self._state().watch.version()

    async def changed(self, timeout: float, since: int) -> None:
        state = await self._ready()
        await state.watch.wait(timeout, since)

    # Snapshots

    def state_dict(self) -> dict[str, Any]:
        return self._blocking(lambda connection: read_state(connection, self.scope, self.codec))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        opened = self._state()
        self._blocking(lambda connection: load_state(connection, opened.scope, self.codec, state), write=True)

    async def save(self, path: str, about: Mapping[str, str], progress: OnProgress | None = None) -> None:
        state = await self._ready()
        await state.thread.run(lambda: copy_to(state.database, self.scope, path, about, progress))

    async def resume(self, path: str, expected: Mapping[str, str], progress: OnProgress | None = None) -> None:
        state = await self._ready()

        async def work() -> None:
            await copy_from(state.database, state.scope, path, expected, progress)
            state.watch.committed()

        await state.thread.run(work)

    def _blocking(self, function: Callable[[Connection], T], *, write: bool = False) -> T:
        state = self._state()

        async def work() -> T:
            await state.prepare()
            return await (state.database.write(function) if write else state.database.read(function))

        return state.thread.run_blocking(work, self._options.lock_timeout + 600)


def _chunks(found: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Uids in chunks whose payloads fit in memory together."""
    chunks: list[list[int]] = []
    size = FIND_CHUNK_BYTES + 1
    for uid, nbytes in found:
        if size + nbytes > FIND_CHUNK_BYTES or len(chunks[-1]) >= FIND_CHUNK_GROUPS:
            chunks.append([])
            size = 0
        chunks[-1].append(uid)
        size += nbytes
    return chunks
