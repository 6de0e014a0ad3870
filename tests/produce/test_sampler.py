"""Samplers, the trainer's state, and rollouts of other classes."""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import replace
from typing import Any

import pytest

from replaybuf import FencedError, NotReadyError, ReplayBuffer, ReplayBufferConfig, Status
from replaybuf.errors import InputError
from replaybuf.produce import Sampler, SyncProduceStrategy, TrainState, publish, published, wait_published
from replaybuf.rules.circumstances import TRAINER
from tests.frameworks import Sample
from tests.produce.conftest import ScriptedLoop, drawn, produce, prompts, questions
from tests.stores import TASK, build


async def test_a_prompt_becomes_a_group_of_k_rollouts_with_ids_of_their_own(buffer: ReplayBuffer) -> None:
    """Over all epochs."""
    drawn_prompts = await drawn(Sampler(buffer, prompts(3), TASK, prompt_repeat_k=3, epochs=2), 99)
    for number, prompt in enumerate(drawn_prompts):
        assert [rollout.group_id for rollout in prompt.group] == [number] * 3
        assert [rollout.rollout_id for rollout in prompt.group] == [3 * number, 3 * number + 1, 3 * number + 2]
        assert {rollout.task_name for rollout in prompt.group} == {TASK}
        assert {rollout.status for rollout in prompt.group} == {Status.INIT}
    assert questions(drawn_prompts) == ["0", "1", "2"] * 2


async def test_the_rollouts_of_a_group_share_nothing(buffer: ReplayBuffer) -> None:
    """Neither with each other nor with the dataset."""
    record = {"message": [{"role": "user", "content": "2 + 2"}], "extra_fields": {"seen": []}, "prompt_ids": [1]}
    (prompt,) = await Sampler(buffer, [record], TASK, prompt_repeat_k=2).draw()
    first, second = prompt.group
    first.message[0]["content"] = "3 + 3"
    first.extra_fields["seen"].append(1)
    first.prompt_ids.append(2)
    assert second.message == [{"role": "user", "content": "2 + 2"}]
    assert (second.extra_fields, second.prompt_ids) == ({"seen": []}, [1])
    assert record == {
        "message": [{"role": "user", "content": "2 + 2"}],
        "extra_fields": {"seen": []},
        "prompt_ids": [1],
    }


async def test_another_size_of_groups_after_a_restart(shared_url: str) -> None:
    """Their ids are theirs: those of prompts that come back stay."""
    async with build(shared_url) as buffer:
        (prompt,) = await Sampler(buffer, prompts(4), TASK, prompt_repeat_k=2).draw()
        await prompt.give_back()
        redrawn, new_prompt = await drawn(Sampler(buffer, prompts(4), TASK, prompt_repeat_k=4), 2)
        assert [rollout.rollout_id for rollout in redrawn.group] == [0, 1]
        assert [rollout.rollout_id for rollout in new_prompt.group] == [4, 5, 6, 7]


async def test_nothing_is_read_before_it_is_drawn(buffer: ReplayBuffer) -> None:
    numbers_read: list[int] = []

    class Lazy:
        def __len__(self) -> int:
            return 1_000_000

        def __getitem__(self, number: int) -> dict[str, str]:
            numbers_read.append(number)
            return {"prompt": "x"}

    sampler = Sampler(buffer, Lazy(), TASK)
    assert numbers_read == []
    await sampler.draw(3)
    assert numbers_read == [0, 1, 2]


@pytest.mark.parametrize(
    "options",
    [
        *({"prompt_repeat_k": repeat} for repeat in (0, 1.5)),
        *({"epochs": -1}, {"epochs": 1.5}, {"shuffle": -1}, {"seconds": 0}, {"name": ""}, {"again": ["no such"]}),
    ],
)
async def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="status" if "again" in options else next(iter(options))):
        Sampler(build("memory://"), prompts(2), TASK, **options)


async def leave(sampler: Sampler, status: Status) -> None:
    """The next prompt of the dataset comes to wait in the buffer."""
    (prompt,) = await sampler.draw(again=[])
    for rollout in prompt.group:
        rollout.status, rollout.response, rollout.response_ids = status, "so far", [5, 6]
    await prompt.finish(model_step=1)


async def test_interrupted_prompts_come_first_then_expired_ones_then_new_ones(buffer: ReplayBuffer) -> None:
    sampler = Sampler(buffer, prompts(9), TASK)
    for status in (Status.EXPIRED, Status.ABORTED, Status.EXPIRED, Status.ABORTED, Status.COMPLETED):
        await leave(sampler, status)
    drawn_prompts = await drawn(sampler, 6)
    assert questions(drawn_prompts) == ["1", "3", "0", "2", "5", "6"]
    assert [prompt.group[0].response for prompt in drawn_prompts[:2]] == ["so far"] * 2
    assert drawn_prompts[0].group[0].response_model_steps == [1, 1]
    assert drawn_prompts[0].status == Status.ABORTED


@pytest.mark.parametrize(
    ("again", "order", "counts"),
    [(["expired", "aborted"], ["1", "0", "2", "3"], (4, 4, 0, 0)), ([], ["2", "3"], (4, 2, 0, 2))],
)
async def test_what_waits_in_the_buffer_comes_in_the_order_that_was_asked_for_or_stays(
    buffer: ReplayBuffer, again: list[str], order: list[str], counts: tuple[int, ...]
) -> None:
    sampler = Sampler(buffer, prompts(4), TASK, epochs=1, again=again)
    for status in (Status.ABORTED, Status.EXPIRED):
        await leave(sampler, status)
    assert questions(await drawn(sampler, 9)) == order
    found = await sampler.counts()
    assert (found.drawn, found.in_flight, found.waiting, found.finished) == counts


async def test_a_dataset_that_fails_ends_the_batch(buffer: ReplayBuffer) -> None:
    class Broken:
        def __len__(self) -> int:
            return 5

        def __getitem__(self, number: int) -> dict[str, str]:
            if number == 2:
                raise OSError("the disk is gone")
            return {"prompt": "x"}

    sampler = Sampler(buffer, Broken(), TASK)
    with pytest.raises(OSError, match="the disk is gone"):
        await produce(SyncProduceStrategy(max_concurrency=1), ScriptedLoop(), sampler, 4)
    assert await buffer.count(TASK, Status.COMPLETED) == 2


async def test_what_was_published_last_is_read(buffer: ReplayBuffer) -> None:
    for state in (TrainState(1, 0, "weights-0"), TrainState(2, 1), TrainState(9, 9, "/weights/9", finished=True)):
        await publish(buffer, state)
        assert await published(buffer) == state


async def test_only_a_state_can_be_published(buffer: ReplayBuffer) -> None:
    with pytest.raises(InputError, match=r"expected TrainState\(train_step=..., model_step=...\), got 43"):
        await publish(buffer, 43)  # type: ignore[arg-type]
    assert await published(buffer) is None


async def test_waiting_ends_when_something_new_is_published(buffer: ReplayBuffer) -> None:
    first, second = TrainState(1, 0), TrainState(2, 1)
    waiting = asyncio.create_task(wait_published(buffer, timeout=20))
    await asyncio.sleep(0.05)
    await publish(buffer, first)
    assert await waiting == first
    waiting = asyncio.create_task(wait_published(buffer, after=first, timeout=20))
    await publish(buffer, first)
    await asyncio.sleep(0.2)
    assert not waiting.done()
    await publish(buffer, second)
    assert await waiting == second


async def test_waiting_in_vain_says_what_for(buffer: ReplayBuffer) -> None:
    with pytest.raises(NotReadyError, match=r"after 0.1 s: the trainer has published nothing; is it running\?"):
        await wait_published(buffer, timeout=0.1)
    await publish(buffer, state := TrainState(3, 2))
    with pytest.raises(NotReadyError, match=r"published nothing since step 3"):
        await wait_published(buffer, after=state, timeout=0)


async def test_a_restore_takes_it_back_and_fences_those_before(shared_url: str) -> None:
    async with build(shared_url) as old_buffer, build(shared_url) as trainer:
        await publish(old_buffer, TrainState(1, 0))
        await old_buffer.checkpoint(1)
        await publish(old_buffer, TrainState(5, 4))
        await trainer.restore(1)
        assert await published(trainer) == TrainState(1, 0)
        with pytest.raises(FencedError):
            await publish(old_buffer, TrainState(6, 5))
        with pytest.raises(FencedError):
            await wait_published(old_buffer, after=TrainState(1, 0), timeout=10)
        assert await published(trainer) == TrainState(1, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1.5, 0), "train_step"),
        ((1, "0"), "model_step"),
        ((1, 0, 7), "weights"),
        ((1, 0, None, 1), "finished"),
    ],
)
def test_what_is_no_state_of_a_trainer_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        TrainState(*arguments)


@pytest.mark.parametrize("value", [b"", b"garbage", b"\x93\x01\x02\x03", b"\x81\xa1a\x01", b"\x07"])
async def test_what_no_trainer_has_published_is_refused(buffer: ReplayBuffer, value: bytes) -> None:
    now = await buffer.cursors.read(TRAINER)
    assert await buffer.cursors.move(replace(now, position=1, value=value))
    with pytest.raises(InputError, match="not what a trainer has published"):
        await published(buffer)


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
        is_repeated = first.prompt in self.seen
        self.seen.append(first.prompt)
        for rollout in group:
            if isinstance(rollout, Bare):
                rollout.answer = "4"
                continue
            assert rollout.status is Sample.Status.PENDING
            is_done = is_repeated or int(rollout.prompt) % 2 == 0
            rollout.status = Sample.Status.TRUNCATED if is_done else Sample.Status.ABORTED
            rollout.tokens, rollout.response = [1, 2], "4"

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...


async def test_a_batch_of_samples_of_slime() -> None:
    config = ReplayBufferConfig(url="memory://", rollout_type=Sample, fields=NAMES, unfit=10)
    async with config.build() as buffer:
        prompts = [{"prompt": str(number)} for number in range(8)]
        sampler = Sampler(buffer, prompts, TASK, prompt_repeat_k=2, epochs=1, make_rollout=lambda item: Sample(**item))
        strategy = SyncProduceStrategy(is_valid=lambda group: group[0].prompt != "2")
        summary = await produce(strategy, Loop(), sampler, 4)
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
        summary = await produce(SyncProduceStrategy(), Loop(), sampler, 2)
        assert summary.produced == 2
        assert sorted(group[0].answer for group in await buffer.get(2, TASK)) == ["4", "4"]
