"""`replaybuf db`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import Connection, text

from replaybuf.storage.sql.engine.urls import parse_url
from replaybuf.storage.sql.inspection.writer import over_sqlalchemy
from replaybuf.storage.sql.schema import revisions
from replaybuf.storage.sql.schema.revisions import HEAD
from tests.cli.conftest import run, run_json


def execute(url: str, *statements: str) -> None:
    def work(connection: Connection) -> None:
        for statement in statements:
            connection.execute(text(statement))

    asyncio.run(_write(url, work))


async def _write(url: str, work: Callable[[Connection], object]) -> None:
    await over_sqlalchemy(parse_url(url), work)


def test_current_shows_revision_and_state(filled: str) -> None:
    [row] = run_json("db", "current", filled)
    assert (row["revision"], row["wanted"], row["state"]) == (HEAD, HEAD, "up to date")
    assert HEAD in run("db", "current", filled).stdout


def test_current_of_an_empty_database_is_none(empty: str) -> None:
    [row] = run_json("db", "current", empty)
    assert (row["revision"], row["state"]) == (None, "no replaybuf tables")


def test_upgrade_makes_the_tables_in_an_empty_database(empty: str) -> None:
    [row] = run_json("db", "upgrade", empty)
    assert (row["before"], row["after"]) == (None, HEAD)
    assert run_json("ls", empty) == []


def test_an_older_schema_is_to_be_upgraded(empty: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run("db", "upgrade", empty)
    monkeypatch.setattr(revisions, "REVISIONS", ("0000", HEAD))
    execute(empty, "UPDATE rb_version SET version_num = '0000'")
    assert "replaybuf db upgrade" in run("ls", empty, code=1).stderr
    assert "older" in run("db", "current", empty).stdout


def test_upgrade_again_changes_nothing(empty: str) -> None:
    run("db", "upgrade", empty)
    again = run("db", "upgrade", empty)
    assert again.stdout.splitlines()[-1].split() == [HEAD, HEAD]
    assert again.stderr == "it was up to date already\n"


def test_upgrade_refuses_a_newer_schema(empty: str) -> None:
    run("db", "upgrade", empty)
    execute(empty, "UPDATE rb_version SET version_num = '9999'")
    assert "newer" in run("db", "current", empty).stdout
    assert "9999" in run("db", "upgrade", empty, code=1).stderr


def test_upgrade_leaves_other_databases_alone(empty: str) -> None:
    execute(empty, "CREATE TABLE other (a int)")
    assert "belongs to something else" in run("db", "upgrade", empty, code=1).stderr
    assert run_json("db", "current", empty)[0]["revision"] is None


@pytest.mark.parametrize("command", [("db", "current"), ("db", "upgrade")])
def test_no_file_is_created(tmp_path: Path, command: tuple[str, str]) -> None:
    assert "there is no database" in run(*command, tmp_path / "typo.db", code=1).stderr
    assert list(tmp_path.iterdir()) == []
