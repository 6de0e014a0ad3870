"""URLs that are refused; passwords and tokens, which are nowhere: in no log, error, file, page, table or argument."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
import subprocess
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import make_url
from typer.testing import CliRunner

from replaybuf import ConfigError, ReplayBufError, ReplayBufferConfig
from replaybuf.cli.commands import app
from replaybuf.common.redact import redact
from replaybuf.errors import MissingDriverError, UnreachableError
from tests.bad_input.conftest import refused_put
from tests.cli.conftest import run
from tests.demo.running import Demo
from tests.faults.test_postgres_connections import END_ALL
from tests.postgres import execute
from tests.stores import TASK, build, fill, group
from tests.test_pages import program
from tests.web.conftest import client_of


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "the url is empty"),
        ("run.db", "for a file write sqlite:///run.db"),
        ("mysql://host/db", "'mysql' is not supported"),
        ("sqlite://run.db", "a relative file is sqlite:///run.db"),
        ("sqlite:///run?1.db", "a \\? in the name of a file is written %3F"),
        ("sqlite:///run.db?mode=ro", "SQLite urls take no options"),
        ("sqlite:///a\0b", "NUL"),
        ("sqlite:///a\udcffb", "can't read the database url: expected"),
        ("postgresql://host:port/db", "a port from 1 to 65535"),
        ("postgresql://user@host:99999/db", "a port from 1 to 65535"),
        ("postgresql://user@host/db?password=secret", "user and password are before the host"),
        *(
            (f"postgresql://host/db?{option}", "must be a number larger than 0")
            for option in ("connect_timeout=soon", "connect_timeout=0", "command_timeout=nan")
        ),
        ("postgresql://user:a@b@host/db", "in a user or password : is written %3A, / %2F, @ %40"),
        *((f"postgresql://user:a{sign}b@host/db", f"[{sign}] %{ord(sign):X}") for sign in "/?#"),
        ("postgresql://u:secret@a:1,:2/rl", "a host of the url must be a name, or a name and a port from"),
        ("postgresql://u:secret@a,,b/rl", "a host of the url must be a name"),
        ("postgresql://u:secret@,b/rl", "a host of the url must be a name"),
        (
            "postgresql://u:secret@a:0,b/rl",
            "a host of the url must be a name, or a name and a port",
        ),
        ("postgresql://u:secret@a:1,b:561l/rl", "a host of the url"),
        ("postgresql://u:secret,b/rl", "a host of the url"),
        *(
            (f"postgresql://u:secret{rest}", "a host of the url must be a name")
            for rest in ("@a:561l/rl", "/rl", "/s@a:1/rl", "@a/rl?port=7s")
        ),
    ],
)
def test_a_bad_url_says_what_would_be_right_without_its_password(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build(url)
    assert "secret" not in str(caught.value)


async def test_the_known_options_of_libpq_reach_the_server(postgres_database: str) -> None:
    """Sockets have no TLS, and need none."""
    url = f"{postgres_database}&application_name=a%26b&connect_timeout=7&statement_cache_size=0&sslmode=verify-full"
    url += "&channel_binding=prefer&target_session_attrs=read-write"
    async with build(url) as buffer:
        assert await buffer.put(group(1), TASK) == 1
        storage: Any = buffer.storage
        assert await storage._read(lambda tx: tx.run("SHOW application_name")[0][0]) == "a&b"


def test_a_missing_driver_is_named_with_the_way_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    with pytest.raises(MissingDriverError, match="not installed: pip install asyncpg"):
        build("postgresql://user@host/db")


SECRETS = ["geheim", "ge@heim", "ge/heim", "ge%heim", "ge:heim", "ge?heim", "ge#heim", "ge heim", "ge&heim=x", "gé🔑"]


def shown(error: BaseException | None) -> Iterator[str]:
    """All that a traceback, a log or a debugger would show of an error."""
    while error is not None:
        yield from (str(error), repr(error), *map(repr, error.args))
        yield "".join(traceback.format_exception(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


@contextmanager
def all_logs() -> Iterator[list[str]]:
    """Everything that is logged, by anyone, at any level."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(self.format(record))

    root, handler = logging.getLogger(), Keep()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        yield lines
    finally:
        root.removeHandler(handler)
        root.setLevel(level)


def leaks(secret: str, texts: list[str]) -> list[str]:
    spellings = {
        secret,
        quote(secret, safe=""),
        quote(secret),
        *(part for part in re.split("[^a-z]", secret) if len(part) > 3),
    }
    return [text for text in texts if any(spelling in text for spelling in spellings)]


@pytest.mark.parametrize("secret", SECRETS)
async def test_a_password_is_never_shown(secret: str) -> None:
    url = f"postgresql://user:{quote(secret, safe='')}@127.0.0.1:1/db"
    texts: list[str] = [redact(url)]
    with all_logs() as lines:
        config = ReplayBufferConfig(url=url)
        buffer = config.build()
        storage: Any = buffer.storage
        for described in (config, buffer, storage, storage.url):
            texts += [repr(described), str(described)]
        with pytest.raises(UnreachableError) as caught:
            await buffer.put(group(1), TASK)
        texts += shown(caught.value)
        texts += [repr(storage.engine.pool), repr(storage.engine)]
        await buffer.close()
    assert leaks(secret, texts + lines) == []


_PARTS = ["postgresql", "://", "user", ":", "geheim", "@", "127.0.0.1", ":1", "/db", "?connect_timeout=1"]
_IN_QUERY = [*_PARTS[:3], *_PARTS[5:9], "?password=", "geheim"]
_TOO_MUCH = st.sampled_from(["/", ":", "@", "//", ":/", "?", "#", "&", "=", " ", ";", "x", "@@", "::", "%"])


@st.composite
def mistyped(draw: st.DrawFn) -> str:
    """The URL of a server with up to three slips in it, but its password whole, with the signs beside it.

    (Without these, nothing tells a password from a user or a host.)
    """
    url = list(draw(st.sampled_from([_PARTS, _IN_QUERY])))
    secret = url.index("geheim")
    places = [place for place in range(len(url)) if not secret - 1 <= place <= secret + 1]
    for place in draw(st.lists(st.sampled_from(places), max_size=3, unique=True)):
        part = url[place]
        url[place] = draw(st.sampled_from(["", part[1:], part * 2]) | _TOO_MUCH.map(part.__add__))
    return "".join(url)


SLIPS = [
    "postgresql://user:geheim@host:port/db",
    "postgresql://user:a@geheim@host/db",
    "postgresql://user:a@b:geheim@host/db",
    "postgresql://user:geheim@[::1/db",
    "postgresql:/user:geheim@host/db",
    "user:geheim@host/db",
    "mysql://user:geheim@host/db",
    "postgresql://user:geheim@host:99999/db",
    "postgresql://user:geheim@host/db?nope=1",
    "postgresql://user@host/db?password=geheim&nope=1",
    "postgresql://user@host:port/db?password=geheim",
    "postgresql://user/geheim@127.0.0.1/db",
    "password = geheim host=127.0.0.1",
    "postgresql//user:geheim@127.0.0.1/db",
    "postgresql:///user:geheim@127.0.0.1/db",
    "postgresql:/user:geheim127.0.0.1/db",
    "postgresql//user@127.0.0.1/db?password=geheim",
    "postgresql://user@127.0.0.1/db&password=geheim",
]
#: Arguments of commands, with a URL (`-`) where it belongs, or doesn't.
COMMANDS = [
    "stats -",
    "ls -",
    "show - 1",
    "checkpoint save - copy",
    "checkpoint resume - copy",
    "checkpoint resume new.db -",
    "checkpoint save made.db copy --buffer -",
    "checkpoint save made.db copy --policy -",
    "checkpoints -",
    "doctor -",
    "doctor - --upgrade",
    "demo --steps 1 --url -",
    "stats run.db -",
    "ls run.db --limit -",
    "ls run.db --status -",
    "ls run.db --order-by -",
    "-",
    "checkpoint -",
]


def shown_by_library(url: str) -> list[str]:
    texts = [redact(url)]
    try:
        buffer = build(url)
        return [*texts, repr(buffer), repr(buffer.storage)]
    except ReplayBufError as error:
        return [*texts, *shown(error)]


def shown_by_command(url: str, command: str) -> list[str]:
    arguments = [url if argument == "-" else argument for argument in command.split()]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", _no_name_is_known)
        if "made.db" in arguments:
            with ReplayBufferConfig(url="sqlite:///made.db").build_sync() as buffer:
                buffer.put(group(1), TASK)
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code in (1, 2), result.output
        paths = [str(path) for path in Path(folder).rglob("*")]
    return [result.stdout, result.stderr, *paths]


def _no_name_is_known(*_args: object, **_options: object) -> None:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


@pytest.mark.parametrize("url", SLIPS)
def test_a_known_slip_in_a_url_shows_no_password(url: str) -> None:
    assert leaks("geheim", shown_by_library(url)) == []
    for command in COMMANDS[SLIPS.index(url) % 9 :: 9]:  # others: random ones, below
        assert leaks("geheim", shown_by_command(url, command)) == [], command


def test_a_url_in_the_place_of_a_folder_is_refused() -> None:
    texts = shown_by_command("postgresql://user:geheim@127.0.0.1/db", "checkpoint save made.db -")
    assert "expected the path of a folder, got the URL ***@127.0.0.1/db" in "".join(texts)
    assert leaks("geheim", texts) == []


@settings(max_examples=60)
@given(mistyped())
def test_a_slip_in_a_url_shows_no_password(url: str) -> None:
    """In messages, tracebacks and reprs. (What can be built isn't connected.)"""
    assert leaks("geheim", shown_by_library(url)) == []


@settings(max_examples=30)
@given(mistyped(), st.sampled_from(COMMANDS))
def test_a_slip_in_a_url_of_a_command_shows_no_password(url: str, command: str) -> None:
    """Nor does a URL in the wrong place."""
    assert leaks("geheim", shown_by_command(url, command)) == []


def test_a_password_in_a_config_that_is_refused_is_not_shown(tmp_path: Path) -> None:
    url = "postgresql://user:geheim@host/db"
    file = tmp_path / "train.yaml"
    texts: list[str] = []
    for values in ({"url": url, "polcy": "fifo"}, {"url": [url]}, {"url": url, "lock_timeout": -1}):
        with pytest.raises(ConfigError) as caught:
            ReplayBufferConfig.from_mapping(values)
        texts += [str(caught.value), repr(caught.value)]
        with pytest.raises(ValueError, match="ReplayBufferConfig") as direct:
            ReplayBufferConfig(**values)
        texts += [str(direct.value), repr(direct.value)]
    for text in (f"url: {url}: x", f"url: '{url}", f"{url}", f"- {url}", f"url: !!python/name:{url}"):
        file.write_text(text)
        with pytest.raises(ConfigError) as caught:
            ReplayBufferConfig.from_file(file)
        texts += shown(caught.value)
    assert leaks("geheim", texts) == []


# Passwords that a function returns, and those of other processes


SECRET = "t0ken-geheim"
NAMED = f"{__name__}:token"


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
        result = await asyncio.to_thread(run, command[0], with_password(postgres_database), *command[1:])
        texts.append(result.output)
    client = client_of(with_password(postgres_database))
    for path in ("/", "/workers", "/metrics", "/nix"):
        texts.append((await asyncio.to_thread(client.get, path)).text)
    dumped = await asyncio.to_thread(subprocess.check_output, [program("pg_dump"), postgres_database], text=True)
    assert [text for text in [*texts, *lines, dumped] if SECRET in text] == []
    assert not any(SECRET.encode() in data for data in files_below(tmp_path))


async def _all_is_slow() -> None:
    asyncio.get_running_loop().slow_callback_duration = 0


def with_password(url: str) -> str:
    return make_url(url).set(password=SECRET).render_as_string(hide_password=False)


@pytest.mark.long
def test_the_workers_of_the_demo_run_without_the_url_among_their_arguments(
    postgres_database: str, tmp_path: Path
) -> None:
    """As `ps` shows them."""
    with Demo(tmp_path, with_password(postgres_database), "--steps", "3", "--workers", "2") as demo:
        assert len(demo.worker_pids()) == 2
        children = psutil.Process(demo.process.pid).children(recursive=True)
        arguments = [argument for child in children for argument in child.cmdline()]
        output, code = demo.end()
    assert code == 0
    assert any("multiprocessing" in argument for argument in arguments)
    assert [text for text in [*arguments, output] if SECRET in text] == []
    assert not any(SECRET.encode() in data for data in files_below(tmp_path))
