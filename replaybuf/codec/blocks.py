"""Blocks: the bytes of arrays in a payload, written from their own memory and read without a copy.

The msgpack refers to an array by its *number* in the payload, so that an array which occurs several times comes back as
one. Arrays of less than `SMALL` bytes are inside the msgpack. Those of up to `GROUPED` bytes in one column share a
block, one after the other; each larger one has a block of its own, which equal arrays share: reading copies it.

No reference can make the reader allocate more than the payload has, times `MOST_USES`.
"""

from __future__ import annotations

import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Final, Protocol

import msgpack  # type: ignore[import-untyped]
import numpy as np

from replaybuf.codec.extension_types import ARRAY_IN_BLOCK, SMALL_ARRAY
from replaybuf.codec.numpy_arrays import (
    AnyArray,
    array_head,
    decode_array,
    describe_dtype,
    read_head,
    simple_dtype,
)
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
_PLACE: Final = struct.Struct("<III")
_Extension: Final = msgpack.ExtType
_make: Final = tuple.__new__  # bypasses the checks of ExtType.__new__
_ONLY_INT: Final = frozenset({int})
#: The kinds of dtypes whose memory numpy lends.
_LENT: Final = frozenset("biufcSU")


class RawBytes(np.ndarray[Any, Any]):
    """Bytes as an array, of a value that isn't an array. They are read as an array of this dtype and shape."""


class BlockWriter:
    """The blocks of one payload, and the numbers of its arrays. Buffers may share the memory of the arrays."""

    __slots__ = ("_alike", "_columns", "_in_columns", "_known", "_next", "blocks", "sizes")

    def __init__(self) -> None:
        #: The buffers of each block.
        self.blocks: list[Sequence[Any]] = []
        self.sizes: list[int] = []
        self._next = 0
        # By id: the reference to an array, and the array. Keeping arrays keeps their ids their own.
        self._known: dict[int, tuple[Any, AnyArray]] = {}
        # The ids of arrays in columns; and the number of the first array, the block, and the arrays of each column.
        self._in_columns: set[int] = set()
        self._columns: list[tuple[int, int, Sequence[AnyArray]]] = []
        # By size and some items: the array in a block, its number, and how often it is used.
        self._alike: dict[Any, tuple[AnyArray, int, int]] = {}

    def reference(self, array: AnyArray) -> Any:
        """Return the object that msgpack packs for an array. TypeError for dtypes that would not round-trip."""
        known = self._known.get(id(array))
        if known is not None:
            return known[0]
        head, lends = array_head(array.dtype, array.shape)
        if id(array) in self._in_columns:
            made = _in_block(*self._place_in_column(array), head)
        else:
            number, self._next = self._next, self._next + 1
            if array.nbytes < SMALL:
                made = _make(_Extension, (SMALL_ARRAY, _NUMBER.pack(number) + head + array.tobytes()))
            else:
                lent = array if lends and array.flags.c_contiguous else np.frombuffer(array.tobytes(), np.uint8)
                made = _in_block(number, self._block_of(lent), 0, head)
        self._known[id(array)] = made, array
        return made

    def _place_in_column(self, array: AnyArray) -> tuple[int, int, int]:
        """Return the number of an array of a column, its block, and its position there."""
        for number, block, arrays in self._columns:
            at = 0
            for index, one in enumerate(arrays):
                if one is array:
                    return number + index, block, at
                at += one.nbytes
        raise LookupError("no such array")

    def _block_of(self, array: AnyArray) -> int:
        """Return the number of the block with the bytes of this array."""
        block = len(self.blocks)
        if array.nbytes >= GROUPED:
            key = array.nbytes, array.item(0), array.item(array.size // 2), array.item(-1)
            like, found, uses = self._alike.get(key, (None, block, 0))
            if like is not None and uses < MOST_USES and np.array_equal(_bits(array), _bits(like)):
                self._alike[key] = like, found, uses + 1
                return found
            self._alike[key] = array, block, 1
        self.blocks.append((array,))
        self.sizes.append(array.nbytes)
        return block

    def column(self, arrays: Sequence[AnyArray]) -> list[Any] | None:
        """Return the content of a column of small arrays in one block; None if they can't share one."""
        first = arrays[0]
        dtype, dimensions, nbytes = first.dtype, first.ndim, 0
        for array in arrays:
            if (
                type(array) is not np.ndarray
                or array.dtype is not dtype
                or array.ndim != dimensions
                or not array.flags.c_contiguous
            ):
                return None
            if (size := array.nbytes) > GROUPED:
                return None
            nbytes += size
        if not SMALL <= nbytes <= _MOST_GROUPED or dtype.kind not in _LENT:
            return None
        ids = {*map(id, arrays)}
        if len(ids) != len(arrays) or not self._in_columns.isdisjoint(ids) or not self._known.keys().isdisjoint(ids):
            return None
        number, block = self._next, len(self.blocks)
        content = [describe_dtype(dtype), number, block, _shapes_of(arrays, dimensions)]
        self._next += len(arrays)
        self.blocks.append(arrays)
        self.sizes.append(nbytes)
        self._in_columns.update(ids)
        self._columns.append((number, block, arrays))
        return content


def _bits(array: AnyArray) -> AnyArray:
    return array.reshape(-1).view(np.uint8 if array.nbytes % 8 else np.uint64)


def block_of(content: bytes) -> int:
    """Return the number of the block to which the content of an extension object refers."""
    return int(_PLACE.unpack_from(content)[1])


def _shapes_of(arrays: Sequence[AnyArray], dimensions: int) -> list[Any]:
    return [*map(len, arrays)] if dimensions == 1 else [list(array.shape) for array in arrays]


def _in_block(number: int, block: int, at: int, head: bytes) -> Any:
    return _make(_Extension, (ARRAY_IN_BLOCK, _PLACE.pack(number, block, at) + head))


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
class _Column:
    """A column in one block: number of the first array, lengths or shapes, and the item where each begins."""

    number: int
    block: int
    dtype: np.dtype[Any]
    shapes: Sequence[Any]
    ends: Sequence[int]
    arrays: list[AnyArray] | None = None


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
        self._pieces = pieces
        self._instead = instead
        self.deferring = deferring
        self._read: dict[int, Any] = {}
        self._replaced: dict[int, Any] = {}
        # By block: the numbers of the arrays that were read from it, the first one of a column.
        self._uses: dict[int, set[int]] = {}
        # References to arrays of columns that weren't read yet: number, block, position and shape of each.
        self._ahead: set[tuple[int, int, int, tuple[int, ...]]] = set()
        self._columns: list[_Column] = []

    def small(self, content: bytes) -> Any:
        """Return the array in an extension object. Raises any exception for an invalid one."""
        (number,) = _NUMBER.unpack_from(content)
        known = self._replaced if self.deferring else self._read
        if number not in known:
            array = decode_array(content, _NUMBER.size)
            known[number] = self._instead.held(array) if self.deferring and self._instead else array
        return known[number]

    def large(self, content: bytes) -> Any:
        """Return the array that an extension object refers to. Raises any exception for an invalid one."""
        number, block, at = _PLACE.unpack_from(content)
        known = self._replaced if self.deferring else self._read
        if number in known:
            return known[number]
        for column in self._columns:
            if 0 <= number - column.number < len(column.shapes):
                return self._member(column, number - column.number)
        dtype, shape = read_head(content[_PLACE.size :])
        nbytes, size = math.prod(shape) * dtype.itemsize, self._head.sizes[block]
        if at + nbytes > size:
            raise ValueError(f"an array of shape {shape!r:.80} can't have {size} bytes")
        if nbytes == size:
            uses = self._uses.setdefault(block, set())
            uses.add(number)
            if len(uses) > MOST_USES:
                raise ValueError(f"{len(uses)} arrays in one block")
        else:
            self._ahead.add((number, block, at, shape))
        return self._array(number, block, at, dtype, shape, nbytes)

    def column(self, content: Any, rows: int) -> list[Any]:
        """Return the arrays of a column in one block. Raises any exception for an invalid content."""
        description, number, block, shapes = content
        dtype = simple_dtype(description)
        if type(shapes) is not list or len(shapes) != rows or type(block) is not int or type(number) is not int:
            raise ValueError("no column of arrays")
        sizes = shapes if _ONLY_INT.issuperset(map(type, shapes)) else [*map(_size, shapes)]
        ends = [*accumulate(sizes, initial=0)]
        if block < 0 or min(sizes) < 0 or ends[-1] * dtype.itemsize != self._head.sizes[block]:
            raise ValueError("no column of arrays: its lengths don't add up")
        column = _Column(number, block, dtype, shapes, ends)
        uses = self._uses.setdefault(block, set())
        if any(not 0 <= one - number < rows for one in uses):
            raise ValueError("an array in the block of a column")
        if self.deferring or self._ahead or uses or sizes is not shapes:
            found = [self._member(column, index) for index in range(rows)]
        else:
            found = column.arrays = self._together(column, sizes)
        uses.add(number)
        self._columns.append(column)
        return found

    def _together(self, column: _Column, sizes: Sequence[int]) -> list[AnyArray]:
        """Return the arrays of a column, which have one dimension: views of one array, unless they would keep it."""
        flat = self._view(column.block, 0, column.dtype, (column.ends[-1],))
        least = min(sizes) * column.dtype.itemsize * _MOST_KEPT
        if not self._lends or least < self._kept:
            flat = flat.copy()
            if least < flat.nbytes:
                return [flat[start:end].copy() for start, end in pairwise(column.ends)]
        if sizes.count(sizes[0]) == len(sizes):
            return [*flat.reshape(len(sizes), sizes[0])]
        return [flat[start:end] for start, end in pairwise(column.ends)]

    def _member(self, column: _Column, index: int) -> Any:
        """Return an array of a column, which may have been read before."""
        if column.arrays is not None and not self.deferring:
            return column.arrays[index]
        number = column.number + index
        known = self._replaced if self.deferring else self._read
        shape, at = column.shapes[index], column.ends[index] * column.dtype.itemsize
        shape = (shape,) if type(shape) is int else tuple(shape)
        self._ahead.discard((number, column.block, at, shape))
        if number not in known:
            self._array(number, column.block, at, column.dtype, shape, math.prod(shape) * column.dtype.itemsize)
        return known[number]

    def finish(self) -> None:
        """Raise ValueError unless all blocks were read, and no references to parts of them overlap."""
        if len(self._uses) != len(self._head.sizes) or self._ahead:
            raise ValueError("its arrays don't match its blocks")

    def _array(self, number: int, block: int, at: int, dtype: np.dtype[Any], shape: Any, nbytes: int) -> Any:
        if self.deferring and self._instead is not None:
            if self._blocks is None:
                size, digest_, start = self._head.sizes[block], self._head.digests[block], self._head.starts[block]
                made = self._instead.deferred(DeferredArray(dtype, shape, nbytes, at, start, size, digest_))
            else:
                made = self._instead.held(self._view(block, at, dtype, shape))
            self._replaced[number] = made
            return made
        array = self._view(block, at, dtype, shape)
        if not self._lends or len(self._uses.get(block, ())) > 1 or nbytes * _MOST_KEPT < self._kept:
            array = array.copy()
        self._read[number] = array
        return array

    def _view(self, block: int, at: int, dtype: np.dtype[Any], shape: Any) -> AnyArray:
        size = self._head.sizes[block]
        if self._blocks is not None:
            return np.ndarray(shape, dtype, self._blocks, self._head.starts[block] + at)
        raw = (self._pieces or {})[block]
        if len(raw) != size or digest(raw) != self._head.digests[block]:
            raise DecodeError(f"a block of {size} bytes is damaged: its checksum doesn't match")
        return np.ndarray(shape, dtype, raw, at)


def _size(shape: list[int]) -> int:
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
