"""Worker names: recorded with the puts and draws of this process, or of a part of it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path

from replaybuf.common.checks import check_task_name

_context_name: ContextVar[str | None] = ContextVar("replaybuf_worker", default=None)


def worker_name(configured: str | None = None) -> str:
    """Return the name set by `working_as`, else the `configured` one, else "host:pid" of this process."""
    return _context_name.get() or configured or _process_name()


@contextmanager
def working_as(name: str | None) -> Iterator[None]:
    """Put and draw under this name in the block, and in tasks started there; None changes nothing.

    Raises InputError for a name that a database can't store.
    """
    if name is None:
        yield
        return
    token = _context_name.set(check_worker(name))
    try:
        yield
    finally:
        _context_name.reset(token)


def check_worker(name: str) -> str:
    """Check the name of a worker: a non-empty text that both databases can store."""
    return check_task_name(name, "worker")


@cache
def _process_name() -> str:
    """Return the name of the process. Cached, because the system call for the pid costs 3 % of a small put."""
    return f"{host_name()}:{os.getpid()}"


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_process_name.cache_clear)


def host_name() -> str:
    """Return the host name, as a text that both databases can store."""
    return socket.gethostname().encode(errors="replace").decode()


@cache
def machine() -> str:
    """Return what names the kernel and the namespace of process ids: processes that share it see each other's ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux: there are no containers whose host has this name
        return f"host {host_name()}"


def is_gone(on: str | None, pid: int) -> bool:
    """Return whether a process of the machine `on` was killed; False if that is another machine than this one."""
    if on != machine() or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace").rpartition(")")[2].split()[:1]
    except ProcessLookupError:
        return True
    except OSError:  # it is there, and another user's, or this isn't Linux
        return False
    return state in (["Z"], ["X"])  # a zombie
