"""`replaybuf db`: the schema of a database."""

from __future__ import annotations

import typer

from replaybuf.cli.options import Command, Url, listing
from replaybuf.cli.output import Column, Output
from replaybuf.storage.sql.inspection.reader import HEAD, State, open_reader, state_of

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
@listing
def current(url: Url, output: Output) -> None:
    """Show the revision of a database's schema, and the one that this replaybuf works with.

    \b
    Example:
      replaybuf db current run.db
    """
    reader = open_reader(url)
    revision = reader.read_any(lambda tx: tx.revision())
    row = {"url": reader.where, "revision": revision, "wanted": HEAD, "state": _STATES[state_of(revision)]}
    columns = [
        Column("revision", lambda r: r["revision"] or "none", right=False),
        Column("wanted", lambda r: r["wanted"], right=False),
        Column("state", lambda r: r["state"], right=False),
    ]
    output.rows([row], columns)


@app.command("upgrade", cls=Command)
@listing
def upgrade_command(url: Url, output: Output) -> None:
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
    columns = [
        Column("before", lambda r: r["before"] or "none", right=False),
        Column("after", lambda r: r["after"], right=False),
    ]
    output.rows([{"url": reader.where, "before": before, "after": after}], columns)
    if before == after:
        output.note("it was up to date already")
