"""Passwords that a function or a file has, and that change while a run goes on: groups are put once and taken once."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from sqlalchemy import make_url

from replaybuf import ConfigError, ReplayBufferConfig
from replaybuf.common.passwords import ask
from replaybuf.errors import AccessError, StorageError, UnreachableError
from replaybuf.integrations.chunks import ChunkBufferConfig
from replaybuf.storage.sql.engine.database import Access
from replaybuf.storage.sql.engine.urls import parse_url
from replaybuf.storage.sql.inspection.reader import open_reader
from replaybuf.storage.sql.inspection.writer import over_sqlalchemy
from tests.bad_input.conftest import refused, refused_put
from tests.bad_input.test_secrets import all_logs, leaks, shown
from tests.faults.calling import calling, goes_on
from tests.faults.conftest import Figures
from tests.faults.processes import Ledger
from tests.histories.history import Recorder, calls_in
from tests.histories.workers import take_all_left
from tests.postgres import Databases, execute, own_server
from tests.postgres import ask as asked
from tests.stores import TASK, build, group, numbers_of

_ROLE = "rotated"


@pytest.fixture(scope="module")
def guarded_server() -> Iterator[str]:
    """A server that wants a password from the role."""
    with own_server() as server:
        server.cut_retries()
        [hba] = map(Path, asyncio.run(asked(server.url, "SHOW hba_file")))
        hba.write_text(f"local all {_ROLE} scram-sha-256\n" + hba.read_text())
        # Passwords that are hashed as often as they should be cost time with each connection.
        execute(server.url, "ALTER SYSTEM SET scram_iterations = 16", "SELECT pg_reload_conf()")
        execute(server.url, f"CREATE ROLE {_ROLE} LOGIN SUPERUSER PASSWORD 'first-geheim'")
        yield server.url


class Rotated:
    """A database whose role gets other passwords."""

    def __init__(self, url: str) -> None:
        self._owner = url
        self.url = make_url(url).set(username=_ROLE).render_as_string(hide_password=False)

    async def change(self, password: str) -> None:
        """Set the password, and end all connections that were made with the one before."""
        end_all = f"SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE usename = '{_ROLE}'"
        await asyncio.to_thread(execute, self._owner, f"ALTER ROLE {_ROLE} PASSWORD '{password}'", end_all)


@pytest.fixture(scope="module")
def guarded_databases(guarded_server: str) -> Iterator[Databases]:
    databases = Databases(guarded_server)
    yield databases
    databases.close()


@pytest.fixture
def rotated(guarded_databases: Databases) -> Iterator[Rotated]:
    with guarded_databases.lent() as lend:
        url = lend()
        execute(url, f"ALTER ROLE {_ROLE} PASSWORD 'first-geheim'")
        yield Rotated(url)


async def test_a_wrong_password_in_a_url_is_refused_and_not_shown(rotated: Rotated) -> None:
    """A right one may have all signs that a URL quotes."""
    await rotated.change("ge@h/e%im")

    def with_password(password: str) -> str:
        return rotated.url.replace(f"{_ROLE}:@", f"{_ROLE}:{quote(password, safe='')}@")

    async with build(with_password("ge@h/e%im")) as buffer:
        assert await buffer.put(group(1), TASK) is not None
    with all_logs() as lines:
        error = await refused(with_password("fal/sch@"), AccessError, "password authentication failed for user")
    assert leaks("fal/sch@", [*shown(error), *lines]) == []


class InAFunction:
    """What is asked for a password: a function, or a coroutine function."""

    def __init__(self, *, waits: bool) -> None:
        self.password, self.calls = "first-geheim", 0
        self.function: Callable[[], Any] = self.answer_later if waits else self.answer

    def answer(self) -> str:
        self.calls += 1
        return self.password

    async def answer_later(self) -> str:
        await asyncio.sleep(0)
        return self.answer()


async def rotates(
    rotated: Rotated, renew: Callable[[str], None], folder: Path, figures: Figures, url: str = "", **options: Any
) -> None:
    """Change the password twice; the second time there is none for a while, and the buffer waits."""
    recorder = Recorder(Ledger(folder / "calls"))
    async with build(url or rotated.url, max_deliveries=0, **options) as buffer:
        async with calling(recorder, [buffer]):
            await goes_on(recorder, "put")
            renew("second-geheim")
            await rotated.change("second-geheim")
            await goes_on(recorder, "put")
            renew("")
            await rotated.change("third-geheim")
            await asyncio.sleep(0.4)
            done = recorder.done.copy()
            await asyncio.sleep(0.1)
            assert recorder.done == done
            renew("third-geheim")
            await goes_on(recorder, "put")
        await take_all_left(buffer, recorder)
    figures.judge(2, calls_in([folder / "calls"]))


@pytest.mark.parametrize("waits", [False, pytest.param(True, marks=pytest.mark.long)])
async def test_a_run_goes_on_with_what_a_function_answers(
    rotated: Rotated, waits: bool, tmp_path: Path, figures: Figures
) -> None:
    source = InAFunction(waits=waits)
    renew = lambda password: setattr(source, "password", password)  # noqa: E731
    await rotates(rotated, renew, tmp_path, figures, password=source.function)
    assert source.calls > 2


async def test_a_run_goes_on_with_what_a_password_file_has(rotated: Rotated, tmp_path: Path, figures: Figures) -> None:
    file = tmp_path / "pass"

    def renew(password: str) -> None:
        (tmp_path / "new").touch(mode=0o600)
        (tmp_path / "new").write_text(f"# tests\n*:*:*:somebody:else\n*:*:*:{_ROLE}:{password}\n")
        (tmp_path / "new").rename(file)

    renew("first-geheim")
    await rotates(rotated, renew, tmp_path, figures, f"{rotated.url}&passfile={file}")


async def test_an_old_password_in_the_url_ends_in_a_sentence_that_says_what_to_do(rotated: Rotated) -> None:
    """In the middle of a run it is tried again: it may be that the server has the new one too early."""
    url = make_url(rotated.url).set(password="first-geheim").render_as_string(hide_password=False)
    async with build(url, reconnect_timeout=0.5) as buffer:
        await buffer.put(group(1), TASK)
        await rotated.change("second-geheim")
        for call in (buffer.put(group(2), TASK), buffer.get(1, TASK)):
            with pytest.raises(AccessError) as caught:
                await call
            message = str(caught.value)
            assert f'refused access: password authentication failed for user "{_ROLE}"; give the one that' in message
            assert "(passfile, password=), which are asked anew for each connection" in message
            assert "reconnect_timeout=0.5" in message
            assert caught.value.reason == "not admitted"
            assert not caught.value.in_doubt
        await rotated.change("first-geheim")
        await buffer.put(group(3), TASK)
        assert numbers_of(await buffer.get(9, TASK)) == [1, 3]


async def test_a_wrong_password_at_the_beginning_is_an_error_at_once(rotated: Rotated) -> None:
    source = InAFunction(waits=False)
    source.password = "wrong-geheim"
    error = await refused_put(rotated.url, AccessError, password=source.function)
    assert "password authentication failed" in str(error)
    assert source.calls == 1


# What else may be wrong with a function


def raising() -> str:
    raise OSError("the token service is away")


def returning_bytes() -> Any:
    return b"token-geheim"


def returning_nothing() -> str:
    return ""


def sleeping() -> str:
    time.sleep(3)
    return "token-geheim"


async def never() -> str:
    await asyncio.sleep(60)
    return "token-geheim"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raising, "raising raised OSError: the token service is away"),
        (returning_bytes, "returning_bytes returned a value of the type bytes, not a text"),
        (returning_nothing, "returning_nothing returned an empty text"),
        (sleeping, "sleeping gave no answer within 0.3 s"),
        (never, "never gave no answer within 0.3 s"),
    ],
)
async def test_a_function_that_fails_is_named_with_the_reason(
    rotated: Rotated, function: Callable[[], Any], message: str
) -> None:
    async with asyncio.timeout(2.5):
        error = await refused_put(f"{rotated.url}&connect_timeout=0.3", UnreachableError, password=function)
    assert f"the password function {__name__}:{message}" in str(error)
    assert "geheim" not in str(error)


async def test_a_call_that_is_cancelled_while_its_function_sleeps_ends_at_once() -> None:
    asking = asyncio.create_task(ask(sleeping, 60))
    await asyncio.sleep(0.05)
    asking.cancel()
    async with asyncio.timeout(1):
        with pytest.raises(asyncio.CancelledError):
            await asking


# How a function is named


def the_password() -> str:
    return "first-geheim"


NAMED = f"{__name__}:the_password"


async def test_a_text_names_a_function(rotated: Rotated) -> None:
    """In configs, which can be sent to other processes; also those of chunks."""
    config = ReplayBufferConfig.from_mapping({"url": rotated.url, "password": NAMED})
    assert config.password is the_password
    assert f"password='{NAMED}'" in repr(config)
    unpickled = pickle.loads(pickle.dumps(config))
    assert unpickled == config
    async with unpickled.build() as buffer:
        await buffer.put(group(1), TASK)
    chunks = ChunkBufferConfig.from_mapping({"url": rotated.url, "password": NAMED, "fragments_per_chunk": 2})
    assert chunks.password is the_password


async def test_the_environment_names_a_function_for_all_that_has_only_a_url(
    rotated: Rotated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A URL never does: it would make data of code. A password in it comes first."""
    monkeypatch.setenv("REPLAYBUF_PASSWORD", NAMED)
    async with build(rotated.url) as buffer:
        await buffer.put(group(1), TASK)
    async with ReplayBufferConfig.from_env(
        {"REPLAYBUF_URL": rotated.url, "REPLAYBUF_PASSWORD": NAMED}
    ).build() as buffer:
        assert numbers_of(await buffer.get(1, TASK)) == [1]
    assert await asyncio.to_thread(open_reader(rotated.url).read, lambda tx: tx.value("SELECT 7")) == 7
    assert (
        await over_sqlalchemy(Access(parse_url(rotated.url)), lambda db: db.exec_driver_sql("SELECT 7").scalar()) == 7
    )
    url = make_url(rotated.url).set(password="wrong-geheim").render_as_string(hide_password=False)
    await refused_put(url, AccessError)
    error = await refused_put(f"{rotated.url}&password_function={NAMED}", StorageError)
    assert 'unrecognized configuration parameter "password_function"' in str(error)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("geheim", "must be a function, or a text module:function that names one; a password itself belongs into a"),
        ("geheim:x", "there is no such module"),
        ("tests.geheim:x", "there is no such module"),
        ("tests.stores:geheim", "the module has no such function"),
        ("tests.stores:TASK", "what this text names can't be called"),
        (7, "must be a function"),
        (b"geheim", "must be a function"),
    ],
)
def test_what_names_no_function_is_refused_and_not_shown(given: Any, message: str) -> None:
    """It may be a password."""
    with pytest.raises(ConfigError) as caught:
        ReplayBufferConfig(url="postgresql://host/db", password=given)
    assert message in str(caught.value)
    assert "geheim" not in str(caught.value)
    with pytest.raises(ConfigError, match="REPLAYBUF_PASSWORD"):
        ReplayBufferConfig.from_env({"REPLAYBUF_URL": "postgresql://host/db", "REPLAYBUF_PASSWORD": "geheim"})


@pytest.mark.parametrize(
    ("url", "message"),
    [("sqlite:///run.db", "a SQLite file has none"), ("postgresql://u:x@host/db", "the url has one, too")],
)
def test_a_function_that_nobody_would_ask_is_refused(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"password= is for PostgreSQL: {message}"):
        build(url, password=the_password)


# Password files


async def test_a_password_file_without_a_line_for_the_server_is_no_password(rotated: Rotated, tmp_path: Path) -> None:
    file = tmp_path / "pass"
    file.touch(mode=0o600)
    file.write_text("db:5432:rl:trainer:geheim\n")
    assert "give the one that holds now" in str(await refused_put(f"{rotated.url}&passfile={file}", AccessError))


async def test_the_usual_password_file_is_read(
    rotated: Rotated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """~/.pgpass, or that of PGPASSFILE."""
    file = tmp_path / ".pgpass"
    file.touch(mode=0o600)
    file.write_text(f"*:*:*:{_ROLE}:first-geheim\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    async with build(rotated.url) as buffer:
        await buffer.put(group(1), TASK)
    file.rename(tmp_path / "elsewhere")
    monkeypatch.setenv("PGPASSFILE", str(tmp_path / "elsewhere"))
    async with build(rotated.url) as buffer:
        assert numbers_of(await buffer.get(1, TASK)) == [1]
