"""Batches of rollouts of other classes: with an Enum that lacks some of our statuses, and without any status."""

from __future__ import annotations

import dataclasses
from typing import Any

from replaybuf import ReplayBufferConfig, Status
from replaybuf.produce import Sampler, SyncProduceStrategy
from tests.frameworks import Sample

TASK = "math"
NAMES = {"response_ids": "tokens", "response_model_steps": "weight_versions"}


@dataclasses.dataclass
class Bare:
    """A rollout without a status."""

    prompt: str
    answer: str = ""


class Loop:
    """Answers every prompt; the first attempt at each second one is interrupted."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    async def generate_group(self, group: list[Any], *, partial: bool) -> None:
        first = group[0]
        again = first.prompt in self.seen
        self.seen.append(first.prompt)
        for rollout in group:
            if isinstance(rollout, Bare):
                rollout.answer = "4"
                continue
            assert rollout.status is Sample.Status.PENDING
            done = again or int(rollout.prompt) % 2 == 0
            rollout.status = Sample.Status.TRUNCATED if done else Sample.Status.ABORTED
            rollout.tokens, rollout.response = [1, 2], "4"

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...


async def test_a_batch_of_samples_of_slime() -> None:
    config = ReplayBufferConfig(url="memory://", rollout_type=Sample, fields=NAMES, unfit=10)
    async with config.build() as buffer:
        prompts = [{"prompt": str(number)} for number in range(8)]
        sampler = Sampler(buffer, prompts, TASK, prompt_repeat_k=2, epochs=1, make_rollout=lambda item: Sample(**item))
        strategy = SyncProduceStrategy(is_valid=lambda group: group[0].prompt != "2")
        summary = await strategy.produce_batch(Loop(), sampler, 4, train_step=1, model_step=0)
        assert (summary.produced, summary.filtered) == (4, 1)
        assert [item.staleness async for item in buffer.find({"status": "completed"})] == [0] * 4
        batch = await buffer.get(4, TASK, Sample.Status.TRUNCATED)
        assert {tuple(rollout.weight_versions) for group in batch for rollout in group} == {(0, 0)}
        assert {rollout.status for group in batch for rollout in group} == {Sample.Status.TRUNCATED}
        assert [rollout.rollout_id for rollout in batch[0]] == [0, 1]
        # Their enum has no word for it, so the field stays, and the group says it.
        [item] = [item async for item in buffer.find({"status": "filtered"})]
        assert {rollout.status for rollout in item.item} == {Sample.Status.TRUNCATED}


async def test_a_batch_of_rollouts_without_a_status() -> None:
    async with ReplayBufferConfig(url="memory://", rollout_type=Bare).build() as buffer:
        sampler = Sampler(buffer, ["a", "b"], TASK, epochs=1, make_rollout=Bare)
        [prompt] = await sampler.draw(1)
        await prompt.save()
        await prompt.give_back()
        [item] = [item async for item in buffer.find({})]
        assert item.status == Status.INIT  # what was saved isn't taken for a result
        summary = await SyncProduceStrategy().produce_batch(Loop(), sampler, 2, train_step=1, model_step=0)
        assert summary.produced == 2
        assert sorted(group[0].answer for group in await buffer.get(2, TASK)) == ["4", "4"]
