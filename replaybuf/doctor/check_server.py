"""Checks of PostgreSQL: the rights of its user, its standbys, damage that it reports, each server in the URL."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from replaybuf import units
from replaybuf.doctor import Check, CheckContext, Finding, fine, problem, warning
from replaybuf.errors import ReplayBufError
from replaybuf.storage.sql.engine.errors import says_unknown, translated
from replaybuf.storage.sql.engine.postgres_pool import Pool
from replaybuf.storage.sql.engine.postgres_recovery import ASK as ASK_STANDBYS
from replaybuf.storage.sql.engine.postgres_recovery import Synchronous
from replaybuf.storage.sql.engine.urls import Host, hosts_of, url_at
from replaybuf.storage.sql.inspection.reader import LOCK_TIMEOUT, Reader, ReadTransaction
from replaybuf.storage.sql.schema.records import metadata
from replaybuf.storage.sql.schema.tables import uid_sequence
from replaybuf.units import some

_TABLES = sorted(metadata.tables)

_STANDBY = problem("the server is a standby, which can't be written", "give the URL of the primary")

_LACKING = """
SELECT r || ' on ' || t FROM unnest(CAST(:tables AS text[])) t, unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) r
WHERE NOT has_table_privilege(t, r)
UNION ALL SELECT 'USAGE on ' || s FROM CAST(:sequence AS text) s WHERE NOT has_sequence_privilege(s, 'USAGE')"""


def find_access(tx: ReadTransaction, context: CheckContext) -> Sequence[Finding]:
    """Check whether this user has the privileges that a run needs."""
    [(user, standby)] = tx.table("SELECT current_user, pg_is_in_recovery()")[1]
    if standby:
        return [_STANDBY]
    if lacking := tx.values(_LACKING, tables=_TABLES, sequence=uid_sequence.name):
        mend = f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {user}, and USAGE on sequences"
        return [problem(f"the user {user} lacks {some(lacking, 3)}", mend)]
    return [fine(f"the user {user} may read and write all tables")]


_MAKES_TABLES = """
SELECT current_user, coalesce(current_schema(), ''), pg_is_in_recovery(),
    coalesce(has_schema_privilege(current_schema(), 'CREATE'), false)"""


def find_may_make_tables(tx: ReadTransaction, context: CheckContext) -> Sequence[Finding]:
    """Check whether this user may create the tables, if they don't exist."""
    [(user, schema, standby, may)] = tx.table(_MAKES_TABLES)[1]
    if standby:
        return [_STANDBY]
    if not schema:
        mend = f"ALTER ROLE {user} SET search_path = public, or name another schema that is there"
        return [problem(f"no schema of the search path of the user {user} is there", mend)]
    if not may:
        mend = (
            "as the owner: replaybuf doctor URL --upgrade, and the GRANTs of docs/postgresql-access.md; or, "
            f"for this user to make them: GRANT CREATE ON SCHEMA {schema} TO {user}"
        )
        return [problem(f"the user {user} may not make the tables: it lacks CREATE on the schema {schema}", mend)]
    return [fine(f"the user {user} may make the tables in the schema {schema}")]


#: Seconds after which a commit that waits for a standby is a finding.
WAITING_SECONDS = 1.0


def find_replication(tx: ReadTransaction, context: CheckContext) -> Sequence[Finding]:
    """Check whether the synchronous standbys that commits wait for are connected."""
    if tx.value("SELECT pg_is_in_recovery()"):
        return [fine("the server is a standby: commits are made elsewhere")]
    try:
        found = Synchronous(*tx.table(ASK_STANDBYS.format(seconds=WAITING_SECONDS))[1][0])
    except Exception as error:
        if not says_unknown(error):
            raise
        return [fine("the server doesn't say whether commits wait for standbys")]
    waiting = f"; {units.number_of(found.waiting, 'commit')} of this user's wait at the moment" if found.waiting else ""
    if not found.wanted:
        return [fine("commits wait for no standby (synchronous_standby_names is empty)")]
    if found.is_short or (found.waiting and found.there is None):
        return [problem(f"commits wait for a synchronous standby: {found}{waiting}", found.what_to_do)]
    if found.waiting:
        return [warning(f"commits wait for longer than {WAITING_SECONDS:g} s: {found}{waiting}", found.what_to_do)]
    if found.there is None:
        mend = f"GRANT pg_monitor TO {tx.value('SELECT current_user')}, or ask as a superuser"
        return [warning(f"this user may not see whether they are synchronous: {found}", mend)]
    return [fine(f"commits wait for a synchronous standby: {found}")]


_PAGES = """
SELECT coalesce(checksum_failures, 0), current_setting('data_checksums') <> 'off'
FROM pg_stat_database WHERE datname = current_database()"""


def find_integrity(tx: ReadTransaction, context: CheckContext) -> Sequence[Finding]:
    """Check damaged pages reported by the server, and, with the extension amcheck, its indexes."""
    [(failures, has_checksums)] = tx.table(_PAGES)[1]
    if failures:
        return [problem(f"the server found {failures:,} damaged pages", "restore it from a backup")]
    if has_checksums:
        found = [fine("the server checks its pages, and found no damage")]
    else:
        mend = "stop the server, then pg_checksums --enable"
        found = [warning("the server has no checksums of its pages: it doesn't see damage", mend)]
    if not tx.value("SELECT 1 FROM pg_extension WHERE extname = 'amcheck'"):
        return found
    if not tx.value(_MAY_CHECK):
        mend = "GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA public TO this role, or run this as the owner of the extension"
        return [*found, warning("the extension amcheck is installed, and this role may not use it", mend)]
    if damaged := _damaged_indexes(tx):
        mend = f"REINDEX INDEX CONCURRENTLY {next(iter(damaged))}"
        wrong = some([f"{name}: {why}" for name, why in damaged.items()], 3)
        return [*found, problem(f"damaged indexes: {wrong}", mend)]
    return [*found, fine("amcheck found nothing in the indexes")]


_MAY_CHECK = "SELECT bool_and(has_function_privilege(oid, 'EXECUTE')) FROM pg_proc WHERE proname = 'bt_index_check'"
_INDEXES = """
SELECT c.oid, c.relname FROM pg_index i
JOIN pg_class c ON c.oid = i.indexrelid JOIN pg_class t ON t.oid = i.indrelid JOIN pg_am a ON a.oid = c.relam
WHERE a.amname = 'btree' AND i.indisvalid AND t.relname = ANY(:names) ORDER BY c.relname"""


def _damaged_indexes(tx: ReadTransaction) -> dict[str, str]:
    """Return what is wrong with damaged indexes, by name."""
    wrong: dict[str, str] = {}
    rows: list[tuple[Any, ...]] = tx.table(_INDEXES, names=_TABLES)[1]
    for oid, name in rows:
        tx.table("SAVEPOINT rb_index")
        try:
            tx.table("SELECT bt_index_check(:index)", index=oid)
        except Exception as error:
            wrong[name] = str(error.__cause__ or error)
            tx.table("ROLLBACK TO SAVEPOINT rb_index")
    return wrong


_REPLICATION = Check("replication", find_replication)
BEFORE = (Check("access", find_may_make_tables), _REPLICATION)  # the tables
FIRST = (Check("access", find_access), _REPLICATION)
CHECKS = (Check("integrity", find_integrity),)
LAST: tuple[Check, ...] = ()


#: The timeout of a server's answer, in seconds.
ANSWER_SECONDS = 5.0

_ASK = """
SELECT current_setting('server_version'), pg_is_in_recovery(),
    CAST(CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END AS text),
    CAST(extract(epoch FROM clock_timestamp() - pg_last_xact_replay_timestamp()) AS float8),
    (SELECT count(*) FROM pg_stat_wal_receiver)
"""
# Reading it needs a privilege.
_SYSTEM = "SELECT CAST(system_identifier AS text) FROM pg_control_system()"


class _Server(NamedTuple):
    """A server's version, role and WAL position (LSN), and the age in seconds of a standby's last transaction."""

    version: str
    is_standby: bool
    position: str | None
    age: float | None
    receives: int
    system: str | None = None


def check_hosts(reader: Reader, context: CheckContext) -> Sequence[Finding]:
    """Report the role of each server in the URL, or why it can't be used; nothing for a URL that names one server."""
    hosts = list(dict.fromkeys(hosts_of(reader.url)))

    async def ask() -> list[_Server | str]:
        return await asyncio.gather(*(_ask(reader, host) for host in hosts))

    return findings(dict(zip(map(str, hosts), asyncio.run(ask()), strict=True))) if hosts else []


HOSTS = Check("hosts", alone=check_hosts)


class _Answers(str):
    """The error of a server that speaks PostgreSQL's protocol, but has no notion of standbys."""

    __slots__ = ()


async def _ask(reader: Reader, host: Host) -> _Server | str:
    url = url_at(reader.url, host)
    pool = Pool(url, lock_timeout=LOCK_TIMEOUT, read_only=True)
    try:
        with translated(url, LOCK_TIMEOUT):
            async with asyncio.timeout(ANSWER_SECONDS), pool.lend() as connection:
                asked: Any = connection
                return _Server(*await asked.fetchrow(_ASK))._replace(system=await _system(connection))
    except ReplayBufError as error:
        unknown = error.__cause__ is not None and says_unknown(error.__cause__)
        return _Answers(error) if unknown else str(error)
    finally:
        await pool.close()


async def _system(connection: Any) -> str | None:
    try:
        return str(await connection.fetchval(_SYSTEM))
    except Exception:
        return None


def findings(servers: dict[str, _Server | str]) -> Sequence[Finding]:
    """Return the findings about the servers of a cluster, given by address: their roles, lag, and any split brain."""
    there = {name: one for name, one in servers.items() if isinstance(one, _Server)}
    primaries = [name for name, one in there.items() if not one.is_standby]
    newest = max((_bytes(there[name].position) for name in primaries), default=None)
    found = [_missing(name, one) if isinstance(one, str) else _said(name, one, newest) for name, one in servers.items()]
    systems = {one.system for one in there.values()} - {None}
    if len(systems) > 1:
        mend = "name the servers of one cluster in the url: a standby is a copy of its primary (pg_basebackup)"
        found.append(problem(f"the servers are of {len(systems)} different clusters", mend))
    elif len(primaries) > 1:
        mend = "end the one that was replaced, or make it a standby (pg_rewind): docs/failover.md, Two primaries"
        found.append(problem(f"{' and '.join(primaries)} both say that they are the primary", mend))
    if there and not primaries:
        mend = "promote a standby (pg_ctl promote), start the primary, or name it in the url"
        found.append(problem("none of the servers is a primary: no run can write", mend))
    return found


def _missing(name: str, why: str) -> Finding:
    if isinstance(why, _Answers):
        return fine(f"{name} answers, and doesn't say whether it is a standby")
    mend = "start it, or correct its host and port in the url: no failover goes there as it is"
    return warning(f"{name} can't be used: {why}", mend)


def _said(name: str, one: _Server, newest: int | None) -> Finding:
    if not one.is_standby:
        return fine(f"{name} is a primary, PostgreSQL {one.version}")
    what = f"{name} is a standby, PostgreSQL {one.version}"
    behind = None if newest is None or one.position is None else max(0, newest - _bytes(one.position))
    if behind is not None:
        what += f", {units.size(behind)} of WAL behind"
    if behind and one.age is not None:
        what += f" (its last transaction is {one.age:.0f} s old)"
    if not one.receives:
        mend = "see primary_conninfo and the log of the standby: is its primary the one that others write to?"
        return warning(f"{what}, which follows no server at the moment", mend)
    return fine(what)


def _bytes(position: str | None) -> int:
    """Return a WAL position as a number of bytes."""
    high, _, low = (position or "0/0").partition("/")
    return (int(high, 16) << 32) + int(low, 16)
