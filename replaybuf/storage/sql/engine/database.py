"""The interface of databases: transactions, and detection of commits by other processes.

A transaction is a plain function of a `Transaction`, run whole or not at all. The function can't await, so a
transaction waits for nothing but the database. All of this runs in the event loop of one thread (`engine.thread`).
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy.engine import URL

from replaybuf.common.passwords import PasswordFunction
from replaybuf.storage.sql.engine.dialect import Dialect
from replaybuf.storage.sql.engine.transaction import DEFAULT, Scope, Transaction
from replaybuf.storage.sql.engine.urls import is_memory, public_url
from replaybuf.storage.values import LOCK_SECONDS, RECONNECT_SECONDS

T = TypeVar("T")

Function = Callable[[Transaction], T]
#: Returns the result of `function(tx, *args)`, a step of a transaction.
Step = Callable[..., Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Access:
    """A URL from `parse_url`, and how its database is used.

    `durability="full"` makes SQLite fsync at every commit. `lock_timeout` bounds each wait for a lock, in seconds;
    `reconnect_timeout` the retries of an operation after a lost connection to a server. With `ours_only`, a SQLite file
    of another program is refused and not changed. PostgreSQL's `password` is called before each connection. A SQLite
    file that isn't inherited is never used by forks of this process, which take no locks of it.
    """

    url: URL
    durability: str = "normal"
    lock_timeout: float = LOCK_SECONDS
    reconnect_timeout: float = RECONNECT_SECONDS
    read_only: bool = False
    ours_only: bool = False
    password: PasswordFunction | None = None
    is_inherited: bool = True

    @property
    def where(self) -> str:
        """The URL for messages, without password."""
        return public_url(self.url)

    @property
    def path(self) -> str | None:
        """The file of the database, where it is a file."""
        return self.url.database if self.is_sqlite and not is_memory(self.url) else None

    @property
    def is_sqlite(self) -> bool:
        """Whether this is a SQLite database, in a file or in memory."""
        return self.url.get_backend_name() == "sqlite"


class Database(ABC):
    """The connections of one store to its database.

    Once `opened` is true (the schema exists), operations whose connection was lost are retried up to the reconnect
    timeout; until then an unreachable server is an error at once.
    """

    dialect: Dialect
    #: The number of concurrent commits of one store that raises its throughput.
    writers = 1

    def __init__(self, access: Access) -> None:
        self.access = access
        self.where, self.path, self.lock_timeout = access.where, access.path, access.lock_timeout
        self.opened = False

    @property
    def missing_commits(self) -> str:
        """A sentence about commits that this store has seen and the database lacks; empty if it has all."""
        return ""

    @abstractmethod
    async def read(self, function: Function[T], scope: Scope = DEFAULT, *, single: bool = False) -> T:
        """Run `function(tx)` in a read transaction, which sees one state of the database.

        `single`: it is one statement of milliseconds at most, which on a server is one round trip, and with SQLite may
        run in this thread.
        """

    @abstractmethod
    async def write(
        self,
        function: Function[T],
        scope: Scope = DEFAULT,
        *,
        alone: bool = False,
        brief: bool = False,
        patience: float | None = None,
        accepts_loss: bool = False,
    ) -> T:
        """Run `function(tx)` in a write transaction and commit; `alone` excludes all other writers.

        `brief`: the function takes milliseconds at most, and with SQLite may run in this thread. `patience` bounds each
        wait for a lock, in seconds, in place of `lock_timeout`.

        Raises FencedError once there are `missing_commits`, until a write with `accepts_loss` (a restore) has been
        committed.

        The function may run more than once: after a deadlock, a serialization failure, or a lost connection. Raises
        UnreachableError when the transaction was not committed, and OutcomeUnknownError when its outcome could not be
        determined in time.
        """

    @abstractmethod
    def transaction(
        self, scope: Scope = DEFAULT, *, write: bool, alone: bool = False
    ) -> AbstractAsyncContextManager[Step]:
        """Return a transaction of several steps: committed at the end of the block, rolled back on errors, no retry."""

    @abstractmethod
    def changes(self, hint: Callable[[], object]) -> CommitWatch:
        """Return a watch for commits of other processes from now on. `hint()` is called after a possible commit."""

    def cut_retries(self) -> None:  # noqa: B027
        """Shorten the retries after a lost connection, because the store is being closed."""

    @abstractmethod
    async def dispose(self) -> None:
        """Close all connections."""


#: The shortest time between two hints that wake callers, which then read the store, however often others commit.
HINT_SECONDS = 0.02


class CommitWatch:
    """Detects commits of other processes, and notifies them of commits of this store.

    This class is for a database in memory, which no other process can open.
    """

    #: Whether other processes listen for notifications, besides polling.
    announces: bool = False

    async def poll(self) -> bool:
        """Poll: return whether another process may have committed since the last poll."""
        return False

    async def pause(self) -> None:
        """Pause before the next poll."""
        await asyncio.sleep(1.0)

    async def announce(self) -> None:
        """Notify other processes of a commit by this one."""

    async def close(self) -> None:
        """Release connections; another poll opens new ones."""
