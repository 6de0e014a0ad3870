"""Connections of `sqlite3`: functions as scripts, waits for locks, and forks."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable
from types import TracebackType

_FIRST_PAUSE, _LONGEST_PAUSE = 0.0002, 0.005


class Script(str):
    """A script whose `function` is called in place of its text."""

    __slots__ = ("function",)

    def __new__(cls, function: Callable[[], object]) -> Script:
        script = super().__new__(cls)
        script.function = function
        return script

    function: Callable[[], object]


class RawConnection(sqlite3.Connection):
    """A connection of `sqlite3` that runs functions as scripts."""

    def executescript(self, script: str, /) -> sqlite3.Cursor:
        """Run a script of SQL, or call the function of a `Script`."""
        if not isinstance(script, Script):
            return super().executescript(script)
        script.function()
        return self.cursor()

    def close(self) -> None:
        """Close the connection."""
        with FORK_GUARD:
            super().close()


def is_busy(error: sqlite3.Error) -> bool:
    """Return whether another connection held a lock."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY


def patiently(function: Callable[[], object], seconds: float) -> None:
    """Call the function, and retry while another connection holds a lock, for up to `seconds`.

    When several processes create a database at once, all but the first to switch it to WAL fail immediately: SQLite
    ignores the busy timeout there.
    """
    deadline, pause = time.monotonic() + seconds, _FIRST_PAUSE
    while True:
        try:
            function()
            return
        except sqlite3.OperationalError as error:
            if not is_busy(error) or time.monotonic() > deadline:
                raise
        time.sleep(pause)
        pause = min(_LONGEST_PAUSE, 1.5 * pause)


# Forks wait for calls of SQLite, and these for forks: a forked process inherits SQLite's in-memory record of the file
# locks, but not the locks themselves, so a transaction that was open in another thread would seem to be open in the
# child for ever; and a mutex that another thread held, as opening and closing do, would never be free there.

#: The longest wait of a fork for running transactions. Afterwards it proceeds, and the child may see a locked database.
LONGEST_SECONDS = 10.0


class ForkGuard:
    """A context that blocks forks of the process, for at most `LONGEST_SECONDS`; thread-safe."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._inside_count = 0
        self._forking_count = 0

    def __enter__(self) -> None:
        with self._condition:
            self._condition.wait_for(lambda: not self._forking_count, LONGEST_SECONDS)
            self._inside_count += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._condition:
            self._inside_count -= 1
            self._condition.notify_all()

    def before(self) -> None:
        """Block new transactions and wait for running ones, before a fork."""
        with self._condition:
            self._forking_count += 1
            self._condition.wait_for(lambda: not self._inside_count, LONGEST_SECONDS)

    def after_in_parent(self) -> None:
        """Let transactions begin again."""
        with self._condition:
            self._forking_count -= 1
            self._condition.notify_all()

    def after_in_child(self) -> None:
        """Reset: the child has one thread, and no transaction runs in it."""
        self.__init__()  # type: ignore[misc]


FORK_GUARD = ForkGuard()

os.register_at_fork(
    before=FORK_GUARD.before, after_in_parent=FORK_GUARD.after_in_parent, after_in_child=FORK_GUARD.after_in_child
)
