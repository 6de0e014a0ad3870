"""`replaybuf export`, `replaybuf import`: write groups to files of rows, and read groups from files."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from replaybuf.cli import commands
from replaybuf.cli.groups import nothing_in, order_of
from replaybuf.common import units
from replaybuf.common.progress import OnProgress
from replaybuf.common.redact import redact
from replaybuf.errors import InputError
from replaybuf.files.exporting import Exported, ExportQuery, export_file, export_lines
from replaybuf.files.foreign_rows import ColumnMapping
from replaybuf.files.importing import Imported, Survey, import_from
from replaybuf.files.sources import RolloutFile
from replaybuf.rules.query import query_of
from replaybuf.storage.sql.backend import SQLStorage
from replaybuf.storage.sql.inspection.group_metadata import DEFAULT, unknown_task
from replaybuf.storage.sql.inspection.writer import exists, target_at
from replaybuf.view.columns import columns

_ToFile = Annotated[str, commands.argument("FILE", "NAME.jsonl or NAME.parquet; - for JSONL on stdout.")]
_UNREADABLE_SHOWN = 5


def export(
    url: commands.Url,
    file: _ToFile,
    output: commands.Out = commands.TEXT,
    where: commands.Where = None,
    buffer: commands.OneBuffer = None,
    task: commands.OfTask = None,
    status: commands.OfStatus = None,
    order_by: commands.OrderBy = None,
    limit: commands.Limit = "all",
    force: Annotated[bool, commands.option("--force", "Replace a file that is there.")] = False,
) -> None:
    """Write groups with their full texts and tokens to a file, while the run goes on.

    Groups aren't consumed. Those that match when the export begins are written, but for those that leave before they
    are read, and leased ones. The file gets its name when it is complete. "replaybuf import" makes groups of it again.

    \b
    Examples:
      replaybuf export run.db rollouts.jsonl
      replaybuf export run.db good.parquet --where '{"reward": {"$gte": 0.9}}'
      replaybuf export postgresql://rl@db/run7 math.parquet --task math
      replaybuf export run.db - --limit 1 | jq .response
    """
    query = ExportQuery(query_of(where, task, status), order_of(order_by), commands.read_limit(limit))
    reader, name = commands.open_buffer(url, buffer)
    if unknown := reader.read(lambda tx: unknown_task(tx, name, task)):
        raise InputError(f"nothing was exported: {unknown}")

    async def work(storage: SQLStorage, tell: OnProgress) -> Exported:
        if file == "-":
            return await export_lines(storage, query, sys.stdout.buffer, tell)
        return await export_file(storage, query, Path(file), force=force, progress=tell)

    def run(tell: OnProgress) -> Exported:
        return commands.on_storage(reader.url, name, lambda storage: work(storage, tell), read_only=True)

    total, _ = commands.with_bar("exported", run)
    if total.unreadable:
        left_out = units.number_of(len(total.unreadable), "group")
        examples = ", ".join(map(str, total.unreadable[:_UNREADABLE_SHOWN]))
        typer.echo(f"{left_out} left out, undecodable: {examples}", err=True)
    if not total.groups and not total.unreadable and (where or task or status):
        output.note(nothing_in(reader, name, task))
    if file == "-":
        typer.echo(f"{units.number_of(total.groups, 'group')}, {units.number_of(total.rollouts, 'rollout')}", err=True)
    else:
        counts = {"groups": total.groups, "rollouts": total.rollouts, "unreadable": len(total.unreadable)}
        row = {"url": reader.where, "buffer": name, "file": file, **counts, "bytes": total.bytes}
        output.rows([row], columns("buffer", "file", "groups", "rollouts", "bytes"))


_FromFile = Annotated[str, commands.argument("FILE", "NAME.parquet, or JSONL.")]
_Imported = Annotated[
    str | None, commands.buffer_option("Put the groups into the buffer of this name; else into the one named default.")
]


def import_(
    url: commands.Url,
    file: _FromFile,
    output: commands.Out = commands.TEXT,
    dry_run: Annotated[bool, commands.option("--dry-run", "Only say what would be imported.")] = False,
    buffer: _Imported = None,
    field: Annotated[
        list[str] | None,
        commands.option("--field", "The column of a field, as response=completion. Repeatable.", metavar="OURS=THEIRS"),
    ] = None,
    as_task: Annotated[
        str | None, commands.option("--as-task", "The task of rows that don't name one.", metavar="NAME")
    ] = None,
    as_status: Annotated[
        str | None, commands.option("--as-status", "The status of others' rows, whatever they say.", metavar="STATUS")
    ] = None,
    again: Annotated[bool, commands.option("--again", "Import once more what was imported before.")] = False,
) -> None:
    """Put the groups of a file into a buffer, each exactly once.

    The file is read to its end first, and nothing is put of one that is damaged. An import that was interrupted goes on
    when it is called again; a second one of the same file finds nothing to do. A SQLite file that isn't there is made.

    \b
    Examples:
      replaybuf import run.db rollouts.jsonl --dry-run
      replaybuf import run.db a.parquet --as-task math --field response=text
    """
    source = RolloutFile(Path(file), ColumnMapping(_fields(field), as_task, commands.status_of(as_status)))
    target, name = target_at(url), buffer or DEFAULT
    # A dry run without a database imports into an empty one in memory.
    destination = target.url if exists(target) or not dry_run else "memory://"

    def run(tell: OnProgress) -> Imported:
        work = partial(import_from, source=source, again=again, dry_run=dry_run, progress=tell)
        return commands.on_storage(destination, name, work)

    survey = commands.with_bar("imported", run, counting="read")[0].found
    if not survey.groups:
        output.note("the file has no groups")
    if survey.groups or not output.for_people:
        names = ("task_name", "status", "groups", "rollouts", "there", "new")
        output.rows(_rows(target.where, name, survey), columns(*names, there="there before"))
    if dry_run:
        output.note("nothing was imported (--dry-run)")


def _fields(fields: list[str] | None) -> dict[str, str]:
    mapping: dict[str, str] = {}
    for text in fields or ():
        field, sign, column = text.partition("=")
        if not (field and sign and column):
            raise typer.BadParameter(
                f"{redact(text)!r} is no mapping; write response=completion.", param_hint="--field"
            )
        mapping[field] = column
    return mapping


def _rows(where: str, buffer: str, survey: Survey) -> list[dict[str, Any]]:
    return [
        {
            "url": where,
            "buffer": buffer,
            "task_name": task,
            "status": str(status),
            "groups": n,
            "rollouts": survey.rollouts[task, status],
            "there": survey.there[task, status],
            "new": n - survey.there[task, status],
        }
        for (task, status), n in sorted(survey.groups.items())
    ]
