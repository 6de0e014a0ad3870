"""A cluster of PostgreSQL in a test: a primary and its standby, which tests kill, promote and bring back."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.faults.conftest import _no_process_is_left, figures
from tests.postgres import ask, ended_with_us, execute, folder_of_servers

__all__ = ["_no_process_is_left", "figures"]


@pytest.fixture(scope="package")
def _cluster() -> Iterator[Cluster]:
    with running_cluster() as cluster:
        yield cluster


@pytest.fixture
def synchronous(_cluster: Cluster) -> Cluster:
    """Its commits wait for the standby."""
    _cluster.get_ready(synchronous=True)
    return _cluster


@pytest.fixture
def asynchronous(_cluster: Cluster) -> Cluster:
    """Its commits don't."""
    _cluster.get_ready(synchronous=False)
    return _cluster


_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "max_connections": "100",
    "shared_buffers": "16MB",
    "wal_keep_size": "512MB",
    "max_wal_senders": "5",
    "hot_standby": "on",
    "wal_receiver_status_interval": "1s",
    "wal_retrieve_retry_interval": "100ms",
    "fsync": "off",  # no process that is killed takes with it what the kernel has of a file
}


class Node:
    """One server of a cluster, on a port of its own that it keeps."""

    def __init__(self, folder: Path, programs: Path, user: str | None) -> None:
        self.folder, self._programs, self._user = folder, programs, user
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def url(self, database: str) -> str:
        return f"postgresql://postgres@{self.address}/{database}"

    def run(self, program: str, *arguments: str) -> None:
        command = [str(self._programs / program), *arguments]
        result = subprocess.run(
            command, user=self._user, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=60, cwd="/"
        )
        log = self.folder.parent / f"{self.folder.name}.log"
        end = log.read_text()[-1000:] if log.exists() else ""
        assert result.returncode == 0, f"{result.stderr.decode()[-1000:]}\n{end}"

    def create(self) -> None:
        self.run("initdb", "-A", "trust", "-E", "utf8", "-U", "postgres", "--no-sync", "-D", str(self.folder))
        with open(self.folder / "postgresql.conf", "a") as file:
            file.writelines(f"{name} = '{value}'\n" for name, value in _SETTINGS.items())

    def copy_of(self, primary: Node) -> None:
        """Become a standby of another node, which runs."""
        shutil.rmtree(self.folder, ignore_errors=True)
        source = f"host=127.0.0.1 port={primary.port} user=postgres"
        self.run("pg_basebackup", "-D", str(self.folder), "-d", source, "-R", "-X", "stream", "-c", "fast", "--no-sync")
        with open(self.folder / "postgresql.auto.conf", "a") as file:
            file.write("synchronous_standby_names = ''\n")

    def follow_nobody(self) -> None:
        """Be a standby from the next start on, whose primary is away."""
        (self.folder / "standby.signal").touch()
        with open(self.folder / "postgresql.auto.conf", "a") as file:
            file.write("primary_conninfo = ''\n")

    def start(self) -> None:
        options = f"-p {self.port} -k ''"
        log = str(self.folder.parent / f"{self.folder.name}.log")
        self.run("pg_ctl", "-w", "-t", "60", "-D", str(self.folder), "-l", log, "-o", options, "start")

    def promote(self) -> None:
        """Make a standby the primary, and wait until it is one."""
        self.run("pg_ctl", "-w", "-t", "60", "-D", str(self.folder), "promote")

    def processes(self) -> list[psutil.Process]:
        """The postmaster, and its children."""
        with suppress(OSError, psutil.NoSuchProcess, ValueError, IndexError):
            postmaster = psutil.Process(int((self.folder / "postmaster.pid").read_text().split()[0]))
            return [postmaster, *postmaster.children()]
        return []

    def kill(self) -> None:
        """SIGKILL to all of its processes, and wait until they are gone."""
        running = self.processes()
        for process in running:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for _ in range(1_000):
            if not any(map(_runs, running)):
                # The next one to start would take a zombie for a server.
                (self.folder / "postmaster.pid").unlink(missing_ok=True)
                return
            time.sleep(0.01)
        raise TimeoutError(f"{self.address} is there 10 s after it was killed")

    def ask(self, question: str) -> list[Any]:
        """The first column of the answer."""
        return asked(self.url("postgres"), question)

    def ask_in(self, url: str, question: str) -> list[Any]:
        """The same in the database of a URL."""
        return asked(self.url(url.rpartition("/")[2]), question)


class Cluster:
    """Two nodes: a primary, and its standby, which change places at each failover."""

    def __init__(self, folder: Path, programs: Path, user: str | None) -> None:
        self.nodes = self.primary, self.standby = Node(folder / "a", programs, user), Node(folder / "b", programs, user)
        self.primary.create()
        self.primary.start()
        self._attached = False

    def get_ready(self, *, synchronous: bool) -> None:
        """Have a standby, without which nothing is committed if it is `synchronous`."""
        names = "*" if synchronous else ""
        if not self._attached:
            self.standby.kill()
            self.standby.copy_of(self.primary)
            self.standby.start()
            self._attached = True
        execute(self.primary.url("postgres"), f"ALTER SYSTEM SET synchronous_standby_names = '{names}'")
        execute(self.primary.url("postgres"), "SELECT pg_reload_conf()")
        self._wait_for(["sync" if synchronous else "async"], "SELECT sync_state FROM pg_stat_replication")

    def _wait_for(self, answer: list[str], question: str) -> None:
        for _ in range(600):
            if self.primary.ask(question) == answer:
                return
            time.sleep(0.05)
        raise TimeoutError(f"after 30 s not yet {answer}: {question}")

    def new_database(self) -> str:
        """The URL of a new database, with both nodes as hosts."""
        name = f"rl_{uuid.uuid4().hex[:8]}"
        execute(self.primary.url("postgres"), f"CREATE DATABASE {name}")
        return f"postgresql://postgres@{','.join(node.address for node in self.nodes)}/{name}"

    def lose_standby(self) -> None:
        """End the standby: nothing is committed any more if commits wait for it."""
        self._attached = False
        self.standby.kill()

    def return_standby(self) -> None:
        """Start it again, where it was."""
        self.standby.start()
        self._attached = True

    def hold_back(self) -> None:
        """From now on nothing reaches the standby any more."""
        self._attached = False
        for pid in self.primary.ask("SELECT pid FROM pg_stat_replication"):
            os.kill(pid, signal.SIGSTOP)

    def fail_over(self, pause: float = 0.0) -> float:
        """Kill the primary and, after a pause, promote the standby: they change places. Return when it was promoted."""
        self.primary.kill()
        time.sleep(pause)
        self.promote()
        return time.monotonic()

    def promote(self) -> None:
        """Make the standby another primary; the old one is the standby from now on, to be made one."""
        self._attached = False
        self.standby.promote()
        self.primary, self.standby = self.standby, self.primary

    def close(self) -> None:
        for node in self.nodes:
            node.kill()


def _runs(process: psutil.Process) -> bool:
    """Whether a process is there, and no zombie that nobody has waited for yet."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def asked(url: str, question: str) -> list[Any]:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, ask(url, question)).result()


@contextmanager
def running_cluster() -> Iterator[Cluster]:
    """A new cluster that runs until the block is left, or this process ends."""
    with (
        folder_of_servers("rb-cl-") as (folder, programs, user),
        ended_with_us(str(folder / "a")),
        ended_with_us(str(folder / "b")),
    ):
        cluster = Cluster(folder, programs, user)
        try:
            yield cluster
        finally:
            cluster.close()
