"""Checks of PostgreSQL: the rights of its user, its standbys, damage that it reports, each server in the URL."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from replaybuf.cli.doctor import Check, CheckContext, Finding, fine, problem, warning
from replaybuf.common import units
from replaybuf.common.units import some
from replaybuf.errors import ReplayBufError
from replaybuf.storage.sql.engine.errors import says_unknown
from replaybuf.storage.sql.engine.outage import ASK as ASK_STANDBYS
from replaybuf.storage.sql.engine.outage import WHAT_TO_DO, Synchronous
from replaybuf.storage.sql.engine.transaction import Transaction
from replaybuf.storage.sql.engine.urls import Host, hosts_of, url_at
from replaybuf.storage.sql.inspection.reader import Reader, open_reader
from replaybuf.storage.sql.schema.records import metadata
from replaybuf.storage.sql.schema.tables import uid_sequence

_STANDBY = problem("the server is a standby, which can't be written", "give the URL of the primary")

_LACKING = """
SELECT r || ' on ' || t FROM unnest(CAST(:tables AS text[])) t, unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) r
WHERE NOT has_table_privilege(t, r)
UNION ALL SELECT 'USAGE on ' || s FROM CAST(:sequence AS text) s WHERE NOT has_sequence_privilege(s, 'USAGE')"""


def _find_access(tx: Transaction, context: CheckContext) -> Sequence[Finding]:
    """Check whether this user has the privileges that a run needs."""
    [(user, standby)] = tx.tuples("SELECT current_user, pg_is_in_recovery()")
    if standby:
        return [_STANDBY]
    if lacking := tx.values(_LACKING, tables=sorted(metadata.tables), sequence=uid_sequence.name):
        mend = f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {user}, and USAGE on sequences"
        return [problem(f"the user {user} lacks {some(lacking, 3)}", mend)]
    return [fine(f"the user {user} may read and write all tables")]


_MAKES_TABLES = """
SELECT current_user, coalesce(current_schema(), ''), pg_is_in_recovery(),
    coalesce(has_schema_privilege(current_schema(), 'CREATE'), false)"""


def _find_may_make_tables(tx: Transaction, context: CheckContext) -> Sequence[Finding]:
    """Check whether this user may create the tables, if they don't exist."""
    [(user, schema, standby, may)] = tx.tuples(_MAKES_TABLES)
    if standby:
        return [_STANDBY]
    if not schema:
        mend = f"ALTER ROLE {user} SET search_path = public, or name another schema that is there"
        return [problem(f"no schema of the search path of the user {user} is there", mend)]
    if not may:
        mend = (
            "as the owner: replaybuf doctor URL --upgrade, and the GRANTs of docs/operating.md; or, "
            f"for this user to make them: GRANT CREATE ON SCHEMA {schema} TO {user}"
        )
        return [problem(f"the user {user} may not make the tables: it lacks CREATE on the schema {schema}", mend)]
    return [fine(f"the user {user} may make the tables in the schema {schema}")]


#: Seconds after which a commit that waits for a standby is a finding.
WAITING_SECONDS = 1.0


def _find_replication(tx: Transaction, context: CheckContext) -> Sequence[Finding]:
    """Check whether the synchronous standbys that commits wait for are connected."""
    if tx.value("SELECT pg_is_in_recovery()"):
        return [fine("the server is a standby: commits are made elsewhere")]
    try:
        found = Synchronous(*tx.table(ASK_STANDBYS.format(seconds=WAITING_SECONDS))[1][0])
    except Exception as error:
        if not says_unknown(error):
            raise
        return [fine("the server doesn't say whether commits wait for standbys")]
    if not found.wanted:
        return [fine("commits wait for no standby (synchronous_standby_names is empty)")]
    said = f"commits wait for a synchronous standby: {found}"
    if found.waiting:
        said += f"; {units.number_of(found.waiting, 'commit')} of this user's wait at the moment"
    if found.standbys < found.wanted:
        return [problem(said, WHAT_TO_DO)]
    return [warning(said, WHAT_TO_DO) if found.waiting else fine(said)]


_PAGES = """
SELECT coalesce(checksum_failures, 0), current_setting('data_checksums') <> 'off'
FROM pg_stat_database WHERE datname = current_database()"""


def _find_integrity(tx: Transaction, context: CheckContext) -> Sequence[Finding]:
    """Check for damaged pages that the server reports."""
    [(failures, has_checksums)] = tx.tuples(_PAGES)
    if failures:
        return [problem(f"the server found {failures:,} damaged pages", "restore it from a backup")]
    if has_checksums:
        return [fine("the server checks its pages, and found no damage")]
    mend = "stop the server, then pg_checksums --enable"
    return [warning("the server has no checksums of its pages: it doesn't see damage", mend)]


_REPLICATION = Check("replication", _find_replication)
#: The checks before the first run has made the tables.
BEFORE = (Check("access", _find_may_make_tables), _REPLICATION)
CHECKS = (Check("access", _find_access), _REPLICATION, Check("integrity", _find_integrity))

# Each server of a URL

_ASK = "SELECT current_setting('server_version'), pg_is_in_recovery()"


class _Server(NamedTuple):
    """The version and the role of a server."""

    version: str
    is_standby: bool


def _check_hosts(reader: Reader, context: CheckContext) -> Sequence[Finding]:
    """Report the role of each server in the URL, or why it can't be used; nothing for a URL that names one server."""
    hosts = list(dict.fromkeys(hosts_of(reader.url)))
    if not hosts:
        return []
    with ThreadPoolExecutor(len(hosts)) as threads:
        answers = threads.map(lambda host: _ask(reader, host), hosts)
    return findings(dict(zip(map(str, hosts), answers, strict=True)))


HOSTS = Check("hosts", alone=_check_hosts)


def _ask(reader: Reader, host: Host) -> _Server | ReplayBufError:
    try:
        one = open_reader(url_at(reader.url, host).render_as_string(hide_password=False))
        return one.read_any(lambda tx: _Server(*tx.tuples(_ASK)[0]))
    except ReplayBufError as error:
        return error


def findings(servers: dict[str, _Server | ReplayBufError]) -> Sequence[Finding]:
    """Return the findings about the servers of a cluster, given by address: their roles, and any split brain."""
    there = {name: one for name, one in servers.items() if isinstance(one, _Server)}
    primaries = [name for name, one in there.items() if not one.is_standby]
    found = []
    for name, one in servers.items():
        if isinstance(one, _Server):
            found.append(fine(f"{name} is a {'standby' if one.is_standby else 'primary'}, PostgreSQL {one.version}"))
        else:
            mend = "start it, or correct its host and port in the url: no failover goes there as it is"
            found.append(warning(f"{name} can't be used: {one}", mend))
    if len(primaries) > 1:
        mend = "end the one that was replaced, or make it a standby (pg_rewind): docs/outages.md, Two primaries"
        found.append(problem(f"{' and '.join(primaries)} both say that they are the primary", mend))
    elif there and not primaries:
        mend = "promote a standby (pg_ctl promote), start the primary, or name it in the url"
        found.append(problem("none of the servers is a primary: no run can write", mend))
    return found
