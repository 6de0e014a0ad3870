"""Atomic writes of files: a file gets its name only when it is complete."""

from __future__ import annotations

import contextlib
import errno
import glob
import itertools
import os
import socket
from collections.abc import Iterator
from pathlib import Path


def publish(partial: str, path: str) -> None:
    """Rename a complete file, with fsync of file and folder, so that it is there and whole even after a power cut."""
    with open(partial, "rb") as file:
        os.fsync(file.fileno())
    os.replace(partial, path)
    folder = Path(path).absolute().parent
    sync_folder(folder)
    sync_folder(folder.parent)  # the folder may be new


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Make the names in a folder durable, where its file system can."""
    with contextlib.suppress(PermissionError):  # a folder that may be written to, but not read
        number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(number)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(number)


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
