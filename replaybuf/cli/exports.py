"""`replaybuf export`: groups into files of rows."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer

from replaybuf import units
from replaybuf.cli.options import (
    Limit,
    OfStatus,
    OfTask,
    OrderBy,
    Url,
    Where,
    buffer_option,
    file_argument,
    listing,
    option,
    read_size,
    url_and,
    with_bar,
)
from replaybuf.cli.output import Column, Output
from replaybuf.cli.queries import nothing_in, query_of
from replaybuf.files.exporting import TREES, Exported, ExportQuery, export_files, export_rows, writer_to
from replaybuf.progress import OnProgress
from replaybuf.redact import redact
from replaybuf.rules.policies import parse_order
from replaybuf.storage.sql.backend import SQLStorage
from replaybuf.storage.sql.inspection.groups import choose
from replaybuf.storage.sql.inspection.reader import open_reader
from replaybuf.storage.sql.inspection.snapshots import opens_read_only

_File = Annotated[str | None, file_argument("NAME.jsonl (.gz, .zst), NAME.parquet, NAME.arrow; - for JSONL on stdout.")]
_Exported = Annotated[
    str | None, buffer_option("This buffer of the database; else the only one, or the one named default.")
]
_UNREADABLE_SHOWN = 5


@listing
def export(
    url: Url,
    output: Output,
    file: _File = None,
    where: Where = None,
    buffer: _Exported = None,
    task: OfTask = None,
    status: OfStatus = None,
    order_by: OrderBy = None,
    limit: Limit = 0,
    rows: Annotated[
        Literal["rollouts", "groups"], option("--rows", metavar="KIND", help="A row is one of the rollouts or groups.")
    ] = "rollouts",
    max_bytes: Annotated[
        str | None, option("--max-bytes", metavar="SIZE", help="Begin another file from this size on: 500M, 1G.")
    ] = None,
    force: Annotated[bool, option("--force", help="Replace a file that is there.")] = False,
) -> None:
    """Write groups with their full texts and tokens to a file, while the run goes on.

    Groups aren't consumed. Those that match when the export begins are written; those that leave before they are read
    are left out, and counted. Leased groups are left out. The file gets its name when it is complete; "replaybuf
    import" makes the same groups of it.

    \b
    Examples:
      replaybuf export run.db rollouts.jsonl
      replaybuf export run.db good.parquet --where '{"reward": {"$gte": 0.9}}' --rows groups
      replaybuf export postgresql://rl@db/run7 rollouts.jsonl.zst --task math --max-bytes 1G
      replaybuf export run.db - --limit 1 | jq .response
    """
    url, file = url_and(url, file, "FILE")
    chosen = ExportQuery(
        query_of(where, task, status),
        parse_order([redact(term) for term in order_by or ()]),
        limit or None,
        rows,
    )
    size = None if max_bytes is None else read_size(max_bytes, "--max-bytes")
    reader = open_reader(url)
    name = reader.read(lambda tx: choose(tx, buffer))

    async def work(tell: OnProgress) -> Exported:
        read_only = opens_read_only(reader)
        storage = SQLStorage(reader.url.render_as_string(hide_password=False), TREES, name=name, read_only=read_only)
        try:
            if file == "-":
                return await export_rows(storage, chosen, writer_to(sys.stdout.buffer), tell)
            return await export_files(storage, chosen, Path(file), max_bytes=size, force=force, progress=tell)
        finally:
            await storage.close()

    done = with_bar("exported", lambda tell: asyncio.run(work(tell)))
    if done.left:
        output.note(f"{units.number(done.left)} groups left the buffer before they were read")
    if done.unreadable:
        shown = ", ".join(map(str, done.unreadable[:_UNREADABLE_SHOWN]))
        typer.echo(f"{len(done.unreadable)} groups can't be decoded and were left out: {shown}", err=True)
    if not done.groups and not done.unreadable and (where or task or status):
        output.note(nothing_in(reader, name, task))
    if file == "-":
        typer.echo(f"{units.number(done.groups)} groups, {units.number(done.rollouts)} rollouts", err=True)
    else:
        output.rows([_row(reader.where, name, done, path) for path in done.files], _COLUMNS)


def _row(where: str, buffer: str, done: Exported, path: Path) -> dict[str, Any]:
    return {
        "url": where,
        "buffer": buffer,
        "file": str(path),
        "groups": done.groups,
        "rollouts": done.rollouts,
        "left": done.left,
        "unreadable": len(done.unreadable),
        "bytes": path.stat().st_size,
    }


_COLUMNS = [
    Column("buffer", lambda r: r["buffer"], right=False, text=True),
    Column("file", lambda r: cast(str, r["file"]), right=False, text=True),
    Column("groups", lambda r: units.number(r["groups"])),
    Column("rollouts", lambda r: units.number(r["rollouts"])),
    Column("size", lambda r: units.size(r["bytes"])),
]
