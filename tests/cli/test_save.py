"""`replaybuf checkpoint`: ls, save, resume."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from replaybuf import ReplayBufferConfig
from tests.cli.conftest import run, run_json
from tests.contract.harness import group
from tests.postgres import execute

save = partial(run, "checkpoint", "save")
resume = partial(run, "checkpoint", "resume")


def groups_of(url: object) -> list[dict[str, Any]]:
    """The groups, without what the databases round in ways of their own."""
    rows: list[dict[str, Any]] = run_json("ls", url, "--limit", "all")
    return [{name: value for name, value in row.items() if name not in ("buffer", "created_at")} for row in rows]


#: From each database into the other.
ACROSS = pytest.mark.parametrize(
    ("filled", "shared_url"), [("sqlite", "postgresql"), ("postgres", "sqlite")], indirect=True
)


@ACROSS
def test_what_was_saved_is_what_is_resumed(filled: str, shared_url: str, tmp_path: Path) -> None:
    """Counts included."""
    [saved] = run_json("checkpoint", "save", filled, tmp_path / "backup")
    rows = groups_of(filled)
    assert (saved["groups"], saved["bytes"]) == (len(rows), sum(row["bytes"] for row in rows))
    if shared_url.startswith("postgresql"):
        run("doctor", shared_url, "--upgrade")
    [resumed] = run_json("checkpoint", "resume", shared_url, tmp_path / "backup")
    assert (resumed["groups"], resumed["bytes"]) == (saved["groups"], saved["bytes"])
    assert groups_of(shared_url) == rows
    before, after = (run_json("stats", url)["buffers"]["default"]["tasks"] for url in (filled, shared_url))
    assert after == before


def test_without_a_policy_a_snapshot_is_for_all(filled: str, tmp_path: Path) -> None:
    save(filled, tmp_path)
    for policy in ("fifo", "prioritized"):
        with ReplayBufferConfig(url="sqlite:///:memory:", policy=policy).build_sync() as buffer:
            buffer.resume(tmp_path)
            assert len(buffer) == 13


def test_resume_takes_the_policy_of_the_snapshot(tmp_path: Path) -> None:
    with ReplayBufferConfig(url="sqlite:///:memory:", policy="uniform").build_sync() as buffer:
        buffer.put(group(1), "math")
        buffer.get(1, "math")
        buffer.save(tmp_path)
    [row] = run_json("checkpoint", "resume", tmp_path / "new.db", tmp_path)
    assert row["policy"] == "uniform"


def test_a_policy_of_ones_own_needs_not_be_there(tmp_path: Path, filled: str) -> None:
    save(filled, tmp_path)
    foreign = "INSERT INTO rb_info (name, value) VALUES ('policy', 'my own')"
    execute(tmp_path / "replaybuf.sqlite", foreign, "UPDATE rb_info SET value = '' WHERE name = 'digest'")
    [row] = run_json("checkpoint", "resume", tmp_path / "new.db", tmp_path)
    assert (row["policy"], row["groups"]) == ("my own", 13)


def test_the_buffer_is_chosen_by_its_name(busy: str, tmp_path: Path) -> None:
    """Or is the only one, or the one without a name."""
    assert run_json("checkpoint", "save", busy, tmp_path / "1", "--buffer", "eval")[0]["groups"] == 1
    assert run_json("checkpoint", "save", busy, tmp_path / "2")[0]["buffer"] == "default"
    assert "there is no buffer 'other'" in save(busy, tmp_path / "3", "--buffer", "other", code=1).stderr
    resume(tmp_path / "new.db", tmp_path / "1", "--buffer", "one")
    assert run_json("checkpoint", "save", tmp_path / "new.db", tmp_path / "4")[0]["buffer"] == "one"
    resume(tmp_path / "new.db", tmp_path / "1", "--buffer", "two")
    assert "--buffer" in save(tmp_path / "new.db", tmp_path / "5", code=1).stderr


def test_a_quiet_file_is_left_as_it_is(file: Path, tmp_path: Path) -> None:
    before = file.read_bytes()
    save(file, tmp_path / "backup")
    assert file.read_bytes() == before
    assert sorted(path.name for path in file.parent.iterdir()) == ["backup", "run.db"]
    save(tmp_path / "backup" / "replaybuf.sqlite", tmp_path / "again")
    assert [path.name for path in (tmp_path / "backup").iterdir()] == ["replaybuf.sqlite"]


def test_errors_are_on_one_line(file: Path, tmp_path: Path) -> None:
    save(file, tmp_path / "backup")
    assert "there is no snapshot" in resume(tmp_path / "new.db", tmp_path / "nothing", code=1).stderr
    assert "the buffer holds 13 groups" in resume(file, tmp_path / "backup", code=1).stderr
    assert "there is no database" in save(tmp_path / "typo.db", tmp_path / "b", code=1).stderr
    assert "in memory" in resume("sqlite://", tmp_path / "backup", code=1).stderr
    assert not (tmp_path / "typo.db").exists()
    snapshot = tmp_path / "backup" / "replaybuf.sqlite"
    snapshot.write_bytes(snapshot.read_bytes()[:100_000])
    assert "cut short" in resume(tmp_path / "other.db", tmp_path / "backup", code=1).stderr
    assert not (tmp_path / "other.db").exists()


def test_checkpoints_are_listed(shared_url: str) -> None:
    with ReplayBufferConfig(url=shared_url, policy="fifo").build_sync() as buffer:
        buffer.checkpoint(1)
        buffer.put(group(1), "math")
        buffer.checkpoint(2)
    with ReplayBufferConfig(url=shared_url, name="eval").build_sync() as buffer:
        buffer.put(group(1), "math")
        buffer.checkpoint(7)
    rows = run_json("checkpoint", "ls", shared_url)
    assert [(row["buffer"], row["step"], row["groups"]) for row in rows] == [
        ("default", 1, 0),
        ("default", 2, 1),
        ("eval", 7, 1),
    ]
    assert rows[0]["bytes"] == 0 < rows[1]["bytes"]
    assert [row["step"] for row in run_json("checkpoint", "ls", shared_url, "--buffer", "eval")] == [7]
    assert run("checkpoint", "ls", shared_url).stdout.splitlines()[-1].split()[:2] == ["eval", "7"]


MOVING = Path(__file__).parents[2].joinpath("docs/checkpoints.md").read_text("utf-8").partition("### Move a run")[2]


def test_a_run_is_moved_as_the_page_says(shared_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its buffer keeps its name, beside another that is in use, and is restored to the step of its weights."""
    monkeypatch.chdir(tmp_path)
    if shared_url.startswith("postgresql"):
        run("doctor", shared_url, "--upgrade")

    for url, name, numbers in (("sqlite:///run.db", "own", (1, 2, 3)), (shared_url, "default", (4,))):
        with ReplayBufferConfig(url=url, name=name, policy="fifo").build_sync() as buffer:
            for number in numbers:
                buffer.put(group(number), "math")
            buffer.checkpoint(43)
            buffer.put(group(9), "math")  # after the weights were saved
    block = MOVING.partition("```sh\n")[2].partition("```")[0].replace("postgresql://trainer@db/rl", shared_url)
    assert len(block.splitlines()) == 4
    for line in block.splitlines():
        if line.startswith("replaybuf "):
            run(*line.split()[1:])
    with ReplayBufferConfig(url=shared_url, name="own", policy="fifo").build_sync() as buffer:
        buffer.restore(43)
        moved_numbers = [rollouts[0].rollout_id for rollouts in buffer.get(9, "math", at_least=1)]
    assert moved_numbers == [group(number)[0].rollout_id for number in (1, 2, 3)]
    [row] = run_json("checkpoint", "make", shared_url, 44, "--buffer", "own")
    assert (row["buffer"], row["step"], row["groups"]) == ("own", 44, 0)
