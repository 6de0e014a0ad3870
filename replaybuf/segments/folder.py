"""Segments in a folder: on a local disk, or on a file system that all hosts mount."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from replaybuf.errors import DecodeError, DiskFullError, PayloadStoreError
from replaybuf.segments.filesystems import filesystem_type, is_network
from replaybuf.segments.store import (
    ALIGNMENT,
    MARKER,
    SEGMENTS,
    GoneError,
    Range,
    SegmentLostError,
    SegmentStore,
    SegmentWriter,
    StoredSegment,
    TakenError,
    check_frame,
)

_MOST_BUFFERS = min(1024, os.sysconf("SC_IOV_MAX"))
#: The number of segments kept open for reading.
_MOST_OPEN = 32
_FULL = (errno.ENOSPC, errno.EDQUOT)
#: Errors of an open file whose file system was unmounted, or whose server restarted.
_DEAD = (errno.ENOTCONN, errno.ESTALE, errno.ENODEV)


class FolderStore(SegmentStore):
    """Segments as files.

    On a network file system, writes are on the server when they return, segments aren't overwritten, and a segment is
    reopened if its content isn't as written: clients may read outdated content of an open file.
    """

    one_write_each = False

    def __init__(self, path: str) -> None:
        self.path = Path(path).absolute()
        self.url = str(self.path)
        self._kept: OrderedDict[str, int] = OrderedDict()  # descriptors by name, most recently used last
        self._lock = threading.Lock()
        self.on_network = is_network(filesystem_type(self.path))
        self.reuses = not self.on_network

    def read_marker(self) -> bytes | None:
        with self._as_ours("read"), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return (self.path / MARKER).read_bytes()
        return None

    def write_marker(self, marker: bytes) -> bool:
        new = self._new_marker(marker)
        try:
            with self._as_ours("written to"), contextlib.suppress(FileExistsError):
                os.link(new, self.path / MARKER)  # atomic, and fails if there is one
                return True
        finally:
            new.unlink()
        return False

    def replace_marker(self, marker: bytes) -> None:
        with self._as_ours("written to"):
            self._new_marker(marker).replace(self.path / MARKER)

    def _new_marker(self, marker: bytes) -> Path:
        new = self.path / f"{MARKER}.{os.getpid()}.{threading.get_ident()}"
        with self._as_ours("written to"):
            new.write_bytes(marker)
        return new

    def check_writable(self) -> None:
        with self._as_ours("written to"):
            if not self.path.is_dir():
                isnt = "isn't there: make it (mkdir -p), mount it, or name another one"
                isnt = "is a file: name a folder" if self.path.exists() else isnt
                raise PayloadStoreError(f"the folder for payloads {self.path} {isnt} (payloads=)")
            (self.path / SEGMENTS).mkdir(exist_ok=True)
        self.check_may_write()

    def check_may_write(self) -> None:
        if not os.access(self.path / SEGMENTS, os.W_OK | os.X_OK):
            raise PayloadStoreError(
                f"the folder for payloads {self.path} can't be written to by this user: change its owner or its mode, "
                "or mount it so that it can be written to"
            )

    def free_bytes(self) -> int | None:
        with self._as_ours("read"):
            return shutil.disk_usage(self.path).free

    def writer(self, name: str, *, anew: bool) -> SegmentWriter:
        flags = os.O_RDWR | os.O_CLOEXEC | (0 if anew else os.O_CREAT | os.O_EXCL)
        self.check_there()
        with self._as_ours("written to"):
            try:
                return _FileWriter(self, name, os.open(self._file(name), flags, 0o666))
            except (FileExistsError, FileNotFoundError) as error:
                if anew or isinstance(error, FileExistsError):
                    raise TakenError(name) from error
                raise

    def read(self, ranges: Sequence[Range], timeout: float) -> list[Any]:
        return [self._read(one) for one in ranges]

    def _read(self, wanted: Range) -> Any:
        problem: DecodeError
        for anew in (False, True):  # an open file may be of another folder that was mounted here for a while
            try:
                with self._open(wanted.extent.name, anew=anew) as number:
                    return _read_range(number, wanted, self.database)
            except FileNotFoundError:
                problem = GoneError(f"the segment {wanted.extent.name} isn't there any more: somebody deleted it")
            except DecodeError as error:
                problem = error
            except OSError as error:
                if anew:
                    raise self.error(error, "read") from error
        self.check_there()
        return problem

    def delete(self, name: str) -> None:
        self._drop(name)
        with self._as_ours("written to"), contextlib.suppress(FileNotFoundError):
            self.check_there()
            self._file(name).unlink()

    def segments(self) -> Iterator[StoredSegment]:
        self.check_there()
        with self._as_ours("read"), os.scandir(self.path / SEGMENTS) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    found = entry.stat()
                    yield StoredSegment(entry.name, found.st_size, found.st_mtime)

    def read_raw(self, name: str, at: int, size: int) -> bytes:
        with self._as_ours("read"), self._open(name) as number:
            return os.pread(number, size, at)

    def forget(self) -> None:
        with self._lock:
            gone = [name for name, number in self._kept.items() if _is_deleted(number)]
        self._drop(*gone)

    def close(self) -> None:
        with self._lock:
            names = [*self._kept]
        self._drop(*names)

    def _drop(self, *names: str) -> None:
        """Close segments. Concurrent reads have descriptors of their own."""
        with self._lock:
            numbers = [self._kept.pop(name, None) for name in names]
        for number in numbers:
            if number is not None:
                os.close(number)

    def _file(self, name: str) -> Path:
        return self.path / SEGMENTS / name

    @contextlib.contextmanager
    def _open(self, name: str, *, anew: bool = False) -> Iterator[int]:
        """Yield a descriptor of a segment, which is kept open for later reads. Raises FileNotFoundError."""
        if anew:
            self._drop(name)
        with self._lock:
            kept = self._kept.pop(name, None)
            self._kept[name] = os.open(self._file(name), os.O_RDONLY | os.O_CLOEXEC) if kept is None else kept
            number = os.dup(self._kept[name])
            most_idle = [*self._kept][:-_MOST_OPEN] if len(self._kept) > _MOST_OPEN else []
        self._drop(*most_idle)
        try:
            yield number
        finally:
            os.close(number)

    @contextlib.contextmanager
    def _as_ours(self, what: str) -> Iterator[None]:
        """Raise PayloadStoreError for operating system errors; replaybuf's own errors pass."""
        try:
            yield
        except PayloadStoreError:
            raise
        except OSError as error:
            raise self.error(error, what) from error

    def error(self, error: OSError, what: str) -> PayloadStoreError:
        """Return the error for a folder that can't be read or written to, from the operating system's error."""
        reason = os.strerror(error.errno) if error.errno else str(error)
        return PayloadStoreError(
            f"the folder for payloads {self.path} can't be {what} ({reason}): see that it is mounted and writable"
        )


class _FileWriter(SegmentWriter):
    def __init__(self, store: FolderStore, name: str, number: int) -> None:
        self._store = store
        self._path = store.path / SEGMENTS / name
        self._number: int | None = number
        self._begun = False
        self._lock = threading.Lock()  # a closed descriptor's number may be reused for another file

    def write(self, at: int, buffers: Sequence[Any], *, sync: bool) -> None:
        with self._lock:
            if self._number is None:
                raise SegmentLostError
            self._write_all(self._number, at, buffers, sync)

    def _write_all(self, number: int, at: int, buffers: Sequence[Any], sync: bool) -> None:
        try:
            self._write(number, at, buffers)
            if sync or self._store.on_network:
                (os.fdatasync if self._begun else os.fsync)(number)
                if not self._begun:
                    _sync_folder(self._path.parent)
                    self._begun = True
            self._check_in_place(number)
        except OSError as error:
            if error.errno in _FULL:
                raise DiskFullError(
                    f"the disk of the folder for payloads {self._store.path} is full; nothing of the put was stored, "
                    "and what was committed before is safe: free some space"
                ) from error
            if error.errno in _DEAD:
                raise SegmentLostError from error
            raise self._store.error(error, "written to") from error

    def _write(self, number: int, at: int, buffers: Sequence[Any]) -> None:
        views = [view for one in buffers if (view := _bytes_of(one)).nbytes]
        first = 0
        while first < len(views):
            chosen = views[first : first + _MOST_BUFFERS]
            written = os.pwritev(number, chosen, at)
            at += written
            while chosen and written >= chosen[0].nbytes:
                written -= chosen.pop(0).nbytes
                first += 1
            if written:
                views[first] = views[first][written:]

    def _check_in_place(self, number: int) -> None:
        """Raise SegmentLostError when the file was deleted or moved, or its folder unmounted: data would be lost."""
        ours = os.fstat(number)
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            raise SegmentLostError from None
        if (found.st_dev, found.st_ino) != (ours.st_dev, ours.st_ino):
            raise SegmentLostError

    def close(self) -> None:
        with self._lock:
            number, self._number = self._number, None
        if number is not None:
            os.close(number)


def _bytes_of(buffer: Any) -> memoryview:
    view = memoryview(buffer)
    return view if view.nbytes == 0 or (view.ndim == 1 and view.format == "B") else view.cast("B")


def _is_deleted(number: int) -> bool:
    try:
        return os.fstat(number).st_nlink == 0
    except OSError:  # a server no longer has the file
        return True


def _sync_folder(path: Path) -> None:
    number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _read_range(number: int, wanted: Range, database: bytes | None) -> Any:
    """Return bytes in newly allocated memory. Raises DecodeError when they aren't the payload's."""
    extent = wanted.extent
    header = bytearray(ALIGNMENT)
    memory: Any = np.empty(wanted.size, np.uint8)
    start = extent.at + wanted.at
    if wanted.at == 0:
        _fill(number, [memoryview(header), memoryview(memory)], start - ALIGNMENT, extent.name)
    else:
        _fill(number, [memoryview(header)], extent.at - ALIGNMENT, extent.name)
        _fill(number, [memoryview(memory)], start, extent.name)
    check_frame(header, extent, database)
    # A writer overwrites the header before the bytes, so the header, read last, reveals bytes overwritten meanwhile.
    _fill(number, [memoryview(header)], extent.at - ALIGNMENT, extent.name)
    check_frame(header, extent, database)
    return memory


def _fill(number: int, views: list[memoryview], at: int, name: str) -> None:
    """Read from a file until the buffers are full. Raises DecodeError at its end."""
    while views:
        count = os.preadv(number, views, at)
        if count == 0:
            raise DecodeError(f"the segment {name} ends at byte {os.fstat(number).st_size}: it was cut short")
        at += count
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if count:
            views[0] = views[0][count:]
