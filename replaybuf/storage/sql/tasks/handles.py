"""Handles: arrays that weren't read with their group, and are loaded on demand, on any host."""

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, Protocol, TypeVar, cast

import numpy as np

from replaybuf.common.checks import check_seconds
from replaybuf.errors import ClosedError, DecodeError, InputError, LeaseLostError, ReplayBufError, UnreachableError
from replaybuf.storage.decoding import wait_for
from replaybuf.storage.places.owners import local_url, open_place
from replaybuf.storage.places.store import Extent, GoneError, PlaceStore
from replaybuf.storage.sql.engine import open_database
from replaybuf.storage.sql.engine.database import Access, Database
from replaybuf.storage.sql.engine.urls import url_or_path
from replaybuf.values.codec.blocks import DeferredArray, Instead, StandIn, checked_array
from replaybuf.values.codec.payload import Replacing
from replaybuf.values.codec.payload_format import head_size

#: Default timeout for reads from a place, in seconds.
PATIENCE = 60.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ArrayHandle(StandIn):
    """An array or tensor that wasn't read with its group: `load` returns one with this `dtype`, `shape` and `nbytes`.

    Handles can be pickled and sent to other processes, on any host that reaches the place where the payloads are kept,
    or the database. They are valid as long as the lease that they came with or, from `find`, as long as the group
    exists.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    source: ByteSource | bytes = field(repr=False)
    array: DeferredArray = field(repr=False)
    _tensor: tuple[str, tuple[int, ...], Callable[[Any], Any]] | None = field(default=None, repr=False)

    def load(self) -> Any:
        """Return the array or tensor, in its own memory; reads only its bytes, and blocks.

        Raises LeaseLostError if its bytes are gone because the lease has ended, DecodeError if they are damaged, and
        PayloadStoreError or an error of the database if they can't be reached.
        """
        [loaded] = load_all([self])
        return loaded

    async def load_async(self) -> Any:
        """Run `load` in another thread."""
        return await asyncio.to_thread(self.load)

    def as_tensor(self, name: str, shape: Sequence[int], build: Callable[[Any], Any]) -> ArrayHandle:
        """Return the handle of a tensor built from these bytes."""
        return replace(self, dtype=name, shape=tuple(shape), _tensor=(name, tuple(shape), build))

    def made(self, raws: Sequence[Any], *, shared: bool = False) -> Any:
        """Return the array or tensor built from the blocks that were read, its own or `shared`. Raises DecodeError."""
        parts = [*map(checked_array, self.array.parts or (self.array,), raws)]
        array = self.array.joined(parts) if self.array.parts else parts[0].copy() if shared else parts[0]
        if self._tensor is None:
            return array
        name, shape, build = self._tensor
        return build([name, list(shape), array])


def load_all(handles: Iterable[ArrayHandle], *, timeout: float = PATIENCE) -> list[Any]:
    """Return the arrays and tensors of many handles, in few requests; blocks. Errors are those of `ArrayHandle.load`.

    `timeout` bounds the wait for an unreachable place, in seconds.
    """
    requested, seconds = list(handles), check_seconds(timeout, "timeout")
    for handle in requested:
        if not isinstance(handle, ArrayHandle):
            raise InputError(f"handles must be ArrayHandles, got {type(handle).__name__}")
    by_place: dict[Any, dict[tuple[ByteSource, int], DeferredArray]] = {}
    uses: Counter[tuple[ByteSource, int]] = Counter()
    for handle in requested:
        if not isinstance(handle.source, bytes):
            blocks = {(handle.source, part.block_at): part for part in handle.array.parts or (handle.array,)}
            by_place.setdefault(handle.source.place, {}).update(blocks)
            uses.update(blocks.keys())
    read: dict[tuple[ByteSource, int], Any] = {}
    for blocks in by_place.values():
        parts = [(source, part) for (source, _), part in blocks.items()]
        read |= zip(blocks, _read_arrays(parts, seconds), strict=True)
    return [_make_array(handle, read, uses) for handle in requested]


def _make_array(
    handle: ArrayHandle, read: Mapping[tuple[ByteSource, int], Any], uses: Mapping[tuple[ByteSource, int], int]
) -> Any:
    """Return the array or tensor of a handle, from the blocks that were read, or raise the error of a read."""
    if isinstance(handle.source, bytes):
        return handle.made([bytearray(handle.source)])
    keys = [(handle.source, part.block_at) for part in handle.array.parts or (handle.array,)]
    raws = [read[key] for key in keys]
    for raw in raws:
        if isinstance(raw, Exception):
            raise _lost_error(raw) if isinstance(raw, GoneError) else raw
    return handle.made(raws, shared=any(uses[key] > 1 for key in keys))


def _lost_error(error: GoneError) -> LeaseLostError:
    return LeaseLostError(
        f"the array can't be read any more ({error}): the lease that its handle came with has ended, or its group has "
        "left the buffer. Load before the lease is acknowledged"
    )


def load_into(holders: T, *, timeout: float = PATIENCE) -> T:
    """Replace all handles, at any depth, by their arrays and tensors, in few requests; blocks. Returns `holders`.

    `holders` are StorageItems, rollouts, or lists and dicts of either, such as `lease.items`. They are changed in
    place; handles in a tuple stay handles if nothing holds the tuple, which can't be changed. Nothing is changed if
    this raises; errors are those of `ArrayHandle.load`.
    """
    by_id: dict[int, ArrayHandle] = {}

    def note(handle: ArrayHandle) -> ArrayHandle:
        by_id[id(handle)] = handle
        return handle

    Replacing(_is_handle, note).replace(holders)
    loaded = dict(zip(by_id, load_all(by_id.values(), timeout=timeout), strict=True))
    return cast(T, Replacing(_is_handle, lambda handle: loaded[id(handle)]).replace(holders))


def _is_handle(value: Any) -> bool:
    return isinstance(value, ArrayHandle)


@dataclass(frozen=True, slots=True)
class ByteSource:
    """The location of arrays' bytes: in the file of an `extent`, or in the payload of the group `uid` from `start` on.

    `url` is that of the place, in the process that made the handle, or that of the database, without its password.
    `database` is the id of the database that has the place.
    """

    url: str
    extent: Extent | None = None
    database: str = ""
    uid: int = 0
    start: int = 0

    @property
    def place(self) -> Any:
        """A key of the place or database, whose arrays are read together."""
        return self.url, self.database, None if self.extent is None else self.extent.place


def _read_arrays(arrays: Sequence[tuple[ByteSource, DeferredArray]], timeout: float) -> list[Any]:
    """Return the bytes of arrays in one place or database, or an error for each that can't be read."""
    first = arrays[0][0]
    if first.extent is not None:
        url = local_url(first.database, first.extent.place, first.url)
        ranges = [source.extent.part(at.block_at, at.block_size) for source, at in arrays if source.extent is not None]
        return _store(url, timeout, os.getpid()).read(ranges, timeout)
    parts = [(source.uid, source.start + at.block_at, at.block_size) for source, at in arrays]
    return [
        GoneError(f"group {uid} is gone") if part is None else bytearray(part)
        for (uid, _, _), part in zip(parts, _read_parts(first.url, parts, timeout), strict=True)
    ]


#: Parts of payloads: uid, first byte and number of bytes of each.
Parts = Sequence[tuple[int, int, int]]


class OpenDatabase(Protocol):
    """A database that is open in this process."""

    def read_parts(self, parts: Parts, timeout: float) -> list[bytes | None]:
        """Return parts of payloads, None where there is no payload; blocks."""


#: Open databases, by process id (threads don't survive a fork) and by their URLs in handles.
_databases: weakref.WeakValueDictionary[tuple[int, str], OpenDatabase] = weakref.WeakValueDictionary()


def register_database(url: str, database: OpenDatabase) -> None:
    """Let handles with this URL read from a database that is open in this process."""
    _databases[os.getpid(), url] = database


def database_url(engine: Database) -> str:
    """Return a database's URL in handles: the path of a file, or the URL of a server without its password."""
    if engine.path is not None:
        return os.path.abspath(engine.path)
    if engine.dialect.is_remote:
        url = engine.access.url.set(drivername=engine.access.url.get_backend_name())
        return url._replace(password=None).render_as_string(hide_password=False)
    return f"{_IN_MEMORY}{id(engine)}"


_IN_MEMORY = "memory://"


def _read_parts(url: str, parts: Parts, timeout: float) -> list[bytes | None]:
    """Read from a database, through a buffer that is open in this process if there is one."""
    reader = _databases.get((os.getpid(), url))
    if reader is not None:
        with contextlib.suppress(ClosedError):
            return reader.read_parts(parts, timeout)
    if url.startswith(_IN_MEMORY):
        raise InputError(
            "this handle is of a buffer in memory, which only its own process can read, as long as it is open: load it "
            "there, or keep the buffer in a file or on a server (url=)"
        )
    return _read_elsewhere(url, parts, timeout)


def _read_elsewhere(url: str, parts: Parts, timeout: float) -> list[bytes | None]:
    """Read from a database that isn't open here. A password, if needed, must be known to the driver (PGPASSFILE)."""

    async def read() -> list[bytes | None]:
        access = Access(url_or_path(url), lock_timeout=timeout, reconnect_timeout=timeout, read_only=True)
        engine = open_database(access)
        try:
            return await engine.read(lambda tx: tx.read_ranges(parts))
        finally:
            await engine.dispose()

    try:
        return wait_for(asyncio.wait_for(read(), timeout))
    except TimeoutError as error:
        if isinstance(error, ReplayBufError):
            raise
        raise UnreachableError(f"{url} did not answer within {timeout:g} s while arrays were read") from error


@lru_cache(maxsize=8)
def _store(url: str, timeout: float, process: int) -> PlaceStore:
    """Return the open place at a URL, one of the last few; another one in each process."""
    return open_place(url, timeout)


def handles_of(url: str, database: str, places: Mapping[int, str], uid: int, payload: bytes) -> Instead:
    """Return the maker of handles of a payload: its head alone, a head with an extent, or a whole small payload.

    `url` and `database` are the URL and the id of the database, `places` has the URLs of the places where payloads are
    kept apart.
    """
    if (end := head_size(payload)) is None:
        return partial(_handle, None)
    if len(payload) == end:
        return partial(_handle, ByteSource(url, uid=uid, start=len(payload)))
    extent = Extent.at_end_of(payload)
    if extent.place not in places:
        raise DecodeError(f"group {uid}: the database doesn't know the place {extent.place} of its arrays")
    return partial(_handle, ByteSource(places[extent.place], extent, database))


def _handle(source: ByteSource | None, array: DeferredArray | np.ndarray[Any, Any]) -> ArrayHandle:
    """Return the handle of an array, with its bytes if it was read: a compressed payload can't be read in part."""
    if isinstance(array, DeferredArray):
        assert source is not None
        return ArrayHandle(str(array.dtype), array.shape, array.nbytes, source, array)
    deferred, raw = DeferredArray.of(array)
    return ArrayHandle(str(array.dtype), array.shape, array.nbytes, raw, deferred)
