"""All checks of a database in turn, and their repairs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from replaybuf.doctor import (
    check_counts,
    check_file,
    check_groups,
    check_payloads,
    check_places,
    check_schema,
    check_server,
)
from replaybuf.doctor.findings import Check, CheckContext, Finding, Severity, problem
from replaybuf.errors import NotADatabaseError, ReplayBufError, SchemaError
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.inspection.reader import Reader
from replaybuf.storage.sql.inspection.writer import Writer, open_writer

#: The errors of a check that fails, also on values of a wrong type. (SQLite allows any value in any column.)
FAILURES = (ReplayBufError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError)

_CHECKSUMS = "checksums"
_PLACES = "places"
_ENGINE = "engine"
_HOSTS = "hosts"

Repair = Callable[["Transaction", CheckContext], Sequence[str]]


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
    own: Any = check_file if reader.path else check_server
    if any(finding.level == Severity.WARNING for finding in revision):  # a server before the first run
        for check in check_server.BEFORE:
            yield from _check(check, reader, context)
        yield from _named(_ENGINE, lambda: _check_engine(reader), context)
        return
    own_texts = check_payloads.CHECKS if reader.path else ()
    for check in own.FIRST:
        yield from _check(check, reader, context)
    if reader.path is None:
        yield from _named(_ENGINE, lambda: _check_engine(reader), context)
    for check in (
        *own.CHECKS,
        *check_schema.CHECKS,
        *own_texts,
        *check_groups.CHECKS,
        *check_places.CHECKS,
    ):
        yield from _check(check, reader, context)
    yield from _named(_PLACES, lambda: check_places.check_places(reader, context), context)
    yield from _named(_CHECKSUMS, lambda: check_payloads.check_checksums(reader, context), context)
    for check in (*check_counts.CHECKS, *own.LAST):
        yield from _check(check, reader, context)


def _check_engine(reader: Reader) -> Sequence[Finding]:
    from replaybuf.doctor.check_engine import check_engine  # needs asyncpg

    return check_engine(reader)


def _check_hosts(reader: Reader) -> Sequence[Finding]:
    from replaybuf.doctor.check_hosts import check_hosts  # needs asyncpg

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
    return problem(f"can't be checked: {_text(error)}", mend)


_BEGINNING = 2**20


def _was_a_database(path: str | Path) -> bool:
    """Return whether a file that can't be read may be a damaged database: of whole pages, or with traces of one."""
    with Path(path).open("rb") as file:
        found = file.read(_BEGINNING)
        size = file.seek(0, 2)
    return size % 512 == 0 or found.startswith(b"SQLite format") or b"CREATE TABLE rb_" in found


def _text(error: Exception) -> str:
    if isinstance(error, ReplayBufError):
        return str(error)
    return f"a row has a value that can't be there ({type(error).__name__}: {error!s:.200})"


def repair(reader: Reader, context: CheckContext) -> list[str]:
    """Mend what is safe to mend, with a transaction without other writers for each check. Return what was done.

    `context` has the payloads that `examine` found damaged. No group is deleted, and no payload that one needs. Raises
    SchemaError if the schema isn't that of this version.
    """
    revision = reader.read_any(lambda tx: check_schema.find_revision(tx, context))
    if any(finding.level != Severity.OK for finding in revision):
        raise SchemaError(f"{reader.where} was left as it is: {revision[0].text}; {revision[0].mend}")
    done: list[str] = []
    with open_writer(reader) as writer:
        for name, mend in _repairs(reader):
            done += _mend(writer, name, mend, context)
        if reader.path and check_file.is_log_large(context):
            emptied = writer.empty_log()
            done.append("emptied the log" if emptied else "could not empty the log: another process reads from it")
    return done


def _repairs(reader: Reader) -> list[tuple[str, Repair]]:
    """Return the repairs in order: groups that are set aside, or come back, are counted afterwards."""
    own = (*check_file.CHECKS, *check_payloads.CHECKS) if reader.path else ()
    checks = (*own, *check_schema.CHECKS, *check_groups.CHECKS, *check_places.CHECKS, *check_counts.CHECKS)
    repairs = [(check.name, check.repair) for check in checks if check.repair is not None]
    repairs.insert(-1, (_CHECKSUMS, check_payloads.repair_checksums))
    repairs.append((_PLACES, check_places.repair_places))
    return sorted(repairs, key=lambda named: named[0] == "counts")


def _mend(writer: Writer, name: str, mend: Repair, context: CheckContext) -> Sequence[str]:
    try:
        return writer.write(lambda tx: mend(tx, context))
    except FAILURES as error:
        return [f"could not mend {name}: {_text(error)}"]
