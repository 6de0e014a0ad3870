"""The life cycle of a buffer in a database: opening, forks, closing, and passing operations to its database thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from typing_extensions import TypeVarTuple, Unpack

from replaybuf.common.checks import check_most
from replaybuf.common.forks import ProcessLock
from replaybuf.common.passwords import PasswordFunction
from replaybuf.common.worker_name import check_worker, worker_name
from replaybuf.errors import ClosedError, ConfigError, StorageError
from replaybuf.rules.limits import Rules
from replaybuf.storage.places.owners import IN_DATABASE, PAYLOAD_THRESHOLD, parse_place
from replaybuf.storage.sql.engine import open_database
from replaybuf.storage.sql.engine.database import Access, Database
from replaybuf.storage.sql.engine.sqlite_files import refuse_network_filesystem
from replaybuf.storage.sql.engine.thread import DatabaseThread
from replaybuf.storage.sql.engine.transaction import Scope, Transaction
from replaybuf.storage.sql.engine.urls import at_absolute_path, is_memory, parse_url, public_url
from replaybuf.storage.sql.schema import check_schema, no_tables_error
from replaybuf.storage.sql.schema.create import create_schema
from replaybuf.storage.sql.statements.fence import joined
from replaybuf.storage.sql.tasks.commit_watch import Watch
from replaybuf.storage.sql.tasks.delivery import Draws
from replaybuf.storage.sql.tasks.filling import Filling
from replaybuf.storage.sql.tasks.group_commit import GroupCommit
from replaybuf.storage.sql.tasks.heartbeats import Presence
from replaybuf.storage.sql.tasks.payload_files import PayloadFiles
from replaybuf.storage.sql.tasks.sweeper import Sweeper
from replaybuf.storage.sql.tasks.transactions import Encoding, Transactions
from replaybuf.storage.values import HISTORY, LOCK_SECONDS, RECONNECT_SECONDS
from replaybuf.values.codec.payload import Codec

_logger = logging.getLogger("replaybuf.thread")

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_CLOSE_SECONDS = 60
#: The time for background work to end when a buffer is closed, whose statements may be at a server that stands still.
_ENDING_SECONDS = 20
_BLOCKING_SECONDS = 600
# State inherited at forks: never released here, since its connections and files are shared with the parent process.
_inherited_states: list[dict[str, Any]] = []


class Store:
    """The life of a buffer in a database, shared by all processes that open the same URL.

    A database holds any number of independent buffers, each with its `name`. The connection is made at first use.
    `durable` says whether groups outlive the process, `codec` encodes and decodes payloads, `rules` are the sampler,
    the remover and the limits.

    `durability="full"` makes SQLite fsync the WAL at every commit, so that not even a power cut loses one; "normal"
    survives a crash of the process. PostgreSQL is always durable. `lock_timeout` bounds waits for a lock, in seconds;
    `reconnect_timeout` the retries of an operation after a lost connection to PostgreSQL. A SQLite file on a network
    file system is refused at first use (StorageError), unless `allow_network_filesystem`. The view `batches`
    keeps the last `history` draws of the buffer (None: all). `worker` is the worker name recorded in the view `events`
    (restores, deletions, ...). Arrays of payloads, from `payload_threshold` bytes on, are kept in the place `payloads`
    (`replaybuf.storage.places.owners`). `password` is called before each connection and returns PostgreSQL's password.
    Without `maintains`, other processes end leases and remove what is beyond the limits: a command doesn't know them.
    """

    #: Returns the database's URL from a user's. Raises ConfigError, and MissingDriverError.
    check_url = staticmethod(parse_url)

    def __init__(
        self,
        url: str,
        codec: Codec,
        rules: Rules | None = None,
        *,
        name: str = "default",
        durability: str = "normal",
        lock_timeout: float = LOCK_SECONDS,
        reconnect_timeout: float = RECONNECT_SECONDS,
        read_only: bool = False,
        password: PasswordFunction | None = None,
        allow_network_filesystem: bool = False,
        history: int | None = HISTORY,
        worker: str | None = None,
        payloads: str = IN_DATABASE,
        payload_threshold: int = PAYLOAD_THRESHOLD,
        maintains: bool = True,
    ) -> None:
        self.url = at_absolute_path(parse_url(url))
        if password is not None and (self.url.get_backend_name() == "sqlite" or self.url.password):
            clause = "the url has one, too: take one of them away" if self.url.password else "a SQLite file has none"
            raise ConfigError(f"password= is for PostgreSQL: {clause}")
        self.durable = not is_memory(self.url)
        self._place = parse_place(payloads)
        if self._place is not None and not self.durable:
            raise ConfigError(
                f"payloads={payloads!r} needs a database that lasts: name a file or a server in the url, or leave "
                "payloads out"
            )
        self._payload_threshold = payload_threshold
        self.codec = codec
        self.rules = rules or Rules()
        self.name = name
        self._access = Access(self.url, durability, lock_timeout, reconnect_timeout, read_only, True, password)
        self._on_any_filesystem = allow_network_filesystem or read_only
        self._history = check_most(history, "history", 0)
        self._maintains = maintains
        self._worker = None if worker is None else check_worker(worker)
        self._made_in_pid = os.getpid()
        self._lock = ProcessLock()
        self._pid: int | None = None  # of the process that the thread and the tasks belong to
        self._is_prepared = False
        self.closed = False

    def __repr__(self) -> str:
        name = "" if self.name == "default" else f", name={self.name!r}"
        return f"{type(self).__name__}({public_url(self.url)!r}{name})"

    @property
    def identity(self) -> str | None:
        """The unique id of the database, recorded in leases; None until it was opened."""
        return None if self._pid is None else self.transactions.scope.database

    @property
    def worker(self) -> str:
        """The worker name recorded with puts and draws: that of `working_as`, else the config's, else "host:pid"."""
        return worker_name(self._worker)

    def check_open(self) -> None:
        """Raise ClosedError, and StorageError for a buffer in memory that was built before a fork."""
        if self.closed:
            raise ClosedError
        if not self.durable and os.getpid() != self._made_in_pid:
            raise StorageError(reason="forked")

    # Opening

    async def open(self) -> None:
        """Connect, and create a missing schema; every operation calls this first. Raises ClosedError."""
        if self._is_prepared and self._pid == os.getpid() and not self.closed:
            return
        self.begin()
        if not self._is_prepared:
            await self.thread.run(self._prepare)

    def begin(self) -> None:
        """Start the database thread and the tasks, once in each process. Raises ClosedError."""
        with self._lock:
            self.check_open()
            if self._pid == os.getpid():
                return
            if hasattr(self, "engine"):  # threads and connections don't survive a fork: the child opens its own
                _inherited_states.append(dict(self.__dict__))
            self._begin()

    def _begin(self) -> None:
        scope = Scope(self.name, self.rules, worker=self.worker)
        self.engine = open_database(self._access)
        self.thread = DatabaseThread("replaybuf-database")
        self.watch = Watch(self.thread, self.engine)
        self.transactions = Transactions(self.engine, self.thread, self.watch, scope)
        self.presence = Presence(self.transactions)
        self.files = PayloadFiles(self.engine, self.codec, self._place, self._payload_threshold)
        self.encoding = Encoding(self.codec, self.transactions, self.files)
        self.draws = Draws(self.transactions, self.encoding, self.presence, self._history)
        self.commits = GroupCommit(self.transactions, self.encoding, self.presence)
        self.filling = Filling(self.transactions, self.encoding, self.commits, self.presence)
        self.sweeper = Sweeper(
            self.transactions, self._history, self.presence, self.files, self.filling, maintains=self._maintains
        )
        self._prepare_lock = asyncio.Lock()
        self._pid, self._is_prepared = os.getpid(), False
        # A garbage-collected buffer is closed by its finalizer. So neither `_Closer` nor a task may refer to it, nor a
        # function that runs in a transaction, since the driver's thread keeps a reference to the last one.
        steps = [self.commits.close, self.sweeper.stop, self.presence.end, self.watch.stop, self.files.close]
        if self._access.read_only:
            steps.remove(self.presence.end)
        self._closer = end = _Closer(self.thread, self.engine, self.transactions, steps)
        weakref.finalize(self, end.abandon).atexit = False

    @property
    def is_running(self) -> bool:
        """Whether the thread and the tasks run in this process."""
        return self._pid == os.getpid()

    async def _prepare(self) -> None:
        """Check the schema, or create it in a new database (database's thread)."""
        async with self._prepare_lock:
            if self._is_prepared:
                return
            engine, transactions = self.engine, self.transactions
            if engine.path is not None and not self._on_any_filesystem:
                refuse_network_filesystem(engine.path)
            scope = await self._join()
            if scope is None:
                if self._access.read_only:
                    raise no_tables_error(engine.where)
                await engine.write(partial(create_schema, where=engine.where))
                scope = await engine.read(joined, transactions.scope)
            transactions.scope = scope
            engine.opened = True
            await self.files.prepare(transactions.scope, writes=not self._access.read_only)
            if not self._access.read_only:
                self.sweeper.start()
            self._is_prepared = True

    async def _join(self) -> Scope | None:
        """Return the scope of the buffer's users, None without a schema. A missing SQLite file isn't created."""
        engine = self.engine
        if engine.path is not None and not self._access.read_only and not os.path.exists(engine.path):  # noqa: ASYNC240
            return None
        return await engine.read(
            lambda tx: joined(tx) if check_schema(tx, engine.where) else None, self.transactions.scope
        )

    # Operations

    async def _run(
        self, work: Callable[[], Awaitable[T]], *, undo: Callable[[Any], Awaitable[object]] | None = None
    ) -> T:
        """Run `work()` in the database's thread, and `undo(result)` if the caller was cancelled meanwhile."""
        await self.open()
        return await self.thread.run(work, undo=undo)

    async def _read(self, function: Callable[[Transaction, Unpack[Ts]], T], *args: *Ts, single: bool = False) -> T:
        """Return `function(tx, *args)` of a read transaction."""
        return await self._run(lambda: self.transactions.read(lambda tx: function(tx, *args), single=single))

    async def _write(
        self,
        function: Callable[[Transaction, Unpack[Ts]], T],
        *args: *Ts,
        alone: bool = False,
        brief: bool = False,
        wakes: bool = True,
    ) -> T:
        """Return `function(tx, *args)` of a write transaction behind the fence; options are `Transactions.write`'s."""

        async def work() -> T:
            write = self.transactions.write
            return await write(lambda tx: function(tx, *args), alone=alone, brief=brief, wakes=wakes)

        return await self._run(work)

    def _run_blocking(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work()` in the database's thread, blocking the calling one."""
        self.begin()

        async def prepared() -> T:
            await self._prepare()
            return await work()

        return self.thread.run_blocking(prepared, self._access.lock_timeout + _BLOCKING_SECONDS)

    def run_in_background(self, work: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
        """Run a coroutine in the database's thread, without waiting; return a function that cancels it.

        It ends with this process, or when the buffer is closed; a forked process doesn't go on with it.
        """
        self.begin()
        thread, begun = self.thread, list[asyncio.Task[None]]()
        thread.post(lambda: begun.append(thread.loop.create_task(work())))

        def stop() -> None:
            if thread.pid == os.getpid():
                with contextlib.suppress(ClosedError):
                    thread.post(lambda: begun[0].cancel())

        return stop

    # Closing

    async def close(self) -> None:
        """Commit pending puts and release all resources.

        Callers that wait in `changed` are woken; the buffer then raises ClosedError in all waits. In a forked process
        the connections of its parent stay open.
        """
        with self._lock:
            self.closed = True
        if self.is_running:
            # In a thread, and shielded: a cancelled close still commits pending puts.
            try:
                closing = asyncio.get_running_loop().run_in_executor(None, self._closer.close)
            except RuntimeError:  # the interpreter is shutting down: no new thread can be started
                self._closer.close()
            else:
                await asyncio.shield(closing)


@dataclass(slots=True)
class _Closer:
    """Shuts down the thread and the tasks of a buffer that was closed or garbage-collected, in these steps.

    The first commits what is pending, the others end background work.
    """

    _thread: DatabaseThread
    _engine: Database
    _transactions: Transactions
    _steps: Sequence[Callable[[], Awaitable[object]]]
    _closing_lock: threading.Lock = field(default_factory=threading.Lock)
    _closed: bool = False

    def close(self) -> None:
        """Commit pending puts and release all resources; blocks. A second call waits for the first."""
        with self._closing_lock:
            if self._closed:
                return
            self._closed = True
            try:
                with contextlib.suppress(ClosedError):
                    self._thread.post(self._engine.cut_retries)
                self._thread.close(self._shut_down, timeout=_CLOSE_SECONDS)
            finally:
                self._transactions.end_computing()

    def abandon(self) -> None:
        """Close in the background (finalizer); the process doesn't end before that."""
        if self._thread.pid == os.getpid() and not self._closed:
            with contextlib.suppress(RuntimeError):  # the interpreter is shutting down: no new thread can be started
                threading.Thread(target=self._close_dropped, name="replaybuf-close").start()

    def _close_dropped(self) -> None:
        try:
            self.close()
        except Exception as error:
            _logger.warning("closing a store that was dropped failed: %s", error)

    async def _shut_down(self) -> None:
        commit_pending, *others = self._steps
        try:
            await commit_pending()
            try:
                async with asyncio.timeout(_ENDING_SECONDS):
                    for step in others:
                        await step()
            except TimeoutError:
                _logger.warning("background work was given up at closing: does %s answer?", self._engine.where)
        finally:
            await self._engine.dispose()
