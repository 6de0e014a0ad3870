"""`replaybuf stats`."""

from __future__ import annotations

import asyncio

import pytest

from replaybuf import ReplayBufferConfig, RolloutState, Status
from replaybuf.produce import Sampler, TrainState, publish
from tests.cli.conftest import run, run_json
from tests.cli.example import fill_busy


def test_counts_since_the_beginning(filled: str) -> None:
    tasks = run_json("stats", filled)["buffers"]["default"]["tasks"]
    assert {task: (n["put"], n["taken"], n["dropped"], n["expired"]) for task, n in tasks.items()} == {
        "code": (5, 0, 1, 1),
        "math": (11, 2, 0, 1),
    }
    shown = run("stats", filled).stdout.partition("since the beginning\n")[2].splitlines()
    assert [line.split() for line in (shown[0], *shown[2:4])] == [
        ["task", "put", "sampled_new", "taken", "expired", "dropped"],
        ["code", "5", "0", "0", "1", "1"],
        ["math", "11", "2", "2", "1", "0"],
    ]


def test_leases_that_are_over_are_told_and_nothing_is_written(busy: str) -> None:
    """A crash leaves groups leased until somebody takes: they aren't lost."""
    for _ in range(2):
        rows = run_json("stats", busy)["groups"]
        assert {(row["buffer"], row["status"], row["leased"], row["overdue"]) for row in rows} == {
            ("default", "completed", 2, 1),
            ("default", "archived", 0, 0),
            ("eval", "completed", 0, 0),
        }
    header, _, line, *_ = run("stats", busy, "--buffer", "default").stdout.splitlines()
    assert line.split()[header.split().index("overdue")] == "1"


def test_where_the_run_is(empty: str) -> None:
    async def work() -> None:
        async with ReplayBufferConfig(url=empty).build() as buffer:
            await Sampler(buffer, [{"prompt": "7+5="}] * 1500, "math").draw(1200)
            await publish(buffer, TrainState(43, 42, weights="step-42"))

    asyncio.run(work())
    shown = run("stats", empty).stdout
    assert "\nprompts drawn: 1,200 for math\n" in shown
    assert "\nthe trainer is at step 43, its newest weights are of step 42\n" in shown
    found = run_json("stats", empty)["buffers"]["default"]
    assert found["prompts"] == {"math": 1200}
    assert found["trainer"] == {"train_step": 43, "model_step": 42, "weights": "step-42", "finished": False}


def test_the_steps_of_checkpoints_are_there(empty: str) -> None:
    asyncio.run(fill_busy(empty))
    assert "checkpoint" not in run("stats", empty).stdout
    for name, step in (("default", 40), ("eval", 7), ("default", 41)):
        with ReplayBufferConfig(url=empty, name=name).build_sync() as buffer:
            buffer.checkpoint(step)
    found = {name: of["checkpoints"] for name, of in run_json("stats", empty)["buffers"].items()}
    assert {name: (made["count"], made["step"]) for name, made in found.items()} == {"default": (2, 41), "eval": (1, 7)}
    shown = run("stats", empty).stdout
    assert (
        "2 step checkpoints of default, the last of step 41\n1 step checkpoint of eval, the last of step 7\n" in shown
    )
    assert "\n1 step checkpoint, the last of step 7\n" in run("stats", empty, "--buffer", "eval").stdout


@pytest.mark.parametrize("command", ["stats", "ls"])
def test_a_buffer_that_is_not_there_is_an_error(busy: str, command: str) -> None:
    stderr = run(command, busy, "--buffer", "evil", code=1).stderr
    assert stderr == "Error: there is no buffer 'evil' in this database; there are default, eval\n"


def test_a_task_of_which_all_was_dropped_is_there(empty: str) -> None:
    with ReplayBufferConfig(url=empty).build_sync() as buffer:
        old = RolloutState(message=[], status=Status.COMPLETED, seq_staleness=9)
        assert buffer.put([old], "math", stale_threshold=4, expired_groups_retryable=False) is None
    assert run_json("stats", empty)["groups"] == []
    assert run_json("stats", empty)["buffers"]["default"]["tasks"]["math"]["dropped"] == 1
    assert "math" in run("stats", empty).stdout


def test_an_empty_buffer_is_no_error(empty: str) -> None:
    run("doctor", empty, "--upgrade")
    assert run("stats", empty).stdout.startswith("The buffer is empty.\n")


# Rewards of several parts, as SQL shows them
