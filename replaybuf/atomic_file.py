"""Atomic writes of files: a file gets its name only when it is complete."""

from __future__ import annotations

import contextlib
import glob
import itertools
import os
import socket
from collections.abc import Iterator
from pathlib import Path


def publish(partial: str, path: str) -> None:
    """Rename a complete file, with fsync, so that it is whole even after a power cut."""
    with open(partial, "rb") as file:
        os.fsync(file.fileno())
    os.replace(partial, path)


@contextlib.contextmanager
def partial_file(path: str) -> Iterator[str]:
    """Yield a unique name of a temporary file for `path`, so that concurrent writers don't collide.

    A file of this name is removed at the end of the block, and so are files left by killed processes of this host.
    """
    prefix = f"{Path(path).name}.{socket.gethostname()}-"
    for file in Path(path).parent.glob(f"{glob.escape(prefix)}*.partial"):
        if not _is_alive(file.name.removeprefix(prefix).partition("-")[0]):
            _remove(str(file))
    partial = str(Path(path).with_name(f"{prefix}{os.getpid()}-{next(_number)}.partial"))
    try:
        yield partial
    finally:
        _remove(partial)


_number = itertools.count(1)


def _is_alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:
        return True
    return True


def _remove(path: str) -> None:
    for suffix in ("", "-wal", "-shm", "-journal"):
        with contextlib.suppress(FileNotFoundError):
            os.remove(path + suffix)
