"""The command `replaybuf doctor`: runs all checks of a database in turn, to find or to mend; upgrades."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from replaybuf.cli.commands import TEXT, Out, Url, option
from replaybuf.cli.doctor import (
    Check,
    Examination,
    Finding,
    Severity,
    check_database,
    check_groups,
    check_payloads,
    problem,
)
from replaybuf.cli.output import Output, print_labelled
from replaybuf.common.progress import progress_bar
from replaybuf.errors import ReplayBufError
from replaybuf.storage.decoding import DAMAGE
from replaybuf.storage.sql.inspection.reader import Reader, open_reader
from replaybuf.storage.sql.inspection.writer import open_writer, upgrade_database
from replaybuf.view.columns import Column

_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}
_INDENT = 26


def doctor(
    url: Url,
    output: Out = TEXT,
    repair: Annotated[bool, option("--repair", "Mend what is safe to mend, also while a run goes on.")] = False,
    probe: Annotated[
        bool, option("--probe", "Also make each call once in a buffer of its own, which is removed afterwards.")
    ] = False,
    upgrade: Annotated[
        bool, option("--upgrade", "Bring the schema up to date, and check nothing; on a server also create the tables.")
    ] = False,
    take_over: Annotated[
        bool, option("--take-over", "Make the places for payloads this database's: nobody may use another copy.")
    ] = False,
) -> None:
    """Check a database: schema, integrity, orphans, checksums, counts, places of payloads.

    A line for each check says what is fine, or what is wrong and how to mend it. The exit code is 0 when there are no
    problems (warnings are none), and 1 when some are left. All payloads are read; nobody has to wait for that.

    --repair mends what is safe to mend, and says what it did: damaged groups are set aside as failed with the reason,
    counts and the counter of uids are corrected, missing indexes and views are made. It deletes nothing.

    --probe tells whether a server has all that a run needs, and names the first call that fails. It makes the tables if
    they don't exist, as the first run would.

    --upgrade happens in one transaction, whole or not at all. Close all users of the database first.

    --take-over is for a copy of a database that is used in place of the original, such as one that was moved to another
    host: until then it reads payloads in the original's folder or object store, and neither writes nor deletes there.
    It also writes a lost replaybuf.json again, where the files of this database are.

    \b
    Examples:
      replaybuf doctor run.db
      replaybuf doctor postgresql://rl@db/run7 --repair
      replaybuf doctor postgresql://rl@db/run7 --probe
      replaybuf doctor postgresql://admin@db/run7 --upgrade
    """
    reader = open_reader(url)
    if upgrade:
        _upgrade(reader, output)
        return
    if take_over:
        for line in check_database.take_over_places(reader) or ["all places of this database are its own"]:
            output.note(f"take-over: {line}")
    rows = []
    for finding in _examine_and_repair(reader, output, mend=repair, trial=probe):
        rows.append(finding.row())
        if output.for_people:
            print_finding(finding)
    if not output.for_people:
        output.rows(rows, [])
    if any(row["level"] == Severity.PROBLEM for row in rows):
        raise typer.Exit(1)


def _examine_and_repair(reader: Reader, output: Output, *, mend: bool, trial: bool) -> Iterator[Finding]:
    """Yield the findings; with `mend`, those that remain after the repair; those of a trial last."""
    with progress_bar("payloads") as bar:
        findings = examine(Examination(reader, tell=bar))
        if mend:
            findings = iter(initial := list(findings))
            if any(finding.cure for finding in initial):
                for line in repair(reader, initial):
                    output.note(f"repair: {line}")
                findings = examine(Examination(reader, tell=bar))
            else:
                output.note("there is nothing that can be repaired")
        yield from findings
    if trial:
        from replaybuf.cli.doctor.probe import probe  # it imports what only open buffers need

        yield from probe(reader)


def print_finding(finding: Finding) -> None:
    """Print a finding, and its remedy below."""
    print_labelled(f"{finding.level!s:<7}  {finding.check:<15}  ", finding.text, label_style=_STYLES[finding.level])
    if finding.mend:
        print_labelled(" " * _INDENT, f"-> {finding.mend}", style="dim")


def _upgrade(reader: Reader, output: Output) -> None:
    before, after = upgrade_database(reader)
    row = {"url": reader.where, "before": before, "after": after}
    output.rows([row], [Column(name, name, "word") for name in ("before", "after")])
    if before == after:
        output.note("it was up to date already")


_FAILURES = (ReplayBufError, *DAMAGE)

_Checks = Sequence[tuple[str, Check]]
_SQLITE_CHECKS: _Checks = (("integrity", check_database.check_integrity),)
# Places are checked before payloads, some of which are in them. Counts come last: other cures move groups.
_ALL_CHECKS: _Checks = (
    ("indexes", check_database.check_indexes),
    ("lanes", check_groups.check_lanes),
    ("payload files", check_database.check_payload_files),
    ("places", check_database.check_places),
    ("payloads", check_payloads.check_payloads),
    ("leaked payloads", check_payloads.check_leaked),
    ("uids", check_groups.check_uids),
    ("checkpoints", check_groups.check_checkpoints),
    ("counts", check_groups.check_counts),
)


def examine(examination: Examination) -> Iterator[Finding]:
    """Yield the findings of all checks, each as soon as it is known.

    Writes nothing. A check that fails, because of damage or otherwise, yields a problem. Most are meaningless without
    the tables of this version.
    """
    path = examination.reader.path
    [revision] = _findings_of("revision", check_database.check_revision, examination)
    yield revision
    if revision.level == Severity.OK:
        for name, check in (*(() if path is None else _SQLITE_CHECKS), *_ALL_CHECKS):
            yield from _findings_of(name, check, examination)


def repair(reader: Reader, findings: Iterable[Finding]) -> list[str]:
    """Repair each problem that was found, in an exclusive write transaction, and return descriptions of the repairs.

    No group and no payload is deleted.
    """
    cures = {finding.check: finding.cure for finding in findings if finding.cure}
    cures.setdefault("counts", check_groups.mend_counts)  # other cures move groups
    sentences: list[str] = []
    with open_writer(reader) as writer:
        for name, cure in cures.items():
            try:
                sentences.append(writer.write(cure))
            except _FAILURES as error:
                sentences.append(f"could not mend {name}: {_error_text(error)}")
    return [line for line in sentences if line]


def _findings_of(name: str, check: Check, examination: Examination) -> Sequence[Finding]:
    """Return the findings of a check, with the check's name."""
    try:
        findings = list(check(examination))
    except _FAILURES as error:
        findings = [_failure_finding(error, examination.reader.path)]
    return [replace(finding, check=name) for finding in findings]


def _failure_finding(error: Exception, path: Path | None) -> Finding:
    """Return the finding of a check that can't be made."""
    is_damaged = path is not None and (
        not isinstance(error, ReplayBufError) or (error.reason == "not a database" and _was_a_database(path))
    )
    mend = check_database.SAVE_THE_REST if is_damaged else ""
    return problem(f"can't be checked: {_error_text(error)}", mend)


def _was_a_database(path: Path) -> bool:
    """Return whether an unreadable file may be a damaged database: it has whole pages, or the beginning of one."""
    with path.open("rb") as file:
        return file.read(13) == b"SQLite format" or file.seek(0, 2) % 512 == 0


def _error_text(error: Exception) -> str:
    """Return the error of a check as one sentence."""
    if isinstance(error, ReplayBufError):
        return str(error)
    return f"a row has a value that can't be there ({type(error).__name__}: {error!s:.200})"
