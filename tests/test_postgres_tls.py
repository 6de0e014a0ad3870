"""TLS to PostgreSQL: who is trusted, what is refused before and while connecting, and certificates that are renewed.

The proxy speaks TLS for the tests' server, which is built without.
"""

from __future__ import annotations

import asyncio
import shutil
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import make_url

from replaybuf.errors import ConfigError, ReplayBufError, UnreachableError
from replaybuf.storage.sql.engine.database import Access
from replaybuf.storage.sql.engine.urls import parse_url
from replaybuf.storage.sql.inspection.reader import open_reader
from replaybuf.storage.sql.inspection.writer import over_sqlalchemy
from tests.bad_input.conftest import refused_put
from tests.certificates import Authority, Signed
from tests.faults.proxy import Proxy, proxied
from tests.faults.test_postgres_connections import END_ALL
from tests.postgres import execute
from tests.stores import TASK, build, fill, group, take_all

HOSTS = ("localhost", "127.0.0.1")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def server(authority: Authority) -> Signed:
    return authority.sign("server", *HOSTS)


@pytest.fixture(scope="module")
def trainer(authority: Authority) -> Signed:
    return authority.sign("trainer")


@pytest.fixture(autouse=True)
def _no_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nobody's own ~/.postgresql has a part in this."""
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture
async def proxy(lent_database: str, authority: Authority, server: Signed) -> AsyncIterator[Proxy]:
    async with proxied(lent_database, authority.server_context(server)) as proxy:
        yield proxy


def with_options(proxy: Proxy, *options: str) -> str:
    return f"{proxy.url}?{'&'.join(options)}"


# Who is trusted


async def test_a_run_reads_and_writes_by_tls_with_a_certificate_of_its_own(
    lent_database: str, authority: Authority, server: Signed, trainer: Signed
) -> None:
    """So do readers, and what upgrades."""
    context = authority.server_context(server, wants_certificates=True)
    async with proxied(lent_database, context) as proxy:
        url = with_options(proxy, "sslmode=verify-full", f"sslrootcert={authority.certificate}", trainer.options)
        async with build(url) as buffer:
            await fill(buffer, 20)
            assert await take_all(buffer) == list(range(20))
        assert await asyncio.to_thread(open_reader(url).read, lambda tx: tx.value("SELECT count(*) FROM rb_group")) == 0
        assert (
            await over_sqlalchemy(
                Access(parse_url(url)), lambda connection: connection.exec_driver_sql("SELECT 7").scalar()
            )
            == 7
        )
        assert len(proxy.shown) == len(proxy.links) > 2  # one of each at least
        names = {dict(part[0] for part in certificate["subject"])["commonName"] for certificate in proxy.shown}  # type: ignore[index]
        assert names == {"trainer"}


@pytest.mark.parametrize(
    ("name", "days", "message"),
    [("127.0.0.1", -1, "certificate has expired"), ("db", 1, "not valid for '127.0")],
)
async def test_a_server_that_is_not_trusted_is_refused_with_the_reason(
    lent_database: str, authority: Authority, name: str, days: int, message: str
) -> None:
    context = authority.server_context(authority.sign("untrusted", name, days=days))
    async with proxied(lent_database, context) as proxy:
        error = await not_connected(
            with_options(proxy, "sslmode=verify-full", f"sslrootcert={authority.certificate}"), message
        )
        assert "see TLS in docs" in str(error)
        assert proxy.links == []  # nothing was sent


async def not_connected(url: str, message: str) -> ReplayBufError:
    error = await refused_put(url, UnreachableError)
    assert message in str(error)
    return error


async def test_of_several_hosts_one_that_is_trusted_is_enough(
    lent_database: str, authority: Authority, server: Signed
) -> None:
    """And where none is, the reason is told."""
    expired_context = authority.server_context(authority.sign("old", *HOSTS, days=-1))
    async with proxied(lent_database, expired_context) as first, proxied(lent_database, expired_context) as second:
        hosts = ",".join(f"127.0.0.1:{make_url(trusting.url).port}" for trusting in (first, second))
        parts = make_url(lent_database)
        url = f"postgresql://{parts.username}@{hosts}/{parts.database}?sslmode=verify-full"
        url += f"&sslrootcert={authority.certificate}"
        await not_connected(url, "certificate has expired")
        await not_connected(url.replace(hosts, f"127.0.0.1:1,{hosts}"), "certificate has expired")
        second.tls = authority.server_context(server)
        async with build(url) as buffer:
            await buffer.put(group(1), TASK)
        assert (first.links, bool(second.links)) == ([], True)


async def test_a_server_without_tls_is_refused_where_tls_is_asked_for(lent_database: str) -> None:
    async with proxied(lent_database) as proxy:
        await not_connected(with_options(proxy, "sslmode=require"), "rejected SSL upgrade; see TLS in docs")
        async with build(with_options(proxy, "sslmode=prefer")) as buffer:
            await buffer.put(group(1), TASK)


async def test_what_the_driver_makes_nothing_of_is_an_error_with_the_reason(proxy: Proxy, authority: Authority) -> None:
    for options, kind, message in (
        (["sslmode=verify_all"], ConfigError, "`sslmode` parameter must be one of: disable, allow"),
        (["sslmode=verify-full"], ConfigError, 'root.crt" does not exist'),
        (
            ["sslmode=require", f"sslrootcert={authority.certificate}", "ssl_min_protocol_version=TLSv9"],
            ConfigError,
            "No such TLS version: TLSv9",
        ),
        (
            ["sslmode=verify-ca", f"sslrootcert={authority.sign('trainer').key}"],
            UnreachableError,
            "NO_CERTIFICATE_OR_CRL_FOUND",
        ),
    ):
        assert message in str(await refused_put(with_options(proxy, *options), kind))


# Where the files are


async def test_the_cas_of_the_machine_may_be_trusted(
    proxy: Proxy, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenSSL's variable stands in for the folder of the system. The mode is verify-full, as libpq's."""
    await not_connected(with_options(proxy, "sslrootcert=system"), "see TLS in docs")
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))
    async with build(with_options(proxy, "sslrootcert=system")) as buffer:
        await buffer.put(group(1), TASK)


# Certificates that change while a run goes on


async def test_new_connections_have_the_certificates_that_are_there_by_then(lent_database: str, tmp_path: Path) -> None:
    """Of the server, its CA and the client. Between two of them the run waits: nothing is lost."""
    first, second = Authority(tmp_path / "1", "1"), Authority(tmp_path / "2", "2")
    root, own_copy, key = tmp_path / "root.crt", tmp_path / "mine.crt", tmp_path / "mine.key"

    def install(authority: Authority) -> None:
        client = authority.sign("trainer")
        for source, target in ((authority.certificate, root), (client.certificate, own_copy), (client.key, key)):
            shutil.copy(source, target)

    def speaks(authority: Authority) -> ssl.SSLContext:
        return authority.server_context(authority.sign("server", *HOSTS), wants_certificates=True)

    install(first)
    async with proxied(lent_database, speaks(first)) as proxy:
        url = with_options(proxy, "sslmode=verify-full", f"sslrootcert={root}&sslcert={own_copy}&sslkey={key}")
        async with build(url) as buffer:
            await buffer.put(group(0), TASK)
            proxy.tls = speaks(second)
            execute(lent_database, END_ALL)
            putting = asyncio.create_task(buffer.put(group(1), TASK))
            await asyncio.wait([putting], timeout=0.3)
            assert not putting.done()
            root.unlink()  # in the middle of a renewal
            await asyncio.wait([putting], timeout=0.3)
            assert not putting.done()
            install(second)
            await asyncio.wait_for(putting, 20)
            assert await take_all(buffer) == [0, 1]
