"""Databases of every schema, written by the code of their time (tests/data/databases), are upgraded and used."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from replaybuf import ReplayBufferConfig
from replaybuf.storage.sql.schema.revisions import HEAD, REVISIONS
from tests.cli.conftest import run, run_json
from tests.cli.doctored import examine, wrong
from tests.postgres import execute, new_database
from tests.stores import group

DATA = Path(__file__).parents[1] / "data/databases"
#: No database has schema 0001: 0002 was there from the beginning. The newest is what all other tests write.
WRITTEN = REVISIONS[1:-1]
#: Of the file's PostgreSQL, which is newer than some that it is read by.
_UNKNOWN = re.compile(r"(?m)^(?:\\\w+.*|SET transaction_timeout.*)\n")


def restored(kind: str, revision: str, request: pytest.FixtureRequest, folder: Path) -> Iterator[str]:
    text = (DATA / f"{revision}.{kind}.sql").read_text("utf-8")
    if kind == "sqlite":
        connection = sqlite3.connect(folder / "old.db")
        connection.executescript(text)
        connection.close()
        yield f"sqlite:///{folder}/old.db"
        return
    with new_database(request.getfixturevalue("postgres_url")) as url:
        execute(url, _UNKNOWN.sub("", text))
        yield url


_BY_DEFAULT = ("sqlite-0002", "sqlite-0003", f"sqlite-{WRITTEN[-1]}", f"postgresql-{WRITTEN[-1]}")
_DATABASES = [
    pytest.param(one, marks=() if one in _BY_DEFAULT else pytest.mark.long)
    for one in (f"{kind}-{revision}" for kind in ("sqlite", "postgresql") for revision in WRITTEN)
]


@pytest.fixture(params=_DATABASES)
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """The URL of an old database, and its schema."""
    kind, revision = request.param.split("-")
    for url in restored(kind, revision, request, tmp_path):
        yield url, revision


def test_there_is_a_file_of_each_schema() -> None:
    assert sorted(path.name for path in DATA.glob("*.sql")) == sorted(
        f"{revision}.{kind}.sql" for revision in WRITTEN for kind in ("sqlite", "postgresql")
    )


def test_an_old_database_is_upgraded_and_used(old: tuple[str, str]) -> None:
    """Groups, keys, leases, checkpoints and archived groups are there as they were, and a run goes on with them."""
    url, revision = old
    assert "replaybuf db upgrade" in run("stats", url, code=1).stderr
    [upgraded] = run_json("db", "upgrade", url)
    assert (upgraded["before"], upgraded["after"]) == (revision, HEAD)
    asyncio.run(go_on(url, revision))
    assert wrong(examine(url, code=None)) in ({}, {"garbage": "warning"})


def shown(item: Any) -> tuple[Any, ...]:
    return item.task_name, item.status, item.key, item.tags, item.staleness, [one.response for one in item.item]


#: What all of them show: group 2 was taken, or is leased; group 1 has expired, and with it its answers.
THERE = {
    1: ("math", "expired", "prompt é1", {"level": 1}, 6, ["", ""]),
    3: ("math", "completed", "prompt é3", {"level": 3}, 4, ["8", "9"]),
    4: ("code", "completed", "prompt é4", {"level": 4}, 3, ["9", "10"]),
    5: ("math", "completed", "prompt é5", {"level": 5}, 2, ["10", "11"]),
    6: ("code", "completed", "prompt é6", {"level": 6}, 1, ["11", "12"]),
    7: ("math", "filtered", None, None, 0, ["12", "13"]),
}


async def go_on(url: str, revision: str) -> None:
    async with ReplayBufferConfig(url=url, policy="staleness", max_times_sampled=2, archive=10).build() as buffer:
        # The lease of group 2 has ended long ago: the sweeper may have brought it back already.
        assert {item.uid: shown(item) async for item in buffer.find({}) if item.uid != 2} == THERE
        new = await buffer.put(group(3), "math", key="prompt é3")
        assert [item.uid async for item in buffer.find({}) if item.key == "prompt é3"] == [new]
        if revision >= "0004":
            [made] = await buffer.checkpoints()
            assert made.step == 8
            await buffer.restore(8)
            taken = {2: ("code", "completed", "prompt é2", {"level": 2}, 5, ["7", "8"])}
            assert {item.uid: shown(item) async for item in buffer.find({})} == THERE | taken
        drawn = await buffer.get(10, "code")
        assert [one[0].response for one in drawn][-2:] == ["9", "11"]
        assert await buffer.put(group(9), "code") > 7
