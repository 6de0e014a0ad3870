"""`replaybuf db`: the schema of a database."""

from __future__ import annotations

import asyncio

import typer
from sqlalchemy import Connection, inspect

from replaybuf.cli.options import Url, listing
from replaybuf.cli.output import Column, Output
from replaybuf.errors import NotADatabaseError, SchemaError
from replaybuf.storage.sql.engine.filesystem import refuse_network_filesystem
from replaybuf.storage.sql.engine.urls import public_url
from replaybuf.storage.sql.inspection import open_reader, read_url
from replaybuf.storage.sql.schema.create import HEAD, REVISIONS, check_schema, create_schema, current_revision, upgrade

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)

_LOCK_TIMEOUT = 30.0


@app.callback()
def db() -> None:
    """Show or upgrade the schema of a database."""


@app.command("current")
@listing
def current(url: Url, output: Output) -> None:
    """Show the revision of a database's schema, and the one that this replaybuf works with.

    \b
    Example:
      replaybuf db current run.db
    """
    reader = open_reader(url)
    revision = reader.read(current_revision)
    row = {"url": reader.where, "revision": revision, "wanted": HEAD, "state": state_of(revision)}
    columns = [
        Column("revision", lambda r: r["revision"] or "none", right=False),
        Column("wanted", lambda r: r["wanted"], right=False),
        Column("state", lambda r: r["state"], right=False),
    ]
    output.rows([row], columns)


def state_of(revision: str | None) -> str:
    """What a revision means for this version of replaybuf."""
    if revision is None:
        return "no replaybuf tables"
    if revision == HEAD:
        return "up to date"
    return "older: run replaybuf db upgrade" if revision in REVISIONS else "newer: upgrade replaybuf"


@app.command("upgrade")
@listing
def upgrade_command(url: Url, output: Output) -> None:
    """Bring the schema of a database up to date.

    Close all users of the database first. It happens in one transaction, whole or not at all. In an empty database the
    tables are created.

    \b
    Example:
      replaybuf db upgrade postgresql://admin@db/run7
    """
    parsed = read_url(url)
    where = public_url(parsed)
    # Opening a SQLite file for writing changes its journal; what isn't replaybuf's is left alone.
    open_reader(url).read(lambda connection: _check_owner(connection, where))

    def work(connection: Connection) -> tuple[str | None, str | None]:
        before = current_revision(connection)
        if before is None:
            create_schema(connection, where)
        elif before != HEAD:
            upgrade(connection)
        return before, current_revision(connection)

    if parsed.get_backend_name() == "sqlite":
        refuse_network_filesystem(str(parsed.database))

    async def run() -> tuple[str | None, str | None]:
        from replaybuf.storage.sql.engine.database import Database

        database = Database(parsed, durability="full", lock_timeout=_LOCK_TIMEOUT)
        try:
            return await database.write(work, alone=True)
        finally:
            await database.dispose()

    before, after = asyncio.run(run())
    if after != HEAD:
        raise SchemaError(f"{where} is at revision {after} after the upgrade, wanted {HEAD}")
    columns = [
        Column("before", lambda r: r["before"] or "none", right=False),
        Column("after", lambda r: r["after"], right=False),
    ]
    output.rows([{"url": where, "before": before, "after": after}], columns)
    if before == after:
        output.note("it was up to date already")


def _check_owner(connection: Connection, where: str) -> None:
    if current_revision(connection) is None and (tables := inspect(connection).get_table_names()):
        some = ", ".join(sorted(tables)[:3])
        raise NotADatabaseError(f"{where} belongs to something else (it has tables {some}); nothing was changed")
    if current_revision(connection) not in REVISIONS:
        check_schema(connection, where)
