"""`replaybuf doctor`: finds what is wrong with a database, and repairs what can be repaired.

A module `check_...` for each area has its checks, each with its queries, findings and repairs; `examine` runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from replaybuf.common import units
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.inspection.reader import Reader


class Severity(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    WARNING = "warning"  # the data is intact; an operator should know
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check: what is fine, or what is wrong and how to mend it.

    `repairable`: `--repair` mends it. `examine` sets the name of the check.
    """

    check: str
    level: Severity
    text: str
    mend: str = ""
    repairable: bool = False


@dataclass(slots=True)
class CheckContext:
    """The state shared by checks: thoroughness, the database's location, and the damage found so far.

    Long checks call `tell(done, total)` from time to time.
    """

    where: str
    path: Path | None = None  # of a SQLite file
    quick: bool = False
    tell: Callable[[int, int], None] = lambda done, total: None
    damaged: set[int] = field(default_factory=set)  # uids of groups with an unreadable payload or text
    out_of_reach: set[int] = field(default_factory=set)  # numbers of unreachable places
    unnamed: dict[int, list[int]] = field(default_factory=dict)  # files without a row, by number of the place
    nobodys: dict[int, list[int]] = field(default_factory=dict)  # those that can be deleted


#: Repairs what is safe to repair in an exclusive write transaction, and returns what it did. It determines the damage
#: again, because that may have changed since the check.
Repair = Callable[[Transaction, CheckContext], Sequence[str]]


@dataclass(frozen=True, slots=True)
class Check:
    """One check, and its repairs, each of which has a transaction of its own.

    `find` runs in one read transaction, `alone` opens as many as it needs.
    """

    name: str
    find: Callable[[Transaction, CheckContext], Sequence[Finding]] = lambda tx, context: ()
    repairs: Sequence[Repair] = ()
    alone: Callable[[Reader, CheckContext], Sequence[Finding]] | None = None


def fine(text: str) -> Finding:
    """Return the finding that nothing is wrong."""
    return Finding("", Severity.OK, text)


def problem(text: str, mend: str) -> Finding:
    """Return a problem that `--repair` can't mend."""
    return Finding("", Severity.PROBLEM, text, mend)


def repairable(text: str, *, level: Severity = Severity.PROBLEM) -> Finding:
    """Return a problem that `--repair` mends."""
    return Finding("", level, text, "replaybuf doctor URL --repair", repairable=True)


def warning(text: str, mend: str = "") -> Finding:
    """Return a warning: nothing is damaged, but an operator should know."""
    return Finding("", Severity.WARNING, text, mend)


def groups(count: int) -> str:
    """Return `1 group`, `1,234 groups`."""
    return units.number_of(count, "group")
