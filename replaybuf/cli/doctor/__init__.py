"""`replaybuf doctor`: finds what is wrong with a database, and repairs what can be repaired.

A check is a name and a function that yields findings: a sentence each, and a cure where `--repair` can mend it.
`examine` has the list of all checks, and runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

from replaybuf.storage.sql.engine.transaction import DEFAULT, Transaction
from replaybuf.storage.sql.inspection.reader import Reader

T = TypeVar("T")
REPAIR = "replaybuf doctor URL --repair"


class Severity(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    WARNING = "warning"  # the data is intact; an operator should know
    PROBLEM = "problem"


#: Finds again what is wrong, in an exclusive write transaction, mends it, and returns what was done, "" for nothing.
Cure = Callable[[Transaction], str]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check, whose name `examine` sets: what is fine, or what is wrong and how to mend it."""

    level: Severity
    text: str
    mend: str = ""
    cure: Cure | None = None
    check: str = ""

    def row(self) -> dict[str, Any]:
        """Return the finding for programs."""
        values = {"check": self.check, "level": str(self.level), "text": self.text, "mend": self.mend or None}
        return {**values, "repairable": self.cure is not None}


@dataclass(slots=True)
class Examination:
    """The state that checks share. Long checks call `tell(done, total)` from time to time."""

    reader: Reader
    tell: Callable[[int, int], None] = lambda done, total: None
    out_of_reach: set[int] = field(default_factory=set)  # numbers of unreachable places

    def read(self, function: Callable[[Transaction], T]) -> T:
        """Return `function(tx)` of a read transaction."""
        return self.reader.read_any(lambda tx: function(tx.of(DEFAULT)))


#: Yields what a check finds, in as many transactions as it needs.
Check = Callable[[Examination], Iterable[Finding]]


def in_one_transaction(find: Callable[[Transaction, Examination], Finding]) -> Check:
    """Return the check that runs a function in one transaction."""
    return lambda examination: [examination.read(lambda tx: find(tx, examination))]


def fine(text: str) -> Finding:
    """Return the finding that nothing is wrong."""
    return Finding(Severity.OK, text)


def problem(text: str, mend: str = REPAIR, cure: Cure | None = None) -> Finding:
    """Return a problem, which `--repair` mends if it has a cure."""
    return Finding(Severity.PROBLEM, text, mend, cure)


def verdict(defect: str, otherwise: str, mend: str = REPAIR, cure: Cure | None = None) -> Finding:
    """Return the problem that `defect` says; if it is "", that `otherwise` is fine."""
    return problem(defect, mend, cure) if defect else fine(otherwise)


def warning(text: str, mend: str = "") -> Finding:
    """Return a warning: nothing is damaged, but an operator should know."""
    return Finding(Severity.WARNING, text, mend)
