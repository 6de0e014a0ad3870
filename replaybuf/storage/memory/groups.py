"""The groups of the reference backend, and what may happen to one: no lock, no waiting, no decoding."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping

from replaybuf.errors import ConflictError, FullError
from replaybuf.query import LogicNode, ScalarNode, SetNode
from replaybuf.rollouts.rollout import Status
from replaybuf.rules.limits import Level, Rules
from replaybuf.rules.policies import Order
from replaybuf.rules.race import KEYS
from replaybuf.rules.tallies import LaneName, Tally, levels
from replaybuf.storage.memory.items import Items, Races, in_lane
from replaybuf.storage.values import NewGroup, StorageItem

_ALL = LogicNode("$and", ())


class Groups:
    """Metadata in a table, payloads, races, and what was counted. `add` to `remove` keep all of them in step."""

    def __init__(self, table: Items, rules: Rules) -> None:
        self.table = table
        self.rules = rules
        self.payloads: dict[int, bytes] = {}
        self.archived_at: dict[int, float] = {}
        self.made_from: dict[int, set[int]] = {}  # all that a group has replaced, and what that had replaced
        self.races = Races(rules)
        self.tallies: Counter[tuple[str, Status, Tally]] = Counter()

    def copy(self) -> Groups:
        """The same groups in a table of their own; payloads never change, and are shared."""
        copied = Groups(type(self.table)(), self.rules)
        for uid in self.table.select(_ALL):
            copied.table.add(self.item(uid))
        copied.payloads, copied.archived_at = dict(self.payloads), dict(self.archived_at)
        copied.made_from = dict(self.made_from)
        copied.races, copied.tallies = self.races.copy(), self.tallies.copy()
        return copied

    def item(self, uid: int) -> StorageItem:
        """The metadata of a group that is there, in a copy."""
        item = self.table.get(uid)
        assert item is not None
        return item

    def level(self, task_name: str) -> Level:
        """The numbers of a task that its limits look at."""
        return levels(self.tallies, [task_name])[task_name]

    def count(self, item: StorageItem, name: Tally, by: int = 1) -> None:
        self.tallies[(item.task_name, item.status, name)] += by

    def add(self, item: StorageItem) -> None:
        self.table.add(item)
        self.count(item, Tally.SIZE)
        self.races.enter(item)
        if item.status == Status.ARCHIVED:
            self.archived_at[item.uid] = time.time()

    def take_out(self, item: StorageItem) -> None:
        """Remove the metadata of a group that goes elsewhere."""
        self.table.remove([item.uid])
        self.count(item, Tally.SIZE, -1)
        self.races.leave(item.uid)
        self.archived_at.pop(item.uid, None)

    def move(self, uid: int, status: Status, **changes: object) -> None:
        """Give a group another status."""
        item = self.item(uid)
        if item.status == status:
            self.table.change([uid], **changes)
            return
        self.take_out(item)
        item.status = status
        for name, value in changes.items():
            setattr(item, name, value)
        self.add(item)

    def remove(self, uids: Iterable[int], why: Tally) -> int:
        gone = [self.item(uid) for uid in uids]
        for item in gone:
            self.take_out(item)
            self.count(item, why)
            self.forget(item.uid)
        return len(gone)

    def forget(self, uid: int) -> None:
        """Let go of the payload and the ticket of a group whose metadata is gone."""
        del self.payloads[uid]
        self.races.tickets.pop(uid, None)
        self.made_from.pop(uid, None)

    # Putting

    def replaced_by(self, group: NewGroup) -> list[int]:
        """The groups in the buffer that a put replaces: those that it names, and the one of the same key."""
        found = [] if group.key is None else self.table.with_key(group.task_name, group.key)
        named = () if group.lease else group.replaces
        for uid in named:
            if self.table.get(uid) is None:
                raise ConflictError(f"group {uid}, which was to be replaced, is not in the buffer; nothing was stored")
        return sorted({*found, *named})

    def check_room(self, group: NewGroup, replaced: Iterable[int]) -> None:
        """Raise FullError when the limits leave no room for the group."""
        limits = self.rules.limits
        here = [item.status for item in map(self.item, replaced) if item.task_name == group.task_name]
        level = self.level(group.task_name).without(here)
        if limits.insertable(level, group.status) == 0:
            raise FullError(f"task {group.task_name}: {limits.why_full(level, group.status)}")

    def evict(self, task_name: str) -> None:
        """Remove what is beyond the capacity."""
        limits, remover = self.rules.limits, self.rules.remover
        if limits.capacity is None or limits.on_full != "evict":
            return
        excess = self.level(task_name).buffered - limits.capacity
        if excess <= 0:
            return
        kept = [
            status
            for status in Status
            if status != Status.ARCHIVED and self.tallies[(task_name, status, Tally.SIZE)] > 0
        ]
        for status in kept:
            self.begin_races((task_name, status), remover.order)
        buffered = LogicNode("$and", (ScalarNode("task_name", "$eq", task_name), SetNode("status", "$in", tuple(kept))))
        uids = self.table.select(buffered, remover.order, lambda uid, name: self.races.remaining(self.item(uid), name))
        gone = uids[:excess]
        if remover.race is not None:
            waits = [self.races.remaining(self.item(uid), remover.race) for uid in gone]
            self.races.pass_time(task_name, kept, remover.race, waits, [self.item(uid).priority for uid in gone])
        self.remove(gone, Tally.EVICTED)

    # Draws

    def sample(self, item: StorageItem) -> None:
        """Count a draw of a group, in the table and in this copy of its metadata."""
        self.count(item, Tally.SAMPLED_AGAIN if item.times_sampled else Tally.SAMPLED_NEW)
        item.times_sampled += 1
        self.table.change([item.uid], times_sampled=item.times_sampled)

    def consume(self, uid: int) -> None:
        """A group was drawn, and nobody will give it back: it stays for the next draw, is archived, or leaves."""
        item, limits = self.item(uid), self.rules.limits
        if limits.keeps(item.status, item.times_sampled):
            self.races.enter(item)
        elif item.status == Status.COMPLETED and limits.archives:
            self.count(item, Tally.TAKEN)
            self.move(uid, Status.ARCHIVED)
            self.prune(item.task_name)
        else:
            self.remove([uid], Tally.TAKEN)

    def prune(self, task_name: str) -> None:
        """Remove what is too old or too much from the archive."""
        limits = self.rules.limits
        archived = sorted(self.table.select(in_lane(task_name, Status.ARCHIVED)), key=self.archived_at.__getitem__)
        if limits.archive_groups is not None:
            self.remove(archived[: -limits.archive_groups], Tally.PRUNED)
        elif limits.archive_seconds is not None:
            oldest = time.time() - limits.archive_seconds
            self.remove([uid for uid in archived if self.archived_at[uid] < oldest], Tally.PRUNED)

    # Races

    def begin_races(self, lane: LaneName, order: Order) -> None:
        """Begin the races that an order asks for."""
        for term in order:
            if term.field in KEYS and (*lane, term.field) not in self.races.clocks:
                self.races.begin([self.item(uid) for uid in self.table.select(in_lane(*lane))], lane, term.field)

    def advance(self, drawn: Iterable[StorageItem], race: str | None) -> None:
        """These groups came first in their races."""
        if race is None:
            return
        by_lane: dict[LaneName, list[StorageItem]] = {}
        for item in drawn:
            by_lane.setdefault((item.task_name, item.status), []).append(item)
        for lane, items in by_lane.items():
            self.races.drawn(items, lane, race)

    def skip(self, lane: LaneName, race: str) -> None:
        """Groups that have arrived in a race by now, and weren't drawn, run again."""
        for item in map(self.item, self.table.select(in_lane(*lane))):
            if self.races.has_arrived(item, race):
                self.races.enter(item)

    def set_priorities(self, priorities: Mapping[int, float]) -> int:
        """Set the priorities of those groups that are there; how many."""
        found = {uid: priority for uid, priority in priorities.items() if self.table.get(uid) is not None}
        for uid, priority in found.items():
            self.table.change([uid], priority=priority)
            self.races.enter(self.item(uid))
        return len(found)
