"""Hosts of one machine, and a server that all of them reach."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from sqlalchemy import make_url

from replaybuf.storage.sql.engine.thread import SILENCE_SECONDS
from tests.faults.conftest import figures as figures
from tests.histories.history import calls_in, numbers_of_calls
from tests.hosts.cable import Host, NoCableError, hosts
from tests.postgres import Server, new_database, own_server
from tests.stores import until


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[list[Host]]:
    with ExitStack() as stack:
        try:
            yield hosts(2, stack)
        except NoCableError as error:
            pytest.skip(str(error))


@pytest.fixture(scope="module")
def server(two_hosts: list[Host]) -> Iterator[Server]:
    """A server that listens at its end of each cable."""
    with own_server() as server:
        for host in two_hosts:
            server.admit(f"{host.address}/32")
        server.stop("fast")
        server.start(f"-c listen_addresses={','.join(host.server for host in two_hosts)}")
        yield server


@pytest.fixture
def database(server: Server, two_hosts: list[Host]) -> Iterator[str]:
    """The URL of an empty database, as this machine reaches it; cables are mended before and after."""
    for host in two_hosts:
        host.set(delay=0.0, loss=0.0, there=True, back=True)
    with new_database(server.url) as url:
        yield url
    for host in two_hosts:
        host.set(delay=0.0, loss=0.0, there=True, back=True)


class Process:
    """A process of `roles` on a host."""

    def __init__(
        self,
        host: Host,
        role: str,
        url: str,
        log: Path,
        *,
        ahead: float = 0.0,
        number: int = 0,
        silence: int = SILENCE_SECONDS,
    ) -> None:
        self.log = log / f"{role}-{number}"
        host_url = make_url(url).set(host=host.server, query={}).render_as_string(hide_password=False)
        command = [sys.executable, "-m", "tests.hosts.roles", role, host_url, *map(str, (ahead, number, silence))]
        with self.log.open("w") as output:
            self._process = subprocess.Popen(
                host.command(*command), stdin=subprocess.PIPE, stdout=output, cwd=Path(__file__).parents[2]
            )

    def done(self, kind: str) -> list[int]:
        """Return the groups of its calls of a kind that have returned."""
        return numbers_of_calls(calls_in([self.log]), kind)

    async def goes_on(self, kind: str, seconds: float, *, more: int = 20) -> None:
        """Wait until calls of a kind have returned with so many more groups."""
        before = len(self.done(kind))

        async def went_on() -> bool:
            assert self._process.poll() is None
            return len(self.done(kind)) >= before + more

        await until(went_on, seconds)

    async def end(self, seconds: float = 90) -> None:
        """End its input, and wait until it has ended as it should."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert await asyncio.to_thread(self._process.wait, seconds) == 0

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
