"""What a rollout worker does with the buffer."""

import asyncio
import threading

import pytest

from replaybuf import ReplayBufferConfig, Status
from replaybuf.demo.arithmetic import prompt_at
from replaybuf.demo.folder import RunFolder
from replaybuf.demo.generation import prompt_of
from replaybuf.demo.grpo import Trainer
from replaybuf.demo.settings import CHUNK_GROUPS, ENOUGH_GROUPS, STALE_THRESHOLD, TASK, WorkerSettings
from replaybuf.demo.worker import Worker


@pytest.fixture
async def buffer(tmp_path):
    async with ReplayBufferConfig(url=f"sqlite:///{tmp_path}/demo.db").build() as buffer:
        yield buffer


@pytest.fixture
def trainer(tmp_path):
    """A trainer whose first weights are in the run folder."""
    trainer = Trainer.create(0)
    RunFolder(tmp_path).save(trainer, 0)
    return trainer


def new_worker(tmp_path, buffer, worker=0, workers=2) -> Worker:
    return Worker(WorkerSettings("", str(tmp_path), worker, workers, 5, "session"), buffer)


async def stored(buffer):
    return [item async for item in buffer.find({"task_name": TASK})]


async def test_without_weights_a_worker_waits(tmp_path, buffer):
    worker = new_worker(tmp_path, buffer)
    assert not worker._look_at_weights()


async def test_a_worker_generates_its_share_of_the_prompts(tmp_path, buffer, trainer):
    worker = new_worker(tmp_path, buffer, worker=1)
    worker._look_at_weights()
    await worker._work()
    items = await stored(buffer)
    assert [item.item[0].group_id for item in items] == [1, 3, 5, 7]
    assert [prompt_of(item.item) for item in items] == [prompt_at(5, index) for index in (1, 3, 5, 7)]
    assert {item.tags["worker"] for item in items} == {1}
    assert all(list(r.response_model_steps) == [0] * len(r.response_ids) for item in items for r in item.item)


async def test_a_new_process_goes_on_after_the_prompts_that_were_put(tmp_path, buffer, trainer):
    for _ in range(2):
        worker = new_worker(tmp_path, buffer)
        worker._look_at_weights()
        await worker._work()
    assert [item.item[0].group_id for item in await stored(buffer)] == list(range(0, 16, 2))


async def test_a_prompt_that_is_generated_twice_is_there_once(tmp_path, buffer, trainer):
    for _ in range(2):
        RunFolder(tmp_path).save_position(0, 0)  # as if it was killed before it could move on
        worker = new_worker(tmp_path, buffer)
        worker._look_at_weights()
        await worker._work()
    assert len(await stored(buffer)) == CHUNK_GROUPS


async def test_a_worker_pauses_when_enough_groups_wait(tmp_path, buffer, trainer):
    worker = new_worker(tmp_path, buffer)
    worker._look_at_weights()
    for _ in range(ENOUGH_GROUPS // CHUNK_GROUPS):
        assert await worker._work()
    assert not await worker._work()
    assert len(buffer) == ENOUGH_GROUPS


async def test_a_worker_ends_when_it_is_told_to(tmp_path, buffer, trainer):
    stopping = threading.Event()
    running = asyncio.create_task(new_worker(tmp_path, buffer).run(stopping))
    await buffer.wait_ready({TASK: CHUNK_GROUPS}, timeout=20)
    stopping.set()
    await asyncio.wait_for(running, 20)


async def test_expired_groups_are_generated_again_with_newer_weights(tmp_path, buffer, trainer):
    worker = new_worker(tmp_path, buffer)
    worker._look_at_weights()
    await worker._work()
    before = {item.key: prompt_of(item.item) for item in await stored(buffer)}
    trainer.step = STALE_THRESHOLD
    RunFolder(tmp_path).save(trainer, 0)
    expired = await buffer.refresh_staleness(
        task_stale_thresholds={TASK: STALE_THRESHOLD}, current_train_step=trainer.step + 1
    )
    assert expired == {TASK: CHUNK_GROUPS}
    worker._look_at_weights()
    await worker._work()
    after = await stored(buffer)
    assert {item.key: prompt_of(item.item) for item in after} == before
    assert {(item.status, item.staleness) for item in after} == {(Status.COMPLETED, 0)}


async def test_the_first_worker_generates_for_workers_that_are_no_more(tmp_path, buffer, trainer):
    gone = new_worker(tmp_path, buffer, worker=2, workers=3)
    gone._look_at_weights()
    await gone._work()
    await buffer.refresh_staleness(task_stale_thresholds={TASK: 1}, current_train_step=2)
    for number in (1, 0):
        worker = new_worker(tmp_path, buffer, worker=number)
        worker._look_at_weights()
        found = [index async for index, _ in worker._expired()]
        assert len(found) == (0 if number else CHUNK_GROUPS)


async def test_a_worker_loads_weights_when_it_is_too_far_behind(tmp_path, buffer, trainer):
    worker = new_worker(tmp_path, buffer, worker=1)  # a slow one: 3 steps
    steps = []
    for step in range(1, 6):
        trainer.step = step
        RunFolder(tmp_path).save(trainer, 0)
        worker._look_at_weights()
        steps.append(worker._weights[1])
    assert steps == [1, 1, 1, 4, 4]
