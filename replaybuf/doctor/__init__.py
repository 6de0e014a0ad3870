"""`replaybuf doctor`: what is wrong with a database, and what can be done about it.

A module `check_...` for each area has its questions in SQL and the findings, `repairs` what mends them. `rescue` saves
what is left of a damaged file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from replaybuf import units
from replaybuf.storage.sql.inspection.reader import Reader, ReadTransaction


class Severity(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARNING = "warning"  # nothing is wrong with the data; somebody should know
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of the check of this name: what is fine, or what is wrong and how to mend it.

    `repairable`: `--repair` mends it. `examine` adds the name.
    """

    check: str
    level: Severity
    text: str
    mend: str = ""
    repairable: bool = False


@dataclass(slots=True)
class CheckContext:
    """The state that checks share: how thorough to be, where the database is, and the damage found so far.

    Checks that take long call `tell(done, total)` from time to time.
    """

    where: str
    path: Path | None = None  # of a SQLite file
    quick: bool = False
    tell: Callable[[int, int], None] = lambda done, total: None
    damaged: dict[int, str] = field(default_factory=dict)  # why a group's payload can't be read, by uid
    out_of_reach: set[int] = field(default_factory=set)  # places for payloads, by number
    unnamed: dict[int, list[str]] = field(default_factory=dict)  # segments that no row names, by number of the place


@dataclass(frozen=True, slots=True)
class Check:
    """One check: `find` reads, in one read transaction; or `alone` opens as many as it needs."""

    name: str
    find: Callable[[ReadTransaction, CheckContext], Sequence[Finding]] = lambda tx, context: ()
    alone: Callable[[Reader, CheckContext], Sequence[Finding]] | None = None

    def run(self, reader: Reader, context: CheckContext) -> Sequence[Finding]:
        """Return the findings."""
        return self.alone(reader, context) if self.alone else reader.read_any(lambda tx: self.find(tx, context))


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
    """Return a warning: no problem, but worth knowing."""
    return Finding("", Severity.WARNING, text, mend)


def groups(count: int) -> str:
    """Return `1 group`, `1,234 groups`."""
    return units.number_of(count, "group")
