"""All checks of a database in turn.

What only some databases need is imported for them: a check of a small SQLite file takes less time than SQLAlchemy takes
to be imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from replaybuf.doctor import check_file, check_groups, check_payloads, check_schema
from replaybuf.doctor.findings import Check, CheckContext, Finding, Severity, fine, problem
from replaybuf.errors import NotADatabaseError, ReplayBufError
from replaybuf.storage.sql.inspection.reader import Reader, ReadTransaction

#: The errors of a check that fails, also on values of a wrong type. (SQLite allows any value in any column.)
FAILURES = (ReplayBufError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError)

_CHECKSUMS = "checksums"
_PLACES = "places"
_ENGINE = "engine"
_HOSTS = "hosts"


def examine(reader: Reader, context: CheckContext) -> Iterator[Finding]:
    """Yield the findings of all checks, each as soon as it is known.

    Nothing is written. A check that fails, because of damage or for another reason, is a problem itself.
    """
    if reader.path is None:
        yield from _named(_HOSTS, lambda: _check_hosts(reader), context)
    revision = _check(check_schema.REVISION, reader, context)
    yield from revision
    if any(finding.level == Severity.PROBLEM for finding in revision):
        return
    own = _own_checks(reader)
    if any(finding.level == Severity.WARNING for finding in revision):  # a server before the first run
        for check in own.BEFORE:
            yield from _check(check, reader, context)
        yield from _named(_ENGINE, lambda: _check_engine(reader), context)
        return
    own_texts = check_payloads.CHECKS if reader.path else ()
    for check in own.FIRST:
        yield from _check(check, reader, context)
    if reader.path is None:
        yield from _named(_ENGINE, lambda: _check_engine(reader), context)
    for check in (*own.CHECKS, *check_schema.CHECKS, *own_texts, *check_groups.CHECKS, _SEGMENTS):
        yield from _check(check, reader, context)
    yield from _named(_PLACES, lambda: _check_places(reader, context), context)
    yield from _named(_CHECKSUMS, lambda: check_payloads.check_checksums(reader, context), context)
    for check in (*check_groups.COUNT_CHECKS, *own.LAST):
        yield from _check(check, reader, context)


def _own_checks(reader: Reader) -> Any:
    """Return the module with the checks of a kind of database."""
    if reader.path:
        return check_file
    from replaybuf.doctor import check_server

    return check_server


# Any place, segment or payload in one.
_IS_APART = """
SELECT EXISTS (SELECT 1 FROM rb_place) OR EXISTS (SELECT 1 FROM rb_segment)
    OR EXISTS (SELECT 1 FROM rb_payload WHERE segment IS NOT NULL)"""
_NOTHING_APART = "none: all payloads are in the database"


def _find_segments(tx: ReadTransaction, context: CheckContext) -> Sequence[Finding]:
    if not tx.value(_IS_APART):
        return [fine(_NOTHING_APART)]
    from replaybuf.doctor.check_places import find_segments

    return find_segments(tx, context)


_SEGMENTS = Check("segments", _find_segments)


def _check_places(reader: Reader, context: CheckContext) -> Sequence[Finding]:
    if not reader.read_any(lambda tx: tx.value(_IS_APART)):
        return [fine(_NOTHING_APART)]
    from replaybuf.doctor.check_places import check_places

    return check_places(reader, context)


def _check_engine(reader: Reader) -> Sequence[Finding]:
    from replaybuf.doctor.check_engine import check_engine  # needs asyncpg

    return check_engine(reader)


def _check_hosts(reader: Reader) -> Sequence[Finding]:
    from replaybuf.doctor.check_server import check_hosts  # needs asyncpg

    return check_hosts(reader)


def _check(check: Check, reader: Reader, context: CheckContext) -> Sequence[Finding]:
    return _named(check.name, lambda: reader.read_any(lambda tx: check.find(tx, context)), context)


def _named(name: str, find: Callable[[], Sequence[Finding]], context: CheckContext) -> Sequence[Finding]:
    """Return the findings of a check, with its name."""
    try:
        found = find()
    except FAILURES as error:
        found = [_failed(error, context)]
    return [replace(one, check=name) for one in found]


def _failed(error: Exception, context: CheckContext) -> Finding:
    mend = ""
    damaged = isinstance(error, NotADatabaseError) and context.path is not None and _was_a_database(context.path)
    if context.path is not None and (damaged or not isinstance(error, ReplayBufError)):
        mend = f"stop the run; replaybuf doctor {context.where} --rescue FOLDER saves what can be read"
    return problem(f"can't be checked: {text_of(error)}", mend)


_BEGINNING = 2**20


def _was_a_database(path: str | Path) -> bool:
    """Return whether a file that can't be read may be a damaged database: of whole pages, or with traces of one."""
    with Path(path).open("rb") as file:
        found = file.read(_BEGINNING)
        size = file.seek(0, 2)
    return size % 512 == 0 or found.startswith(b"SQLite format") or b"CREATE TABLE rb_" in found


def text_of(error: Exception) -> str:
    """Return the error of a check as one sentence."""
    if isinstance(error, ReplayBufError):
        return str(error)
    return f"a row has a value that can't be there ({type(error).__name__}: {error!s:.200})"
