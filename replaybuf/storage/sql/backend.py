"""The SQL backend: one implementation for SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from replaybuf.checks import check_history
from replaybuf.codec.payload import Codec
from replaybuf.errors import ClosedError, StorageError
from replaybuf.progress import OnProgress
from replaybuf.query import Node
from replaybuf.rollouts.rollout import Status
from replaybuf.rules.circumstances import Circumstances, Wait
from replaybuf.rules.limits import Rules
from replaybuf.rules.policies import Order
from replaybuf.rules.tallies import LaneName, Tally
from replaybuf.storage.contract import PresenceStorage, StorageBackend
from replaybuf.storage.presence import GaveUp, Waiting
from replaybuf.storage.sql.copies.snapshot import copy_from, copy_to
from replaybuf.storage.sql.copies.state_dict import load_state, read_state
from replaybuf.storage.sql.engine.transaction import Scope, Transaction
from replaybuf.storage.sql.engine.urls import is_memory, parse_url, public_url
from replaybuf.storage.sql.inspection.circumstances import circumstances_of
from replaybuf.storage.sql.statements import leases as leasing
from replaybuf.storage.sql.statements import matching as selecting
from replaybuf.storage.sql.statements import put, refresh
from replaybuf.storage.sql.statements.checkpoints import drop_checkpoint, read_checkpoints
from replaybuf.storage.sql.statements.counts import read_fenced_tallies, read_tallies
from replaybuf.storage.sql.statements.cursors import move_cursor, put_behind, read_cursor
from replaybuf.storage.sql.statements.encoded import EncodedGroup, encode_group
from replaybuf.storage.sql.statements.leaving import told
from replaybuf.storage.sql.statements.rows import GroupRow, decode_leniently
from replaybuf.storage.sql.store import Options, Store
from replaybuf.storage.sql.tasks.claims import Claiming
from replaybuf.storage.sql.tasks.delivery import BRIEF_GROUPS, Drawing
from replaybuf.storage.sql.tasks.making import Making
from replaybuf.storage.values import Changes, Checkpoint, Cursor, Draw, Leased, NewGroup, Refresh, StorageItem
from replaybuf.worker_name import worker_name

S = TypeVar("S")
T = TypeVar("T")

#: The number of draws of a buffer that are kept for people by default.
HISTORY = 10_000

FIND_CHUNK_BYTES = 8 * 1024 * 1024
FIND_CHUNK_GROUPS = 256
_inherited: list[Store | None] = []


class SQLStorage(StorageBackend, PresenceStorage):
    """Groups in a SQLite file or a PostgreSQL database, shared by all processes that open the same URL.

    A database holds any number of independent buffers, each with its `name`.

    `durability="full"` makes SQLite wait for the disk at every commit, so that not even a power cut loses one; "normal"
    survives a crash of the process. PostgreSQL always waits. `lock_timeout` bounds the wait for a lock, in seconds;
    `reconnect_timeout` the time for which an operation goes on after losing its connection to PostgreSQL. A SQLite file
    on a network file system is refused at first use (NetworkFilesystemError), unless `allow_network_filesystem`. Of the
    last `history` draws of the buffer it is kept who drew what, in the view `batches` (None: of all). `worker` is the
    name of who restores, deletes, ... in the view `events`.
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
        history: int | None = HISTORY,
        worker: str | None = None,
    ) -> None:
        self.url = parse_url(url)
        self.durable = not is_memory(self.url)
        self.codec = codec
        self.rules = rules or Rules()
        self.name = name
        self.scope = Scope(name, self.rules)
        self._options = Options(
            url=self.url,
            codec=codec,
            durability=durability,
            lock_timeout=lock_timeout,
            reconnect_timeout=reconnect_timeout,
            read_only=read_only,
            allow_network_filesystem=allow_network_filesystem,
            history=check_history(history),
        )
        self._worker = worker
        self._closed = False
        self._opening = threading.Lock()
        self._open: Store | None = None

    def __repr__(self) -> str:
        name = "" if self.scope.buffer == "default" else f", name={self.scope.buffer!r}"
        return f"{type(self).__name__}({public_url(self.url)!r}{name})"

    @property
    def identity(self) -> str | None:
        """The number of the database; None until it was opened."""
        return None if self._open is None else self._open.scope.database

    # Opening and closing

    async def open(self) -> None:
        store = self._state()
        if not store.ready:
            await store.thread.run(store.prepare)

    async def close(self) -> None:
        with self._opening:
            store, self._closed = self._open, True
        if store is not None and store.thread.pid == os.getpid():
            # In a thread, and shielded: a cancelled close still commits waiting puts.
            try:
                closing = asyncio.get_running_loop().run_in_executor(None, store.close)
            except RuntimeError:  # the interpreter is shutting down: no new thread can be started
                store.close()
            else:
                await asyncio.shield(closing)

    def _state(self) -> Store:
        with self._opening:
            if self._closed:
                raise ClosedError
            if self._open is None or self._open.thread.pid != os.getpid():
                # Threads and connections don't survive a fork: the child opens its own. It keeps references to the
                # parent's: releasing them would disturb what it shares with the parent.
                if self._open is not None:
                    _inherited.append(self._open)
                    if not self.durable:
                        raise StorageError(
                            "this buffer is in the memory of the process that was forked; use a file or a server"
                        )
                self._open = Store(self._options, replace(self.scope, worker=worker_name(self._worker)))
                weakref.finalize(self, self._open.abandon).atexit = False
            return self._open

    async def _read(self, function: Callable[[Transaction], T], *, brief: bool = False, single: bool = False) -> T:
        store = await self._ready()
        return await store.thread.run(lambda: store.read(function, brief=brief, single=single))

    async def _write(self, function: Callable[[Transaction], T], *, alone: bool = False, brief: bool = False) -> T:
        store = await self._ready()
        return await store.thread.run(lambda: store.write(function, alone=alone, brief=brief))

    async def _ready(self) -> Store:
        store = self._state()
        if not store.ready:
            await store.thread.run(store.prepare)
        return store

    # Putting and taking

    async def put(self, group: NewGroup) -> int:
        store = self._open
        if store is None or not store.ready or self._closed or store.thread.pid != os.getpid():
            store = await self._ready()
        return await store.commits.put(group)

    async def drop(self, group: NewGroup) -> None:
        rows = await self._write(lambda tx: put.drop(tx, group))
        await self._tell(group.dropped, rows)

    async def refuse(self, group: NewGroup) -> None:
        await self._write(lambda tx: put.refuse(tx, group))

    async def take(self, draw: Draw) -> dict[str, list[StorageItem]] | None:
        store = await self._ready()
        drawing = Drawing(store, self.codec, draw)
        taken = await store.thread.run(drawing.run, undo=drawing.undo)
        return None if taken is None else taken.items

    async def lease(self, draw: Draw, seconds: float) -> Leased | None:
        store = await self._ready()
        drawing = Drawing(store, self.codec, draw, seconds)
        taken = await store.thread.run(drawing.run, undo=drawing.undo)
        return None if taken is None else taken.lease()

    async def acknowledge(self, lease: Leased, uids: Sequence[int]) -> None:
        await self._write(lambda tx: leasing.acknowledge(tx, lease, uids), brief=len(uids) <= BRIEF_GROUPS)

    async def give_back(self, lease: Leased, uids: Sequence[int], *, counts: bool, reason: str = "") -> int:
        store, why, brief = await self._ready(), reason if counts else None, len(uids) <= BRIEF_GROUPS

        async def work() -> int:
            given_back = await store.write(lambda tx: leasing.give_back(tx, lease, uids, why), brief=brief)
            for holder, number in given_back.items() if counts else ():
                store.presence.of(holder).failures += number
            return given_back.total()

        return await store.thread.run(work)

    async def extend(self, lease: Leased, uids: Sequence[int], seconds: float) -> float:
        brief = len(uids) <= BRIEF_GROUPS
        return await self._write(lambda tx: leasing.extend(tx, lease, uids, seconds), brief=brief)

    # Reading

    async def find(self, query: Node, *, order: Order, limit: int | None = None) -> AsyncIterator[StorageItem]:
        found = await self._read(lambda tx: selecting.find_uids(tx, query, order, limit))
        for uids in _chunks(found):
            for item in await self._read_items(uids, query):
                yield item

    async def _read_items(self, uids: list[int], query: Node) -> list[StorageItem]:
        store = await self._ready()

        async def work() -> list[StorageItem]:
            rows = await store.read(lambda tx: selecting.read_groups(tx, uids, query))
            return await store.compute(self._decode_leniently, rows)

        return await store.thread.run(work)

    def _decode_leniently(self, rows: Sequence[GroupRow]) -> list[StorageItem]:
        return decode_leniently(rows, self.codec)

    async def _tell(self, dropped: list[StorageItem] | None, rows: Sequence[GroupRow]) -> None:
        """Add groups that have left to the caller's list, if there is one."""
        if dropped is not None and rows:
            store = await self._ready()
            dropped += await store.thread.run(lambda: store.compute(lambda left: told(left, self.codec), rows))

    async def count(self, query: Node, *, at_most: int | None = None) -> int:
        return await self._read(lambda tx: selecting.count_groups(tx, query, at_most))

    async def tallies(self) -> dict[tuple[str, Status, Tally], int]:
        return await self._read(read_tallies, brief=True, single=True)

    async def histogram(self, field: str) -> dict[LaneName, dict[int, int]]:
        return await self._read(lambda tx: selecting.read_histogram(tx, field))

    def __len__(self) -> int:
        tallies = self._blocking(read_tallies)
        return sum(n for (_, status, name), n in tallies.items() if name == Tally.SIZE and status != Status.ARCHIVED)

    # Changing

    async def delete(self, query: Node) -> int:
        return await self._write(lambda tx: selecting.delete_groups(tx, query))

    async def update(self, query: Node, changes: Changes) -> int:
        return await self._write(lambda tx: selecting.update_groups(tx, query, changes))

    async def update_priorities(self, priorities: Mapping[int, float]) -> int:
        return await self._write(lambda tx: selecting.update_priorities(tx, priorities))

    async def refresh(self, refresh_: Refresh) -> dict[str, int]:
        counts, rows = await self._write(lambda tx: refresh.refresh_staleness(tx, refresh_), alone=True)
        await self._tell(refresh_.dropped, rows)
        return counts

    # Checkpoints and prompts

    async def check_fence(self) -> None:
        store = await self._ready()
        await store.thread.run(store.check_fence)

    async def fenced_tallies(self) -> dict[tuple[str, Status, Tally], int]:
        store = await self._ready()
        return await store.thread.run(lambda: store.read_fenced(read_fenced_tallies))

    async def checkpoint(self, step: int, keep: int | None) -> Checkpoint:
        store = await self._ready()
        making = Making(store, step, keep)
        try:
            return await store.thread.run(lambda: store.checkpoint(making))
        finally:
            making.stop()  # when it was cancelled: later operations wait for its end

    async def restore(self, step: int, *, keep_new: bool) -> Checkpoint:
        store = await self._ready()
        return await store.thread.run(lambda: store.restore(step, keep_new=keep_new))

    async def checkpoints(self) -> list[Checkpoint]:
        return await self._read(read_checkpoints)

    async def drop_checkpoint(self, step: int) -> None:
        await self._write(lambda tx: drop_checkpoint(tx, step))

    async def cursor(self, name: str) -> Cursor:
        return await self._read(lambda tx: read_cursor(tx, name), brief=True)

    async def move_cursor(self, cursor: Cursor) -> bool:
        return await self._write(lambda tx: move_cursor(tx, cursor), brief=True)

    async def claim(self, groups: Sequence[NewGroup], cursor: Cursor, seconds: float) -> Leased | None:
        store = await self._ready()
        claiming = Claiming(store, self.codec, groups, cursor, seconds)
        taken = await store.thread.run(claiming.run, undo=claiming.undo)
        return None if taken is None else taken.lease()

    async def put_behind(self, groups: Sequence[NewGroup], cursor: Cursor) -> bool:
        store = await self._ready()

        async def work() -> bool:
            encoded = await store.compute(self._encode_all, groups)
            is_put = await store.write(lambda tx: put_behind(tx, encoded, cursor))
            if is_put:
                store.presence.count_puts(encoded)
            return is_put

        return await store.thread.run(work)

    def _encode_all(self, groups: Sequence[NewGroup]) -> list[EncodedGroup]:
        return [encode_group(self.codec, one) for one in groups]

    # Waiting

    def version(self) -> int:
        return self._state().watch.version()

    async def changed(self, timeout: float, since: int) -> None:
        store = await self._ready()
        await store.watch.wait(timeout, since)

    # Presence

    def announce(self, waiting: Waiting) -> None:
        store = self._open
        if store is not None and store.thread.pid == os.getpid():
            store.presence.announce(waiting)

    def withdraw(self, waiting: Waiting) -> None:
        store = self._open
        if store is not None:
            store.presence.withdraw(waiting)

    def give_up(self, gave_up: GaveUp) -> None:
        store = self._open
        if store is not None and store.thread.pid == os.getpid():
            store.presence.give_up(gave_up)

    async def circumstances(self, wait: Wait) -> Circumstances:
        return await self._read(lambda tx: circumstances_of(tx, wait))

    # Snapshots

    def state_dict(self) -> dict[str, Any]:
        return self._blocking(lambda tx: read_state(tx, self.codec))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._blocking(lambda tx: load_state(tx, self.codec, state), write=True)

    async def save(self, path: str, about: Mapping[str, str], progress: OnProgress | None = None) -> None:
        store = await self._ready()
        await store.thread.run(lambda: copy_to(store.engine, store.scope, path, about, progress))

    async def resume(self, path: str, expected: Mapping[str, str], progress: OnProgress | None = None) -> None:
        store = await self._ready()

        async def work() -> None:
            await copy_from(store.engine, store.scope, path, expected, progress)
            store.watch.committed()

        await store.thread.run(work)

    def _blocking(self, function: Callable[[Transaction], T], *, write: bool = False) -> T:
        store = self._state()

        async def work() -> T:
            await store.prepare()
            if not write:
                return await store.read(function)
            result = await store.engine.write(function, store.scope)
            store.watch.committed()
            return result

        return store.thread.run_blocking(work, self._options.lock_timeout + 600)


def _chunks(found: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Return the uids in chunks whose payloads fit in memory together."""
    chunks: list[list[int]] = []
    size = FIND_CHUNK_BYTES + 1
    for uid, nbytes in found:
        if size + nbytes > FIND_CHUNK_BYTES or len(chunks[-1]) >= FIND_CHUNK_GROUPS:
            chunks.append([])
            size = 0
        chunks[-1].append(uid)
        size += nbytes
    return chunks
