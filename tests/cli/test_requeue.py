"""`replaybuf requeue`: groups that were set aside come back."""

from __future__ import annotations

import pytest

from replaybuf import ReplayBufferConfig, RolloutState, Status
from tests.cli.conftest import run, run_json


def rollout(status: Status, text: str = "4") -> RolloutState:
    return RolloutState(message=[{"role": "user", "content": "2+2"}], response=text, reward=1.0, status=status)


@pytest.fixture
def url(shared_url: str) -> str:
    """One group of each fate: delivered too often, filtered, put as failed, and expired; and one that is there."""
    with ReplayBufferConfig(url=shared_url, max_deliveries=1).build_sync() as buffer:
        buffer.put([rollout(Status.COMPLETED)] * 2, "delivered")
        buffer.lease_batch({"delivered": 1}, seconds=60, heartbeat=False).begin().give_back(failed="NCCL timeout")
        buffer.put([rollout(Status.COMPLETED)], "filtered")
        buffer.update({"task_name": "filtered"}, status="filtered")
        buffer.put([rollout(Status.COMPLETED), rollout(Status.FAILED, "")], "broken")
        buffer.put([rollout(Status.COMPLETED)], "old", model_step=1, current_train_step=2, stale_threshold=3)
        buffer.refresh_staleness(task_stale_thresholds={"old": 3}, current_train_step=9)
        buffer.put([rollout(Status.COMPLETED)], "there")
    return shared_url


def statuses(url: str) -> dict[str, str]:
    return {row["task_name"]: row["status"] for row in run_json("ls", url, "--limit", "all")}


_BEFORE = {"delivered": "failed", "filtered": "filtered", "broken": "failed", "old": "expired", "there": "completed"}


def test_finished_groups_can_be_drawn_again_and_others_are_to_be_generated_again(url: str) -> None:
    assert statuses(url) == _BEFORE
    [summary] = run_json("requeue", url, "--yes")
    assert {name: summary[name] for name in ("groups", "completed", "aborted")} == {
        "groups": 4, "completed": 2, "aborted": 2,
    }  # fmt: skip
    assert statuses(url) == {
        "delivered": "completed", "filtered": "completed", "broken": "aborted", "old": "aborted", "there": "completed",
    }  # fmt: skip
    assert {row["deliveries"] for row in run_json("ls", url)} == {0}
    assert {row["error"] for row in run_json("ls", url) if row["task_name"] == "delivered"} == {None}
    run("doctor", url)


def test_what_comes_back_is_drawn_with_its_responses(url: str) -> None:
    run("requeue", url, "--status", "filtered", "--yes")
    with ReplayBufferConfig(url=url).build_sync() as buffer:
        [[drawn]] = buffer.get(1, "filtered")
    assert (drawn.response, drawn.status) == ("4", Status.COMPLETED)


def test_it_asks_after_showing_what(url: str) -> None:
    result = run("requeue", url, "--status", "failed", answer="n\n", code=1)
    assert "Requeue 2 groups of buffer default in" in result.stderr
    assert "delivered" in result.stdout
    assert statuses(url) == _BEFORE
    assert "nothing was changed" in run("requeue", url, "--dry-run").stderr
    assert statuses(url) == _BEFORE


def test_it_is_an_event_of_each_task(url: str) -> None:
    run("requeue", url, "--where", '{"task_name": {"$in": ["old", "broken", "there"]}}', "--yes")
    events = run_json("sql", url, "SELECT task_name, groups, detail FROM events WHERE kind = 'requeued' ORDER BY 1")
    assert [(event["task_name"], event["groups"]) for event in events] == [("broken", 1), ("old", 1)]
    assert "task_name" in events[0]["detail"]


def test_only_groups_that_were_set_aside_come_back(url: str) -> None:
    for choice in (["--status", "completed"], ["--task", "there"], ["--where", '{"priority": 77}']):
        assert "no such groups" in run("requeue", url, *choice, "--yes").stderr
    assert statuses(url) == _BEFORE


def test_filtered_rollouts_with_their_responses_can_be_drawn_again(shared_url: str) -> None:
    with ReplayBufferConfig(url=shared_url).build_sync() as buffer:
        buffer.put([rollout(Status.FILTERED)] * 2, "whole")
        buffer.put([rollout(Status.FILTERED), rollout(Status.FILTERED, "")], "half")
    [summary] = run_json("requeue", shared_url, "--yes")
    assert (summary["completed"], summary["aborted"]) == (1, 1)
    assert statuses(shared_url) == {"whole": "completed", "half": "aborted"}
