"""The network between a client and PostgreSQL is cut and mended: the two are in network namespaces of their own."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import asyncpg
import pytest
from sqlalchemy import make_url

from tests.faults.conftest import Figures
from tests.postgres import Server, new_database, own_server
from tests.stores import until


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


class Network:
    """A namespace whose only way out is a cable to this one."""

    def __init__(self) -> None:
        self.space = f"rbtest{os.getpid()}"
        self.end = f"rbt{os.getpid() % 100_000}"  # names of interfaces have at most 15 characters
        self.subnet = f"10.{random.randint(128, 254)}.{random.randint(0, 254)}"
        self.address = f"{self.subnet}.1"

    def make(self, made: ExitStack) -> None:
        ip("netns", "add", self.space)
        made.callback(ip, "netns", "delete", self.space)
        ip("link", "add", self.end, "type", "veth", "peer", "name", "out", "netns", self.space)
        ip("address", "add", f"{self.address}/24", "dev", self.end)
        ip("link", "set", self.end, "up")
        ip("-n", self.space, "address", "add", f"{self.subnet}.2/24", "dev", "out")
        ip("-n", self.space, "link", "set", "out", "up")
        ip("-n", self.space, "link", "set", "lo", "up")

    def cut(self) -> None:
        ip("link", "set", self.end, "down")

    def mend(self) -> None:
        ip("link", "set", self.end, "up")


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("cutting a network needs root and the program ip (iproute2)")
    network = Network()
    with ExitStack() as made:
        try:
            network.make(made)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine makes no network namespaces: {error.stderr.decode().strip()}")
        yield network


@pytest.fixture(scope="module")
def server(network: Network) -> Iterator[Server]:
    with own_server() as server:
        server.admit(f"{network.subnet}.0/24")
        server.stop("fast")
        server.start(f"-c listen_addresses={network.address}")
        yield server


class Worker:
    """`network_worker.py` on the other side."""

    def __init__(self, network: Network, url: str, silence: int, log: Path) -> None:
        self._log = log
        there = make_url(url).set(host=network.address, query={}).render_as_string(hide_password=False)
        command = [sys.executable, "-m", "tests.faults.network_worker", there, str(silence)]
        with log.open("w") as output:
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", network.space, *command],
                stdin=subprocess.PIPE,
                stdout=output,
                cwd=Path(__file__).parents[2],
            )

    def said(self, what: str) -> list[str]:
        lines = [line.partition(" ") for line in self._log.read_text().splitlines(keepends=True)]
        return [value.strip() for word, _, value in lines if word == what and value.endswith("\n")]

    async def goes_on(self, seconds: float) -> None:
        """Wait until 20 more groups have been put, and taken."""
        put, taken = len(self.said("put")), len(self.said("taken"))

        async def went_on() -> bool:
            assert self.process.poll() is None
            return len(self.said("put")) >= put + 20 and len(self.said("taken")) >= taken + 20

        await until(went_on, seconds)

    async def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert await asyncio.to_thread(self.process.wait, 60) == 0

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()


async def clients(url: str, network: Network) -> int:
    connection = await asyncpg.connect(url)
    try:
        query = f"SELECT count(*) FROM pg_stat_activity WHERE client_addr = '{network.subnet}.2'"
        return int(await connection.fetchval(query))
    finally:
        await connection.close()


@pytest.mark.parametrize(
    ("silence", "cut"),
    [(5, 1), (2, 6), pytest.param(20, 3, marks=pytest.mark.long), pytest.param(20, 45, marks=pytest.mark.long)],
)
async def test_a_cut_network_loses_and_doubles_nothing(
    network: Network, server: Server, tmp_path: Path, silence: int, cut: int, figures: Figures
) -> None:
    """Each side gives a connection up after `silence` seconds: a longer cut ends it, a shorter one only stops it.

    (Between a quarter of it and all of it either may happen: it depends on when TCP tries again.)
    """
    with new_database(server.url) as url, ExitStack() as ending:
        worker = Worker(network, url, silence, tmp_path / "said")
        ending.callback(worker.kill)
        await worker.goes_on(30)
        assert await clients(url, network) > 0
        network.cut()
        ending.callback(network.mend)
        await asyncio.sleep(cut)
        if cut > 2 * silence:
            assert await clients(url, network) == 0
        network.mend()
        await worker.goes_on(60)
        await worker.end()

        put, taken = worker.said("put"), worker.said("taken")
        figures.compare(1, [*map(int, put)], [*map(int, taken)])
        assert sorted(taken, key=int) == put == [str(number) for number in range(len(put))]
        assert worker.said("left") == ["0"]
        assert bool(worker.said("WARNING")) == bool(worker.said("INFO"))
        assert worker.said("WARNING") or cut <= 2 * silence
