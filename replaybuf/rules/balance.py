"""Distributes sequences of different lengths evenly over ranks, micro-batches or packed rows.

Pure functions of lengths, which return indices. A length is the cost of training on a sequence: its number of tokens,
or another number.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Iterable
from typing import TypeAlias

from replaybuf.common.checks import check_whole
from replaybuf.errors import InputError

#: For each part the indices of its sequences, ascending.
Parts: TypeAlias = list[list[int]]


def balance(lengths: Iterable[float], parts: int, *, same_size: bool = False) -> Parts:
    """Distribute sequences over `parts` nonempty parts with nearly equal sums of lengths.

    The sums differ by at most the longest length. With `same_size` every part has the same number of sequences, which
    must be a multiple of `parts`. The longest sequences are shared out first, each to the part with the smallest sum
    (Graham, "Bounds on multiprocessing timing anomalies", 1969). Raises InputError.
    """
    checked, number = _check_lengths(lengths), check_whole(parts, "parts", 1)
    if number > len(checked):
        raise InputError(f"{len(checked)} sequences can't be shared out to {number} parts: one of them would be empty")
    if same_size and len(checked) % number:
        raise InputError(
            f"{len(checked)} sequences can't be shared out to {number} parts of the same size; leave out same_size"
        )
    at_once = number if same_size else 1
    order = sorted(range(len(checked)), key=lambda index: (-checked[index], index))
    shared: Parts = [[] for _ in range(number)]
    heap = [(0.0, 0, place) for place in range(number)]  # the sum, size and place of each part
    for begin in range(0, len(order), at_once):
        smallest = [heapq.heappop(heap) for _ in range(at_once)]
        for (total, size, place), index in zip(smallest, order[begin : begin + at_once], strict=True):
            shared[place].append(index)
            heapq.heappush(heap, (total + checked[index], size + 1, place))
    return [sorted(indices) for indices in shared]


def micro_batches(lengths: Iterable[float], most: float, *, at_least: int = 1) -> Parts:
    """Distribute sequences over few parts with sums of at most `most`, nearly equal if possible.

    There are at least `at_least` parts: ranks that must make the same number of parts pass the largest of theirs.
    Raises InputError for a sequence that is longer than `most`.
    """
    checked, least = _check_lengths(lengths), check_whole(at_least, "at_least", 1)
    packed = packed_rows(checked, most)
    if not checked:
        return []
    begin = max(least, math.ceil(math.fsum(checked) / most))
    for number in range(begin, max(len(packed), least + 1)):
        parts = balance(checked, number)
        if all(math.fsum(checked[index] for index in part) <= most for part in parts):
            return parts
    while len(packed) < least:
        longest = max(packed, key=len)
        packed.remove(longest)
        packed += [longest[::2], longest[1::2]]
    return packed


def packed_rows(lengths: Iterable[float], most: float) -> Parts:
    """Put sequences into few rows of at most `most`: the longest first, each where it leaves the least room.

    Best-fit decreasing needs at most 11/9 of the smallest possible number of rows, and one (Johnson et al., 1974).
    Raises InputError for a sequence that is longer than a row.
    """
    checked = _check_lengths(lengths)
    if not most > 0:
        raise InputError(f"the most that a row holds must be above 0, got {most!r}")
    if too_long := [index for index, length in enumerate(checked) if length > most]:
        index = too_long[0]
        raise InputError(
            f"sequence {index} has a length of {checked[index]:g}, more than the {most:g} of a row: filter it out, cut "
            "it, or allow more"
        )
    rows: Parts = []
    room: list[tuple[float, int]] = []  # (free length, index in `rows`), ascending
    for index in sorted(range(len(checked)), key=lambda index: (-checked[index], index)):
        place = bisect.bisect_left(room, (checked[index], 0))
        if place < len(room):
            free, row = room.pop(place)
        else:
            free, row = most, len(rows)
            rows.append([])
        rows[row].append(index)
        bisect.insort(room, (free - checked[index], row))
    return [sorted(indices) for indices in rows]


def _check_lengths(lengths: Iterable[float]) -> list[float]:
    checked = list(lengths)
    for index, length in enumerate(checked):
        if not (length >= 0 and math.isfinite(length)):
            raise InputError(f"lengths[{index}] must be a number of at least 0, got {length!r}")
    return checked
