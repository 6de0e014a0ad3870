"""Payloads that are written together, to files of their own, before the transaction that names them."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any

from replaybuf.storage.places.store import ALIGNMENT, Extent, PlaceStore, file_name
from replaybuf.values.codec.payload_format import SplitPayload

#: The size and the number of groups from which a file has no more: it is deleted when its last group has gone.
FILE_BYTES, FILE_GROUPS = 4 << 20, 64
#: Buffers with a smaller average size are joined first: a system call is slower for many small buffers.
_JOINED = 8 << 10


@dataclass(slots=True)
class FileBatch:
    """Payloads to be written together, to a place with this number.

    `threshold` is the tail size from which payloads are kept apart. With `sync`, files are durable once written.
    """

    threshold: int
    _number: int
    _store: PlaceStore
    _sync: bool
    _files: list[_NewFile] = field(default_factory=list)

    def add(self, split: SplitPayload) -> Extent:
        """Return the extent of a payload's tail, which is written by `flush`."""
        file = self._files[-1] if self._files else None
        if file is None or file.groups == FILE_GROUPS or (file.groups and file.end + split.size > FILE_BYTES):
            file = _NewFile()
            self._files.append(file)
        extent = Extent(self._number, file.number, file.end, split.size)
        file.add(split)
        return extent

    def flush(self) -> None:
        """Write the added tails. Raises PayloadStoreError or StorageError."""
        files, self._files = self._files, []
        if files:
            self._store.write([(file_name(one.number), one.buffers) for one in files], sync=self._sync)


class _NewFile:
    """A file to be written, under a random name: of two transactions, none names the same."""

    __slots__ = ("buffers", "end", "groups", "number")

    def __init__(self) -> None:
        self.number = secrets.randbits(63)
        self.buffers: list[Any] = []
        self.end = self.groups = 0

    def add(self, split: SplitPayload) -> None:
        buffers = [*split.tail, bytes(-split.size % ALIGNMENT)]
        self.buffers += [b"".join(buffers)] if split.size < _JOINED * len(buffers) else buffers
        self.end += split.size + -split.size % ALIGNMENT
        self.groups += 1
