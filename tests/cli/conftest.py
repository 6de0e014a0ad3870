"""Databases to look into, and ways to run the command."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from replaybuf.cli.commands import app
from tests.cli.example import fill, fill_busy, fill_hostile
from tests.postgres import filled_by, is_in_memory, new_url, running_server

BACKENDS = ("sqlite", "postgres")
_ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def postgres_url(postgres_url: str) -> Iterator[str]:
    """A server as people have it: the doctor finds fault with one that doesn't flush."""
    if is_in_memory():
        yield postgres_url
    else:
        with running_server(flushing=True) as url:
            yield url


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("REPLAYBUF_") and "TEST" not in name]:
        monkeypatch.delenv(name)


@pytest.fixture
def url(shared_url: str) -> str:
    """The URL of a new database."""
    return shared_url


filled = filled_by(fill)
busy = filled_by(fill_busy)
hostile = filled_by(fill_hostile)


@pytest.fixture(params=BACKENDS)
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a database without replaybuf's tables."""
    for url in new_url(request.param, request, tmp_path):
        if request.param == "sqlite":
            (tmp_path / "run.db").touch()
        yield url


@pytest.fixture(scope="session")
def filled_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("file") / "run.db"
    asyncio.run(fill(f"sqlite:///{path}"))
    return path


@pytest.fixture
def file(filled_file: Path, tmp_path: Path) -> Path:
    """A SQLite file with the example buffer, to be changed at will."""
    return Path(shutil.copy(filled_file, tmp_path))


def run(*args: object, code: int | None = 0, env: dict[str, str] | None = None, answer: str = "") -> Any:
    """Run the command in this process; the result has `stdout` and `stderr`. (No code: it may end as it likes.)"""
    result = CliRunner().invoke(app, [str(arg) for arg in args], env=env, input=answer)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert code is None or result.exit_code == code, result.output
    return result


class Screen(io.StringIO):
    """What is printed on a terminal."""

    def isatty(self) -> bool:
        return True


def run_on_screen(width: int, *args: object) -> str:
    """Run the command on a terminal of this width, and return what is printed, with its escapes."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(screen := Screen()):
        patch.setenv("COLUMNS", str(width))
        patch.setenv("TERM", "xterm-256color")
        app([str(arg) for arg in args], standalone_mode=False)
    return screen.getvalue()


def run_json(*args: object) -> Any:
    return json.loads(run(*args, "--format=json").stdout)


#: The program, for a `Script` with these arguments.
COMMAND = 'sys.argv[0] = "replaybuf"; from replaybuf.cli import main; main()'


def start(*args: object, **settings: Any) -> subprocess.Popen[str]:
    """Start the program in a process of its own."""
    env = {**os.environ, "PYTHONPATH": str(_ROOT), "PYTHONUNBUFFERED": ""}
    command = [sys.executable, "-m", "replaybuf", *map(str, args)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=env, **settings)


Start = Callable[..., "subprocess.Popen[str]"]
