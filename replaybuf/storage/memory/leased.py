"""The leases of the reference backend: groups that are out on loan, and come back."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from replaybuf.rollouts.rollout import Status
from replaybuf.rules.tallies import Tally
from replaybuf.storage.memory.groups import Groups
from replaybuf.storage.values import Leased, NewGroup, StorageItem, lost_to_others


@dataclass(slots=True)
class Loan:
    """A leased group."""

    item: StorageItem
    token: int
    until: float


class Loans:
    """The groups that are leased, by uid; their payloads stay with the others."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._loans: dict[int, Loan] = {}

    def copy(self, groups: Groups) -> Loans:
        """The same loans, of a copy of the groups."""
        copied = Loans(groups)
        copied._loans = {uid: replace(loan, item=replace(loan.item)) for uid, loan in self._loans.items()}
        return copied

    def lend(self, items: Iterable[StorageItem], token: int, until: float) -> None:
        """Lease groups that were drawn."""
        for item in items:
            self._groups.sample(item)
            item.deliveries += 1
            kept = replace(item, item=[], tags=dict(item.tags) if item.tags else None)
            self._loans[item.uid] = Loan(kept, token, until)
            self._groups.take_out(item)
            self._groups.count(item, Tally.LEASED)

    def held(self, lease: Leased, uids: Sequence[int]) -> list[Loan]:
        """The groups of a lease, without those that were replaced while nobody else could have them.

        Raises LeaseLostError when its time was over for some of them.
        """
        self.end_overdue()
        mine = self._of(lease, uids)
        if len(mine) < len(uids) and time.time() >= lease.until:
            raise lost_to_others(lease, len(uids) - len(mine))
        return mine

    def acknowledge(self, lease: Leased, uids: Sequence[int]) -> None:
        """Groups of a lease have been consumed."""
        for loan in self.held(lease, uids):
            del self._loans[loan.item.uid]
            self._groups.count(loan.item, Tally.LEASED, -1)
            self._groups.add(replace(loan.item, deliveries=0))
            self._groups.consume(loan.item.uid)

    def give_back(self, lease: Leased, uids: Sequence[int], *, counts: bool, reason: str) -> int:
        """Give those groups back that the lease still holds; how many."""
        mine = self._of(lease, uids)
        for loan in mine:
            self._return(loan, counts, reason, Tally.RETURNED)
        return len(mine)

    def end_overdue(self) -> int:
        """Give back what was leased for a time that is over; how many groups."""
        now = time.time()
        overdue = [loan for loan in self._loans.values() if loan.until <= now]
        for loan in overdue:
            self._return(loan, True, "its consumer was silent for too long", Tally.LEASE_EXPIRED)
        return len(overdue)

    def next_end(self) -> float:
        """When the first lease ends, in seconds since the epoch."""
        return min((loan.until for loan in self._loans.values()), default=float("inf"))

    def replaced_by(self, group: NewGroup) -> list[Loan]:
        """The loans that a put ends: of the groups that it replaces under its lease, and of one of the same key.

        Raises LeaseLostError when the lease doesn't hold one of them any more.
        """
        named = [] if group.lease is None else self._of(group.lease, group.replaces)
        if group.lease is not None and len(named) < len(group.replaces):
            raise lost_to_others(group.lease, len(group.replaces) - len(named))
        keyed = [
            loan
            for loan in self._loans.values()
            if group.key is not None and (loan.item.task_name, loan.item.key) == (group.task_name, group.key)
        ]
        return named + [loan for loan in keyed if loan not in named]

    def remove(self, loans: Iterable[Loan]) -> None:
        """Groups are replaced while they are leased: they won't come back."""
        for loan in loans:
            del self._loans[loan.item.uid]
            self._groups.forget(loan.item.uid)
            self._groups.count(loan.item, Tally.LEASED, -1)
            self._groups.count(loan.item, Tally.REPLACED)

    def return_all(self) -> None:
        """Give back whatever is leased, as if it had not been drawn."""
        for loan in list(self._loans.values()):
            self._return(loan, False, "", None)

    def set_priorities(self, priorities: Mapping[int, float]) -> int:
        """Set the priorities of those groups that are leased; how many."""
        leased = [loan.item for uid in priorities if (loan := self._loans.get(uid))]
        for item in leased:
            item.priority = priorities[item.uid]
        return len(leased)

    def undone(self) -> tuple[list[StorageItem], dict[tuple[str, Status, Tally], int]]:
        """What is leased as it was before, and how the counts differ then."""
        items, counts = [], self._groups.tallies.copy()
        for loan in self._loans.values():
            times = loan.item.times_sampled - 1
            item = replace(loan.item, times_sampled=times, deliveries=loan.item.deliveries - 1)
            sampled = Tally.SAMPLED_AGAIN if times else Tally.SAMPLED_NEW
            for name, by in ((Tally.LEASED, -1), (sampled, -1), (Tally.SIZE, 1)):
                counts[(item.task_name, item.status, name)] += by
            items.append(item)
        return items, counts

    def _of(self, lease: Leased, uids: Sequence[int]) -> list[Loan]:
        return [loan for uid in uids if (loan := self._loans.get(uid)) and loan.token == lease.token]

    def _return(self, loan: Loan, counts: bool, reason: str, why: Tally | None) -> None:
        item, groups = loan.item, self._groups
        del self._loans[item.uid]
        groups.count(item, Tally.LEASED, -1)
        if why is not None:
            groups.count(item, why)
        item.times_sampled -= 1
        groups.count(item, Tally.SAMPLED_AGAIN if item.times_sampled else Tally.SAMPLED_NEW, -1)
        limit = groups.rules.limits.max_deliveries
        if not counts:
            item.deliveries -= 1
        elif limit and item.deliveries >= limit:
            groups.count(item, Tally.SET_ASIDE)
            item.status = Status.FAILED
            item.error = f"delivered {item.deliveries} times without acknowledgement; the last time {reason}"
        groups.add(item)
