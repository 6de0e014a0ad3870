"""`replaybuf doctor`: finds what is wrong with a database, and repairs what can be repaired.

A check is a name and a function that yields findings; a finding that can be repaired brings its cure. `examine` has the
list of all checks, and runs it: to look, or to mend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import wraps
from typing import Any, TypeVar

from replaybuf.common import units
from replaybuf.storage.sql.engine.transaction import DEFAULT, Transaction
from replaybuf.storage.sql.inspection.reader import Reader

T = TypeVar("T")


class Severity(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    WARNING = "warning"  # the data is intact; an operator should know
    PROBLEM = "problem"


#: Mends what a finding says, in the transaction in which it was found, and returns what was done.
Cure = Callable[[], str]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check: what is fine, or what is wrong and how to mend it.

    `--repair` mends a finding with a `cure`. `examine` sets the name of the check.
    """

    check: str
    level: Severity
    text: str
    mend: str = ""
    cure: Cure | None = None

    def row(self) -> dict[str, Any]:
        """Return the finding for programs."""
        values = {"check": self.check, "level": str(self.level), "text": self.text, "mend": self.mend or None}
        return {**values, "repairable": self.cure is not None}


@dataclass(slots=True)
class Examination:
    """The state that checks share: the database, thoroughness, and the damage found so far.

    Long checks call `tell(done, total)` from time to time. While something is mended, `tx` is the exclusive write
    transaction, in which all is read and found again.
    """

    reader: Reader
    quick: bool = False
    tell: Callable[[int, int], None] = lambda done, total: None
    tx: Transaction | None = None
    damaged: set[int] = field(default_factory=set)  # uids of groups with an unreadable payload or text
    out_of_reach: set[int] = field(default_factory=set)  # numbers of unreachable places

    def read(self, function: Callable[[Transaction], T]) -> T:
        """Return `function(tx)` of a read transaction, or of the one in which something is mended."""
        return self.reader.read_any(lambda tx: function(tx.of(DEFAULT))) if self.tx is None else function(self.tx)


#: Yields what a check finds, in as many transactions as it needs.
Check = Callable[[Examination], Iterable[Finding]]


def in_one_transaction(find: Callable[[Transaction, Examination], Iterable[Finding]]) -> Check:
    """Return the check that runs a function in one transaction."""

    @wraps(find)
    def check(about: Examination) -> Sequence[Finding]:
        return about.read(lambda tx: list(find(tx, about)))

    return check


def fine(text: str) -> Finding:
    """Return the finding that nothing is wrong."""
    return Finding("", Severity.OK, text)


def problem(text: str, mend: str) -> Finding:
    """Return a problem that `--repair` can't mend."""
    return Finding("", Severity.PROBLEM, text, mend)


def repairable(text: str, cure: Cure) -> Finding:
    """Return a problem that `--repair` mends."""
    return Finding("", Severity.PROBLEM, text, "replaybuf doctor URL --repair", cure)


def warning(text: str, mend: str = "") -> Finding:
    """Return a warning: nothing is damaged, but an operator should know."""
    return Finding("", Severity.WARNING, text, mend)


def groups(count: int) -> str:
    """Return `1 group`, `1,234 groups`."""
    return units.number_of(count, "group")
