"""All checks of a database in turn, and their repairs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from replaybuf.doctor import checkpoints, checksums, counts, files, groups, schema, server, texts
from replaybuf.doctor.finding import Check, Finding, Level, Look, problem
from replaybuf.errors import NotADatabaseError, ReplayBufError, SchemaError
from replaybuf.storage.sql.inspection.reader import Reader
from replaybuf.storage.sql.inspection.writer import Writer, open_writer

if TYPE_CHECKING:
    from replaybuf.storage.sql.inspection.reader import Transaction

#: The errors of a check that fails, also on values of a wrong type. (SQLite allows any value in any column.)
FAILURES = (ReplayBufError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError)

Repair = Callable[["Transaction", Look], Sequence[str]]


def examine(reader: Reader, look: Look) -> Iterator[Finding]:
    """Yield the findings of all checks, each as soon as it is known.

    Nothing is written. A check that fails, because of damage or for another reason, is a problem itself.
    """
    revision = _look(schema.REVISION, reader, look)
    yield from revision
    if any(finding.level != Level.OK for finding in revision):
        return
    own: Any = files if reader.path else server
    own_texts = texts.CHECKS if reader.path else ()
    for check in (*own.FIRST, *own.CHECKS, *schema.CHECKS, *own_texts, *groups.CHECKS):
        yield from _look(check, reader, look)
    try:
        yield from checksums.look_at_checksums(reader, look)
    except FAILURES as error:
        yield _failed(checksums.NAME, error, look)
    for check in (*counts.CHECKS, *checkpoints.CHECKS, *own.LAST):
        yield from _look(check, reader, look)


def _look(check: Check, reader: Reader, look: Look) -> Sequence[Finding]:
    try:
        return reader.read(lambda tx: check.look(tx, look))
    except FAILURES as error:
        return [_failed(check.name, error, look)]


def _failed(name: str, error: Exception, look: Look) -> Finding:
    mend = ""
    if look.path is not None and (isinstance(error, NotADatabaseError) or not isinstance(error, ReplayBufError)):
        mend = f"stop the run; replaybuf doctor {look.where} --rescue FOLDER saves what can be read"
    return problem(name, f"can't be checked: {_text(error)}", mend)


def _text(error: Exception) -> str:
    if isinstance(error, ReplayBufError):
        return str(error)
    return f"a row has a value that can't be there ({type(error).__name__}: {error!s:.200})"


def repair(reader: Reader, look: Look) -> list[str]:
    """Mend what is safe to mend, with a transaction without other writers for each check. Return what was done.

    `look` has the payloads that `examine` found damaged. No group is deleted, and no payload that one needs. Raises
    SchemaError if the schema isn't that of this version.
    """
    revision = reader.read(lambda tx: schema.look_at_revision(tx, look))
    if any(finding.level != Level.OK for finding in revision):
        raise SchemaError(f"{reader.where} was left as it is: {revision[0].text}; {revision[0].mend}")
    done: list[str] = []
    with open_writer(reader) as writer:
        for name, mend in _repairs(reader):
            done += _mend(writer, name, mend, look)
        if reader.path and files.is_log_large(look):
            emptied = writer.empty_log()
            done.append("emptied the log" if emptied else "could not empty the log: another process reads from it")
    return done


def _repairs(reader: Reader) -> list[tuple[str, Repair]]:
    """Return the repairs in order: groups that are set aside, or come back, are counted afterwards."""
    own = (*files.CHECKS, *texts.CHECKS) if reader.path else ()
    checks = (*own, *schema.CHECKS, *checkpoints.CHECKS, *groups.CHECKS, *counts.CHECKS)
    repairs = [(check.name, check.repair) for check in checks if check.repair is not None]
    repairs.insert(-1, (checksums.NAME, checksums.repair_checksums))
    return sorted(repairs, key=lambda named: named[0] == counts.COUNTS)


def _mend(writer: Writer, name: str, mend: Repair, look: Look) -> Sequence[str]:
    try:
        return writer.write(lambda tx: mend(tx, look))
    except FAILURES as error:
        return [f"could not mend {name}: {_text(error)}"]
