"""`replaybuf checkpoints`: the step checkpoints in a database."""

from __future__ import annotations

from replaybuf import units
from replaybuf.cli.options import Buffer, Url, listing
from replaybuf.cli.output import Column, Output, iso
from replaybuf.storage.sql.inspection.metadata import read_checkpoints
from replaybuf.storage.sql.inspection.reader import open_reader

#: How checkpoints are listed.
COLUMNS = [
    Column("buffer", lambda r: r["buffer"], right=False, text=True),
    Column("step", lambda r: units.number(r["step"])),
    Column("made", lambda r: iso(r["created_at"]), right=False),
    Column("groups", lambda r: units.number(r["groups"])),
    Column("size", lambda r: units.size(r["bytes"])),
]


@listing
def checkpoints(url: Url, output: Output, buffer: Buffer = None) -> None:
    """List the step checkpoints in a database: what buffer.restore(step) can go back to.

    "groups" and "size" are what each holds; payloads that several of them hold, or that are still in the buffer, take
    their space once.

    \b
    Examples:
      replaybuf checkpoint ls run.db
      replaybuf checkpoints run.db
    """
    rows = open_reader(url).look(lambda look: read_checkpoints(look, buffer))
    if rows or not output.for_people:
        output.rows(rows, COLUMNS)
    else:
        output.note("there are no checkpoints")
