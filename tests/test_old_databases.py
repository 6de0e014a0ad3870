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
from tests.postgres import new_database
from tests.stores import group

DATA = Path(__file__).parent / "data/databases"
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
        from tests.postgres import execute

        execute(url, _UNKNOWN.sub("", text))
        yield url


@pytest.fixture(params=[f"{kind}-{revision}" for kind in ("sqlite", "postgresql") for revision in WRITTEN])
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
    assert wrong(examine(url, code=None)) in ({}, {"leases": "warning"}, {"garbage": "warning"})
    asyncio.run(go_on(url, revision))
    assert wrong(examine(url, code=None)) in ({}, {"garbage": "warning"})


async def go_on(url: str, revision: str) -> None:
    has_rules = revision >= "0003"
    config: Any = ReplayBufferConfig(url=url, policy="staleness", max_times_sampled=2, archive=10)
    async with config.build() as buffer:
        there = {item.uid: item async for item in buffer.find({})}
        texts = {uid: [rollout.response for rollout in item.item] for uid, item in there.items()}
        assert texts[1] == ["6", "7"]
        assert await buffer.count("math", "filtered") == 1
        assert there[1].status == "expired"  # of the weights of step 1, at step 8
        if has_rules:
            assert (there[1].key, there[1].tags) == ("prompt é1", {"level": 1})
            assert await buffer.put(group(1), "math", key="prompt é1") in (None, 1)
        if revision >= "0004":
            [made] = await buffer.checkpoints()
            assert made.step == 8
            await buffer.restore(8)
            assert len([item async for item in buffer.find({})]) == 7
        rest = await buffer.count("code", "completed")
        assert len(await buffer.get(rest, "code")) == rest > 0
        last = max(texts)
        assert await buffer.put(group(9), "code") > last
