"""`replaybuf doctor`: each thing that can be wrong is provoked once, found, and mended where that is safe."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import make_url

from replaybuf import ReplayBufferConfig
from replaybuf.cli.doctor import Examination
from replaybuf.cli.doctor.examine import examine as find
from replaybuf.cli.doctor.examine import repair
from replaybuf.storage.sql import schema
from replaybuf.storage.sql.inspection.reader import open_reader
from tests.cli.conftest import run
from tests.cli.doctored import (
    CHECKPOINTS,
    DAMAGE,
    LATER,
    ONE,
    break_it,
    checkpoint_and_take,
    everything,
    examine,
    use,
    wrong,
)
from tests.cli.example import fill_busy
from tests.contract.harness import group
from tests.postgres import execute, filled_by, new_database


async def _fill_soundly(url: str) -> None:
    """Two buffers, leased groups and an archive."""
    await fill_busy(url)
    execute(url, LATER)


sound = filled_by(_fill_soundly)


@pytest.fixture
def url(sound: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a copy of it, to be broken."""
    if sound.startswith("sqlite"):
        shutil.copy(str(make_url(sound).database), tmp_path / "run.db")
        yield f"sqlite:///{tmp_path}/run.db"
    else:
        with new_database(request.getfixturevalue("postgres_url"), str(make_url(sound).database)) as url:
            yield url


@pytest.mark.parametrize(("check", "statements"), DAMAGE.values(), ids=DAMAGE)
def test_what_is_wrong_is_found_and_mended(url: str, check: str, statements: list[str]) -> None:
    """Found as what it is; after the repair no problem is left, and no group is gone."""
    uids = everything(url)["rb_group"]
    break_it(url, statements)
    findings = examine(url, code=1)
    assert wrong(findings)[check] == "problem"
    assert any(row["repairable"] for row in findings[check])
    remaining = wrong(examine(url, "--repair"))
    assert "problem" not in remaining.values()
    assert len(everything(url)["rb_group"]) == len(uids)
    use(url)


def test_groups_of_no_task_are_a_problem_that_no_repair_mends(url: str) -> None:
    execute(url, f"DELETE FROM rb_lane WHERE id = (SELECT lane FROM rb_group WHERE uid = {ONE})")
    findings = examine(url, code=1)
    assert wrong(findings)["lanes"] == "problem"
    assert not findings["lanes"][0]["repairable"]
    before = everything(url)["rb_group"]
    assert wrong(examine(url, "--repair", code=1))["lanes"] == "problem"
    assert everything(url)["rb_group"] == before


def test_payloads_of_groups_that_are_gone_are_told_of_and_left_alone(url: str) -> None:
    execute(url, "DELETE FROM rb_group WHERE uid = (SELECT min(uid) FROM rb_group WHERE lease IS NULL)")
    before = len(everything(url)["rb_payload"])
    assert wrong(examine(url, code=1)) == {"leaked payloads": "warning", "counts": "problem"}
    assert wrong(examine(url, "--repair")) == {"leaked payloads": "warning"}
    assert len(everything(url)["rb_payload"]) == before


@pytest.mark.parametrize("sqlite", ["UPDATE rb_info SET number = 1", "DELETE FROM rb_info"])
def test_uids_that_would_be_given_again_are_found_and_mended(url: str, sqlite: str) -> None:
    execute(url, f"{sqlite} WHERE name = 'uid'" if url.startswith("sqlite") else "SELECT setval('rb_uid', 1)")
    assert wrong(examine(url, code=1)) == {"uids": "problem"}
    assert wrong(examine(url, "--repair")) == {}
    use(url)


@pytest.mark.parametrize("statement", CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_a_checkpoint_that_is_not_whole_is_a_problem(url: str, statement: str) -> None:
    checkpoint_and_take(url)
    assert wrong(examine(url)) == {}
    data = "x'00'" if url.startswith("sqlite") else r"'\x00'::bytea"
    execute(url, *statement.replace("DAMAGED", data).split("; "))
    levels = wrong(examine(url, code=1))
    assert levels.keys() <= {"checkpoints", "payloads"}
    assert "problem" in levels.values()
    assert wrong(examine(url, "--repair", code=1)) == levels
    with ReplayBufferConfig(url=url, policy="fifo").build_sync() as buffer:
        buffer.drop_checkpoint(5)
    assert wrong(examine(url)) == {}


@pytest.mark.parametrize(
    ("revision", "mend"), [("0000", "--upgrade"), ("9999", "upgrade replaybuf"), (None, "check the name")]
)
def test_another_schema_is_a_problem_and_left_alone(
    url: str, revision: str | None, mend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "REVISIONS", ("0000", *schema.REVISIONS))
    execute(url, "DELETE FROM rb_version" if revision is None else f"UPDATE rb_version SET version_num = '{revision}'")
    before = everything(url)
    code = 0 if revision is None and url.startswith("postgresql") else 1  # a server may have no tables yet
    findings = examine(url, code=code)
    assert list(findings) == ["revision"]
    [row] = findings["revision"]
    assert mend in row["text"] + (row["mend"] or "")
    assert examine(url, "--repair", code=code) == findings
    assert everything(url) == before


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        ("ALTER TABLE rb_info RENAME TO other", "rb_info"),
        ("ALTER TABLE rb_past RENAME COLUMN removed_at TO other", "removed_at"),
    ],
)
def test_what_cannot_be_looked_at_without_a_table_or_column_is_said(url: str, statement: str, named: str) -> None:
    execute(url, statement)
    texts = [row["text"] for rows in examine(url, code=1).values() for row in rows if row["level"] == "problem"]
    assert any(text.startswith("can't be checked") and named in text for text in texts)


def test_a_sound_database_is_left_as_it_is(url: str) -> None:
    before = everything(url)
    assert "there is nothing that can be repaired" in run("doctor", url, "--repair").stderr
    assert everything(url) == before


def test_looking_changes_nothing(url: str) -> None:
    break_it(url, [statement for _, statements in DAMAGE.values() for statement in statements])
    before = everything(url)
    examine(url, code=1)
    assert everything(url) == before


def test_all_at_once_is_mended(url: str) -> None:
    break_it(url, [statement for _, statements in DAMAGE.values() for statement in statements])
    run("doctor", url, "--repair")
    assert "problem" not in wrong(examine(url)).values()


def test_a_damaged_group_is_set_aside_with_the_reason(url: str) -> None:
    break_it(url, DAMAGE["a payload is damaged"][1])
    assert "set 1 group of the task math aside as failed" in run("doctor", url, "--repair").stderr
    rows = json.loads(run("ls", url, "--status", "failed", "--format=json").stdout)
    assert ["payload is damaged" in row["error"] for row in rows] == [True]
    assert wrong(examine(url)) == {"payloads": "warning"}


def test_a_group_that_is_sound_again_is_not_set_aside(url: str) -> None:
    execute(url, f"CREATE TABLE kept AS SELECT uid, data FROM rb_payload WHERE uid = {ONE}")
    break_it(url, DAMAGE["a payload is damaged"][1])
    reader = open_reader(url)
    findings = list(find(Examination(reader)))
    execute(url, "UPDATE rb_payload SET data = kept.data FROM kept WHERE rb_payload.uid = kept.uid")
    before = everything(url)
    assert repair(reader, findings) == []
    assert everything(url) == before


def test_a_payload_that_is_another_groups_is_found_by_its_size(url: str) -> None:
    with ReplayBufferConfig(url=url, policy="fifo").build_sync() as buffer:
        other = buffer.put(group(1, response="longer than others" * 9), "math")
    execute(url, f"UPDATE rb_payload SET data = (SELECT data FROM rb_payload WHERE uid = {other}) WHERE uid = {ONE}")
    assert wrong(examine(url, code=1)) == {"payloads": "problem"}


def test_it_is_safe_to_repair_while_a_run_goes_on(url: str) -> None:
    """Groups come and go; in the end as many are there as are counted, and all that was put became of something."""
    execute(url, "UPDATE rb_tally SET amount = amount + 3 WHERE name = 'size'")
    stop = threading.Event()
    flowing = threading.Thread(target=lambda: asyncio.run(flow(url, stop)))
    flowing.start()
    try:
        for _ in range(2):
            run("doctor", url, "--repair", code=None)
    finally:
        stop.set()
        flowing.join()
    assert wrong(examine(url)) == {}


async def flow(url: str, stop: threading.Event) -> None:
    async with ReplayBufferConfig(url=url, policy="fifo", lock_timeout=60).build() as buffer:
        number = 0
        while not stop.is_set():
            await asyncio.gather(*(buffer.put(group(number + i), "math") for i in range(8)))
            number += 8
            await buffer.get(4, "math")
            async with buffer.lease_batch({"math": 3}, seconds=60):
                pass


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE rb_info SET number = 'x' WHERE name = 'uid'",
        "UPDATE rb_checkpoint SET groups = 'many'",
    ],
)
def test_a_value_that_can_not_be_there_is_a_problem(file: Path, statement: str) -> None:
    """SQLite keeps any value in any column. The other checks go on."""
    checkpoint_and_take(url := f"sqlite:///{file}")
    execute(url, statement)
    findings = examine(url, code=1)
    assert findings.keys() == examine(url, "--repair", code=1).keys()
    assert findings["indexes"][0]["level"] == "ok"
