"""Handles: arrays that weren't read with their group, and are loaded on demand, on any host."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, TypeVar, cast

import numpy as np

from replaybuf.common.checks import check_seconds
from replaybuf.errors import DecodeError, InputError, LeaseLostError
from replaybuf.storage.places.owners import local_url, open_place
from replaybuf.storage.places.store import Extent, GoneError, PlaceStore
from replaybuf.values.codec.blocks import DeferredArray, Instead, StandIn, checked_array
from replaybuf.values.codec.payload_format import is_apart
from replaybuf.values.codec.replacing import Replacing

#: Default timeout for reads from a place, in seconds.
PATIENCE = 60.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ArrayHandle(StandIn):
    """An array or tensor that wasn't read with its group: `load` returns one with this `dtype`, `shape` and `nbytes`.

    Handles can be pickled and sent to other processes, on any host that reaches the place where the payloads are kept.
    They are valid as long as the lease that they came with or, from `find`, as long as the group exists. Those of
    payloads in the database, which are read whole, have the bytes with them.
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
        PayloadStoreError if they can't be reached.
        """
        [loaded] = load_all([self])
        return loaded

    async def load_async(self) -> Any:
        """Run `load` in another thread."""
        return await asyncio.to_thread(self.load)

    def as_tensor(self, name: str, shape: Sequence[int], build: Callable[[Any], Any]) -> ArrayHandle:
        """Return the handle of a tensor built from these bytes."""
        return replace(self, dtype=name, shape=tuple(shape), _tensor=(name, tuple(shape), build))

    def made(self, raw: Any, *, shared: bool = False) -> Any:
        """Return the array or tensor built from a block that was read, its own or `shared`. Raises DecodeError."""
        array = checked_array(self.array, raw)
        array = array.copy() if shared else array
        if self._tensor is None:
            return array
        name, shape, build = self._tensor
        return build([name, list(shape), array])


def load_all(handles: Iterable[ArrayHandle], *, timeout: float = PATIENCE) -> list[Any]:
    """Return the arrays and tensors of many handles, in few requests; blocks. Errors are those of `ArrayHandle.load`.

    `timeout` bounds the wait for an unreachable place, in seconds.
    """
    wanted, seconds = list(handles), check_seconds(timeout, "timeout")
    for one in wanted:
        if not isinstance(one, ArrayHandle):
            raise InputError(f"handles must be ArrayHandles, got {type(one).__name__}")
    by_place: dict[Any, dict[tuple[ByteSource, int], list[int]]] = {}
    found: list[Any] = [None] * len(wanted)
    for index, one in enumerate(wanted):
        if isinstance(one.source, bytes):
            found[index] = one.made(bytearray(one.source))
        else:
            blocks = by_place.setdefault(one.source.place, {})
            blocks.setdefault((one.source, one.array.block_at), []).append(index)
    for blocks in by_place.values():
        chosen = [(source, wanted[first].array) for (source, _), (first, *_) in blocks.items()]
        for members, raw in zip(blocks.values(), _read(chosen, seconds), strict=True):
            for index in members:
                found[index] = _made(wanted[index], raw, shared=len(members) > 1)
    return found


def _made(handle: ArrayHandle, raw: Any, *, shared: bool) -> Any:
    """Return the array or tensor built from bytes that were read, or raise the read's error."""
    if isinstance(raw, GoneError):
        raise _lost(raw)
    if isinstance(raw, Exception):
        raise raw
    return handle.made(raw, shared=shared)


def _lost(error: GoneError) -> LeaseLostError:
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
    found: dict[int, ArrayHandle] = {}

    def note(handle: ArrayHandle) -> ArrayHandle:
        found[id(handle)] = handle
        return handle

    Replacing(_is_handle, note).replace(holders)
    loaded = dict(zip(found, load_all(found.values(), timeout=timeout), strict=True))
    return cast(T, Replacing(_is_handle, lambda handle: loaded[id(handle)]).replace(holders))


def _is_handle(value: Any) -> bool:
    return isinstance(value, ArrayHandle)


@dataclass(frozen=True, slots=True)
class ByteSource:
    """The location of arrays' bytes: the `extent` of a file in a place of the `database` with this id.

    `url` is the place's in the process that made the handle.
    """

    url: str
    extent: Extent
    database: str

    @property
    def place(self) -> Any:
        """A key of the place, whose arrays are read together."""
        return self.url, self.database, self.extent.place


def _read(wanted: Sequence[tuple[ByteSource, DeferredArray]], timeout: float) -> list[Any]:
    """Return the bytes of arrays in one place, or an error for each that can't be read."""
    first = wanted[0][0]
    url = local_url(first.database, first.extent.place, first.url)
    ranges = [one.extent.part(at.block_at, at.block_size) for one, at in wanted]
    return _store(url, timeout, os.getpid()).read(ranges, timeout)


@lru_cache(maxsize=8)
def _store(url: str, timeout: float, process: int) -> PlaceStore:
    """Return the open place at a URL, one of the last few; another one in each process."""
    return open_place(url, timeout)


def handles_of(database: str, places: Mapping[int, str], uid: int, payload: bytes) -> Instead:
    """Return the maker of handles of a payload: a whole one, or a head with an extent.

    `database` is the id of the database, `places` has the URLs of the places where payloads are kept apart.
    """
    if not is_apart(payload):
        return partial(_handle, None)
    extent = Extent.at_end_of(payload)
    if extent.place not in places:
        raise DecodeError(f"group {uid}: the database doesn't know the place {extent.place} of its arrays")
    return partial(_handle, ByteSource(places[extent.place], extent, database))


def _handle(source: ByteSource | None, array: DeferredArray | np.ndarray[Any, Any]) -> ArrayHandle:
    """Return the handle of an array, with its bytes if it was read."""
    if isinstance(array, DeferredArray):
        assert source is not None
        return ArrayHandle(str(array.dtype), array.shape, array.nbytes, source, array)
    known, raw = DeferredArray.of(array)
    return ArrayHandle(str(array.dtype), array.shape, array.nbytes, raw, known)
