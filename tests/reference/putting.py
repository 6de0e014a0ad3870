"""Putting: a group is stored, dropped or refused."""

from __future__ import annotations

from collections.abc import Iterable

from replaybuf.rules import transitions
from replaybuf.rules.transitions import Tally
from replaybuf.storage.values import NewGroup, StorageItem, check_lease
from replaybuf.values.rollouts.marks import Marks
from tests.reference.state import Memory


class Putting(Memory):
    """Groups come in, in place of others or for new ones."""

    async def put(self, group: NewGroup) -> int:
        payload = self._encode(group)
        reward = self._reward(group)
        with self._lock:
            return self._store(group, payload, reward)

    def _store(self, group: NewGroup, payload: bytes, reward: float | None) -> int:
        groups = self._groups
        if group.lease is not None:
            check_lease(group.lease, self._epoch, self.identity)
        loans, replaced = self._loans.replaced_by(group), groups.replaced_by(group)
        if not group.stays_leased:
            groups.check_room(group, replaced)
        parents = {*replaced, *(loan.item.uid for loan in loans)}
        origins = parents.union(*(groups.made_from.get(uid, ()) for uid in parents))
        self._tell(group.dropped, [*map(groups.item, replaced), *(loan.item for loan in loans)])
        groups.remove(replaced, Tally.REPLACED)
        self._loans.remove(loans)
        item = self._add(group, payload, reward)
        groups.made_from[item.uid] = origins
        if group.lease is not None and group.stays_leased:
            item.deliveries = max(loan.item.deliveries for loan in loans) - 1
            self._loans.lend([item], group.lease.token, loans[0].until)
        else:
            excess = groups.excess(group.task_name)
            self._tell(group.dropped, map(groups.item, excess))
            groups.remove(excess, Tally.EVICTED)
        self._notify()
        return item.uid

    def _tell(self, dropped: list[StorageItem] | None, leaving: Iterable[StorageItem]) -> None:
        """Add groups that are about to leave to the caller's list, if there is one."""
        if dropped is not None:
            dropped += [self._decode_leniently(item) for item in leaving]

    async def drop(self, group: NewGroup) -> None:
        with self._lock:
            if group.lease is not None:
                check_lease(group.lease, self._epoch, self.identity)
            loans, replaced = self._loans.replaced_by(group), self._groups.replaced_by(group)
            self._tell(group.dropped, [*map(self._groups.item, replaced), *(loan.item for loan in loans)])
            self._groups.remove(replaced, Tally.REPLACED)
            self._loans.remove(loans)
            self._groups.count(group.task_name, transitions.dropped(group.status))
            if group.dropped is not None:
                group.dropped.append(group.as_dropped())
            self._notify()

    async def refuse(self, group: NewGroup) -> None:
        with self._lock:
            self._groups.count(group.task_name, transitions.refused(group.status))

    def _add(self, group: NewGroup, payload: bytes, reward: float | None) -> StorageItem:
        uid, groups = self._new_uid(), self._groups
        if self._ticket_shift:
            groups.races.tickets[uid] = uid - self._ticket_shift
        item = StorageItem(
            uid=uid,
            timestamp_id=uid,
            task_name=group.task_name,
            status=group.status,
            staleness=group.staleness,
            priority=group.priority,
            times_sampled=group.times_sampled,
            created_at=group.created_at,
            reward=reward,
            tags=dict(group.tags) if group.tags else None,
            key=group.key,
            error=group.error,
            deliveries=group.deliveries,
            worker=group.worker,
            trained_step=group.trained_step,
        )
        if group.train_step is not None:
            groups.steps.setdefault((group.task_name, group.status), group.train_step)
            due = None
        else:
            due = Marks.of(group.rollouts, self.codec.rollout_type, group.status).due
        if due is not None:
            groups.due[uid] = {index for index, is_due in enumerate(due) if is_due}
        groups.payloads[uid] = payload
        groups.apply(transitions.put(group.status), item)
        return groups.item(uid)
