"""docs/frameworks/verl.md: the client of verl's message queue, over a buffer."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from replaybuf import ConfigError, ReplayBufferConfig
from replaybuf.integrations.verl import BufferQueueClient
from tests.integrations.scripts import run, start, until
from tests.integrations.test_verl_batches import batch_of, check_same

pytestmark = pytest.mark.frameworks


@pytest.fixture(autouse=True)
def _verl() -> None:
    pytest.importorskip("verl.experimental.fully_async_policy.detach_utils")


def sample_of(number: int) -> bytes:
    """A sample as verl's rollouter puts it: the rollouts of one prompt, pickled."""
    from ray import cloudpickle
    from verl.experimental.fully_async_policy.detach_utils import RolloutSample

    batch = batch_of(1, 4, seed=number)
    batch.non_tensor_batch["max_global_steps"] = batch.non_tensor_batch["min_global_steps"]
    sample = RolloutSample(batch, sample_id=f"sample_0_{number}", epoch=0, rollout_status={"count": number})
    return bytes(cloudpickle.dumps(sample))


async def test_verl_assembles_its_batch_from_what_comes_out(shared_url: str) -> None:
    from ray import cloudpickle
    from verl.experimental.fully_async_policy.detach_utils import assemble_batch_from_rollout_samples

    config = ReplayBufferConfig(url=shared_url, policy="fifo")
    pickled = cloudpickle.dumps(BufferQueueClient(config, 2))
    rollouter, trainer = cloudpickle.loads(pickled), cloudpickle.loads(pickled)
    put = [sample_of(number) for number in range(3)]
    for sample in [*put, None]:
        assert await rollouter.put_sample(sample=sample)
    assert await rollouter.get_statistics() == {
        "queue_size": 3,
        "total_produced": 3,
        "total_consumed": 0,
        "dropped_samples": 0,
    }
    found = [await trainer.get_sample() for _ in range(3)]
    assert [left for _, left in found] == [2, 1, 0]
    assert await rollouter.get_queue_size() == 0
    for (sample, _), original in zip(found, put, strict=True):
        one, other = cloudpickle.loads(sample), cloudpickle.loads(original)
        check_same(one.full_batch, other.full_batch)
        assert (one.sample_id, one.epoch, one.rollout_status) == (other.sample_id, other.epoch, other.rollout_status)
    batch = assemble_batch_from_rollout_samples([cloudpickle.loads(sample) for sample, _ in found[:2]], None, None)
    assert len(batch) == 8
    assert await trainer.get_sample() == (None, 0)
    assert await asyncio.to_thread(trainer.get_queue_size_sync) == 0
    await asyncio.gather(rollouter.shutdown(), trainer.shutdown())


TRAINER = """
import asyncio, json, sys
from ray import cloudpickle
from replaybuf.integrations.verl import BufferQueueClient
from replaybuf import ConfigError, ReplayBufferConfig

async def main():
    config, batch = ReplayBufferConfig(url=sys.argv[1], policy="fifo"), []
    client = BufferQueueClient(config, 2, seconds=15, run_id="run")
    while True:
        sample, _ = await client.get_sample()
        if batch and len(batch) % 2 == 0:
            print(json.dumps(batch), flush=True)  # trained
            batch = []
        if sample is None:
            return
        batch.append(cloudpickle.loads(sample).sample_id)
        if len(sys.argv) > 2 and batch == ["sample_0_2", "sample_0_3"]:
            print("in mid-step", flush=True)
            await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_a_trainer_that_is_killed_in_mid_step_gets_that_batch_again(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/buffer.db"
    client = BufferQueueClient(ReplayBufferConfig(url=url, policy="fifo"), 2, run_id="run")
    for number in range(6):
        await client.put_sample(sample_of(number))
    await client.put_sample(None)
    log = tmp_path / "train.py.log"

    def train(*arguments: Any) -> Any:
        (tmp_path / "train.py").write_text(TRAINER.replace("sys.argv", repr(["train.py", url, *arguments])))
        return start("train.py", tmp_path)

    trainer = train("slowly")
    until(lambda: "in mid-step" in log.read_text(), "the trainer was in its second step", trainer)
    trainer.kill()
    assert trainer.wait() == -signal.SIGKILL
    trainer = train()
    assert await asyncio.to_thread(trainer.wait, 120) == 0, log.read_text()
    trained = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("[")]
    assert sorted(name for batch in trained for name in batch) == [f"sample_0_{number}" for number in range(6)]
    await client.shutdown()


async def test_the_end_is_that_of_its_own_run_and_comes_at_every_call(shared_url: str) -> None:
    config = ReplayBufferConfig(url=shared_url, policy="fifo")
    client, resumed = BufferQueueClient(config, 2), BufferQueueClient(config, 2)
    await client.put_sample(None)
    assert [await client.get_sample() for _ in range(2)] == [(None, 0)] * 2
    waiting = asyncio.create_task(resumed.get_sample())
    assert not (await asyncio.wait([waiting], timeout=1))[0]
    await resumed.put_sample(sample_of(1))
    assert (await asyncio.wait_for(waiting, 60))[0] is not None
    await resumed.put_sample(None)
    await asyncio.gather(client.shutdown(), resumed.shutdown())


async def test_the_queue_is_emptied_by_its_own_name_only(shared_url: str) -> None:
    client = BufferQueueClient(ReplayBufferConfig(url=shared_url, policy="fifo"), 2)
    await client.put_sample(sample_of(1))
    await client.clear_queue()  # as verl does when a run fails
    assert await client.get_queue_size() == 1
    await client.delete_samples()
    assert await client.get_queue_size() == 0
    await client.shutdown()


@pytest.mark.timeout(1200)  # eight processes import verl and torch
def test_a_run_whose_trainer_is_killed_goes_on_with_its_samples(tmp_path: Path) -> None:
    """By verl's own training loop: the trainer is killed in its second step of two samples, after the rollouter's end.

    The driver fails and clears the queue. The resumed run trains what was left, and what its own rollouter makes.
    """
    url = f"sqlite:///{tmp_path}/buffer.db"
    script, trained = (
        "from tests.integrations.verl_loop import run\nrun({!r}, {!r}, {}, {}, stops={})",
        tmp_path / "trained",
    )

    def driver(name: str, *arguments: Any) -> Any:
        (tmp_path / name).write_text(script.format(url, str(tmp_path), *arguments))
        return start(name, tmp_path)

    first = driver("first.py", 1, 5, True)
    until(
        lambda: (tmp_path / "stopped").exists() and (tmp_path / "stopped").read_text(),
        "it was in its step",
        first,
        seconds=480,
    )
    os.kill(int((tmp_path / "stopped").read_text()), signal.SIGKILL)
    assert first.wait(240) == 1
    assert "Training failed" in (tmp_path / "first.py.log").read_text()
    assert trained.read_text().splitlines() == ["uid_sample_0_1 uid_sample_0_2"]

    resumed = driver("resumed.py", 6, 8, False)
    assert resumed.wait(480) == 0, (tmp_path / "resumed.py.log").read_text()
    assert sorted(trained.read_text().split()) == [f"uid_sample_0_{number}" for number in range(1, 9)]


def test_the_loop_of_the_page_prints_what_it_says(tmp_path: Path) -> None:
    run("verl", "loop.py", tmp_path)


@pytest.mark.parametrize(
    ("options", "required", "named"),
    [
        ({"max_times_sampled": 2}, 4, "max_times_sampled=2"),
        ({"rollout_type": dict}, 4, "rollout_type=<class 'dict'>"),
        ({"tensors": "numpy"}, 4, "tensors='numpy'"),
        ({}, 0, "required_samples"),
    ],
)
def test_what_a_queue_does_not_do_is_refused_by_name(options: dict[str, Any], required: int, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        BufferQueueClient(ReplayBufferConfig(url="memory://", **options), required)
