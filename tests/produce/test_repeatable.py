"""Runs with the same seed and the same script are the same.

Guaranteed is: what a strategy does depends on the store and on the order in which groups are done, on nothing else; not
on the time that the store takes, nor on chance. That order is the agent loop's; here it is written down.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest

from replaybuf import Status
from replaybuf.produce import AsyncProduceStrategy, Sampler, reward_varies
from tests.produce.laws import Clock, ClockedLoop, ids, items_of
from tests.produce.scripted import Script, Told, prompts
from tests.stores import TASK, build

STEPS, SIZE = 8, 4


def scripts(seed: int) -> dict[int, Script]:
    """Lengths, failures and rewards of all sorts, by a seed."""
    chance = random.Random(seed)

    def script() -> Script:
        equal = chance.random() < 0.2
        return Script(
            tokens=chance.choice([1, 2, 3, 5, 8, 30]),
            seconds=chance.choice([1, 1.5, 2]),
            failures=chance.choice([0, 0, 0, 0, 1, 9]),
            reward=lambda place: 1.0 if equal else float(place),
        )

    return {number: script() for number in range(200)}


async def run(url: str, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], seed: int) -> list[Any]:
    """All that a run does, step by step."""
    clock, told = Clock(), Told()
    clock.governs(monkeypatch)
    strategy = AsyncProduceStrategy(over_sample=0.5, is_valid=reward_varies, on_group=told, **options)
    seen: list[Any] = []
    async with build(url, policy="uniform", seed=3, max_deliveries=3, unfit=1000) as buffer:
        sampler = Sampler(buffer, prompts(50), TASK, prompt_repeat_k=2, shuffle=7)
        loop = ClockedLoop(clock, scripts=scripts(seed))
        for step in range(STEPS):
            summary = await strategy.produce_batch(loop, sampler, SIZE, train_step=step + 1, model_step=step)
            batch, _ = await buffer.take_batch({TASK: SIZE})
            counts = asdict(summary)
            counts = {name: counts[name] for name in counts if name != "times" and not name.endswith("seconds")}
            seen.append((counts, [[rollout.model_dump() for rollout in group] for group in batch[TASK]]))
        seen.append([(ids([item]), item.status, item.tags, item.deliveries) for item in await items_of(buffer)])
        seen.append([(ids([one.group]), one.status, one.tokens, one.attempt, one.error) for one in told.groups])
        seen.append((loop.order, clock.now))
    return seen


STRATEGIES = {
    "anew": {},
    "partial": {"enable_partial_rollout": True, "max_staleness": 2},
    "tail batches": {"enable_partial_rollout": True, "tail_batch_trigger_size": 2, "tail_batch_max_tries": 1},
    "few at a time": {"max_concurrency": 2, "max_token_staleness": 1},
}


#: On PostgreSQL one of them in the quick form.
CASES = [
    ("memory", "partial"),
    *(pytest.param("memory", name, marks=pytest.mark.long) for name in ("anew", "tail batches", "few at a time")),
    ("postgresql", "tail batches"),
    *(pytest.param("sqlite", name, marks=pytest.mark.long) for name in STRATEGIES),
    *(pytest.param("postgresql", name, marks=pytest.mark.long) for name in ("anew", "partial", "few at a time")),
]


@pytest.mark.parametrize(("new_url", "name"), CASES, indirect=["new_url"])
async def test_two_runs_are_the_same(new_url: Callable[[], str], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Batch by batch, group by group, and in all counts."""
    first = await run(new_url(), monkeypatch, STRATEGIES[name], 1)
    second = await run(new_url(), monkeypatch, STRATEGIES[name], 1)
    assert first == second
    produced = sum(counts["produced"] for counts, _ in first[:STEPS])
    assert produced >= STEPS * SIZE
    assert {status for _, status, *_ in first[-2]} >= {Status.COMPLETED, Status.INIT, Status.FILTERED, Status.FAILED}


async def test_runs_of_other_scripts_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    options = STRATEGIES["partial"]
    assert await run("memory://", monkeypatch, options, 1) != await run("memory://", monkeypatch, options, 2)
