"""Distributes sequences of different lengths evenly over ranks, micro-batches or packed rows.

Pure functions of lengths, which return indices. A length is the cost of training on a sequence: its number of tokens,
or another number.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from replaybuf.common.checks import check_whole
from replaybuf.errors import InputError

#: For each part the indices of its sequences, ascending.
Parts: TypeAlias = list[list[int]]

# A part under construction: the sum of its lengths, and its indices.
_Part: TypeAlias = tuple[float, list[int]]


def balance(lengths: Iterable[float], parts: int, *, same_size: bool = False) -> Parts:
    """Distribute sequences over `parts` nonempty parts with nearly equal sums of lengths.

    The sums differ by at most the longest length. With `same_size` every part has the same number of sequences, which
    must be a multiple of `parts`. This is Karmarkar and Karp's differencing method for several parts ("The differencing
    method of set partitioning", 1982), as in verl and slime. Raises InputError.
    """
    checked, number = _check_lengths(lengths), check_whole(parts, "parts", 1)
    if number > len(checked):
        raise InputError(f"{len(checked)} sequences can't be shared out to {number} parts: one of them would be empty")
    if same_size and len(checked) % number:
        raise InputError(
            f"{len(checked)} sequences can't be shared out to {number} parts of the same size; leave out same_size"
        )
    shared = _differencing(checked, number, number if same_size else 1)
    _fill_empty(shared, checked)
    return [sorted(indices) for _, indices in shared]


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
    for number in range(begin, len(packed)):
        parts = balance(checked, number)
        if all(math.fsum(checked[index] for index in part) <= most for part in parts):
            return parts
    if least > len(packed):
        return balance(checked, least)
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
    rows: list[_Part] = []
    room: list[tuple[float, int]] = []  # (free length, index in `rows`), ascending
    for index in sorted(range(len(checked)), key=lambda index: (-checked[index], index)):
        place = bisect.bisect_left(room, (checked[index], 0))
        if place < len(room):
            free, row = room.pop(place)
        else:
            free, row = most, len(rows)
            rows.append((0, []))
        rows[row][1].append(index)
        bisect.insort(room, (free - checked[index], row))
    return [sorted(indices) for _, indices in rows]


def _differencing(lengths: Sequence[float], number: int, at_once: int) -> list[_Part]:
    """Join the two partial solutions with the widest spread until one is left: largest parts with smallest."""
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    ties = itertools.count()
    heap: list[tuple[float, int, list[_Part]]] = []
    for begin in range(0, len(order), at_once):
        indices = order[begin : begin + at_once]
        parts: list[_Part] = [(lengths[index], [index]) for index in indices]
        parts += [(0, []) for _ in range(number - len(indices))]
        heap.append((_spread(parts), next(ties), parts))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        joined = [(a + b, left + right) for (a, left), (b, right) in zip(first, reversed(second), strict=True)]
        joined.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (_spread(joined), next(ties), joined))
    return heap[0][2]


def _spread(parts: Sequence[_Part]) -> float:
    """Return the negative spread of parts in descending order: a heap pops the widest first."""
    return parts[-1][0] - parts[0][0]


def _fill_empty(parts: list[_Part], lengths: Sequence[float]) -> None:
    """Give each empty part the shortest sequence of the largest part that has several: no difference grows."""
    for place, (_, indices) in enumerate(parts):
        if not indices:
            giver = max((donor for donor in range(len(parts)) if len(parts[donor][1]) > 1), key=lambda i: parts[i][0])
            shortest = min(parts[giver][1], key=lambda index: lengths[index])
            parts[giver][1].remove(shortest)
            parts[giver] = (parts[giver][0] - lengths[shortest], parts[giver][1])
            parts[place] = (lengths[shortest], [shortest])


def _check_lengths(lengths: Iterable[float]) -> list[float]:
    checked = list(lengths)
    for index, length in enumerate(checked):
        if not (length >= 0 and math.isfinite(length)):
            raise InputError(f"lengths[{index}] must be a number of at least 0, got {length!r}")
    return checked
