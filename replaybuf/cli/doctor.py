"""`replaybuf doctor`: checks and repairs a database; `replaybuf db`: shows and upgrades its schema."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from replaybuf.cli.app import TEXT, Command, Out, Url, option
from replaybuf.cli.output import Output
from replaybuf.progress import progress_bar
from replaybuf.redact import escape
from replaybuf.storage.sql.inspection.reader import HEAD, Reader, State, open_reader, state_of
from replaybuf.view.columns import Column

if TYPE_CHECKING:
    from replaybuf.doctor import CheckContext, Finding


_STYLES: dict[str, Any] = {"ok": {"fg": "green"}, "warning": {"fg": "yellow"}, "problem": {"fg": "red", "bold": True}}
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
    take_over: Annotated[
        bool, option("--take-over", "Make places for payloads this copy's: nobody may use the original any more.")
    ] = False,
) -> None:
    """Check a database: schema, integrity, orphans, checksums, counts, places of payloads, disk, access.

    A line for each check says what is fine, or what is wrong and how to mend it. The exit code is 0 when there are no
    problems (warnings are none), and 1 when some are left. All payloads are read, unless --quick is given; nobody has
    to wait for that.

    --repair mends what is safe to mend, and says what it did: payloads that nobody needs are deleted, groups whose
    payloads are damaged are set aside as failed with the reason, counts and the counter of uids are corrected, missing
    indexes and views are made, files of payloads that nothing names are deleted, a lost replaybuf.json is written anew.
    It never deletes a group.

    --probe tells whether a server has all that a run needs, and names the first call that fails. It makes the tables if
    they don't exist, as the first run would.

    --take-over is for a copy of a database that is used in place of the original, such as one that was moved to another
    host: until then it reads payloads in the original's folder or object store, and neither writes nor deletes there.

    \b
    Examples:
      replaybuf doctor run.db
      replaybuf doctor postgresql://rl@db/run7 --repair
      replaybuf doctor postgresql://rl@db/run7 --probe
    """
    from replaybuf.doctor import Severity

    reader = open_reader(url)
    if take_over:
        from replaybuf.doctor.check_places import take_over_places

        for line in take_over_places(reader) or ["all places of this database are its own"]:
            output.note(f"take-over: {line}")
    rows = []
    for finding in _examined(reader, output, quick=quick, mend=repair, trial=probe):
        rows.append({**asdict(finding), "level": str(finding.level), "mend": finding.mend or None})
        if output.for_people:
            print_finding(finding)
    if not output.for_people:
        output.rows(rows, [])
    if any(row["level"] == Severity.PROBLEM for row in rows):
        raise typer.Exit(1)


def _examined(reader: Reader, output: Output, *, quick: bool, mend: bool, trial: bool) -> Iterator[Finding]:
    """Yield the findings; with `mend`, the remaining ones after the repair; those of a trial last."""
    from replaybuf.doctor import CheckContext
    from replaybuf.doctor.examine import examine

    with progress_bar("payloads") as bar:
        context = CheckContext(reader.where, path=reader.path, quick=quick, tell=bar)
        yield from _repaired(reader, output, context) if mend else examine(reader, context)
    if trial:
        from replaybuf.doctor.probe import probe

        yield from probe(reader)


def _repaired(reader: Reader, output: Output, context: CheckContext) -> Sequence[Finding]:
    """Repair what can be repaired, and return the remaining findings."""
    from replaybuf.doctor import CheckContext, Severity
    from replaybuf.doctor.examine import examine, repair

    found = list(examine(reader, context))
    if any(finding.repairable and finding.level != Severity.OK for finding in found):
        for line in repair(reader, context):
            output.note(f"repair: {line}")
        again = CheckContext(context.where, path=context.path, quick=context.quick, tell=context.tell)
        return list(examine(reader, again))
    if any(finding.level == Severity.PROBLEM for finding in found):
        output.note("nothing of this can be repaired; see below what to do")
    else:
        output.note("there was nothing to repair")
    return found


def print_finding(finding: Finding) -> None:
    """Print a finding on one line, and its remedy on another; on a terminal, in columns that fit its width."""
    room = max(20, shutil.get_terminal_size().columns - _INDENT) if sys.stdout.isatty() else sys.maxsize
    level = typer.style(f"{finding.level!s:<7}", **_STYLES[finding.level])
    lines = textwrap.wrap(escape(finding.text), room, drop_whitespace=room < sys.maxsize) or [""]
    if finding.mend:
        mend = textwrap.wrap(f"-> {escape(finding.mend)}", room, drop_whitespace=room < sys.maxsize)
        lines += [typer.style(one, dim=True) for one in mend]
    for place, line in enumerate(lines):
        start = " " * _INDENT if place else f"{level}  {finding.check:<15}  "
        typer.echo(start + line, color=False if os.environ.get("NO_COLOR") else None)


app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)

_STATES = {
    State.MISSING: "no replaybuf tables",
    State.CURRENT: "up to date",
    State.OLDER: "older: run replaybuf db upgrade",
    State.NEWER: "newer: upgrade replaybuf",
}


@app.callback()
def db() -> None:
    """Show or upgrade the schema of a database."""


@app.command("current", cls=Command)
def current(url: Url, output: Out = TEXT) -> None:
    """Show the revision of a database's schema, and the one that this replaybuf works with.

    \b
    Example:
      replaybuf db current run.db
    """
    reader = open_reader(url)
    revision = reader.read_any(lambda tx: tx.revision())
    row = {"url": reader.where, "revision": revision, "wanted": HEAD, "state": _STATES[state_of(revision)]}
    output.rows([row], [Column(name, name, "word") for name in ("revision", "wanted", "state")])


@app.command("upgrade", cls=Command)
def upgrade_command(url: Url, output: Out = TEXT) -> None:
    """Bring the schema of a database up to date.

    Close all users of the database first. It happens in one transaction, whole or not at all. In an empty database the
    tables are created.

    \b
    Example:
      replaybuf db upgrade postgresql://admin@db/run7
    """
    from replaybuf.storage.sql.inspection.writer import upgrade_database

    reader = open_reader(url)
    before, after = upgrade_database(reader)
    row = {"url": reader.where, "before": before, "after": after}
    output.rows([row], [Column(name, name, "word") for name in ("before", "after")])
    if before == after:
        output.note("it was up to date already")
