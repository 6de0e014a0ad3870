"""Payloads in a folder: on a local disk, or on a file system that all hosts mount."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from replaybuf.common.file_systems import filesystem_type, is_network, sync_folder
from replaybuf.errors import DecodeError, PayloadStoreError, StorageError
from replaybuf.storage.places.store import FILES, MARKER, Extent, PlaceStore

_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)


class FolderStore(PlaceStore):
    """Payloads as files. On a network file system they are on the server when their write returns."""

    def __init__(self, path: str) -> None:
        self.path = Path(path).absolute()
        self.url = str(self.path)

    @cached_property
    def on_network(self) -> bool:
        """Whether the folder is on a network file system. Reading it blocks while the mount does not answer."""
        return is_network(filesystem_type(self.path))

    def read_marker(self) -> bytes | None:
        with self.ours("read"), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return (self.path / MARKER).read_bytes()
        return None

    def write_marker(self, marker: bytes, *, replace: bool = False) -> bool:
        draft = self.path / f"{MARKER}.{os.getpid()}.{threading.get_ident()}"
        with self.ours("written to"):
            try:
                with draft.open("wb") as file:
                    file.write(marker)
                    file.flush()
                    os.fsync(file.fileno())
                if replace:
                    draft.replace(self.path / MARKER)
                else:
                    os.link(draft, self.path / MARKER)  # atomic, and fails if there is one
                sync_folder(self.path)
            except FileExistsError:
                return False
            finally:
                draft.unlink(missing_ok=True)
        return True

    def prepare(self) -> None:
        with self.ours("written to"):
            if not self.path.is_dir():
                raise PayloadStoreError(
                    f"{self.path} is no folder: make it (mkdir -p), mount it, or name another one (payloads=)"
                )
            if self.read_marker() is not None:
                self.check_there()
            elif not (self.path / FILES).is_dir():
                (self.path / FILES).mkdir(exist_ok=True)
                sync_folder(self.path)
                sync_folder(self.path.parent)  # the folder may be as new

    def write(self, files: Sequence[tuple[str, Sequence[Any]]], *, sync: bool) -> None:
        begun: list[Path] = []
        try:
            for name, buffers in files:
                with open(self._file(name), "xb") as file:
                    begun.append(self._file(name))
                    _write_all(file, buffers)
                    if sync or self.on_network:
                        os.fsync(file.fileno())
            if sync:
                sync_folder(self.path / FILES)
            self.check_there()
            if not all(path.exists() for path in begun):
                raise PayloadStoreError(
                    f"{self.url} was moved during a write; nothing of the put was stored: put again"
                )
        except OSError as error:
            with contextlib.suppress(OSError):
                for path in begun:
                    path.unlink(missing_ok=True)
            if isinstance(error, PayloadStoreError):  # nobody would find what was written
                raise
            if error.errno in _FULL_ERRORS:
                raise StorageError(
                    f"the disk of the folder for payloads {self.path} is full; nothing of the put was stored, and what "
                    "was committed before is safe: free some space",
                    reason="disk full",
                ) from error
            if isinstance(error, FileNotFoundError):
                self.check_there()
            raise self.error(error, "written to") from error

    def read_ranges(self, name: str, extents: Sequence[Extent]) -> Sequence[Any]:
        number = os.open(self._file(name), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait for a writer
        try:
            return [_read_range(number, extent) for extent in extents]
        finally:
            os.close(number)

    def delete(self, names: Iterable[str]) -> None:
        with self.ours("written to"):
            self.check_there()
            for name in names:
                self._file(name).unlink(missing_ok=True)

    def files(self) -> Iterator[tuple[str, float]]:
        with self.ours("read"), os.scandir(self.path / FILES) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    yield entry.name, entry.stat().st_mtime

    def check_there(self) -> None:
        super().check_there()
        if not (files := self.path / FILES).is_dir():
            raise PayloadStoreError(
                f"{files} isn't there: mount it, or put it back (if its files are lost, make it anew: mkdir); else "
                "nothing is lost"
            )

    def _file(self, name: str) -> Path:
        return self.path / FILES / name

    def error(self, error: OSError, action: str) -> PayloadStoreError:
        reason = os.strerror(error.errno) if error.errno else str(error)
        return PayloadStoreError(
            f"the folder for payloads {self.path} can't be {action} ({reason}): see that it is mounted and writable"
        )


def _write_all(file: BinaryIO, buffers: Sequence[Any]) -> None:
    """Write buffers, large ones from their own memory."""
    file.writelines(buffers)
    file.flush()


def _read_range(number: int, extent: Extent) -> Any:
    """Return bytes in newly allocated memory, or a DecodeError where the file ends too early or is none."""
    status = os.fstat(number)
    if not stat.S_ISREG(status.st_mode):
        return DecodeError(f"the file {extent.name} was replaced by a folder or a pipe")
    there = max(0, min(extent.size, status.st_size - extent.at))  # the size in a damaged payload may be any
    memory: Any = np.empty(there, np.uint8)
    view, at = memoryview(memory), extent.at
    while view.nbytes and (count := os.preadv(number, [view], at)):
        view, at = view[count:], at + count
    if view.nbytes or memory.nbytes < extent.size:
        return DecodeError(f"the file {extent.name} ends at byte {status.st_size}: it was cut short")
    return memory
