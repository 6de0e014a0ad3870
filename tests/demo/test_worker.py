"""What a rollout worker does with the buffer."""

import asyncio

import pytest

from replaybuf import ReplayBufError, Status
from replaybuf.demo.policy import answer_of, prompt_of
from replaybuf.demo.run_folder import BATCH_GROUPS, TASK, RunFolder, buffer_config
from replaybuf.demo.trainer import begin
from replaybuf.demo.worker import Engine, WorkerSettings, work
from replaybuf.produce import TrainState, publish

PROMPTS = 80


@pytest.fixture
async def buffer(shared_url):
    async with buffer_config(shared_url).build() as buffer:
        yield buffer


@pytest.fixture
async def saved(tmp_path, buffer):
    """A run of seed 5 at its beginning, with its weights in the run folder."""
    return await begin(buffer, RunFolder(tmp_path), 5, 10)


class Workers:
    """Workers as tasks of this process."""

    def __init__(self, url, folder):
        self.url, self.folder, self.stop, self.tasks = url, folder, asyncio.Event(), []

    def start(self, number=0, *, token_seconds=0.0):
        settings = WorkerSettings(self.url, str(self.folder), number, 5, PROMPTS)
        engine = Engine(5, token_seconds=token_seconds)
        self.tasks.append(asyncio.create_task(work(settings, self.stop, engine)))

    async def end(self):
        await asyncio.wait_for(asyncio.gather(*self.tasks), 20)


@pytest.fixture
async def workers(shared_url, tmp_path):
    workers = Workers(shared_url, tmp_path)
    yield workers
    for task in workers.tasks:
        task.cancel()
    await asyncio.gather(*workers.tasks, return_exceptions=True)


async def tell(buffer, step, *, finished=False):
    await publish(buffer, TrainState(step + 1, step, finished=finished))


async def completed(buffer):
    return [item async for item in buffer.find({"task_name": TASK, "status": Status.COMPLETED})]


async def test_groups_have_the_worker_and_the_digits_of_the_answer_as_tags(buffer, saved, workers):
    workers.start(3)
    await tell(buffer, 0)
    await buffer.wait_ready({TASK: 8}, timeout=20)
    for item in await completed(buffer):
        assert item.tags == {"worker": 3, "level": len(str(answer_of(prompt_of(item.item))))}


async def test_a_worker_generates_with_the_weights_that_were_saved(buffer, saved, workers, tmp_path):
    saved.step = 2
    RunFolder(tmp_path).save(saved)
    await tell(buffer, 2)
    workers.start()
    await buffer.wait_ready({TASK: 8}, timeout=20)
    assert {item.staleness for item in await completed(buffer)} == {0}
    steps = {int(step) for item in await completed(buffer) for r in item.item for step in r.response_model_steps}
    assert steps == {2}


async def test_a_worker_joins_a_run_that_was_restored(buffer, saved, workers):
    workers.start()
    await tell(buffer, 0)
    await buffer.wait_ready({TASK: 8}, timeout=20)
    await buffer.restore(0)
    assert await completed(buffer) == []
    await tell(buffer, 0)
    await buffer.wait_ready({TASK: BATCH_GROUPS}, timeout=20)
    await tell(buffer, 0, finished=True)
    await workers.end()


async def test_without_weights_a_worker_says_so(buffer, workers, tmp_path):
    await tell(buffer, 0)
    workers.start()
    with pytest.raises(ReplayBufError, match="there are no weights in"):
        await workers.end()
