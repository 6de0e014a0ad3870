"""Copies of a database: the place belongs to one of them, and loses nothing that it needs to the others."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.engine import make_url

from replaybuf.errors import ConfigError
from replaybuf.storage.sql.statements import files as home
from tests.cli.conftest import run
from tests.cli.doctored import examine, wrong
from tests.places.arrays import apart, files, payload_rows, put, take_all
from tests.postgres import new_database
from tests.stores import build, until

pytestmark = pytest.mark.usefixtures("soon_swept")

COUNT = 3


@pytest.fixture(params=["sqlite", "postgresql"])
def copies(request: pytest.FixtureRequest, tmp_path: Path, folder: Path) -> Iterator[tuple[str, str]]:
    """The URLs of a database that keeps groups in the folder, and of a copy of it; nobody has them open."""
    if request.param == "sqlite":
        ask(fill(f"sqlite:///{tmp_path}/run.db", folder))
        shutil.copy(tmp_path / "run.db", tmp_path / "copy.db")
        yield f"sqlite:///{tmp_path}/run.db", f"sqlite:///{tmp_path}/copy.db"
        return
    server = request.getfixturevalue("postgres_url")
    with new_database(server) as url:
        ask(fill(url, folder))
        with new_database(server, str(make_url(url).database)) as copy:
            yield url, copy


def ask(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


async def fill(url: str, folder: Path) -> None:
    async with apart(url, folder) as buffer:
        await put(buffer, *range(COUNT))


async def emptied(url: str, folder: Path | None = None, **options: Any) -> list[int]:
    """Take all groups of a database, and wait until their payloads are swept, and a folder is empty."""

    async def swept() -> bool:
        return await payload_rows(url) == 0 and (folder is None or not files(folder))

    async with build(url, **options) as buffer:
        numbers = await take_all(buffer)
        await until(swept)
        if folder is None:
            await asyncio.sleep(0.3)  # some sweeps, which could delete too much
    return sorted(numbers)


def test_a_copy_that_is_emptied_takes_nothing_from_the_original(copies: tuple[str, str], folder: Path) -> None:
    original, copy = copies
    before = files(folder)
    assert ask(emptied(copy)) == [*range(COUNT)]
    assert files(folder) == before
    assert ask(emptied(original, folder)) == [*range(COUNT)]


def test_a_copy_does_not_write_into_the_place_of_the_original(
    copies: tuple[str, str], folder: Path, tmp_path: Path
) -> None:
    """It may have a place of its own, and reads from the other."""
    original, copy = copies
    with pytest.raises(ConfigError, match=r"is a copy of that: .*Name another place.*doctor URL --take-over"):
        ask(fill(copy, folder))
    other = tmp_path / "other"
    other.mkdir()
    assert ask(emptied(copy, payloads=str(other))) == [*range(COUNT)]
    assert ask(emptied(original)) == [*range(COUNT)]


def test_the_doctor_says_whose_a_place_is_and_repairs_nothing_in_it(copies: tuple[str, str], folder: Path) -> None:
    original, copy = copies
    ask(fill(original, folder))
    before = files(folder)
    findings = examine(copy)
    assert wrong(findings) == {"places": "warning"}
    assert "this database is a copy of that" in findings["places"][0]["text"]
    run("doctor", copy, "--repair")
    assert files(folder) == before
    assert wrong(examine(original)) == {}


def test_a_copy_can_take_a_place_over(copies: tuple[str, str], folder: Path) -> None:
    original, copy = copies
    assert "is this database's now, and no longer that of" in run("doctor", copy, "--take-over").stderr
    assert "all places of this database are its own" in run("doctor", copy, "--take-over").stderr
    ask(fill(copy, folder))
    with pytest.raises(ConfigError, match="is a copy of that"):
        ask(fill(original, folder))
    assert ask(emptied(copy, folder)) == sorted([*range(COUNT), *range(COUNT)])


@pytest.mark.parametrize("how", ["put back", "with a new name of the host"])
def test_a_file_that_was_moved_is_the_original(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    path = tmp_path / "run.db"
    ask(fill(f"sqlite:///{path}", folder))
    if how == "put back":
        shutil.copy(path, tmp_path / "backup.db")
        path.unlink()
        shutil.copy(tmp_path / "backup.db", path)
    else:
        monkeypatch.setattr(home.socket, "gethostname", lambda: "another")
    ask(fill(f"sqlite:///{path}", folder))
