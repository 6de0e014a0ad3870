"""Forks wait for transactions on SQLite, and transactions for forks.

A forked process inherits what SQLite knows of the locks that its connections hold, though it holds none of them: a
transaction that was open in another thread would seem to be open in the child for ever.
"""

from __future__ import annotations

import os
import threading
from types import TracebackType

#: How long a fork waits for transactions to end. Afterwards it goes ahead, and the child may find the database locked.
LONGEST_SECONDS = 10.0


class ForkGuard:
    """A context in which no process is forked, unless it lasts longer than `LONGEST_SECONDS`; for any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._forking = 0

    def __enter__(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._forking, LONGEST_SECONDS)
            self._inside += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    def before(self) -> None:
        """Block new transactions and wait for running ones, before a fork."""
        with self._changed:
            self._forking += 1
            self._changed.wait_for(lambda: not self._inside, LONGEST_SECONDS)

    def after_in_parent(self) -> None:
        """Let transactions begin again."""
        with self._changed:
            self._forking -= 1
            self._changed.notify_all()

    def after_in_child(self) -> None:
        """Begin anew: a process of one thread runs no transaction."""
        self.__init__()  # type: ignore[misc]


FORK_GUARD = ForkGuard()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=FORK_GUARD.before,
        after_in_parent=FORK_GUARD.after_in_parent,
        after_in_child=FORK_GUARD.after_in_child,
    )
