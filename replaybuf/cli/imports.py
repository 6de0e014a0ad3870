"""`replaybuf import`: groups from files."""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from replaybuf import units
from replaybuf.cli.groups import status_style
from replaybuf.cli.options import (
    OfStatus,
    OfTask,
    Url,
    buffer_option,
    file_argument,
    listing,
    option,
    url_and,
    with_bar,
)
from replaybuf.cli.output import Column, Output
from replaybuf.errors import InputError
from replaybuf.files.foreign_rows import ColumnMapping
from replaybuf.files.importing import Imported, ImportOptions, Reader, Survey, import_from
from replaybuf.files.sources import RolloutFile, is_sqlite
from replaybuf.progress import OnProgress
from replaybuf.redact import escape_line, redact, redact_path
from replaybuf.rollouts.rollout import Status
from replaybuf.rollouts.statuses import OUR_STATUSES
from replaybuf.rules.limits import Rules
from replaybuf.storage.sql.backend import SQLStorage
from replaybuf.storage.sql.inspection.group_payloads import AS_DICTS
from replaybuf.storage.sql.inspection.snapshots import DEFAULT, Target, exists

_File = Annotated[
    str | None,
    file_argument("JSONL, Parquet, Arrow, or xtuner's saved buffer; - for JSONL on stdin."),
]
_Imported = Annotated[
    str | None, buffer_option("Put the groups into the buffer of this name; else into the one named default.")
]


@listing
def import_(
    url: Url,
    output: Output,
    file: _File = None,
    dry_run: Annotated[bool, option("--dry-run", help="Only say what would be imported.")] = False,
    buffer: _Imported = None,
    task: OfTask = None,
    status: OfStatus = None,
    field: Annotated[
        list[str] | None,
        option(
            "--field",
            metavar="OURS=THEIRS",
            help="The column of a field, as response=completion. Repeatable.",
        ),
    ] = None,
    as_task: Annotated[
        str | None, option("--as-task", metavar="NAME", help="The task of rows that don't name one.")
    ] = None,
    as_status: Annotated[
        str | None, option("--as-status", metavar="STATUS", help="The status of others' rows, whatever they say.")
    ] = None,
    key: Annotated[
        str | None,
        option("--key", metavar="COLUMN", help="The column with the group's key: one of the same key is replaced."),
    ] = None,
    as_they_are: Annotated[
        bool, option("--as-they-are", help="Keep unknown columns as fields, for rollouts that are dicts.")
    ] = False,
    partial: Annotated[
        bool, option("--partial", help="Import what is whole of a file that was cut short; else nothing.")
    ] = False,
    again: Annotated[bool, option("--again", help="Import once more what was imported before.")] = False,
) -> None:
    """Put the groups of a file into a buffer, each exactly once.

    The file is read to its end first, and nothing is put of one that is damaged. An import that was interrupted goes on
    when it is called again; a second one of the same rollouts finds nothing to do. Pickles are read as data: nothing in
    them is run or imported. A SQLite file that isn't there is made.

    \b
    Examples:
      replaybuf import run.db rollouts.jsonl --dry-run
      replaybuf import run.db completions.parquet --as-task math --field response=completion
      replaybuf import postgresql://rl@db/run8 work_dir/replay_buffer.pth
      zcat old.jsonl.gz | replaybuf import run.db -
    """
    url, file = url_and(url, file, "FILE")
    wanted = ImportOptions(task, _status(status), partial, again, dry_run)
    mapped = ColumnMapping(_fields(field), as_task, _status(as_status), key, as_they_are)
    target, name = Target.at(url), buffer or DEFAULT
    _check_order(url, file)
    with _file(file) as path:
        read = RolloutFile(path, mapped).read
        there = exists(target)

        def work(tell: OnProgress) -> Imported:
            return asyncio.run(_import(target.url if there or not dry_run else None, name, read, wanted, tell))

        found = with_bar("imported", work, counting="read").found
    _tell(found, output, file)
    if found.groups or not output.for_people:
        output.rows(_rows(target.where, name, found), _COLUMNS)
    if dry_run:
        output.note("nothing was imported (--dry-run)")


async def _import(url: str | None, name: str, read: Reader, wanted: ImportOptions, tell: OnProgress) -> Imported:
    """Import into the database at `url`; without one, into nothing, which a dry run doesn't change."""
    storage = SQLStorage("memory://" if url is None else url, AS_DICTS, Rules(), name=name)
    try:
        return await import_from(storage, read, wanted, tell)
    finally:
        await storage.close()


def _check_order(url: str, file: str) -> None:
    """Raise InputError for a file of rows in the place of the database."""
    with suppress(OSError):  # of a file that can't be read, which opening it says better
        if Path(url).is_file() and not is_sqlite(Path(url)):
            url, file = redact_path(url), redact_path(file)
            raise InputError(
                f"{url!r:.200} is a file, but no SQLite database; did you swap URL and FILE? The URL comes first: "
                f"replaybuf import {file:.200} {url:.200}"
            )


@contextmanager
def _file(file: str) -> Iterator[str]:
    """Yield the path of the file; of what is on stdin, that of a copy, because it is read twice."""
    if file != "-":
        yield file
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stdin"
        with path.open("wb") as copy:
            shutil.copyfileobj(sys.stdin.buffer, copy)
        yield str(path)


def _fields(fields: list[str] | None) -> dict[str, str]:
    mapping: dict[str, str] = {}
    for one in fields or ():
        ours, sign, theirs = one.partition("=")
        if not (ours and sign and theirs):
            raise typer.BadParameter(f"{redact(one)!r} is no mapping; write response=completion.", param_hint="--field")
        mapping[ours] = theirs
    return mapping


def _status(text: str | None) -> Status | None:
    if text is None:
        return None
    status = OUR_STATUSES.get(text)
    if status is None:
        raise InputError(f"unknown status {redact(text)!r:.100}; there are {', '.join(Status)}")
    return status


def _tell(found: Survey, output: Output, file: str) -> None:
    for what, count in found.odd.items():
        output.note(f"{what} ({units.number(count)} groups, the first at {found.examples[what]})")
    for text in found.warnings:  # also for programs: rows of what nobody meant look like any others
        typer.echo(escape_line(f"Warning: {text}"), err=True)
    if found.ends is not None:
        output.note(f"{found.ends}; what is before it is imported")
    if not found.groups:
        output.note("there are no such groups in the file" if file != "-" else "there are no such groups")


def _rows(where: str, buffer: str, found: Survey) -> list[dict[str, Any]]:
    return [
        {
            "url": where,
            "buffer": buffer,
            "task_name": task,
            "status": str(status),
            "groups": n,
            "rollouts": found.rollouts[task, status],
            "there": found.there[task, status],
            "new": n - found.there[task, status],
        }
        for (task, status), n in sorted(found.groups.items())
    ]


_COLUMNS = [
    Column("task", lambda r: r["task_name"], right=False, text=True),
    Column("status", lambda r: r["status"], right=False, style=status_style),
    Column("groups", lambda r: units.number(r["groups"])),
    Column("rollouts", lambda r: units.number(r["rollouts"])),
    Column("there before", lambda r: units.number(r["there"])),
    Column("new", lambda r: units.number(r["new"])),
]
