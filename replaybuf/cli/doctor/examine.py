"""Runs all checks of a database in turn, and all repairs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from replaybuf.cli.doctor import (
    Check,
    CheckContext,
    Finding,
    Severity,
    check_database,
    check_groups,
    check_payloads,
    check_places,
    check_server,
    problem,
)
from replaybuf.errors import ReplayBufError, StorageError, reason_of
from replaybuf.storage.sql.engine.transaction import DEFAULT
from replaybuf.storage.sql.inspection.reader import Reader
from replaybuf.storage.sql.inspection.writer import open_writer

#: The errors of a failing check, including those for values of a wrong type. (SQLite allows any value in any column.)
_FAILURES = (ReplayBufError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError)

# Places are checked before payloads, some of which are in them. Counts come last: other repairs move groups.
_CHECKS = (
    *check_database.SCHEMA,
    check_groups.LANES,
    *check_places.CHECKS,
    check_payloads.PAYLOADS,
    check_payloads.LEAKED,
    check_groups.UIDS,
    check_groups.CHECKPOINTS,
    check_groups.COUNTS,
)


def examine(reader: Reader, context: CheckContext) -> Iterator[Finding]:
    """Yield the findings of all checks, each as soon as it is known.

    Writes nothing. A check that fails, because of damage or otherwise, yields a problem. The others are meaningless
    without the tables of this version.
    """
    if reader.path is None:
        yield from _findings_of(check_server.HOSTS, reader, context)
    revision = _findings_of(check_database.REVISION, reader, context)
    yield from revision
    levels = {finding.level for finding in revision}
    if Severity.PROBLEM in levels:
        return
    for check in check_server.BEFORE if Severity.WARNING in levels else _checks_of(reader):
        yield from _findings_of(check, reader, context)


def _checks_of(reader: Reader) -> Sequence[Check]:
    return (*(check_server.CHECKS if reader.path is None else check_database.FILE), *_CHECKS)


def repair(reader: Reader, context: CheckContext) -> list[str]:
    """Run the safe repairs, each in an exclusive write transaction. Return what was done.

    `context` has what `examine` found. No group and no payload that is needed is deleted. Raises StorageError if the
    schema isn't that of this version.
    """
    [revision] = _findings_of(check_database.REVISION, reader, context)
    if revision.level != Severity.OK:
        raise StorageError(f"{reader.where} was left as it is: {revision.text}; {revision.mend}", reason="schema")
    done: list[str] = []
    with open_writer(reader) as writer:
        for check in _checks_of(reader):
            for mend in check.repairs:
                try:
                    done += writer.write(lambda tx, mend=mend: mend(tx, context))  # type: ignore[misc]
                except _FAILURES as error:
                    done.append(f"could not mend {check.name}: {_text_of(error)}")
    return done


def _findings_of(check: Check, reader: Reader, context: CheckContext) -> Sequence[Finding]:
    """Return the findings of a check, with the check's name."""
    try:
        if check.alone is not None:
            found = check.alone(reader, context)
        else:
            found = reader.read_any(lambda tx: check.find(tx.of(DEFAULT), context))
    except _FAILURES as error:
        found = [_failed(error, context)]
    return [replace(one, check=check.name) for one in found]


def _failed(error: Exception, context: CheckContext) -> Finding:
    mend = ""
    damaged = reason_of(error) == "not a database" and context.path is not None and _was_a_database(context.path)
    if context.path is not None and (damaged or not isinstance(error, ReplayBufError)):
        mend = check_database.SAVE_THE_REST
    return problem(f"can't be checked: {_text_of(error)}", mend)


_BEGINNING = 2**20


def _was_a_database(path: Path) -> bool:
    """Return whether an unreadable file may be a damaged database: it consists of whole pages, or has traces of one."""
    with path.open("rb") as file:
        found = file.read(_BEGINNING)
        size = file.seek(0, 2)
    return size % 512 == 0 or found.startswith(b"SQLite format") or b"CREATE TABLE rb_" in found


def _text_of(error: Exception) -> str:
    """Return the error of a check as one sentence."""
    if isinstance(error, ReplayBufError):
        return str(error)
    return f"a row has a value that can't be there ({type(error).__name__}: {error!s:.200})"
