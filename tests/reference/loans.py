"""The leases of the model: groups that are out on loan, which no lease outlives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from replaybuf.rules import transitions
from replaybuf.rules.transitions import Place, Tally, Transition
from replaybuf.storage.values import Leased, NewGroup, StorageItem
from tests.reference.groups import Groups


@dataclass(slots=True)
class Loan:
    """A leased group."""

    item: StorageItem
    token: int


class Loans:
    """The groups that are leased, by uid; their payloads stay with the others."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._loans: dict[int, Loan] = {}

    def lend(self, items: Iterable[StorageItem], token: int) -> None:
        """Lease drawn groups."""
        for item in items:
            changed = self._groups.apply(transitions.leased(item), item)
            item.times_sampled, item.deliveries = changed.times_sampled, changed.deliveries
            self._loans[item.uid] = Loan(changed, token)

    def acknowledge(self, lease: Leased, uids: Sequence[int]) -> None:
        """Consume groups of a lease, without those that were replaced while it held them."""
        loans = self._of(lease, uids)
        step = self._groups.trained_at(lease, [loan.item for loan in loans])
        for loan in loans:
            loan.item.trained_step = loan.item.trained_step if step is None else step
            self._end(loan, transitions.acknowledged(loan.item, self._groups.rules.limits))

    def give_back(self, lease: Leased, uids: Sequence[int], reason: str | None) -> int:
        """Give back those groups that the lease still holds, and return their number."""
        loans = self._of(lease, uids)
        for loan in loans:
            self._end(loan, transitions.given_back(loan.item, self._groups.rules.limits, reason))
        return len(loans)

    def replaced_by(self, group: NewGroup) -> list[Loan]:
        """Return the loans that a put ends: of groups that it replaces under its lease, and of one with its key."""
        named_loans = [] if group.lease is None else self._of(group.lease, group.replaces)
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

    def _end(self, loan: Loan, step: Transition) -> None:
        del self._loans[loan.item.uid]
        self._groups.apply(step, loan.item)
