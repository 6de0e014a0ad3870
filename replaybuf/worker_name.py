"""Worker names: recorded with the puts and draws of this process, or of a part of it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

from replaybuf.checks import check_task_name

_working_as: ContextVar[str | None] = ContextVar("replaybuf_worker", default=None)


def worker_name(configured: str | None = None) -> str:
    """Return the name set by `working_as`, else the `configured` one, else "host:pid" of this process."""
    return _working_as.get() or configured or _of_process()


@contextmanager
def working_as(name: str | None) -> Iterator[None]:
    """Put and draw under this name in the block, and in tasks started there; None changes nothing.

    Raises InputError for a name that a database can't store.
    """
    if name is None:
        yield
        return
    token = _working_as.set(check_worker(name))
    try:
        yield
    finally:
        _working_as.reset(token)


def check_worker(name: str) -> str:
    """Check the name of a worker: a non-empty text that both databases can store."""
    return check_task_name(name, "worker")


@cache
def _of_process() -> str:
    """Return the name of the process. Cached, because the system call for the pid costs 3 % of a small put."""
    return f"{host_name()}:{os.getpid()}"


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_of_process.cache_clear)


def host_name() -> str:
    """Return the host name, as a text that both databases can store."""
    return socket.gethostname().encode(errors="replace").decode()
