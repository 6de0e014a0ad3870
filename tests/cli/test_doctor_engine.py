"""`replaybuf doctor` about the parts of a server: a relay before a real PostgreSQL makes each of them missing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from sqlalchemy import make_url

from replaybuf.doctor import Finding
from replaybuf.doctor.check_engine import PARTS, check_engine
from replaybuf.storage.sql.inspection.reader import open_reader
from tests.cli.conftest import run
from tests.cli.doctored import examine
from tests.faults.proxy import proxied
from tests.pages import DOCS
from tests.postgres import execute, new_database

#: Functions that do nothing, in place of the server's.
_IDLE = """
CREATE FUNCTION no_advisory_xact_lock(bigint) RETURNS void LANGUAGE sql AS 'SELECT';
CREATE FUNCTION no_notify(text, text) RETURNS void LANGUAGE sql AS 'SELECT'"""

#: What the relay changes, the parts that are missing then, with their levels, and what is said of the first one.
LACKING = {
    "no advisory locks": (
        {b"xact_lock($1": b"xact_lack($1"},
        {"advisory locks": "problem", "transaction identity": "warning"},
        "pg_advisory_xact_lack",
    ),
    "advisory locks that exclude nobody": (
        {b"pg_advisory_xact_lock($1": b"no_advisory_xact_lock($1"},
        {"advisory locks": "problem", "transaction identity": "warning"},
        "they are accepted, and exclude nobody",
    ),
    "no snapshots": (
        {b"pg_current_snapshot()": b"pg_current_snapshat()"},
        {"commits of others": "warning", "couldn't be tried": "warning"},  # isolation levels
        "waits then read the buffer twice a second",
    ),
    "READ COMMITTED is another level": (
        {b"READ COMMITTED;": b"REPEATABLE READ"},
        {"isolation levels": "problem"},
        "READ COMMITTED is REPEATABLE READ",
    ),
    "no LISTEN": ({b"LISTEN ": b"LISTAN "}, {"LISTEN": "warning"}, "within half a second, by polling"),
    "NOTIFY that doesn't arrive": ({b"pg_notify(": b"no_notify("}, {"LISTEN": "warning"}, "a NOTIFY doesn't arrive"),
    "settings that get lost": (
        {b"synchronous_commit\0on": b"synchronous_commit\0no"},
        {"settings of connections": "warning"},
        "synchronous_commit is off",
    ),
    "functions that are gone": ({b"to_regproc(": b"to_regtype("}, {"functions in PL/pgSQL": "warning"}, "db upgrade"),
    "no SKIP LOCKED": ({b"SKIP LOCKED": b"SKIP LACKED"}, {"SKIP LOCKED": "problem"}, "syntax error"),
    "no upserts": ({b"ON CONFLICT": b"ON CONFLACT"}, {"writes in queries": "problem"}, "syntax error"),
    "no paths in JSON": ({b"_path_exists": b"_path_exasts"}, {"JSONB": "problem"}, "jsonb_path_exasts"),
    "no list of locks": ({b"FROM pg_locks": b"FROM pg_lacks"}, {"transaction identity": "warning"}, "pg_lacks"),
}
#: The same where replaybuf's tables are still to be made.
LACKING_BEFORE = {
    "no sequences": (
        {b"CREATE SEQUENCE": b"CREATE SEQUANCE"},
        {"tables": "problem", "sequences": "problem"},
        "syntax error",
    ),
    "DDL that isn't undone": ({b"ROLLBACK;": b"COMMIT  ;"}, {"transactional DDL": "warning"}, "a table stays"),
    "no large rows": ({b"'large', 0, $1": b"'large', 0, $7"}, {"rows of 17 MB": "warning"}, "keep payloads apart"),
}


def of_parts(findings: list[Finding]) -> dict[str, str]:
    """The parts that are missing, with their levels."""
    return {one.text.partition(":")[0]: str(one.level) for one in findings if one.level != "ok"}


async def found(url: str, instead: dict[bytes, bytes]) -> list[Finding]:
    """What is said of a server that gets other texts than the doctor sends."""
    async with proxied(url) as proxy:
        proxy.instead = instead
        return list(await asyncio.to_thread(check_engine, open_reader(proxy.url)))


def left(url: str) -> list[str]:
    """What the trials left in a database."""
    return open_reader(url).read_any(lambda tx: tx.values("SELECT relname FROM pg_class WHERE relname LIKE 'rb\\_%'"))


@pytest.fixture(scope="module")
def with_tables(postgres_url: str) -> Iterator[str]:
    """The URL of a database that a run has made its tables in."""
    with new_database(postgres_url) as url:
        run("db", "upgrade", url)
        execute(url, _IDLE)
        yield url


#: The others are tried in the long form: they differ in a statement.
_BY_DEFAULT = ("advisory locks that exclude nobody", "no snapshots", "no LISTEN", "no SKIP LOCKED")


@pytest.mark.parametrize(
    "lacking", [pytest.param(one, marks=() if one in _BY_DEFAULT else pytest.mark.long) for one in LACKING]
)
async def test_a_part_that_is_missing_is_said(with_tables: str, lacking: str) -> None:
    instead, parts, said = LACKING[lacking]
    findings = await found(with_tables, instead)
    assert of_parts(findings) == parts
    assert said in " ".join(f"{one.text} {one.mend}" for one in findings if one.level != "ok")


@pytest.mark.parametrize("lacking", LACKING_BEFORE)
async def test_a_part_that_is_missing_is_said_before_the_first_run(postgres_database: str, lacking: str) -> None:
    instead, parts, said = LACKING_BEFORE[lacking]
    findings = await found(postgres_database, instead)
    assert parts.items() <= of_parts(findings).items()
    assert said in " ".join(f"{one.text} {one.mend}" for one in findings if one.level != "ok")
    assert await asyncio.to_thread(left, postgres_database) == []


def test_a_server_is_examined_before_the_first_run_and_nothing_is_left_there(postgres_database: str) -> None:
    rows = examine(postgres_database)
    assert [rows["revision"][0]["level"], *(row["level"] for row in rows["engine"])] == ["warning", "ok"]
    assert all(part.name in rows["engine"][0]["text"] for part in PARTS)
    assert left(postgres_database) == []


def test_what_a_role_may_not_try_is_said(postgres_database: str) -> None:
    execute(postgres_database, "DO $$ BEGIN CREATE ROLE rb_looker LOGIN; EXCEPTION WHEN duplicate_object THEN END $$")
    try:
        execute(postgres_database, "REVOKE CREATE ON SCHEMA public FROM public")
        looker = make_url(postgres_database).set(username="rb_looker").render_as_string(hide_password=False)
        there, untried = examine(looker, code=1)["engine"]
        assert "advisory locks" in there["text"]
        assert untried["level"] == "warning"
        assert "SKIP LOCKED" in untried["text"]
        assert "the role may not: permission denied for schema public" in untried["text"]
    finally:
        execute(postgres_database, "DROP OWNED BY rb_looker; DROP ROLE rb_looker")


def test_the_page_has_all_parts() -> None:
    table = (DOCS / "engines.md").read_text("utf-8").partition("| part |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1].strip() for line in table.splitlines()[2:]]
    assert rows == [part.name for part in PARTS]
    wanted = ["**yes**" if part.needed else "no" for part in PARTS]
    assert [line.split("|")[3].strip().partition(":")[0].partition(",")[0] for line in table.splitlines()[2:]] == wanted
