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
from replaybuf.errors import ReplayBufError
from replaybuf.storage.sql.inspection.reader import Reader
from replaybuf.storage.sql.inspection.writer import open_writer

#: The errors of a failing check, including those for values of a wrong type. (SQLite allows any value in any column.)
_FAILURES = (ReplayBufError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError)

_Checks = Sequence[tuple[str, Check]]
_SQLITE: _Checks = (
    ("files", check_database.check_files),
    ("disk", check_database.check_disk),
    ("integrity", check_database.check_integrity),
)
# Places are checked before payloads, some of which are in them. Counts come last: other cures move groups.
_ALL: _Checks = (
    ("tables", check_database.check_tables),
    ("indexes", check_database.check_indexes),
    ("lanes", check_groups.check_lanes),
    ("payload files", check_places.check_payload_files),
    ("places", check_places.check_places),
    ("payloads", check_payloads.check_payloads),
    ("leaked payloads", check_payloads.check_leaked),
    ("orphans", check_groups.check_orphans),
    ("uids", check_groups.check_uids),
    ("checkpoints", check_groups.check_checkpoints),
    ("counts", check_groups.check_counts),
)


def examine(about: Examination) -> Iterator[Finding]:
    """Yield the findings of all checks, each as soon as it is known.

    Writes nothing. A check that fails, because of damage or otherwise, yields a problem. Most are meaningless without
    the tables of this version.
    """
    path = about.reader.path
    [revision] = _findings_of("revision", check_database.check_revision, about)
    yield revision
    if revision.level == Severity.OK:
        for name, check in (*(() if path is None else _SQLITE), *_ALL):
            yield from _findings_of(name, check, about)


def repair(reader: Reader, found: Iterable[Finding]) -> list[str]:
    """Repair each problem that was found, in an exclusive write transaction, and return descriptions of the repairs.

    No group and no payload that is needed is deleted: while groups seem to be missing, nothing is.
    """
    found = list(found)
    cures = {finding.check: finding.cure for finding in found if finding.cure}
    cures.setdefault("counts", check_groups.mend_counts)  # other cures move groups
    deleting = {finding.check for finding in found if finding.deletes}
    missing = [finding.check for finding in found if finding.groups_missing]
    done: list[str] = []
    with open_writer(reader) as writer:
        for name, cure in cures.items():
            if name in deleting and missing:
                done.append(
                    f"left the {name}, since groups may be missing (see {', '.join(missing)}): copy the database; "
                    "--repair once more deletes them"
                )
                continue
            try:
                done.append(writer.write(cure))
            except _FAILURES as error:
                done.append(f"could not mend {name}: {_text_of(error)}")
    return [line for line in done if line]


def _findings_of(name: str, check: Check, about: Examination) -> Sequence[Finding]:
    """Return the findings of a check, with the check's name."""
    try:
        found = list(check(about))
    except _FAILURES as error:
        found = [_failed(error, about.reader.path)]
    return [replace(finding, check=name) for finding in found]


def _failed(error: Exception, path: Path | None) -> Finding:
    """Return the finding of a check that can't be made, which may hide that groups are missing."""
    damaged = path is not None and (
        not isinstance(error, ReplayBufError) or (error.reason == "not a database" and _was_a_database(path))
    )
    mend = check_database.SAVE_THE_REST if damaged else ""
    return problem(f"can't be checked: {_text_of(error)}", mend, groups_missing=True)


def _was_a_database(path: Path) -> bool:
    """Return whether an unreadable file may be a damaged database: it has whole pages, or the beginning of one."""
    with path.open("rb") as file:
        return file.read(13) == b"SQLite format" or file.seek(0, 2) % 512 == 0


def _text_of(error: Exception) -> str:
    """Return the error of a check as one sentence."""
    if isinstance(error, ReplayBufError):
        return str(error)
    return f"a row has a value that can't be there ({type(error).__name__}: {error!s:.200})"
