"""The numpy arrays of a payload, of any shape: written from their memory, read in that of blocks, or left for handles.

The msgpack of a payload ends with the *table* of its arrays: dtype, bytes and shapes of one or more arrays, again and
again. The rest refers to an array by its entry in the table and its place there, so that an array which occurs several
times comes back as one. The arrays of an entry are in the table itself if they are small (their bytes, one after the
other), or in one block (its number), or in a block each (a list of numbers), which equal arrays share: reading copies
it. Arrays that repeat one number, as most masks and model steps do, are that number, in the table, unless they are
large. Shapes of arrays with one dimension are their lengths. The block of an array of a segment, which begins as an
earlier one does, has only what the array adds: in place of its number is a list of blocks and of how many bytes of
each come first in the array.
"""

from __future__ import annotations

import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any, Final

import msgpack  # type: ignore[import-untyped]
import numpy as np
from xxhash import xxh3_128

from replaybuf.errors import DecodeError
from replaybuf.values.codec.number_lists import beginnings
from replaybuf.values.codec.payload_format import Head, digest, fed
from replaybuf.values.codec.value_types import ARRAY, AnyArray, are_counts, describe_dtype, simple_dtype

#: Smaller arrays, together with the others of their column, are in the table.
SMALL: Final = 1024
#: Larger arrays have a block of their own.
GROUPED: Final = 4096
#: The most bytes of a block that several arrays share, which is read as a whole.
_MOST_GROUPED: Final = 256 << 10
#: The most blocks of one array.
_MOST_PARTS: Final = 64
#: The memory that arrays of a block keep alive, relative to the block: those of smaller ones are copies.
_MOST_KEPT: Final = 64
#: The most bytes of the arrays of a payload that repeat a number: a damaged one isn't to take all memory.
_MOST_REPEATED: Final = 1 << 28
_PLACE: Final = struct.Struct("<II")
_make_tuple: Final = tuple.__new__  # bypasses the checks of ExtType.__new__
_DTYPE: Final = attrgetter("dtype")
_DIMENSIONS: Final = attrgetter("ndim")
_ONLY_ARRAYS: Final = frozenset({np.ndarray})


@lru_cache(maxsize=1024)
def _reference(entry: int, place: int) -> Any:
    return _make_tuple(msgpack.ExtType, (ARRAY, _PLACE.pack(entry, place)))


class BlockWriter:
    """The blocks of one payload, and its `table` of arrays. Blocks may share the memory of large arrays."""

    __slots__ = ("_arrays_alike", "_placed_arrays", "_repeated_bytes", "blocks", "sizes", "table")

    def __init__(self) -> None:
        #: Of each block the buffers that it consists of.
        self.blocks: list[Sequence[Any]] = []
        self.sizes: list[int] = []
        self.table: list[Any] = []
        self._repeated_bytes = 0
        # By id of an array: its entry, its place there, and the array, whose id is thus its own.
        self._placed_arrays: dict[int, tuple[int, int, AnyArray]] = {}
        # By size and some items: the first such array, and blocks by a hash of their bytes.
        self._arrays_alike: dict[Any, tuple[AnyArray, dict[bytes, int]]] = {}

    def reference(self, array: AnyArray) -> Any:
        """Return the object that msgpack packs for an array. TypeError for dtypes that would not round-trip."""
        placed = self._placed_arrays.get(id(array))
        if placed is None:
            shape: Any = len(array) if array.ndim == 1 else list(array.shape)
            inside = array.tobytes() if array.nbytes < SMALL else [self._block_of(array)]
            self._entry((array,), array.dtype, inside, [shape])
            placed = self._placed_arrays[id(array)]
        return _reference(placed[0], placed[1])

    def put_together(self, values: Iterable[Any]) -> None:
        """Make one entry of the small arrays of each dtype among the values, to which their references then refer."""
        by_dtype: dict[Any, dict[int, AnyArray]] = {}
        for value in values:
            if type(value) is np.ndarray and value.ndim == 1 and value.nbytes <= GROUPED and not value.dtype.hasobject:
                by_dtype.setdefault(value.dtype, {})[id(value)] = value
        for by_id in by_dtype.values():
            self.column([*by_id.values()])

    def column(self, arrays: Sequence[AnyArray], origins: Sequence[int] | None = None) -> int | None:
        """Return the entry of the arrays of a column, each of which may begin as that at its origin, or None."""
        first, rows = arrays[0], len(arrays)
        dtype, dimensions = first.dtype, first.ndim
        if not _ONLY_ARRAYS.issuperset(map(type, arrays)) or dtype.hasobject:
            return None
        if [*map(_DTYPE, arrays)].count(dtype) < rows or [*map(_DIMENSIONS, arrays)].count(dimensions) < rows:
            return None
        ids = {*map(id, arrays)}
        if len(ids) < rows or not self._placed_arrays.keys().isdisjoint(ids):
            return None
        shapes: list[Any]
        if dimensions == 1:
            sizes = shapes = [*map(len, arrays)]
        else:
            shapes, sizes = [list(array.shape) for array in arrays], [array.size for array in arrays]
        if max(sizes) * dtype.itemsize > GROUPED:
            inside = [*map(self._block_of, arrays)] if origins is None else self._continued_blocks(arrays, origins)
            return self._entry(arrays, dtype, inside, shapes)
        return self._small_entry(arrays, dtype, shapes, sum(sizes) * dtype.itemsize)

    def _small_entry(
        self, arrays: Sequence[AnyArray], dtype: np.dtype[Any], shapes: list[Any], nbytes: int
    ) -> int | None:
        """Return the entry of small arrays, with `nbytes` in all; None if together they are too large for one."""
        inside: Any
        if nbytes < SMALL:
            inside = b"".join(_in_c_order(arrays))
        elif (inside := self._repeated_number(arrays, nbytes)) is not None:
            pass
        elif nbytes <= _MOST_GROUPED:
            inside = self._add(_in_c_order(arrays), nbytes)
        else:
            return None
        return self._entry(arrays, dtype, inside, shapes)

    def _repeated_number(self, arrays: Sequence[AnyArray], nbytes: int) -> bytes | None:
        """Return the bytes of the number that all of these arrays repeat, if there is one and room for it."""
        first = arrays[0] if arrays[0].size else next(array for array in arrays if array.size)
        if first.ndim != 1 or first.item(0) != first.item(-1) or self._repeated_bytes + nbytes > _MOST_REPEATED:
            return None
        number = first[:1].tobytes()
        if any(array.tobytes() != number * len(array) for array in arrays):
            return None
        self._repeated_bytes += nbytes
        return number

    def _entry(self, arrays: Sequence[AnyArray], dtype: np.dtype[Any], inside: Any, shapes: list[Any]) -> int:
        entry = len(self.table) // 3
        self.table += describe_dtype(dtype), inside, shapes
        for place, array in enumerate(arrays):
            self._placed_arrays[id(array)] = entry, place, array
        return entry

    def _block_of(self, array: AnyArray) -> int:
        """Return the number of the block with the bytes of this array.

        Arrays of the same size, beginning and end are compared by a hash of their bytes (XXH3, 128 bits).
        """
        nbytes = array.nbytes
        if not array.flags.c_contiguous:
            array = np.ascontiguousarray(array)
        if nbytes < GROUPED:
            return self._add((array,), nbytes)
        key = nbytes, array.item(0), array.item(-1)
        if key not in self._arrays_alike:
            self._arrays_alike[key] = array, {}
            return self._add((array,), nbytes)
        like, by_hash = self._arrays_alike[key]
        if not by_hash:
            number = next(number for number, block in enumerate(self.blocks) if block[0] is like)
            by_hash[_content_of(like)] = number
        content = _content_of(array)
        if content not in by_hash:
            by_hash[content] = self._add((array,), nbytes)
        return by_hash[content]

    def _continued_blocks(self, arrays: Sequence[AnyArray], origins: Sequence[int]) -> list[Any]:
        """Return the blocks of arrays: of one that begins as an earlier one does, that one's and one with the rest."""
        blocks: list[Any] = []
        for at, array, common in zip(origins, arrays, beginnings(arrays, origins), strict=True):
            earlier = blocks[at] if common else []
            parts = earlier if type(earlier) is list else [earlier, arrays[at].nbytes]
            if common < SMALL or len(parts) >= 2 * _MOST_PARTS:
                blocks.append(self._block_of(array))
                continue
            reused: list[int] = []
            for block, size in zip(parts[::2], parts[1::2], strict=True):
                reused += [block, min(size, common)] if common else []
                common -= min(size, common)
            added = np.ascontiguousarray(array).reshape(-1).view(np.uint8)[sum(reused[1::2]) :]
            blocks.append([*reused, self._block_of(added), len(added)] if len(added) else reused)
        return blocks

    def _add(self, block: Sequence[Any], nbytes: int) -> int:
        self.blocks.append(block)
        self.sizes.append(nbytes)
        return len(self.blocks) - 1


def _content_of(array: AnyArray) -> bytes:
    """Return the hash of an array's bytes."""
    return fed(xxh3_128(), np.frombuffer(array, np.uint8).data).digest()


def _in_c_order(arrays: Sequence[AnyArray]) -> list[Any]:
    """Return arrays whose memory is their items in C order."""
    return [array if array.flags.c_contiguous else np.ascontiguousarray(array) for array in arrays]


@dataclass(frozen=True, slots=True)
class DeferredArray:
    """An array that isn't loaded: its dtype and shape, and its position in its block.

    `block_at` is the position of the block, from the end of the head; it is read as a whole, to be verified. An array
    in several blocks has none of its own, but `parts`: arrays of bytes, one after the other.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    nbytes: int
    at: int
    block_at: int
    block_size: int
    digest: int
    parts: tuple[DeferredArray, ...] = ()

    def joined(self, parts: Sequence[AnyArray]) -> AnyArray:
        """Return the array, given its parts."""
        return np.concatenate(parts).view(self.dtype).reshape(self.shape)

    @classmethod
    def of(cls, array: AnyArray) -> tuple[DeferredArray, bytes]:
        """Return the description of a loaded array, and its bytes."""
        raw = array.tobytes()
        return cls(array.dtype, array.shape, len(raw), 0, 0, len(raw), digest(raw)), raw


#: Makes what replaces an array, given its description, or the array itself if it was loaded with the head.
Instead = Callable[[Any], Any]


class StandIn(ABC):
    """A handle in place of an array, as passed to decoders of values that consist of arrays."""

    @abstractmethod
    def as_tensor(self, name: str, shape: Sequence[int], build: Callable[[Any], Any]) -> Any:
        """Return the handle of a tensor with these bytes; `build` makes the tensor from its content."""


def checked_array(array: DeferredArray, block: Any) -> AnyArray:
    """Return an array in the memory of its block. Raises DecodeError when the checksum of the block is wrong."""
    if len(block) != array.block_size or digest(block) != array.digest:
        raise DecodeError(f"an array of {array.nbytes} bytes is damaged: its checksum doesn't match")
    return np.ndarray(array.shape, array.dtype, block, array.at)


class BlockReader:
    """Reads the arrays of a payload in the memory of its `blocks`, which were verified before.

    With `lends`, the first array of each block shares that memory, unless it would keep much more alive. What changes
    arrays while others are read, such as a user's converter, would change those, too: then all are copies.
    """

    def __init__(self, head: Head, blocks: Any, *, lends: bool = True) -> None:
        self._head = head
        self._blocks = blocks
        self._lends = lends
        self._table: list[Any] = []
        self._arrays: dict[int, Sequence[Any]] = {}
        self._lent_blocks: set[int] = set()
        self._repeated_bytes = 0
        #: Whether handles replace arrays, except in values that are being made of arrays: the depth of these.
        self.deferring = False
        self.eager = 0

    def read_table(self, table: Any) -> None:
        """Read the table of arrays, before all else. ValueError unless it is one."""
        if type(table) is not list or len(table) % 3:
            raise ValueError("no table of arrays")
        self._table = table

    def referred(self, content: bytes) -> Any:
        """Return the array that an extension object refers to. Raises any exception for an invalid one."""
        entry, place = _PLACE.unpack(content)
        return self.entry(entry)[place]

    def column(self, entry: Any, rows: int) -> Sequence[Any]:
        """Return the arrays of a column. Raises any exception for an invalid one."""
        if type(entry) is not int or len(arrays := self.entry(entry)) != rows:
            raise ValueError("no column of arrays")
        return arrays

    def entry(self, entry: int) -> Sequence[Any]:
        """Return the arrays of an entry of the table. Raises any exception for an invalid one."""
        if (arrays := self._arrays.get(entry)) is None:
            dtype, inside, shapes, sizes = self._read_description(entry)
            if type(inside) is list:
                arrays = [*map(self._array_of_block, inside, [dtype] * len(shapes), shapes)]
            else:
                arrays = self._arrays_of_block(dtype, inside, shapes, sizes)
            self._arrays[entry] = arrays
        return arrays

    def _read_description(self, entry: int) -> tuple[np.dtype[Any], Any, list[Any], list[int]]:
        """Return the dtype, the bytes, the shapes and the numbers of items of an entry's arrays."""
        if entry < 0:
            raise ValueError("no such arrays")
        description, inside, shapes = self._table[3 * entry : 3 * entry + 3]
        if type(shapes) is not list or not shapes:
            raise ValueError("no shapes of arrays")
        sizes = shapes if are_counts(shapes) else [*map(_size, shapes)]
        dtype = simple_dtype(description)
        nbytes = sum(sizes) * dtype.itemsize
        if type(inside) is int:
            fits = inside >= 0 and self._head.sizes[inside] == nbytes
        elif type(inside) is bytes:
            fits = len(inside) in (nbytes, dtype.itemsize)
        else:
            whole = are_counts(inside)
            lengths = [self._head.sizes[block] for block in inside] if whole else [*map(self._bytes_in, inside)]
            fits = lengths == [size * dtype.itemsize for size in sizes]
        if not fits:
            raise ValueError("its arrays don't match its blocks")
        return dtype, inside, shapes, sizes

    def _bytes_in(self, inside: Any) -> int:
        """Return the size of an array in one block, or in several. Raises any exception if invalid."""
        sizes = self._head.sizes
        parts = inside if type(inside) is list else [inside, sizes[inside]]
        pairs = zip(parts[::2], parts[1::2], strict=True)
        return sum(parts[1::2]) if all(block >= 0 and 0 <= size <= sizes[block] for block, size in pairs) else -1

    def _array_of_block(self, block: Any, dtype: np.dtype[Any], shape: Any) -> AnyArray:
        if type(block) is list:
            starts = [self._head.starts[number] for number in block[::2]]
            parts = [self._blocks[at : at + count] for at, count in zip(starts, block[1::2], strict=True)]
            return np.ndarray(shape, dtype, bytearray().join(parts))
        array: AnyArray = np.ndarray(shape, dtype, self._blocks, self._head.starts[block])
        return array if self._lend(block) else array.copy()

    def _lend(self, block: int) -> bool:
        """Return whether an array may share the memory of a block, which no other one has then."""
        is_lent = block in self._lent_blocks
        self._lent_blocks.add(block)
        return self._lends and not is_lent and self._head.sizes[block] * _MOST_KEPT >= len(self._blocks)

    def _arrays_of_block(self, dtype: np.dtype[Any], inside: Any, shapes: list[Any], sizes: list[int]) -> Sequence[Any]:
        """Return arrays of one block, as views of one array."""
        flat: AnyArray
        count = sum(sizes)
        if type(inside) is bytes:
            nbytes = count * dtype.itemsize
            self._repeated_bytes += nbytes if nbytes > len(inside) else 0
            if self._repeated_bytes > _MOST_REPEATED:
                raise ValueError("its repeated numbers take too much memory")
            raw = bytearray(inside) * (nbytes // len(inside) if inside else 1)
            if len(shapes) == 1:
                return [np.ndarray(shapes[0], dtype, raw)]
            flat = np.ndarray(count, dtype, raw)
        else:
            flat = np.ndarray(count, dtype, self._blocks, self._head.starts[inside])
            if not self._lend(inside):
                flat = flat.copy()
        arrays: list[AnyArray]
        if sizes.count(sizes[0]) == len(sizes):
            arrays = [*flat.reshape(len(sizes), sizes[0])]
        else:
            arrays = [flat[start:end] for start, end in pairwise(accumulate(sizes, initial=0))]
        if sizes is not shapes:
            arrays = [array.reshape(shape) for array, shape in zip(arrays, shapes, strict=True)]
        return arrays


class PartReader(BlockReader):
    """Reads arrays one by one, of a head alone (without `blocks`) or of a whole payload.

    `load` returns an array that is in a block of a head alone. While `deferring`, `instead` makes what replaces an
    array, given its description, or the array itself if it was loaded with the head.
    """

    def __init__(
        self, head: Head, blocks: Any, load: Callable[[DeferredArray], Any], instead: Instead, *, lends: bool = True
    ) -> None:
        super().__init__(head, blocks, lends=lends)
        self._load = load
        self._stand_in = instead
        self._made_entries: dict[tuple[int, bool], Sequence[Any]] = {}

    def entry(self, entry: int) -> Sequence[Any]:
        """Return the arrays of an entry, or what replaces them."""
        key = entry, self.deferring and not self.eager
        if key not in self._made_entries:
            self._made_entries[key] = [*map(self._stand_in if key[1] else self._load_array, self._parts(entry))]
        return self._made_entries[key]

    def _load_array(self, array: Any) -> Any:
        return self._load(array) if isinstance(array, DeferredArray) else array

    def _parts(self, entry: int) -> Sequence[Any]:
        """Return the arrays of an entry, or the descriptions of those that aren't here."""
        dtype, inside, shapes, sizes = self._read_description(entry)
        if self._blocks is not None or type(inside) is bytes:
            return super().entry(entry)  # which keeps them for the other parts
        several, width = type(inside) is list, dtype.itemsize
        numbers = inside if several else [inside] * len(shapes)
        places = [0] * len(shapes) if several else [*accumulate(sizes[:-1], initial=0)]
        return [
            self._part(number, dtype, (shape,) if type(shape) is int else tuple(shape), size * width, place * width)
            for shape, size, place, number in zip(shapes, sizes, places, numbers, strict=True)
        ]

    def _part(self, block: Any, dtype: np.dtype[Any], shape: tuple[int, ...], nbytes: int, at: int) -> DeferredArray:
        if type(block) is list:
            sizes = zip(block[::2], block[1::2], strict=True)
            parts = tuple(self._part(number, np.dtype(np.uint8), (size,), size, 0) for number, size in sizes)
            return DeferredArray(dtype, shape, nbytes, 0, 0, 0, 0, parts)
        head = self._head
        return DeferredArray(dtype, shape, nbytes, at, head.starts[block], head.sizes[block], head.digests[block])


def from_pieces(pieces: Mapping[int, Any]) -> Callable[[DeferredArray], AnyArray]:
    """Return the function that reads arrays from these blocks, by their positions, and verifies each block once."""
    verified: set[int] = set()

    def load(array: DeferredArray) -> AnyArray:
        if array.parts:
            return array.joined([*map(load, array.parts)])
        block = pieces[array.block_at]
        if array.block_at not in verified:
            checked_array(array, block)
            verified.add(array.block_at)
        return np.ndarray(array.shape, array.dtype, block, array.at).copy()

    return load


def _size(shape: Any) -> int:
    dimensions = [shape] if type(shape) is int else shape
    if not are_counts(dimensions):
        raise ValueError(f"no shape: {shape!r:.80}")
    return math.prod(dimensions)
