"""The doctor with its probe and server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import asyncpg
import pytest
from sqlalchemy import make_url

from replaybuf.cli.doctor.probe import probe
from replaybuf.errors import LockedError
from replaybuf.storage.sql.inspection import reader
from replaybuf.storage.sql.inspection.reader import open_reader
from replaybuf.storage.sql.inspection.writer import Writer
from tests.cli.conftest import run, run_json
from tests.cli.doctored import examine
from tests.cli.example import fill_busy
from tests.faults.proxy import proxied
from tests.postgres import execute, new_database, set_default
from tests.stores import opened

#: What the relay changes; the call that fails then; and what is said.
LACKING = {
    "no advisory locks": ({b"advisory_xact_lock(": b"advisory_xact_lack("}, "", "pg_advisory_xact_lack"),
    "advisory locks that exclude nobody": (
        {b"pg_advisory_xact_lock(": b"no_advisory_xact_lock("},
        "locks",
        "is accepted, and excludes nobody",
    ),
    "no SKIP LOCKED": ({b"SKIP LOCKED": b"SKIP LACKED"}, "take_batch", "syntax error"),
}
_IDLE = "CREATE FUNCTION no_advisory_xact_lock(bigint) RETURNS void LANGUAGE sql AS 'SELECT'"


@pytest.fixture(scope="module")
def with_tables(postgres_url: str) -> Iterator[str]:
    """The URL of a database that a run has made its tables in."""
    with new_database(postgres_url) as url:
        run("doctor", url, "--upgrade")
        execute(url, _IDLE)
        yield url


@pytest.mark.parametrize("lacking", LACKING)
async def test_the_first_call_that_fails_is_named(with_tables: str, lacking: str) -> None:
    instead, call, text = LACKING[lacking]
    async with proxied(with_tables) as proxy:
        proxy.instead = instead
        findings = list(await asyncio.to_thread(probe, open_reader(proxy.url)))
    failures = [finding for finding in findings if finding.level != "ok"]
    assert {str(finding.level) for finding in failures} == {"problem"}
    assert any(finding.text.startswith(f"{call} failed: ") for finding in failures) or not call
    assert text in " ".join(finding.text for finding in failures)


def test_an_error_of_the_locks_is_a_finding_and_nothing_is_left(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(writer: object) -> bool:
        raise LockedError("waited in vain")

    monkeypatch.setattr(Writer, "excludes_others", refuse)
    [row] = examine(url, "--probe", code=1)["probe"]
    assert row["text"] == "locks failed: waited in vain"
    assert run_json("stats", url)["buffers"] == {}


def test_all_calls_are_made_and_nothing_is_left(shared_url: str) -> None:
    """Also before the first run: the tables are then made."""
    if shared_url.startswith("sqlite"):  # a file that isn't there is an error
        with opened(shared_url) as buffer:
            assert len(buffer) == 0
    [row] = examine(shared_url, "--probe")["probe"]
    assert (row["level"], row["text"].partition(" put_many")[0]) == ("ok", "each call was made once: open, put,")
    assert run_json("stats", shared_url)["buffers"] == {}
    assert "probe" not in examine(shared_url)


@pytest.mark.parametrize("name", ["what?.db", "a%20b.db"])
def test_the_path_of_a_file_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with opened(f"sqlite:///{quote(str(tmp_path / name))}") as buffer:
        assert len(buffer) == 0
    monkeypatch.chdir(tmp_path)
    assert [row["level"] for row in examine(name, "--probe")["probe"]] == ["ok"]
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_role_that_may_not_write_is_told(postgres_database: str) -> None:
    execute(postgres_database, "DO $$ BEGIN CREATE ROLE rb_looker LOGIN; EXCEPTION WHEN duplicate_object THEN END $$")
    try:
        execute(postgres_database, "REVOKE CREATE ON SCHEMA public FROM public")
        looker = make_url(postgres_database).set(username="rb_looker").render_as_string(hide_password=False)
        [row] = examine(looker, "--probe", code=1)["probe"]
        assert row["text"].startswith("open failed: ")
        assert "permission denied" in row["text"]
    finally:
        execute(postgres_database, "DROP OWNED BY rb_looker; DROP ROLE rb_looker")


@pytest.fixture
def url(lent_database: str) -> str:
    return lent_database


def found(url: str, check: str) -> list[tuple[str, str]]:
    """Level and text of what a check found."""
    return [(row["level"], row["text"]) for row in examine(url, code=None)[check]]


def test_an_index_that_was_not_finished_is_made_anew(url: str) -> None:
    execute(url, "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'rb_group_by_step'::regclass")
    [(level, text)] = found(url, "indexes")
    assert (level, text) == ("problem", "missing, or not finished: rb_group_by_step")
    assert "rb_group_by_step" in run("doctor", url, "--repair").stderr
    assert found(url, "indexes")[0][0] == "ok"


@pytest.mark.parametrize(("lock_timeout", "statement_timeout"), [(0.2, "0"), (60.0, "1s")])
async def test_groups_that_nobody_can_read_for_a_while_are_not_damaged(
    url: str, monkeypatch: pytest.MonkeyPatch, lock_timeout: float, statement_timeout: str
) -> None:
    """Because of a lock, or of statements that are stopped."""
    await fill_busy(url)
    set_default(url, statement_timeout=statement_timeout)
    monkeypatch.setattr(reader, "LOCK_TIMEOUT", lock_timeout)
    connection = await asyncpg.connect(url)
    try:
        await connection.execute("BEGIN; LOCK TABLE rb_payload IN ACCESS EXCLUSIVE MODE")
        [(level, text)] = await asyncio.to_thread(found, url, "payloads")
    finally:
        await connection.close()
    assert level == "problem"
    assert text.startswith("can't be checked")


def test_a_server_that_is_not_there_is_a_problem(url: str) -> None:
    absent_url = make_url(url).set(database="no_such_database").render_as_string(hide_password=False)
    [row] = examine(absent_url, code=1)["revision"]
    assert row["text"].startswith("can't be checked")
