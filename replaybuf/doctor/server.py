"""Checks of PostgreSQL: the server's settings, what holds it back, and what it knows of its own files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from replaybuf import units
from replaybuf.doctor.finding import Check, Finding, Look, fine, problem, some, warning
from replaybuf.storage.sql.inspection.checkup import server
from replaybuf.storage.sql.inspection.overview import database_bytes

if TYPE_CHECKING:
    from replaybuf.storage.sql.inspection.reader import Transaction

_ACCESS, _SETTINGS, _CONNECTIONS, _HELD, _INTEGRITY, _SPACE = (
    "access",
    "settings",
    "connections",
    "vacuum",
    "integrity",
    "space",
)

#: The version that the statements need; the oldest one tested is newer.
OLDEST_VERSION = 130000
#: The share of all connections that may be in use.
MOST_CONNECTIONS = 0.8
#: Seconds after which an open transaction is a finding: it keeps dead rows from being cleaned up.
LONG_SECONDS = 300
#: The number of dead rows of a table that autovacuum should have cleaned up.
MANY_DEAD = 100_000

#: Settings that should be on, and why.
_WANTED = {
    "fsync": "a power cut or a crash of the system can destroy the database",
    "full_page_writes": "a power cut in the middle of a write can destroy pages",
    "autovacuum": "dead rows pile up, and everything becomes slower",
}
_CHANGE = "ALTER SYSTEM SET {0} = on; SELECT pg_reload_conf()"
_NEW_DATABASE = "createdb -T template0 -E UTF8 NAME, and move there with replaybuf save and resume"


def look_at_access(tx: Transaction, look: Look) -> Sequence[Finding]:
    """Check whether this user has the privileges that a run needs."""
    access = server.read_access(tx)
    user = access.user
    if access.standby:
        return [problem(_ACCESS, "the server is a standby, which can't be written", "give the URL of the primary")]
    if access.lacking:
        mend = f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {user}, and USAGE on sequences"
        return [problem(_ACCESS, f"the user {user} lacks {some(access.lacking, 3)}", mend)]
    return [fine(_ACCESS, f"the user {user} may read and write all tables")]


def look_at_settings(tx: Transaction, look: Look) -> Sequence[Finding]:
    """Check whether the server keeps commits and cleans up. Every run sets synchronous_commit itself."""
    settings = server.read_settings(tx, *_WANTED)
    version, encoding = f"PostgreSQL {settings.version}", settings.encoding
    found = [
        problem(_SETTINGS, f"{name} is off: {why}", _CHANGE.format(name))
        for name, why in _WANTED.items()
        if name in settings.off
    ]
    if settings.number < OLDEST_VERSION:
        found.append(problem(_SETTINGS, f"{version} is too old", "PostgreSQL 13 or newer"))
    if encoding != "UTF8":
        found.append(problem(_SETTINGS, f"its encoding is {encoding}: not every text can be stored", _NEW_DATABASE))
    return found or [fine(_SETTINGS, f"{version}, {encoding}, fsync, full_page_writes and autovacuum are on")]


def look_at_connections(tx: Transaction, look: Look) -> Sequence[Finding]:
    """Check whether there is room for more connections."""
    used, most = server.count_connections(tx)
    what = f"{used:,} of {most:,} connections are in use"
    if used >= MOST_CONNECTIONS * most:
        mend = "raise max_connections, or put pgbouncer in between (each open buffer takes up to 16)"
        return [warning(_CONNECTIONS, what, mend)]
    return [fine(_CONNECTIONS, what)]


def look_at_held(tx: Transaction, look: Look) -> Sequence[Finding]:
    """Check whether a forgotten transaction keeps dead rows from being cleaned up."""
    found = []
    if idle := server.long_sessions(tx, LONG_SECONDS):
        sessions = some([f"{one.pid} ({one.application}, {one.state})" for one in idle])
        what = f"sessions with a transaction open for more than {LONG_SECONDS} s, so that nothing is cleaned up: "
        mend = f"end them in their programs, or SELECT pg_terminate_backend({idle[0].pid})"
        found.append(warning(_HELD, what + sessions, mend))
    if prepared := server.long_prepared(tx, LONG_SECONDS):
        what = f"prepared transactions, so that nothing is cleaned up: {some(prepared)}"
        found.append(warning(_HELD, what, f"COMMIT PREPARED '{prepared[0]}', or ROLLBACK PREPARED"))
    return found or [fine(_HELD, "nothing holds back the cleaning up of dead rows")]


def look_at_space(tx: Transaction, look: Look) -> Sequence[Finding]:
    """Check whether dead rows are cleaned up."""
    tables = server.read_rows(tx)
    if bloated := [one for one in tables if one.dead >= MANY_DEAD and one.dead > one.live]:
        shown = some([f"{t.table} ({t.dead:,} dead, {t.live:,} live, vacuum {t.vacuumed or 'never'})" for t in bloated])
        return [warning(_SPACE, f"more dead rows than live ones: {shown}", f"VACUUM (ANALYZE) {bloated[0].table}")]
    dead = sum(one.dead for one in tables)
    return [fine(_SPACE, f"{units.size(database_bytes(tx))}, {dead:,} dead rows wait for autovacuum")]


def look_at_integrity(tx: Transaction, look: Look) -> Sequence[Finding]:
    """Check what the server knows of damaged pages, and, with the extension amcheck, its indexes."""
    if failures := server.count_damaged_pages(tx):
        return [problem(_INTEGRITY, f"the server found {failures:,} damaged pages", "restore it from a backup")]
    if server.has_page_checksums(tx):
        found = [fine(_INTEGRITY, "the server checks its pages, and found no damage")]
    else:
        mend = "stop the server, then pg_checksums --enable"
        found = [warning(_INTEGRITY, "the server has no checksums of its pages: it doesn't see damage", mend)]
    damaged = server.damaged_indexes(tx)
    if damaged is None:
        return found
    if damaged:
        mend = f"REINDEX INDEX CONCURRENTLY {damaged[0][0]}"
        wrong = some([f"{name}: {why}" for name, why in damaged], 3)
        return [*found, problem(_INTEGRITY, f"damaged indexes: {wrong}", mend)]
    return [*found, fine(_INTEGRITY, "amcheck found nothing in the indexes")]


FIRST = (Check(_ACCESS, look_at_access), Check(_SETTINGS, look_at_settings), Check(_CONNECTIONS, look_at_connections))
CHECKS = (Check(_INTEGRITY, look_at_integrity),)
LAST = (Check(_HELD, look_at_held), Check(_SPACE, look_at_space))
