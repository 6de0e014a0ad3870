"""How commands end: exit codes, one-line errors, pipes, Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from replaybuf.cli.commands import Commands
from replaybuf.storage.sql.inspection.reader import open_reader
from tests.cli.conftest import run, start

ENDLESS = "WITH RECURSIVE t(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM t) SELECT count(*) FROM t"
MANY = (
    "WITH RECURSIVE t(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM t WHERE x < 20000) "
    "SELECT x, 'more than a pipe holds' FROM t"
)
SECRET = "s3cr3t"


def test_stats_shows_no_password(filled: str) -> None:
    if "sqlite" not in filled:
        url = filled.replace("postgres:@", f"postgres:{SECRET}@")
        assert SECRET not in run("stats", url, "--format=json").stdout


def test_an_error_of_replaybuf_ends_with_1_and_one_line(tmp_path: Path) -> None:
    process = start("stats", tmp_path / "typo.db")
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (1, "")
    assert stderr == f"Error: there is no database sqlite:///{tmp_path}/typo.db (file {tmp_path}/typo.db)\n"


def test_an_error_cannot_drive_the_terminal(tmp_path: Path) -> None:
    stderr = run("stats", tmp_path / "a\x1b[2J\nb", code=1).stderr
    assert "\x1b" not in stderr
    assert len(stderr.splitlines()) == 1


def end_of(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit code, and what was written to stderr."""
    assert process.stderr is not None
    with process.stderr:
        return process.wait(60), process.stderr.read()


def test_a_closed_pipe_ends_quietly(file: Path) -> None:
    process = start("sql", file, MANY, "--format=json")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert end_of(process) == (141, "")


@pytest.mark.parametrize("backend", ["sqlite", "postgres"])
def test_ctrl_c_ends_quietly_and_at_once(file: Path, postgres_url: str, backend: str) -> None:
    url, statement = (str(file), ENDLESS) if backend == "sqlite" else (postgres_url, "SELECT pg_sleep(60)")
    process = start("sql", url, statement)
    if backend == "sqlite":
        while file not in [Path(one.path) for one in psutil.Process(process.pid).open_files()]:
            time.sleep(0.05)
    else:
        asked = "SELECT pid FROM pg_stat_activity WHERE query LIKE '%pg_sleep(60)%' AND pid <> pg_backend_pid()"
        while not open_reader(url).read_any(lambda tx: tx.values(asked)):
            time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=20)
    assert (process.returncode, stdout, stderr) == (130, "", "")


def test_ctrl_c_anywhere_ends_quietly(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    def interrupt(self: object, ctx: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Commands.__bases__[0], "invoke", interrupt)
    result = run("stats", file, code=130)
    assert result.output == ""


def test_what_the_terminal_cannot_show_is_escaped(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(Path(__file__).parents[2])}
    (tmp_path / "x.db").touch()
    command = [sys.executable, "-m", "replaybuf", "sql", str(tmp_path / "x.db"), "SELECT 'é' AS a"]
    for format, shown in (("--timeout=9", "\\xe9"), ("--format=json", "\\u00e9"), ("--format=csv", "\\xe9")):
        done = subprocess.run([*command, format], capture_output=True, text=True, env=env, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        assert shown in done.stdout
