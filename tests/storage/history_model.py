"""A model of a buffer and its checkpoints: each checkpoint is a copy of all groups, as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

#: Groups expire at a refresh with this staleness.
THRESHOLD = 6
#: The number of rollouts of groups that fill.
SIZE = 3
_MANY = 1000


@dataclass
class Group:
    """A group: of which model step it is, and its staleness if that isn't by the train step, as it is when it expired.

    `index` is the place of a rollout in a group that fills, whose name is the key. `is_unsure`: it was refreshed while
    a draw had it that is undone; until the next refresh, its staleness is that of before. `rest` is what else was seen
    of it, which the model doesn't know of beforehand.
    """

    status: str
    key: str | None
    model: int
    pinned: int | None = None
    priority: float = 1.0
    times: int = 0
    index: int | None = None
    is_unsure: bool = False
    rest: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> tuple[str, int | None] | None:
        """What no two groups have."""
        return None if self.key is None else (self.key, self.index)

    def staleness(self, step: int) -> int:
        return step - self.model - 1 if self.pinned is None else self.pinned


@dataclass
class State:
    """The groups of a buffer, at a train step."""

    step: int = 0
    groups: dict[int, Group] = field(default_factory=dict)

    def named(self, name: tuple[str, int | None] | None) -> list[int]:
        return [uid for uid, group in self.groups.items() if name is not None and group.name == name]

    def seen(self) -> dict[int, tuple[Any, ...]]:
        """What is seen of each group; None for a staleness that isn't sure."""
        return {
            uid: (
                *(group.status, group.priority, group.times, group.key),
                None if group.is_unsure else group.staleness(self.step),
            )
            for uid, group in self.groups.items()
        }


@dataclass
class Drawn:
    """A draw that may be undone: its groups as they were, the checkpoints that were there, and its number."""

    groups: dict[int, Group]
    step: int
    before: set[int]
    number: int
    undo: Callable[[], Any]


class Copies:
    """What a buffer with these options holds, and what its checkpoints do. `records` has the groups of each draw."""

    def __init__(
        self, max_times_sampled: int = 1, archive: int = 0, history: int = _MANY, capacity: int = _MANY
    ) -> None:
        self.limit, self.archives, self.history, self.capacity = max_times_sampled, archive > 0, history, capacity
        self.now = State()
        self.checkpoints: dict[int, State] = {}
        self.drawn: list[Drawn] = []
        self.records: dict[int, list[int]] = {}
        self.draws = 0

    @property
    def groups(self) -> dict[int, Group]:
        return self.now.groups

    def first(self, count: int) -> list[int]:
        return sorted(uid for uid, group in self.groups.items() if group.status == "completed")[:count]

    def put(self, uid: int, new_group: Group, replaced: Iterable[int] = ()) -> None:
        for old_uid in {*replaced, *self.now.named(new_group.name)}:
            del self.groups[old_uid]
            self.received([old_uid])
        self.groups[uid] = new_group
        taking_room = sorted(uid for uid, group in self.groups.items() if group.status in ("completed", "expired"))
        self.remove(taking_room[: -self.capacity])

    def remove(self, uids: Iterable[int]) -> None:
        for uid in uids:
            del self.groups[uid]
            self.received([uid])

    def record(self, uids: Iterable[int]) -> None:
        self.draws += 1
        if uids := [*uids]:
            self.records[self.draws] = uids

    def draw(self, count: int) -> dict[int, Group]:
        """Draw so many groups; return them as they were."""
        before = {uid: deepcopy(self.groups[uid]) for uid in self.first(count)}
        self.record(before)
        self.received(before)
        for uid in before:
            group = self.groups[uid]
            group.times += 1
            if group.times >= self.limit and self.archives:
                group.status, group.pinned = "archived", group.staleness(self.now.step)
            elif group.times >= self.limit:
                del self.groups[uid]
        return before

    def received(self, uids: Iterable[int]) -> None:
        """Draws of the same groups before this aren't undone any more."""
        self.drawn = [group for group in self.drawn if group.groups.keys().isdisjoint(uids)]

    def undo(self, draw: Drawn) -> None:
        """A group whose name another one has, now or in a checkpoint since the draw, was replaced by that one."""
        self.records.pop(draw.number, None)
        states = [self.now, *(checkpoint for step, checkpoint in self.checkpoints.items() if step not in draw.before)]
        for uid, was in draw.groups.items():
            if was.times + 1 < self.limit:  # it had stayed
                for state in states:
                    if uid in state.groups:
                        state.groups[uid].times -= 1
                        state.groups[uid].rest["trained_step"] = was.rest["trained_step"]
            elif all(set(state.named(was.name)) <= {uid} for state in states):
                for state in states:
                    refreshed = state.step != draw.step
                    state.groups[uid] = restored = deepcopy(was)
                    restored.is_unsure = was.is_unsure or refreshed

    def refresh(self, step: int) -> int:
        """Go on to a train step; return how many groups expire."""
        self.now.step, expired = step, 0
        for group in self.groups.values():
            if group.status == "completed":
                group.pinned, group.is_unsure = None, False
                if group.staleness(step) >= THRESHOLD:
                    group.status, group.pinned = "expired", group.staleness(step)
                    expired += 1
            elif group.status == "expired":  # it has no responses any more
                group.pinned, group.is_unsure = 0, False
        return expired

    def restore(self, step: int) -> None:
        self.now = deepcopy(self.checkpoints[step])
        self.drawn.clear()
