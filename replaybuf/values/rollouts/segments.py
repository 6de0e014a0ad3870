"""Rollouts that consist of segments: nested groups and trees, as one list of segments and how they belong together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import fmean
from typing import Any, Final

from replaybuf.errors import RolloutError

_LISTS: Final = frozenset({list, tuple})


@dataclass(frozen=True, slots=True)
class Segments:
    """How the rollouts of a group consist of segments. The segments are counted from 0 through the whole group.

    Of each segment, `rollouts` has the number of its rollout, and `parents` the number of the segment that it
    continues, which is a lower one, or None if it continues none. `lengths` has the number of segments of each entry of
    a nested group, 0 for an entry that is a rollout and no list; None for a tree in a flat list.
    """

    rollouts: list[int]
    parents: list[int | None]
    lengths: list[int] | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for what isn't as described, in stored metadata."""
        count = len(self.rollouts)
        known = all(parent is None or 0 <= parent < place for place, parent in enumerate(self.parents))
        entries = [count] if self.lengths is None else [max(1, length) for length in self.lengths]
        if not known or len(self.parents) != count or sum(entries) != count:
            raise ValueError("its segments don't belong together")

    @property
    def count(self) -> int:
        """The number of rollouts."""
        return len({*self.rollouts})

    def nested(self, segments: Iterable[Any]) -> list[Any]:
        """Return the segments of the group as they were put."""
        if self.lengths is None:
            return list(segments)
        rest = iter(segments)
        return [list(islice(rest, length)) if length else next(rest) for length in self.lengths]

    def rewards(self, of_segments: Sequence[float | None]) -> list[float | None]:
        """Return the reward of each rollout: that of its last segment with one, the mean of these in a tree's branches.

        None for a rollout without any.
        """
        reached: list[float | None] = []
        for reward, parent in zip(of_segments, self.parents, strict=True):
            reached.append(reached[parent] if reward is None and parent is not None else reward)
        continued, found = {*self.parents}, dict[int, list[float]]()
        for place, (rollout, reward) in enumerate(zip(self.rollouts, reached, strict=True)):
            found.setdefault(rollout, [])
            if place not in continued and reward is not None:
                found[rollout].append(reward)
        return [fmean(found[rollout]) if found[rollout] else None for rollout in sorted(found)]


def as_group(items: Any) -> list[Any]:
    """Return the entries of a group as a list. Raises RolloutError."""
    if isinstance(items, (list, tuple)):
        return list(items)
    raise RolloutError(f"expected a list of rollouts (a group), got {type(items).__name__}")


def flat(items: Any) -> list[Any]:
    """Return the rollouts of a group, or the segments that they consist of, in one list. Raises RolloutError."""
    return segmented(items)[0]


def rewards_of(items: Any, reward: Callable[[Any], float | None]) -> list[float | None]:
    """Return the reward of each rollout of a group, given that of a segment. Raises RolloutError."""
    found, segments = segmented(items)
    rewards = [*map(reward, found)]
    return rewards if segments is None else segments.rewards(rewards)


def segmented(items: Any, parents: Any = None) -> tuple[list[Any], Segments | None]:
    """Return the segments of a group as one list, and how they belong together: None for a group of whole rollouts.

    An entry of `items` that is a list has the segments of one rollout, each of which continues the one before it;
    `parents` says otherwise (None: it continues none). In a flat list with parents, each rollout that continues none
    begins a tree, which counts as one rollout. Raises RolloutError.
    """
    items = as_group(items)
    if parents is None and _LISTS.isdisjoint(map(type, items)):
        return items, None
    found: list[Any] = []
    lengths, rollouts, chain = list[int](), list[int](), list[int | None]()
    for place, entry in enumerate(items):
        segments = entry if type(entry) in _LISTS else [entry]
        lengths.append(len(segments) if segments is entry else 0)
        if not segments:
            raise RolloutError(f"items[{place}] is an empty list: a rollout has at least one segment")
        for index, segment in enumerate(segments):
            if type(segment) in _LISTS:
                raise RolloutError(
                    f"items[{place}][{index}] is a list: put takes one group, and the segments of its rollouts are in "
                    "lists, no deeper; to put several groups, call it for each"
                )
            chain.append(len(found) - 1 if index else None)
            rollouts.append(place)
            found.append(segment)
    if parents is None:
        return found, Segments(rollouts, chain, lengths)
    given = _checked(parents, len(found))
    if any(lengths):
        for place, parent in enumerate(given):
            if parent is not None and rollouts[parent] != rollouts[place]:
                raise RolloutError(
                    f"parents[{place}] is {parent}, which is a segment of another rollout (another list)"
                )
        return found, Segments(rollouts, given, lengths)
    roots = [place for place, parent in enumerate(given) if parent is None]
    trees = {place: number for number, place in enumerate(roots)}
    for place, parent in enumerate(given):
        if parent is not None:
            trees[place] = trees[parent]
    return found, Segments([trees[place] for place in range(len(found))], given)


def _checked(parents: Any, count: int) -> list[int | None]:
    """Return the parents of this many segments. Raises RolloutError."""
    if not isinstance(parents, (list, tuple)) or len(parents) != count:
        got = f"{len(parents)} entries" if isinstance(parents, (list, tuple)) else f"a {type(parents).__name__}"
        raise RolloutError(
            f"parents must be a list with an entry for each of the {count} segments, the number of the one that it "
            f"continues or None; got {got}"
        )
    for place, parent in enumerate(parents):
        if parent is None:
            continue
        if type(parent) is not int or not 0 <= parent < count:
            raise RolloutError(f"parents[{place}] is {parent!r:.60}; the segments are numbered from 0 to {count - 1}")
        if parent >= place:
            raise RolloutError(
                f"parents[{place}] is {parent}: a segment comes after the one that it continues, so that there is no "
                "circle"
            )
    return list(parents)
