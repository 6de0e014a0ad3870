"""Putting: a group is stored, dropped or refused."""

from __future__ import annotations

from collections.abc import Iterable

from replaybuf.rules import transitions
from replaybuf.rules.transitions import Tally
from replaybuf.storage.values import NewGroup, StorageItem, check_lease
from replaybuf.values.rollouts.marks import Marks
from tests.reference.loans import Loan
from tests.reference.state import Memory


class Putting(Memory):
    """Groups come in, in place of others or for new ones."""

    async def put(self, group: NewGroup) -> int:
        groups = self._groups
        loans, replaced = self._replaced_by(group)
        if not group.stays_leased:
            groups.check_room(group, replaced)
        self._replace(group, loans, replaced)
        item = self._add(group)
        if group.lease is not None and group.stays_leased:
            item.deliveries = max(loan.item.deliveries for loan in loans) - 1
            self._loans.lend([item], group.lease.token)
        else:
            excess = groups.excess(group.task_name)
            self._tell(group.dropped, map(groups.item, excess))
            groups.remove(excess, Tally.EVICTED)
        return item.uid

    def _replaced_by(self, group: NewGroup) -> tuple[list[Loan], list[int]]:
        if group.lease is not None:
            check_lease(group.lease, self._epoch, self.identity)
        return self._loans.replaced_by(group), self._groups.replaced_by(group)

    def _replace(self, group: NewGroup, loans: list[Loan], replaced: list[int]) -> None:
        self._tell(group.dropped, [*map(self._groups.item, replaced), *(loan.item for loan in loans)])
        self._groups.remove(replaced, Tally.REPLACED)
        self._loans.remove(loans)

    def _tell(self, dropped: list[StorageItem] | None, leaving: Iterable[StorageItem]) -> None:
        """Add groups that are about to leave to the caller's list, if there is one."""
        if dropped is not None:
            dropped += map(self._decode, leaving)

    async def drop(self, group: NewGroup) -> None:
        self._replace(group, *self._replaced_by(group))
        self._groups.count(group.task_name, transitions.dropped(group.status))
        if group.dropped is not None:
            group.dropped.append(group.as_dropped())

    async def refuse(self, group: NewGroup) -> None:
        self._groups.count(group.task_name, transitions.refused(group.status))

    def _add(self, group: NewGroup) -> StorageItem:
        uid, groups, kind = self._new_uid(), self._groups, self.codec.rollout_type
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
            reward=Marks.of(group.rollouts, kind).mean_reward,
            tags=dict(group.tags) if group.tags else None,
            key=group.key,
            error=group.error,
            deliveries=group.deliveries,
            worker=group.worker,
            trained_step=group.trained_step,
        )
        if group.train_step is not None:
            groups.steps.setdefault((group.task_name, group.status), group.train_step)
        elif (due := Marks.of(group.rollouts, kind, group.status).due) is not None:
            groups.due[uid] = {index for index, is_due in enumerate(due) if is_due}
        groups.payloads[uid] = self.codec.encode(group.rollouts)
        groups.apply(transitions.put(group.status), item)
        return groups.item(uid)
