"""`replaybuf export` and `replaybuf import`."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest

from replaybuf.common.progress import progress_bar
from replaybuf.storage.sql.tasks.sweeper import Sweeper
from tests.cli.conftest import COMMAND, run, run_json
from tests.cli.test_save import ACROSS, groups_of
from tests.scripts import Script


@ACROSS
def test_what_was_exported_is_what_is_imported(filled: str, shared_url: str, tmp_path: Path) -> None:
    [summary] = run_json("export", filled, tmp_path / "a.jsonl")
    rows = groups_of(filled)
    assert (summary["groups"], summary["rollouts"]) == (len(rows), 4 * len(rows))
    run("import", shared_url, tmp_path / "a.jsonl")
    for row in (*rows, *(imported := groups_of(shared_url))):
        del row["uid"], row["bytes"]  # of responses that were reset when they expired
        del row["put_step"]  # a file has the staleness itself
    assert imported == rows
    assert [row["new"] for row in run_json("import", shared_url, tmp_path / "a.jsonl")] == [0, 0, 0, 0]


def test_a_dry_run_says_what_would_be_imported_and_makes_nothing(filled: str, tmp_path: Path) -> None:
    run("export", filled, tmp_path / "a.parquet", "--task", "math", "--status", "completed")
    [row] = run_json("import", tmp_path / "new.db", tmp_path / "a.parquet", "--dry-run")
    assert (row["task_name"], row["status"], row["groups"], row["new"]) == ("math", "completed", 8, 8)
    assert not (tmp_path / "new.db").exists()


def test_rows_go_into_pipes(file: Path) -> None:
    """stdout holds rows alone."""
    options = ["--where", '{"staleness": {"$gte": 3}}', "--order-by", "-uid"]
    code, output, _ = Script(COMMAND, "export", file, "-", *options).end()
    assert code == 0
    rows = [json.loads(line) for line in output.splitlines()]
    uids = [row["group.uid"] for row in rows]
    assert uids == sorted(uids, reverse=True) != []


@pytest.mark.fast
def test_a_bar_counts_with_and_without_a_total(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    for total, shown in ((0, "imported .* 3/[?]"), (5, "imported .* 3/5")):
        with progress_bar("imported") as tell:
            tell(3, total)
        assert re.search(shown, re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", terminal.getvalue()))


def test_an_export_changes_nothing(file: Path, tmp_path: Path) -> None:
    before = groups_of(file)
    run("export", file, tmp_path / "a.jsonl")
    assert groups_of(file) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "run.db"]


@pytest.mark.parametrize("name", ["a.jsonl", "-"])
def test_an_export_of_no_such_task_names_those_that_there_are(filled: str, tmp_path: Path, name: str) -> None:
    """And makes no file."""
    target = name if name == "-" else tmp_path / name
    result = run("export", filled, target, "--task", "mth", code=1)
    assert "nothing was exported: nothing was ever put into this task; there are the tasks code" in result.stderr
    assert (result.stdout, (tmp_path / name).exists()) == ("", False)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("export", "{file}", "{folder}/a.csv"), 1, "doesn't say its format"),
        (("export", "{folder}/none.db", "{folder}/a.jsonl"), 1, "there is no database"),
        (("export", "{file}", "{file}"), 1, "doesn't say its format"),
        (("export", "{file}", "{folder}/a.jsonl", "--where", "{{"), 1, "a query is JSON"),
        (("export", "{file}", "{folder}/none/a.jsonl"), 1, "can't be written"),
        (("export", "{file}"), 2, "FILE"),
        (("export", "{file}", "{there}"), 1, "or replace it (--force; force=True in Python)"),
        (("import", "{folder}/new.db", "{folder}/none.jsonl"), 1, "none.jsonl can't be read: No such file"),
        (("import", "{folder}/new.db", "{file}"), 1, "no JSON object"),
        (("import", "{folder}/new.db", "{file}", "--field", "response"), 2, "is no mapping"),
        (("import", "{folder}/new.db", "{file}", "--field", "respnse=a"), 1, "respnse is no field of rollouts"),
        (("import", "{folder}/new.db", "{file}", "--field", "pg://me:pw@db/rl"), 2, "'***' is no mapping"),
        (("import", "{folder}/new.db", "{file}", "--as-status", "done"), 1, "unknown status 'done'"),
        (("import", "sqlite://", "{file}"), 1, "in memory would be gone"),
    ],
)
def test_mistakes_are_explained(
    arguments: tuple[str, ...], code: int, message: str, file: Path, tmp_path: Path
) -> None:
    (existing := tmp_path / "there.jsonl").touch()
    result = run(*(argument.format(file=file, folder=tmp_path, there=existing) for argument in arguments), code=code)
    assert message in result.stderr.replace("\n", " ")
    assert not list(tmp_path.glob("*.partial"))
    assert not (tmp_path / "new.db").exists()


def test_who_exports_or_saves_looks_after_nothing(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's limits, of its history, its leases, ..., aren't known to commands."""
    swept: list[Sweeper] = []
    monkeypatch.setattr(Sweeper, "start", swept.append)
    run("export", file, tmp_path / "a.jsonl")
    run("checkpoint", "save", file, tmp_path / "saved")
    assert not swept
