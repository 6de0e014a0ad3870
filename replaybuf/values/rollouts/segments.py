"""Rollouts that consist of segments: nested groups and trees, as one list of segments and how they belong together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from statistics import fmean
from typing import Any, Final

from replaybuf.common.checks import shown
from replaybuf.errors import RolloutError

_LISTS: Final = frozenset({list, tuple})


@dataclass(frozen=True, slots=True)
class Segments:
    """How the rollouts of a group consist of segments, which are counted from 0 through the whole group.

    `parents` has for each segment the number of the one that it continues, which comes before it, or None. `lengths`
    has the number of segments of each entry of a nested group, 0 for an entry that is no list; None for a flat group,
    in which each segment that continues none begins a rollout. `rollouts` has the number of each segment's rollout.

    Raises RolloutError for parents that can't be.
    """

    parents: Sequence[int | None]
    lengths: Sequence[int] | None = None
    rollouts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        count, lengths = len(self.parents), self.lengths or ()
        if lengths and sum(max(1, length) for length in lengths) != count:
            raise RolloutError(f"lists of {sum(lengths)} segments don't have {count} parents")
        rollouts = [number for number, length in enumerate(lengths) for _ in range(max(1, length))]
        begun = 0
        for place, parent in enumerate(self.parents):
            if parent is not None and (type(parent) is not int or not 0 <= parent < count):
                problem = f"the segments are numbered from 0 to {count - 1}"
            elif parent is not None and parent >= place:
                problem = "a segment comes after the one that it continues, so that there is no circle"
            elif parent is not None and lengths and rollouts[parent] != rollouts[place]:
                problem = "that is a segment of another rollout (another list)"
            else:
                if not lengths:
                    rollouts.append(begun if parent is None else rollouts[parent])
                    begun += parent is None
                continue
            raise RolloutError(f"parents[{place}] is {shown(parent)}; {problem}")
        object.__setattr__(self, "rollouts", rollouts)

    def rewards(self, of_segments: Sequence[float | None]) -> list[float | None]:
        """Return the reward of each rollout: that of its last segment with one, the mean of these in a tree's branches.

        None for a rollout without any.
        """
        reached: list[float | None] = []
        for reward, parent in zip(of_segments, self.parents, strict=True):
            reached.append(reached[parent] if reward is None and parent is not None else reward)
        by_rollout: list[list[float]] = [[] for _ in range(count_of(reached, self))]
        continued = {*self.parents}
        for place, (rollout, reward) in enumerate(zip(self.rollouts, reached, strict=True)):
            if place not in continued and reward is not None:
                by_rollout[rollout].append(reward)
        return [fmean(ends) if ends else None for ends in by_rollout]


def count_of(flat: Sequence[Any], segments: Segments | None) -> int:
    """Return the number of rollouts that a list of whole ones or of segments has."""
    return len(flat) if segments is None else max(segments.rollouts) + 1


def entries_of(flat: Sequence[Any], segments: Segments | None) -> list[Any]:
    """Return a group as it was put, given the list of its whole rollouts, or of their segments."""
    if segments is None or segments.lengths is None:
        return list(flat)
    remaining = iter(flat)
    return [list(islice(remaining, length)) if length else next(remaining) for length in segments.lengths]


def as_group(items: Any) -> list[Any]:
    """Return the entries of a group as a list. Raises RolloutError."""
    if isinstance(items, (list, tuple)):
        return list(items)
    raise RolloutError(f"expected a list of rollouts (a group), got {type(items).__name__}")


def segmented(items: Any, parents: Any = None) -> tuple[list[Any], Segments | None]:
    """Return the segments of a group as one list, and how they belong together: None for a group of whole rollouts.

    An entry of `items` that is a list has the segments of one rollout, each of which continues the one before it,
    unless `parents` says otherwise. Raises RolloutError.
    """
    items = as_group(items)
    if parents is None and _LISTS.isdisjoint(map(type, items)):
        return items, None
    members, lengths, previous = list[Any](), list[int](), list[int | None]()
    for place, entry in enumerate(items):
        segments = entry if type(entry) in _LISTS else [entry]
        if not segments:
            raise RolloutError(f"items[{place}] is an empty list: a rollout has at least one segment")
        for index, segment in enumerate(segments):
            if type(segment) in _LISTS:
                raise RolloutError(
                    f"items[{place}][{index}] is a list: put takes one group, and the segments of its rollouts are in "
                    "lists, no deeper; to put several groups, call it for each"
                )
            previous.append(len(members) - 1 if index else None)
            members.append(segment)
        lengths.append(len(segments) if segments is entry else 0)
    if parents is not None and (type(parents) not in _LISTS or len(parents) != len(members)):
        actual = f"{len(parents)} entries" if type(parents) in _LISTS else f"a {type(parents).__name__}"
        raise RolloutError(
            f"parents must be a list with a number or None for each of the {len(members)} segments; got {actual}"
        )
    return members, Segments(previous if parents is None else list(parents), lengths if any(lengths) else None)


def flat(items: Any) -> list[Any]:
    """Return the rollouts of a group, or the segments that they consist of, in one list. Raises RolloutError."""
    return segmented(items)[0]


def rewards_of(items: Any, reward: Callable[[Any], float | None]) -> list[float | None]:
    """Return the reward of each rollout of a group, given that of a segment. Raises RolloutError."""
    members, segments = segmented(items)
    rewards = [*map(reward, members)]
    return rewards if segments is None else segments.rewards(rewards)
