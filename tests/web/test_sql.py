"""SQL on the page: it reads, ends in time, and shows what it finds."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import pytest
from sqlalchemy import make_url

from replaybuf.errors import AccessError, QueryError
from replaybuf.storage.sql.inspection.user_sql import QUESTIONS
from replaybuf.web.apart import Answer, answer
from replaybuf.web.pages.sql import plot_of
from tests.cli.test_sql import POSTGRES_ESCAPES, SQLITE_ESCAPES, WRITES
from tests.web.conftest import Client, client_of
from tests.web.example import HOSTILE_UID, SCRIPT


@pytest.fixture(scope="module")
def sql(reader: str) -> Client:
    return client_of(reader)


def ask(client: Client, statement: str, kind: str = "/api/sql.json") -> Any:
    return client.get(f"{kind}?sql={quote(statement)}")


def test_an_answer_has_its_rows(sql: Client) -> None:
    found = ask(sql, "SELECT uid, task_name FROM groups WHERE uid IN (1, 2) ORDER BY uid").json()
    assert found["names"] == ["uid", "task_name"]
    assert found["rows"] == [[1, "math"], [2, "code"]]
    assert not found["is_cut"]


def refused(url: str, statement: str) -> str:
    """Return why a statement isn't run, as the process that runs it says."""
    with pytest.raises((AccessError, QueryError)) as caught:
        answer(url, statement, seconds=10, most=5, ours=False)
    return str(caught.value)


def test_what_writes_and_what_leads_out_is_refused(reader: str) -> None:
    """Some are no statements of this database, which is an error, too."""
    before = client_of(reader).get("/api/groups.json").json()
    for statement in (*WRITES, *SQLITE_ESCAPES, *POSTGRES_ESCAPES, "SELECT load_extension('x')"):
        assert refused(reader, statement), statement
    assert client_of(reader).get("/api/groups.json").json()["rows"] == before["rows"]


_ENDLESS = {
    "sqlite": [
        "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c",
        "SELECT instr(zeroblob(100000000), zeroblob(50000000) || 'x')",  # which SQLite doesn't interrupt
    ],
    "postgresql": [
        "SELECT pg_sleep(60)",
        "SELECT set_config('statement_timeout', '0', true), pg_sleep(60)",
    ],
}


@pytest.mark.parametrize("which", [0, 1])
def test_no_statement_outlives_its_limit(reader: str, which: int) -> None:
    client = client_of(reader, seconds=0.5)
    statement = _ENDLESS[make_url(reader).get_backend_name()][which]
    started = time.monotonic()
    assert ask(client, statement).json()["error"].startswith("stopped after 0.5 s")
    assert time.monotonic() - started < 30


def test_too_many_rows_are_cut(sql: Client) -> None:
    many = "SELECT a.uid FROM groups a CROSS JOIN groups b"
    found = ask(sql, many).json()
    assert len(found["rows"]) == 500
    assert found["is_cut"]
    assert "up to 100,000" in ask(sql, many, "/sql").text
    assert len(ask(sql, many, "/csv/sql.csv").text.splitlines()) > 10_000


@pytest.mark.parametrize("filled", ["postgres"], indirect=True)
def test_a_superuser_gets_only_the_questions(filled: str) -> None:
    client = client_of(filled)
    assert "as a superuser of PostgreSQL" in ask(client, "SELECT pg_read_file('/etc/passwd')").json()["error"]
    question = next(iter(client.get("/api/sql.json").json()["topics"].values()))[0]["sql"]
    assert ask(client, question).json()["error"] is None


def test_every_question_is_answered(reader: str) -> None:
    topics = client_of(reader).get("/api/sql.json").json()["topics"]
    asked = [one["sql"] for questions in topics.values() for one in questions]
    assert len(asked) == len(QUESTIONS)
    for statement in asked:
        assert answer(reader, statement, seconds=10, most=5, ours=False).names, statement


def test_questions_are_about_the_last_step(sql: Client) -> None:
    [[last]] = ask(sql, "SELECT step FROM batches WHERE step IS NOT NULL ORDER BY id DESC LIMIT 1").json()["rows"]
    assert f"step = {last}" in json.dumps(sql.get("/api/sql.json").json()["topics"])


def test_a_mistake_lists_what_there_is(sql: Client) -> None:
    page = ask(sql, "SELECT rewrd FROM batch_groups", "/sql")
    assert page.status_code == 400
    assert "did you mean reward?" in page.text
    assert "SELECT rewrd FROM batch_groups</textarea>" in page.text


def test_hostile_texts_are_texts(sql: Client) -> None:
    for statement in (f"SELECT prompt FROM groups WHERE uid = {HOSTILE_UID}", f'SELECT 1 AS "{SCRIPT}"'):
        text = ask(sql, statement, "/sql").text
        assert "<script>document" not in text
        assert "<img" not in text


def test_texts_of_csv_are_no_formulas(sql: Client) -> None:
    text = ask(sql, "SELECT '=1+1' AS a, '-2' AS b, -2 AS c, 'x' AS d", "/csv/sql.csv").text
    assert text.splitlines() == ["a,b,c,d", "'=1+1,'-2,-2,x"]


def test_a_page_of_one_buffer_has_no_sql(reader: str) -> None:
    client = client_of(reader, buffer="default")
    assert ask(client, "SELECT 1").status_code == 404
    assert 'href="/sql' not in client.get("/").text


@pytest.mark.parametrize("statement", ["", "   ", "\x00", "-- nothing", "SELECT " + "1," * 10_000 + "1"])
def test_no_statement_is_an_error_or_nothing(sql: Client, statement: str) -> None:
    assert ask(sql, statement).status_code in (200, 400)


def test_numbers_are_plotted_by_the_first_column() -> None:
    plot = plot_of(Answer(["step", "reward"], [[1, 0.5], [2, 0.75], [3, 0.7]], is_cut=False))
    assert plot is not None
    assert plot.sentence == "reward, from step 1 to step 3; at the end: reward 0.70"


def test_names_in_the_second_column_are_lines() -> None:
    rows = [[1, "a", 0.5], [1, "b", 0.6], [2, "a", 0.7], [2, "b", None]]
    plot = plot_of(Answer(["step", "worker", "reward"], [*rows, [3, "b", 1.0]], is_cut=False))
    assert plot is not None
    assert [text for _, text in plot.legend] == ["a 0.70", "b 1"]


def test_times_are_plotted_as_times() -> None:
    times: list[Any] = ["2026-11-24 10:00:00.000", "2026-11-24 10:00:30.000"]
    for rows in (times, [datetime(2026, 11, 24, 10, n, tzinfo=UTC) for n in range(2)]):
        plot = plot_of(Answer(["taken_at", "groups"], [[rows[0], 3], [rows[1], 5]], is_cut=False))
        assert plot is not None
        assert "UTC" in plot.sentence


def test_values_by_name_are_bars() -> None:
    plot = plot_of(Answer(["worker", "reward"], [["a", 0.5], ["b", 0.25]], is_cut=False))
    assert plot is not None
    assert plot.sentence == "reward by worker: 2 bars, the highest a with 0.500"


@pytest.mark.parametrize(
    ("names", "rows"),
    [
        (["a"], [[1], [2]]),
        (["a", "b"], [[1, 2]]),
        (["a", "b"], [["x", "y"], ["z", "w"]]),
        (["a", "b"], [["x", 1], ["x", 2]]),
        (["a", "b"], [["x", -1], ["y", 2]]),
        (["a", "b"], [[1, 2], [1, 3]]),
        (["a", "b"], []),
    ],
)
def test_what_has_no_plot_has_none(names: list[str], rows: list[list[Any]]) -> None:
    assert plot_of(Answer(names, rows, is_cut=False)) is None
