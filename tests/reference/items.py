"""The parts of the model: metadata by uid, and the races of random policies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from replaybuf.query import LogicNode, Node, ScalarNode
from replaybuf.rollouts.rollout import Status
from replaybuf.rules.limits import Rules
from replaybuf.rules.policies import IDLE, KEYS, Clock, Order, OrderTerm, draw_keys, in_order, weight_of
from replaybuf.rules.transitions import LaneName
from replaybuf.storage.values import StorageItem
from tests.reference.predicates import predicate

Key = Callable[[int, str], float]
IN_ORDER: Order = (OrderTerm("timestamp_id"),)


class Races:
    """The keys of groups, and the clock of every race that is run, by task, status and key.

    A race that the policies draw from begins with the first group of a task and status, any other race with the first
    draw from it; from then on every group of that task and status has a key.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self.keys: dict[str, dict[int, float]] = {name: {} for name in KEYS}
        self.clocks: dict[tuple[str, Status, str], Clock] = {}
        self.tickets: dict[int, int] = {}  # where it differs from the uid
        self._known: set[LaneName] = set()

    def copy(self) -> Races:
        copied = Races(self._rules)
        copied.keys = {name: dict(keys) for name, keys in self.keys.items()}
        copied.clocks = {name: replace(clock) for name, clock in self.clocks.items()}
        copied.tickets = dict(self.tickets)
        copied._known = set(self._known)
        return copied

    def ticket(self, uid: int) -> int:
        """Return a group's ticket."""
        return self.tickets.get(uid, uid)

    def load(self, clocks: dict[tuple[str, Status, str], Clock], lanes: Iterable[LaneName]) -> None:
        """Load the clocks of a state, and the tasks and statuses of its groups."""
        self.clocks = clocks
        self._known = {(task, status) for task, status, _ in clocks} | set(lanes)

    def begin(self, items: Sequence[StorageItem], lane: LaneName, name: str) -> Clock:
        """Return the clock of a race; one that isn't run yet begins with these groups."""
        if (*lane, name) not in self.clocks:
            self.clocks[(*lane, name)] = Clock()
            for item in items:
                self.enter(item)
        return self.clocks[(*lane, name)]

    def enter(self, item: StorageItem) -> None:
        """Give a group new keys in the races of its task and status."""
        self.leave(item.uid)
        lane = (item.task_name, item.status)
        if lane not in self._known and item.status != Status.ARCHIVED:
            self._known.add(lane)
            for name in self._rules.races:
                self.clocks.setdefault((*lane, name), Clock())
        for name, key in self.new_keys(item).items():
            self.keys[name][item.uid] = key

    def new_keys(self, item: StorageItem) -> dict[str, float]:
        """Return the keys of a group that enters the races of its task and status now."""
        keys = {}
        for name in KEYS:
            clock = self.clocks.get((item.task_name, item.status, name))
            if clock is not None:
                group = (self.ticket(item.uid), weight_of(name, item.priority))
                [keys[name]] = draw_keys(self._rules.seed_of(name), clock, [group])
        return keys

    def keys_of(self, uid: int) -> dict[str, float]:
        """Return the keys of a group."""
        return {name: keys[uid] for name, keys in self.keys.items() if uid in keys}

    def leave(self, uid: int) -> None:
        for name in KEYS:
            self.keys[name].pop(uid, None)

    def drawn(self, items: Sequence[StorageItem], lane: LaneName, name: str) -> None:
        """Advance the clock of a race in which these groups came first. A worn-out race ends, to begin anew."""
        clock = self.clocks[(*lane, name)]
        clock.advance(self.keys[name][item.uid] for item in items)
        if clock.is_worn(weight_of(name, item.priority) for item in items):
            del self.clocks[(*lane, name)]

    def pass_time(
        self,
        task_name: str,
        statuses: Iterable[Status],
        name: str,
        waits: Sequence[float],
        priorities: Sequence[float],
    ) -> None:
        """Let the time pass in all these statuses' races, in which groups came first after these waits."""
        elapsed = max((wait for wait in waits if wait < IDLE), default=0.0)
        idle = max((wait / IDLE - 1.0 for wait in waits if wait >= IDLE), default=0.0)
        for lane in [(task_name, status, name) for status in statuses]:
            clock = self.clocks[lane]
            clock.time += elapsed
            clock.idle_time += idle
            if clock.is_worn(weight_of(name, priority) for priority in priorities):
                del self.clocks[lane]

    def has_arrived(self, item: StorageItem, name: str) -> bool:
        """Return whether this group has arrived in a race."""
        clock, key = self.clocks.get((item.task_name, item.status, name)), self.keys[name].get(item.uid)
        if clock is None or key is None:
            return False
        return key <= clock.time if key < IDLE else key <= IDLE * (1.0 + clock.idle_time)

    def key(self, uid: int, name: str) -> float:
        """Return the key of a group."""
        return self.keys[name][uid]

    def remaining(self, item: StorageItem, name: str) -> float:
        """Return the time until a group arrives; comparable between races."""
        clock, key = self.clocks[(item.task_name, item.status, name)], self.keys[name][item.uid]
        return key - (clock.time if key < IDLE else clock.idle_time * IDLE)


class Items:
    """The metadata of groups by uid."""

    def __init__(self) -> None:
        self._items: dict[int, StorageItem] = {}

    def __len__(self) -> int:
        return len(self._items)

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
        """Return the uids of the groups that match, in order; `key(uid, name)` is a group's key in a race."""

        def value(item: StorageItem, field: str) -> Any:
            return key(item.uid, field) if key is not None and field in KEYS else getattr(item, field)

        return [item.uid for item in in_order(filter(predicate(query), self._items.values()), order, value)]

    def with_key(self, task_name: str, key: str) -> list[int]:
        """Return the uid of the task's group with this key, if there is one."""
        return [item.uid for item in self._items.values() if (item.task_name, item.key) == (task_name, key)]


def in_lane(task_name: str, status: Status, where: Node | None = None) -> Node:
    """Return the query for the groups of one task and status, narrowed by another."""
    lane = (ScalarNode("task_name", "$eq", task_name), ScalarNode("status", "$eq", status.value))
    return LogicNode("$and", lane if where is None else (*lane, where))
