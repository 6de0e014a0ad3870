"""How alembic reaches a replaybuf database: over a given connection, or at `-x url=...` or REPLAYBUF_URL."""

from __future__ import annotations

import asyncio
import os

from alembic import context
from sqlalchemy import Connection

from replaybuf.storage.sql.engine.opening import open_engine
from replaybuf.storage.sql.engine.urls import parse_url
from replaybuf.storage.sql.schema.create import create_views, current_revision, drop_views
from replaybuf.storage.sql.schema.records import metadata
from replaybuf.storage.sql.schema.revisions import HEAD, VERSION_TABLE


def migrate(connection: Connection) -> None:
    """Run the chain in the connection's transaction, and recreate the views when it has reached its end."""
    drop_views(connection)
    context.configure(
        connection=connection, target_metadata=metadata, version_table=VERSION_TABLE, transactional_ddl=False
    )
    with context.begin_transaction():
        context.run_migrations()
    if current_revision(connection) == HEAD:
        create_views(connection)


async def migrate_url(url: str) -> None:
    engine = open_engine(parse_url(url), durability="full")
    try:
        await engine.write(lambda tx: migrate(tx.connection), alone=True)
    finally:
        await engine.dispose()


def main() -> None:
    if context.is_offline_mode():
        raise SystemExit("offline mode (--sql) is not supported: the statements depend on the database")
    connection = context.config.attributes.get("connection")
    if connection is not None:
        migrate(connection)
        return
    url = context.get_x_argument(as_dictionary=True).get("url") or os.environ.get("REPLAYBUF_URL")
    if not url:
        raise SystemExit("give the database: alembic -x url=sqlite:///run.db upgrade head (or set REPLAYBUF_URL)")
    asyncio.run(migrate_url(url))


main()
