"""Handles: arrays that weren't read with their group, and are loaded on demand, on any host."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, TypeVar, cast

import numpy as np

from replaybuf.common.checks import check_seconds
from replaybuf.errors import DecodeError, InputError, LeaseLostError
from replaybuf.storage.decoding import in_thread, wait_for
from replaybuf.storage.places.owners import open_place
from replaybuf.storage.places.store import Extent, GoneError, PlaceStore
from replaybuf.values.codec.blocks import DeferredArray, Instead, StandIn, checked_array
from replaybuf.values.codec.payload import Replacing
from replaybuf.values.codec.payload_format import is_apart

#: Default timeout for reads from a place, in seconds.
PATIENCE = 60.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ArrayHandle(StandIn):
    """An array or tensor that wasn't read with its group: `load` returns one with this `dtype`, `shape` and `nbytes`.

    Handles can be pickled and sent to other processes, on any host that reaches the place where the payloads are kept.
    They are valid as long as the lease that they came with or, from `find`, as long as the group exists. Where payloads
    are in the database, handles carry their bytes, and are always valid.
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
    by_place: dict[str, dict[tuple[ByteSource, int], DeferredArray]] = {}
    uses: Counter[tuple[ByteSource, int]] = Counter()
    for handle in requested:
        if not isinstance(handle.source, bytes):
            blocks = {(handle.source, part.block_at): part for part in handle.array.parts or (handle.array,)}
            by_place.setdefault(handle.source.url, {}).update(blocks)
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
    """The location of arrays' bytes: in the file of an `extent`, in the place at a URL."""

    url: str
    extent: Extent


def _read_arrays(arrays: Sequence[tuple[ByteSource, DeferredArray]], timeout: float) -> list[Any]:
    """Return the bytes of arrays in one place, or an error for each that can't be read."""
    url = arrays[0][0].url
    ranges = [source.extent.part(at.block_at, at.block_size) for source, at in arrays]
    read = partial(_store(url, timeout, os.getpid()).read, ranges)
    return wait_for(in_thread(read, timeout, url))


@lru_cache(maxsize=8)
def _store(url: str, timeout: float, process: int) -> PlaceStore:
    """Return the open place at a URL, one of the last few; another one in each process."""
    return open_place(url, timeout)


def handles_of(places: Mapping[int, str], uid: int, payload: bytes) -> Instead:
    """Return the maker of handles of a payload: of arrays that are kept apart, or that the payload has.

    `places` has the URLs of the places where payloads are kept apart.
    """
    if not is_apart(payload):
        return partial(_handle, None)
    extent = Extent.at_end_of(payload)
    if extent.place not in places:
        raise DecodeError(f"group {uid}: the database doesn't know the place {extent.place} of its arrays")
    return partial(_handle, ByteSource(places[extent.place], extent))


def _handle(source: ByteSource | None, array: DeferredArray | np.ndarray[Any, Any]) -> ArrayHandle:
    """Return the handle of an array, with its bytes if it was read."""
    if isinstance(array, DeferredArray):
        assert source is not None
        return ArrayHandle(str(array.dtype), array.shape, array.nbytes, source, array)
    deferred, raw = DeferredArray.of(array)
    return ArrayHandle(str(array.dtype), array.shape, array.nbytes, raw, deferred)
