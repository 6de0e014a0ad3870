"""Drawing in the sampler's order, and leases."""

from __future__ import annotations

import math
from collections.abc import Sequence

from replaybuf.rules import transitions
from replaybuf.rules.policies import PRIORITIZED, share
from replaybuf.rules.query import Node
from replaybuf.rules.transitions import LaneName
from replaybuf.storage.values import Draw, Leased, StorageItem, check_database, check_lease
from replaybuf.values.rollouts.rollout import Status
from tests.reference.items import in_lane
from tests.reference.state import Memory

Drawn = dict[str, list[StorageItem]]


class Drawing(Memory):
    """Groups are consumed, or leased until their consumer has settled them."""

    async def take(self, draw: Draw) -> Drawn | None:
        items_by_task = self._draw(draw)
        if items_by_task is not None:
            train_step = self._groups.train_step(draw, items_by_task)
            for item in all_of(items_by_task):
                item.trained_step = item.trained_step if train_step is None else train_step
                step = transitions.drawn(item, self.rules.limits)
                self._groups.apply(step, item)
                item.times_sampled += step.draws
        return items_by_task

    def _draw(self, draw: Draw) -> Drawn | None:
        items_by_task: Drawn = {}
        policy = self.rules.sampler
        for task_name, size in self._allowed(draw).items():
            lane = (task_name, draw.status)
            self._groups.begin_race(lane, policy)
            candidates = self._groups.table.select(in_lane(*lane, draw.where), policy.order, self._groups.order_key)
            items_by_task[task_name] = [self._decode(self._groups.item(uid)) for uid in candidates[: max(0, size)]]
        if not draw.is_met_by({task_name: len(items) for task_name, items in items_by_task.items()}):
            return None
        for task_name, items in items_by_task.items():
            if draw.probabilities:
                self._add_probabilities(items, (task_name, draw.status), draw.where)
            if policy.is_race:
                self._groups.advance(items)
                if draw.where is not None:
                    self._groups.skip((task_name, draw.status))
        return items_by_task

    def _allowed(self, draw: Draw) -> dict[str, int]:
        limits = self.rules.limits
        if draw.status != Status.COMPLETED or not limits.slows_draws:
            return dict(draw.sizes)
        return {task: min(size, limits.drawable(self._groups.level(task))) for task, size in draw.sizes.items()}

    def _add_probabilities(self, items: Sequence[StorageItem], lane: LaneName, where: Node | None) -> None:
        members = [self._groups.item(uid) for uid in self._groups.table.select(in_lane(*lane, where))]
        prioritized = self.rules.sampler.order[0].field == PRIORITIZED
        total = sum(share(member.priority) for member in members) if prioritized else 0.0
        idle = sum(member.priority == 0 for member in members) if prioritized else len(members)
        for item in items:
            item.probability = share(item.priority) / total if prioritized and item.priority else 1 / idle
            item.weight = len(members) * item.probability

    # Leases

    async def lease(self, draw: Draw, seconds: float) -> Leased | None:
        drawn = self._draw(draw)
        if drawn is None:
            return None
        return self._lend(drawn, self._groups.train_step(draw, drawn))

    def _lend(self, drawn: Drawn, train_step: int | None = None) -> Leased:
        token = self._new_uid()
        self._loans.lend(all_of(drawn), token)
        return Leased(token, math.inf, drawn, self._epoch, train_step, self.identity)

    async def acknowledge(self, lease: Leased, uids: Sequence[int]) -> None:
        check_lease(lease, self._epoch, self.identity)
        self._loans.acknowledge(lease, uids)

    async def give_back(self, lease: Leased, uids: Sequence[int], *, failed: str | None = None) -> int:
        check_database(lease, self.identity)
        return self._loans.give_back(lease, uids, failed)

    async def extend(self, lease: Leased, uids: Sequence[int], seconds: float, *, shortens: bool = False) -> float:
        check_lease(lease, self._epoch, self.identity)
        return lease.until


def all_of(items_by_task: Drawn) -> list[StorageItem]:
    """Return the groups of all tasks."""
    return [item for items in items_by_task.values() for item in items]
