"""Passwords and tokens are in no log, error, repr, file, page or table, and in no arguments of other processes."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from sqlalchemy import make_url

from replaybuf import ReplayBufferConfig
from replaybuf.errors import UnreachableError
from tests.bad_input.conftest import refused_put
from tests.bad_input.test_passwords import all_logs, shown
from tests.cli.conftest import run
from tests.faults.test_postgres_connections import END_ALL
from tests.postgres import execute
from tests.stores import TASK, fill
from tests.test_pages import program
from tests.web.conftest import client_of

SECRET = "t0ken-geheim"
NAMED = f"{__name__}:token"
_ROOT = Path(__file__).parents[2]


def token() -> str:
    return SECRET


def failing() -> str:
    raise LookupError("no token today")


def files_below(folder: Path) -> Iterator[bytes]:
    for path in folder.rglob("*"):
        if path.is_file():
            yield path.read_bytes()


async def test_what_a_function_returns_is_nowhere(
    postgres_database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though asyncio logs all that is slow, with the results of its futures. Nor is that of a reader's URL."""
    monkeypatch.setenv("PYTHONASYNCIODEBUG", "1")
    monkeypatch.setenv("REPLAYBUF_PASSWORD", NAMED)
    config = ReplayBufferConfig(url=postgres_database, password=token)
    with all_logs() as lines:
        async with config.build() as buffer:
            storage = buffer.storage
            await storage.thread.run(_all_is_slow)  # type: ignore[attr-defined]
            await fill(buffer, 3)
            async with buffer.lease_batch({TASK: 1}):
                execute(postgres_database, END_ALL)
            await buffer.checkpoint(1)
            await buffer.save(tmp_path / "saved")
            texts = [*map(repr, (config, buffer, storage, storage.engine, storage.engine.pool))]  # type: ignore[attr-defined]
            texts += [str(config), repr(await buffer.metrics())]
        error = await refused_put(postgres_database, UnreachableError, password=failing)
        assert "no token today" in str(error)
        texts += shown(error)
    assert any("geheim" not in line and line.startswith("Executing ") for line in lines)
    for command in (["stats"], ["stats", "--format=json"], ["doctor"]):
        found = await asyncio.to_thread(run, command[0], with_password(postgres_database), *command[1:])
        texts.append(found.output)
    client = client_of(with_password(postgres_database))
    for path in ("/", "/workers", "/metrics", "/nix"):
        texts.append((await asyncio.to_thread(client.get, path)).text)
    dumped = await asyncio.to_thread(subprocess.check_output, [program("pg_dump"), postgres_database], text=True)
    assert [text for text in [*texts, *lines, dumped] if SECRET in text] == []
    assert not any(SECRET.encode() in data for data in files_below(tmp_path))


async def _all_is_slow() -> None:
    asyncio.get_running_loop().slow_callback_duration = 0


@contextmanager
def arguments_of_children() -> Iterator[list[str]]:
    """The arguments of all processes that are started below this one, seen from outside as `ps` does."""
    seen: set[str] = set()
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.01):
            for child in psutil.Process().children(recursive=True):
                try:
                    seen.update(child.cmdline())
                except psutil.Error:  # it has ended
                    continue

    watching = threading.Thread(target=look)
    watching.start()
    arguments: list[str] = []
    try:
        yield arguments
    finally:
        over.set()
        watching.join()
        arguments += sorted(seen)


def with_password(url: str) -> str:
    return make_url(url).set(password=SECRET).render_as_string(hide_password=False)


@pytest.mark.long
def test_the_workers_of_the_demo_run_without_the_url_among_their_arguments(
    postgres_database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(_ROOT))
    monkeypatch.chdir(tmp_path)
    with arguments_of_children() as arguments:
        done = run("demo", "--url", with_password(postgres_database), "--steps", 3, "--workers", 2)
    assert any("multiprocessing" in one for one in arguments)
    assert [one for one in [*arguments, done.stdout, done.stderr] if SECRET in one] == []
    assert not any(SECRET.encode() in data for data in files_below(tmp_path))
