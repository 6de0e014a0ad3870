"""Connections of `sqlite3`: functions as scripts, waits for locks, and forks."""

from __future__ import annotations

import os
import select
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from weakref import WeakKeyDictionary

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
        with FORK_GUARD.while_closing():
            super().close()
            open_files.pop(self, None)


#: The real paths of the databases of open connections that stay open.
open_files: WeakKeyDictionary[RawConnection, str] = WeakKeyDictionary()


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

#: The longest wait of a fork for running transactions, after which the child may see a locked database; of transactions
#: for forks; and of the parent for the locks of its child.
LONGEST_SECONDS = 10.0
#: What a connection in WAL mode locks as long as it is open (SQLite's os_unix.c): bytes of the file, and of its -shm.
_SHARED_LOCKS = (("", 0x40000002, 510), ("-shm", 128, 1))


class _OfThread(threading.local):
    """How deep a thread is in contexts."""

    depth = 0


class ForkGuard:
    """A context that blocks forks of the process, for at most `LONGEST_SECONDS`; thread-safe.

    Contexts and forks that wait for one another take turns.
    """

    def __init__(self) -> None:
        #: The real paths of databases that an ancestor had open, and of which this process has no locks.
        self._unlocked_paths: frozenset[str] = frozenset()
        self._lock_files: dict[str, int] = {}
        self._begin()
        self._pid = os.getpid()

    def _begin(self) -> None:
        # The lock's own `with`: a condition's is in Python, where a signal handler may raise before it is released.
        self._lock = threading.RLock()
        self._condition = threading.Condition(self._lock)
        self._inside_count = self._waiting_count = 0
        self._forking_threads: set[int] = set()
        #: By thread, the open ends of the pipe by which the child of its fork says that it has its locks.
        self._pipes: dict[int, list[int]] = {}
        self._parent_threads: set[int] = set()  # that wait for the locks of a child
        self._of_thread = _OfThread()

    def __enter__(self) -> None:
        with self._lock:
            if self._forking_threads and not self._of_thread.depth:  # else a fork waits for this thread
                self._waiting_count += 1
                try:
                    if not self._condition.wait_for(lambda: not self._forking_threads, LONGEST_SECONDS):
                        self._forking_threads.clear()  # a signal handler may have raised at the end of a fork
                finally:
                    self._waiting_count -= 1
                    self._condition.notify_all()
            self._inside_count += 1
            self._of_thread.depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._inside_count -= 1
            self._of_thread.depth -= 1
            self._condition.notify_all()

    @contextmanager
    def while_closing(self) -> Iterator[None]:
        """Block forks, too, and first wait until the children have locks of their own; until then they have ours."""
        with self:
            with self._lock:
                self._condition.wait_for(lambda: not self._parent_threads, LONGEST_SECONDS)
            yield

    def is_unlocked(self, path: str) -> bool:
        """Return whether this process has no locks of a database that an ancestor had open, so that it can't use it."""
        return path in self._unlocked()

    def _unlocked(self) -> frozenset[str]:
        # A signal handler may have raised in `after_in_child`.
        return self._unlocked_paths if self._pid == os.getpid() else self._unlocked_paths.union(open_files.values())

    def before(self) -> None:
        """Block new transactions and wait for running ones, before a fork."""
        thread, self._unlocked_paths = threading.get_ident(), self._unlocked()
        _close_all(self._pipes.pop(thread, []))
        with self._lock:
            self._condition.wait_for(lambda: not self._waiting_count, LONGEST_SECONDS)
            self._forking_threads.add(thread)
            self._condition.wait_for(lambda: self._inside_count <= self._of_thread.depth, LONGEST_SECONDS)
        if open_files:
            with suppress(OSError):
                self._pipes[thread] = [*os.pipe()]

    def after_in_parent(self) -> None:
        """Let transactions begin again, and wait until the child has its own locks."""
        thread = threading.get_ident()
        ends = self._pipes.get(thread, [])
        try:
            with self._lock:
                if ends:
                    self._parent_threads.add(thread)
                self._forking_threads.discard(thread)
                self._condition.notify_all()
            if ends:
                os.close(ends.pop())
                child = select.poll()
                child.register(ends[0])
                child.poll(1000 * LONGEST_SECONDS)
        finally:
            _close_all(ends)
            self._pipes.pop(thread, None)
            with self._lock:
                self._parent_threads.discard(thread)
                self._condition.notify_all()

    def after_in_child(self) -> None:
        """Reset: the child has one thread, no transaction runs in it, and it has no locks but those taken here."""
        pipes = self._pipes
        self._begin()
        pipe = pipes.pop(threading.get_ident(), None)
        for ends in pipes.values():  # of forks in other threads, which wait for their children alone
            _close_all(ends)
        # Without the pipe, the parent doesn't wait, and may have closed its connections before.
        without = [path for path in {*open_files.values()} if not (pipe and _lock_as_open(path, self._lock_files))]
        self._unlocked_paths = self._unlocked_paths.union(without)
        if pipe:
            os.write(pipe[1], b"x")
            _close_all(pipe)
        self._pid = os.getpid()


def _close_all(numbers: list[int]) -> None:
    while numbers:
        os.close(numbers.pop())


def _lock_as_open(path: str, files: dict[str, int]) -> bool:
    """Take the locks that SQLite's inherited record says this process has; return False if that isn't possible.

    Else the parent, or any other process, would delete the WAL and its index when it closes, or make another index:
    connections of this process would go on in the deleted ones, and what they commit would be lost. `files` has the
    file descriptors of the locks, of the parent as well, which serve again. They stay open: closing one releases all
    locks of the process on its file.
    """
    import fcntl

    for suffix, start, size in _SHARED_LOCKS:
        file = f"{path}{suffix}"
        try:
            if not _is_open(files.get(file), file):
                files[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.lockf(files[file], fcntl.LOCK_SH | fcntl.LOCK_NB, size, start)
        except FileNotFoundError:  # it was deleted
            continue
        except OSError:  # there may be no free file descriptor
            return False
    return True


def _is_open(number: int | None, path: str) -> bool:
    """Return whether a file descriptor is open, and is that of the file at a path."""
    with suppress(OSError):
        return number is not None and os.path.samestat(os.fstat(number), os.stat(path))
    return False


def _take_exception() -> None:
    """Do nothing. What a signal handler raises during the fork is raised here, and Python drops it."""


FORK_GUARD = ForkGuard()

os.register_at_fork(after_in_parent=_take_exception, after_in_child=_take_exception)
os.register_at_fork(
    before=FORK_GUARD.before, after_in_parent=FORK_GUARD.after_in_parent, after_in_child=FORK_GUARD.after_in_child
)
os.register_at_fork(before=_take_exception)  # the last one that is registered comes first
