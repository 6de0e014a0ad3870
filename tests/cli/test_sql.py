"""`replaybuf sql`: it reads, and nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from replaybuf.cli import output
from tests.cli.conftest import run, run_json

WRITES = [
    "DELETE FROM rb_group",
    "DELETE FROM groups",
    "UPDATE groups SET reward = 1",
    "INSERT INTO groups (uid) VALUES (1)",
    "INSERT INTO rb_info (name, value) VALUES ('a', 'b')",
    "UPDATE rb_group SET priority = 0",
    "DROP VIEW groups",
    "CREATE TABLE mine (a int)",
    "CREATE TEMP TABLE mine (a int)",
]
SQLITE_ESCAPES = [
    "BEGIN IMMEDIATE",
    "ATTACH 'other.db' AS other",
    "VACUUM INTO 'other.db'",
    "VACUUM",
    "PRAGMA user_version = 9",
    "REINDEX",
]
POSTGRES_ESCAPES = [
    "WITH gone AS (DELETE FROM rb_group RETURNING uid) SELECT * FROM gone",
    "SELECT nextval('rb_uid')",
    "SET TRANSACTION READ WRITE",
    "SET transaction_read_only = off",
    "SELECT set_config('transaction_read_only', 'off', false)",
    "START TRANSACTION READ WRITE",
    "DO $$ BEGIN COMMIT; SET TRANSACTION READ WRITE; DELETE FROM rb_group; END $$",
    "DO $$ BEGIN PERFORM set_config('transaction_read_only', 'off', true); DELETE FROM rb_group; END $$",
    "TRUNCATE rb_group",
    "VACUUM",
    "SELECT 1 FROM rb_group FOR UPDATE",
]
# Allowed, and without consequence: the statement is the only one.
HARMLESS = ["COMMIT", "ROLLBACK"]


@pytest.fixture
def unchanged(filled: str) -> Iterator[str]:
    """The URL of a database that must be the same afterwards."""
    before = run_json("ls", filled, "--limit", "all")
    yield filled
    assert run_json("ls", filled, "--limit", "all") == before


def test_a_write_is_refused(unchanged: str) -> None:
    for statement in WRITES:
        stderr = run("sql", unchanged, statement, code=1).stderr
        assert stderr.startswith("Error: statements only read here"), statement
        assert len(stderr.splitlines()) == 1


@pytest.mark.parametrize("statement", SQLITE_ESCAPES)
def test_sqlite_has_no_way_out(file: Path, statement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    before = hashlib.sha256(file.read_bytes()).digest()
    run("sql", file, statement, code=1)
    assert hashlib.sha256(file.read_bytes()).digest() == before
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("statement", ["PRAGMA query_only = OFF", "PRAGMA journal_mode = DELETE"])
def test_settings_of_a_sqlite_connection_change_nothing(file: Path, statement: str) -> None:
    before = file.read_bytes()
    run("sql", file, statement)
    assert file.read_bytes() == before


@pytest.mark.parametrize("filled", ["postgres"], indirect=True)
def test_postgresql_has_no_way_out(unchanged: str) -> None:
    for statement in POSTGRES_ESCAPES:
        assert "Error: statements only read here" in run("sql", unchanged, statement, code=1).stderr, statement


def test_ending_the_transaction_leads_nowhere(unchanged: str) -> None:
    for statement in HARMLESS:
        run("sql", unchanged, statement)


def test_there_is_one_statement(unchanged: str) -> None:
    for second in ("SELECT 2", "DELETE FROM rb_group", "COMMIT"):
        assert run("sql", unchanged, f"SELECT 1; {second}", code=1).stderr.startswith("Error: ")


@pytest.mark.parametrize("statement", ["SELECT {}", "{}", "SELECT '{}"])
def test_a_wrong_statement_is_quoted_in_brief(filled: str, statement: str) -> None:
    stderr = run("sql", filled, statement.format("x" * 5000), code=1).stderr
    assert stderr.startswith("Error: ")
    assert len(stderr) < 500


def test_sums_of_integers_have_all_their_digits(filled: str) -> None:
    statement = "SELECT sum(uid * 0 + 1234567890123) / count(*) AS mean FROM groups"
    assert "1234567890123" in run("sql", filled, statement).stdout


def test_a_column_may_have_any_name(filled: str) -> None:
    assert "17" in run("sql", filled, 'SELECT 17 AS "annotations.x"').stdout


def test_no_rows_are_an_empty_list(filled: str) -> None:
    assert run("sql", filled, "SELECT uid FROM groups WHERE uid < 0", "--format=json").stdout == "[]\n"
    assert run("sql", filled, "SELECT uid FROM groups WHERE uid < 0").stderr == "no rows (columns: uid)\n"


@pytest.mark.parametrize("statement", ["SELECT * FROM grups", "SELECT g.taskname FROM groups g", "SELECT * FROM group"])
def test_a_mistake_is_said_with_where_the_columns_are_listed(filled: str, statement: str) -> None:
    stderr = run("sql", filled, statement, code=1).stderr
    assert any(name in stderr for name in ("grups", "taskname", "group"))
    assert stderr.endswith("; `replaybuf sql URL` lists the views and their columns\n")


@pytest.mark.parametrize(
    ("filled", "parameter"),
    [*(("sqlite", parameter) for parameter in ("?", ":name", "$1")), ("postgres", "$1::int")],
    indirect=["filled"],
)
def test_parameters_are_refused(filled: str, parameter: str) -> None:
    assert run("sql", filled, f"SELECT {parameter}", code=1).stderr.startswith("Error: ")


@pytest.mark.parametrize(("statement"), ["SELECT 'a%sb%%' AS a", "SELECT 'a%sb%%' AS a -- :x"])
def test_the_statement_arrives_as_it_is(filled: str, statement: str) -> None:
    assert run_json("sql", filled, statement) == [{"a": "a%sb%%"}]


def test_a_statement_is_stopped_after_the_timeout(filled: str) -> None:
    endless = "WITH RECURSIVE t(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM t) SELECT count(*) FROM t"
    stderr = run("sql", filled, endless, "--timeout", "0.2", code=1).stderr
    assert stderr == "Error: stopped after 0.2 s\n"


def test_bytes_are_base64_for_programs_and_a_size_for_people(filled: str) -> None:
    statement = "SELECT data FROM rb_payload WHERE uid = 15"
    [row] = run_json("sql", filled, statement)
    assert row["data"]["$base64"] is True
    assert row["data"]["encoded"].startswith("UlBMQ")  # RPLB
    assert "bytes>" in run("sql", filled, statement).stdout


@pytest.mark.parametrize(
    ("filled", "value"),
    [("sqlite", "9e999"), ("sqlite", "-9e999"), ("postgres", "'NaN'::float8"), ("postgres", "'Infinity'::numeric")],
    indirect=["filled"],
)
def test_numbers_that_json_lacks_are_null(filled: str, value: str) -> None:
    assert run_json("sql", filled, f"SELECT {value} AS a") == [{"a": None}]
    assert run("sql", filled, f"SELECT {value} AS a").stdout


@pytest.mark.parametrize("filled", ["postgres"], indirect=True)
def test_postgresqls_types_are_printed(filled: str) -> None:
    [row] = run_json(
        "sql",
        filled,
        "SELECT 1.5::numeric AS n, 10::numeric AS i, '{\"a\": [1]}'::jsonb AS j, ARRAY[1, 2] AS r, "
        "'2026-01-02 03:04:05+01'::timestamptz AS t, '2026-01-02'::date AS d, interval '1 day' AS v",
    )
    assert row == {
        "n": 1.5,
        "i": 10,
        "j": {"a": [1]},
        "r": [1, 2],
        "t": "2026-01-02T02:04:05.000Z",
        "d": "2026-01-02",
        "v": "1 day, 0:00:00",
    }


def test_where_the_terminal_is_too_narrow_a_field_has_a_line(filled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_UNLIMITED_WIDTH", 80)
    lines = run("sql", filled, "SELECT * FROM groups ORDER BY uid DESC LIMIT 2").stdout.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert [line for line in lines if line.startswith("─[")] == ["─[ 1 ]" + "─" * 74, "─[ 2 ]" + "─" * 74]
    assert [line.split() for line in lines if line.startswith("uid ")] == [["uid", "15"], ["uid", "14"]]
    assert "status           completed" in [line.rstrip() for line in lines]


def test_columns_of_one_name_are_numbered(filled: str) -> None:
    assert run_json("sql", filled, "SELECT 1 AS a, 2 AS a, 3 AS a_2") == [{"a": 1, "a_2": 2, "a_2_2": 3}]
