"""The interface of databases: transactions, and noticing what others have committed.

A transaction is a plain function of a `Transaction`, run whole or not at all. It can't await, so a transaction never
waits for anything but the database. All of this runs in the event loop of one thread (`engine.thread`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from enum import Enum, auto
from typing import Any, TypeVar

from sqlalchemy.engine import URL

from replaybuf.storage.sql.engine.dialect import Dialect
from replaybuf.storage.sql.engine.transaction import DEFAULT, Scope, Transaction
from replaybuf.storage.sql.engine.urls import public_url

T = TypeVar("T")

Function = Callable[[Transaction], T]


class Follows(Enum):
    """What an operation rests on, where a server may take over that lacks some of what this store saw committed."""

    NOTHING = auto()
    WHAT_WAS_SEEN = auto()
    A_CHECKPOINT = auto()


class Database(ABC):
    """The connections of one store to its database. `lock_timeout` bounds each wait for a lock, in seconds.

    `guard(tx)` is run at the beginning of each write transaction, unless that says that it is not fenced: it raises
    FencedError in a store that may not write any more.

    Once `opened` is true (the schema is there), operations whose connection was lost are repeated for as long as the
    database is set to; until then an unreachable server is an error at once.
    """

    dialect: Dialect
    #: How many commits of one store gain from being under way at the same time.
    writers = 1

    def __init__(self, url: URL, lock_timeout: float, guard: Function[object] | None = None) -> None:
        self.url = url
        self.where = public_url(url)
        self.lock_timeout = lock_timeout
        self.opened = False
        #: The file of the database, where it is a file.
        self.path: str | None = None
        self._guard = guard

    @abstractmethod
    async def read(
        self,
        function: Function[T],
        scope: Scope = DEFAULT,
        *,
        brief: bool = False,
        single: bool = False,
        follows: Follows = Follows.NOTHING,
    ) -> T:
        """Run `function(tx)` in a read transaction, which sees one state of the database.

        `brief` says that it takes milliseconds at most: it may then run in this thread. `single` says that it is one
        statement: on a server, that is one round trip. `follows` as in `write`.
        """

    @abstractmethod
    async def write(
        self,
        function: Function[T],
        scope: Scope = DEFAULT,
        *,
        alone: bool = False,
        brief: bool = False,
        fenced: bool = True,
        patience: float | None = None,
        follows: Follows = Follows.NOTHING,
        in_one_call: Function[T | None] | None = None,
    ) -> T:
        """Run `function(tx)` in a write transaction behind the fence and commit; `alone` keeps out all other writers.

        `brief` as in `read`. With `fenced=False` the function checks the fence itself, or needs none. `patience` bounds
        each wait for a lock, in seconds, in place of `lock_timeout`.

        What follows WHAT_WAS_SEEN raises CommitsLostError once the database lacks some of that, until something was
        committed that follows A_CHECKPOINT.

        On a server, `in_one_call(tx)` is tried first: it makes one `Transaction.call`, whose answer is the result, and
        if that changed nothing it returns None.

        The function may run more than once: when the database rolls it back in favour of another transaction, or when a
        connection was lost. Raises UnreachableError when it was not committed, and OutcomeUnknownError when that could
        not be found out in time.
        """

    @abstractmethod
    async def write_beside(
        self, function: Function[T], guard: Function[object], confirm: Function[object], scope: Scope = DEFAULT
    ) -> T:
        """Run `function(tx)` in a write transaction on one state of the database, if possible alongside other writers.

        It is behind the fence. That state is newer than the locks that `guard(tx)` takes, which are held until the end.
        Before the commit, `confirm(tx)` sees what others have committed by then, while nobody writes alone. All three
        may be repeated, even after a commit whose answer was lost: the function has to allow for that.
        """

    def _behind_fence(self, function: Function[T]) -> Function[T]:
        guard = self._guard
        if guard is None:
            return function

        def guarded(tx: Transaction) -> T:
            guard(tx)
            return function(tx)

        return guarded

    @abstractmethod
    def transaction(
        self, scope: Scope = DEFAULT, *, write: bool, alone: bool = False
    ) -> AbstractAsyncContextManager[Steps]:
        """Return a transaction in steps: committed at the end of the block, rolled back on an exception, run once."""

    @abstractmethod
    def changes(self, hint: Callable[[], object]) -> CommitWatch:
        """Return the watch for what others commit from now on. `hint()` is called when they have, or may have."""

    @property
    @abstractmethod
    def lent(self) -> int:
        """The number of connections that are in use at the moment, but for those that are in use all the time."""

    def hurry(self) -> None:  # noqa: B027
        """Go on for a moment only, because the store is being closed."""

    @abstractmethod
    async def dispose(self) -> None:
        """Close all connections."""


class Steps:
    """A transaction that is run in several steps."""

    def __init__(
        self,
        tx: Transaction,
        run: Callable[[Callable[[], Any]], Awaitable[Any]],
        roll_back: Callable[[], Awaitable[None]],
    ) -> None:
        self._tx, self._run, self._roll_back = tx, run, roll_back
        #: Whether the transaction was rolled back.
        self.is_over = False

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Return the result of `function(tx, *args)`."""
        result: T = await self._run(lambda: function(self._tx, *args))
        return result

    async def rollback(self) -> None:
        """Undo all steps so far; no other may follow."""
        self.is_over = True
        await self._roll_back()


class CommitWatch(ABC):
    """How a store notices what others have committed, and announces its own commits."""

    #: The longest time between two looks, in seconds.
    seconds: float
    #: Whether others wait for announcements, besides polling.
    announces: bool = False

    @abstractmethod
    async def look(self) -> bool:
        """Return whether anything may have been committed by another process since the last look."""

    def switch(self, on: bool) -> None:  # noqa: B027
        """Start or stop giving hints, where that saves anything. A change in between is hinted at afterwards."""

    async def announce(self) -> None:  # noqa: B027
        """Tell the others that something was committed here."""

    @abstractmethod
    async def close(self) -> None:
        """Release connections; another look makes new ones."""
