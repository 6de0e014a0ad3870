"""`replaybuf stats`."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from typing import Any

import pytest

from replaybuf import ReplayBufferConfig, RolloutState, Status
from replaybuf.buffer.metrics import RATES
from replaybuf.produce import PromptLedger, Sampler, TrainState, publish
from replaybuf.storage.sql.schema.revisions import HEAD
from tests.cli.conftest import run, run_json
from tests.cli.example import fill_busy
from tests.stores import build


def test_counts_by_task_and_status(filled: str) -> None:
    rows = {(row["task_name"], row["status"]): row for row in run_json("stats", filled)["groups"]}
    assert {lane: (row["groups"], row["rollouts"]) for lane, row in rows.items()} == {
        ("code", "completed"): (3, 12),
        ("code", "expired"): (1, 4),
        ("math", "completed"): (8, 32),
        ("math", "expired"): (1, 4),
    }


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


def test_puts_are_told_apart_by_status(empty: str) -> None:
    """A prompt that was handed out, what was made of it, and a group that was too old when it was put."""

    async def fill() -> None:
        async with ReplayBufferConfig(url=empty).build() as buffer:
            for prompt in await PromptLedger(buffer, [RolloutState(message=[])] * 2, "math").draw(2):
                prompt.group[0].status = Status.COMPLETED
                await prompt.finish()
            old = RolloutState(message=[], response_ids=[1], status=Status.COMPLETED)
            options = {"model_step": 1, "current_train_step": 9, "stale_threshold": 2}
            await buffer.put([old], "math", **options, expired_groups_retryable=True)

    asyncio.run(fill())
    assert "\nput into math: 2 completed, 1 expired, 2 init\n" in run("stats", empty).stdout
    found = run_json("stats", empty)["buffers"]["default"]
    assert found["put_of"] == {"math": {"completed": 2, "expired": 1, "init": 2}}
    assert found["tasks"]["math"]["put"] == 5


def test_json_has_what_metrics_gives(empty: str) -> None:
    async def metrics() -> dict[str, Any]:
        await fill_busy(empty)
        async with ReplayBufferConfig(url=empty).build() as buffer:
            await buffer.take_batch({"math": 10})  # brings back the group whose lease is over
            return await buffer.metrics()

    tasks = asyncio.run(metrics())["tasks"]
    for numbers in tasks.values():
        for name in RATES:
            del numbers[f"{name}_per_second"]
    assert run_json("stats", empty)["buffers"]["default"]["tasks"] == json.loads(json.dumps(tasks))


def test_leased_groups_are_counted_apart(busy: str) -> None:
    rows = run_json("stats", busy, "--buffer", "default")["groups"]
    assert {(row["status"], row["groups"], row["leased"], row["rollouts"]) for row in rows} == {
        ("completed", 2, 2, 4),
        ("archived", 1, 0, 1),
    }
    header, _, *lines = run("stats", busy, "--buffer", "default").stdout.splitlines()
    assert header.split()[:4] == ["task", "status", "groups", "leased"]
    assert lines[0].split()[:4] == ["math", "completed", "2", "2"]


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
    assert "checkpoints" not in run("stats", empty).stdout
    for name, step in (("default", 40), ("eval", 7), ("default", 41)):
        with ReplayBufferConfig(url=empty, name=name).build_sync() as buffer:
            buffer.checkpoint(step)
    assert {name: of["checkpoints"] for name, of in run_json("stats", empty)["buffers"].items()} == {
        "default": [40, 41],
        "eval": [7],
    }
    assert "step checkpoints of default: 40, 41\nstep checkpoints of eval: 7\n" in run("stats", empty).stdout
    assert "\nstep checkpoints: 7\n" in run("stats", empty, "--buffer", "eval").stdout


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


def test_both_databases_say_the_same(filled: str) -> None:
    [row] = [
        row for row in run_json("stats", filled)["groups"] if (row["task_name"], row["status"]) == ("math", "completed")
    ]
    assert row["reward"] == pytest.approx(0.5625)
    assert row["staleness"] == 2.0
    assert (row["max_staleness"], row["prompt_tokens"], row["response_tokens"]) == (3, 1280, 31555)
    assert isinstance(row["staleness"], float)


def test_ages_are_times_in_utc(filled: str) -> None:
    for row in run_json("stats", filled)["groups"]:
        oldest, newest = (datetime.fromisoformat(row[name]) for name in ("oldest", "newest"))
        assert oldest <= newest <= datetime.now(UTC)
        assert (datetime.now(UTC) - oldest).total_seconds() < 600


def test_json_tells_of_the_whole_database(filled: str) -> None:
    database = run_json("stats", filled)["database"]
    assert database["schema"] == HEAD
    assert database["unswept_payloads"] <= 3
    assert database["database_bytes"] > 100_000


def test_an_empty_buffer_is_no_error(empty: str) -> None:
    run("doctor", empty, "--upgrade")
    assert run("stats", empty).stdout.startswith("The buffer is empty.\n")


# Rewards of several parts, as SQL shows them


PARTS = {"accuracy": 0.25, "format": 1.0}


async def put(url: str, *rewards: Any, task: str = "math", **options: Any) -> None:
    async with build(url, **options) as buffer:
        rollouts = [RolloutState(message=[], response="4", reward=one, status=Status.COMPLETED) for one in rewards]
        await buffer.put(rollouts, task, model_step=1, current_train_step=2)


def test_the_parts_of_a_dict_are_in_sql_whichever_counts(url: str) -> None:
    asyncio.run(put(url, PARTS, reward_key="accuracy"))
    (row,) = run_json("sql", url, "SELECT reward, rewards FROM rollouts")
    parts = json.loads(row["rewards"]) if url.startswith("sqlite") else row["rewards"]
    assert (row["reward"], parts) == (0.25, PARTS)
