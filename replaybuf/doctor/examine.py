"""Runs all checks of a database in turn.

Modules that only some databases need are imported on demand: a check of a small SQLite file takes less time than
importing SQLAlchemy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from replaybuf.doctor import (
    Check,
    CheckContext,
    Finding,
    Severity,
    check_file,
    check_groups,
    check_payloads,
    check_schema,
    fine,
    problem,
)
from replaybuf.errors import ReplayBufError, reason_of
from replaybuf.storage.sql.inspection.reader import Reader, ReadTransaction

#: The errors of a failing check, including those for values of a wrong type. (SQLite allows any value in any column.)
FAILURES = (ReplayBufError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError)


def examine(reader: Reader, context: CheckContext) -> Iterator[Finding]:
    """Yield the findings of all checks, each as soon as it is known.

    Writes nothing. A check that fails, because of damage or otherwise, yields a problem.
    """
    own: Any = check_file
    if reader.path is None:
        from replaybuf.doctor import check_server

        own = check_server
        yield from _findings_of(check_server.HOSTS, reader, context)
    revision = _findings_of(check_schema.REVISION, reader, context)
    yield from revision
    levels = {finding.level for finding in revision}
    if Severity.PROBLEM in levels:
        return
    texts = check_payloads.TEXTS if reader.path else ()
    checks = (*own.FIRST, *own.CHECKS, *check_schema.CHECKS, *texts, *check_groups.CHECKS, *_APART)
    checks = (*checks, check_payloads.CHECKSUMS, *check_groups.COUNT_CHECKS, *own.LAST)
    for check in own.BEFORE if Severity.WARNING in levels else checks:  # before the first run on a server
        yield from _findings_of(check, reader, context)


# Whether there is any place, file, or payload in a file.
_IS_APART = """
SELECT EXISTS (SELECT 1 FROM rb_place) OR EXISTS (SELECT 1 FROM rb_file)
    OR EXISTS (SELECT 1 FROM rb_payload WHERE file IS NOT NULL)"""
_NOTHING_APART = "none: all payloads are in the database"


def _find_files(tx: ReadTransaction, context: CheckContext) -> Sequence[Finding]:
    if not tx.value(_IS_APART):
        return [fine(_NOTHING_APART)]
    from replaybuf.doctor.check_places import find_files

    return find_files(tx, context)


def _check_places(reader: Reader, context: CheckContext) -> Sequence[Finding]:
    if not reader.read_any(lambda tx: tx.value(_IS_APART)):
        return [fine(_NOTHING_APART)]
    from replaybuf.doctor.check_places import check_places

    return check_places(reader, context)


_APART = (Check("payload files", _find_files), Check("places", alone=_check_places))


def _findings_of(check: Check, reader: Reader, context: CheckContext) -> Sequence[Finding]:
    """Return the findings of a check, with the check's name."""
    try:
        found = check.run(reader, context)
    except FAILURES as error:
        found = [_failed(error, context)]
    return [replace(one, check=check.name) for one in found]


def _failed(error: Exception, context: CheckContext) -> Finding:
    mend = ""
    damaged = reason_of(error) == "not a database" and context.path is not None and _was_a_database(context.path)
    if context.path is not None and (damaged or not isinstance(error, ReplayBufError)):
        mend = check_file.SAVE_THE_REST
    return problem(f"can't be checked: {text_of(error)}", mend)


_BEGINNING = 2**20


def _was_a_database(path: Path) -> bool:
    """Return whether an unreadable file may be a damaged database: it consists of whole pages, or has traces of one."""
    with path.open("rb") as file:
        found = file.read(_BEGINNING)
        size = file.seek(0, 2)
    return size % 512 == 0 or found.startswith(b"SQLite format") or b"CREATE TABLE rb_" in found


def text_of(error: Exception) -> str:
    """Return the error of a check as one sentence."""
    if isinstance(error, ReplayBufError):
        return str(error)
    return f"a row has a value that can't be there ({type(error).__name__}: {error!s:.200})"
