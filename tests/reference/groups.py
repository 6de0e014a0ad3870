"""The groups of the model, and what may happen to them: no lock, no waiting, no decoding."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product

from replaybuf.errors import ConflictError, FullError
from replaybuf.rules import transitions
from replaybuf.rules.limits import Level, Rules
from replaybuf.rules.policies import ReplayPolicy
from replaybuf.rules.query import LogicNode, ScalarNode, SetNode
from replaybuf.rules.transitions import LaneName, Place, Tally, Transition, level_of
from replaybuf.storage.values import Draw, Leased, NewGroup, StorageItem
from replaybuf.values.codec.payload import Codec
from replaybuf.values.rollouts.marks import Marks
from replaybuf.values.rollouts.rollout import ASIDE, Status
from tests.reference.items import Items, Races, in_lane


class Groups:
    """Metadata in a table, payloads, races, and tallies. `apply` keeps all of them consistent."""

    def __init__(self, rules: Rules, codec: Codec) -> None:
        self.table = Items()
        self.rules = rules
        self.codec = codec
        self.payloads: dict[int, bytes] = {}
        self.archived_at: dict[int, float] = {}
        self.due: dict[int, set[int]] = {}  # the rollouts that were EXPIRED when they were put without a train step
        self.steps: dict[LaneName, int] = {}  # the train steps that groups were refreshed to
        self.races = Races(rules)
        self.tallies: Counter[tuple[str, Status, Tally]] = Counter()

    def item(self, uid: int) -> StorageItem:
        """Return a copy of the metadata of a group that is in the table."""
        item = self.table.get(uid)
        assert item is not None
        return item

    def refreshed(self, tasks: Iterable[str], statuses: Iterable[Status], step: int) -> None:
        """Note the train step of a refresh, for all tasks and statuses that there ever was a group of."""
        lanes = set(product(tasks, statuses))
        self.steps |= dict.fromkeys({(task, status) for task, status, _ in self.tallies} & lanes, step)

    def train_step(self, draw: Draw, by_task: Mapping[str, Sequence[StorageItem]]) -> int | None:
        """Return the train step of a draw: the one that it names, or the last one of the tasks of its groups."""
        lanes = [(task, draw.status) for task, items in by_task.items() if items]
        steps = [self.steps[lane] for lane in lanes if lane in self.steps]
        return max(steps, default=None) if draw.train_step is None else draw.train_step

    def trained_at(self, lease: Leased, items: Sequence[StorageItem]) -> int | None:
        """Return the train step of groups that are acknowledged: a named one, or that of their tasks' last refresh."""
        lanes = {(item.task_name, item.status) for item in items if item.status == Status.COMPLETED}
        steps = [self.steps[lane] for lane in lanes if lane in self.steps]
        return max(steps, default=lease.train_step) if lease.named_step is None else lease.named_step

    def level(self, task_name: str) -> Level:
        """Return the level of a task."""
        return level_of(self.tallies, task_name)

    def apply(self, step: Transition, item: StorageItem) -> StorageItem:
        """Let a group take a step, and return its metadata after it. Leased groups are not in the table."""
        self.count(item.task_name, step)
        now = _after(step, item)
        if step.moves:
            self._leave(now.uid, step.before)
            self._arrive(now, step.after)
        else:
            names = ("times_sampled", "deliveries", "error", "trained_step")
            self.table.change([now.uid], **{name: getattr(now, name) for name in names})
        if step.enters_races:
            self.races.enter(now)
        return now

    def _leave(self, uid: int, place: Place | None) -> None:
        if place is not None and not place.leased:
            self.table.remove([uid])
            self.races.leave(uid)
            self.archived_at.pop(uid, None)

    def _arrive(self, item: StorageItem, place: Place | None) -> None:
        if place is None:
            del self.payloads[item.uid]
            self.races.tickets.pop(item.uid, None)
            self.due.pop(item.uid, None)
        elif not place.leased:
            self.table.add(item)
            if item.status in ASIDE:
                self.archived_at[item.uid] = time.time()

    def count(self, task_name: str, step: Transition) -> None:
        for (status, name), n in step.counts.items():
            self.tallies[(task_name, status, name)] += n

    def remove(self, uids: Iterable[int], reason: Tally) -> int:
        """Remove groups that are in the buffer, and return their number."""
        items = [self.item(uid) for uid in uids]
        for item in items:
            self.apply(transitions.removed(Place(item.status), reason), item)
        return len(items)

    # Putting

    def replaced_by(self, group: NewGroup) -> list[int]:
        """Return the groups in the buffer that a put replaces: those that it names, and the one with the same key."""
        same_key = [] if group.key is None else self.table.with_key(group.task_name, group.key)
        named_uids = () if group.lease else group.replaces
        for uid in named_uids:
            if self.table.get(uid) is None:
                raise ConflictError(f"group {uid}, which was to be replaced, is not in the buffer; nothing was stored")
        return sorted({*same_key, *named_uids})

    def check_room(self, group: NewGroup, replaced: Iterable[int]) -> None:
        """Raise FullError when the limits leave no room for the group."""
        limits = self.rules.limits
        statuses = [item.status for item in map(self.item, replaced) if item.task_name == group.task_name]
        level = self.level(group.task_name).without(statuses)
        if limits.insertable(level, group.status) == 0:
            raise FullError(f"task {group.task_name}: {limits.why_full(level, group.status)}")

    def excess(self, task_name: str) -> list[int]:
        """Return the groups beyond the capacity, which are to be evicted; the remover's race has gone on then."""
        limits, remover = self.rules.limits, self.rules.remover
        if limits.capacity is None or limits.on_full != "evict":
            return []
        excess = self.level(task_name).buffered - limits.capacity
        if excess <= 0:
            return []
        kept = [
            status for status in Status if status not in ASIDE and self.tallies[(task_name, status, Tally.SIZE)] > 0
        ]
        for status in kept:
            self.begin_race((task_name, status), remover)
        buffered = LogicNode("$and", (ScalarNode("task_name", "$eq", task_name), SetNode("status", "$in", tuple(kept))))
        uids = self.table.select(buffered, remover.order, lambda uid, name: self.order_key(uid, name, left=True))
        evicted = uids[:excess]
        if remover.is_race:
            waits = [self.races.remaining(self.item(uid)) for uid in evicted]
            self.races.pass_time(task_name, kept, waits, [self.item(uid).priority for uid in evicted])
        return evicted

    # Order

    def order_key(self, uid: int, name: str, *, left: bool = False) -> float:
        """Return a group's key in its race, or the time `left` until it arrives; or minus its oldest model step.

        Groups without steps come after all others, by their staleness.
        """
        if name != "staleness":
            return self.races.remaining(self.item(uid)) if left else self.races.keys[uid]
        oldest = Marks.of(self.codec.decode(self.payloads[uid]), self.codec.rollout_type).oldest_step
        return self.item(uid).staleness - 9 * 10**18 if oldest is None else -oldest

    def begin_race(self, lane: LaneName, policy: ReplayPolicy) -> None:
        """Begin the race that a random policy needs."""
        if policy.key is not None:
            self.races.begin([self.item(uid) for uid in self.table.select(in_lane(*lane))], lane)

    def advance(self, drawn: Iterable[StorageItem]) -> None:
        """Advance the races that these groups came first in."""
        by_lane: dict[LaneName, list[StorageItem]] = {}
        for item in drawn:
            by_lane.setdefault((item.task_name, item.status), []).append(item)
        for lane, items in by_lane.items():
            self.races.drawn(items, lane)

    def skip(self, lane: LaneName) -> None:
        """Give new keys to groups that have arrived in a race by now and weren't drawn."""
        for item in map(self.item, self.table.select(in_lane(*lane))):
            if self.races.has_arrived(item):
                self.races.enter(item)

    def set_priorities(self, priorities: Mapping[int, float]) -> int:
        """Set the priorities of those groups that are in the buffer; return their number."""
        present = {uid: priority for uid, priority in priorities.items() if self.table.get(uid) is not None}
        for uid, priority in present.items():
            self.table.change([uid], priority=priority)
            self.races.enter(self.item(uid))
        return len(present)


def _after(step: Transition, item: StorageItem) -> StorageItem:
    """Return a copy of a group's metadata as it is after a step."""
    return replace(
        item,
        item=[],
        probability=None,
        weight=None,
        tags=dict(item.tags) if item.tags else None,
        status=item.status if step.after is None else step.after.status,
        times_sampled=item.times_sampled + step.draws,
        deliveries=0 if step.afresh else item.deliveries + step.deliveries,
        error=step.error or (None if step.afresh else item.error),
    )
