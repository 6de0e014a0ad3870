"""Blocks: the bytes of arrays in a payload, written from their own memory and read without a copy.

The msgpack of a payload ends with the *table* of its arrays: dtype, block and shapes of one or more arrays, again and
again. The columns refer to an array by its entry in the table and its place there, so that an array which occurs
several times comes back as one. Arrays of an entry are in one block, one after the other, if each has up to `GROUPED`
bytes; larger ones have a block each, which equal arrays share: reading copies it. Shapes of arrays with one dimension
are their lengths. Arrays of less than `SMALL` bytes that are no column are inside the msgpack, with a number.

No reference can make the reader allocate more than the payload has, times `MOST_USES`.
"""

from __future__ import annotations

import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any, Final, Protocol

import msgpack  # type: ignore[import-untyped]
import numpy as np

from replaybuf.codec.extension_types import ARRAY_IN_BLOCK, SMALL_ARRAY
from replaybuf.codec.numpy_arrays import AnyArray, array_head, decode_array, describe_dtype, simple_dtype
from replaybuf.codec.payload_header import Head, digest
from replaybuf.errors import DecodeError

#: Smaller arrays are in the msgpack.
SMALL: Final = 256
#: Larger arrays have a block of their own.
GROUPED: Final = 4096
#: The most bytes of a block that several arrays share, which is read as a whole.
_MOST_GROUPED: Final = 256 << 10
#: How often a block may be read as another array of the same bytes.
MOST_USES: Final = 16
#: The maximum ratio of the memory that a retained array keeps alive to its own bytes.
_MOST_KEPT: Final = 64
_NUMBER: Final = struct.Struct("<I")
_PLACE: Final = struct.Struct("<II")
_make: Final = tuple.__new__  # bypasses the checks of ExtType.__new__
_DTYPE: Final = attrgetter("dtype")
_DIMENSIONS: Final = attrgetter("ndim")
_ONLY_INT: Final = frozenset({int})
_ONLY_ARRAYS: Final = frozenset({np.ndarray})
#: The kinds of dtypes that can be stored, and of those whose memory numpy lends.
_STORED: Final = frozenset("biufcSUmM")
_LENT: Final = frozenset("biufcSU")


class RawBytes(np.ndarray[Any, Any]):
    """Bytes as an array, of a value that isn't an array. They are read as an array of this dtype and shape."""


class BlockWriter:
    """The blocks of one payload, and its `table` of arrays. Blocks may share the memory of large arrays."""

    __slots__ = ("_alike", "_entries", "_known", "_small", "blocks", "sizes", "table")

    def __init__(self) -> None:
        self.blocks: list[Any] = []
        self.sizes: list[int] = []
        self.table: list[Any] = []
        self._entries = 0
        # By id of an array: what msgpack packs for it, or its entry; and the arrays, whose ids are thus their own.
        self._known: dict[int, tuple[Any, Sequence[AnyArray]]] = {}
        self._small = 0
        # By size and some items: the array in a block, the block, and how often it is used.
        self._alike: dict[Any, tuple[AnyArray, int, int]] = {}

    def reference(self, array: AnyArray) -> Any:
        """Return the object that msgpack packs for an array. TypeError for dtypes that would not round-trip."""
        made, arrays = self._known.get(id(array), (None, ()))
        if made is None:
            if array.nbytes < SMALL:
                content = _NUMBER.pack(self._small) + array_head(array.dtype, array.shape) + array.tobytes()
                made, arrays = _make(msgpack.ExtType, (SMALL_ARRAY, content)), (array,)
                self._small += 1
            else:
                shape: Any = len(array) if array.ndim == 1 else list(array.shape)
                made = self._entry(describe_dtype(array.dtype), [self._block_of(array)], [shape])
        if type(made) is int:
            place = next((place for place, one in enumerate(arrays) if one is array), 0)
            made, arrays = _make(msgpack.ExtType, (ARRAY_IN_BLOCK, _PLACE.pack(made, place))), (array,)
        self._known[id(array)] = made, arrays
        return made

    def column(self, arrays: Sequence[AnyArray]) -> int | None:
        """Return the entry of the arrays of a column; None if they can't be in one."""
        first, rows = arrays[0], len(arrays)
        dtype, dimensions = first.dtype, first.ndim
        if not _ONLY_ARRAYS.issuperset(map(type, arrays)) or dtype.kind not in _STORED:
            return None
        if [*map(_DTYPE, arrays)].count(dtype) < rows or [*map(_DIMENSIONS, arrays)].count(dimensions) < rows:
            return None
        ids = {*map(id, arrays)}
        if len(ids) < rows or not self._known.keys().isdisjoint(ids):
            return None
        shapes: list[Any]
        if dimensions == 1:
            sizes = shapes = [*map(len, arrays)]
        else:
            shapes, sizes = [list(array.shape) for array in arrays], [array.size for array in arrays]
        blocks: Any
        if max(sizes) * dtype.itemsize > GROUPED:
            blocks = self._blocks_of(arrays)
        elif SMALL <= (nbytes := sum(sizes) * dtype.itemsize) <= _MOST_GROUPED:
            blocks = len(self.blocks)
            self.blocks.append(_together(arrays))
            self.sizes.append(nbytes)
        else:
            return None
        entry = self._entry(describe_dtype(dtype), blocks, shapes)
        self._known.update(dict.fromkeys(ids, (entry, arrays)))
        return entry

    def _entry(self, dtype: str, blocks: Any, shapes: list[Any]) -> int:
        self.table += dtype, blocks, shapes
        self._entries += 1
        return self._entries - 1

    def _blocks_of(self, arrays: Sequence[AnyArray]) -> list[int]:
        """Return the number of a block for each array, which equal ones share."""
        first, sizes = len(self.blocks), [array.nbytes for array in arrays]
        ends = {(size, array.item(0), array.item(-1)) for size, array in zip(sizes, arrays, strict=True) if size}
        if len(ends) < len(arrays) or not _are_lent(arrays):
            return [*map(self._block_of, arrays)]
        self.blocks += arrays
        self.sizes += sizes
        return [*range(first, len(self.blocks))]

    def _block_of(self, array: AnyArray) -> int:
        """Return the number of the block with the bytes of this array."""
        if array.nbytes < GROUPED:
            return self._add(array)
        key = array.nbytes, array.item(0), array.item(array.size // 2), array.item(-1)
        like, found, uses = self._alike.get(key, (None, len(self.blocks), 0))
        if like is not None and uses < MOST_USES and _are_equal(array, like):
            self._alike[key] = like, found, uses + 1
            return found
        self._alike[key] = array, len(self.blocks), 1
        return self._add(array)

    def _add(self, array: AnyArray) -> int:
        self.blocks.append(array if _are_lent((array,)) else array.tobytes())
        self.sizes.append(array.nbytes)
        return len(self.blocks) - 1


def _together(arrays: Sequence[AnyArray]) -> bytes:
    """Return the bytes of arrays in C order, one after the other."""
    try:
        return b"".join(arrays)  # type: ignore[arg-type]
    except (BufferError, TypeError, ValueError):  # not in C order, or of times, whose memory numpy doesn't lend
        return b"".join([array.tobytes() for array in arrays])


def _are_lent(arrays: Sequence[AnyArray]) -> bool:
    """Return whether numpy lends the memory of these arrays, of one dtype, in C order."""
    return arrays[0].dtype.kind in _LENT and all(array.flags.c_contiguous for array in arrays)


def _are_equal(one: AnyArray, other: AnyArray) -> bool:
    """Return whether two arrays of as many bytes have the same bytes."""
    if one.flags.c_contiguous and other.flags.c_contiguous and one.nbytes % 8 == 0:
        return bool((one.reshape(-1).view(np.uint64) == other.reshape(-1).view(np.uint64)).all())
    return one.tobytes() == other.tobytes()


@dataclass(frozen=True, slots=True)
class DeferredArray:
    """An array that isn't loaded: its dtype and shape, and its position in its block.

    `block_at` is the position of the block, from the end of the head; it is read as a whole, to be verified.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    nbytes: int
    at: int
    block_at: int
    block_size: int
    digest: int

    @classmethod
    def of(cls, array: AnyArray) -> tuple[DeferredArray, bytes]:
        """Return the description of a loaded array, and its bytes."""
        raw = array.tobytes()
        return cls(array.dtype, array.shape, len(raw), 0, 0, len(raw), digest(raw)), raw


class Deferring(Protocol):
    """Makes what replaces arrays."""

    def deferred(self, array: DeferredArray) -> Any:
        """Return what replaces an array in a block."""

    def held(self, array: AnyArray) -> Any:
        """Return what replaces an array that was loaded with the head."""


class StandIn(ABC):
    """A handle in place of an array, as passed to decoders of values that consist of arrays."""

    @abstractmethod
    def as_tensor(self, name: str, shape: Sequence[int], build: Callable[[Any], Any], flags: int) -> Any:
        """Return the handle of a tensor with these bytes; `build` makes the tensor from its content."""


@dataclass(frozen=True, slots=True)
class ArrayFacts(StandIn):
    """The type and size of an array or tensor without its bytes; `out_of_band` unless it is stored in the msgpack."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    out_of_band: bool

    def as_tensor(self, name: str, shape: Sequence[int], build: Callable[[Any], Any], flags: int) -> ArrayFacts:
        return ArrayFacts(name, tuple(shape), self.nbytes, self.out_of_band)


class Facts:
    """Puts the type and size of each array in its place."""

    def deferred(self, array: DeferredArray) -> ArrayFacts:
        return ArrayFacts(str(array.dtype), array.shape, array.nbytes, out_of_band=True)

    def held(self, array: AnyArray) -> ArrayFacts:
        return ArrayFacts(str(array.dtype), array.shape, array.nbytes, out_of_band=False)


class Nothing:
    """Puts None in the place of arrays that can't be read."""

    def deferred(self, array: DeferredArray) -> None:
        return None

    def held(self, array: AnyArray) -> AnyArray:
        return array


def checked_array(array: DeferredArray, block: Any) -> AnyArray:
    """Return an array in the memory of its block. Raises DecodeError when the checksum of the block is wrong."""
    if len(block) != array.block_size or digest(block) != array.digest:
        raise DecodeError(f"an array of {array.nbytes} bytes is damaged: its checksum doesn't match")
    made: AnyArray = np.ndarray(array.shape, array.dtype, block, array.at)
    return made if array.nbytes * _MOST_KEPT >= array.block_size else made.copy()


@dataclass(slots=True)
class _Entry:
    """Some arrays of a payload: their block, or a block each; the item where each begins, from the first on."""

    dtype: np.dtype[Any]
    blocks: Any
    shapes: Sequence[Any]
    sizes: Sequence[int]
    ends: Sequence[int]
    arrays: Sequence[Any] | None = None

    def shape(self, place: int) -> tuple[int, ...]:
        shape = self.shapes[place]
        return (shape,) if type(shape) is int else tuple(shape)


class BlockReader:
    """Reads the arrays of one payload, given all of its blocks, some of them, or none.

    `blocks` is the memory of all blocks, verified before. If it `lends` itself, which is safe without other references
    to it, arrays share it, except small ones, which would keep far more than themselves alive. `pieces` are single
    blocks by number, which are verified here. While `deferring`, `instead` makes what replaces arrays.
    """

    def __init__(
        self,
        head: Head,
        blocks: Any = None,
        *,
        kept: int = 0,
        lends: bool = False,
        pieces: Mapping[int, Any] | None = None,
        instead: Deferring | None = None,
        deferring: bool = False,
    ) -> None:
        self._head = head
        self._blocks = blocks
        self._kept = kept
        self._lends = lends
        self._pieces = pieces or {}
        self._instead = instead
        self.deferring = deferring
        self._small: dict[tuple[int, bool], Any] = {}
        self._replaced: dict[tuple[int, int], Any] = {}
        self._lent: set[int] = set()
        self._entries: list[_Entry] = []

    def read_table(self, table: Any) -> None:
        """Read the table of arrays, before all else. Raises any exception unless it is one of these blocks."""
        if type(table) is not list or len(table) % 3:
            raise ValueError("no table of arrays")
        sizes_of, uses = self._head.sizes, [0] * len(self._head.sizes)
        for description, blocks, shapes in zip(table[::3], table[1::3], table[2::3], strict=True):
            if type(shapes) is not list or not shapes:
                raise ValueError("no shapes of arrays")
            dtype = simple_dtype(description)
            sizes = shapes if _ONLY_INT.issuperset(map(type, shapes)) else [*map(_size, shapes)]
            item = dtype.itemsize
            ends = [*accumulate(sizes, initial=0)]
            if type(blocks) is int:
                fits = blocks >= 0 and sizes_of[blocks] == ends[-1] * item
                uses[blocks] += MOST_USES
            else:
                fits = min(blocks) >= 0 and [sizes_of[block] for block in blocks] == [size * item for size in sizes]
                for block in blocks:
                    uses[block] += 1
            if min(sizes) < 0 or not fits:
                raise ValueError("its arrays don't match its blocks")
            self._entries.append(_Entry(dtype, blocks, shapes, sizes, ends))
        if not 0 < min(uses) <= max(uses) <= MOST_USES:
            raise ValueError("its arrays don't match its blocks")

    def small(self, content: bytes) -> Any:
        """Return the array in an extension object. Raises any exception for an invalid one."""
        key = _NUMBER.unpack_from(content)[0], self.deferring
        if key not in self._small:
            array = decode_array(content, _NUMBER.size)
            self._small[key] = self._instead.held(array) if self.deferring and self._instead else array
        return self._small[key]

    def large(self, content: bytes) -> Any:
        """Return the array that an extension object refers to. Raises any exception for an invalid one."""
        entry, place = _PLACE.unpack(content)
        return self._instead_of(entry, place) if self.deferring else self._arrays(self._entries[entry])[place]

    def column(self, entry: Any, rows: int) -> Sequence[Any]:
        """Return the arrays of a column. Raises any exception for an invalid one."""
        if type(entry) is not int or entry < 0 or len(self._entries[entry].shapes) != rows:
            raise ValueError("no column of arrays")
        if self.deferring:
            return [self._instead_of(entry, place) for place in range(rows)]
        return self._arrays(self._entries[entry])

    def _arrays(self, entry: _Entry) -> Sequence[Any]:
        if entry.arrays is None:
            entry.arrays = self._read(entry)
        return entry.arrays

    def _read(self, entry: _Entry) -> Sequence[Any]:
        if type(entry.blocks) is int:
            return self._together(entry)
        return [
            self._alone(block, entry.dtype, entry.shapes[place], size)
            for place, (block, size) in enumerate(zip(entry.blocks, entry.sizes, strict=True))
        ]

    def _alone(self, block: int, dtype: np.dtype[Any], shape: Any, size: int) -> AnyArray:
        array = self._view(block, dtype, shape)
        if self._lends and size * dtype.itemsize * _MOST_KEPT >= self._kept and block not in self._lent:
            self._lent.add(block)
            return array
        return array.copy()

    def _together(self, entry: _Entry) -> Sequence[Any]:
        """Return arrays of one block: views of one array, unless they would keep it."""
        flat = self._view(entry.blocks, entry.dtype, entry.ends[-1])
        sizes = entry.sizes
        least = min(sizes) * entry.dtype.itemsize * _MOST_KEPT
        alone = False
        if not self._lends or least < self._kept:
            flat, alone = flat.copy(), least < flat.nbytes
        arrays: list[AnyArray]
        if sizes.count(sizes[0]) == len(sizes):
            arrays = [*flat.reshape(len(sizes), sizes[0])]
        else:
            arrays = [flat[start:end] for start, end in pairwise(entry.ends)]
        if sizes is not entry.shapes:
            arrays = [array.reshape(entry.shape(place)) for place, array in enumerate(arrays)]
        return [array.copy() for array in arrays] if alone else arrays

    def _instead_of(self, number: int, place: int) -> Any:
        """Return what replaces an array."""
        if (number, place) not in self._replaced and self._instead is not None:
            entry, head = self._entries[number], self._head
            together = type(entry.blocks) is int
            block, at = (entry.blocks, entry.ends[place]) if together else (entry.blocks[place], 0)
            shape, nbytes, at = entry.shape(place), entry.sizes[place] * entry.dtype.itemsize, at * entry.dtype.itemsize
            if self._blocks is None:
                array = DeferredArray(
                    entry.dtype, shape, nbytes, at, head.starts[block], head.sizes[block], head.digests[block]
                )
                made = self._instead.deferred(array)
            else:
                made = self._instead.held(self._arrays(entry)[place])
            self._replaced[number, place] = made
        return self._replaced[number, place]

    def _view(self, block: int, dtype: np.dtype[Any], shape: Any) -> AnyArray:
        if self._blocks is not None:
            return np.ndarray(shape, dtype, self._blocks, self._head.starts[block])
        raw = self._pieces[block]
        if len(raw) != self._head.sizes[block] or digest(raw) != self._head.digests[block]:
            raise DecodeError(f"a block of {self._head.sizes[block]} bytes is damaged: its checksum doesn't match")
        return np.ndarray(shape, dtype, raw)


class BlockNeeds(BlockReader):
    """Notes which `blocks` would be read."""

    def __init__(self, head: Head) -> None:
        super().__init__(head, instead=Nothing())
        self.blocks: set[int] = set()

    def _read(self, entry: _Entry) -> Sequence[Any]:
        self.blocks.update([entry.blocks] if type(entry.blocks) is int else entry.blocks)
        return [None] * len(entry.shapes)


def _size(shape: Any) -> int:
    if type(shape) is int:
        return shape
    if type(shape) is not list or not _ONLY_INT.issuperset(map(type, shape)) or min(shape, default=0) < 0:
        raise ValueError(f"no shape: {shape!r:.80}")
    return math.prod(shape)


class _Memory:
    """Exports the memory of bytes to numpy as writable."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        address = np.frombuffer(raw, np.uint8).__array_interface__["data"][0]
        self.__array_interface__ = {"shape": (len(raw),), "typestr": "|u1", "data": (address, False), "version": 3}


def as_writable(raw: bytes) -> AnyArray:
    """Return a writable array that shares the memory of otherwise unreferenced bytes, which saves a copy.

    Bytes of length 0 and 1 are copied, because Python shares them in the whole process.
    """
    if len(raw) < 2:
        return np.frombuffer(bytearray(raw), np.uint8)
    return np.asarray(_Memory(raw))
