"""The revision of a database's schema, and its upgrade."""

from __future__ import annotations

from sqlalchemy import inspect

from replaybuf.errors import NotADatabaseError, SchemaError
from replaybuf.storage.sql.engine.filesystem import refuse_network_filesystem
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.inspection.reader import Reader
from replaybuf.storage.sql.inspection.revision import Revision
from replaybuf.storage.sql.inspection.writer import open_writer
from replaybuf.storage.sql.schema.create import check_schema, create_schema, current_revision, upgrade
from replaybuf.storage.sql.schema.revisions import HEAD, REVISIONS


def read_revision(tx: Transaction) -> Revision:
    """Return the revision of the database."""
    return Revision(current_revision(tx.connection))


def upgrade_database(reader: Reader) -> tuple[str | None, str]:
    """Upgrade the schema, or create it in an empty database; return the revisions before and after.

    Raises NotADatabaseError for a database of something else, and SchemaError for a newer one.
    """
    # Before it is opened for writing, which changes the journal of a SQLite file.
    reader.read(lambda tx: _check_owner(tx, reader.where))
    if reader.path is not None:
        refuse_network_filesystem(str(reader.url.database))

    def work(tx: Transaction) -> tuple[str | None, str | None]:
        before = current_revision(tx.connection)
        if before is None:
            create_schema(tx.connection, reader.where)
        elif before != HEAD:
            upgrade(tx.connection)
        return before, current_revision(tx.connection)

    with open_writer(reader) as writer:
        before, after = writer.write(work)
    if after != HEAD:
        raise SchemaError(f"{reader.where} is at revision {after} after the upgrade, wanted {HEAD}")
    return before, after


def _check_owner(tx: Transaction, where: str) -> None:
    if current_revision(tx.connection) is None and (tables := inspect(tx.connection).get_table_names()):
        some = ", ".join(sorted(tables)[:3])
        raise NotADatabaseError(f"{where} belongs to something else (it has tables {some}); nothing was changed")
    if current_revision(tx.connection) not in REVISIONS:
        check_schema(tx.connection, where)
