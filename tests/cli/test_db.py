"""`replaybuf doctor --upgrade`."""

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


def test_upgrade_makes_the_tables_in_an_empty_database_and_then_changes_nothing(empty: str) -> None:
    [row] = run_json("doctor", empty, "--upgrade")
    assert (row["before"], row["after"]) == (None, HEAD)
    assert run_json("ls", empty) == []
    again = run("doctor", empty, "--upgrade")
    assert again.stdout.splitlines()[-1].split() == [HEAD, HEAD]
    assert again.stderr == "it was up to date already\n"


def test_an_older_schema_is_to_be_upgraded_and_a_newer_one_is_refused(
    empty: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("doctor", empty, "--upgrade")
    execute(empty, "UPDATE rb_version SET version_num = '9999'")
    assert "9999" in run("doctor", empty, "--upgrade", code=1).stderr
    monkeypatch.setattr(revisions, "REVISIONS", ("0000", HEAD))
    execute(empty, "UPDATE rb_version SET version_num = '0000'")
    assert "--upgrade" in run("ls", empty, code=1).stderr


def test_upgrade_leaves_other_databases_alone(empty: str) -> None:
    execute(empty, "CREATE TABLE other (a int)")
    assert "belongs to something else" in run("doctor", empty, "--upgrade", code=1).stderr


def test_no_file_is_created(tmp_path: Path) -> None:
    assert "there is no database" in run("doctor", tmp_path / "typo.db", "--upgrade", code=1).stderr
    assert list(tmp_path.iterdir()) == []
