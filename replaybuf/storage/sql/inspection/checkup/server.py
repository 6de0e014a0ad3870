"""PostgreSQL: the server's settings, what holds it back, and what it reports about its files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import text

from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.schema.records import metadata
from replaybuf.storage.sql.schema.tables import uid_sequence

_RIGHTS = ("SELECT", "INSERT", "UPDATE", "DELETE")
_TABLES = sorted(metadata.tables)


def _one(tx: Transaction, query: str, **values: Any) -> Any:
    return tx.execute(text(query), values).scalar()


def _setting(tx: Transaction, name: str) -> str:
    return str(_one(tx, "SELECT current_setting(:name)", name=name))


@dataclass(frozen=True, slots=True)
class Access:
    """The user, whether the server can be written, and the missing privileges."""

    user: str
    standby: bool
    lacking: list[str]


def read_access(tx: Transaction) -> Access:
    """Return what this user may do."""
    may = "SELECT has_table_privilege(:name, :right)"
    lacking = [
        f"{right} on {name}"
        for name in metadata.tables
        for right in _RIGHTS
        if not _one(tx, may, name=name, right=right)
    ]
    if not _one(tx, "SELECT has_sequence_privilege(:name, 'USAGE')", name=uid_sequence.name):
        lacking.append(f"USAGE on {uid_sequence.name}")
    return Access(_one(tx, "SELECT current_user"), _one(tx, "SELECT pg_is_in_recovery()"), lacking)


@dataclass(frozen=True, slots=True)
class Settings:
    """The server's version as number and text, the database's encoding, and the settings that are off."""

    number: int
    version: str
    encoding: str
    off: set[str]


def read_settings(tx: Transaction, *wanted: str) -> Settings:
    """Return the server's settings, with those of the wanted ones that are off."""
    number, version = (_setting(tx, name) for name in ("server_version_num", "server_version"))
    encoding = _one(tx, "SELECT pg_encoding_to_char(encoding) FROM pg_database WHERE datname = current_database()")
    return Settings(int(number), version, encoding, {name for name in wanted if _setting(tx, name) == "off"})


def count_connections(tx: Transaction) -> tuple[int, int]:
    """Return the number of client connections, and the most that are allowed."""
    used = _one(tx, "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'")
    return used, int(_setting(tx, "max_connections"))


@dataclass(frozen=True, slots=True)
class Session:
    """A client's session."""

    pid: int
    application: str
    state: str


def long_sessions(tx: Transaction, seconds: float) -> list[Session]:
    """Return the sessions with a transaction open for at least this long, oldest first."""
    return [Session(*row) for row in tx.execute(text(_IDLE), {"seconds": seconds})]


def long_prepared(tx: Transaction, seconds: float) -> list[str]:
    """Return the transactions that were prepared at least this long ago."""
    return list(tx.execute(text(_PREPARED), {"seconds": seconds}).scalars())


_IDLE = """
SELECT pid, application_name, state FROM pg_stat_activity
 WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'
   AND xact_start < clock_timestamp() - make_interval(secs => :seconds) ORDER BY xact_start
"""
_PREPARED = """
SELECT gid FROM pg_prepared_xacts
 WHERE database = current_database() AND prepared < clock_timestamp() - make_interval(secs => :seconds)
"""


@dataclass(frozen=True, slots=True)
class Rows:
    """The dead and live rows of a table, and when it was last vacuumed."""

    table: str
    dead: int
    live: int
    vacuumed: str | None


def read_rows(tx: Transaction) -> list[Rows]:
    """Return the server's statistics of the rows of each table."""
    return [Rows(*row) for row in tx.execute(text(_DEAD), {"names": _TABLES})]


_DEAD = """
SELECT relname, n_dead_tup, n_live_tup, greatest(last_vacuum, last_autovacuum)::timestamp(0)::text AS last
  FROM pg_stat_user_tables WHERE relname = ANY(:names) ORDER BY relname
"""


def count_damaged_pages(tx: Transaction) -> int:
    """Return the number of damaged pages that the server has found in the database."""
    failures = _one(tx, "SELECT checksum_failures FROM pg_stat_database WHERE datname = current_database()")
    return int(failures or 0)


def has_page_checksums(tx: Transaction) -> bool:
    """Return whether the server would notice a damaged page."""
    return bool(_one(tx, "SELECT current_setting('data_checksums')") != "off")


def damaged_indexes(tx: Transaction) -> list[tuple[str, str]] | None:
    """Return the damaged indexes, each with what is wrong; None when the extension amcheck isn't installed."""
    if not _one(tx, "SELECT 1 FROM pg_extension WHERE extname = 'amcheck'"):
        return None
    wrong = []
    for oid, name in tx.execute(text(_INDEXES), {"names": _TABLES}).all():
        try:
            with tx.connection.begin_nested():
                tx.execute(text("SELECT bt_index_check(:index)"), {"index": oid})
        except Exception as error:
            wrong.append((name, str(error.__cause__ or error)))
    return wrong


_INDEXES = """
SELECT c.oid, c.relname FROM pg_index i
  JOIN pg_class c ON c.oid = i.indexrelid JOIN pg_class t ON t.oid = i.indrelid JOIN pg_am a ON a.oid = c.relam
 WHERE a.amname = 'btree' AND i.indisvalid AND t.relname = ANY(:names) ORDER BY c.relname
"""
