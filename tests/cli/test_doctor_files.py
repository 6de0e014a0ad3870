"""`replaybuf doctor` about SQLite: its file, each finding provoked once."""

from __future__ import annotations

import random
import re
import shutil
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from replaybuf import ReplayBufferConfig, RolloutState, Status
from replaybuf.storage.sql.engine.sqlite_files import PAGE_SIZE
from tests.cli.conftest import run
from tests.cli.doctored import examine, wrong
from tests.postgres import execute

DAMAGED_TEXTS = {
    "outline": ("rb_payload", "CAST(x'5ba5' AS TEXT)"),
    "prompt": ("rb_payload", "CAST(x'a5' AS TEXT)"),
    "marks": ("rb_group", "'{'"),
    "tags": ("rb_group", "'{\"a\": '"),
    "scoped_key": ("rb_group", "'['"),
    "error": ("rb_group", "CAST(x'a5' AS TEXT)"),
    # What SQLite takes for its end, half a character at the end, and text that is no JSON of SQLite's.
    "tags and more": ("rb_group", "CAST(x'7b7d00ff' AS TEXT)"),
    "prompt cut short": ("rb_payload", "CAST(x'61c3' AS TEXT)"),
    "marks that end early": ("rb_group", "'[1],[2'"),
}


@pytest.mark.parametrize("column", DAMAGED_TEXTS)
def test_texts_that_cannot_be_read_are_removed(file: Path, column: str) -> None:
    """Their group is set aside; then all commands work again, and no group is gone."""
    before = run("ls", file, "--limit", "all", "--format=json").stdout
    table, value = DAMAGED_TEXTS[column]
    column = column.split()[0]
    execute(file, f"UPDATE {table} SET {column} = {value} WHERE uid = (SELECT min(uid) FROM rb_group)")
    rows = examine(file, code=1)["payloads"]
    assert (rows[0]["level"], column in rows[0]["text"], rows[0]["repairable"]) == ("problem", True, True)
    assert wrong(examine(file, "--repair")) == {}
    after = run("ls", file, "--limit", "all", "--format=json").stdout
    assert len(after.splitlines()) == len(before.splitlines())


def test_texts_of_a_group_whose_payload_is_damaged_too(file: Path) -> None:
    """It is set aside, and can be looked at."""
    first = "WHERE uid = (SELECT min(uid) FROM rb_group)"
    execute(file, f"UPDATE rb_group SET marks = '{{' {first}", f"UPDATE rb_payload SET data = x'00' {first}")
    assert "problem" not in wrong(examine(file, "--repair")).values()
    assert "payload is damaged" in run("ls", file, "--status", "failed", "--format=json").stdout


def test_what_cannot_be_repaired_is_not_called_fine(tmp_path: Path) -> None:
    (tmp_path / "run.db").write_bytes(b"SQLite format 3\0" + b"\0" * 5000)
    note = run("doctor", tmp_path / "run.db", "--repair", code=1).stderr
    assert "there is nothing that can be repaired" in note


def test_an_index_that_differs_from_its_table_is_made_anew(file: Path) -> None:
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        connection.execute("PRAGMA writable_schema = ON")
        row = connection.execute("SELECT * FROM sqlite_master WHERE name = 'rb_group_in_order'").fetchone()
        connection.execute("DELETE FROM sqlite_master WHERE name = 'rb_group_in_order'")
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        connection.execute("UPDATE rb_group SET lane = lane + 0, uid = uid + 1000 WHERE uid = 15")
        connection.execute("UPDATE rb_payload SET uid = uid + 1000 WHERE uid = 15")
        connection.execute("UPDATE rb_info SET number = 2000 WHERE name = 'uid'")
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute("INSERT INTO sqlite_master VALUES (?, ?, ?, ?, ?)", row)
    [finding] = examine(file, code=1)["integrity"]
    assert (finding["level"], finding["repairable"]) == ("problem", True)
    assert wrong(examine(file, "--repair")) == {}
    assert examine(file)["integrity"][0]["level"] == "ok"


def test_a_damaged_page_is_a_problem_that_no_repair_mends(file: Path) -> None:
    data = bytearray(file.read_bytes())
    with closing(sqlite3.connect(file)) as connection:
        root, size = connection.execute(
            "SELECT rootpage, (SELECT * FROM pragma_page_size) FROM sqlite_master WHERE name = 'rb_group'"
        ).fetchone()
    data[(root - 1) * size : root * size] = b"\xff" * size
    file.write_bytes(data)
    findings = examine(file, code=1)
    assert any("docs/outages.md" in row["mend"] and not row["repairable"] for row in findings["integrity"])
    assert any(row["text"].startswith("can't be checked") for rows in findings.values() for row in rows)
    assert examine(file, "--repair", code=1).keys() == findings.keys()


def test_a_file_that_never_was_a_database_is_not_to_be_saved(tmp_path: Path) -> None:
    notes = tmp_path / "notes.db"
    notes.write_text("These are notes.\n" * 50)
    output = run("doctor", notes, code=1).stdout
    assert "file is not a database" in output
    assert "docs/outages.md" not in output


PAGE = Path(__file__).parents[2].joinpath("docs/outages.md").read_text("utf-8").partition("## What is left")[2]
SAVING = re.findall(r"sqlite3 run\.db \.[^\n`]* saved\.db", PAGE)


@pytest.mark.skipif(not shutil.which("sqlite3"), reason="SQLite's own program isn't installed")
@pytest.mark.parametrize("command", SAVING, ids=lambda command: command.split()[2])
def test_what_sqlite_saves_of_a_damaged_file_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """By the commands of docs/outages.md; all that isn't on the damaged page is there, or (.dump) all before it."""
    monkeypatch.chdir(tmp_path)
    if ".recover" in command:
        Path("probe.db").touch()
        probe = subprocess.run(["sqlite3", "probe.db", ".recover"], capture_output=True, check=False)
        if b"error" in probe.stderr:
            pytest.skip("this sqlite3 was built without .recover: put that of sqlite.org on the path")
    groups = [
        [
            RolloutState(
                rollout_id=n,
                message=[{"role": "user", "content": f"<{n}>" * 9}],
                response=random.randbytes(999).hex(),
                status=Status.COMPLETED,
            )
        ]
        for n in range(40)
    ]
    with ReplayBufferConfig(url="sqlite:///run.db").build_sync() as buffer:
        buffer.put_many(groups, "math")
    data, size = bytearray(Path("run.db").read_bytes()), PAGE_SIZE
    page = data.index(b"<20>" * 9) // size
    lost = {int(n) for n in re.findall(rb"<(\d+)>", data[page * size : (page + 1) * size])}
    data[page * size : (page + 1) * size] = b"\xff" * size
    Path("run.db").write_bytes(data)
    subprocess.run(command, shell=True, check=True, capture_output=True)
    run("doctor", "saved.db", "--repair", code=None)
    assert set(wrong(examine(tmp_path / "saved.db", code=None))) <= {"payloads"}
    with ReplayBufferConfig(url="sqlite:///saved.db").build_sync() as buffer:
        rollouts = [item.item[0] for item in buffer.find({"status": "completed"})]
    assert all(rollout.response == groups[rollout.rollout_id][0].response for rollout in rollouts)
    assert {rollout.rollout_id for rollout in rollouts} >= (
        set(range(40)) - lost if ".recover" in command else set(range(min(lost)))
    )
