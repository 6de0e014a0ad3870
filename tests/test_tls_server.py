"""A server that speaks TLS itself, and knows its clients by their certificates."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest

from replaybuf.errors import AccessError, ReplayBufError, UnreachableError
from tests.bad_input.calls import refused_put
from tests.certificates import Authority
from tests.faults.test_postgres_connections import END_ALL
from tests.postgres import execute
from tests.stores import TASK, build, fill, group, take_all, until
from tests.tls_server import TLSServer, tls_server

pytestmark = [
    pytest.mark.long,
    # A connection by TLS that the server ends is still saying goodbye when its loop is closed: asyncio leaves it to the
    # collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[TLSServer]:
    with tls_server() as server:
        execute(server.owner, "CREATE ROLE certified LOGIN SUPERUSER")
        execute(server.owner, "CREATE ROLE guarded LOGIN SUPERUSER PASSWORD 'geheim'")
        yield server


@pytest.fixture(autouse=True)
def _no_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))


def verified(server: TLSServer, user: str, *options: str) -> str:
    return server.url(user, "sslmode=verify-full", f"sslrootcert={server.authority.certificate}", *options)


async def test_a_run_by_a_certificate_alone(server: TLSServer) -> None:
    url = verified(server, "certified", server.authority.sign("certified").options)
    async with build(url, name="certified") as buffer:
        await fill(buffer, 50)
        await buffer.checkpoint(1)
        assert await take_all(buffer) == list(range(50))
        await buffer.restore(1)
        assert await take_all(buffer) == list(range(50))
        connection = await asyncpg.connect(server.owner)
        try:
            seen = await connection.fetch(
                "SELECT DISTINCT ssl, version, client_dn FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) "
                "WHERE usename = 'certified'"
            )
        finally:
            await connection.close()
    assert [tuple(row) for row in seen] == [(True, "TLSv1.3", "/CN=certified")]


async def refused(url: str, kind: type[ReplayBufError], message: str) -> None:
    assert message in str(await refused_put(url, kind))


async def test_clients_that_are_refused_are_told_why(server: TLSServer, tmp_path: Path) -> None:
    authority = server.authority
    strange = Authority(tmp_path / "strange", "strangers").sign("certified")
    expired = authority.sign("certified", days=-1, file="expired")
    await refused(verified(server, "certified"), AccessError, "requires a valid client certificate; create the role")
    await refused(
        verified(server, "certified", authority.sign("somebody").options),
        AccessError,
        'certificate authentication failed for user "certified"; create the role',
    )
    # The reason, or, if the end of the connection overtakes it, the question.
    for unfit in (strange, expired):
        await refused(verified(server, "certified", unfit.options), UnreachableError, "client's certificate (sslcert)")
    await refused(server.url("guarded", "sslmode=disable"), AccessError, "by TLS (sslmode=verify-full) or")
    await refused(server.url("nobody", "sslmode=disable"), AccessError, "no pg_hba.conf entry")
    await refused(verified(server, "guarded"), AccessError, "password")


async def is_expired(server: TLSServer) -> bool:
    try:
        connection = await asyncpg.connect(verified(server, "postgres"))
    except ssl.SSLCertVerificationError:
        return True
    await connection.close()
    return False


async def test_a_certificate_that_expires_holds_a_run_up_until_there_is_a_new_one(server: TLSServer) -> None:
    """New connections are refused by the client; nothing is lost."""
    async with build(verified(server, "postgres"), name="expiring") as buffer:
        await fill(buffer, 10)
        server.install(server.authority.sign("old", "localhost", "127.0.0.1", days=-1))
        server.reload()
        await until(lambda: is_expired(server))
        execute(server.owner, END_ALL)
        waiting = [asyncio.create_task(buffer.put(group(number), TASK)) for number in range(10, 20)]
        await asyncio.wait(waiting, timeout=1)
        assert not any(one.done() for one in waiting)
        server.install(server.authority.sign("server", "localhost", "127.0.0.1"))
        server.reload()
        await asyncio.wait_for(asyncio.gather(*waiting), 20)
        assert await take_all(buffer) == list(range(20))
