"""`replaybuf rm`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from replaybuf import FencedError, ReplayBufferConfig
from replaybuf.cli.commands import on_storage
from replaybuf.storage.sql.backend import SQLStorage
from replaybuf.storage.sql.lifecycle import Store
from replaybuf.storage.sql.tasks import sweeper
from replaybuf.storage.sql.tasks.heartbeats import Presence
from tests.cli.conftest import run, run_json
from tests.cli.example import fill, fill_busy
from tests.stores import TASK, group, until


@pytest.fixture
def url(shared_url: str) -> str:
    """The URL of the example buffer, to be changed at will."""
    asyncio.run(fill(shared_url))
    return shared_url


def uids(url: str) -> list[int]:
    return [row["uid"] for row in run_json("ls", url, "--limit", "all")]


def test_it_asks_with_the_exact_number(url: str) -> None:
    uids_before = uids(url)
    output = run("rm", url, "--task", "code", answer="n\n", code=1).stderr
    assert uids(url) == uids_before
    assert "Delete 4 groups of buffer default in" in output
    assert "nothing was done" in output
    output = run("rm", url, "--task", "code", answer="y\n").stderr
    assert len(uids(url)) == len(uids_before) - 4
    assert output.endswith("4 groups deleted\n")


def test_who_cannot_answer_has_to_say_yes_before(url: str) -> None:
    uids_before = uids(url)
    output = run("rm", url, "--where", f'{{"uid": {uids_before[0]}}}', code=1).stderr
    assert uids(url) == uids_before
    assert "Delete 1 group of" in output
    assert "nobody answered; give --yes" in output


def test_all_conditions_have_to_hold(url: str) -> None:
    there = uids(url)
    first_two = f'{{"uid": {{"$in": {there[:2]}}}}}'
    assert run_json("rm", url, "--where", first_two, "--task", "code", "--dry-run")[0]["groups"] == 0
    [summary] = run_json("rm", url, "--where", first_two, "--task", "math", "--yes")
    assert summary["deleted"] == summary["groups"] == 2
    assert uids(url) == there[2:]


def test_a_dry_run_deletes_nothing(url: str) -> None:
    uids_before = uids(url)
    result = run("rm", url, "--status", "expired", "--dry-run")
    assert result.stdout.splitlines()[-1].split() == ["total", "2"]
    assert result.stderr == "nothing was changed (--dry-run)\n"
    assert uids(url) == uids_before


def test_without_a_condition_nothing_is_deleted(url: str) -> None:
    everything = ("", " ", '{"$and": []}', '{"$or": [{}]}', '{"$not": {"$or": []}}')
    for options in [(), *(("--where", text) for text in everything)]:
        assert "to delete all groups, give --where '{}'" in run("rm", url, *options, "--yes", code=1).stderr
        assert len(uids(url)) == 13
    assert run_json("rm", url, "--where", "{}", "--yes")[0]["deleted"] == 13
    assert uids(url) == []


def test_nothing_that_matches_is_told(url: str) -> None:
    assert run("rm", url, "--task", "nope").stderr.startswith("no such groups: nothing was ever put into this task")
    assert run_json("rm", url, "--task", "nope")[0]["deleted"] == 0


def test_leased_groups_stay(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/run.db"
    asyncio.run(fill_busy(url))
    result = run("rm", url, "--buffer", "default", "--status", "completed", "--yes")
    assert "leased, and therefore left alone: 2 groups" in result.stderr
    assert [row["status"] for row in run_json("ls", url, "--buffer", "eval")] == ["completed"]


# checkpoint


def test_a_restore_asks_and_says_whom_it_fences_off(url: str) -> None:
    uids_before = uids(url)
    with ReplayBufferConfig(url=url, worker="trainer-0").build_sync() as buffer:
        buffer.checkpoint(43)
        buffer.take_batch({"math": 2})
        buffer.delete({"task_name": "code"})
        output = run("checkpoint", "restore", url, 43, answer="n\n", code=1).stderr
        assert "Restore step 43 of buffer default" in output
        assert "Groups put since then are deleted, and those that have left are back." in output
        assert run("checkpoint", "restore", url, 43, answer="y\n").stderr.endswith(
            "restored; whoever had the buffer open before is fenced off\n"
        )
        with pytest.raises(FencedError):
            buffer.take_batch({"math": 1})
    assert uids(url) == uids_before


def test_checkpoints_are_listed_and_dropped(url: str) -> None:
    make_checkpoints(url, 43, 44)
    output = run("checkpoint", "drop", url, 43, answer="\n", code=1).stderr
    assert "Drop the checkpoint of step 43 of buffer default" in output
    assert run_json("checkpoint", "drop", url, 43, "--yes")[0]["step"] == 43
    assert [row["step"] for row in run_json("checkpoint", "ls", url)] == [44]


def test_a_checkpoint_that_is_not_there_is_told_those_that_are(url: str) -> None:
    make_checkpoints(url, 43)
    for call in ("restore", "drop"):
        error = run("checkpoint", call, url, 40, code=1).stderr
        assert error == "Error: there is no checkpoint of step 40; there are those of the steps 43\n"
        assert "valid integer" in run("checkpoint", call, url, "newest", code=2).stderr
        assert "STEP" in run("checkpoint", call, url, code=2).stderr


def make_checkpoints(url: str, *steps: int) -> None:
    with ReplayBufferConfig(url=url).build_sync() as buffer:
        for step in steps:
            buffer.checkpoint(step)


def test_commands_leave_leases_and_the_history_to_runs_which_know_their_limits(
    shared_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ReplayBufferConfig(url=shared_url, history=None, max_deliveries=0).build_sync() as buffer:
        buffer.put(group(1), TASK)
        for _ in range(6):
            buffer.lease_batch({TASK: 1}, heartbeat=False).begin().give_back(failed="a crash")
        buffer.lease_batch({TASK: 1}, seconds=0.001, heartbeat=False).begin()
    monkeypatch.setattr(sweeper, "_IDLE_SECONDS", 0.001)
    monkeypatch.setitem(Store.__init__.__kwdefaults__, "history", 1)

    async def stay_for_some_sweeps(storage: SQLStorage) -> None:
        beats: list[None] = []
        monkeypatch.setattr(Presence, "beat", lambda _: asyncio.sleep(0, beats.append(None)))
        await storage.open()
        await until(lambda: len(beats) > 3)

    on_storage(shared_url, "default", stay_for_some_sweeps)
    [row] = run_json("ls", shared_url)
    assert (row["status"], row["deliveries"]) == ("completed", 7)
    assert run_json("sql", shared_url, "SELECT count(*) AS draws FROM batches") == [{"draws": 7}]
