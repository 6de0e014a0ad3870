"""The figures of a database, on both databases."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from replaybuf import ReplayBufferConfig
from replaybuf.buffer.metrics import DISTRIBUTIONS
from replaybuf.produce import TrainState, publish
from replaybuf.view.metrics import METRICS, prometheus, read_figures
from tests import sql_example
from tests.cli.conftest import run, run_json
from tests.cli.example import fill
from tests.observe.test_exposition import numbers

OF_A_PROCESS = {metric.name for metric in METRICS if metric.path.startswith("waits/")}
OF_PLACES = {metric.name for metric in METRICS if "/places/" in metric.path}
TRAINERS = {metric.name for metric in METRICS if metric.path.startswith("trainer/")}


def test_the_tasks_are_those_of_metrics(empty: str) -> None:
    async def metrics() -> Any:
        await fill(empty)
        async with ReplayBufferConfig(url=empty, archive=10).build() as buffer:
            await buffer.take_batch({"math": 1})
            await buffer.lease_batch({"math": 1}, seconds=3600, heartbeat=False)
            return (await buffer.metrics())["tasks"]

    tasks = asyncio.run(metrics())
    found = read_figures(empty)["buffers"]["default"]["tasks"]
    for task, theirs in tasks.items():
        assert {name: found[task][name] for name in theirs} == theirs
        for field in DISTRIBUTIONS:  # of those that can be drawn, without leased ones
            assert sum(theirs[field]["counts"].values()) == theirs["buffered"]["completed"]


def test_what_groups_hold_is_read_in_one_scan(filled: str) -> None:
    stats = {(row["task_name"], row["status"]): row for row in run_json("stats", filled)["groups"]}
    for task, numbers_ in read_figures(filled)["buffers"]["default"]["tasks"].items():
        rows = [row for (name, _), row in stats.items() if name == task]
        assert numbers_["bytes"] == sum(row["bytes"] for row in rows)
        assert numbers_["reward"]["mean"] == pytest.approx(stats[task, "completed"]["reward"])
        assert numbers_["staleness"]["max"] == stats[task, "completed"]["max_staleness"]


def test_groups_are_not_scanned_beyond_a_number(filled: str) -> None:
    tasks = read_figures(filled, scanned=12)["buffers"]["default"]["tasks"]
    assert all("staleness" not in numbers_ and numbers_["put"] for numbers_ in tasks.values())


def test_overdue_leases_are_counted(busy: str) -> None:
    found = read_figures(busy)["buffers"]
    assert {name: (n["tasks"]["math"]["leased"], n["tasks"]["math"]["overdue"]) for name, n in found.items()} == {
        "default": (2, 1),
        "eval": (0, 0),
    }


def test_how_far_a_run_is(empty: str) -> None:
    async def going() -> None:
        await fill(empty)
        async with ReplayBufferConfig(url=empty).build() as buffer:
            await publish(buffer, TrainState(train_step=43, model_step=42))
            await buffer.checkpoint(41)
            await buffer.checkpoint(42)
            await buffer.restore(42)

    asyncio.run(going())
    found = read_figures(empty)["buffers"]["default"]
    assert (found["checkpoints"]["count"], found["checkpoints"]["step"], found["restores"]) == (2, 42, 1)
    assert abs(found["checkpoints"]["created_at"] - time.time()) < 60
    assert (found["trainer"]["train_step"], found["trainer"]["model_step"]) == (43, 42)


def test_the_command_prints_the_exposition(busy: str) -> None:
    found = numbers(parse(run("stats", busy, "--format=prometheus").stdout))
    assert found["replaybuf_groups_put_total", (("buffer", "default"), ("task", "math"))] == 5
    assert "none of text, json, csv, prometheus" in run("stats", busy, "--format=nl", code=2).stderr


def test_hostile_names_stay_in_their_labels(hostile: str) -> None:
    found = numbers(parse(run("stats", hostile, "--format=prometheus").stdout))
    [(_, labels)] = [key for key in found if key[0] == "replaybuf_groups_put_total"]
    assert "\x1b" in dict(labels)["task"]


def test_who_works_and_waits_and_what_was_drawn_last(empty: str) -> None:
    asyncio.run(sql_example.fill(empty))
    found = read_figures(empty)["buffers"]["default"]
    assert found["workers"] == {"working": 3, "silent": 1, "ended": 0}
    assert found["last_hour"] == {"groups": 36, "rollouts": 72, "tokens": 28800, "failures": 1, "taken": 17}
    [(kind, waits)] = found["waiters"].items()
    assert (kind, waits["count"]) == ("groups", 1)
    assert waits["longest_seconds"] > 0
    assert found["events_last_hour"]
    last = found["last_batch"]
    assert (last["step"], last["groups"]) == (414, 2)
    assert last["min_reward"] <= last["reward"] <= last["max_reward"]
    assert 0 <= last["staleness"] <= last["max_staleness"]
    assert abs(last["taken_at"] - time.time()) < 60
    names = {name for name, _ in numbers(parse(prometheus(read_figures(empty))))}
    missing = {series for metric in METRICS for series in metric.series} - names
    assert not missing - OF_A_PROCESS - {"replaybuf_prompts_drawn", *TRAINERS, *OF_PLACES}
