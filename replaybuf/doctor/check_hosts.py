"""The servers of a URL that names several: is each of them there, and what is it?"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from replaybuf import units
from replaybuf.doctor.findings import Finding, fine, problem, warning
from replaybuf.errors import ReplayBufError
from replaybuf.storage.sql.engine.errors import says_unknown, translated
from replaybuf.storage.sql.engine.postgres_pool import Pool
from replaybuf.storage.sql.engine.urls import Host, hosts_of, url_at
from replaybuf.storage.sql.inspection.reader import LOCK_TIMEOUT, Reader

#: How long a server may take to answer.
ANSWER_SECONDS = 5.0

_ASK = """
SELECT current_setting('server_version'), pg_is_in_recovery(),
    CAST(CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END AS text),
    CAST(extract(epoch FROM clock_timestamp() - pg_last_xact_replay_timestamp()) AS float8),
    (SELECT count(*) FROM pg_stat_wal_receiver)
"""
# Not everybody may ask for it.
_SYSTEM = "SELECT CAST(system_identifier AS text) FROM pg_control_system()"


class _Server(NamedTuple):
    """A server's version, role and WAL position (LSN), and the age of a standby's last transaction, in seconds."""

    version: str
    is_standby: bool
    position: str | None
    age: float | None
    receives: int
    system: str | None = None


def check_hosts(reader: Reader) -> Sequence[Finding]:
    """Say of each server what it is, or why it can't be used; nothing for a URL that names one."""
    hosts = list(dict.fromkeys(hosts_of(reader.url)))
    found: list[_Server | str] = []

    async def ask() -> None:
        found.extend(await asyncio.gather(*(_ask(reader, host) for host in hosts)))

    if hosts:
        asyncio.run(ask())
    return findings(dict(zip(map(str, hosts), found, strict=True)))


class _Answers(str):
    """A server that is there, and speaks PostgreSQL's language without knowing what a standby is."""

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
    """Return a position in the WAL as a number of bytes."""
    high, _, low = (position or "0/0").partition("/")
    return (int(high, 16) << 32) + int(low, 16)
