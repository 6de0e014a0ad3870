"""One way to a database, whichever it is: transactions, and what others have committed.

A transaction is a plain function of a `Transaction`, run whole or not at all. It can't await, so nothing but the
database is ever waited for inside of one. All of this runs in the event loop of one thread (`engine.thread`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import AsyncConnection

from replaybuf.storage.sql.engine.dialects import DIALECTS
from replaybuf.storage.sql.engine.transaction import DEFAULT, Scope, Transaction
from replaybuf.storage.sql.engine.urls import public_url

T = TypeVar("T")

Function = Callable[[Transaction], T]


class Engine(ABC):
    """The connections of one store to its database. `lock_timeout` bounds each wait for a lock, in seconds.

    Once `opened` is true (the schema is there), operations whose connection was lost are repeated for as long as the
    engine was told to; until then an unreachable server is an error at once.
    """

    def __init__(self, url: URL, lock_timeout: float) -> None:
        self.url = url
        self.where = public_url(url)
        self.lock_timeout = lock_timeout
        self.dialect = DIALECTS[url.get_backend_name()]
        self.opened = False
        #: The file that the database is in, where it is one.
        self.path: str | None = None

    @abstractmethod
    async def read(self, function: Function[T], scope: Scope = DEFAULT) -> T:
        """Run `function(tx)` in a read transaction: it sees one state of the database."""

    @abstractmethod
    async def write(self, function: Function[T], scope: Scope = DEFAULT, *, alone: bool = False) -> T:
        """Run `function(tx)` in a write transaction and commit; `alone` keeps out all other writers.

        The function may be run more than once, by databases that roll one transaction back for another's sake, or when
        a connection was lost. Raises UnreachableError: then it was not committed, or (OutcomeUnknownError) that could
        not be found out in time.
        """

    @abstractmethod
    async def write_beside(self, function: Function[T], guard: Function[object], scope: Scope = DEFAULT) -> T:
        """Run `function(tx)` in a write transaction, on one state of the database, keeping no writers out if it can.

        That state is younger than the locks that `guard(tx)` takes. Both may be run again, also after a commit whose
        answer was lost: the function has to allow for that.
        """

    @abstractmethod
    def transaction(
        self, scope: Scope = DEFAULT, *, write: bool, alone: bool = False
    ) -> AbstractAsyncContextManager[Steps]:
        """A transaction in several steps: committed at the end of the block, rolled back by an exception, run once."""

    @abstractmethod
    def changes(self, hint: Callable[[], object]) -> Changes:
        """What others have committed from now on. `hint()` is called when they say so."""

    def hurry(self) -> None:  # noqa: B027
        """The store is being closed: go on for a moment only."""

    @abstractmethod
    async def dispose(self) -> None:
        """Close all connections."""


class Steps:
    """A transaction that is run in several steps."""

    def __init__(self, engine: Engine, connection: AsyncConnection, scope: Scope) -> None:
        self._connection = connection
        assert connection.sync_connection is not None
        self._tx = Transaction(connection.sync_connection, engine.dialect, scope)

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """What `function(tx, *args)` gives."""
        return await self._connection.run_sync(lambda _: function(self._tx, *args))

    async def rollback(self) -> None:
        """Undo all steps so far."""
        await self._connection.rollback()


class Changes(ABC):
    """How a store notices what others have committed, and lets them notice."""

    #: How often to look, at the least.
    seconds: float
    #: Whether others wait to be told, beside looking.
    announces: bool = False

    @abstractmethod
    async def look(self) -> bool:
        """Return whether anything may have been committed by another process since the last look."""

    async def announce(self) -> None:  # noqa: B027
        """Let the others know that something was committed here."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of connections; another look makes new ones."""
