"""Reading leaves databases as they are, and their writers in peace."""

from __future__ import annotations

import re
import shutil
import sqlite3
import threading
from pathlib import Path

import pytest

from replaybuf.cli.commands import on_storage
from replaybuf.errors import LockedError, StorageError
from replaybuf.storage.sql.inspection.reader import Transaction, open_reader
from tests.cli.conftest import run, run_json
from tests.scripts import Script

COMMANDS = [("stats",), ("ls",), ("show", "15"), ("show", "15", "--full"), ("sql", "SELECT 1"), ("checkpoint", "ls")]
COMMANDS += [("why",), ("trace",), ("doctor",)]


def at(command: tuple[str, ...], url: object) -> tuple[object, ...]:
    """The command with the URL in its place."""
    place = 2 if command[0] == "checkpoint" else 1
    return (*command[:place], url, *command[place:])


@pytest.mark.parametrize("command", [*COMMANDS, ("doctor", "--repair"), ("doctor", "--upgrade"), ("export", "-")])
def test_a_database_that_is_not_there_is_an_error_and_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    for url in ("typo.db", "sqlite:///nowhere/typo.db"):
        assert run(*at(command, url), code=1).stderr.startswith("Error: there is no database sqlite:///")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", COMMANDS)
def test_a_quiet_file_is_left_as_it_is(file: Path, command: tuple[str, ...]) -> None:
    before = file.stat().st_mtime_ns
    run(*at(command, file))
    assert list(file.parent.iterdir()) == [file]
    assert file.stat().st_mtime_ns == before


@pytest.mark.parametrize("name", ["run.db", "a b.db", "50%.db", "what?.db", "#1.db", "ü.db", "a&mode=rwc.db"])
def test_a_path_stands_for_its_url(file: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = file.rename(file.parent / name)
    monkeypatch.chdir(file.parent)
    assert len(run_json("ls", name)) == len(run_json("ls", path)) == 13
    assert list(file.parent.iterdir()) == [path]


@pytest.mark.parametrize("url", ["memory://", "sqlite://", "sqlite:///:memory:"])
def test_buffers_in_memory_have_nothing_to_read(url: str) -> None:
    assert "lives in the process that made it" in run("stats", url, code=1).stderr


@pytest.mark.parametrize(("statements", "numbers"), [(1, 10**12), (10**2, 10**5)])
def test_a_read_is_stopped_after_its_timeout_in_whatever_statement_it_is(
    filled: str, statements: int, numbers: int
) -> None:
    counting = (
        f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {numbers}) SELECT max(i) FROM n"
    )
    with pytest.raises(LockedError, match=r"^stopped after 0\.2 s$"):
        open_reader(filled).read(lambda tx: [tx.value(counting) for _ in range(statements)], timeout=0.2)


def test_a_database_of_something_else_is_an_error(empty: str) -> None:
    assert "has no replaybuf tables" in run("stats", empty, code=1).stderr
    with pytest.raises(StorageError, match="has no replaybuf tables"):
        on_storage(empty, "default", lambda storage: storage.open(), read_only=True)


def test_a_file_that_is_no_database_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("to do\n" * 1000)
    assert "not a database" in run("stats", tmp_path / "notes.txt", code=1).stderr


@pytest.mark.parametrize("mode", ["wal", "delete"])
def test_a_writer_does_not_wait_for_a_reader(file: Path, mode: str) -> None:
    connection = sqlite3.connect(file, isolation_level=None)
    connection.execute(f"PRAGMA journal_mode = {mode}")
    connection.close()
    reading, written = threading.Event(), threading.Event()
    priorities = []

    def work(tx: Transaction) -> None:
        priorities.append(tx.value("SELECT max(priority) FROM rb_group"))
        reading.set()
        written.wait(10)

    thread = threading.Thread(target=open_reader(str(file)).read, args=(work,))
    thread.start()
    reading.wait(10)
    writer = sqlite3.connect(file, timeout=0, isolation_level=None)
    writer.execute("UPDATE rb_group SET priority = 7")
    written.set()
    thread.join()
    assert priorities == [1.0, 7.0]  # it noticed that the file was written, and read again
    writer.close()


def test_a_reader_of_a_log_sees_one_state(file: Path) -> None:
    writer = sqlite3.connect(file, isolation_level=None)
    writer.execute("UPDATE rb_group SET priority = 2")

    def work(tx: Transaction) -> list[object]:
        first = tx.value("SELECT max(priority) FROM rb_group")
        writer.execute("UPDATE rb_group SET priority = 3")
        return [first, tx.value("SELECT max(priority) FROM rb_group")]

    assert open_reader(str(file)).read(work) == [2.0, 2.0]
    writer.close()


# As root nothing is read-only, so these run in a process that becomes nobody first, with all that it needs imported.
_AS_NOBODY = """
from sqlalchemy.dialects.sqlite import pysqlite
from replaybuf.cli.commands import app
if os.getuid() == 0:
    app(["ls", sys.argv[1]], standalone_mode=False)
    os.setgid(65534)
    os.setuid(65534)
app(["ls", sys.argv[2], "--format=json"])
"""


def ls_as_nobody(file: Path, path: Path) -> tuple[int, str, str]:
    path.parent.chmod(0o555)
    try:
        return Script(_AS_NOBODY, file, path).end()
    finally:
        path.parent.chmod(0o755)


def test_a_read_only_folder_is_read(file: Path, open_folder: Path) -> None:
    path = Path(shutil.copy(file, open_folder))
    path.chmod(0o444)
    code, output, problems = ls_as_nobody(file, path)
    assert code == 0, problems
    assert output.splitlines()[-2].startswith(' {"uid": ')


def test_a_log_in_a_read_only_folder_is_a_clear_error(file: Path, open_folder: Path) -> None:
    writer = sqlite3.connect(file, isolation_level=None)
    writer.execute("UPDATE rb_group SET priority = 2")
    path = Path(shutil.copy(file, open_folder))
    shutil.copy(f"{file}-wal", open_folder)
    writer.close()
    code, _, problems = ls_as_nobody(file, path)
    assert (code, len(problems.splitlines())) == (1, 1)
    assert re.search(r"write-ahead log \(run.db-wal\), which .* isn't writable: copy both files", problems)


def test_a_file_without_permission_is_a_clear_error(file: Path, open_folder: Path) -> None:
    path = Path(shutil.copy(file, open_folder))
    path.chmod(0)
    code, _, problems = ls_as_nobody(file, path)
    assert code == 1
    assert "check the permissions" in problems
