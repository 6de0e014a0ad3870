"""Long lists of numbers of a column, packed together: a third less time than msgpack, which handles each alone.

The content of a column is a list of the format of its numbers (as in `struct`), the length of each list, and the
numbers of all lists, one after the other; in place of these bytes the number itself, if all are the same integer, as
those of masks and model steps often are. Lists of segments, which begin as earlier ones do, are only what they add: the
content then also has the index of an earlier list for each, its *origin*, and how many of its numbers come first.
"""

from __future__ import annotations

import marshal
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, Final

import numpy as np

from replaybuf.values.codec.value_types import AnyArray, are_counts

#: The fewest numbers of a column for which packing them together pays, and the most.
FEWEST: Final = 256
_MOST: Final = 1 << 27
_FORMATS: Final = {name: np.dtype(f"<{name}") for name in ("B", "i", "d")}
#: How marshal writes a list (version 2, which has no references): its length, then the kind and the bits of each item.
_MARSHALLED: Final = {
    int: (b"i", np.dtype([("kind", "S1"), ("number", "<i4")])),
    float: (b"g", np.dtype([("kind", "S1"), ("number", "<f8")])),
}
#: What comes before its items.
_HEADER: Final = 5


def pack_numbers(lists: Sequence[list[Any]], origins: Sequence[int] | None = None) -> list[Any] | None:
    """Return lists packed together; None if they are short, or hold anything but integers of 32 bits, or but floats."""
    lengths = [*map(len, lists)]
    if not FEWEST <= sum(lengths) <= _MOST:
        return None
    kind = type(next(filter(None, lists))[0])
    if (numbers := _as_array(lists, lengths, kind)) is None:
        return None
    if kind is int and numbers[0] == numbers[-1] and (numbers == numbers[0]).all():
        return ["i", lengths, int(numbers[0])]
    shared: list[list[int]] = []
    if origins is not None:
        arrays = [numbers[start:end] for start, end in pairwise(accumulate(lengths, initial=0))]
        counts = [nbytes // numbers.itemsize for nbytes in beginnings(arrays, origins)]
        if sum(counts) >= FEWEST:
            arrays = [array[count:] for array, count in zip(arrays, counts, strict=True)]
            numbers, lengths, shared = np.concatenate(arrays), [*map(len, arrays)], [[*origins], counts]
    if kind is int and (not len(numbers) or (0 <= numbers[0] < 256 and 0 <= numbers.min() <= numbers.max() < 256)):
        numbers = numbers.astype("B")
    return [numbers.dtype.char, lengths, numbers.tobytes(), *shared]


def _as_array(lists: Sequence[list[Any]], lengths: Sequence[int], kind: type) -> AnyArray | None:
    """Return the numbers of all lists; None if any isn't of this kind, such as True among integers.

    Nothing else of Python's looks at each item once, and tells them apart, at the speed of C.
    """
    if kind not in _MARSHALLED:
        return None
    mark, dtype = _MARSHALLED[kind]
    try:
        raw = marshal.dumps([*lists], 2)
    except ValueError:  # of other items
        return None
    ends = [*accumulate((_HEADER + dtype.itemsize * length for length in lengths), initial=_HEADER)]
    if len(raw) != ends[-1]:
        return None
    items = np.frombuffer(b"".join([raw[start + _HEADER : end] for start, end in pairwise(ends)]), dtype)
    return items["number"].copy() if items["kind"].tobytes().count(mark) == len(items) else None


def beginnings(arrays: Sequence[AnyArray], origins: Sequence[int]) -> list[int]:
    """Return of how many bytes each array begins as that at its origin does, which has to be an earlier one."""
    pairs = enumerate(zip(origins, arrays, strict=True))
    return [_bytes_alike(arrays[at], array) if at < place else 0 for place, (at, array) in pairs]


def _bytes_alike(left: AnyArray, right: AnyArray) -> int:
    """Return the number of bytes, in eights, as which both arrays begin in C order."""
    size = min(left.nbytes, right.nbytes) // 8 * 8
    if not size:
        return 0
    first, second = (
        np.ascontiguousarray(array).reshape(-1).view(np.uint8)[:size].view(np.uint64) for array in (left, right)
    )
    different = first != second
    return 8 * int(different.argmax()) if different.any() else size


def unpack_numbers(content: Any) -> list[list[Any]]:
    """Return the lists of a content. Raises any exception for an invalid one."""
    name, lengths, numbers, *shared = content
    if not are_counts(lengths):
        raise ValueError("no lengths of lists")
    total = sum(lengths)
    if total > _MOST:
        raise ValueError(f"lists of {total} numbers")
    if type(numbers) is int:
        return [[numbers] * length for length in lengths]
    flat = np.frombuffer(numbers, _FORMATS[name])
    if len(flat) != total:
        raise ValueError("its lists don't match their numbers")
    lists = [flat[start:end].tolist() for start, end in pairwise(accumulate(lengths, initial=0))]
    if shared:
        origins, counts = shared
        if not (are_counts(origins) and are_counts(counts)):
            raise ValueError("no beginnings of lists")
        if total + sum(counts) > _MOST:
            raise ValueError(f"lists of {total + sum(counts)} numbers")
        for place, (added, at, count) in enumerate(zip(lists, origins, counts, strict=True)):
            if count and (at >= place or count > len(lists[at])):
                raise ValueError("a list begins as none that is there")
            if count:
                lists[place] = lists[at][:count] + added
    return lists
