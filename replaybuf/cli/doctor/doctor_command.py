"""The command `replaybuf doctor`: checks, repairs and upgrades a database."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from replaybuf.cli.commands import TEXT, Out, Url, option
from replaybuf.cli.doctor import Examination, Finding, Severity
from replaybuf.cli.doctor.check_places import take_over_places
from replaybuf.cli.doctor.examine import examine
from replaybuf.cli.doctor.examine import repair as mend_all
from replaybuf.cli.output import Output, print_labelled
from replaybuf.common.progress import progress_bar
from replaybuf.storage.sql.inspection.reader import Reader, open_reader
from replaybuf.storage.sql.inspection.writer import upgrade_database
from replaybuf.view.columns import Column

_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}
_INDENT = 26


def doctor(
    url: Url,
    output: Out = TEXT,
    quick: Annotated[
        bool, option("--quick", "Read a sample of the payloads only, and leave out what takes long.")
    ] = False,
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
    """Check a database: schema, integrity, orphans, checksums, counts, places of payloads, disk.

    A line for each check says what is fine, or what is wrong and how to mend it. The exit code is 0 when there are no
    problems (warnings are none), and 1 when some are left. All payloads are read, unless --quick is given; nobody has
    to wait for that.

    --repair mends what is safe to mend, and says what it did: payloads that nobody needs are deleted, damaged groups
    are set aside as failed with the reason, counts and the counter of uids are corrected, missing indexes and views are
    made. It never deletes a group.

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
        for line in take_over_places(reader) or ["all places of this database are its own"]:
            output.note(f"take-over: {line}")
    rows = []
    for finding in _examined(reader, output, quick=quick, mend=repair, trial=probe):
        rows.append(finding.row())
        if output.for_people:
            print_finding(finding)
    if not output.for_people:
        output.rows(rows, [])
    if any(row["level"] == Severity.PROBLEM for row in rows):
        raise typer.Exit(1)


def _examined(reader: Reader, output: Output, *, quick: bool, mend: bool, trial: bool) -> Iterator[Finding]:
    """Yield the findings; with `mend`, those that remain after the repair; those of a trial last."""
    with progress_bar("payloads") as bar:
        findings = examine(Examination(reader, quick=quick, tell=bar))
        if mend:
            findings = iter(found := list(findings))
            if any(finding.cure for finding in found):
                for line in mend_all(reader, found):
                    output.note(f"repair: {line}")
                findings = examine(Examination(reader, quick=quick, tell=bar))
            elif any(finding.level == Severity.PROBLEM for finding in found):
                output.note("nothing of this can be repaired; see below what to do")
            else:
                output.note("there was nothing to repair")
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
