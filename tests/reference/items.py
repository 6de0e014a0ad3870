"""The parts of the model: metadata by uid, and the races of random policies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from replaybuf.rules.limits import Rules
from replaybuf.rules.policies import IDLE, KEYS, Order, OrderTerm, Race, in_order
from replaybuf.rules.query import LogicNode, Node, ScalarNode
from replaybuf.rules.transitions import LaneName
from replaybuf.storage.values import StorageItem
from replaybuf.values.rollouts.rollout import Status
from tests.reference.predicates import predicate

Key = Callable[[int, str], float]
IN_ORDER: Order = (OrderTerm("timestamp_id"),)


class Races:
    """The keys of groups, and the races by task and status.

    With a random policy a task and status runs a race from its first group on, and every group there has a key.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self.keys: dict[int, float] = {}
        self.races: dict[LaneName, Race] = {}
        self.tickets: dict[int, int] = {}  # where it differs from the uid
        self._known: set[LaneName] = set()

    def ticket(self, uid: int) -> int:
        """Return a group's ticket."""
        return self.tickets.get(uid, uid)

    def load(self, races: dict[LaneName, Race], lanes: Iterable[LaneName]) -> None:
        """Load the races of a state, and the tasks and statuses of its groups."""
        self.races = races
        self._known = {*races, *lanes}

    def begin(self, items: Sequence[StorageItem], lane: LaneName) -> None:
        """Begin a race among these groups, if none is run."""
        if lane not in self.races:
            self._start(lane)
            for item in items:
                self.enter(item)

    def _start(self, lane: LaneName) -> None:
        if self._rules.random is not None:
            key, seed = self._rules.random
            self.races[lane] = Race(key, seed or 0)

    def enter(self, item: StorageItem) -> None:
        """Give a group a new key in the race of its task and status."""
        self.leave(item.uid)
        lane = (item.task_name, item.status)
        if lane not in self._known:
            self._known.add(lane)
            self._start(lane)
        if lane in self.races:
            [self.keys[item.uid]] = self.races[lane].draw_keys([(self.ticket(item.uid), item.priority)])

    def leave(self, uid: int) -> None:
        self.keys.pop(uid, None)

    def drawn(self, items: Sequence[StorageItem], lane: LaneName) -> None:
        """Advance a race in which these groups came first. A worn-out race ends, to begin anew."""
        self.races[lane].advance(self.keys[item.uid] for item in items)
        self._end_if_worn(lane, [item.priority for item in items])

    def _end_if_worn(self, lane: LaneName, priorities: Sequence[float]) -> None:
        if self.races[lane].is_worn(priorities):
            del self.races[lane]

    def pass_time(
        self, task_name: str, statuses: Iterable[Status], waits: Sequence[float], priorities: Sequence[float]
    ) -> None:
        """Let the time pass in all these statuses' races, in which groups came first after these waits."""
        for lane in [(task_name, status) for status in statuses]:
            self.races[lane].pass_time(waits)
            self._end_if_worn(lane, priorities)

    def has_arrived(self, item: StorageItem) -> bool:
        """Return whether this group has arrived in a race."""
        race, key = self.races.get((item.task_name, item.status)), self.keys.get(item.uid)
        return race is not None and key is not None and race.left(key) <= (0 if key < IDLE else IDLE)

    def remaining(self, item: StorageItem) -> float:
        """Return the time until a group arrives; comparable between races."""
        return self.races[(item.task_name, item.status)].left(self.keys[item.uid])


class Items:
    """The metadata of groups by uid."""

    def __init__(self) -> None:
        self._items: dict[int, StorageItem] = {}

    def add(self, item: StorageItem) -> None:
        self._items[item.uid] = item

    def get(self, uid: int) -> StorageItem | None:
        """Return a copy of the group's metadata, or None when it isn't there."""
        item = self._items.get(uid)
        return None if item is None else replace(item, tags=dict(item.tags) if item.tags else None)

    def remove(self, uids: Iterable[int]) -> None:
        for uid in uids:
            del self._items[uid]

    def change(self, uids: Iterable[int], **values: Any) -> None:
        for uid in uids:
            for name, value in values.items():
                setattr(self._items[uid], name, value)

    def select(self, query: Node, order: Order = IN_ORDER, key: Key | None = None) -> list[int]:
        """Return the uids of the groups that match, in order; `key(uid, name)` is a group's key of a policy."""

        def value(item: StorageItem, field: str) -> Any:
            return key(item.uid, field) if key and field in (*KEYS, "staleness") else getattr(item, field)

        return [item.uid for item in in_order(filter(predicate(query), self._items.values()), order, value)]

    def with_key(self, task_name: str, key: str) -> list[int]:
        """Return the uid of the task's group with this key, if there is one."""
        return [item.uid for item in self._items.values() if (item.task_name, item.key) == (task_name, key)]


def in_lane(task_name: str, status: Status, where: Node | None = None) -> Node:
    """Return the query for the groups of one task and status, narrowed by another."""
    lane = (ScalarNode("task_name", "$eq", task_name), ScalarNode("status", "$eq", status.value))
    return LogicNode("$and", lane if where is None else (*lane, where))
