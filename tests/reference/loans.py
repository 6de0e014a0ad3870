"""The leases of the model: groups that are out on loan."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from replaybuf.rules import transitions
from replaybuf.rules.transitions import Place, Tally, Transition
from replaybuf.storage.values import Leased, NewGroup, StorageItem, lost_to_others, passed_on
from tests.reference.groups import Groups

_START = time.time() - time.monotonic()


def now() -> float:
    """Return the time by which leases end, in seconds since the epoch; it passes evenly, though the clock is set."""
    return _START + time.monotonic()


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
        self._limits = groups.rules.limits
        self._loans: dict[int, Loan] = {}

    def copy(self, groups: Groups) -> Loans:
        """Return a copy of the loans, for a copy of the groups."""
        copied = Loans(groups)
        copied._loans = {uid: replace(loan, item=replace(loan.item)) for uid, loan in self._loans.items()}
        return copied

    def lend(self, items: Iterable[StorageItem], token: int, until: float) -> None:
        """Lease drawn groups."""
        for item in items:
            changed = self._groups.apply(transitions.leased(item), item)
            item.times_sampled, item.deliveries = changed.times_sampled, changed.deliveries
            self._loans[item.uid] = Loan(changed, token, until)

    def held(self, lease: Leased, uids: Sequence[int]) -> list[Loan]:
        """Return the loans of a lease, without groups that were replaced while the lease held them.

        Raises LeaseLostError when the lease had expired for some of them.
        """
        self.end_overdue()
        loans = self._of(lease, uids)
        if len(loans) < len(uids) and now() >= max([lease.until, *(loan.until for loan in loans)]):
            raise lost_to_others(lease, set(uids).difference(loan.item.uid for loan in loans))
        return loans

    def acknowledge(self, lease: Leased, uids: Sequence[int]) -> None:
        """Consume groups of a lease."""
        loans = self.held(lease, uids)
        if len(loans) < len(uids):
            self._check_not_passed_on(lease, set(uids).difference(loan.item.uid for loan in loans))
        step = self._groups.trained_at(lease, [loan.item for loan in loans])
        for loan in loans:
            loan.item.trained_step = loan.item.trained_step if step is None else step
            self._end(loan, transitions.acknowledged(loan.item, self._limits))

    def give_back(self, lease: Leased, uids: Sequence[int], reason: str | None) -> int:
        """Give back those groups that the lease still holds, and return their number."""
        loans = self._of(lease, uids)
        for loan in loans:
            self._end(loan, transitions.given_back(loan.item, self._limits, reason))
        return len(loans)

    def end_overdue(self) -> int:
        """Give back the groups whose leases have expired, and return their number."""
        time_now = now()
        overdue = [loan for loan in self._loans.values() if loan.until <= time_now]
        for loan in overdue:
            self._end(loan, transitions.lapsed(loan.item, self._limits))
        return len(overdue)

    def next_end(self) -> float:
        """Return the time when the first lease ends, in seconds since the epoch."""
        return min((loan.until for loan in self._loans.values()), default=float("inf"))

    def replaced_by(self, group: NewGroup) -> list[Loan]:
        """Return the loans that a put ends: of groups that it replaces under its lease, and of one with the same key.

        Raises LeaseLostError when the lease no longer holds one of them.
        """
        named_loans = [] if group.lease is None else self._of(group.lease, group.replaces)
        if group.lease is not None and len(named_loans) < len(group.replaces):
            raise lost_to_others(group.lease, set(group.replaces).difference(loan.item.uid for loan in named_loans))
        keyed = [
            loan
            for loan in self._loans.values()
            if group.key is not None and (loan.item.task_name, loan.item.key) == (group.task_name, group.key)
        ]
        return named_loans + [loan for loan in keyed if loan not in named_loans]

    def remove(self, loans: Iterable[Loan]) -> None:
        """Remove groups that are replaced while they are leased."""
        for loan in loans:
            self._end(loan, transitions.removed(Place(loan.item.status, leased=True), Tally.REPLACED))

    def return_all(self) -> None:
        """Give back all leased groups, as if they had not been drawn."""
        for loan in list(self._loans.values()):
            self._end(loan, transitions.unleased(loan.item))

    def set_priorities(self, priorities: Mapping[int, float]) -> int:
        """Set the priorities of those groups that are leased; return their number."""
        leased = [loan.item for uid in priorities if (loan := self._loans.get(uid))]
        for item in leased:
            item.priority = priorities[item.uid]
        return len(leased)

    def _of(self, lease: Leased, uids: Sequence[int]) -> list[Loan]:
        return [loan for uid in uids if (loan := self._loans.get(uid)) and loan.token == lease.token]

    def _check_not_passed_on(self, lease: Leased, uids: Iterable[int]) -> None:
        """Raise LeaseLostError if any of these groups, which the lease doesn't hold, is with others unacknowledged."""
        loans = [(uid, loan.item.times_sampled, True) for uid in uids if (loan := self._loans.get(uid))]
        deliveries = [(uid, item.times_sampled, False) for uid in uids if (item := self._groups.table.get(uid))]
        if lost_uids := passed_on(lease, loans + deliveries):
            raise lost_to_others(lease, lost_uids)

    def _end(self, loan: Loan, step: Transition) -> None:
        del self._loans[loan.item.uid]
        self._groups.apply(step, loan.item)
