"""Rewards that are no numbers, as `stats`, `doctor` and SQL show them."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

from replaybuf import RolloutState, Status
from tests.cli.conftest import run, run_json
from tests.cli.doctored import examine
from tests.stores import build

PARTS = {"accuracy": 0.25, "format": 1.0}


async def put(url: str, *rewards: Any, task: str = "math", **options: Any) -> None:
    async with build(url, **options) as buffer:
        rollouts = [RolloutState(message=[], response="4", reward=one, status=Status.COMPLETED) for one in rewards]
        await buffer.put(rollouts, task, model_step=1, current_train_step=2)


async def expire(url: str) -> None:
    async with build(url) as buffer:
        await buffer.refresh_staleness(task_stale_thresholds={"math": 2}, current_train_step=9)


def test_they_are_counted_until_they_expire(url: str) -> None:
    asyncio.run(put(url, 1.0, "0.5", math.nan, {"other": 1}))
    asyncio.run(put(url, 1.0, None, task="code"))
    assert {row["task_name"]: row["unreadable_rewards"] for row in run_json("stats", url)["groups"]} == {
        "code": 0,
        "math": 3,
    }
    header, _, _, math_row, *_ = run("stats", url).stdout.splitlines()
    assert dict(zip(header.split(), math_row.split(), strict=False))["unreadable"] == "3"
    (finding,) = examine(url)["rewards"]
    assert finding["level"] == "warning"
    assert "1 rollout of math completed (a text)" in finding["text"]
    assert "group 1 is one" in finding["text"]
    asyncio.run(expire(url))
    assert examine(url)["rewards"][0]["level"] == "ok"
    assert "unreadable" not in run("stats", url).stdout


def test_the_parts_of_a_dict_are_in_sql_whichever_counts(url: str) -> None:
    asyncio.run(put(url, PARTS, reward_key="accuracy"))
    (row,) = run_json("sql", url, "SELECT reward, rewards FROM rollouts")
    parts = json.loads(row["rewards"]) if url.startswith("sqlite") else row["rewards"]
    assert (row["reward"], parts) == (0.25, PARTS)
    assert examine(url)["rewards"][0]["level"] == "ok"
