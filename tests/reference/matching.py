"""Queries: what matches is read, counted, changed, refreshed or removed."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping

from replaybuf.rules import transitions
from replaybuf.rules.policies import Order
from replaybuf.rules.query import LogicNode, Node, SetNode
from replaybuf.rules.transitions import LaneName, Tally
from replaybuf.storage.values import Changes, Refresh, StorageItem, Unset
from replaybuf.values.rollouts.group_fields import fields_of, step_ranges
from replaybuf.values.rollouts.marks import Marks
from replaybuf.values.rollouts.rollout import Status
from replaybuf.values.rollouts.staleness import (
    find_expired,
    mask_stale_tokens,
    reset_response,
    staleness_of,
)
from tests.reference.state import Memory

_ALL = LogicNode("$and", ())


class Matching(Memory):
    """Groups are read, counted, changed, refreshed and removed where they are."""

    async def find(
        self,
        query: Node,
        *,
        order: Order,
        limit: int | None = None,
        **_payloads: object,
    ) -> AsyncIterator[StorageItem]:
        for uid in self._groups.table.select(query, order)[:limit]:
            yield self._decode(self._groups.item(uid))

    async def count(self, query: Node, *, at_most: int | None = None) -> int:
        count = len(self._groups.table.select(query))
        return count if at_most is None else min(count, at_most)

    async def tallies(self) -> dict[tuple[str, Status, Tally], int]:
        return dict(self._groups.tallies)

    async def histograms(self, fields: Iterable[str]) -> dict[str, dict[LaneName, dict[int, int]]]:
        items = [*map(self._groups.item, self._groups.table.select(_ALL))]
        return {field: _histogram(items, field) for field in fields}

    def __len__(self) -> int:
        tallies = self._groups.tallies.items()
        return sum(n for (_, status, name), n in tallies if name == Tally.SIZE and status != Status.ARCHIVED)

    # Changing

    async def delete(self, query: Node) -> int:
        return self._groups.remove(self._groups.table.select(query), Tally.DELETED)

    async def update(self, query: Node, changes: Changes) -> int:
        uids = self._groups.table.select(query)
        if not isinstance(changes.tags, Unset):
            self._groups.table.change(uids, tags=dict(changes.tags) if changes.tags else None)
        if not isinstance(changes.priority, Unset):
            self._groups.set_priorities(dict.fromkeys(uids, changes.priority))
        if not isinstance(changes.status, Unset):
            for item in map(self._groups.item, uids):
                self._groups.due.pop(item.uid, None)  # who sets the status has decided what becomes of the group
                self._groups.apply(transitions.updated(item.status, changes.status), item)
        return len(uids)

    async def update_priorities(self, priorities: Mapping[int, float]) -> int:
        return self._loans.set_priorities(priorities) + self._groups.set_priorities(priorities)

    async def refresh(self, refresh: Refresh) -> dict[str, int]:
        counts = dict.fromkeys(refresh.rules, 0)
        self._groups.refreshed(refresh.rules, refresh.statuses, refresh.train_step)
        tasks = SetNode("task_name", "$in", tuple(refresh.rules))
        statuses = SetNode("status", "$in", tuple(status.value for status in refresh.statuses))
        for item in map(self._groups.item, self._groups.table.select(LogicNode("$and", (tasks, statuses)))):
            counts[item.task_name] += self._refresh_one(item, refresh)
        return counts

    def _refresh_one(self, item: StorageItem, refresh: Refresh) -> bool:
        groups, rule = self._groups, refresh.rules[item.task_name]
        leaves = item.status == Status.EXPIRED and not rule.retryable
        rollouts, kind = self.codec.decode(groups.payloads[item.uid]), self.codec.rollout_type
        ranges = step_ranges(fields_of(rollouts, kind))
        staleness = [staleness_of(oldest, refresh.train_step) for oldest, _ in ranges]
        kind.set_all(rollouts, "seq_staleness", staleness)
        too_old = find_expired(fields_of(rollouts, kind), rule, refresh.train_step, staleness)
        expired = sorted({*too_old, *groups.due.get(item.uid, ())})
        if leaves or (expired and not rule.retryable):
            groups.remove([item.uid], Tally.DROPPED)
            return True
        for index in expired:
            reset_response(rollouts[index], kind)
        if (through := rule.masked_through(refresh.train_step)) is not None:
            mask_stale_tokens(rollouts, through, kind)
        groups.payloads[item.uid] = self.codec.encode(rollouts)
        groups.table.change([item.uid], staleness=max(staleness), reward=Marks.of(rollouts, kind).mean_reward)
        if expired:
            groups.due.pop(item.uid, None)
        if not expired or (item.status == Status.EXPIRED and not too_old):  # not counted again
            return False
        groups.apply(transitions.expired(item.status), groups.item(item.uid))
        return True


def _histogram(items: Iterable[StorageItem], field: str) -> dict[LaneName, dict[int, int]]:
    counts: dict[LaneName, Counter[int]] = {}
    for item in items:
        counts.setdefault((item.task_name, item.status), Counter())[getattr(item, field)] += 1
    return {lane: dict(values) for lane, values in counts.items()}
