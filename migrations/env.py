"""How alembic reaches a replaybuf database: over a given connection, or at `-x url=...` or REPLAYBUF_URL."""

from __future__ import annotations

import asyncio
import os

from alembic import context
from sqlalchemy import Connection

from replaybuf.storage.sql.engine.database import Access
from replaybuf.storage.sql.engine.urls import parse_url
from replaybuf.storage.sql.inspection.writer import over_sqlalchemy, transaction_of
from replaybuf.storage.sql.schema import HEAD, VERSION_TABLE
from replaybuf.storage.sql.schema.create import create_views, drop_views
from replaybuf.storage.sql.schema.tables import metadata


def migrate(connection: Connection) -> None:
    """Run the chain in the connection's transaction, and recreate the views when it has reached its end."""
    tx = transaction_of(connection)
    drop_views(tx)
    context.configure(
        connection=connection, target_metadata=metadata, version_table=VERSION_TABLE, transactional_ddl=False
    )
    with context.begin_transaction():
        context.run_migrations()
    if tx.revision() == HEAD:
        create_views(tx)


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
    asyncio.run(over_sqlalchemy(Access(parse_url(url), durability="full"), migrate))


main()
