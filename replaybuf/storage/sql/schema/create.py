"""Creating, checking and upgrading the schema.

A new database gets the tables of `tables.py` at once and is stamped with the newest revision; an existing one must be
at that revision. The alembic chain in `migrations` upgrades older ones.
"""

from __future__ import annotations

import uuid
from pathlib import Path

from sqlalchemy import (
    Column,
    Connection,
    Inspector,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    delete,
    insert,
    inspect,
    select,
    text,
)

from replaybuf.errors import NotADatabaseError, SchemaError
from replaybuf.storage.sql.schema.records import metadata
from replaybuf.storage.sql.schema.revisions import HEAD, VERSION_TABLE, check_revision
from replaybuf.storage.sql.schema.tables import DIGEST, IDENTITY, counter, info
from replaybuf.storage.sql.schema.views import CREATE_VIEWS, VIEWS

# As alembic creates it.
version = Table(
    VERSION_TABLE,
    MetaData(),
    Column("version_num", String(32), nullable=False),
    PrimaryKeyConstraint("version_num", name=f"{VERSION_TABLE}_pkc"),
)


def current_revision(connection: Connection) -> str | None:
    """Return the revision of the database, or None when it has no replaybuf schema."""
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    return connection.execute(select(version.c.version_num)).scalar()


def check_schema(connection: Connection, where: str) -> bool:
    """Return whether there is a schema. Raises SchemaError when it is older or newer than this version of replaybuf."""
    return check_revision(current_revision(connection), where)


def create_schema(connection: Connection, where: str) -> None:
    """Create everything that is missing; several processes may do so at once."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": 0x5EB10})
    if check_schema(connection, where):
        return
    taken = (set(inspect(connection).get_table_names()) & metadata.tables.keys()) | _taken_by_others(connection)
    if taken:
        raise NotADatabaseError(
            f"{where} already has tables or views named {', '.join(sorted(taken))} that are not replaybuf's; "
            "use another database, or rename them"
        )
    metadata.create_all(connection)
    finish_tables(connection)
    create_views(connection)
    version.create(connection)
    connection.execute(insert(version).values(version_num=HEAD))


def create_views(connection: Connection) -> None:
    """Create the views for people."""
    for statement in CREATE_VIEWS[connection.dialect.name].values():
        connection.exec_driver_sql(statement)


def drop_views(connection: Connection) -> None:
    """Drop the views for people, if they are there. Raises SchemaError when somebody else has one of their names."""
    if taken := _taken_by_others(connection):
        raise SchemaError(
            f"the database has tables or views named {', '.join(sorted(taken))} that are not replaybuf's; its views "
            "need these names: rename yours, and upgrade again; nothing was changed"
        )
    for view in VIEWS:
        connection.execute(text(f"DROP VIEW IF EXISTS {view}"))


def _taken_by_others(connection: Connection) -> set[str]:
    """Return the names of our views that tables or views of somebody else have: ours read our tables."""
    found = inspect(connection)
    views = {name for name in set(found.get_view_names()) & set(VIEWS) if "rb_" not in _definition(found, name)}
    return views | (set(found.get_table_names()) & set(VIEWS))


def _definition(found: Inspector, view: str) -> str:
    return str(found.get_view_definition(view) or "")


def finish_tables(connection: Connection) -> None:
    """Do what SQLAlchemy's tables can't express: first rows, and how PostgreSQL stores payloads."""
    connection.execute(insert(counter).values(name="uid", value=0))
    connection.execute(insert(info).values(name=IDENTITY, value=uuid.uuid4().hex))
    if connection.dialect.name == "postgresql":
        # Payloads are stored out of line and not compressed: they are already, or it isn't worth it.
        connection.execute(text("ALTER TABLE rb_payload ALTER COLUMN data SET STORAGE EXTERNAL"))


def migrations_folder() -> Path:
    """Return the alembic scripts: inside the package when installed from a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[3]
    for folder in (package / "_migrations", package.parent / "migrations"):
        if (folder / "env.py").is_file():
            return folder
    raise SchemaError("the migration scripts are missing from this installation; reinstall replaybuf")


def upgrade(connection: Connection, revision: str = "head") -> None:
    """Run the alembic chain up to `revision` on this connection, in its transaction."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, revision)
    # The rows of a snapshot are no longer those that were saved.
    connection.execute(delete(info).where(info.c.name == DIGEST))
