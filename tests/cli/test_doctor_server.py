"""`replaybuf doctor` about PostgreSQL: the server, each finding provoked once."""

from __future__ import annotations

import pytest
from sqlalchemy import make_url

from tests.cli.conftest import run
from tests.cli.doctored import examine
from tests.postgres import execute


@pytest.fixture
def url(postgres_database: str) -> str:
    run("doctor", postgres_database, "--upgrade")
    return postgres_database


def found(url: str, check: str) -> list[tuple[str, str]]:
    """Level and text of what a check found."""
    return [(row["level"], row["text"]) for row in examine(url, code=None)[check]]


def test_a_user_without_rights(url: str) -> None:
    execute(url, "DO $$ BEGIN CREATE ROLE rb_reader LOGIN; EXCEPTION WHEN duplicate_object THEN NULL; END $$")
    try:
        execute(url, "GRANT SELECT ON ALL TABLES IN SCHEMA public TO rb_reader")
        reader = make_url(url).set(username="rb_reader").render_as_string(hide_password=False)
        [(level, text)] = found(reader, "access")
        assert (level, "rb_reader lacks INSERT" in text) == ("problem", True)
    finally:
        execute(url, "DROP OWNED BY rb_reader")
        execute(url, "DROP ROLE rb_reader")


def test_an_index_that_was_not_finished_is_made_anew(url: str) -> None:
    execute(url, "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'rb_group_by_step'::regclass")
    [(level, text)] = found(url, "indexes")
    assert (level, text) == ("problem", "missing, or not finished: rb_group_by_step")
    assert "rb_group_by_step" in run("doctor", url, "--repair").stderr
    assert found(url, "indexes")[0][0] == "ok"


def test_a_server_that_is_not_there_is_a_problem(url: str) -> None:
    gone = make_url(url).set(database="no_such_database").render_as_string(hide_password=False)
    [row] = examine(gone, code=1)["revision"]
    assert row["text"].startswith("can't be checked")
