"""PostgreSQL: how the server is set up, what holds it back, and what it says of its own files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, text

from replaybuf import units
from replaybuf.doctor.finding import Check, Finding, Look, fine, problem, some, warning
from replaybuf.storage.sql.schema.tables import metadata, uid_sequence

_ACCESS, _SETTINGS, _CONNECTIONS, _HELD, _INTEGRITY, _SPACE = (
    "access",
    "settings",
    "connections",
    "vacuum",
    "integrity",
    "space",
)

#: The oldest version that the tests have been run on is newer; this is what the statements need.
OLDEST_VERSION = 130000
#: Of all connections, what may be used.
MOST_CONNECTIONS = 0.8
#: Transactions that stay open for so long keep dead rows from being cleaned up.
LONG_SECONDS = 300
#: Dead rows of a table that autovacuum should have cleaned up.
MANY_DEAD = 100_000

_CHANGE = "ALTER SYSTEM SET {0} = on; SELECT pg_reload_conf()"


def _one(connection: Connection, query: str, **values: Any) -> Any:
    return connection.execute(text(query), values).scalar()


def look_at_access(connection: Connection, look: Look) -> Sequence[Finding]:
    """Whether this user may do what a run does."""
    if _one(connection, "SELECT pg_is_in_recovery()"):
        return [problem(_ACCESS, "the server is a standby, which can't be written", "give the URL of the primary")]
    may = "SELECT has_table_privilege(:name, :right)"
    rights = ("SELECT", "INSERT", "UPDATE", "DELETE")
    lacking = [
        f"{right} on {name}"
        for name in metadata.tables
        for right in rights
        if not _one(connection, may, name=name, right=right)
    ]
    if not _one(connection, "SELECT has_sequence_privilege(:name, 'USAGE')", name=uid_sequence.name):
        lacking.append(f"USAGE on {uid_sequence.name}")
    user = _one(connection, "SELECT current_user")
    if lacking:
        mend = f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {user}, and USAGE on sequences"
        return [problem(_ACCESS, f"the user {user} lacks {some(lacking, 3)}", mend)]
    return [fine(_ACCESS, f"the user {user} may read and write all tables")]


def look_at_settings(connection: Connection, look: Look) -> Sequence[Finding]:
    """Whether the server keeps what it has committed, and cleans up; synchronous_commit is set by every run itself."""
    found: list[Finding] = []
    for name, level, why in (
        ("fsync", problem, "a power cut or a crash of the system can destroy the database"),
        ("full_page_writes", problem, "a power cut in the middle of a write can destroy pages"),
        ("autovacuum", problem, "dead rows pile up, and everything becomes slower"),
    ):
        if _one(connection, "SELECT current_setting(:name)", name=name) == "off":
            found.append(level(_SETTINGS, f"{name} is off: {why}", _CHANGE.format(name)))
    version, shown = (
        _one(connection, f"SELECT current_setting('{name}')") for name in ("server_version_num", "server_version")
    )
    if int(version) < OLDEST_VERSION:
        found.append(problem(_SETTINGS, f"PostgreSQL {shown} is too old", "PostgreSQL 13 or newer"))
    encoding = _one(
        connection, "SELECT pg_encoding_to_char(encoding) FROM pg_database WHERE datname = current_database()"
    )
    if encoding != "UTF8":
        found.append(problem(_SETTINGS, f"its encoding is {encoding}: not every text can be stored", _NEW_DATABASE))
    return found or [fine(_SETTINGS, f"PostgreSQL {shown}, {encoding}, fsync, full_page_writes and autovacuum are on")]


_NEW_DATABASE = "createdb -T template0 -E UTF8 NAME, and move there with replaybuf save and resume"


def look_at_connections(connection: Connection, look: Look) -> Sequence[Finding]:
    """Whether there is room for more connections."""
    used = _one(connection, "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'")
    most = int(_one(connection, "SELECT current_setting('max_connections')"))
    what = f"{used:,} of {most:,} connections are in use"
    if used >= MOST_CONNECTIONS * most:
        mend = "raise max_connections, or put pgbouncer in between (each open buffer takes up to 16)"
        return [warning(_CONNECTIONS, what, mend)]
    return [fine(_CONNECTIONS, what)]


def look_at_held(connection: Connection, look: Look) -> Sequence[Finding]:
    """Whether a transaction that was left open keeps dead rows from being cleaned up."""
    found = []
    idle = connection.execute(text(_IDLE), {"seconds": LONG_SECONDS}).all()
    if idle:
        pids = [row.pid for row in idle]
        what = f"sessions with a transaction open for more than {LONG_SECONDS} s, so that nothing is cleaned up: "
        mend = f"end them in their programs, or SELECT pg_terminate_backend({pids[0]})"
        found.append(
            warning(_HELD, what + some([f"{row.pid} ({row.application_name}, {row.state})" for row in idle]), mend)
        )
    prepared = list(connection.execute(text(_PREPARED), {"seconds": LONG_SECONDS}).scalars())
    if prepared:
        what = f"prepared transactions, so that nothing is cleaned up: {some(prepared)}"
        found.append(warning(_HELD, what, f"COMMIT PREPARED '{prepared[0]}', or ROLLBACK PREPARED"))
    return found or [fine(_HELD, "nothing holds back the cleaning up of dead rows")]


_IDLE = """
SELECT pid, application_name, state FROM pg_stat_activity
 WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'
   AND xact_start < clock_timestamp() - make_interval(secs => :seconds) ORDER BY xact_start
"""
_PREPARED = """
SELECT gid FROM pg_prepared_xacts
 WHERE database = current_database() AND prepared < clock_timestamp() - make_interval(secs => :seconds)
"""


def look_at_space(connection: Connection, look: Look) -> Sequence[Finding]:
    """Whether dead rows are cleaned up."""
    size = _one(connection, "SELECT pg_database_size(current_database())")
    rows = connection.execute(text(_DEAD), {"names": sorted(metadata.tables)}).all()
    bloated = [
        f"{row.relname} ({row.n_dead_tup:,} dead, {row.n_live_tup:,} live, vacuum {row.last or 'never'})"
        for row in rows
        if row.n_dead_tup >= MANY_DEAD and row.n_dead_tup > row.n_live_tup
    ]
    if bloated:
        name = bloated[0].split(" ")[0]
        return [warning(_SPACE, f"more dead rows than live ones: {some(bloated)}", f"VACUUM (ANALYZE) {name}")]
    dead = sum(row.n_dead_tup for row in rows)
    return [fine(_SPACE, f"{units.size(size)}, {dead:,} dead rows wait for autovacuum")]


_DEAD = """
SELECT relname, n_dead_tup, n_live_tup, greatest(last_vacuum, last_autovacuum)::timestamp(0)::text AS last
  FROM pg_stat_user_tables WHERE relname = ANY(:names) ORDER BY relname
"""


def look_at_integrity(connection: Connection, look: Look) -> Sequence[Finding]:
    """What the server knows of damaged pages; with the extension amcheck, whether the indexes are as they should be."""
    failures = _one(connection, "SELECT checksum_failures FROM pg_stat_database WHERE datname = current_database()")
    if failures:
        return [problem(_INTEGRITY, f"the server found {failures:,} damaged pages", "restore it from a backup")]
    if _one(connection, "SELECT current_setting('data_checksums')") == "off":
        mend = "stop the server, then pg_checksums --enable"
        found = [warning(_INTEGRITY, "the server has no checksums of its pages: it doesn't see damage", mend)]
    else:
        found = [fine(_INTEGRITY, "the server checks its pages, and found no damage")]
    if not _one(connection, "SELECT 1 FROM pg_extension WHERE extname = 'amcheck'"):
        return found
    wrong = [f"{name}: {why}" for name, why in _damaged_indexes(connection)]
    if wrong:
        name = wrong[0].split(":")[0]
        return [*found, problem(_INTEGRITY, f"damaged indexes: {some(wrong, 3)}", f"REINDEX INDEX CONCURRENTLY {name}")]
    return [*found, fine(_INTEGRITY, "amcheck found nothing in the indexes")]


def _damaged_indexes(connection: Connection) -> list[tuple[str, str]]:
    query = """
    SELECT c.oid, c.relname FROM pg_index i
      JOIN pg_class c ON c.oid = i.indexrelid JOIN pg_class t ON t.oid = i.indrelid JOIN pg_am a ON a.oid = c.relam
     WHERE a.amname = 'btree' AND i.indisvalid AND t.relname = ANY(:names) ORDER BY c.relname
    """
    wrong = []
    for oid, name in connection.execute(text(query), {"names": sorted(metadata.tables)}).all():
        try:
            with connection.begin_nested():
                connection.execute(text("SELECT bt_index_check(:index)"), {"index": oid})
        except Exception as error:
            wrong.append((name, str(error.__cause__ or error)))
    return wrong


FIRST = (Check(_ACCESS, look_at_access), Check(_SETTINGS, look_at_settings), Check(_CONNECTIONS, look_at_connections))
CHECKS = (Check(_INTEGRITY, look_at_integrity),)
LAST = (Check(_HELD, look_at_held), Check(_SPACE, look_at_space))
