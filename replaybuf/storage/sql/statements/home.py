"""The location of this database (`Home`), which tells it from its copies: places belong to one of them."""

from __future__ import annotations

import os
import socket
import sqlite3
from contextlib import closing
from urllib.parse import quote

from replaybuf.places.owners import Home
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.schema.tables import IDENTITY

_IDENTITY = f"SELECT value FROM rb_info WHERE name = '{IDENTITY}'"  # noqa: S608
_FILE = "SELECT file FROM pragma_database_list WHERE name = 'main'"
# A cluster keeps its system identifier through failover and physical backups. Reading it needs a privilege.
_MAY_ASK = "SELECT has_function_privilege('pg_control_system()', 'EXECUTE')"
_CLUSTER = "SELECT system_identifier::text FROM pg_control_system()"
_DATABASE = """
SELECT current_database()::text, relnamespace::regnamespace::text, d.oid || '.' || relnamespace
FROM pg_class, pg_database d WHERE pg_class.oid = 'rb_info'::regclass AND d.datname = current_database()"""
# A schema of another database can't be seen from here: the existence of that database is enough.
_THERE = """
SELECT count(*) FROM pg_database d WHERE d.oid::text = split_part($1, '.', 1)
AND (d.datname <> current_database() OR EXISTS (
    SELECT FROM pg_class WHERE relname = 'rb_info' AND relnamespace::text = split_part($1, '.', 2)))"""


def home_of(tx: Transaction) -> Home:
    """Return the location of this database; empty for one in memory, which has no copies."""
    if tx.dialect.name == "postgresql":
        [(may_ask,)] = tx.run(_MAY_ASK)
        cluster = tx.run(_CLUSTER)[0][0] if may_ask else "unknown"
        [(database, schema, numbers)] = tx.run(_DATABASE)
        name = f"the schema {schema} of the database {database} in the PostgreSQL cluster {cluster}"
        return {"cluster": cluster, "numbers": numbers, "name": name}
    path = tx.run(_FILE)[0][0]
    if not path:
        return {}
    host, path = socket.gethostname(), os.path.realpath(path)
    return {"host": host, "path": path, "inode": str(os.stat(path).st_ino), "name": f"{path} on {host}"}


def has_left(tx: Transaction, home: Home) -> bool:
    """Return whether no database like this one is at a former location, as far as it is visible from here."""
    ours = home_of(tx)
    if tx.dialect.name == "postgresql":
        [(there,)] = tx.run(_THERE, home.get("numbers", ""))
        return ours["cluster"] == home.get("cluster") and not int(there)
    if not ours or ours["host"] != home.get("host"):
        return False
    path = home.get("path", "")
    if not os.path.exists(path) or os.path.samefile(path, ours["path"]):
        return True
    try:
        return bool(_identity(path) != tx.run(_IDENTITY)[0][0])
    except (sqlite3.Error, OSError):
        return False


def _identity(path: str) -> str | None:
    with closing(sqlite3.connect(f"file:{quote(path)}?mode=ro&immutable=1", uri=True)) as connection:
        found = connection.execute(_IDENTITY).fetchone()
        return None if found is None else str(found[0])
