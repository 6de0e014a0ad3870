"""Runs all checks of a database in turn, to find or to mend."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from replaybuf.cli.doctor import (
    Check,
    Examination,
    Finding,
    Severity,
    check_database,
    check_groups,
    check_payloads,
    check_places,
    problem,
)
from replaybuf.errors import ReplayBufError, StorageError, reason_of
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.inspection.writer import open_writer

#: The errors of a failing check, including those for values of a wrong type. (SQLite allows any value in any column.)
_FAILURES = (ReplayBufError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError)

_Checks = Sequence[tuple[str, Check]]
_SQLITE: _Checks = (
    ("files", check_database.check_files),
    ("disk", check_database.check_disk),
    ("integrity", check_database.check_integrity),
)
_POSTGRES: _Checks = (("access", check_database.check_access), ("replication", check_database.check_replication))
# Places are checked before payloads, some of which are in them. Counts come last: other cures move groups.
_ALL: _Checks = (
    ("tables", check_database.check_tables),
    ("indexes", check_database.check_indexes),
    ("lanes", check_groups.check_lanes),
    ("payload files", check_places.check_payload_files),
    ("places", check_places.check_places),
    ("payloads", check_payloads.check_payloads),
    ("leaked payloads", check_payloads.check_leaked),
    ("uids", check_groups.check_uids),
    ("checkpoints", check_groups.check_checkpoints),
    ("counts", check_groups.check_counts),
)

#: Checks by whose problems rows of groups may have been lost, whose payloads then seem to be leaked.
_SAY_GROUPS_ARE_MISSING = ("integrity", "checkpoints", "counts")


def examine(about: Examination) -> Iterator[Finding]:
    """Yield the findings of all checks, each as soon as it is known.

    Writes nothing. A check that fails, because of damage or otherwise, yields a problem. Most are meaningless without
    the tables of this version.
    """
    is_file = about.reader.path is not None
    if not is_file:
        yield from _findings_of("hosts", check_database.check_hosts, about)
    [revision] = _findings_of("revision", check_database.check_revision, about)
    yield revision
    if revision.level == Severity.OK:
        for name, check in (*(_SQLITE if is_file else _POSTGRES), *_ALL):
            yield from _findings_of(name, check, about)


def repair(about: Examination, found: Iterable[Finding]) -> list[str]:
    """Mend what `examine` has found, each kind in an exclusive write transaction. Return what was done.

    No group and no payload that is needed is deleted. Raises StorageError if the schema isn't that of this version.
    """
    [revision] = _findings_of("revision", check_database.check_revision, about)
    if revision.level != Severity.OK:
        raise StorageError(f"{about.reader.where} was left as it is: {revision.text}; {revision.mend}", reason="schema")
    found = list(found)
    wanted = {one.check for one in found if one.cure} | {"counts"}
    done: list[str] = []
    missing = [one.check for one in found if one.level == Severity.PROBLEM and one.check in _SAY_GROUPS_ARE_MISSING]
    if "leaked payloads" in wanted and missing:
        wanted.remove("leaked payloads")
        done.append(
            f"left the leaked payloads, since groups may be missing (see {', '.join(missing)}): copy the database; "
            "--repair once more deletes them"
        )
    with open_writer(about.reader) as writer:
        for name, check in (*_SQLITE, *_ALL):
            if name in wanted:
                try:
                    done += writer.write(lambda tx, check=check: _mended(check, tx, about))  # type: ignore[misc]
                except _FAILURES as error:
                    done.append(f"could not mend {name}: {_text_of(error)}")
    return done


def _mended(check: Check, tx: Transaction, about: Examination) -> list[str]:
    """Find again what is wrong, which may have changed, and mend it."""
    about.tx = tx
    try:
        return [one.cure() for one in check(about) if one.cure]
    finally:
        about.tx = None


def _findings_of(name: str, check: Check, about: Examination) -> Sequence[Finding]:
    """Return the findings of a check, with the check's name."""
    try:
        found = list(check(about))
    except _FAILURES as error:
        found = [_failed(error, about.reader.path)]
    return [replace(one, check=name) for one in found]


def _failed(error: Exception, path: Path | None) -> Finding:
    mend = ""
    damaged = reason_of(error) == "not a database" and path is not None and _was_a_database(path)
    if path is not None and (damaged or not isinstance(error, ReplayBufError)):
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
