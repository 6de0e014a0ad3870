"""Grade-school mathematics, in xtuner's format, through synchronous, asynchronous and disaggregated production."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from replaybuf import ReplayBuffer, RolloutState, Status
from replaybuf.produce import (
    AsyncProduceStrategy,
    JSONLines,
    Sampler,
    SyncProduceStrategy,
    TrainState,
    produce_loop,
    publish,
)

PROMPTS = JSONLines(Path(__file__).resolve().parents[1] / "data" / "math.xtuner.jsonl")
SIZE, STEPS = 8, 3


class Solver:
    """Knows the answers, and gives every other rollout of a group a wrong one."""

    async def generate_group(self, group: list[RolloutState], *, partial: bool) -> None:
        for place, rollout in enumerate(group):
            await asyncio.sleep(0)
            truth = (rollout.reward_model or {})["ground_truth"]
            rollout.response = f"#### {truth if place % 2 == 0 else -1}"
            rollout.response_ids = list(rollout.response.encode())
            rollout.reward = {"score": float(rollout.response.endswith(f" {truth}"))}
            rollout.status = Status.COMPLETED

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...


@pytest.fixture
def sampler(buffer: ReplayBuffer) -> Sampler:
    return Sampler(buffer, PROMPTS, "math", prompt_repeat_k=4)


def check(batches: list[list[list[RolloutState]]]) -> None:
    """Every batch is whole, no problem comes twice, and every answer was compared with its own problem's."""
    groups = [group for batch in batches for group in batch]
    assert [len(batch) for batch in batches] == [SIZE] * STEPS
    assert len({group[0].message[0]["content"] for group in groups}) == len(groups)
    assert all([one.reward for one in group] == [{"score": 1.0}, {"score": 0.0}] * 2 for group in groups)


@pytest.mark.parametrize("strategy", [SyncProduceStrategy(), AsyncProduceStrategy(over_sample=0.5, max_staleness=4)])
async def test_batches_are_made_step_by_step(strategy: Any, sampler: Sampler) -> None:
    batches = []
    for step in range(1, STEPS + 1):
        summary = await strategy.produce_batch(Solver(), sampler, SIZE, train_step=step, model_step=step - 1)
        assert summary.raw_rewards_sum == summary.raw_rewards_count / 2
        batches.append(await sampler.buffer.get(SIZE, "math"))
    check(batches)


async def test_a_worker_makes_them_while_a_trainer_takes_them(sampler: Sampler) -> None:
    async def load_weights(state: Any) -> None: ...

    strategy, batches = AsyncProduceStrategy(max_staleness=4), []
    await publish(sampler.buffer, TrainState(train_step=1, model_step=0))
    worker = asyncio.create_task(produce_loop(strategy, Solver(), sampler, SIZE, load_weights=load_weights))
    for step in range(1, STEPS + 1):
        batches.append(await sampler.buffer.get(SIZE, "math", timeout=30))
        await publish(sampler.buffer, TrainState(train_step=step + 1, model_step=step, finished=step == STEPS))
    await worker
    check(batches)
